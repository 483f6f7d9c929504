#!/usr/bin/env bash
# Runs tests on an emulated 64-bit Arm processor. It checks instructions and numbers, not speed. Needs Debian or Ubuntu
# on x86-64.
#   tools/arm64.sh                       the parity tests, as a Neoverse V1 (SVE 256 bits, bf16, i8mm)
#   CPU=neoverse-n1 tools/arm64.sh ...   as an older one (dotprod only); other arguments go to pytest
#   tools/arm64.sh python -m MODULE ...  a program instead of pytest
#   tools/arm64.sh driver                the native library's test in C, also as a Cortex-A53 (NEON only), which torch does not support
# The first run installs an emulator, Debian's Python for arm64 and the pinned packages in .arm64 (or ARM64_DIR), about
# 1.3 GB. Nothing is emulated during the installation. Outside that folder, apt installs mmdebstrap and a cross
# compiler, which builds the native library in build/aarch64.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

TORCH=torch==2.10.0 # the last CPU build for 64-bit Arm Linux on PyPI, see tools/install.py
SUITE=bookworm      # its Python is 3.11, the oldest that this project takes
PYTHON=3.11
QEMU_NEEDED=8.1     # the first emulator that knows Neoverse V1
DEFAULT_TESTS=(tests/parity tests/kernels)
# These start other processes, which user-mode emulation does not follow.
for name in build levels_forced; do DEFAULT_TESTS+=("--ignore=tests/kernels/native/test_$name.py"); done
DEFAULT_TESTS+=("--deselect=tests/kernels/test_alone.py::test_the_readme_has_an_example_that_runs"
  "--deselect=tests/kernels/linear/test_torchao_linear.py::test_the_first_use_prints_nothing_and_nothing_imports_it_before")

say() { printf 'arm64: %s\n' "$*" >&2; }
die() { say "$*"; exit 1; }

main() {
  case "$(uname -m)" in
    aarch64 | arm64) die "this is a 64-bit Arm machine: make test runs everything, at full speed" ;;
  esac
  command -v apt-get >/dev/null || die "needs Debian's or Ubuntu's apt-get to fetch an emulator and a Python for arm64"
  mkdir -p "${ARM64_DIR:=.arm64}"
  dir=$(readlink -f "$ARM64_DIR")
  mirror=$(debian_mirror)
  [ -x "$dir/qemu-aarch64" ] || make_emulator
  [ -x "$dir/root/usr/bin/python$PYTHON" ] || make_root
  make_library
  [ "${1:-}" != driver ] || { run_driver; exit; }
  make_packages
  [ $# -gt 0 ] || set -- "${DEFAULT_TESTS[@]}"
  if [ "$1" = python ]; then shift; else set -- -m pytest -p no:cacheprovider "$@"; fi
  say "${CPU:-neoverse-v1} runs python $*"
  # No cache folder and no bytecode: the x86 runs of the same checkout would share them.
  exec env OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" ARMATURE_NATIVE_LIBRARY="$PWD/build/aarch64/libarmature.so" \
    PYTHONHOME="$dir/root/usr" PYTHONPATH="$dir/site-packages" PYTHONDONTWRITEBYTECODE=1 \
    "$dir/qemu-aarch64" -cpu "${CPU:-neoverse-v1}" -L "$dir/root" "$dir/root/usr/bin/python$PYTHON" "$@"
}

debian_mirror() {
  # The Debian mirror of this machine, or DEBIAN_MIRROR: Ubuntu has no address of a Debian mirror.
  local found
  found=$(grep -rhoE 'https?://[^ ]+/debian/?( |$)' /etc/apt/sources.list /etc/apt/sources.list.d 2>/dev/null | head -n 1 | tr -d ' ' || true)
  found=${DEBIAN_MIRROR:-$found}
  [ -n "$found" ] || die "no Debian mirror found: set DEBIAN_MIRROR=http://..."
  printf '%s' "$found" | sed 's:/*$::'
}

