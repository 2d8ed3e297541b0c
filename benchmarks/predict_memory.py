"""How much memory `predict` and `embed` take for few rows and for many: the peak must not grow with the rows.

    python benchmarks/predict_memory.py                        a million rows (about ten minutes on a core)
    python benchmarks/predict_memory.py --rows 50000 --quick   fewer, `predict` alone

A model of one layer of 16 of random weights answers rows of about 19 tokens; each run is a process of its own, and its peak
is what the kernel counted. What is fixed (the interpreter, TensorFlow, a window of 8,192 rows) is in both.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import numpy as np
from measuring import show_processor

WORDS = 2000
FEW = 20_000


def write_model(folder: Path) -> Path:
    """A folder that `predict` and `embed` open."""
    from gaudi_bert.common.tensorflow_environment import prepare_tensorflow

    prepare_tensorflow()
    from gaudi_bert.config.sections import TaskSettings
    from gaudi_bert.model.config import BertConfig, initial_value
    from gaudi_bert.model.heads import variables_of
    from gaudi_bert.rows.tokenizer import open_tokenizer
    from gaudi_bert.tasks.kinds.task import task_named
    from gaudi_bert.tasks.models.task_models import StartWeights, write_task_folder

    words = folder.with_name("words")
    words.mkdir()
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"word{number}" for number in range(WORDS))]
    (words / "vocab.txt").write_text("\n".join(vocabulary) + "\n", encoding="utf-8")
    config = BertConfig(
        vocab_size=len(vocabulary),
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=128,
    )
    task = task_named("classification")(TaskSettings(name="classification"), ("no", "yes"))
    specs = variables_of(config, task.head)
    values = {name: initial_value(name, spec, config.initializer_range, 1) for name, spec in specs.items()}
    start = StartWeights(folder, "random", config, config.sizes, task.architecture, values, (), "")
    write_task_folder(folder, start, task, values, open_tokenizer(words), 128)
    return folder


def write_rows(path: Path, rows: int) -> Path:
    """JSON lines of 1 to 100 words, 17 on average."""
    random = np.random.default_rng(1)
    with path.open("w", encoding="utf-8") as file:
        for first in range(0, rows, 10_000):
            lengths = np.clip(random.lognormal(2.6, 0.7, min(10_000, rows - first)).astype(int), 1, 100)
            for length in lengths:
                text = " ".join(f"word{number}" for number in random.integers(0, WORDS, length))
                file.write(json.dumps({"text": text}) + "\n")
    return path


def peak_of(command: str, folder: Path, model: Path, rows: int) -> tuple[float, float]:
    """Peak MiB and seconds of one run."""
    data, out = write_rows(folder / "rows.jsonl", rows), folder / f"{command}.{'jsonl' if command == 'predict' else 'npy'}"
    words = [command, "--model", model, "--data", data, "--out", out, "--overwrite"]
    started = time.perf_counter()
    process = subprocess.Popen([sys.executable, "-m", "gaudi_bert", *map(str, words)], stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    said = process.stderr.read()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(said)
    seconds = time.perf_counter() - started
    if command == "predict":
        with out.open("rb") as file:
            answered = sum(1 for _ in file)
        if answered != rows:
            raise SystemExit(f"{answered} rows were answered, not {rows}")
    return usage.ru_maxrss / 1024, seconds


def main() -> None:
    """Print both peaks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--quick", action="store_true", help="`predict` alone")
    options = parser.parse_args()
    show_processor()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        model = write_model(folder / "model")
        for command in ("predict",) if options.quick else ("predict", "embed"):
            few, _ = peak_of(command, folder, model, FEW)
            many, seconds = peak_of(command, folder, model, options.rows)
            print(
                f"{command}: peak {few:,.0f} MiB for {FEW:,} rows, {many:,.0f} MiB for {options.rows:,} rows, "
                f"{options.rows / seconds:,.0f} rows a second (wall)",
                flush=True,
            )


if __name__ == "__main__":
    main()
