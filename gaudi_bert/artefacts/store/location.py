"""How a location in an object store is written: as its URL, or as the `Path` that `pathlib` makes of it.

`Path("s3://bucket/work") / "plan.json"` is `s3:/bucket/work/plan.json`: pathlib drops one slash and keeps the rest, so a
location in a store has a name, a parent and children as every path has. Its first part, `s3:`, tells it from a path on a
disk. A folder of this machine whose name ends in a colon is written `./s3:`.
"""

from __future__ import annotations

import re
from pathlib import Path

from gaudi_bert.common.errors import InputError

_URL = re.compile(r"([a-z][a-z0-9+.-]+):/{1,2}([^/].*)", re.DOTALL)


def in_store(location: str | Path) -> bool:
    """Whether `location` is in an object store."""
    return _URL.fullmatch(str(location)) is not None


def url_of(location: str | Path) -> str:
    """The URL of a location in a store, without a slash at its end."""
    match = _URL.fullmatch(str(location))
    if match is None:
        raise InputError(f"{location}: is not an object-store URL; write for example s3://bucket/prefix")
    scheme, rest = match[1], match[2].rstrip("/")
    if "@" in rest.split("/")[0] and scheme in ("s3", "gs", "http", "https"):
        raise InputError(
            f"{scheme}://...: a URL with credentials in it; leave them out, the store's own variables or files give them"
        )
    return f"{scheme}://{rest}"


def scheme_of(location: str | Path) -> str:
    """`s3` of `s3://bucket/prefix`."""
    return url_of(location).split(":", 1)[0]


def path_below(folder: Path, text: str) -> Path:
    """`text` as a location: a URL as it is, a relative path from `folder`."""
    return Path(text) if in_store(text) else folder / text


def shown_location(location: str | Path) -> str:
    """How messages name a location: a URL, or the path."""
    return url_of(location) if in_store(location) else str(location)
