"""Objects in a store: few verbs, each atomic, tried again with growing pauses.

What a server or a network does wrong for a moment (500, 503, a reset, a body cut short, silence) costs a pause and another
attempt; what will not change (no rights, no such bucket, a full disk) is reported at once. An object that is replaced while
it is read is refused. Each library of fsspec takes its credentials as its own tools do; nothing of them is in a message.
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
from gaudi_bert.common.files import store_scheme, store_url
from gaudi_bert.common.progress import Reporter
from gaudi_bert.config.places import StoreSettings

# --- the libraries that reach the stores: one optional extra each; fsspec finds any other by the scheme of the URL

EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs", "az": "azure", "abfs": "azure", "abfss": "azure"}


def _open_filesystem(scheme: str, settings: StoreSettings) -> Any:
    """fsspec's file system for URLs of `scheme`, without any cache of listings."""
    try:
        import fsspec

        return fsspec.filesystem(scheme, use_listings_cache=False, **_options(scheme, settings))
    except ImportError as error:
        extra = EXTRAS.get(scheme)
        remedy = f"run: {install_command(extra)}" if extra else "install fsspec and the library that it names for them"
        raise InputError(f"{scheme}://: nothing here reads such URLs; {remedy}") from error
    except OSError as error:  # a library that loads another, as that of hdfs:// loads Java's
        first = shorten(str(error).splitlines()[0], 160)
        raise InputError(f"{scheme}://: {first}; install what reads such URLs, or copy the data elsewhere") from error
    except ValueError as error:
        raise InputError(f"{scheme}://: {error}; use s3://, gs:// or az://, or another that fsspec knows") from error


def _options(scheme: str, settings: StoreSettings) -> dict[str, Any]:
    if EXTRAS.get(scheme) != "s3":
        return {}
    # The service's own checksums are omitted where it does not require them: private stores may not know them, and
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


def _passing_errors(scheme: str) -> tuple[type[Exception], ...]:
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


# --- all stores

Answer = TypeVar("Answer")
PART_BYTES = 16 << 20
"""Larger objects are put in parts of this size, so that no object has to fit into memory."""

_NO_CREDENTIALS = frozenset(["NoCredentialsError", "PartialCredentialsError", "DefaultCredentialsError"])
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
_PATIENCE_SECONDS = 2.0
"""How long a request is repeated before a line reports it, and between two such lines."""
_FINAL = (errno.EINVAL, errno.ENOTSUP, errno.ENAMETOOLONG)


@dataclass(frozen=True)
class ObjectInfo:
    """Size of an object and its version, "" where the store has none."""

    bytes: int
    version: str


