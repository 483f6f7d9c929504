#!/usr/bin/env bash
# Install the wheels of a lock into /site for the image's architecture (TARGETARCH), and compile their bytecode, because
# the image is read-only. The Dockerfile runs it: install_wheels.sh LOCK [INDEX]. INDEX is an index beside PyPI; /wheels
# may hold wheels that no index has.
set -euo pipefail
lock=$1 index=${2:-}
machine=$([ "$TARGETARCH" = arm64 ] && echo aarch64 || echo x86_64)

# pip retries for minutes before it says that an index does not answer, so one short question comes first.
answers() { # PACKAGE OPTION...: asks pip for the versions of a package, once, for at most 10 seconds
  /venv/bin/pip index versions "$@" --timeout 10 --retries 0 >/tmp/answer 2>&1 || { tail -n 3 /tmp/answer; return 1; }
}
if [ -n "$index" ] && ! answers torch --index-url "$index"; then
  echo "The index $index does not answer within 10 s. It has torch's CPU build. Without it give a folder with that wheel:"
  echo "  WHEELS=/FOLDER docker buildx bake --allow=fs.read=/FOLDER cpu-here --load"
  exit 1
fi >&2
if ! answers wheel; then
  echo "PyPI, or the index of pip's configuration, does not answer within 10 s. The other wheels come from there."
  exit 1
fi >&2

into=(install --no-cache-dir --no-compile --no-deps --only-binary=:all: --require-hashes --target=/site --python-version=3.11)
for glibc in 2_5 2_12 2_17 2_18 2_24 2_25 2_27 2_28 2_31 2_34; do into+=("--platform=manylinux_${glibc}_$machine"); done
into+=("--platform=manylinux2014_$machine")
[ ! -d /wheels ] || into+=(--find-links=/wheels)
/venv/bin/pip "${into[@]}" ${index:+--extra-index-url="$index"} -r "$lock"

# Parts that serving does not need. Of torch: tests, headers and programs, except the one that it looks for at import.
rm -rf /site/bin /site/torch/{test,include,share}
[ ! -d /site/torch/bin ] || find /site/torch/bin -type f ! -name torch_shm_manager -delete
# Of CUDA's wheels: what only a CUDA compiler reads.
[ ! -d /site/nvidia ] || find /site/nvidia \( -name '*.a' -o -name include \) -prune -exec rm -rf {} +
# What torch's own tests share, and torchao's CUDA kernels, which no product here calls.
if [ -d /site/torch/testing/_internal ]; then
  rm -rf /site/torch/testing/_internal/opinfo
  find /site/torch/testing/_internal -name 'common_*' ! -name common_dtype.py -delete
fi
rm -f /site/torchao/_C_*.so
# Of the others: what builds packages, units of physics, lexers of other languages, AVIF (pictures of that format are
# refused), tests, and stubs for type checkers.
rm -rf /site/{setuptools,_distutils_hack} /site/sympy/physics /site/PIL/_avif*.so /site/pillow.libs/libavif-*
[ ! -d /site/pygments/lexers ] || find /site/pygments/lexers -name '[a-z]*.py' ! -name python.py -delete
for package in sympy networkx numpy mpmath; do
  [ ! -d "/site/$package" ] || find "/site/$package" -type d -name tests -prune -exec rm -rf {} +
done
find /site -name '*.pyi' -delete

# Bytecode is the same on every architecture. Some packages contain templates that are not valid Python. transformers has
# 550 folders of models (60 MB of bytecode), and a server reads one or two of them.
python3 -m compileall -q -j 0 -x '/transformers/models/' --invalidation-mode unchecked-hash -s /site -p /opt/armature /site >/dev/null || true
chmod -R a+rX /site
find /site -exec touch --no-dereference --date=@0 {} +
