#!/usr/bin/env bash
# Builds container images, tagged with the project's version.
# Usage: scripts/make-images.sh [data] [train-cpu] [train-cpu-pytorch] [train-gaudi] [train-gaudi-pytorch]
#   (default: data train-cpu)
#   BASE_IMAGE    instead of the base that the Dockerfile names (with gaudi: the vendor's image for the engine)
#   REGISTRY      put before the names, e.g. registry.example/team
#   PIP_CERT      a CA bundle that pip needs here, and
#   PIP_CONFIG_FILE  pip's settings: both are lent to the build and are in no layer
set -euo pipefail
cd "$(dirname "$0")/.."

# Only BuildKit can lend secrets. Clients before 23 have it inside; later ones need the plugin buildx.
find_docker() {
  local candidate version
  for candidate in ${DOCKER:-} docker /usr/bin/docker; do
    version=$("$candidate" version --format '{{.Client.Version}}' 2>/dev/null || true)
    if [ -n "$version" ] && { [ "${version%%.*}" -lt 23 ] || "$candidate" buildx version >/dev/null 2>&1; }; then
      echo "$candidate"
      return 0
    fi
  done
  return 1
}

if ! docker=$(find_docker); then
  echo "no Docker that can build: install it with its plugin buildx, start its daemon, and see \`docker version\`" >&2
  exit 2
fi
version=$(sed -n 's/^__version__ = "\(.*\)"$/\1/p' gaudi_bert/__init__.py)
if [ $# -eq 0 ]; then set -- data train-cpu; fi

for image in "$@"; do
  case "$image" in
    data | train-cpu | train-cpu-pytorch | train-gaudi | train-gaudi-pytorch) ;;
    *)
      echo "no such image: $image; choose from data, train-cpu, train-cpu-pytorch, train-gaudi, train-gaudi-pytorch" >&2
      exit 2
      ;;
  esac
done
for image in "$@"; do
  tag="${REGISTRY:+$REGISTRY/}gaudi-bert-$image:$version"
  file=$image
  arguments=()
  # On CPUs, both engines have one Dockerfile.
  if [ "$image" = train-cpu-pytorch ]; then file=train-cpu arguments=(--build-arg ENGINE=pytorch); fi
  DOCKER_BUILDKIT=1 "$docker" build --progress=plain \
    ${BASE_IMAGE:+--build-arg BASE_IMAGE="$BASE_IMAGE"} --build-arg VERSION="$version" "${arguments[@]}" \
    ${PIP_CERT:+--secret id=ca_bundle,src="$PIP_CERT"} \
    ${PIP_CONFIG_FILE:+--secret id=pip_conf,src="$PIP_CONFIG_FILE"} \
    --file "docker/$file.Dockerfile" --tag "$tag" .
  bytes=$("$docker" image inspect --format '{{.Size}}' "$tag")
  echo "$tag: $((bytes / 1000000)) MB"
done
