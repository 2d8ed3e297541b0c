"""Compiles the numba kernels of an image, by using all of them once on made-up records.

python3 compile_kernels.py all       prepare, histogram, every packing algorithm, write, verify   (data image)
python3 compile_kernels.py records   reading only                                                 (training images)
"""

from __future__ import annotations

import random
import sys
import tempfile
from pathlib import Path

from gaudi_bert.common.progress import Reporter
from gaudi_bert.config import ALGORITHMS, PackingSettings, PrepareSettings

WORDS = ["alpha", "beta", "gamma", "delta", "river", "stone", "green", "quick", "sings", "under", "over", "the", "a"]
LENGTH, PREDICTIONS = 96, 7


def write_records(path: Path, count: int) -> None:
    """Unpacked records of random lengths."""
    from gaudi_bert.records.wire.example import decode_example, encode_example
    from gaudi_bert.records.wire.framing import read_records, write_record

    generator = random.Random(7)
    path.parent.mkdir(parents=True)
    with open(path, "wb") as handle:
        for _ in range(count):
            used = generator.randint(PREDICTIONS + 2, LENGTH)
            masked = 1 + used % PREDICTIONS
            features = {
                "input_ids": [generator.randint(5, 60) for _ in range(used)] + [0] * (LENGTH - used),
                "input_mask": [1] * used + [0] * (LENGTH - used),
                "segment_ids": [0] * LENGTH,
                "masked_lm_positions": list(range(1, 1 + masked)) + [0] * (PREDICTIONS - masked),
                "masked_lm_ids": [9] * masked + [0] * (PREDICTIONS - masked),
                "masked_lm_weights": [1.0] * masked + [0.0] * (PREDICTIONS - masked),
                "next_sentence_labels": [used % 2],
            }
            write_record(handle, encode_example(features))
    for payload in read_records(path):
        decode_example(payload)


def write_text(path: Path) -> None:
    """Documents of random sentences."""
    generator = random.Random(7)
    sentences = [" ".join(generator.choices(WORDS, k=generator.randint(2, 9))) + "." for _ in range(400)]
    documents = ["\n".join(sentences[start : start + 10]) for start in range(0, len(sentences), 10)]
    path.write_text("\n\n".join(documents) + "\n", encoding="utf-8")


def compile_records(folder: Path) -> Path:
    """Read records as training, evaluation and the histogram do."""
    from gaudi_bert.stages.histogram import histogram

    write_records(folder / "records" / "part.tfrecord", 2000)
    histogram(folder / "records", folder / "histogram.json", reporter=Reporter(quiet=True))
    return folder / "records"


def compile_all(folder: Path) -> None:
    """Make examples, pack them by every algorithm, verify them."""
    from gaudi_bert.stages.pack import pack
    from gaudi_bert.stages.prepare import prepare

    quiet = Reporter(quiet=True)
    write_text(folder / "text.txt")
    settings = PrepareSettings(text="text.txt", train_vocab=101, max_sequence_length=32, max_predictions=5, shards=2)
    prepare(settings, folder / "examples", pipeline_folder=folder, reporter=quiet)
    records = compile_records(folder)
    for source, name in ((folder / "examples" / "train", "prepared"), (records, "made-up")):
        for algorithm in ALGORITHMS:
            packing = PackingSettings(algorithm=algorithm, shard_multiple=2)
            pack(source, folder / f"{name}-{algorithm}", packing, reporter=quiet, verified=algorithm == "nnls")


def main() -> None:
    """Compile what the command line asks for."""
    with tempfile.TemporaryDirectory() as folder:
        if sys.argv[1] == "all":
            compile_all(Path(folder))
        else:
            compile_records(Path(folder))


if __name__ == "__main__":
    main()
