"""The stage `convert`, which writes the packs of a finished folder as HDF5 files for Habana's PyTorch BERT.

Each shard that contains packs becomes one HDF5 file in the folder OUT. OUT contains no other files, because Habana's trainer
reads every file in it. A file appears only when it is complete, so that a run that was killed continues with the next file.
The trainer also reads `OUT_metadata.json` next to OUT. It is removed before the first HDF5 file is written, and written
after the last one.
"""

from __future__ import annotations

import os
import threading
import time
import zlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from gaudi_bert.artefacts.completion import (
    Signature,
    begin_artefact_unless_finished,
    check_output_path,
    is_artefact_finished,
    settings_path,
)
from gaudi_bert.artefacts.packed import Conversion, PackedTotals, RecordManifest, RecordMetadata, conversion_summary_path
from gaudi_bert.artefacts.results import StageOutput
from gaudi_bert.artefacts.shards import Shard, compute_file_identity
from gaudi_bert.common.arrays import AnyArray, ByteArray
from gaudi_bert.common.errors import FailedError, InputError
from gaudi_bert.common.features import Axis, PackedFeature
from gaudi_bert.common.files import atomic_file, exclusive_lock, get_store_url, is_in_store, resolve_links, write_json
from gaudi_bert.common.processor import map_in_threads
from gaudi_bert.common.progress import Reporter
from gaudi_bert.packs.verify import PackedFolder
from gaudi_bert.tfrecords.random_access import RecordFiles, ShardPaths
from gaudi_bert.tfrecords.wire.hdf5 import require_h5py
from gaudi_bert.tfrecords.wire.schema import PackedSchema
from gaudi_bert.tfrecords.wire.values import compute_packed_table_columns

_MAX_SEQUENCES = 3
_REPORTED_STRATEGIES = 8
_CHUNK_BYTES = 1 << 20
_GZIP_LEVEL = 4
_ONE_BYTE_FEATURES = (PackedFeature.SEGMENT_IDS, PackedFeature.NEXT_SENTENCE_LABELS)


def convert_to_hdf5(
    packed: Path, out: Path, *, reporter: Reporter, overwrite: bool = False, workers: int | None = None
) -> StageOutput[Conversion]:
    """Convert a finished packed folder to HDF5 files. All packs are read and checked before the first file is written.

    Args:
        packed: The packed folder, on this machine.
        out: The folder to write. If it contains the finished result of the same packs, nothing is done.
        reporter: Receives progress and messages.
        overwrite: Replace the result of other packs.
        workers: The number of threads, or None for the default.

    Returns:
        The number of files, packs and sequences.

    Raises:
        InputError: A folder is a URL, `out` contains `packed` or files of something else, h5py is missing, or HDF5 cannot
            represent the packs.
        FailedError: The packed folder differs from its manifests.
    """
    started = time.monotonic()
    _check_folders(packed, out)
    metadata = RecordMetadata.read(packed)
    final, sibling = conversion_summary_path(out), out.parent / f"{out.name}_metadata.json"
    signature = Signature("convert", {"to": "hdf5"}, {"packs": metadata.compute_packs_sha256()})
    if is_artefact_finished(out, final, signature):
        reporter.say(f"{out}: the result exists already, so there is nothing to do")
        return StageOutput(Conversion.read(final), skipped=True)
    check_output_path(out, final, signature.stage, overwrite)
    if os.path.lexists(sibling) and not settings_path(out, final).exists():
        raise InputError(
            f"{sibling}: the file exists already, but was not written by `gaudi-bert convert`; choose another output folder"
        )
    require_h5py()
    strategies, max_masked_count = _check_all_packs(packed, metadata, reporter, workers)
    slots = max(metadata.max_predictions + _MAX_SEQUENCES, max_masked_count + 1)
    with exclusive_lock(final, str(out)):
        begin_artefact_unless_finished(out, final, signature, overwrite)
        sibling.unlink(missing_ok=True)
        table = metadata.shard_table
        shards = [path for path, packs in zip(ShardPaths(packed, table), table.packs.tolist(), strict=True) if packs]
        with reporter.task("convert", metadata.packs, "packs") as task:

            def convert_shard(shard: Path, _: ByteArray) -> None:
                """Convert one shard, unless an earlier run has already written its HDF5 file."""
                target = out / f"{shard.stem}.hdf5"
                if not target.exists():
                    _write_hdf5_shard(metadata, slots, shard, target)
                task.advance(metadata.packs / len(shards))

            list(map_in_threads(convert_shard, shards, workers, lambda: np.zeros(0, np.uint8)))
        write_json(sibling, _build_habana_metadata(metadata, strategies))
        content = Conversion(format="hdf5", files=len(shards), packs=metadata.packs, sequences=metadata.sequences)
        content.write(final)
    return StageOutput(content, seconds=round(time.monotonic() - started, 3))


