"""Measure packs in PyTorch: how fast they are read, and how much packing speeds up a `transformers` BERT.

    python benchmarks/pytorch.py [reading|training [ROUNDS]]

`reading` compares the rows per CPU second of `PackedDataset` with `datasets`, which reads the same packs from Parquet with
its torch formatter. It also compares the rate at which packed TFRecords are decoded with the rate at which this machine
copies files from the page cache, and with the rate at which it reads files directly from the disk. The last rate is measured
on one core, and with two processes that each read half of the packs, as in training.

`training` measures the non-padding tokens per CPU second of BERT (4 layers of size 256, rows of 512) with gathered heads, on
packs and on the same sequences in rows of their own, and compares the ratio with the packing factor.
"""

from __future__ import annotations

import contextlib
import itertools
import mmap
import multiprocessing
import os
import sys
import tempfile
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from multiprocessing.synchronize import Barrier
from pathlib import Path
from threading import BrokenBarrierError
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import pyarrow.parquet
import torch
import transformers
from measuring import measure_seconds, print_figure, print_processor

from gaudi_bert.artefacts.packed import RecordMetadata
from gaudi_bert.artefacts.results import StageRun
from gaudi_bert.common.progress import Reporter
from gaudi_bert.config.sections import PackingSettings
from gaudi_bert.encoders.trial import Pack
from gaudi_bert.pytorch import PackCollator, PackedBertForPreTraining, PackedDataset
from gaudi_bert.tfrecords.wire.example import encode_example
from gaudi_bert.tfrecords.wire.framing import frame, read_records
from gaudi_bert.tfrecords.wire.schema import PackedSchema
from gaudi_bert.tfrecords.wire.values import decode_examples_to_arrays
from gaudi_bert.tfrecords.write import pack_records

QUIET = Reporter(quiet=True)
LENGTH, PREDICTIONS, VOCABULARY = 512, 80, 30522
SEQUENCES = 8_000
BATCH_PACKS = 4
EPOCHS = 4


