"""The log of an MLPerf submission (`mlperf.log: true`), by MLPerf's own package `mlperf-logging`; off by default.

The first process writes `mlperf.log` into the folder of the run: who submits and on what, the hyperparameters that the rules
ask for, the time of initialisation and of the run, and blocks of training with an evaluation between them. BERT's rules know
no epochs: `epoch_num` is the number of sequences seen. Every process start writes a new log, because a run that was stopped
and resumed is not a submission. The package checks it, and in the closed division wants an evaluation that reached 0.72:

    python -m mlperf_logging.compliance_checker --ruleset 4.1.0 mlperf.log

4.1 is the last round of MLPerf training with this BERT; the rules of 2.1 and 3.1 are met as well.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gaudi_bert.common.errors import InputError
from gaudi_bert.common.files import explained_os_errors
from gaudi_bert.config.sections import MlperfSettings
from gaudi_bert.model.config import BertConfig, parameter_specs
from gaudi_bert.training.input import DataSource
from gaudi_bert.training.run_plan import RunPlan


class MlperfLog:
    """Writes the log; the context lasts as long as training does."""

    def __init__(self, path: Path, settings: MlperfSettings, plan: RunPlan, source: DataSource, config: BertConfig) -> None:
        try:
            mllog = importlib.import_module("mlperf_logging.mllog")
        except ImportError as error:
            raise InputError(
                "mlperf.log = true: the package mlperf-logging is not installed; install version 4.1.68, or set it to false"
            ) from error
        self._keys = mllog.constants
        path.parent.mkdir(parents=True, exist_ok=True)
        with explained_os_errors(path, "write"):
            self._handler = logging.FileHandler(path, mode="w", encoding="utf-8")
        # A separate logger, not one of the process: nothing goes to standard output, which belongs to --json.
        logger = logging.Logger("gaudi-bert-mlperf", logging.INFO)
        logger.addHandler(self._handler)
        self._log = mllog.mllog.MLLogger(logger)
        self._block_start: int | None = None
        self._eval_samples_logged = False
        self._reached = False
        keys = self._keys
        self._log.event(keys.CACHE_CLEAR, True)
        self._log.start(keys.INIT_START)
        for key, value in (
            (keys.SUBMISSION_BENCHMARK, keys.BERT),
            (keys.SUBMISSION_ORG, settings.organization),
            (keys.SUBMISSION_PLATFORM, settings.platform),
            (keys.SUBMISSION_DIVISION, settings.division),
            (keys.SUBMISSION_STATUS, keys.ONPREM),
        ):
            self._log.event(key, value)
        self._describe(plan, source, config)

    def _describe(self, plan: RunPlan, source: DataSource, config: BertConfig) -> None:
        """Write what the run is a function of; the number of training sequences only where the data states it."""
        settings, keys = plan.settings, self._keys
        values: Mapping[str, Any] = {
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
        if source.packs is not None:
            self._log.event(keys.TRAIN_SAMPLES, round(source.packs * source.packing_factor))
        for name in parameter_specs(config):
            self._log.event(keys.WEIGHTS_INITIALIZATION, metadata={"tensor": name})

    def __enter__(self) -> MlperfLog:
        return self

    def begins(self, sequences: int) -> None:
        """Initialisation ends, the clock of the run starts."""
        self._log.end(self._keys.INIT_STOP)
        self._log.start(self._keys.RUN_START)
        self._open_block(sequences)

    def evaluation_begins(self, sequences: int) -> None:
        """The block of training ends after so many sequences."""
        self._close_block()
        self._log.start(self._keys.EVAL_START, metadata=_position(sequences))

    def evaluation_ends(self, sequences: int, masked_lm_accuracy: float, evaluated: int, finished: bool) -> None:
        """The accuracy on so many held-out sequences; the next block begins unless `finished`."""
        if not self._eval_samples_logged:
            self._log.event(self._keys.EVAL_SAMPLES, evaluated)
            self._eval_samples_logged = True
        self._log.event(self._keys.EVAL_ACCURACY, masked_lm_accuracy, metadata=_position(sequences))
        self._log.end(self._keys.EVAL_STOP, metadata=_position(sequences))
        self._reached = finished
        if not finished:
            self._open_block(sequences)

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        self._close_block()
        keys = self._keys
        status = keys.SUCCESS if self._reached and kind is None else keys.ABORTED
        self._log.end(keys.RUN_STOP, metadata={keys.STATUS: status})
        self._handler.close()

    def _open_block(self, sequences: int) -> None:
        self._block_start = sequences
        self._log.start(self._keys.BLOCK_START, metadata=_block(sequences))

    def _close_block(self) -> None:
        if self._block_start is not None:
            self._log.end(self._keys.BLOCK_STOP, metadata=_block(self._block_start))
            self._block_start = None


def _position(sequences: int) -> dict[str, int]:
    return {"epoch_num": sequences, "samples_count": sequences}


def _block(sequences: int) -> dict[str, int]:
    return {"first_epoch_num": sequences, "epoch_count": 1, "samples_count": sequences}