def _check_folders(packed: Path, out: Path) -> None:
    """Check that the packed folder and the output folder are local, and that the output folder does not contain the packed
    folder.

    Raises:
        InputError: One of the folders is a URL, or `out` is the packed folder or contains it.
    """
    for location in (packed, out):
        if is_in_store(location):
            raise InputError(
                f"{get_store_url(location)}: only local folders can be converted; copy the packed folder to this machine, "
                "and pass a local output folder"
            )
    if resolve_links(out) in (resolve_links(packed), *resolve_links(packed).parents):
        raise InputError(f"{out}: the output folder must not contain the packed folder; choose another output folder")


# --- the HDF5 packs that Habana's trainer reads
#
# `run_pretraining.py` of Habana's PyTorch BERT reads the number of sequences per pack from `<folder>_metadata.json` next to
# the folder. HDF5 packs have no weights. A masked slot whose position and id are 0 is unused, and the trainer stops
# at the first position that is 0. Therefore packs that mask the first token of their row or predict id 0 are rejected, and
# the last slot of every pack stays unused.


def _write_hdf5_shard(metadata: RecordMetadata, slots: int, shard: Path, target: Path) -> None:
    """Write the packs of one shard to an HDF5 file. The file appears only when it is complete.

    HDF5 has a global lock, and holding it during compression would limit all threads to one core. Therefore the chunks are
    compressed by `zlib` and written directly.

    Args:
        metadata: The metadata of the packed folder.
        slots: The number of masked slots of a pack in the HDF5 file.
        shard: The shard to read.
        target: The HDF5 file to write.
    """
    records = RecordFiles([shard], PackedSchema.from_sizes(metadata))
    packs = int(records.record_counts[0])
    widths: dict[Axis, int] = {"tokens": metadata.max_sequence_length, "masked": slots, "sequences": _MAX_SEQUENCES}
    options = {"compression": "gzip", "compression_opts": _GZIP_LEVEL, "track_times": False}
    # Specify the version of the HDF5 format and store no timestamps, so that the same packs always produce the same bytes.
    image = require_h5py().File(str(target), "w", driver="core", backing_store=False, libver=("earliest", "v110"))
    with image as file:
        datasets = {}
        for feature in PackedFeature:
            if feature is not PackedFeature.MASKED_LM_WEIGHTS:
                shape, kind = (packs, widths[feature.axis]), "i1" if feature in _ONE_BYTE_FEATURES else "i4"
                chunk = (min(packs, _packs_per_chunk(metadata)), shape[1])
                datasets[feature.key] = file.create_dataset(feature.key, shape, kind, chunks=chunk, **options)
        for first, columns in _read_packs_in_batches(records, metadata):
            for name, dataset in datasets.items():
                values, chunk_values = columns[name][:, : dataset.chunks[1]], np.zeros(dataset.chunks, dataset.dtype)
                chunk_values[: values.shape[0], : values.shape[1]] = values
                dataset.id.write_direct_chunk((first, 0), zlib.compress(chunk_values.tobytes(), _GZIP_LEVEL))
        file.flush()
        content = file.id.get_file_image()
    with atomic_file(target) as handle:
        handle.write(content)


