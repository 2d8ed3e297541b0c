"""The logs of a run: `metrics.jsonl`, TensorBoard event files and, if requested, an MLPerf log.

Each report is written to `metrics.jsonl` as one JSON line, and flushed immediately. When a run is resumed from a checkpoint,
the lines of later updates are removed first, so that the file contains each update only once.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import socket
import struct
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

from gaudi_bert.artefacts.base import read_complete_lines
from gaudi_bert.common.errors import InputError
from gaudi_bert.common.files import explain_os_errors, write_text
from gaudi_bert.config.sections import MlperfSettings
from gaudi_bert.model.config import BertConfig, parameter_specs
from gaudi_bert.tfrecords.wire.framing import frame
from gaudi_bert.training.run_plan import RunPlan
from gaudi_bert.training.sources import RecordSource


class MetricsWriter:
    """A context manager that appends metrics to `metrics.jsonl` and to a new TensorBoard event file.

    Args:
        folder: The folder of the run.
        last_update: The last update that the run has done. Later lines are removed from `metrics.jsonl`.

    Attributes:
        path: The path of `metrics.jsonl`.
        evaluated_updates: The updates whose evaluations `metrics.jsonl` already contained.

    Raises:
        InputError: A line of `metrics.jsonl` is not JSON.
    """

    def __init__(self, folder: Path, last_update: int) -> None:
        self.path = Path(folder) / "metrics.jsonl"
        lines: list[dict[str, Any]] = []
        for number, text in enumerate(read_complete_lines(self.path) if self.path.exists() else (), start=1):
            try:
                lines.append(json.loads(text))
            except ValueError as error:
                raise InputError(
                    f"{self.path}: line {number} is not JSON; remove the line, or train again with --overwrite"
                ) from error
        lines = [line for line in lines if line["update"] <= last_update]
        self.evaluated_updates = {line["update"] for line in lines if line["kind"] == "evaluation"}
        write_text(self.path, "".join(json.dumps(line) + "\n" for line in lines))
        now, board = time.time(), Path(folder) / "tensorboard"
        with explain_os_errors(self.path, "write"):
            board.mkdir(parents=True, exist_ok=True)
            name = f"events.out.tfevents.{int(now):010d}.{socket.gethostname()}.{os.getpid()}"
            self._lines, self._events = open(self.path, "ab"), open(board / name, "ab")  # noqa: SIM115 - see __exit__
        self._append_and_flush(self._events, frame(_encode_time(now) + _encode_field(3, b"brain.Event:2")))

    def write_report(self, kind: str, update: int, values: Mapping[str, float]) -> None:
        """Write the metrics of an evaluation, or of the updates since the last report, to `metrics.jsonl` and to the
        TensorBoard file.

        Args:
            kind: "train" or "evaluation".
            update: The number of the update.
            values: The metrics by name.
        """
        line: dict[str, Any] = {"update": update, "kind": kind, **values}
        self._append_and_flush(self._lines, json.dumps(line, allow_nan=False).encode() + b"\n")
        summary = b"".join(
            _encode_field(1, _encode_field(1, f"{kind}/{name}".encode()) + b"\x15" + struct.pack("<f", value))
            for name, value in values.items()
        )
        self._append_and_flush(
            self._events, frame(_encode_time(time.time()) + b"\x10" + _encode_varint(update) + _encode_field(5, summary))
        )

    def _append_and_flush(self, handle: BinaryIO, content: bytes) -> None:
        """Append bytes to an open file, and flush it."""
        with explain_os_errors(self.path, "write"):
            handle.write(content)
            handle.flush()

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(self, *error: object) -> None:
        self._lines.close()
        self._events.close()


# --- TensorBoard event files: one TFRecord per report, which contains a protocol buffer message `Event`
#
# The writers of TensorFlow and PyTorch need their framework or the package tensorboard, and tensorboardX would add protobuf
# as a dependency to replace the 20 lines below. We need only three message types, so we encode them here. Fields of an
# Event: 1 is the time in seconds (double), 2 the step, 3 the file version, 5 a Summary. Field 1 of a Summary is a Value.
# Fields of a Value: 1 is the tag, 2 the number (float).


def _encode_time(seconds: float) -> bytes:
    """Encode the time field of a TensorBoard Event message as a protocol buffer."""
    return b"\x09" + struct.pack("<d", seconds)


def _encode_field(field: int, content: bytes) -> bytes:
    """Encode a protocol buffer field that contains a string, bytes or a nested message."""
    return bytes([field << 3 | 2]) + _encode_varint(len(content)) + content


def _encode_varint(number: int) -> bytes:
    """Encode a non-negative integer as a protocol buffer varint."""
    groups = []
    while number > 0x7F:
        groups.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*groups, number])


# --- The log of an MLPerf submission, written with the package `mlperf-logging` if `mlperf.log` is true (default: false)
#
# The MLPerf rules for BERT define no epochs, so `epoch_num` is the number of sequences seen. Every start of a run writes a
# new log, because a run that was stopped and resumed cannot be submitted. The following command checks a log. In the closed
# division, it requires an evaluation with an accuracy of at least 0.72.
#
#     python -m mlperf_logging.compliance_checker --ruleset 4.1.0 mlperf.log
#
# MLPerf training 4.1 was the last round with this BERT. The logs also satisfy the rules of rounds 2.1 and 3.1.


class MlperfLog:
    """A context manager that writes the MLPerf log of a training run.

    Enter the context before training, and leave it when training ends.

    Args:
        path: The log file.
        settings: The organization, the platform and the division of the submission.
        plan: The plan of the run.
        source: The training data.
        config: The model.

    Raises:
        InputError: The package `mlperf-logging` is not installed.
    """

    def __init__(
        self, path: Path, settings: MlperfSettings, plan: RunPlan, source: RecordSource, config: BertConfig
    ) -> None:
        try:
            mllog = importlib.import_module("mlperf_logging.mllog")
        except ImportError as error:
            raise InputError(
                "mlperf.log = true: the package mlperf-logging is not installed; install mlperf-logging 4.1.68, or set "
                "mlperf.log to false"
            ) from error
        self._keys = mllog.constants
        path.parent.mkdir(parents=True, exist_ok=True)
        with explain_os_errors(path, "write"):
            self._handler = logging.FileHandler(path, mode="w", encoding="utf-8")
        # The root logger may print to standard output and break the output of --json. This logger has no parent, so its
        # records do not reach the root logger.
        logger = logging.Logger("gaudi-bert-mlperf", logging.INFO)
        logger.addHandler(self._handler)
        self._log = mllog.mllog.MLLogger(logger)
        self._block_start: int | None = None
        self._eval_samples_logged = False
        self._reached = False
        keys = self._keys
        self._log.event(keys.CACHE_CLEAR, True)
        self._log.start(keys.INIT_START)
        self._log_submission_and_hyperparameters(settings, plan, source, config)

    def _log_submission_and_hyperparameters(
        self, submission: MlperfSettings, plan: RunPlan, source: RecordSource, config: BertConfig
    ) -> None:
        """Log who submits what, the hyperparameters, the names of the model variables and, if known, the number of training
        sequences.
        """
        settings, keys = plan.settings, self._keys
        values: Mapping[str, Any] = {
            keys.SUBMISSION_BENCHMARK: keys.BERT,
            keys.SUBMISSION_ORG: submission.organization,
            keys.SUBMISSION_PLATFORM: submission.platform,
            keys.SUBMISSION_DIVISION: submission.division,
            keys.SUBMISSION_STATUS: keys.ONPREM,
            keys.SEED: settings.seed,
            keys.GLOBAL_BATCH_SIZE: round(plan.sequences_per_update),
            keys.GRADIENT_ACCUMULATION_STEPS: plan.accumulation_steps,
            keys.MAX_SEQUENCE_LENGTH: plan.slots_per_pack,
            keys.OPT_BASE_LR: settings.learning_rate,
            keys.OPT_LAMB_EPSILON: settings.epsilon,
            keys.OPT_LR_TRAINING_STEPS: settings.updates,
            keys.OPT_LR_WARMUP_STEPS: settings.warmup_updates,
            keys.NUM_WARMUP_STEPS: settings.warmup_updates,
            keys.START_WARMUP_STEP: 0,
            keys.OPT_LAMB_BETA_1: settings.beta_1,
            keys.OPT_LAMB_BETA_2: settings.beta_2,
            keys.OPT_LAMB_WEIGHT_DECAY: settings.weight_decay,
            keys.OPT_LAMB_LR_DECAY_POLY_POWER: settings.decay_power,
        }
        for key, value in values.items():
            self._log.event(key, value)
        if source.pack_count is not None:
            self._log.event(keys.TRAIN_SAMPLES, round(source.pack_count * source.packing_factor))
        for name in parameter_specs(config):
            self._log.event(keys.WEIGHTS_INITIALIZATION, metadata={"tensor": name})

    def __enter__(self) -> MlperfLog:
        return self

    def log_run_start(self, sequences: int) -> None:
        """Log that the initialization ends, and that the timed run and its first training block start. A block is the
        training between two evaluations.
        """
        self._log.end(self._keys.INIT_STOP)
        self._log.start(self._keys.RUN_START)
        self._log_block_start(sequences)

    def log_evaluation_start(self, sequences: int) -> None:
        """Log that a training block ends and an evaluation starts. A block is the training between two evaluations."""
        self._log_block_end()
        self._log.start(self._keys.EVAL_START, metadata=_make_progress_metadata(sequences))

    def log_evaluation_end(
        self, sequences: int, masked_lm_accuracy: float, evaluated_sequences: int, is_finished: bool
    ) -> None:
        """Log the result of an evaluation. If the run continues, also log the start of the next training block, which lasts
        until the next evaluation.

        Args:
            sequences: The number of training sequences seen so far.
            masked_lm_accuracy: The masked-LM accuracy, from 0 to 1.
            evaluated_sequences: The number of held-out sequences.
            is_finished: Whether the run ends successfully with this evaluation.
        """
        if not self._eval_samples_logged:
            self._log.event(self._keys.EVAL_SAMPLES, evaluated_sequences)
            self._eval_samples_logged = True
        self._log.event(self._keys.EVAL_ACCURACY, masked_lm_accuracy, metadata=_make_progress_metadata(sequences))
        self._log.end(self._keys.EVAL_STOP, metadata=_make_progress_metadata(sequences))
        self._reached = is_finished
        if not is_finished:
            self._log_block_start(sequences)

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        self._log_block_end()
        keys = self._keys
        self._log.end(
            keys.RUN_STOP, metadata={keys.STATUS: keys.SUCCESS if self._reached and kind is None else keys.ABORTED}
        )
        self._handler.close()

    def _log_block_start(self, sequences: int) -> None:
        """Log the start of a training block, which is the MLPerf name for the training between two evaluations."""
        self._block_start = sequences
        self._log.start(self._keys.BLOCK_START, metadata=_make_block_metadata(sequences))

    def _log_block_end(self) -> None:
        """Log the end of the current training block, if there is one. A block is the training between two evaluations."""
        if self._block_start is not None:
            self._log.end(self._keys.BLOCK_STOP, metadata=_make_block_metadata(self._block_start))
            self._block_start = None


def _make_progress_metadata(sequences_seen: int) -> dict[str, int]:
    """Return the MLPerf log metadata that states how many training sequences the run has seen so far."""
    return {"epoch_num": sequences_seen, "samples_count": sequences_seen}


def _make_block_metadata(sequences_before: int) -> dict[str, int]:
    """Return the MLPerf log metadata for a block, which is the training between two evaluations. The block begins after
    `sequences_before` training sequences.
    """
    return {"first_epoch_num": sequences_before, "epoch_count": 1, "samples_count": sequences_before}
