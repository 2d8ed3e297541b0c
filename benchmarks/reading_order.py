"""How well batches are mixed in reading order, over the first 1,000 batches.

    python benchmarks/reading_order.py [FOLDER ...] [--epochs 5]

The number of sequences in a batch varies; the ratio is its standard deviation over that of independent draws (1: as if packs
were drawn at random). Order 1 read all shards side by side; it lives here alone, as a plain loop. Order 4 is of streams,
which differs where there are more shards than streams. Without a FOLDER, the Wikipedia sample is split into 40 files, in its
own order and sorted by length (groups that differ as much as they can), and packed a file to a group, 8 shards each.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
from measuring import show

from gaudi_bert.artefacts.stage_run import StageRun
from gaudi_bert.common.arrays import IntArray, permutation, random_words
from gaudi_bert.common.progress import Reporter
from gaudi_bert.config.sections import PackingSettings
from gaudi_bert.reading.global_order import WINDOW_PACKS, GlobalOrder, regions_of_groups, streams_of
from gaudi_bert.tfrecords.pack import pack
from gaudi_bert.tfrecords.packed_folder import open_shards, read_metadata
from gaudi_bert.tfrecords.wire.example import decode_example
from gaudi_bert.tfrecords.wire.framing import frame, read_records

ROOT = Path(__file__).resolve().parent.parent
SAMPLES = Path(os.environ.get("GAUDI_BERT_SHARED", ROOT.parent / "shared")) / "data" / "wiki-sample"
BATCHES, FILES = 1000, 40
Place = tuple[int, int]


def first_order(sizes: list[int], seed: int, epoch: int) -> Iterator[Place]:
    """(shard, record) in order 1: the next pack of each shard that has one, again and again."""
    order = permutation(len(sizes), seed, "shard order", epoch).tolist()
    hands = []
    for shard in order:
        words = random_words(sizes[shard], seed, "pack order", epoch, shard).tolist()
        windows = permutation(-(-sizes[shard] // WINDOW_PACKS), seed, "window order", epoch, shard).tolist()
        place = {window: number for number, window in enumerate(windows)}
        hands.append(sorted(range(sizes[shard]), key=lambda n: (place[n // WINDOW_PACKS], words[n], n)))
    for row in range(max(sizes)):
        for shard, hand in zip(order, hands, strict=True):
            if row < len(hand):
                yield shard, hand[row]


def batch_packs(sizes: list[int]) -> int:
    """The largest batch, a power of two up to 256, of which the median shard holds at least four."""
    median = sorted(sizes)[len(sizes) // 2]
    return int(2 ** min(8, int(np.log2(max(1, median // 4)))))


def mixing(sequences: IntArray, batch: int) -> float:
    """Standard deviation of the sequences of a batch over that of `batch` independent draws of all packs."""
    batches = sequences[: len(sequences) // batch * batch].reshape(-1, batch).sum(axis=1)[:BATCHES]
    return float(np.std(batches, ddof=1) / (np.std(sequences) * np.sqrt(batch)))


def measure(folder: Path, epochs: int) -> None:
    """Both orders of a folder, epoch by epoch."""
    metadata = read_metadata(folder)
    shards, files = metadata.shard_table, open_shards(folder, metadata)
    sequences = []
    for shard, packs in enumerate(shards.packs.tolist()):
        read = files.read(np.full(packs, shard), np.arange(packs)) if packs else {"next_sentence_weights": np.zeros((0, 1))}
        sequences.append((read["next_sentence_weights"] > 0).sum(axis=1))
        files.close_except(())
    sizes = shards.packs.tolist()
    regions = regions_of_groups(shards.group_sizes, metadata.input_files, metadata.seed)
    order = GlobalOrder(sizes, metadata.seed, WINDOW_PACKS, streams_of(metadata.shard_multiple), regions=regions)
    batch = batch_packs(sizes)
    found: dict[int, list[float]] = {1: [], 4: []}
    for epoch in range(epochs):
        places = np.array(list(first_order(sizes, metadata.seed, epoch)))
        found[1].append(mixing(np.array([sequences[shard][record] for shard, record in places]), batch))
        located = order.locate(epoch, np.arange(order.packs))
        orders = [order.shard_order(epoch, shard).records for shard in range(len(sizes))]
        pairs = zip(located.shards, located.positions, strict=True)
        in_order = [sequences[shard][orders[shard][position]] for shard, position in pairs]
        found[4].append(mixing(np.array(in_order), batch))
    print(f"{folder}: {metadata.packs:,} packs in {len(shards):,} shards, batches of {batch}, {epochs} epochs")
    for number, values in found.items():
        show(f"sequences per batch vary, order {number}", values, "times", "1 = independent draws" if number == 1 else "")


def main() -> None:
    """Measure the folders, or the sample."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="*", type=Path)
    parser.add_argument("--epochs", type=int, default=5)
    options = parser.parse_args()
    for folder in options.folders:
        measure(folder, options.epochs)
    if options.folders:
        return
    for sample in ("tfrecord-128", "tfrecord-512"):
        for is_sorted in (False, True):
            with tempfile.TemporaryDirectory() as scratch:
                each = split(SAMPLES / sample, Path(scratch) / "records", is_sorted)
                folder = Path(scratch) / f"{sample}{'-sorted' if is_sorted else ''}"
                settings = PackingSettings(group_sequences=each, shard_multiple=8)
                pack(Path(scratch) / "records", folder, settings, StageRun(Reporter(quiet=True)))
                measure(folder, options.epochs)


def split(records: Path, out: Path, is_sorted: bool) -> int:
    """Write the records as 40 files; the most in one of them."""
    payloads = [each for path in sorted(records.iterdir()) for each in read_records(path)]
    if is_sorted:
        payloads.sort(key=lambda payload: int(decode_example(payload)["input_mask"].sum()))
    each = -(-len(payloads) // FILES)
    out.mkdir()
    for number in range(FILES):
        content = b"".join(map(frame, payloads[number * each : (number + 1) * each]))
        (out / f"part-{number:05d}").write_bytes(content)
    return each


if __name__ == "__main__":
    main()
