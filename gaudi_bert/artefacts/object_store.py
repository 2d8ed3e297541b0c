"""A client for object stores, whose few operations are atomic and retried with growing pauses.

Temporary failures of a server or a network (status 500 or 503, a reset connection, a truncated body, a timeout) are retried.
Permanent failures (missing permissions, no such bucket, a full disk) are reported immediately. Reading an object fails if
the object is replaced during the read. The fsspec library for a store finds its credentials in the same way as the store's
own tools, and no message contains credentials.
"""

from __future__ import annotations

import errno
import math
import os
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from gaudi_bert.common.errors import FailedError, InputError, install_command, shorten
from gaudi_bert.common.files import get_store_scheme, get_store_url
from gaudi_bert.common.progress import Reporter
from gaudi_bert.config.places import StoreSettings

# --- the libraries for the stores
#
# The libraries for common stores are optional extras of this package. fsspec finds other libraries by their URL scheme.

EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs", "az": "azure", "abfs": "azure", "abfss": "azure"}


def _open_filesystem(scheme: str, settings: StoreSettings) -> Any:
    """Open the fsspec file system for a URL scheme. It does not cache listings.

    Raises:
        InputError: A library is missing or cannot be loaded, or the scheme is unknown.
    """
    try:
        import fsspec

        return fsspec.filesystem(scheme, use_listings_cache=False, **_filesystem_options(scheme, settings))
    except ImportError as error:
        extra = EXTRAS.get(scheme)
        remedy = f"run {install_command(extra)}" if extra else "install fsspec and its library for these URLs"
        raise InputError(f"{scheme}://: no library for such URLs is installed; {remedy}") from error
    except OSError as error:  # a shared library is missing, such as the JVM for hdfs://
        first = shorten(str(error).splitlines()[0], 160)
        raise InputError(f"{scheme}://: {first}; install the missing library, or copy the data to another store") from error
    except ValueError as error:
        raise InputError(f"{scheme}://: {error}; use s3://, gs://, az://, or another scheme that fsspec supports") from error


def _filesystem_options(scheme: str, settings: StoreSettings) -> dict[str, Any]:
    """Return the arguments for opening the fsspec file system of a URL scheme. Only S3 needs arguments."""
    if EXTRAS.get(scheme) != "s3":
        return {}
    # Some private stores do not support the checksums of the S3 protocol, so only send them if they are required. This
    # package checks the sizes and CRC-32Cs of its files itself.
    options: dict[str, Any] = {
        "config_kwargs": {
            "connect_timeout": settings.timeout_seconds,
            "read_timeout": settings.timeout_seconds,
            "max_pool_connections": 4 * settings.connections,
            "request_checksum_calculation": "when_required",
            "response_checksum_validation": "when_required",
            "retries": {"max_attempts": 0},
        }
    }
    if settings.endpoint_url:
        options["endpoint_url"] = settings.endpoint_url
    if settings.ca_file:
        options["client_kwargs"] = {"verify": settings.ca_file}
    return options


def _retryable_errors(scheme: str) -> tuple[type[Exception], ...]:
    """Return the exception types after which a failed request to a store may be retried.

    They are errors of the operating system and of the store's library. Some of these errors are permanent nevertheless,
    which `_raise_if_permanent` checks.
    """
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


# --- all stores

Answer = TypeVar("Answer")
# Objects that are larger than this are uploaded in parts of this size, so that no object has to fit into memory.
PART_BYTES = 16 << 20

_CREDENTIAL_ERRORS = frozenset(["NoCredentialsError", "PartialCredentialsError", "DefaultCredentialsError"])
_NO_SPACE_ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
# If a request to a store still fails after this many seconds, the user is told. At least this many seconds pass between two
# such messages.
_SECONDS_UNTIL_MESSAGE = 2.0
_PERMANENT_ERRNOS = (errno.EINVAL, errno.ENOTSUP, errno.ENAMETOOLONG)


@dataclass(frozen=True)
class ObjectInfo:
    """The size and the version of an object in a store.

    Attributes:
        bytes: The size of the object.
        version: A text that changes with the content, such as its ETag. "" if the store provides none.
    """

    bytes: int
    version: str


