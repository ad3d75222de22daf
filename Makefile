# make run PROMPT="..." | make serve | make test | make lint | make bench | make sanitize | make cuda
# Each target sets up all it needs; nothing is assumed but Python 3.11 or newer, a C++ compiler, make and pip.

PYTHON ?= python3
PROMPT ?= The capital of France is
VENV := .venv
BIN := $(VENV)/bin
PROTOS := $(shell find protos -name '*.proto')
NATIVE_SOURCES := $(shell find native kernels tests/native -name '*.cpp' -o -name '*.h' -o -name '*.map' -o -name 'CMakeLists.txt')
CXX_FORMATTED := $(shell find native kernels tests -name '*.cpp' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh')
SHELL_SCRIPTS := .ci/run $(shell find native deploy -name '*.sh')
MODEL := smollm2-135m-glm
CUDA_TOOLKIT := $(CURDIR)/build/cuda-toolkit/nvidia/cu13
CUDA_PACKAGES := nvidia-cuda-nvcc==13.0.88 nvidia-cuda-crt==13.0.88 nvidia-nvvm==13.0.88 \
  nvidia-cuda-runtime==13.0.96 nvidia-cuda-cccl==13.0.85 nvidia-nvtx==13.0.85

export PATH := $(CURDIR)/$(BIN):$(PATH)

.PHONY: audit bench-peers fuzz hostile soak build cuda futhark toolchains release run serve test lint format bench bench-serving sanitize proto-baseline clean

build/venv.stamp: pyproject.toml
	$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("glmserve needs Python 3.11 or newer: make PYTHON=...")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	mkdir -p build && touch $@

build/protos.stamp: build/venv.stamp $(PROTOS)
	python -m grpc_tools.protoc --proto_path=protos --python_out=protos --grpc_python_out=protos \
	  --mypy_out=quiet:protos --mypy_grpc_out=quiet:protos $(PROTOS)
	touch $@

build/native.stamp: build/venv.stamp $(NATIVE_SOURCES)
	cmake -S native -B build/native -G Ninja -DCMAKE_BUILD_TYPE=Release
	cmake --build build/native
	cmake --install build/native --prefix engine_worker/lib
	touch $@

# The CUDA kernel table, for every GPU that it supports. Needs no GPU; nvcc is the machine's, or else NVIDIA's packages of it.
cuda: build/cuda-toolkit.stamp
	PATH="$$PATH:$(CUDA_TOOLKIT)/bin" LIBRARY_PATH="$(CUDA_TOOLKIT)/lib:$$LIBRARY_PATH" \
	  cmake -S kernels/cuda -B build/cuda -G Ninja -DCMAKE_BUILD_TYPE=Release
	LIBRARY_PATH="$(CUDA_TOOLKIT)/lib:$$LIBRARY_PATH" cmake --build build/cuda
	cmake --install build/cuda --prefix engine_worker/lib

# The portable kernel table, by Futhark: for the CPU, or FUTHARK_BACKEND=cuda, hip or opencl. Futhark is on PATH, or `make toolchains` fetches it.
FUTHARK_BACKEND ?= multicore
futhark: build/venv.stamp
	cmake -S kernels/futhark -B build/futhark-$(FUTHARK_BACKEND) -G Ninja -DGLM_FUTHARK_BACKEND=$(FUTHARK_BACKEND)
	cmake --build build/futhark-$(FUTHARK_BACKEND)
	cmake --install build/futhark-$(FUTHARK_BACKEND) --prefix engine_worker/lib

build/cuda-toolkit.stamp: build/venv.stamp
	command -v nvcc > /dev/null || python -m pip install --quiet --no-deps --target build/cuda-toolkit $(CUDA_PACKAGES)
	touch $@

# Terra and Futhark, which nothing else needs: release tarballs, pinned. Needs open internet.
toolchains:
	deploy/toolchains/fetch.sh build/toolchains

build/model.stamp: build/venv.stamp build/native.stamp build/protos.stamp
	glm model fetch $(MODEL)
	touch $@

build: build/protos.stamp build/native.stamp build/model.stamp

run: build
	glm generate --prompt "$(PROMPT)"

serve: build
	glm serve

test: build
	pytest

lint: build/protos.stamp
	ruff check .
	ruff format --check .
	mypy protos/glmserve/service router engine_worker deploy tests
	lint-imports
	clang-format --dry-run --Werror $(CXX_FORMATTED)
	shellcheck $(SHELL_SCRIPTS)
	buf lint
	buf breaking --against protos/baseline.json

format: build/venv.stamp
	ruff check --fix-only --quiet .
	ruff format .
	clang-format -i $(CXX_FORMATTED)

# AddressSanitizer, leaks and UBSan over the native tests and the kernels; ThreadSanitizer over the engine's threads.
sanitize: build/protos.stamp
	native/sanitize.sh address
	native/sanitize.sh thread

# Fifty times the examples of `make test`, and new ones each time unless FUZZ_SEED is given.
FUZZ_FACTOR ?= 50
fuzz: build
	GLM_FUZZ_FACTOR=$(FUZZ_FACTOR) pytest --timeout 0 $(if $(FUZZ_SEED),--hypothesis-seed=$(FUZZ_SEED)) tests/chaos/test_fuzz_router.py tests/chaos/test_fuzz_worker.py \
	  tests/chaos/test_fuzz_files.py tests/unit/test_checkpoint_fuzz.py

# 20,000 short requests with random cancels; says what memory they cost.
soak: build
	python -m tests.chaos.soak

# This engine and llama.cpp in turns. The first time it builds llama.cpp, which takes some ten minutes of one core.
bench-peers: build
	python -m tests.bench.peers --plot

# What serving costs on this machine: the router alone, load beyond capacity, and workers and routers that die.
bench-serving: build
	python -m tests.bench.router_throughput
	python -m tests.bench.overload
	python -m tests.bench.failover

# The hostile clients, with 10,000 idle connections instead of 2,000: needs a limit of 11,000 open files.
hostile: build
	@test "$$(ulimit -Hn)" = unlimited || test "$$(ulimit -Hn)" -ge 11000 || \
	  { echo "make hostile: the limit of open files is $$(ulimit -Hn); 11000 are needed" >&2; exit 1; }
	ulimit -n "$$(ulimit -Hn)" && GLM_IDLE_CONNECTIONS=10000 pytest tests/chaos/test_hostile_clients.py

# Known vulnerabilities of what is installed. Asks an online database, and fails if that cannot be reached.
audit: build/venv.stamp
	pip freeze --exclude-editable > build/installed.txt
	pip-audit --vulnerability-service osv --strict --disable-pip --no-deps --progress-spinner off --requirement build/installed.txt

# Wheels, SBOM and checksums of HEAD in dist/; fails if two builds of it differ.
release: build
	deploy/release/build.sh

bench: build
	python -m tests.bench.cpu

# The API as it was last released: `buf breaking` holds every change against it.
proto-baseline: build/venv.stamp
	buf build --output protos/baseline.json

clean:
	rm -rf build engine_worker/lib
	find protos -name '*_pb2*.py*' -delete
