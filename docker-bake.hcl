// docker buildx bake            both architectures as one manifest
// docker buildx bake cpu-here   this machine's alone, into the local daemon
// docker buildx bake cuda       the same with torch's CUDA build, for hosts with an NVIDIA GPU (3 GB to pull; docs/hardware.md)
// docker buildx bake check      format, lint, types and tests beside what the image has; leaves nothing behind
// docker buildx bake release    both, under all tags of a version, with what is needed to check where it came from (docs/releasing.md)

variable "REGISTRY" { default = "" }
variable "VERSION" { default = "dev" }
variable "REVISION" { default = "unknown" }
// RFC 3339, of the commit: the same commit has the same labels whenever it is built.
variable "CREATED" { default = "1970-01-01T00:00:00Z" }
// Where the sources are, for the label by which registries show them.
variable "SOURCE" { default = "" }
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

target "cuda" {
  inherits = ["cpu"]
  target   = "cuda"
  tags     = ["${REGISTRY}armature:${VERSION}-cuda"]
  // PyPI has that build: torch's own index is not asked.
  args     = { KIND = "cuda-", TORCH_INDEX = "" }
  labels   = { "org.opencontainers.image.title" = "Armature for NVIDIA GPUs" }
}

target "check" {
  dockerfile = "docker/check.Dockerfile"
  contexts   = { image = "target:cpu-here" }
  output     = ["type=cacheonly"]
}

// A version that is not the last word (0.2.0rc1) has its own tag alone.
target "release" {
  inherits = ["cpu"]
  tags = concat(["${REGISTRY}armature:${VERSION}"], length(regexall("^[0-9]+[.][0-9]+[.][0-9]+$", VERSION)) == 0 ? [] : [
    "${REGISTRY}armature:${regex("^[0-9]+[.][0-9]+", VERSION)}",
    "${REGISTRY}armature:latest",
  ])
  labels = {
    "org.opencontainers.image.created" = CREATED
    "org.opencontainers.image.source"  = SOURCE
  }
  attest = ["type=provenance,mode=max", "type=sbom"]
}
