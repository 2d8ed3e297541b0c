"""gaudi-bert: pack training data, prove the packing, and train on it, on Gaudi or on a CPU.

The packer as a library is `pack_lengths`, which returns `PackedLengths` (`Packs` with their figures), and `pack_histogram`,
which returns a `PackedHistogram`; they are loaded at their first use.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gaudi_bert.packing.pack_lengths import PackedHistogram, PackedLengths, Packs, pack_histogram, pack_lengths

__all__ = ["PackedHistogram", "PackedLengths", "Packs", "__version__", "pack_histogram", "pack_lengths"]

__version__ = "0.5.0"


def __getattr__(name: str) -> Any:
    """Load the library when it is used, so that what does not need it starts at once."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from gaudi_bert.packing import pack_lengths as library

    return getattr(library, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
