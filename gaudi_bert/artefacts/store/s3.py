"""S3 in as few requests as it takes: fsspec's own verbs look twice where nothing is, and read whatever version is there.

Each request costs some milliseconds of CPU time beside the bytes that it brings.
"""

from __future__ import annotations

from typing import Any, BinaryIO

from gaudi_bert.artefacts.store.libraries import EXTRAS
from gaudi_bert.artefacts.store.location import scheme_of

__all__ = ["append_object", "is_s3", "look_at", "status_of"]

_READ_BYTES = 1 << 20


def is_s3(url: str) -> bool:
    """Whether a URL is one of S3, or of a server that speaks like it."""
    return EXTRAS.get(scheme_of(url)) == "s3"


def look_at(filesystem: Any, url: str) -> dict[str, Any]:
    """What fsspec's `info` says of an object.

    Raises:
        FileNotFoundError: there is none.
    """
    bucket, key, _ = filesystem.split_path(url)
    if not key:
        raise FileNotFoundError(url)
    answer = filesystem.call_s3("head_object", Bucket=bucket, Key=key)
    kept = {name: answer.get(name) for name in ("ETag", "LastModified")}
    return {"type": "file", "size": answer["ContentLength"], **kept}


def append_object(filesystem: Any, url: str, handle: BinaryIO, version: str) -> None:
    """Append to a file what it lacks of one version of an object; more than nothing.

    Raises:
        OSError: of status 412, where that version is no longer there; or whatever went wrong on the way, and then the file
            has what came before.
    """
    bucket, key, _ = filesystem.split_path(url)
    start = handle.tell()
    part = {"Range": f"bytes={start}-"} if start else {}
    answer = filesystem.call_s3("get_object", Bucket=bucket, Key=key, IfMatch=version, **part)
    # Loaded already where there is such a file system; 20 ms of every command's start otherwise.
    import asyncio

    asyncio.run_coroutine_threadsafe(_copy(answer["Body"], handle), filesystem.loop).result()


async def _copy(body: Any, handle: BinaryIO) -> None:
    try:
        while piece := await body.read(_READ_BYTES):
            handle.write(piece)
    finally:
        body.close()


def status_of(error: BaseException) -> int | None:
    """The status of the answer behind an error; None where none is known."""
    answer = getattr(error.__cause__, "response", None) or {}
    status: int | None = answer.get("ResponseMetadata", {}).get("HTTPStatusCode")
    return status
