#!/usr/bin/env bash
# Fetches the pinned release tarballs of Terra and Futhark, checks them and unpacks them: fetch.sh DIRECTORY.
# Nothing is unpacked whose SHA-256 is not the one in SHA256SUMS.
set -euo pipefail

TERRA=terra-Linux-x86_64-cc543db
FUTHARK=futhark-0.25.37-linux-x86_64
sources=(
  "https://github.com/terralang/terra/releases/download/release-1.2.0/$TERRA.tar.xz"
  "https://github.com/diku-dk/futhark/releases/download/v0.25.37/$FUTHARK.tar.xz"
)

into=${1:?usage: fetch.sh DIRECTORY}
sums=$(cd "$(dirname "$0")" && pwd)/SHA256SUMS
[ "$(uname -sm)" = "Linux x86_64" ] || { echo "no release tarballs for $(uname -sm): build Terra and Futhark from source" >&2; exit 1; }
mkdir -p "$into/downloads" "$into/bin"
for url in "${sources[@]}"; do
  name=${url##*/}
  file=$into/downloads/$name
  [ -f "$file" ] || { curl --fail --location --silent --show-error --output "$file.part" "$url" && mv "$file.part" "$file"; } || {
    echo "cannot fetch $url: on a machine without open internet put $name into $into/downloads by hand" >&2
    exit 1
  }
  pinned=$(grep " $name\$" "$sums") || {
    echo "$sums does not pin $name: add the SHA-256 from its release page, as a line 'SUM  $name'" >&2
    exit 1
  }
  (cd "$into/downloads" && sha256sum --check --quiet <<< "$pinned") || {
    echo "$file is not what $sums pins: delete it and fetch again" >&2
    exit 1
  }
  tar --extract --file "$file" --directory "$into"
done
ln -sfn "../$TERRA/bin/terra" "$into/bin/terra"
ln -sfn "../$FUTHARK/bin/futhark" "$into/bin/futhark"
echo "terra and futhark are in $into/bin"
