#!/usr/bin/env bash
# Builds runtime, kernels and their tests with a sanitizer and runs them: `native/sanitize.sh address` (AddressSanitizer,
# leaks and UBSan) or `native/sanitize.sh thread`. `make sanitize` sets up what it needs and runs both.
set -euo pipefail
cd "$(dirname "$0")/.."
PATH="$PWD/.venv/bin:$PATH"
case "${1:-}" in
  address) sanitizers=address,undefined targets=(all) ;;
  thread) sanitizers=thread targets=(glm_engine_test glm_fault_table) ;;
  *) echo "usage: native/sanitize.sh address|thread" >&2; exit 2 ;;
esac
build="$PWD/build/sanitize-$1"

cmake -S native -B "$build" -G Ninja -DGLM_SANITIZE="$sanitizers" -DCMAKE_BUILD_TYPE=Sanitize -DCMAKE_CXX_FLAGS_SANITIZE=-O1
cmake --build "$build" --target "${targets[@]}"
ctest --test-dir "$build" --output-on-failure

# Python itself has leaks and races that are not ours, so its part looks for memory errors only.
if [ "$1" = address ]; then
  export GLM_LIBRARY_DIR="$build/lib" GLM_KERNELS_CPU="$build/lib/libglm_kernels_cpu.so"
  export ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1 UBSAN_OPTIONS=print_stacktrace=1
  LD_PRELOAD="$(c++ -print-file-name=libasan.so) $(c++ -print-file-name=libubsan.so)" \
    python -m pytest -p no:cacheprovider tests/native tests/kernels -k "not portable"
fi
