#!/usr/bin/env bash
# Builds the release into dist/: a wheel for any machine (all a router needs), one with the runtime and the CPU table, their
# SBOM and checksums. Each wheel is built twice, in two directories: different bytes are an error.
# CUDA is not in them: `make cuda` builds it where the GPUs are.
set -euo pipefail
cd "$(dirname "$0")/../.."

[ -z "$(git status --porcelain --untracked-files=no)" ] || { echo "uncommitted changes: a release is of a commit" >&2; exit 1; }
dist=$PWD/dist
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
export SOURCE_DATE_EPOCH
SOURCE_DATE_EPOCH=$(git log -1 --format=%ct)

# wheel DIRECTORY any|native: the wheel of HEAD, built in DIRECTORY.
wheel() {
  mkdir -p "$1"
  git archive HEAD | tar --extract --directory "$1"
  (
    cd "$1"
    find protos -name '*.proto' -exec \
      python -m grpc_tools.protoc --proto_path=protos --python_out=protos --grpc_python_out=protos {} +
    if [ "$2" = native ]; then
      export CXXFLAGS="-ffile-prefix-map=$PWD=/glmserve"
      cmake -S native -B build/native -G Ninja -DCMAKE_BUILD_TYPE=Release > build.log
      cmake --build build/native >> build.log
      cmake --install build/native --prefix engine_worker/lib --strip >> build.log
    fi
    python -m pip wheel --quiet --no-deps --wheel-dir wheels .
  )
}

mkdir -p "$dist"
rm -f "$dist"/*
for kind in any native; do
  for try in first second-and-longer; do wheel "$scratch/$kind/$try" "$kind"; done
  first=$(echo "$scratch/$kind/first/wheels"/*.whl)
  second=$(echo "$scratch/$kind/second-and-longer/wheels"/*.whl)
  cmp "$first" "$second" || { echo "$(basename "$first") is not reproducible: two builds differ" >&2; exit 1; }
  cp "$first" "$dist"
done
# Of what a user installs, not of the tools here.
python -m venv --without-pip "$scratch/installed"
python -m pip --python "$scratch/installed/bin/python" install --quiet "$dist"/*-any.whl
cyclonedx-py environment --output-reproducible --of JSON --pyproject pyproject.toml --output-file "$dist/sbom.cdx.json" "$scratch/installed"
(cd "$dist" && sha256sum ./*.whl sbom.cdx.json > SHA256SUMS && cat SHA256SUMS)
