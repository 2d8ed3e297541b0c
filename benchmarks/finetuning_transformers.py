"""Fine-tuning with the `Trainer` of transformers on PyTorch, for comparison. `finetuning.py` imports this module in a
process of its own.
"""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from finetuning_data import QUALITY_LABELS, SIZE, read_emotion_names, read_emotions, read_entities, read_single_emotions
from transformers import Trainer, TrainerCallback, TrainingArguments

IGNORED = -100


Rows = list[dict[str, Any]]
"""The input features of each row."""


def encode_emotion_rows(data: Path, part: str, most: int | None, tokenizer: Any, length: int = 128) -> Rows:
    """Return rows of GoEmotions, with one float per label."""
    labels, rows = len(read_emotion_names(data)), read_emotions(data, part, most)
    encoded = tokenizer([text for text, _ in rows], truncation=True, max_length=length)["input_ids"]
    targets = np.zeros((len(rows), labels), np.float32)
    for target, (_, numbers) in zip(targets, rows, strict=True):
        target[numbers] = 1
    return [{"input_ids": i, "labels": t.tolist()} for i, t in zip(encoded, targets, strict=True)]


def encode_single_emotion_rows(data: Path, part: str, most: int, tokenizer: Any, length: int = 128) -> Rows:
    """Return comments of GoEmotions that have exactly one of a few labels."""
    rows = read_single_emotions(data, part, most)
    encoded = tokenizer([text for text, _ in rows], truncation=True, max_length=length)["input_ids"]
    labels = [QUALITY_LABELS.index(label) for _, label in rows]
    return [{"input_ids": ids, "labels": label} for ids, label in zip(encoded, labels, strict=True)]


def encode_entity_rows(data: Path, part: str, most: int, tokenizer: Any, names: Sequence[str]) -> Rows:
    """Return sentences of WNUT17. The tag of a word is the label of its first word piece."""
    features = []
    for words, tags in read_entities(data, part, most):
        encoded = tokenizer(words, is_split_into_words=True, truncation=True, max_length=128)
        places = encoded.word_ids()
        firsts = [place is not None and place != before for before, place in zip([None, *places], places, strict=False)]
        labels = [names.index(tags[place]) if first else IGNORED for first, place in zip(firsts, places, strict=True)]
        features.append({"input_ids": encoded["input_ids"], "labels": labels})
    return features


def make_training_arguments(folder: Path, batch: int, **more: Any) -> TrainingArguments:
    """Return Trainer's arguments with gaudi-bert's default hyperparameters. Nothing is saved or reported."""
    given = {
        "learning_rate": 5e-5,
        "weight_decay": 0.01,
        "adam_epsilon": 1e-6,
        "max_grad_norm": 1.0,
        "warmup_steps": 0.1,
        "lr_scheduler_type": "linear",
        **more,
    }
    return TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=batch,
        per_device_eval_batch_size=64,
        use_cpu=True,
        save_strategy="no",
        logging_strategy="no",
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=False,
        **given,
    )


class WaitingTrainer(TrainerCallback):
    """Trains a model with random weights on GoEmotions in rows of 128. The training thread waits before each step until
    `run` is called.

    Args:
        data: The folder of the labelled data sets.
        model: The folder of the tokenizer.
        way: `padded` pads all rows to 128, `dynamic` pads to the longest row of a batch, and `grouped` also groups rows of
            similar length.
        batch: The number of rows in a step.
        most: The number of training rows. None: all.
    """

    def __init__(self, data: Path, model: Path, way: str, batch: int, most: int | None) -> None:
        transformers.utils.logging.set_verbosity_error()
        self._go, self._done = threading.Semaphore(0), threading.Semaphore(0)
        tokenizer = transformers.AutoTokenizer.from_pretrained(model)
        labels = len(read_emotion_names(data))
        config = transformers.BertConfig(
            vocab_size=len(tokenizer), num_labels=labels, problem_type="multi_label_classification", **SIZE
        )
        torch.manual_seed(1)
        padding: dict[str, Any] = {"padding": "max_length", "max_length": 128} if way == "padded" else {"padding": True}
        more = {"train_sampling_strategy": "group_by_length"} if way == "grouped" else {}
        trainer = Trainer(
            model=transformers.BertForSequenceClassification(config),
            args=make_training_arguments(Path(tempfile.mkdtemp()), batch, max_steps=1_000_000, **more),
            train_dataset=encode_emotion_rows(data, "train", most, tokenizer),
            data_collator=transformers.DataCollatorWithPadding(tokenizer, **padding),
            callbacks=[self],
        )
        threading.Thread(target=trainer.train, daemon=True).start()
        self._done.acquire()

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """Report that the previous step is done, and wait for the next call of `run`."""
        self._done.release()
        self._go.acquire()

    def run(self, steps: int) -> None:
        """Run a number of steps, each including the loading of the next batch."""
        for _ in range(steps):
            self._go.release()
            self._done.acquire()


def compute_accuracy(predictions: Any) -> dict[str, float]:
    """Return the accuracy."""
    from sklearn.metrics import accuracy_score

    return {"accuracy": float(accuracy_score(predictions.label_ids, predictions.predictions.argmax(axis=-1)))}


def make_entity_metric(names: Sequence[str]) -> Callable[[Any], dict[str, float]]:
    """Return a function that computes the F1 score of entities."""
    from seqeval.metrics import f1_score

    def figures(predictions: Any) -> dict[str, float]:
        kept, guesses = predictions.label_ids != IGNORED, predictions.predictions.argmax(axis=-1)
        sides = [
            [[names[tag] for tag in row[used]] for row, used in zip(tags, kept, strict=True)]
            for tags in (predictions.label_ids, guesses)
        ]
        return {"f1": float(f1_score(*sides))}

    return figures


def measure_quality(data: Path, model: Path, task: str, settings: dict[str, Any], folder: Path) -> float:
    """Fine-tune the weights of `model` for a task with the given hyperparameters, and return the metric after the last
    update.
    """
    transformers.utils.logging.set_verbosity_error()
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    transformers.set_seed(settings["seed"])
    rows, held_out = settings["rows"], settings["held_out"]
    if task == "goemotions":
        train, dev = (
            encode_single_emotion_rows(data, part, most, tokenizer) for part, most in (("train", rows), ("dev", held_out))
        )
        names, figures, metric = list(QUALITY_LABELS), compute_accuracy, "accuracy"
        kind: Any = transformers.AutoModelForSequenceClassification
        collator: Any = transformers.DataCollatorWithPadding(tokenizer)
    else:
        names = sorted({tag for part in ("train", "dev") for _, tags in read_entities(data, part) for tag in tags})
        train, dev = (
            encode_entity_rows(data, p, most, tokenizer, names) for p, most in (("train", rows), ("dev", held_out))
        )
        figures, metric = make_entity_metric(names), "f1"
        kind = transformers.AutoModelForTokenClassification
        collator = transformers.DataCollatorForTokenClassification(tokenizer)
    trainer = Trainer(
        model=kind.from_pretrained(model, num_labels=len(names)),
        args=make_training_arguments(
            folder,
            settings["batch"],
            num_train_epochs=settings["epochs"],
            seed=settings["seed"],
            learning_rate=settings["learning_rate"],
        ),
        train_dataset=train,
        eval_dataset=dev,
        data_collator=collator,
        compute_metrics=figures,
    )
    trainer.train()
    return float(trainer.evaluate()[f"eval_{metric}"])
