#!/usr/bin/env bash
# Brings kustomize to .tools/, for machines that have neither kubectl nor kustomize. It is taken out of Debian 13's package; the
# machine's own Debian mirror and keys are used, and nothing is installed on the machine.
set -euo pipefail
cd "$(dirname "$0")/.."

if command -v kubectl >/dev/null || command -v kustomize >/dev/null || [ -x .tools/usr/bin/kustomize ]; then
  echo "kustomize: already here"
  exit 0
fi

mirror=$(sed -n 's/^URIs: *\([^ ]*\/debian\)\/*$/\1/p; s/^deb \(\[[^]]*\] \)\?\([^ ]*\/debian\)\/* .*/\2/p' \
  /etc/apt/sources.list /etc/apt/sources.list.d/*.list /etc/apt/sources.list.d/*.sources 2>/dev/null | head -n 1 || true)
if [ -z "$mirror" ]; then
  echo "kustomize: this machine names no Debian mirror in /etc/apt; install kubectl or kustomize by hand" >&2
  exit 1
fi

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
mkdir -p "$folder/lists/partial" "$folder/cache/archives/partial"
echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $mirror trixie main" >"$folder/sources.list"
apt=(apt-get -qq -o APT::Sandbox::User=root -o "Dir::Etc::SourceList=$folder/sources.list" -o Dir::Etc::SourceParts=/dev/null
  -o "Dir::State::Lists=$folder/lists" -o "Dir::Cache=$folder/cache")
"${apt[@]}" update
(cd "$folder" && "${apt[@]}" download kustomize)
mkdir -p .tools
dpkg-deb --extract "$folder"/kustomize_*.deb .tools
.tools/usr/bin/kustomize version