make_emulator() {
  local installed work
  installed=$(command -v qemu-aarch64-static || command -v qemu-aarch64 || true)
  if [ -n "$installed" ] && enough "$installed"; then
    ln -sf "$installed" "$dir/qemu-aarch64"
    return
  fi
  say "fetching an emulator from $SUITE-backports"
  work=$(mktemp -d)
  private_apt "$work" "$SUITE-backports"
  for package in qemu-user qemu-user-static; do # the static binary has moved from one to the other
    (cd "$work" && APT_CONFIG="$work/apt.conf" apt-get download -qq "$package:amd64" 2>/dev/null) || true
  done
  for package in "$work"/*.deb; do dpkg -x "$package" "$work/unpacked"; done
  for binary in "$work"/unpacked/usr/bin/qemu-aarch64-static "$work"/unpacked/usr/bin/qemu-aarch64; do
    if [ -f "$binary" ] && [ ! -L "$binary" ] && enough "$binary"; then
      install -m 755 "$binary" "$dir/qemu-aarch64"
      break
    fi
  done
  rm -rf "$work"
  [ -x "$dir/qemu-aarch64" ] || die "no emulator of version $QEMU_NEEDED or newer in $SUITE-backports"
}

enough() {
  local version
  version=$("$1" --version 2>/dev/null | grep -oE '[0-9]+\.[0-9]+' | head -n 1)
  [ -n "$version" ] && [ "$(printf '%s\n' "$QEMU_NEEDED" "$version" | sort -V | head -n 1)" = "$QEMU_NEEDED" ]
}

private_apt() {
  # An apt with one suite that writes only below $1.
  local keys=/usr/share/keyrings/debian-archive-keyring.gpg
  [ -f "$keys" ] || die "needs the package debian-archive-keyring"
  mkdir -p "$1"/{lists/partial,cache/archives/partial,parts}
  printf 'deb [arch=amd64 signed-by=%s] %s %s main\n' "$keys" "$mirror" "$2" >"$1/sources.list"
  cat >"$1/apt.conf" <<CONF
Dir::State::Lists "$1/lists";
Dir::Cache "$1/cache";
Dir::Etc::SourceList "$1/sources.list";
Dir::Etc::SourceParts "$1/parts";
APT::Sandbox::User "root";
CONF
  APT_CONFIG="$1/apt.conf" apt-get update -qq
}

apt_install() {
  [ "$(id -u)" = 0 ] || die "missing: sudo apt install $*"
  apt-get update -qq && apt-get install -y -qq --no-install-recommends "$@" >/dev/null
}

make_library() {
  command -v aarch64-linux-gnu-gcc >/dev/null || apt_install gcc-aarch64-linux-gnu libc6-dev-arm64-cross
  PATH="$PWD/.venv/bin:$PATH" tools/cross.sh >&2
}

run_driver() {
  PATH="$PWD/.venv/bin:$PATH" cmake --build build/aarch64 --target driver >&2
  for cpu in ${CPU:-cortex-a53 neoverse-n1 neoverse-v1}; do
    say "$cpu runs the driver"
    "$dir/qemu-aarch64" -cpu "$cpu" -L "$dir/root" build/aarch64/driver
  done
}

make_root() {
  command -v mmdebstrap >/dev/null || apt_install mmdebstrap
  say "unpacking Debian's Python $PYTHON for arm64"
  rm -rf "$dir/root"
  mmdebstrap --quiet --variant=extract --arch=arm64 --include="python$PYTHON,libpython$PYTHON-stdlib,libstdc++6,libgomp1" \
    "$SUITE" "$dir/root" "$mirror"
  # torch reads the processor's features from /sys; without it some of its products silently use slow reference code.
  for folder in sys proc; do
    rm -rf "${dir:?}/root/$folder" && ln -s "/$folder" "$dir/root/$folder"
  done
}

make_packages() {
  # Hypothesis reads the sources of all modules that are in no folder of this name, which takes minutes here.
  local site="$dir/site-packages" pins
  pins=$(grep -hE '^[a-z]' requirements/{runtime,bench,otel,transformers,dev}.txt | grep -vE '^(ruff|mypy|pre-commit|uvloop|scikit-build-core|wheel)=='; echo "$TORCH")
  [ -f "$site/.pins" ] && [ "$(cat "$site/.pins")" = "$pins" ] && return
  say "installing the pinned packages and $TORCH for arm64"
  rm -rf "$site" "$dir/site"
  # The pins are complete, so pip must not resolve: it would add the CUDA packages of this machine's architecture.
  printf '%s\n' "$pins" >"$dir/pins.txt"
  local platforms=()
  # All that the C library of bookworm, 2.36, can load: pip takes only those that are named.
  for version in {36..17}; do platforms+=(--platform "manylinux_2_${version}_aarch64"); done
  local python=.venv/bin/python
  [ -x "$python" ] || python=python3
  PIP_ROOT_USER_ACTION=ignore "$python" -m pip install -q --no-deps --target "$site" --python-version "$PYTHON" --implementation cp --only-binary=:all: \
    "${platforms[@]}" --platform manylinux2014_aarch64 -r "$dir/pins.txt"
  printf '%s' "$pins" >"$site/.pins"
}

main "$@"
