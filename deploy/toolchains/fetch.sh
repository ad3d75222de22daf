#!/usr/bin/env bash
# Fetches the pinned release tarballs of Terra and Futhark, checks them and unpacks them: fetch.sh DIRECTORY.
# SHA256SUMS pins them. One that it does not name yet is recorded there on first use: commit that line.
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
  if grep --quiet " $name\$" "$sums"; then
    (cd "$into/downloads" && grep " $name\$" "$sums" | sha256sum --check --quiet) || {
      echo "$file is not what SHA256SUMS pins: delete it and fetch again" >&2
      exit 1
    }
  else
    (cd "$into/downloads" && sha256sum "$name") | tee -a "$sums"
    echo "recorded in $sums: compare it with the project's release page, and commit it" >&2
  fi
  tar --extract --file "$file" --directory "$into"
done
ln -sfn "../$TERRA/bin/terra" "$into/bin/terra"
ln -sfn "../$FUTHARK/bin/futhark" "$into/bin/futhark"
echo "terra and futhark are in $into/bin"
