"""What earlier versions had: commands, options and parameters, each with what to do instead."""

from __future__ import annotations

from gaudi_bert.common.errors import InputError

_PACK_FIRST = "pack the records first, with `gaudi-bert pack RECORDS --out PACKED`, and give PACKED"
_INSTEAD = {
    "compare": "`gaudi-bert estimate SOURCE` prints our packs and the proven minimum, docs/compare.md those of other tools",
    "write --parquet": "write the packs first, then `gaudi-bert convert PACKED --to parquet --out DIR`",
    "write --predecessor-metadata": "write the packs first, then `gaudi-bert convert PACKED --to predecessor --out DIR`",
    "train --on-the-fly": _PACK_FIRST,
    "pack --keep-together": "join the rows that belong together into one row before packing",
    "PackedDataset(plan=)": _PACK_FIRST,
}


def refuse_removed(name: str) -> None:
    """Refuse `name` (`COMMAND`, `COMMAND --option` or `Class(parameter=)`) if it was removed; any other passes."""
    if name in _INSTEAD:
        raise InputError(f"{name} was removed: {_INSTEAD[name]}")
