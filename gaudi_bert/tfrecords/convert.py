"""The stage `convert`: the packs of a finished folder in a format of other trainers, one file per shard that holds packs.

OUT holds nothing else, for those trainers read every file there. A file appears when it is complete, so that a run
that was killed continues with the next one. What a trainer looks for next to OUT, `OUT_metadata.json`, is written
when all files are there, and removed before the first is written.
"""

from __future__ import annotations

import shutil
import threading
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from gaudi_bert.artefacts.completion import Signature, begin_artefact, is_finished, settings_path
from gaudi_bert.artefacts.pack_kinds import predecessor_metadata_path
from gaudi_bert.artefacts.packed import Conversion, Metadata, PackFormatName, conversion_path
from gaudi_bert.artefacts.results import StageOutput
from gaudi_bert.artefacts.shards import check_shards
from gaudi_bert.common.arrays import AnyArray, ByteArray
from gaudi_bert.common.errors import InputError
from gaudi_bert.common.features import Axis, PackedFeature
from gaudi_bert.common.files import atomic_file, exclusive_lock, followed, in_store, open_file, url_of, write_json
from gaudi_bert.common.progress import Reporter
from gaudi_bert.tfrecords.arrays import pack_rows
from gaudi_bert.tfrecords.packed_folder import PREDECESSOR_DEPTH, ShardPaths, read_metadata
from gaudi_bert.tfrecords.random_access import RecordFiles
from gaudi_bert.tfrecords.scanning.scan import map_in_threads
from gaudi_bert.tfrecords.wire.hdf5 import require_h5py
from gaudi_bert.tfrecords.wire.schema import PackedSchema


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


# --- packs as the vendor's trainers read them
#
# HDF5 is for `run_pretraining.py` of its PyTorch BERT, TFRecords for that of its TensorFlow BERT, the predecessor (see
# `packed_folder`). Both look for `<folder>_metadata.json` next to the folder, for the number of sequences per pack. HDF5
# packs have no weights: a slot whose position and id are 0 is unused, and the vendor's reader stops at the first position
# that is 0. So packs that mask the first token of their row, or predict id 0, are refused, and the last slot is never used.

_MOST_SEQUENCES = 3
_TOP_STRATEGIES = 8
_CHUNK_BYTES = 1 << 20
_GZIP_LEVEL = 4
_SMALL = (PackedFeature.SEGMENT_IDS, PackedFeature.NEXT_SENTENCE_LABELS)
# Keys of the metadata that the PyTorch BERT's packer names in another way than the predecessor.
_PYTORCH_KEYS = {
    "sequences_dropped": "number_of_sequences_dropped",
    "num_strategies_utilized": "number_of_strategies_utilized",
    "expected_speedup": "expected_speed_up",
    "theoretical_speedup": "theoretical_speed_up",
}


def _hdf5_writer(packed: Path, metadata: Metadata, reporter: Reporter) -> Writer:
    require_h5py()
    if metadata.depth > _MOST_SEQUENCES:
        raise InputError(
            f"{packed}: depth {metadata.depth}; the mask of the vendor's model tells {_MOST_SEQUENCES} sequences of a pack "
            f"apart, not more, so HDF5 packs are of depth 1 to {_MOST_SEQUENCES}; pack with --depth {_MOST_SEQUENCES}"
        )
    survey = _survey(packed, metadata, reporter, has_weights=False)
    slots = max(metadata.max_predictions + _MOST_SEQUENCES, survey.most_masked + 1)
    sibling = {_PYTORCH_KEYS.get(key, key): value for key, value in _vendor_metadata(metadata, survey).items()}
    return Writer(partial(_write_hdf5, metadata, slots), sibling)


def _predecessor_writer(packed: Path, metadata: Metadata, reporter: Reporter) -> Writer:
    slots = metadata.max_predictions + PREDECESSOR_DEPTH
    if metadata.depth != PREDECESSOR_DEPTH or metadata.masked_slots != slots:
        raise InputError(
            f"{packed}: depth {metadata.depth} and {metadata.masked_slots} masked slots; the predecessor's trainer reads "
            f"depth {PREDECESSOR_DEPTH} and {metadata.max_predictions} + {PREDECESSOR_DEPTH} slots only; "
            f"plan with --depth {PREDECESSOR_DEPTH} --masked-slots {slots}"
        )
    return Writer(_copy, _vendor_metadata(metadata, _survey(packed, metadata, reporter, has_weights=True)))


HDF5_PACKS = PackFormat("hdf5", lambda _, stem: f"{stem}.hdf5", _hdf5_writer)
PREDECESSOR_PACKS = PackFormat("predecessor", lambda number, _: f"strategy_mixed_part_{number:05d}", _predecessor_writer)


def _copy(shard: Path, target: Path) -> None:
    with open_file(shard) as source, atomic_file(target) as handle:
        shutil.copyfileobj(source, handle, _CHUNK_BYTES)


