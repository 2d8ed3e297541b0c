"""One of two Horovod processes, of which rank 1 falls asleep inside a graph; started by horovodrun.

usage: python -m tests.builders.sleeping_process DATA OUT   rank 1 sleeps in its fourth forward pass
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import tensorflow as tf

from gaudi_bert.common.progress import Reporter
from gaudi_bert.stages.training.train import train
from gaudi_bert.training import objective
from tests.builders.two_processes import settings

right = objective.pretraining_sums
passes: list[int] = []


def pause() -> None:
    passes.append(1)
    if os.environ["HOROVOD_RANK"] == "1" and len(passes) == 4:
        print("asleep", flush=True)
        time.sleep(600)


def sums_after_a_pause(*arguments):
    sums = right(*arguments)
    with tf.control_dependencies([tf.py_function(pause, [], [])]):
        return sums._replace(masked_lm_sum=tf.identity(sums.masked_lm_sum))


if __name__ == "__main__":
    objective.pretraining_sums = sums_after_a_pause
    data, out = Path(sys.argv[1]), Path(sys.argv[2])
    train(settings(stall_seconds=10), data / "train", None, out, reporter=Reporter(quiet=True))
