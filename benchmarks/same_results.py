"""Check that two checkouts produce the same results: each artefact and each `--json` output for the demo, the Wikipedia
sample, tables and a task.

Usage: python benchmarks/same_results.py OTHER_CHECKOUT [--parts demo wikipedia tables estimates] [--keep FOLDER]

Both checkouts run the same commands with this Python, each in a folder of its own. Files are compared byte for byte, JSON
and checkpoints by value. JSON values that depend on the clock or the version are ignored. Differences are printed, and if
there are any, the exit code is 1.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
SHARED = Path(os.environ.get("GAUDI_BERT_SHARED", ROOT.parent / "shared")) / "data"

# Keys and files that depend on the clock, the version or the order of threads.
CHANGING_KEYS = ("seconds", "per_second", "speed", "tool_version", "metadata_sha256", "memory_bytes", "time", "cpu")
CHANGING_FILES = (
    "tensorboard",
    "tensorflow.log",
    "engine.log",
    "report.html",
    "metrics.jsonl",
    ".lock",
    ".seen",
    "events.out",
)

DEMO = ["--set", "training.updates=24", "--set", "prepare.duplicates=2", "--set", "training.measure_speedup=false"]
TASK = ["--set", "finetune.epochs=1"]
PARTS = {
    "demo": [
        ["run", "{root}/pipelines/demo.yaml", "--work", "work", "--json", *DEMO],
        ["run", "{root}/pipelines/demo.yaml", "--work", "work", "--json", "--stages", "plan,write,verify,train", *DEMO],
        ["export", "--checkpoint", "work/demo/train", "--out", "bert", "--json"],
        ["train", "--data", "work/demo/packed/train", "--out", "dry", "--dry-run", "--json"],
    ],
    "task": [
        ["run", "{root}/pipelines/finetune-demo.yaml", "--work", "work", "--json", "--stages", "finetune,predict", *TASK],
        ["embed", "--model", "work/demo/finetune", "--data", "work/demo/rows/evaluation.jsonl", "--out", "v.npy", "--json"],
    ],
    "wikipedia": [
        ["histogram", "{shared}/wiki-sample/tfrecord-128", "--out", "h.json", "--json"],
        ["plan", "h.json", "--out", "nnls.json", "--json"],
        ["plan", "h.json", "--out", "optimal.json", "--algorithm", "optimal", "--depth", "max", "--json"],
        ["write", "{shared}/wiki-sample/tfrecord-128", "--plan", "nnls.json", "--out", "packed", "--json"],
        ["verify", "{shared}/wiki-sample/tfrecord-128", "packed", "--json"],
        ["pack", "{shared}/wiki-sample/tfrecord-512", "--out", "packed-512", "--verify", "--json", "--depth", "4"],
        ["inspect", "packed/packed-00000-00000.tfrecord", "--record", "3", "--json"],
    ],
    "tables": [
        ["pack", "rows.jsonl", "--out", "a", "--max-sequence-length", "128", "--verify", "--json"],
        ["pack", "rows.parquet", "--out", "b", "--max-sequence-length", "64", "--too-long", "split", "--verify", "--json"],
        ["verify", "rows.parquet", "b", "--json"],
        ["pack", "rows.parquet", "--out", "e", "--max-sequence-length", "128", "--algorithm", "optimal", "--json"],
    ],
    "estimates": [
        *(["estimate", name, "--json"] for name in ("wikipedia-128", "wikipedia-512", "wikipedia-2048", "squad-384")),
    ],
}


def make_rows(folder: Path) -> None:
    """Write a table whose rows are not BERT examples, as JSON lines and as Parquet."""
    import pyarrow
    from pyarrow import parquet

    random = np.random.default_rng(20)
    lengths = np.minimum(1 + random.geometric(0.03, 5_003), 128)
    rows = [
        {
            "input_ids": random.integers(5, 30_000, length).tolist(),
            "labels": random.integers(-1, 9, length).tolist(),
            "talk": f"talk-{number // 3}",
            "weight": float(number) / 7,
        }
        for number, length in enumerate(lengths)
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "rows.parquet", row_group_size=1_009)


def run_commands(checkout: Path, folder: Path, part: str) -> list[str]:
    """Run the commands of a part, and return what each command prints to standard output."""
    printed = []
    for words in PARTS[part]:
        command = [word.format(root=checkout, shared=SHARED) for word in words]
        environment = {**os.environ, "PYTHONPATH": str(checkout), "PYTHONDONTWRITEBYTECODE": "1"}
        done = subprocess.run(
            [sys.executable, "-m", "gaudi_bert", *command], cwd=folder, env=environment, capture_output=True, text=True
        )
        if done.returncode != 0:
            raise SystemExit(f"{checkout}: gaudi-bert {' '.join(command)}: exit code {done.returncode}\n{done.stderr}")
        printed.append(done.stdout.replace(str(checkout), "ROOT").replace(str(folder), "FOLDER"))
    return printed


def remove_changing_keys(value: Any) -> Any:
    """Return a JSON value without the keys that depend on the clock or the version."""
    if isinstance(value, dict):
        return {
            key: remove_changing_keys(item) for key, item in value.items() if not any(word in key for word in CHANGING_KEYS)
        }
    if isinstance(value, list):
        return [remove_changing_keys(item) for item in value]
    return value


def is_same_output(one: str, other: str) -> bool:
    """Return whether two outputs are equal. If they are JSON, compare them by value."""
    if one == other:
        return True
    try:
        return bool(remove_changing_keys(json.loads(one)) == remove_changing_keys(json.loads(other)))
    except json.JSONDecodeError:
        return False


def iterate_different_keys(one: Any, other: Any, path: str = "") -> Iterator[str]:
    """Yield the differences between two JSON values, as `key.key: value != value`."""
    if isinstance(one, dict) and isinstance(other, dict):
        for key in sorted({*one, *other}):
            yield from iterate_different_keys(one.get(key), other.get(key), f"{path}.{key}" if path else key)
    elif one != other:
        yield f"{path}: {str(one)[:200]} != {str(other)[:200]}"


def describe_difference(one: str, other: str) -> str:
    """Describe the differences between two outputs."""
    try:
        keys = iterate_different_keys(remove_changing_keys(json.loads(one)), remove_changing_keys(json.loads(other)))
    except json.JSONDecodeError:
        return f"here: {one[:300]}\n  there: {other[:300]}"
    return "\n  ".join(keys)


def is_same_file(one: Path, other: Path) -> bool:
    """Return whether two files have the same content. JSON files and checkpoints are compared by value, all other files byte
    for byte.
    """
    if one.read_bytes() == other.read_bytes():
        return True
    if one.suffix == ".json":
        return is_same_output(one.read_text(), other.read_text())
    if one.suffix == ".safetensors":
        from safetensors.numpy import load_file

        ours, theirs = load_file(one), load_file(other)
        return ours.keys() == theirs.keys() and all(np.array_equal(ours[name], theirs[name]) for name in ours)
    return False


def list_compared_files(folder: Path) -> set[Path]:
    """Return the files that are compared."""
    return {
        path.relative_to(folder)
        for path in folder.rglob("*")
        if path.is_file() and not any(word in str(path.relative_to(folder)) for word in CHANGING_FILES)
    }


def iterate_differences(part: str, ours: Path, theirs: Path, printed: tuple[list[str], list[str]]) -> Iterator[str]:
    """Yield a description of each command with different output, and of each different file."""
    for words, one, other in zip(PARTS[part], *printed, strict=True):
        if not is_same_output(one, other):
            yield f"{part}: printed by {' '.join(words)}\n  {describe_difference(one, other)}"
    here, there = list_compared_files(ours), list_compared_files(theirs)
    yield from (f"{part}: {path} is on one side only" for path in sorted(here ^ there))
    yield from (f"{part}: {path}" for path in sorted(here & there) if not is_same_file(ours / path, theirs / path))


def main() -> None:
    """Run the commands in both checkouts, part by part, and print the differences."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("other", type=Path, help="the checkout to compare with")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument(
        "--keep", type=Path, help="keep the output of both checkouts in this folder (default: a temporary folder)"
    )
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        base = arguments.keep or Path(temporary)
        count = 0
        for part in arguments.parts:
            group = "demo" if part == "task" else part
            sides = [base / side / group for side in ("here", "there")]
            printed = []
            for checkout, folder in zip((ROOT, arguments.other.resolve()), sides, strict=True):
                folder.mkdir(parents=True, exist_ok=True)
                if part == "tables":
                    make_rows(folder)
                printed.append(run_commands(checkout, folder, part))
            wrong = list(iterate_differences(part, sides[0], sides[1], (printed[0], printed[1])))
            print(
                *(wrong or [f"{part}: the same ({len(list_compared_files(sides[0]))} files, {len(PARTS[part])} commands)"]),
                sep="\n",
            )
            count += len(wrong)
    raise SystemExit(1 if count else 0)


if __name__ == "__main__":
    main()
