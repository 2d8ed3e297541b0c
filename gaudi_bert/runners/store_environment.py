"""How the environment says where an object store is and who may use it: what containers and ranks elsewhere need of it.

Only names are here. Values go from process to process, and into no file.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from typing import NamedTuple
from urllib.parse import urlsplit

from gaudi_bert.config import StoreSettings

__all__ = ["CREDENTIALS", "OF_STORES", "OfStore", "loopback_endpoint", "variables_of"]

CREDENTIALS = ("AWS_*", "AZURE_*", "GOOGLE_*")
"""What ranks on other pods get of the launcher's environment; `stop_ranks` writes out the names that are there."""


class OfStore(NamedTuple):
    """What the tools of a store take from a machine.

    Attributes:
        prefixes: of the names of its variables.
        files: those of its variables that name a file.
        folder: where its own tools keep log-ins, below the home folder.
    """

    prefixes: tuple[str, ...]
    files: tuple[str, ...]
    folder: str


_AWS_FILES = ("AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE", "AWS_CA_BUNDLE", "AWS_WEB_IDENTITY_TOKEN_FILE")
_S3 = OfStore(("AWS_",), _AWS_FILES, ".aws")
_GCS = OfStore(("GOOGLE_", "CLOUDSDK_"), ("GOOGLE_APPLICATION_CREDENTIALS",), ".config/gcloud")
_AZURE = OfStore(("AZURE_",), ("AZURE_FEDERATED_TOKEN_FILE",), ".azure")
OF_STORES: Mapping[str, OfStore] = {
    **dict.fromkeys(("s3", "s3a"), _S3),
    **dict.fromkeys(("gs", "gcs"), _GCS),
    **dict.fromkeys(("az", "abfs", "abfss"), _AZURE),
}

# fsspec's own settings, for stores of every kind, and the way out of a network that has one.
_OF_ALL = ("FSSPEC_",)
_PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY")


def variables_of(scheme: str, environment: Mapping[str, str]) -> dict[str, str]:
    """What of `environment` the library for URLs of `scheme` reads."""
    prefixes = (*_OF_ALL, *(OF_STORES[scheme].prefixes if scheme in OF_STORES else ()))
    return {name: value for name, value in environment.items() if name.startswith(prefixes) or name.upper() in _PROXIES}


def loopback_endpoint(settings: StoreSettings, environment: Mapping[str, str]) -> str | None:
    """The address of the S3 server, where that is this machine's own loopback."""
    url = settings.endpoint_url or environment.get("AWS_ENDPOINT_URL_S3") or environment.get("AWS_ENDPOINT_URL")
    host = urlsplit(url or "").hostname or ""
    try:
        return url if ipaddress.ip_address(host).is_loopback else None
    except ValueError:
        return url if host == "localhost" or host.endswith(".localhost") else None
