# Two images (`cpu`, and `cuda` with torch's CUDA build), two architectures. The build machine assembles everything for
# the target architecture; only the distribution's packages are unpacked in emulation. requirements/image-*.txt pin
# every file. Layers are in the order of how often they change: Debian's packages, torch, the other wheels, ours. A
# changed line of ours builds, ships and pulls the last one alone.
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

# Build tools of our wheel: pinned, and not part of the image.
FROM build AS tools
COPY requirements/cmake.txt requirements/dev.txt requirements/runtime.txt requirements/
RUN grep -hE '^(scikit-build-core|pathspec|packaging|wheel)=' requirements/runtime.txt requirements/dev.txt > /tmp/build.txt \
    && /venv/bin/pip install -q --no-cache-dir -r /tmp/build.txt -r requirements/cmake.txt

# The lock in two parts, so that a change of one leaves the other's layer as it is. What CUDA itself brings are wheels
# too, and belongs to torch.
FROM build AS locks
COPY requirements requirements
ARG TARGETARCH
# Which of the locks: image-amd64.txt, or with "cuda-" image-cuda-amd64.txt.
ARG KIND=
RUN mkdir /locks && lock="requirements/image-$KIND$TARGETARCH.txt" && torch='^(torch|triton|nvidia-[^=]*|cuda-[^=]*)==' \
    && grep -E "$torch" "$lock" > /locks/torch.txt && grep -vE "$torch" "$lock" > /locks/others.txt

# Both parts are installed in the same way, for the target's architecture.
FROM build AS site
ARG TARGETARCH
COPY docker/install_wheels.sh docker/

FROM site AS torch
COPY --from=locks /locks/torch.txt /locks/
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN --mount=type=bind,from=wheels,target=/wheels \
    bash docker/install_wheels.sh /locks/torch.txt "${TORCH_INDEX}"

FROM site AS others
COPY --from=locks /locks/others.txt /locks/
RUN bash docker/install_wheels.sh /locks/others.txt

# The native library, compiled only when its own sources have changed.
FROM tools AS native
COPY cmake cmake
COPY armature_kernels/csrc armature_kernels/csrc
ARG TARGETARCH
RUN PATH="/venv/bin:$PATH" \
    && if [ "$TARGETARCH" = arm64 ] && [ "$(dpkg --print-architecture)" = amd64 ]; then \
         cross=-DCMAKE_TOOLCHAIN_FILE=/src/cmake/aarch64-linux-gnu.cmake; fi \
    && cmake -G Ninja -S armature_kernels/csrc -B /made -DCMAKE_BUILD_TYPE=Release ${cross:+"$cross"} \
    && cmake --build /made && cmake --install /made --strip --prefix /native

# The sources of the wheel by name: .dockerignore excludes everything else, so other changes do not rebuild it.
FROM tools AS ours
COPY LICENSE README.md pyproject.toml ./
COPY cmake cmake
COPY tools/wheels.py tools/
COPY app app
COPY armature armature
COPY armature_bench armature_bench
COPY armature_kernels armature_kernels
COPY --from=native /native/armature_kernels/libarmature.so /native/
ARG TARGETARCH
# A wheel holds files as they are installed. Bytecode is compiled now, because the image is read-only.
RUN PATH="/venv/bin:$PATH" SKBUILD_CMAKE_DEFINE=ARMATURE_LIBRARY=/native/libarmature.so \
      python -m tools.wheels "$([ "$TARGETARCH" = arm64 ] && echo aarch64 || echo x86_64)" \
    && python3 -m zipfile -e dist/*.whl /site \
    && python3 -m compileall -q -j 0 --invalidation-mode unchecked-hash -s /site -p /opt/armature /site \
    && chmod -R a+rX /site && find /site -exec touch --no-dereference --date=@0 {} +

FROM ${BASE} AS cpu
# hadolint ignore=DL3008
RUN apt-get update -q \
    && apt-get install -y -q --no-install-recommends python3 \
    && rm -rf /var/lib/apt/lists/* /var/log/* /var/cache/* \
    && useradd --uid 10001 --create-home --home-dir /home/armature --shell /usr/sbin/nologin armature \
    && install -d -o armature -g armature /var/cache/armature
COPY docker/healthcheck.py /opt/healthcheck.py
COPY --link --from=torch /site /opt/armature
COPY --link --from=others /site /opt/armature
COPY --link --from=ours /site /opt/armature
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
