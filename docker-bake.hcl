// docker buildx bake            both architectures as one manifest
// docker buildx bake cpu-here   this machine's alone, into the local daemon

variable "REGISTRY" { default = "" }
variable "VERSION" { default = "dev" }
variable "REVISION" { default = "unknown" }
// A folder with torch's CPU wheel, where its own index cannot be reached.
variable "WHEELS" { default = "" }

group "default" { targets = ["cpu"] }

target "cpu" {
  target    = "cpu"
  platforms = ["linux/amd64", "linux/arm64"]
  tags      = ["${REGISTRY}armature:${VERSION}"]
  args      = { VERSION = VERSION, REVISION = REVISION, TORCH_INDEX = WHEELS == "" ? "https://download.pytorch.org/whl/cpu" : "" }
  contexts  = WHEELS == "" ? {} : { wheels = WHEELS }
}

target "cpu-here" {
  inherits  = ["cpu"]
  platforms = []
}
