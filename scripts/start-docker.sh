#!/usr/bin/env bash
# Makes Docker ready on a Debian machine that has none, as root: installs it from Debian, starts the daemon without an init system,
# and makes the base image gaudi-bert-base of Debian 12 by debootstrap, so that nothing comes from a registry of images.
# Prints one loud line and ends with exit code 75 where a daemon cannot run.
# Usage: scripts/start-docker.sh FOLDER       FOLDER keeps the daemon's log and its process id, if it was started here
#   GAUDI_BERT_CACHE   a folder that may be there the next time: keeps the base image's files
set -euo pipefail
folder=$1
cache=${GAUDI_BERT_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/gaudi-bert}
base=gaudi-bert-base:bookworm
mkdir -p "$folder"

unable() {
  echo "SKIPPED: NO CONTAINER RUNS HERE: $1" >&2
  exit 75
}

answers() { /usr/bin/docker info >"$folder/docker-info.log" 2>&1 && ! grep -q '^ERROR' "$folder/docker-info.log"; }

if ! command -v dockerd >/dev/null || ! command -v debootstrap >/dev/null || ! command -v iptables >/dev/null; then
  [ "$(id -u)" = 0 ] || unable "Docker is not installed, and only root can install it"
  { apt-get update && apt-get install -y --no-install-recommends docker.io debootstrap iptables; } \
    >"$folder/apt.log" 2>&1 || unable "docker.io, debootstrap and iptables cannot be installed: $(tail -n 1 "$folder/apt.log")"
fi

if ! answers; then
  [ "$(id -u)" = 0 ] || unable "the Docker daemon does not run, and only root can start it"
  setsid dockerd >"$folder/dockerd.log" 2>&1 &
  echo $! >"$folder/dockerd.pid"
  for _ in $(seq 60); do
    if answers; then break; fi
    kill -0 "$(cat "$folder/dockerd.pid")" 2>/dev/null || unable "dockerd does not start: $(tail -n 1 "$folder/dockerd.log")"
    sleep 1
  done
  answers || unable "dockerd does not answer: $(tail -n 1 "$folder/dockerd.log")"
fi

/usr/bin/docker image inspect "$base" >/dev/null 2>&1 && exit 0
tar=$cache/debian-bookworm-python.tar
if [ ! -s "$tar" ]; then
  [ "$(id -u)" = 0 ] || unable "$base is not there, and only root can make it"
  root=$folder/rootfs
  rm -rf "$root"
  debootstrap --variant=minbase --include=python3,python3-venv,ca-certificates bookworm "$root" >"$folder/debootstrap.log" 2>&1 ||
    unable "debootstrap failed: $(tail -n 1 "$folder/debootstrap.log")"
  # What debootstrap took from this machine stays here: its name, its name servers.
  mkdir -p "$cache" 2>/dev/null || tar=$folder/base.tar
  tar -C "$root" --exclude='./var/cache/apt/archives/*.deb' --exclude='./var/lib/apt/lists/*_*' --exclude='./usr/share/doc/*' \
    --exclude='./usr/share/man/*' --exclude='./usr/share/locale/*' --exclude=./etc/hostname --exclude=./etc/resolv.conf \
    --exclude='./var/log/*' -cf "$tar.part" .
  mv "$tar.part" "$tar"
  rm -rf "$root"
fi
/usr/bin/docker import --change 'CMD ["bash"]' "$tar" "$base" >/dev/null
