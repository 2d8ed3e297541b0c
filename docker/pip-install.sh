#!/bin/sh
# `pip install` with what the build machine lends for the moment of a build: a CA bundle and pip's settings. Both are BuildKit
# secrets, so neither is in any layer, and both may be absent.
set -eu
if [ -s /run/secrets/ca_bundle ]; then export PIP_CERT=/run/secrets/ca_bundle; fi
if [ -s /run/secrets/pip_conf ]; then export PIP_CONFIG_FILE=/run/secrets/pip_conf; fi
# seqeval has no wheel, and an old pip builds it in a way that fails.
export PIP_USE_PEP517="${PIP_USE_PEP517-1}"
exec "${PYTHON:-python3}" -m pip install --quiet --disable-pip-version-check --root-user-action=ignore "$@"
