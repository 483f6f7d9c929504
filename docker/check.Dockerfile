# Runs `make test` and `make test-all` with the packages of the image, as the image's user and without a network:
# `docker buildx bake check`. Only the exit status is kept. `image` is the target cpu-here (docker-bake.hcl).
# checkov:skip=CKV_DOCKER_7:image is a target of docker-bake.hcl, built beside this one
# checkov:skip=CKV_DOCKER_2:nothing is ever run from this
# hadolint ignore=DL3006
FROM image
USER 0:0
SHELL ["/bin/bash", "-euo", "pipefail", "-c"]
# hadolint ignore=DL3008
RUN apt-get update -q \
    && apt-get install -y -q --no-install-recommends binutils gcc libc6-dev make python3-venv \
    && rm -rf /var/lib/apt/lists/* \
    && install -d -o armature -g armature /src /venv
USER 10001:10001
WORKDIR /src
COPY --chown=10001:10001 requirements requirements
# The image's packages are on PYTHONPATH, where pip finds them in the required versions. Only the tests' packages are
# installed here.
RUN python3 -m venv /venv && /venv/bin/pip install -q --no-cache-dir -r requirements/dev.txt -r requirements/cmake.txt
COPY --chown=10001:10001 . .
# Tell make that the environment is complete, so that the packages of the image are tested.
RUN --network=none touch /venv/runtime.stamp /venv/bench.stamp /venv/dev.stamp && make test VENV=/venv \
    && make test-all VENV=/venv