def write_examples(folder: Path, sequences: int) -> None:
    """Write random examples with lengths similar to those of Wikipedia: 22 % have 512 tokens, and all other lengths are
    uniformly distributed.
    """
    random = np.random.default_rng(5)
    folder.mkdir()
    for part in range(8):
        with open(folder / f"part-{part}", "wb") as handle:
            for _ in range(sequences // 8):
                used = LENGTH if random.random() < 0.22 else int(random.integers(16, LENGTH))
                masked = min(PREDICTIONS, max(1, int(used * 0.15)))
                places = np.sort(random.choice(used, masked, replace=False))
                features = {
                    "input_ids": _padded(random.integers(999, VOCABULARY, used), LENGTH),
                    "input_mask": _padded(np.ones(used), LENGTH),
                    "segment_ids": _padded(np.arange(used) >= used // 2, LENGTH),
                    "masked_lm_positions": _padded(places, PREDICTIONS),
                    "masked_lm_ids": _padded(random.integers(999, VOCABULARY, masked), PREDICTIONS),
                    "masked_lm_weights": _padded(np.ones(masked), PREDICTIONS).astype(np.float32),
                    "next_sentence_labels": np.array([used % 2]),
                }
                handle.write(frame(encode_example(features)))


def _padded(values: Any, size: int) -> Any:
    """Pad values with zeros to a size."""
    return np.pad(np.asarray(values).astype(np.int64), (0, size - len(values)))


def _as_parquet(packed: Path, out: Path) -> Path:
    """Write the same packs as a Parquet table with a list column for each feature, and return its path."""
    packs = PackedDataset(packed).as_map()
    rows = [packs[number] for number in range(len(packs))]
    pyarrow.parquet.write_table(pyarrow.table({name: [row[name] for row in rows] for name in rows[0]}), out)
    return out


def measure_reading(folder: Path, rounds: int) -> None:
    """Print the rows and bytes per second."""
    import datasets

    packed = folder / "packed"
    files = [str(_as_parquet(packed, folder / "packs.parquet"))]
    table = datasets.load_dataset("parquet", data_files=files, split="train", cache_dir=str(folder / "cache"))
    theirs = table.with_format("torch")
    ours = PackedDataset(packed)
    shards = [path for path in packed.iterdir() if path.suffix == ".tfrecord" and path.stat().st_size]
    content = sum(path.stat().st_size for path in shards)
    buffer = bytearray(1 << 20)

    def read_pages() -> None:
        for path in shards:
            with open(path, "rb", buffering=0) as handle:
                while handle.readinto(buffer):
                    pass

    def rate(work: Callable[[], Any], amount: float) -> float:
        return amount / measure_seconds(work)[0]

    collator = PackCollator(gather_heads=True)
    some = min(len(table), 1500)
    figures: dict[str, list[float]] = defaultdict(list)
    decode, decoded = make_decoder(packed, shards)
    list(map(dict, PackedDataset(packed)))  # compile the kernels, and fill the page cache
    both = TwoReaders(packed)
    for _ in range(rounds):
        our_rows = rate(lambda: sum(len(dict(row)) for row in ours), ours.packs)  # creates every array of every row
        their_rows = rate(lambda: [theirs[number] for number in range(some)], some)
        pages = rate(read_pages, content)
        figures["rows"].append(our_rows)
        figures["their rows"].append(their_rows)
        figures["ratio"].append(our_rows / their_rows)
        figures["pages"].append(pages / 1e6)
        decoded_rows = rate(lambda: decode_all(ours), ours.packs)
        figures["decoded"].append(decoded_rows)
        figures["share"].append(decoded_rows * content / ours.packs / pages)
        figures["kernel"].append(rate(decode, decoded) / pages)
        disk = content / measure_seconds(lambda: read_past_page_cache(shards))[1]
        figures["disk"].append(disk / 1e6)
        figures["disk share"].append(decoded_rows * content / ours.packs / disk)
        figures["both share"].append(EPOCHS * content / measure_seconds(both.read)[1] / disk)
        rows = list(itertools.islice(PackedDataset(packed), 256))
        figures["batches"].append(rate(lambda rows=rows: [collator(rows[at : at + 16]) for at in range(0, 256, 16)], 256))
    both.end()
    print(
        f"reading {ours.packs:,} packs of {LENGTH}, {content / ours.packs:,.0f} bytes each, from the page cache; CPU seconds"
    )
    print_figure("rows of PackedDataset, each made a dictionary", figures["rows"], "rows/s")
    print_figure("rows of PackedDataset, decoded as PackCollator takes them", figures["decoded"], "rows/s")
    print_figure("rows of `datasets` (Parquet, torch formatter)", figures["their rows"], "rows/s")
    print_figure("PackedDataset beside `datasets`", figures["ratio"], "times", ">= 5")
    print_figure("the page cache, read by itself", figures["pages"], "MB/s")
    print_figure("packed TFRecords decoded, as a part of that", figures["share"], "of it")
    print_figure("the kernel that decodes numbers to int32 in memory, likewise", figures["kernel"], "of it")
    print_figure("the disk, read past the page cache (wall time)", figures["disk"], "MB/s")
    print_figure("packed TFRecords decoded on one core, as a part of that", figures["disk share"], "of it")
    print_figure("by two processes (wall time), likewise", figures["both share"], "of it", ">= 0.5")
    print_figure("rows through PackCollator (additive mask, gathered heads)", figures["batches"], "rows/s")


class TwoReaders:
    """Two processes, each of which reads its half of the packs on request."""

    def __init__(self, packed: Path) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._barrier = spawn.Barrier(3)
        self._processes = [spawn.Process(target=read_half_of_packs, args=(packed, rank, self._barrier)) for rank in range(2)]
        for process in self._processes:
            process.start()
        self._barrier.wait()

    def read(self) -> None:
        """Let both processes read EPOCHS epochs, and wait until they are done."""
        self._barrier.wait()
        self._barrier.wait()

    def end(self) -> None:
        """Stop both processes."""
        self._barrier.abort()
        for process in self._processes:
            process.join()


def read_half_of_packs(packed: Path, rank: int, barrier: Barrier) -> None:
    """Decode the packs of one of two processes each time the barrier is passed, until the barrier is broken."""
    packs = PackedDataset(packed, rank, 2)
    decode_all(packs)
    barrier.wait()
    with contextlib.suppress(BrokenBarrierError):
        while True:
            barrier.wait()
            for _ in range(EPOCHS):
                decode_all(packs)
            barrier.wait()


def decode_all(packs: PackedDataset) -> None:
    """Decode an epoch in the form of columns of many rows, from which a collator builds batches."""
    deque(packs, maxlen=0)


def read_past_page_cache(paths: list[Path]) -> None:
    """Read files directly from the disk, a megabyte at a time."""
    with mmap.mmap(-1, 1 << 20) as buffer:  # direct reads require page-aligned memory
        for path in paths:
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
            try:
                while os.readv(descriptor, [buffer]) == len(buffer):
                    pass
            finally:
                os.close(descriptor)


def make_decoder(packed: Path, shards: list[Path]) -> tuple[Callable[[], Any], int]:
    """Return a function that decodes 64 packs in memory a hundred times, and the number of bytes that it decodes. No reader
    of these packs can be faster.
    """
    payloads = list(itertools.islice((payload for path in shards for payload in read_records(path)), 64))
    buffer, lengths = np.frombuffer(b"".join(payloads), np.uint8), np.array([len(payload) for payload in payloads])
    features, offsets = PackedSchema.from_sizes(RecordMetadata.read(packed)).features, np.cumsum(lengths) - lengths

    def run() -> None:
        for _ in range(100):
            decode_examples_to_arrays(buffer, offsets, lengths, features, "memory")

    run()
    return run, 100 * len(buffer)


def measure_training(folder: Path, rounds: int) -> None:
    """Print the non-padding tokens per second of packed and padded training.

    Training uses one thread, because several threads would wait for each other in loops that count as CPU time. The time of
    a batch does not depend on the lengths in it, so the figures use the mean number of tokens over all rows instead of that
    of the rows that are drawn.
    """
    torch.set_num_threads(1)
    torch.manual_seed(1)
    config = transformers.BertConfig(
        vocab_size=VOCABULARY, hidden_size=256, num_hidden_layers=4, num_attention_heads=4, intermediate_size=1024
    )
    model = PackedBertForPreTraining(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    metadata = RecordMetadata.read(folder / "packed")
    packs = list(itertools.islice(PackedDataset(folder / "packed"), 400))
    alone = [row for pack in packs for row in split_pack_into_rows(pack)]
    random = np.random.default_rng(2)
    all_rows = {"packed": packs, "padded": alone}
    tokens = {kind: sum(int(row["seq_lens"].sum()) for row in rows) / len(rows) for kind, rows in all_rows.items()}
    factor = tokens["packed"] / tokens["padded"]
    slots = {"packed": (metadata.masked_slots, metadata.depth), "padded": (PREDICTIONS, 1)}

    def tokens_per_second(kind: str, static: bool) -> float:
        masked, depth = slots[kind] if static else (None, None)
        collator = PackCollator("transformers-5", config, gather_heads=True, masked_slots=masked, depth=depth)
        rows = [all_rows[kind][number] for number in random.choice(len(all_rows[kind]), BATCH_PACKS, replace=False)]

        def run() -> None:
            optimizer.zero_grad()
            model(**collator(rows)).loss.backward()
            optimizer.step()

        return BATCH_PACKS * tokens[kind] / measure_seconds(run)[0]

    for kind in all_rows:
        tokens_per_second(kind, static=True)
    print(f"BERT of 4 layers of 256 at {LENGTH}, {BATCH_PACKS} rows a batch; packing factor {factor:.3f}; CPU seconds")
    for static, shapes in ((True, "as many masked slots as a row may need"), (False, "as the batch needs")):
        figures: dict[str, list[float]] = {"packed": [], "padded": []}
        for number in range(rounds):
            for kind in sorted(figures, reverse=number % 2 == 1):
                figures[kind].append(tokens_per_second(kind, static))
        print(f" gathered heads: {shapes}")
        print_figure("real tokens, packed", figures["packed"], "tokens/s")
        print_figure("real tokens, padded rows", figures["padded"], "tokens/s")
        shares = [packed / padded / factor for packed, padded in zip(figures["packed"], figures["padded"], strict=True)]
        print_figure("packed / padded / packing factor", shares, "", ">= 0.95" if static else "")


def split_pack_into_rows(pack: Pack) -> Iterator[Pack]:
    """Yield the sequences of a pack, each in a row of the same length."""
    length = len(pack["input_ids"])
    for number, tokens in enumerate(pack["seq_lens"].tolist()):
        chosen = pack["sequence_ids"] == number + 1
        pads = (0, length - tokens)
        row = {name: np.pad(pack[name][chosen], pads) for name in ("input_ids", "token_type_ids", "sequence_ids")}
        yield {
            **row,
            "sequence_ids": (row["sequence_ids"] > 0).astype(np.int32),
            "position_ids": np.concatenate([np.arange(tokens), np.arange(length - tokens)]),
            "labels": np.pad(pack["labels"][chosen], pads, constant_values=-100),
            "seq_lens": np.array([tokens]),
            "next_sentence_labels": pack["next_sentence_labels"][number : number + 1],
        }


def main() -> None:
    """Parse the command line, write the data, and print the figures."""
    parts, rounds = sys.argv[1:2] or ["reading", "training"], int((sys.argv[2:3] or ["5"])[0])
    print_processor()
    for part in parts:
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            write_examples(folder / "records", SEQUENCES if part == "reading" else SEQUENCES // 8)
            pack_records(folder / "records", folder / "packed", PackingSettings(), StageRun(QUIET))
            {"reading": measure_reading, "training": measure_training}[part](folder, rounds)


if __name__ == "__main__":
    main()
