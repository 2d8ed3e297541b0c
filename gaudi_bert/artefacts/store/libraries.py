"""The libraries that reach the stores, one optional extra each; fsspec finds any other by the scheme of the URL."""

from __future__ import annotations

from typing import Any

from gaudi_bert.common.errors import InputError
from gaudi_bert.config import StoreSettings

__all__ = ["no_credentials", "open_filesystem", "passing_errors"]

EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs", "az": "azure", "abfs": "azure", "abfss": "azure"}


def open_filesystem(scheme: str, settings: StoreSettings) -> Any:
    """fsspec's file system for URLs of `scheme`, without any cache of listings.

    Raises:
        InputError: its library is not installed, or there is none.
    """
    try:
        import fsspec

        return fsspec.filesystem(scheme, use_listings_cache=False, **_options(scheme, settings))
    except ImportError as error:
        extra = EXTRAS.get(scheme)
        remedy = f"pip install 'gaudi-bert[{extra}]'" if extra else "install fsspec and the library that it names for them"
        raise InputError(f"{scheme}://: nothing here reads such URLs; {remedy}") from error
    except ValueError as error:
        raise InputError(f"{scheme}://: {error}; use s3://, gs:// or az://, or another that fsspec knows") from error


def _options(scheme: str, settings: StoreSettings) -> dict[str, Any]:
    if EXTRAS.get(scheme) != "s3":
        return {}
    # The service's own checksums are left out where it does not ask for them: stores of one's own may not know them, and
    # every size and CRC-32C is checked by us.
    config = {
        "connect_timeout": settings.timeout_seconds,
        "read_timeout": settings.timeout_seconds,
        "max_pool_connections": 4 * settings.connections,
        "request_checksum_calculation": "when_required",
        "response_checksum_validation": "when_required",
        "retries": {"max_attempts": 0},
    }
    options: dict[str, Any] = {"config_kwargs": config}
    if settings.endpoint_url:
        options["endpoint_url"] = settings.endpoint_url
    if settings.ca_file:
        options["client_kwargs"] = {"verify": settings.ca_file}
    return options


def passing_errors(scheme: str) -> tuple[type[Exception], ...]:
    """The errors after which the same request may succeed: those of the operating system and of the store's library."""
    errors: tuple[type[Exception], ...] = (OSError, TimeoutError, EOFError, ValueError)
    if EXTRAS.get(scheme) == "s3":
        from botocore.exceptions import BotoCoreError, ClientError

        errors += (BotoCoreError, ClientError)
    elif EXTRAS.get(scheme) == "gcs":
        from gcsfs.retry import HttpError
        from google.auth.exceptions import GoogleAuthError

        errors += (HttpError, GoogleAuthError)
    elif EXTRAS.get(scheme) == "azure":
        from azure.core.exceptions import AzureError

        errors += (AzureError,)
    if EXTRAS.get(scheme):
        from aiohttp import ClientError as ConnectionProblem

        errors += (ConnectionProblem,)
    return errors


def no_credentials(error: BaseException) -> bool:
    """Whether the store's library found nothing to sign requests with."""
    names = {kind.__name__ for kind in type(error).__mro__}
    return bool(names & {"NoCredentialsError", "PartialCredentialsError", "DefaultCredentialsError"})
