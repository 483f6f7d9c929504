// docker buildx bake            both architectures as one manifest
// docker buildx bake cpu-here   this machine's alone, into the local daemon
// docker buildx bake cuda       both with torch's CUDA build, for hosts with an NVIDIA GPU (3 GB; docs/hardware.md)
// docker buildx bake check      format, lint, types and tests with the image's packages; leaves nothing behind
// docker buildx bake release    both, under all tags of a version, with provenance attestations (docs/releasing.md)

variable "REGISTRY" { default = "" }
variable "VERSION" { default = "dev" }
variable "REVISION" { default = "unknown" }
// RFC 3339, the time of the commit, so that the same commit always has the same labels.
variable "CREATED" { default = "1970-01-01T00:00:00Z" }
// The address of the sources, for the label that registries show.
variable "SOURCE" { default = "" }
// A folder with torch's CPU wheels for the architectures that are built, for machines that cannot reach torch's own index:
// WHEELS=/FOLDER docker buildx bake --allow=fs.read=/FOLDER cpu-here --load
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
  // PyPI has the CUDA build, so torch's own index is not needed.
  args     = { KIND = "cuda-", TORCH_INDEX = "" }
  labels   = { "org.opencontainers.image.title" = "Armature for NVIDIA GPUs" }
}

target "check" {
  dockerfile = "docker/check.Dockerfile"
  contexts   = { image = "target:cpu-here" }
  output     = ["type=cacheonly"]
}

// A pre-release (0.2.0rc1) only gets its own tag.
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
