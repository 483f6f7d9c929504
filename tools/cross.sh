#!/usr/bin/env bash
# Builds the native library for 64-bit Arm Linux on another machine: build/aarch64/libarmature.so. Installs nothing,
# and prints the packages that are missing.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

missing=()
command -v cmake >/dev/null || missing+=(cmake)
command -v ninja >/dev/null || command -v make >/dev/null || missing+=(ninja-build)
command -v aarch64-linux-gnu-gcc >/dev/null || missing+=(gcc-aarch64-linux-gnu libc6-dev-arm64-cross)
if [ ${#missing[@]} -gt 0 ]; then
  echo "cross: missing packages; on Debian or Ubuntu: sudo apt install ${missing[*]}" >&2
  exit 1
fi
command -v ninja >/dev/null && export CMAKE_GENERATOR=Ninja
cmake -S armature_kernels/csrc -B build/aarch64 -DCMAKE_TOOLCHAIN_FILE="$PWD/cmake/aarch64-linux-gnu.cmake" "$@" | grep -- '^-- Armature'
cmake --build build/aarch64
