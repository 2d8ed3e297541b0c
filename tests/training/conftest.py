"""A tiny model that was trained once, in a work folder as the pipeline makes it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from gaudi_bert.artefacts.base import VocabularyInfo
from gaudi_bert.config.pipeline import PipelineSettings, section_from_mapping
from gaudi_bert.runs.records import train
from tests.builders import training_data as data
from tests.builders.effort import once
from tests.builders.reporters import QUIET

HELD_OUT = data.make_packs(9, seed=8)
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
# More positions than the records have, and weights that make outputs differ.
MODEL = {**data.MODEL, "max_position_embeddings": 40, "initializer_range": 0.3}
TRAINING = {
    "updates": 20,
    "warmup_updates": 4,
    "global_batch_sequences": 16,
    "micro_batch_packs": 8,
    "save_every_updates": 5,
    "evaluate_every_updates": 10,
    "log_every_updates": 4,
    "keep_checkpoints": 2,
    "shuffle_packs": 6,
}


def settings(**training: object) -> PipelineSettings:
    values = {"model": MODEL, "training": {**TRAINING, **training}, "prepare": {"lower_case": False}}
    return section_from_mapping(PipelineSettings, values, "test")


def make_work(work: Path) -> None:
    data.write_packed(work / "packed" / "train", data.make_packs(29))
    data.write_packed(work / "packed" / "evaluation", HELD_OUT)
    (work / "examples").mkdir()
    words = work / "examples" / "vocab.txt"
    words.write_text(
        "".join(f"{word}\n" for word in [*SPECIAL, *(f"word{n}" for n in range(data.VOCABULARY - len(SPECIAL)))])
    )
    packed = work / "packed"
    metadata = json.loads((packed / "train" / "metadata.json").read_text())
    metadata["vocabulary"] = VocabularyInfo.from_file(words).as_json()
    (packed / "train" / "metadata.json").write_text(json.dumps(metadata))
    train(settings(), packed / "train", packed / "evaluation", work / "train", reporter=QUIET)


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """As the commands' `training.threads`: threads of two tests at a time would wait for each other."""
    torch = pytest.importorskip("torch")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return once(tmp_path_factory, "pretrained", make_work)


@pytest.fixture(scope="session")
def packed(work: Path) -> Path:
    return work / "packed" / "train"


@pytest.fixture(scope="session")
def held_out(work: Path) -> Path:
    return work / "packed" / "evaluation"


@pytest.fixture(scope="session")
def whole_run(work: Path) -> Path:
    """Twenty updates without a stop; no test changes it."""
    return work / "train"