class Objects:
    """The objects of all stores, by URL. May be used by several threads."""

    def __init__(self, settings: StoreSettings | None = None, sleep: Callable[[float], None] = time.sleep) -> None:
        self.settings = settings or StoreSettings()
        self._sleep = sleep
        self._filesystems: dict[str, Any] = {}
        self._lock = threading.Lock()
        self._shown_at = -math.inf

    def info(self, url: str | Path) -> ObjectInfo | None:
        """The object at `url`; None where there is none."""
        url = store_url(url)
        try:
            entry = self._attempt("look at", url, lambda filesystem: filesystem.info(url))
        except FileNotFoundError:
            return None
        return _info(entry) if entry["type"] == "file" else None

    def read(self, url: str | Path) -> bytes:
        """The content of a small object."""
        url = store_url(url)
        try:
            return bytes(self._attempt("read", url, lambda filesystem: filesystem.cat_file(url)))
        except FileNotFoundError as error:
            raise _missing(url) from error

    def fetch(self, url: str | Path, path: Path, known: ObjectInfo | None = None) -> None:
        """Copy an object to the local file `path`, atomically; it must still be as the store reported it (`known`)."""
        url = store_url(url)
        before = known or self.info(url)
        if before is None:
            raise _missing(url)
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.{threading.get_ident()}.tmp")
        temporary.unlink(missing_ok=True)

        def fetch_whole(filesystem: Any) -> None:  # of which the library may bring the rest of another version after a loss
            filesystem.get_file(url, str(temporary))
            after, size = _info(filesystem.info(url)), temporary.stat().st_size
            if after != before:
                sizes = f"{before.bytes:,} bytes before, {after.bytes:,} now"
                raise InputError(f"{url}: changed while it was read ({sizes}); leave it alone, and run the same again")
            if size != before.bytes:
                raise OSError(errno.EIO, f"{size:,} of {before.bytes:,} bytes came")

        try:
            self._attempt("fetch", url, fetch_whole)
            self._attempt("fetch", url, lambda _: os.replace(temporary, path))
        except FileNotFoundError as error:
            raise InputError(f"{url}: was removed while it was read; leave the data alone, and run it again") from error
        finally:
            temporary.unlink(missing_ok=True)

    def put(self, path: Path, url: str | Path) -> None:
        """Copy the local file `path` to the object `url`, atomically."""
        url = store_url(url)
        is_s3 = EXTRAS.get(store_scheme(url)) == "s3"
        options: dict[str, Any] = {"chunksize": PART_BYTES, "max_concurrency": 1} if is_s3 else {}
        self._make(url, lambda filesystem: filesystem.put_file(str(path), url, **options))

    def write(self, url: str | Path, data: bytes) -> None:
        """Write a small object; an existing one is replaced."""
        url = store_url(url)
        self._make(url, lambda filesystem: filesystem.pipe_file(url, data))

    def _make(self, url: str, request: Callable[[Any], Answer]) -> Answer:
        try:
            return self._attempt("put", url, request)
        except FileNotFoundError as error:
            raise InputError(f"{url}: cannot put: no such bucket; create it, or check the URL") from error

    def list(self, url: str | Path, *, only_here: bool = False) -> dict[str, ObjectInfo]:
        """All objects below `url`, a bucket or a prefix without a slash at its end, by their names relative to it, sorted.

        `only_here` leaves out those whose names have a slash.
        """
        url = store_url(url)
        verb = "ls" if only_here else "find"
        try:
            listing = self._attempt("list", url, lambda filesystem: getattr(filesystem, verb)(url, detail=True))
        except FileNotFoundError:
            return {}
        entries = listing.values() if isinstance(listing, dict) else listing
        start = len(re.sub(r"^[a-z][a-z0-9+.-]*://", "", url)) + 1
        infos = {
            entry["name"].removeprefix(f"{store_scheme(url)}://")[start:]: _info(entry)
            for entry in entries
            if entry["type"] == "file"
        }
        return {name: infos[name] for name in sorted(infos) if name}

    def remove(self, url: str | Path) -> None:
        """Remove an object, if it is there."""
        url = store_url(url)
        try:
            self._attempt("remove", url, lambda filesystem: filesystem.rm_file(url))
        except FileNotFoundError:
            return

    def _attempt(self, action: str, url: str, request: Callable[[Any], Answer]) -> Answer:
        """The answer to a request, repeated while a failure may be temporary."""
        scheme, settings = store_scheme(url), self.settings
        with self._lock:
            if scheme not in self._filesystems:
                self._filesystems[scheme] = _open_filesystem(scheme, settings)
        filesystem, passing = self._filesystems[scheme], _passing_errors(scheme)
        pause, attempt, waited, start = settings.first_pause_seconds, 0, 0.0, time.monotonic()
        while True:
            attempt += 1
            try:
                return request(filesystem)
            except (FileNotFoundError, InputError, FailedError):
                raise
            except PermissionError as error:
                raise FailedError(f"{url}: cannot {action}: {_reason(error)}; give this account the right to it") from error
            except passing as error:
                self._refuse_what_stays(action, url, error)
                if attempt == settings.attempts:
                    remedy = "check store.endpoint_url and store.ca_file, then run the same again"
                    raise FailedError(f"{url}: cannot {action}: {_reason(error)} ({attempt} attempts); {remedy}") from error
                waited += pause
                now = time.monotonic()
                if max(waited, now - start) >= _PATIENCE_SECONDS:
                    with self._lock:  # one line in a while for all threads
                        is_due = now - self._shown_at >= _PATIENCE_SECONDS
                        self._shown_at = now if is_due else self._shown_at
                    if is_due:
                        coming = f"attempt {attempt + 1} of {settings.attempts} in {pause:g} s"
                        Reporter().say(f"{url}: cannot {action}: {_reason(error)}; {coming}")
            self._sleep(pause)
            pause = min(2 * pause, settings.longest_pause_seconds)

    def _refuse_what_stays(self, action: str, url: str, error: BaseException) -> None:
        """Say at once what another attempt would not fix."""
        number = getattr(error, "errno", None)
        if number in _NO_SPACE:
            raise FailedError(f"{url}: cannot {action}: {_reason(error)}; free space for scratch (store.scratch)") from error
        if not _NO_CREDENTIALS.isdisjoint(kind.__name__ for kind in type(error).__mro__):
            raise FailedError(f"{url}: cannot {action}: no credentials; give them as the store's tools take them") from error
        if number in _FINAL or isinstance(error, ValueError):
            raise InputError(f"{url}: cannot {action}: {_reason(error)}; check the URL and store.endpoint_url") from error


def _info(entry: dict[str, Any]) -> ObjectInfo:
    version = entry.get("ETag") or entry.get("etag") or entry.get("generation") or entry.get("mtime") or ""
    return ObjectInfo(int(entry["size"]), str(version))


def _missing(url: str) -> InputError:
    return InputError(f"{url}: no such object, or no such bucket; check the URL")


def _reason(error: BaseException) -> str:
    return shorten(str(error) or type(error).__name__, 160)
