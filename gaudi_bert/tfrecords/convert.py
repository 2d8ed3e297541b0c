"""The stage `convert`: the packs of a finished folder in a format of other trainers, one file per shard that holds packs.

OUT holds nothing else, for those trainers read every file there. A file appears when it is complete, so that a run
that was killed continues with the next one. What a trainer looks for next to OUT, `OUT_metadata.json`, is written
when all files are there, and removed before the first is written.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gaudi_bert.artefacts.completion import Signature, begin_artefact, is_finished, settings_path
from gaudi_bert.artefacts.packed import Conversion, Metadata, PackFormatName, conversion_path
from gaudi_bert.artefacts.results import StageOutput
from gaudi_bert.artefacts.store.objects import in_store, url_of
from gaudi_bert.common.arrays import ByteArray
from gaudi_bert.common.errors import InputError
from gaudi_bert.common.files import exclusive_lock, followed, write_json
from gaudi_bert.common.progress import Reporter
from gaudi_bert.tfrecords.packed_folder import ShardPaths, check_shards, predecessor_metadata_path, read_metadata
from gaudi_bert.tfrecords.scanning.scan import map_in_threads


@dataclass(frozen=True)
class Writer:
    """What writes the packs of one folder: of a shard to a file that is not there, complete or not at all.

    `sibling` is the content of `OUT_metadata.json`; None for a format without one.
    """

    write: Callable[[Path, Path], None]
    sibling: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class PackFormat:
    """A format of packs.

    Attributes:
        name: as `--to` names it.
        file_name: of the file of a shard, by the number of the file and the shard's name without its ending.
        writer_of: what writes a folder, which has this metadata; it refuses packs that the format cannot hold.
    """

    name: PackFormatName
    file_name: Callable[[int, str], str]
    writer_of: Callable[[Path, Metadata, Reporter], Writer]


def convert(
    packed: Path, out: Path, form: PackFormat, *, reporter: Reporter, overwrite: bool = False, workers: int | None = None
) -> StageOutput[Conversion]:
    """Write the packs of the finished folder `packed` into the folder `out`, in another format."""
    started = time.monotonic()
    _check_apart(packed, out)
    metadata = read_metadata(packed)
    table = metadata.shard_table
    check_shards(packed, table)
    final, sibling = conversion_path(out), predecessor_metadata_path(out)
    signature = Signature("convert", {"to": form.name}, {"packs": metadata.identity()})
    if is_finished(out, final, signature):
        reporter.say(f"{out}: already there, nothing to do")
        return StageOutput(Conversion.read(final), skipped=True)
    writer = form.writer_of(packed, metadata, reporter)
    with exclusive_lock(final, str(out)):
        if sibling.exists() and not (settings_path(out, final).exists() or overwrite):
            raise InputError(f"{sibling}: exists, and is not of {out}; choose another folder, or pass --overwrite")
        begin_artefact(out, final, signature, overwrite)
        sibling.unlink(missing_ok=True)
        shards = [path for path, packs in zip(ShardPaths(packed, table), table.packs.tolist(), strict=True) if packs]
        with reporter.task("convert", metadata.packs, "packs") as task:

            def write(number: int, _: ByteArray) -> None:
                target = out / form.file_name(number, shards[number].stem)
                if not target.exists():
                    writer.write(shards[number], target)
                task.advance(metadata.packs / len(shards))

            map_in_threads(write, range(len(shards)), workers, lambda: np.zeros(0, np.uint8))
        if writer.sibling is not None:
            write_json(sibling, writer.sibling)
        content = Conversion(format=form.name, files=len(shards), packs=metadata.packs, sequences=metadata.sequences)
        content.write(final)
    return StageOutput(content, seconds=round(time.monotonic() - started, 3))


def _check_apart(packed: Path, out: Path) -> None:
    """Refuse folders of which the one would be written over the other, and those that are not on this machine."""
    for location in (packed, out):
        if in_store(location):
            raise InputError(f"{url_of(location)}: folders of this machine are converted; copy it here, or from here, first")
    if followed(out) in (followed(packed), *followed(packed).parents):
        raise InputError(f"{out}: holds the packs that are to be converted; choose another folder")