def _write_hdf5(metadata: Metadata, slots: int, shard: Path, target: Path) -> None:
    """Write a shard as HDF5; chunks are compressed here, outside HDF5's lock, so that several files are written at once."""
    records = RecordFiles([shard], PackedSchema.of(metadata))
    packs = int(records.sizes[0])
    widths: dict[Axis, int] = {"tokens": metadata.max_sequence_length, "masked": slots, "sequences": _MOST_SEQUENCES}
    options = {"compression": "gzip", "compression_opts": _GZIP_LEVEL, "track_times": False}
    # A fixed version of the format, and no times: the same packs give the same bytes.
    image = require_h5py().File(str(target), "w", driver="core", backing_store=False, libver=("earliest", "v110"))
    with image as file:
        datasets = {}
        for feature in PackedFeature:
            if feature is not PackedFeature.MASKED_LM_WEIGHTS:
                shape, kind = (packs, widths[feature.axis]), "i1" if feature in _SMALL else "i4"
                chunk = (min(packs, _packs_at_once(metadata)), shape[1])
                datasets[feature.key] = file.create_dataset(feature.key, shape, kind, chunks=chunk, **options)
        for first, columns in _columns_of(records, metadata):
            for name, dataset in datasets.items():
                values, chunk_values = columns[name][:, : dataset.chunks[1]], np.zeros(dataset.chunks, dataset.dtype)
                chunk_values[: values.shape[0], : values.shape[1]] = values
                dataset.id.write_direct_chunk((first, 0), zlib.compress(chunk_values.tobytes(), _GZIP_LEVEL))
        file.flush()
        content = file.id.get_file_image()
    with atomic_file(target) as handle:
        handle.write(content)


def _packs_at_once(metadata: Metadata) -> int:
    return max(1, _CHUNK_BYTES // (4 * metadata.max_sequence_length))


def _columns_of(records: RecordFiles, metadata: Metadata) -> Iterator[tuple[int, dict[str, AnyArray]]]:
    packs, step = int(records.sizes[0]), _packs_at_once(metadata)
    for first in range(0, packs, step):
        numbers = np.arange(first, min(first + step, packs))
        yield first, records.read(np.zeros_like(numbers), numbers)


@dataclass
class _Survey:
    """What is known when all packs were read: how many hold sequences of these lengths, ascending; the most masked ones."""

    strategies: Counter[tuple[int, ...]] = field(default_factory=Counter)
    most_masked: int = 0


def _survey(packed: Path, metadata: Metadata, reporter: Reporter, has_weights: bool) -> _Survey:
    """Read all packs, before anything is written; without weights in the format, refuse those that need them."""
    survey, lock, shards = _Survey(), threading.Lock(), ShardPaths(packed, metadata.shard_table)

    def read(shard: Path, _: ByteArray) -> None:
        for first, columns in _columns_of(RecordFiles([shard], PackedSchema.of(metadata)), metadata):
            used = columns["masked_lm_weights"] > 0
            bad = used & ((columns["masked_lm_positions"] == 0) | (columns["masked_lm_ids"] == 0))
            if bad.any() and not has_weights:
                raise InputError(
                    f"{shard}: record {first + int(np.argmax(bad.any(axis=1)))}: predicts the first token of its row, or id "
                    "0; HDF5 packs mark unused slots with both; convert to parquet"
                )
            lengths, packs = np.unique(np.sort(pack_rows(columns).seq_lens, axis=1), axis=0, return_counts=True)
            with lock:
                survey.most_masked = max(survey.most_masked, int(used.sum(axis=1).max()))
                for row, count in zip(lengths.tolist(), packs.tolist(), strict=True):
                    survey.strategies[tuple(length for length in row if length)] += count
            task.advance(len(used))

    with reporter.task("read packs", metadata.packs, "packs") as task:
        map_in_threads(read, shards, None, lambda: np.zeros(0, np.uint8))
    return survey


def _vendor_metadata(metadata: Metadata, survey: _Survey) -> dict[str, Any]:
    """The metadata that the predecessor's trainer looks for.

    `top_8_strategies` are the lengths themselves: the vendor's numbers point into a list that it does not save.
    """
    slots = metadata.max_sequence_length
    top = sorted(survey.strategies.items(), key=lambda item: (-item[1], item[0]))[:_TOP_STRATEGIES]
    return {
        "sequences_dropped": 0,
        "num_strategies_utilized": len(survey.strategies),
        "new_number_of_samples": metadata.packs,
        "original_number_of_samples": metadata.sequences,
        "compression_ratio": 1 - metadata.packs / metadata.sequences,
        "expected_speedup": metadata.packing_factor,
        "theoretical_speedup": metadata.sequences * slots / metadata.tokens,
        "avg_seq_per_sample": metadata.packing_factor,
        "padding_tokens_original_dataset": metadata.sequences * slots - metadata.tokens,
        "padding_tokens_packed_dataset": metadata.padding_tokens,
        "packing_efficiency": metadata.efficiency,
        "top_8_strategies": [list(lengths) for lengths, _ in top],
    }
