#!/bin/sh
# Installs PyTorch's build for CPUs: a wheel in /opt/torch-wheels where the base image has one, or what uv finds. pip alone would take
# the build for GPUs, which is several GB. Usage: install-torch CONSTRAINTS
set -eu
if [ -s /run/secrets/ca_bundle ]; then export SSL_CERT_FILE=/run/secrets/ca_bundle; fi
if ls /opt/torch-wheels/torch-*.whl >/dev/null 2>&1; then
  exec pip-install --constraint "$1" --find-links /opt/torch-wheels torch
fi
pip-install --constraint "$1" uv
python3 -m uv pip install --quiet --torch-backend cpu --constraint "$1" torch
python3 -m pip uninstall --quiet --yes uv
