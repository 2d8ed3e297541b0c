"""Bad packs for PyTorch, and damaged folders of models: each is an error of ours, of one line.

`make test` tries a few of each, always the same; `make test-long` thousands.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from gaudi_bert.common.errors import InputError
from tests.builders.bert_folder import good_folder
from tests.builders.effort import tries
from tests.builders.watched_worker import WatchedWorker
from tools.fuzz_models import FILES, problems

ROW = {
    "input_ids": [5, 6, 0],
    "position_ids": [0, 1, 0],
    "sequence_ids": [1, 1, 0],
    "seq_lens": [2],
    "labels": [5, 6, -100],
}
VALUES = (
    *([5, 2**32 + 7, 0], [5, 2**40, 0], [5, 10**400, 0], [True, False, True], [5.0, 6.5, 0], [5, None, 0]),
    *(["5", "6", "0"], np.array([5, 2**64 - 1, 0], np.uint64), np.array([1.5, 2, 3]), np.array([np.nan, 2, 3])),
    *(np.array([True, True, False]), np.array(["a", "b", "c"]), np.array([5, None, 0], object)),
)
BAD = dict.fromkeys(("input_ids", "position_ids", "sequence_ids", "labels"), VALUES)
BAD["seq_lens"] = ([2.5], [2**40], ["2"], [None], [True])


@pytest.mark.parametrize("name", BAD)
def test_bad_packs_are_named(name: str) -> None:
    pytest.importorskip("torch", reason="PYTORCH MISSING: install the extra dev to test packs for PyTorch")
    from gaudi_bert.pytorch import PackCollator

    for value in BAD[name]:
        with pytest.raises(InputError) as caught:
            PackCollator()([{**ROW, name: value}])
        assert len(str(caught.value)) <= 1000


COUNT, AT_ONCE = tries(100, 2000), 50


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return good_folder(tmp_path_factory.mktemp("model") / "good")


@pytest.mark.repeated
@pytest.mark.parametrize("first", range(0, COUNT, AT_ONCE))
@pytest.mark.parametrize("name", FILES)
def test_damaged_model_folders(worker: WatchedWorker, model: Path, tmp_path: Path, name: str, first: int) -> None:
    assert list(problems(worker, model, name, range(first, first + AT_ONCE), tmp_path)) == []