class ObjectStore:
    """A client for the objects of all supported stores. Objects are addressed by URL. Several threads may use the same
    instance.

    Every operation retries temporary failures, and raises a FailedError if they persist or the permission is missing.

    Args:
        settings: The settings of the object store, or None for the defaults.
        sleep: Called with the length of each pause in seconds. Tests replace it.
    """

    def __init__(self, settings: StoreSettings | None = None, sleep: Callable[[float], None] = time.sleep) -> None:
        self.settings = settings or StoreSettings()
        self._sleep = sleep
        self._filesystems: dict[str, Any] = {}
        self._lock = threading.Lock()
        self._shown_at = -math.inf

    def info(self, url: str | Path) -> ObjectInfo | None:
        """Return the size and the version of an object, or None if there is no such object."""
        url = get_store_url(url)
        try:
            entry = self._retry_request("read the state of", url, lambda filesystem: filesystem.info(url))
        except FileNotFoundError:
            return None
        return _parse_object_info(entry) if entry["type"] == "file" else None

    def read(self, url: str | Path) -> bytes:
        """Return the content of a small object.

        Raises:
            InputError: There is no such object.
        """
        url = get_store_url(url)
        try:
            return bytes(self._retry_request("read", url, lambda filesystem: filesystem.cat_file(url)))
        except FileNotFoundError as error:
            raise _missing_object_error(url) from error

    def download(self, url: str | Path, path: Path, expected_state: ObjectInfo | None = None) -> None:
        """Download an object to a local file, atomically.

        Args:
            url: The object.
            path: The local file. Its folder is created if necessary.
            expected_state: The expected state of the object, or None for its current state.

        Raises:
            InputError: There is no such object, its state is not the expected one, or it changed during the download.
        """
        url = get_store_url(url)
        before = expected_state or self.info(url)
        if before is None:
            raise _missing_object_error(url)
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.{threading.get_ident()}.tmp")
        temporary.unlink(missing_ok=True)

        def fetch_whole(filesystem: Any) -> None:
            """Download the object, then check its version and its size.

            After a lost connection, the library may continue with the bytes of another version.
            """
            filesystem.get_file(url, str(temporary))
            after, size = _parse_object_info(filesystem.info(url)), temporary.stat().st_size
            if after != before:
                raise InputError(
                    f"{url}: the object changed while it was read ({before.bytes:,} bytes before, {after.bytes:,} bytes "
                    "now); do not write to it, and run the same command again"
                )
            if size != before.bytes:
                raise OSError(errno.EIO, f"received {size:,} of {before.bytes:,} bytes")

        try:
            self._retry_request("download", url, fetch_whole)
            self._retry_request("download", url, lambda _: os.replace(temporary, path))
        except FileNotFoundError as error:
            raise InputError(
                f"{url}: the object was removed while it was read; do not change the data, and run the same command again"
            ) from error
        finally:
            temporary.unlink(missing_ok=True)

    def upload(self, path: Path, url: str | Path) -> None:
        """Upload a local file to the store atomically, and replace an existing object.

        Raises:
            InputError: There is no such bucket.
        """
        url = get_store_url(url)
        options: dict[str, Any] = {}
        if EXTRAS.get(get_store_scheme(url)) == "s3":
            options = {"chunksize": PART_BYTES, "max_concurrency": 1}
        self._write_object(url, lambda filesystem: filesystem.put_file(str(path), url, **options))

    def write(self, url: str | Path, data: bytes) -> None:
        """Write a small object to the store, and replace an existing object.

        Raises:
            InputError: There is no such bucket.
        """
        url = get_store_url(url)
        self._write_object(url, lambda filesystem: filesystem.pipe_file(url, data))

    def _write_object(self, url: str, request: Callable[[Any], Answer]) -> Answer:
        """Send a request that writes an object, retry it after temporary failures, and return its result.

        Raises:
            InputError: There is no such bucket.
        """
        try:
            return self._retry_request("upload", url, request)
        except FileNotFoundError as error:
            raise InputError(f"{url}: cannot upload: the bucket does not exist; create it, or check the URL") from error

    def list(self, url: str | Path, *, direct_only: bool = False) -> dict[str, ObjectInfo]:
        """List all objects below a URL, sorted by name.

        Args:
            url: A bucket or a prefix, without a trailing slash.
            direct_only: Omit objects whose names have a slash, which are those in sub-folders.

        Returns:
            The state of each object by its name relative to the URL. Empty if there are no objects or no such bucket.
        """
        url = get_store_url(url)
        verb = "ls" if direct_only else "find"
        try:
            listing = self._retry_request("list", url, lambda filesystem: getattr(filesystem, verb)(url, detail=True))
        except FileNotFoundError:
            return {}
        entries = listing.values() if isinstance(listing, dict) else listing
        start = len(re.sub(r"^[a-z][a-z0-9+.-]*://", "", url)) + 1
        infos = {
            entry["name"].removeprefix(f"{get_store_scheme(url)}://")[start:]: _parse_object_info(entry)
            for entry in entries
            if entry["type"] == "file"
        }
        return {name: infos[name] for name in sorted(infos) if name}

    def remove(self, url: str | Path) -> None:
        """Remove an object if it exists."""
        url = get_store_url(url)
        try:
            self._retry_request("remove", url, lambda filesystem: filesystem.rm_file(url))
        except FileNotFoundError:
            return

    def _retry_request(self, action: str, url: str, request: Callable[[Any], Answer]) -> Answer:
        """Send a request to a store, retry it after temporary failures, and return its result.

        Args:
            action: What the request does, for messages.
            url: The object.
            request: Performs the request with the file system of the store.

        Raises:
            FileNotFoundError: There is no such object or bucket.
            FailedError: The failure is permanent, or the last attempt failed.
            InputError: The request is invalid.
        """
        scheme, settings = get_store_scheme(url), self.settings
        with self._lock:
            if scheme not in self._filesystems:
                self._filesystems[scheme] = _open_filesystem(scheme, settings)
        filesystem, retryable = self._filesystems[scheme], _retryable_errors(scheme)
        pause, attempt, waited, start = settings.first_pause_seconds, 0, 0.0, time.monotonic()
        while True:
            attempt += 1
            try:
                return request(filesystem)
            except (FileNotFoundError, InputError, FailedError):
                raise
            except PermissionError as error:
                raise FailedError(
                    f"{url}: cannot {action}: {_describe_error(error)}; grant this account the permission"
                ) from error
            except retryable as error:
                self._raise_if_permanent(action, url, error)
                if attempt == settings.attempts:
                    raise FailedError(
                        f"{url}: cannot {action}: {_describe_error(error)} after {attempt} attempts; check "
                        "store.endpoint_url and store.ca_file, and run the same command again"
                    ) from error
                waited += pause
                now = time.monotonic()
                if max(waited, now - start) >= _SECONDS_UNTIL_MESSAGE:
                    with self._lock:  # print at most one such line every two seconds, whichever thread it comes from
                        is_due = now - self._shown_at >= _SECONDS_UNTIL_MESSAGE
                        self._shown_at = now if is_due else self._shown_at
                    if is_due:
                        Reporter().say(
                            f"{url}: cannot {action}: {_describe_error(error)}; attempt {attempt + 1} of "
                            f"{settings.attempts} follows in {pause:g} s"
                        )
            self._sleep(pause)
            pause = min(2 * pause, settings.longest_pause_seconds)

    def _raise_if_permanent(self, action: str, url: str, error: BaseException) -> None:
        """Raise an error if a failed request would fail again. Return normally if the request may be retried.

        Raises:
            FailedError: A disk is full or there are no credentials.
            InputError: The request is invalid.
        """
        number = getattr(error, "errno", None)
        if number in _NO_SPACE_ERRNOS:
            raise FailedError(
                f"{url}: cannot {action}: {_describe_error(error)}; free disk space, or set store.scratch to another folder"
            ) from error
        if not _CREDENTIAL_ERRORS.isdisjoint(kind.__name__ for kind in type(error).__mro__):
            raise FailedError(
                f"{url}: cannot {action}: no credentials were found; configure them as for the store's command line tools"
            ) from error
        if number in _PERMANENT_ERRNOS or isinstance(error, ValueError):
            raise InputError(
                f"{url}: cannot {action}: {_describe_error(error)}; check the URL and store.endpoint_url"
            ) from error


def _parse_object_info(entry: dict[str, Any]) -> ObjectInfo:
    """Convert an fsspec description of an object to an `ObjectInfo`."""
    version = entry.get("ETag") or entry.get("etag") or entry.get("generation") or entry.get("mtime") or ""
    return ObjectInfo(int(entry["size"]), str(version))


def _missing_object_error(url: str) -> InputError:
    """Return the error to raise if an object does not exist."""
    return InputError(f"{url}: the object or its bucket does not exist; check the URL")


def _describe_error(error: BaseException) -> str:
    """Return a short description of an exception for messages."""
    return shorten(str(error) or type(error).__name__, 160)
