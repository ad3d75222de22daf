# make run PROMPT="..." | make serve | make test | make lint | make bench
# Everything a target needs is set up by it; nothing is assumed but Python 3.11+, a C++ compiler, make and pip.

PYTHON ?= python3
PROMPT ?= The capital of France is
VENV := .venv
BIN := $(VENV)/bin
NATIVE := build/native
PROTOS := $(shell find protos -name '*.proto')
NATIVE_SOURCES := $(shell find native kernels -name '*.cpp' -o -name '*.h' -o -name 'CMakeLists.txt')

export PATH := $(CURDIR)/$(BIN):$(PATH)

.PHONY: setup build run serve test lint format bench clean
setup: build/venv.stamp

build/venv.stamp: pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "glmserve needs Python 3.11 or newer; set PYTHON=")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	mkdir -p build && touch $@

build/protos.stamp: build/venv.stamp $(PROTOS)
	$(BIN)/python -m grpc_tools.protoc --proto_path=protos --python_out=protos --grpc_python_out=protos --mypy_out=protos --mypy_grpc_out=protos $(PROTOS)
	touch $@

build/native.stamp: build/venv.stamp $(NATIVE_SOURCES)
	cmake -S native -B $(NATIVE) -G Ninja -DCMAKE_BUILD_TYPE=Release
	cmake --build $(NATIVE)
	cmake --install $(NATIVE) --prefix engine_worker/lib
	touch $@

build: build/protos.stamp build/native.stamp
