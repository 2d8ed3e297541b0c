"""Bad packs and arguments for PyTorch: each is an error of ours. Those of the packer are in `test_pack_lengths.py`."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from gaudi_bert.common.errors import InputError
from tests.builders.effort import tries
from tests.builders.watched_worker import WatchedWorker, inside

# Evaluated in the watched process, with numpy as `np`.
ROW = (
    "{'input_ids': [5, 6, 0], 'position_ids': [0, 1, 0], 'sequence_ids': [1, 1, 0], 'seq_lens': [2], 'labels': [5, 6, -100]}"
)
VALUES = [
    "[5, 2**32 + 7, 0]", "[5, 2**40, 0]", "[5, 10**400, 0]", "[True, False, True]", "[5.0, 6.5, 0]", "[5, None, 0]",
    "['5', '6', '0']", "np.array([5, 2**64 - 1, 0], np.uint64)", "np.array([1.5, 2, 3])", "np.array([np.nan, 2, 3])",
    "np.array([True, True, False])", "np.array(['a', 'b', 'c'])", "np.array([5, None, 0], object)",
]  # fmt: skip
NAMES = ("input_ids", "position_ids", "sequence_ids", "labels")
COLLATED = [
    *(f"{{**{ROW}, '{name}': {value}}}" for name in NAMES for value in VALUES),
    *(f"{{**{ROW}, 'seq_lens': {value}}}" for value in ("[2.5]", "[2**40]", "['2']", "[None]", "[True]")),
    f"{ROW}, {{**{ROW}, 'input_ids': [5, 6]}}",
]
DATASETS = [
    "'absent'", "'records'", "'histogram.json'", "'empty'", "'packed', rank=2, world_size=2", "'packed', rank=-1",
    "'packed', world_size=0", "'packed', batch_packs=0", "'packed', batch_packs=10**9", "'packed', world_size=10**9",
    "'records', plan='histogram.json'", "'records', plan='absent.json'", "'records', plan='pipe'", "'index'",
    "'damaged'",
]  # fmt: skip
COLLATORS = [
    "'flush'", "'flash'", "'flash', 'gpt2'", "'transformers-4'", "'optimum-habana', 'gpt2'", "model='bort'", "model=7",
    "row_tokens=0", "row_tokens=1.5", "row_tokens=True",
]  # fmt: skip
CALLS = [
    *(f"PackCollator()([{rows}])" for rows in COLLATED),
    *(f"PackCollator({each})" for each in COLLATORS),
    *(f"list(PackedDataset({each}))" for each in DATASETS),
]
SAMPLE = CALLS[:: tries(3, 1)]


def called(expression: str, folder: Path) -> tuple[str, str]:
    """The type of the error, and its message."""
    from gaudi_bert.pytorch import PackCollator, PackedDataset

    names = {"np": np, "PackCollator": PackCollator, "PackedDataset": PackedDataset}
    try:
        with inside(folder):
            result = eval(expression, names)
    except InputError as error:
        return type(error).__name__, str(error)
    return "nothing", repr(result)[:200]


@pytest.fixture(scope="module")
def folders(good: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Beside what is good: an empty folder, an index without tokens, a packed table with a column of nulls, a pipe."""
    import pyarrow
    from pyarrow import parquet

    folder = tmp_path_factory.mktemp("folders") / "all"
    shutil.copytree(good, folder)
    for name in ("empty", "index", "damaged"):
        (folder / name).mkdir()
    os.mkfifo(folder / "pipe")
    index = {"row": [0], "indices": [[1]], "seq_lens": [[2]]}
    damaged = {"input_ids": [[5, None]], "position_ids": [[0, 1]], "sequence_ids": [[1, 1]], "seq_lens": [[2]]}
    for name, columns in (("index", index), ("damaged", damaged)):
        parquet.write_table(pyarrow.table(columns), folder / name / "packed-00000-00000.parquet")
    return folder


@pytest.mark.repeated
@pytest.mark.parametrize("expression", SAMPLE, ids=[f"{text[:15]}-{text[-40:]}" for text in SAMPLE])
def test_a_bad_argument_is_named(worker: WatchedWorker, folders: Path, expression: str) -> None:
    pytest.importorskip("torch", reason="PYTORCH MISSING: install the extra dev to test packs for PyTorch")
    outcome = worker.run(called, expression, folders)
    assert outcome.how == "ended", outcome
    kind, message = outcome.value
    assert kind == "InputError", message
    assert len(message) <= 1000
    assert "\n" not in message
