"""Length histograms of real data sets that ship with the package and are known by name (`wikipedia-512`).

Those of Wikipedia (128 to 2048 tokens) and of SQuAD (384) are the published ones of the packing paper (Krell et al., 2021).
"""

from __future__ import annotations

import difflib
import glob
from pathlib import Path

from gaudi_bert.common.errors import InputError

__all__ = ["find_shipped_histogram", "shipped_histograms"]

_FOLDER = Path(__file__).resolve().parents[2] / "histograms"


def shipped_histograms() -> dict[str, Path]:
    """The histogram.json of each name, in the order of the data sets and their lengths."""
    paths = _FOLDER.glob("*.json")
    return {path.stem: path for path in sorted(paths, key=lambda path: (path.stem.rpartition("-")[0], _length(path)))}


def find_shipped_histogram(source: str | Path) -> Path | None:
    """The histogram that `source` names; None where `source` is a path or a pattern of the user's own.

    Raises:
        InputError: it is neither a name nor a path, but nearly a name.
    """
    name, shipped = str(source), shipped_histograms()
    if Path(name).exists() or glob.has_magic(name):
        return None
    if name in shipped:
        return shipped[name]
    near = difflib.get_close_matches(name, shipped, n=1, cutoff=0.7)
    if near:
        raise InputError(
            f"{name}: there is no such file or folder; did you mean `{near[0]}`, a histogram that ships with gaudi-bert? "
            f"(known: {', '.join(shipped)})"
        )
    return None


def _length(path: Path) -> int:
    return int(path.stem.rpartition("-")[2])
