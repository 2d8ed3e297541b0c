"""What each of two real Horovod processes does for `training/test_two_processes.py`; started by horovodrun.

usage: python -m tests.builders.two_processes DATA OUT   writes OUT/rank-<n>.json and, from rank 0, OUT/<case>.npz
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import numpy as np
import tensorflow as tf

from gaudi_bert.artefacts.results import to_json
from gaudi_bert.common.errors import StoppedError
from gaudi_bert.config.pipeline import PipelineSettings, section_from_mapping
from gaudi_bert.config.sections import TrainingSettings
from gaudi_bert.engines.tensorflow.engine import connect_processes
from gaudi_bert.runs.records import train
from gaudi_bert.training.evaluate import evaluate
from gaudi_bert.training.objective import TrainingStep
from tests.builders import training_data
from tests.builders import training_updates as work
from tests.builders.reporters import QUIET

# Of processes that horovodrun or mpirun starts on this machine.
ENVIRONMENT = {
    **os.environ,
    "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    "TF_CPP_MIN_LOG_LEVEL": "3",
    "OMP_NUM_THREADS": "1",
    "HOROVOD_CYCLE_TIME": "5",  # milliseconds between two looks for sums, each of which costs time of the processor
}
CASES = {
    "global-3": {"micro_batches": 3},
    "balanced": {"micro_batches": 2, "kind": "balanced", "optimizer": "lamb", "loss": "sequence"},
    "local": {"micro_batches": 2, "kind": "local"},
}
MODEL = {**training_data.MODEL, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
TRAINING = {
    "updates": 12,
    "warmup_updates": 4,
    "global_batch_sequences": 16,
    "micro_batch_packs": 2,
    "save_every_updates": 20,
    "evaluate_every_updates": 20,
    "log_every_updates": 1,
    "measure_speedup": False,
    "shuffle_packs": 6,
    "stall_seconds": 60,
    "threads": 1,
}


def settings(**training) -> PipelineSettings:
    return section_from_mapping(PipelineSettings, {"model": MODEL, "training": {**TRAINING, **training}}, "test")


def stopped(data: Path, out: Path, rank: int) -> str:
    """Train until rank 1, and nobody else, is asked to stop in its seventh update."""
    long_run = settings(updates=1_000_000, log_every_updates=1_000_000, save_every_updates=1_000_000)
    if rank == 1:
        right = TrainingStep.run_update

        def run_then_stop(self, micro_batches, update, learning_rate):
            sums = right(self, micro_batches, update, learning_rate)
            if update == 7:
                os.kill(os.getpid(), signal.SIGTERM)
            return sums

        TrainingStep.run_update = run_then_stop
    try:
        train(long_run, data / "train", None, out, reporter=QUIET)
    except StoppedError as error:
        return str(error)
    return ""


def main() -> None:
    data, out = map(Path, sys.argv[1:])
    # As the stage `train` would set them, before TensorFlow is used.
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    connected = connect_processes(TrainingSettings(), {})
    facts = {}
    with connected.watch_processes_during_block(TrainingSettings(stall_seconds=60)) as communicator:
        for name, arguments in CASES.items():
            parameters = work.run_updates(communicator, **arguments)
            if communicator.is_first:
                np.savez(out / f"{name}.npz", **parameters)
    facts["stopped"] = stopped(data, out / "stopped", connected.rank)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    trained = train(
        settings(target_masked_lm_accuracy=0.001, evaluate_every_updates=4, global_batch_sequences=8),
        data / "three",
        data / "evaluation",
        out / "trained",
        reporter=QUIET,
    )
    facts["trained"] = to_json(trained)
    facts["evaluated"] = to_json(evaluate(data / "evaluation", out / "trained", reporter=QUIET))
    (out / f"rank-{connected.rank}.json").write_text(json.dumps(facts))


if __name__ == "__main__":
    main()
