# Two images (`cpu`, and `cuda` with torch's CUDA build), two architectures. The build machine assembles everything for
# the target architecture; only the distribution's packages are unpacked in emulation. requirements/image-*.txt pin
# every file.
ARG BASE=debian:bookworm-slim

# torch's CPU build comes from its own index or from a folder: --build-context wheels=DIR --build-arg TORCH_INDEX=
FROM scratch AS wheels

# checkov:skip=CKV_DOCKER_7:BASE has its tag in its default above
FROM --platform=$BUILDPLATFORM ${BASE} AS build
SHELL ["/bin/bash", "-euo", "pipefail", "-c"]
# hadolint ignore=DL3008
RUN apt-get update -q \
    && apt-get install -y -q --no-install-recommends binutils ca-certificates gcc libc6-dev python3 python3-venv \
    && if [ "$(dpkg --print-architecture)" = amd64 ]; then \
         apt-get install -y -q --no-install-recommends gcc-aarch64-linux-gnu libc6-dev-arm64-cross; fi \
    && rm -rf /var/lib/apt/lists/* \
    && python3 -m venv /venv
WORKDIR /src
COPY requirements requirements
# Build tools of our wheel: pinned, and not part of the image.
RUN grep -hE '^(scikit-build-core|pathspec|packaging|wheel)=' requirements/runtime.txt requirements/dev.txt > /tmp/build.txt \
    && /venv/bin/pip install -q --no-cache-dir -r /tmp/build.txt -r requirements/cmake.txt
ARG TARGETARCH
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
# Which of the locks: image-amd64.txt, or with "cuda-" image-cuda-amd64.txt. What CUDA itself brings are wheels too.
ARG KIND=
# An array, since SHELL above is bash.
# hadolint ignore=SC3054
RUN --mount=type=bind,from=wheels,target=/wheels \
    machine=$([ "$TARGETARCH" = arm64 ] && echo aarch64 || echo x86_64) \
    && into=(install -q --no-cache-dir --no-compile --no-deps --only-binary=:all: --require-hashes --target=/site --python-version=3.11) \
    && for glibc in 2_5 2_12 2_17 2_18 2_24 2_25 2_27 2_28 2_31 2_34; do into+=("--platform=manylinux_${glibc}_$machine"); done \
    && into+=("--platform=manylinux2014_$machine") \
    && grep -E '^torch==' "requirements/image-$KIND$TARGETARCH.txt" > /tmp/torch.txt \
    && grep -vE '^torch==' "requirements/image-$KIND$TARGETARCH.txt" > /tmp/others.txt \
    && /venv/bin/pip "${into[@]}" -r /tmp/others.txt \
    && /venv/bin/pip "${into[@]}" --find-links=/wheels ${TORCH_INDEX:+--extra-index-url="$TORCH_INDEX"} -r /tmp/torch.txt \
    # Parts of torch that serving does not need: tests, headers and programs, except the one that torch looks for at
    # import.
    && rm -rf /site/torch/test /site/torch/include /site/torch/share /site/bin \
    && find /site/torch/bin -type f ! -name torch_shm_manager -delete \
    # Parts of CUDA's wheels that only a CUDA compiler reads.
    && { [ ! -d /site/nvidia ] || find /site/nvidia \( -name '*.a' -o -name include \) -prune -exec rm -rf {} +; } \
    && find /site/sympy /site/networkx /site/numpy /site/mpmath -type d -name tests -prune -exec rm -rf {} +
# The sources of the wheel by name: .dockerignore excludes everything else, so other changes do not rebuild it.
COPY LICENSE README.md pyproject.toml ./
COPY cmake cmake
COPY tools/wheels.py tools/
COPY app app
COPY armature armature
# A wheel holds files as they are installed. Bytecode is compiled now, because the image is read-only. It is the same
# on every architecture. (Some packages contain templates that are not valid Python.)
RUN PATH="/venv/bin:$PATH" python -m tools.wheels "$([ "$TARGETARCH" = arm64 ] && echo aarch64 || echo x86_64)" \
    && python3 -m zipfile -e dist/*.whl /site \
    && { python3 -m compileall -q -j 0 --invalidation-mode unchecked-hash -s /site -p /opt/armature /site >/dev/null || true; } \
    && chmod -R a+rX /site && find /site -exec touch --no-dereference --date=@0 {} +

FROM ${BASE} AS cpu
# hadolint ignore=DL3008
RUN apt-get update -q \
    && apt-get install -y -q --no-install-recommends python3 \
    && rm -rf /var/lib/apt/lists/* /var/log/* /var/cache/* \
    && useradd --uid 10001 --create-home --home-dir /home/armature --shell /usr/sbin/nologin armature \
    && install -d -o armature -g armature /var/cache/armature
COPY --from=build /site /opt/armature
COPY docker/healthcheck.py /opt/healthcheck.py
ENV PYTHONPATH=/opt/armature \
    PYTHONDONTWRITEBYTECODE=1 \
    ARMATURE_HOST=0.0.0.0 \
    ARMATURE_OFFLINE=on \
    ARMATURE_CACHE_DIR=/var/cache/armature
USER 10001:10001
WORKDIR /home/armature
EXPOSE 8000
VOLUME /var/cache/armature
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=10s --start-period=10m --start-interval=1s CMD ["python3", "-SE", "/opt/healthcheck.py"]
ENTRYPOINT ["python3", "-P", "-m", "app"]
CMD ["serve"]
ARG VERSION=0 REVISION=unknown
LABEL org.opencontainers.image.title="Armature" \
      org.opencontainers.image.description="Serves language models, encoders and exported programs at the speed of the machine it lands on" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"

# The same with torch's CUDA build (KIND=cuda-), for hosts with NVIDIA's container toolkit, which provides the driver's
# files. Without a GPU it serves on the CPU. Triton compiles our kernels at run time, once for each cache folder, and
# needs a C compiler and Python's headers for that.
FROM cpu AS cuda
USER 0:0
# hadolint ignore=DL3008
RUN apt-get update -q \
    && apt-get install -y -q --no-install-recommends gcc libc6-dev libpython3-dev \
    && rm -rf /var/lib/apt/lists/* /var/log/* /var/cache/apt /var/cache/debconf/*-old
ENV NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER 10001:10001