def _packs_per_chunk(metadata: RecordMetadata) -> int:
    """Return the number of packs in an HDF5 chunk, which is also the batch size for reading and writing packs."""
    return max(1, _CHUNK_BYTES // (4 * metadata.max_sequence_length))


def _read_packs_in_batches(records: RecordFiles, metadata: RecordMetadata) -> Iterator[tuple[int, dict[str, AnyArray]]]:
    """Read the packs of one shard in batches, and yield (index of the first pack, feature arrays by name) for each batch."""
    packs, step = int(records.record_counts[0]), _packs_per_chunk(metadata)
    for first in range(0, packs, step):
        numbers = np.arange(first, min(first + step, packs))
        yield first, records.read_records(np.zeros_like(numbers), numbers)


def _check_all_packs(
    packed: Path, metadata: RecordMetadata, reporter: Reporter, workers: int | None
) -> tuple[Counter[tuple[int, ...]], int]:
    """Read all packs, check that HDF5 can represent them, and return statistics of their sequence lengths and masked
    positions.

    Args:
        packed: The packed folder.
        metadata: The metadata of the folder.
        reporter: Receives progress.
        workers: The number of threads, or None for the default.

    Returns:
        (the number of packs for each tuple of ascending sequence lengths, the largest number of masked positions in a pack).

    Raises:
        InputError: The packs contain more than three sequences, mask the first token of a row, or predict id 0.
        FailedError: The folder differs from its manifests or its metadata.
    """
    if metadata.depth > _MAX_SEQUENCES:
        raise InputError(
            f"{packed}: HDF5 packs must contain at most {_MAX_SEQUENCES} sequences, because the attention mask of Habana's"
            f" model supports no more, but the depth is {metadata.depth}; pack again with --depth {_MAX_SEQUENCES}"
        )
    strategies: Counter[tuple[int, ...]] = Counter()
    masked, lock = [0], threading.Lock()
    folder, sums, shards = PackedFolder(packed, metadata, RecordManifest), PackedTotals(), list[Shard]()
    folder.check_file_list()
    for manifest in folder.read_manifests():
        sums.add_group(manifest, metadata.groups[manifest.group].manifest_crc32c)
        shards += manifest.shards
    stated_totals = sums.to_metadata_fields(metadata.max_sequence_length, metadata.lower_bound)
    folder.check_metadata(metadata.model_copy(update={**stated_totals, "input_files": len(sums.input_names)}))

    def check_shard(stated_shard: Shard, _: ByteArray) -> None:
        """Check one shard, and add its packs to the statistics of sequence lengths and masked positions."""
        shard = packed / stated_shard.name
        if compute_file_identity(shard).crc32c != stated_shard.crc32c:
            raise FailedError(f"{shard}: the CRC-32C of the shard differs from the manifest of its group; {metadata.remedy}")
        for first, columns in _read_packs_in_batches(RecordFiles([shard], PackedSchema.from_sizes(metadata)), metadata):
            used = columns["masked_lm_weights"] > 0
            is_unrepresentable = used & ((columns["masked_lm_positions"] == 0) | (columns["masked_lm_ids"] == 0))
            if is_unrepresentable.any():
                record = first + int(np.argmax(is_unrepresentable.any(axis=1)))
                raise InputError(
                    f"{shard}: record {record}: the pack masks the first token of its row or predicts id 0, and HDF5 packs"
                    " cannot represent either; mask other tokens, and pack again"
                )
            lengths, packs = np.unique(
                np.sort(compute_packed_table_columns(columns)["seq_lens"], axis=1), axis=0, return_counts=True
            )
            with lock:
                masked.append(int(used.sum(axis=1).max()))
                for row, count in zip(lengths.tolist(), packs.tolist(), strict=True):
                    strategies[tuple(length for length in row if length)] += count
            task.advance(len(used))

    with reporter.task("read packs", metadata.packs, "packs") as task:
        list(map_in_threads(check_shard, shards, workers, lambda: np.zeros(0, np.uint8)))
    return strategies, max(masked)


def _build_habana_metadata(metadata: RecordMetadata, strategies: Counter[tuple[int, ...]]) -> dict[str, Any]:
    """Return the content of `OUT_metadata.json`, the file that Habana's trainer reads next to the HDF5 folder.

    `top_8_strategies` contains the sequence lengths of the eight most frequent strategies. A strategy is the combination of
    sequence lengths in a pack. The vendor's own files contain indices here, but the list to which they refer is not stored.
    """
    row_length = metadata.max_sequence_length
    top = sorted(strategies.items(), key=lambda item: (-item[1], item[0]))[:_REPORTED_STRATEGIES]
    return {
        "number_of_sequences_dropped": 0,
        "number_of_strategies_utilized": len(strategies),
        "new_number_of_samples": metadata.packs,
        "original_number_of_samples": metadata.sequences,
        "compression_ratio": 1 - metadata.packs / metadata.sequences,
        "expected_speed_up": metadata.packing_factor,
        "theoretical_speed_up": metadata.sequences * row_length / metadata.tokens,
        "avg_seq_per_sample": metadata.packing_factor,
        "padding_tokens_original_dataset": metadata.sequences * row_length - metadata.tokens,
        "padding_tokens_packed_dataset": metadata.padding_tokens,
        "packing_efficiency": metadata.efficiency,
        "top_8_strategies": [list(lengths) for lengths, _ in top],
    }
