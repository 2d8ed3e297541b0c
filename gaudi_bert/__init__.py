"""gaudi-bert packs training data, proves the packing, and trains models on the packs, on Gaudi, a GPU or a CPU.

`pack_lengths` packs sequences by their lengths and returns `PackedLengths` (`Packs` with their metrics). `pack_histogram`
packs a histogram of lengths and returns a `PackedHistogram`. They are imported when they are first used.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gaudi_bert.packing.pack_lengths import PackedHistogram, PackedLengths, Packs, pack_histogram, pack_lengths

__all__ = ["PackedHistogram", "PackedLengths", "Packs", "__version__", "pack_histogram", "pack_lengths"]

__version__ = "0.5.0"


def __getattr__(name: str) -> Any:
    """Import the packing functions when they are first used, because `import gaudi_bert` would otherwise be slow."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from gaudi_bert.packing import pack_lengths as library

    return getattr(library, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
