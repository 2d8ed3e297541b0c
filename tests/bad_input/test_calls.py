"""Bad arguments of what is called from Python: each is an error of ours, which is a ValueError where that is promised."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gaudi_bert.common.errors import InputError
from gaudi_bert.packing.pack_lengths import pack_histogram, pack_lengths
from tests.builders.effort import tries
from tests.builders.watched_worker import WatchedWorker

LONGEST_MESSAGE = 1000

# Evaluated in the watched process, with numpy as `np`.
LENGTHS = [
    "None", "True", "3", "3.5", "'345'", "b'345'", "{1: 2}", "[]", "()", "''", "object()", "[None]", "[True, 2]",
    "['3']", "[3, 2.0]", "[3, float('nan')]", "[0]", "[-1]", "[9]", "[2**31 + 3]", "[2**32 + 3]", "[2**64 + 3]",
    "[10**400]", "[[1], [2, 3]]", "[[1, 2], [3, 4]]", "[np.array([1])]", "['x' * 2**20]", "np.zeros(3, int)",
    "np.array(3)", "np.array([])", "np.ones((2, 2), int)", "np.array([1.5])", "np.array([3.0])", "np.array([np.nan])",
    "np.array([np.inf])", "np.array([True])", "np.array(['3'])", "np.array([3, None])", "np.array([2**32 + 3])",
    "np.array([2**64 - 1], np.uint64)", "np.array([3 + 0j])", "np.array(['2020'], 'M8[Y]')", "np.array([3], 'm8[s]')",
    "np.zeros(2, [('a', int)])", "np.ma.array([3, 4], mask=[0, 1])", "np.ma.array([3, 4], mask=True)",
    "np.array([3, 4], object)[:0]", "range(0)", "(x for x in [3, 'x'])", "{3, 'x'}",
    "bytearray(b'')", "Ellipsis", "int", "slice(3)", "np.array([b'3'])", "np.array([3, 2**70], object)",
    "np.array([[3], [4]], object)", "[np.float64(3)]", "[np.bool_(True)]", "[np.int64(-3)]",
]  # fmt: skip
SIZES = [
    "None", "0", "-1", "8.0", "'8'", "True", "2**24 + 1", "10**400", "[8]", "np.array([8])", "np.array([])",
    "np.float64(8)", "float('nan')", "np.bool_(True)", "object()", "'x' * 2**20",
]  # fmt: skip
DEPTHS = [
    "None", "0", "-1", "2.5", "'deep'", "True", "float('inf')", "[3]", "np.array([3, 4])", "np.array(3.0)", "'max '",
    "'x' * 2**20", "object()",
]  # fmt: skip
ALGORITHMS = [
    "None", "''", "'optimall'", "3", "['optimal']", "b'optimal'", "object()", "'x' * 2**20", "'\\ud800'", "{}",
]  # fmt: skip
SEEDS = [
    "None", "-1", "1.5", "'1'", "True", "[1]", "np.array([1, 2])", "float('nan')",
]  # fmt: skip
COUNTS = [
    "None", "3", "''", "'12'", "{1: 2}", "[]", "[0, 0]", "[-1]", "[1.0]", "[True]", "[2**63]", "[10**400]",
    "[2**62, 2**62]", "[[1], [2]]", "[None]", "['x' * 2**20]", "np.array([1.0])", "np.array([[1]])",
    "np.array([np.nan])", "np.array(3)", "np.ma.array([1, 2], mask=[0, 1])", "np.array([2**64 - 1], np.uint64)",
    "np.array(['1'])", "object()", "iter([1])", "{1}", "np.zeros(3, bool)",
]  # fmt: skip

PACKING = [
    *(f"pack_lengths({lengths}, 8)" for lengths in LENGTHS),
    *(f"pack_lengths([3, 4], {size})" for size in SIZES),
    *(f"pack_histogram({counts})" for counts in COUNTS),
    *(f"pack_histogram([1, 2], {size})" for size in SIZES if size != "None"),
    *(
        f"{call}, {option}={value})"
        for call in ("pack_lengths([3, 4], 8", "pack_histogram([1, 2]")
        for option, values in (("depth", DEPTHS), ("algorithm", ALGORITHMS), ("seed", SEEDS))
        for value in values
    ),
]

# --- packs for PyTorch

ROW = (
    "{'input_ids': [5, 6, 0], 'position_ids': [0, 1, 0], 'sequence_ids': [1, 1, 0], 'seq_lens': [2], 'labels': [5, 6, -100]}"
)
VALUES = [
    "[5, 2**32 + 7, 0]", "[5, 2**40, 0]", "[5, 10**400, 0]", "[True, False, True]", "[5.0, 6.5, 0]", "[5, None, 0]",
    "['5', '6', '0']", "np.array([5, 2**64 - 1, 0], np.uint64)", "np.array([1.5, 2, 3])", "np.array([np.nan, 2, 3])",
    "np.array([True, True, False])", "np.array(['a', 'b', 'c'])", "np.array([5, None, 0], object)",
]  # fmt: skip
COLLATED = [
    *(
        f"{{**{ROW}, '{name}': {value}}}"
        for name in ("input_ids", "position_ids", "sequence_ids", "labels")
        for value in VALUES
    ),
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
TORCH = [
    *(f"PackCollator()([{rows}])" for rows in COLLATED),
    *(f"PackCollator({each})" for each in COLLATORS),
    *(f"list(PackedDataset({each}))" for each in DATASETS),
]
SAMPLE = [*PACKING[:: tries(3, 1)], *TORCH[:: tries(3, 1)]]


def called(expression: str, folder: Path) -> tuple[str, str]:
    """The type of the error, and its message."""
    from tests.builders.watched_worker import inside

    names: dict[str, Any] = {"np": np, "pack_lengths": pack_lengths, "pack_histogram": pack_histogram}
    if expression in TORCH:
        from gaudi_bert.pytorch import PackCollator, PackedDataset

        names |= {"PackCollator": PackCollator, "PackedDataset": PackedDataset}
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
    parquet.write_table(
        pyarrow.table({"row": [0], "indices": [[1]], "seq_lens": [[2]]}), folder / "index" / "packed-00000-00000.parquet"
    )
    pack = {"input_ids": [[5, None]], "position_ids": [[0, 1]], "sequence_ids": [[1, 1]], "seq_lens": [[2]]}
    parquet.write_table(pyarrow.table(pack), folder / "damaged" / "packed-00000-00000.parquet")
    return folder


@pytest.mark.repeated
@pytest.mark.parametrize("expression", SAMPLE, ids=[f"{text[:15]}-{text[-40:]}" for text in SAMPLE])
def test_a_bad_argument_is_named(worker: WatchedWorker, folders: Path, expression: str) -> None:
    if expression in TORCH:
        pytest.importorskip("torch", reason="PYTORCH MISSING: install the extra dev to test packs for PyTorch")
    outcome = worker.run(called, expression, folders)
    assert outcome.how == "ended", outcome
    kind, message = outcome.value
    assert kind == ("InputError" if expression in TORCH else "ArgumentError"), message
    assert len(message) <= LONGEST_MESSAGE
    assert "\n" not in message
