"""How the environment of a process names an object store and grants access to it.

Only names are here. Values go from process to process, and into no file.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from typing import NamedTuple
from urllib.parse import urlsplit

from gaudi_bert.config.places import StoreSettings

CREDENTIALS = ("AWS_*", "AZURE_*", "GOOGLE_*")
"""What ranks on other pods get of the launcher's environment; `stop_ranks` writes out the names that exist."""


class _StoreTools(NamedTuple):
    """What the tools of a store take from a machine.

    `prefixes` are those of the names of its variables, `files` those variables that name a file; its own tools keep log-ins
    in `folder`, below the home folder.
    """

    prefixes: tuple[str, ...]
    files: tuple[str, ...]
    folder: str


_AWS_FILES = ("AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE", "AWS_CA_BUNDLE", "AWS_WEB_IDENTITY_TOKEN_FILE")
_S3 = _StoreTools(("AWS_",), _AWS_FILES, ".aws")
_GCS = _StoreTools(("GOOGLE_", "CLOUDSDK_"), ("GOOGLE_APPLICATION_CREDENTIALS",), ".config/gcloud")
_AZURE = _StoreTools(("AZURE_",), ("AZURE_FEDERATED_TOKEN_FILE",), ".azure")
STORE_TOOLS: Mapping[str, _StoreTools] = {
    **dict.fromkeys(("s3", "s3a"), _S3),
    **dict.fromkeys(("gs", "gcs"), _GCS),
    **dict.fromkeys(("az", "abfs", "abfss"), _AZURE),
}

# fsspec's own settings, for stores of every kind, and the way out of a network that has one.
_OF_ALL = ("FSSPEC_",)
_PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY")


def store_variables(scheme: str, environment: Mapping[str, str]) -> dict[str, str]:
    """What of `environment` the library for URLs of `scheme` reads."""
    prefixes = (*_OF_ALL, *(STORE_TOOLS[scheme].prefixes if scheme in STORE_TOOLS else ()))
    return {name: value for name, value in environment.items() if name.startswith(prefixes) or name.upper() in _PROXIES}


def loopback_endpoint(settings: StoreSettings, environment: Mapping[str, str]) -> str | None:
    """The address of the S3 server, where that is this machine's own loopback."""
    url = settings.endpoint_url or environment.get("AWS_ENDPOINT_URL_S3") or environment.get("AWS_ENDPOINT_URL")
    host = urlsplit(url or "").hostname or ""
    try:
        return url if ipaddress.ip_address(host).is_loopback else None
    except ValueError:
        return url if host == "localhost" or host.endswith(".localhost") else None
