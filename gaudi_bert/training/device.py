"""The device that the graph is built for, and its threads.

On Gaudi the order of calls is fixed by its documentation: first the processes are connected (`distributed.connect`),
then `habana_frameworks.tensorflow.load_habana_module()` registers the device, and only then may a graph or a variable
be made. Each process sees one card, always as `/device:HPU:0`, which the runtime prefers for all that it can run.
bfloat16 is switched by the runtime on Gaudi (`gaudi/runtime.py`), never together with a compute type of our own, and by the
model's compute type on a CPU.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Literal

import tensorflow as tf

from gaudi_bert.common.errors import InputError
from gaudi_bert.config import GaudiSettings
from gaudi_bert.training.gaudi.runtime import GaudiMissingError, load_gaudi

__all__ = ["Device", "open_device"]

Kind = Literal["auto", "cpu", "hpu"]


@dataclass(frozen=True)
class Device:
    """An opened device.

    Attributes:
        kind: "cpu" or "hpu".
        name: TensorFlow's name, for `tf.device`.
        compute_dtype: the type in which the model multiplies matrices, "float32" or "bfloat16".
        description: for people.
        notes: what else is to be said of it.
    """

    kind: Literal["cpu", "hpu"]
    name: str
    compute_dtype: Literal["float32", "bfloat16"]
    description: str
    notes: tuple[str, ...] = ()

    @property
    def compiles_kernels(self) -> bool:
        """Whether chains of elementwise operations gain from XLA: on a CPU. Gaudi's own compiler fuses them."""
        return self.kind == "cpu"


def open_device(
    kind: Kind,
    precision: Literal["float32", "bfloat16"],
    threads: int | None = None,
    gaudi: GaudiSettings | None = None,
) -> Device:
    """Open the device; call it after `distributed.connect` and before any variable is made.

    Args:
        kind: "auto" takes a Gaudi card if its software and a card are there, else the CPU.
        precision: of matrix products.
        threads: CPU threads of one operation; None for one per core.
        gaudi: settings of the Gaudi runtime; None for the defaults.

    Raises:
        InputError: Gaudi was asked for and its software, driver or card is missing; or threads cannot be set any more.
    """
    if kind != "cpu":
        try:
            notes = load_gaudi(gaudi if gaudi is not None else GaudiSettings(), precision)
            return Device("hpu", "/device:HPU:0", "float32", "Gaudi card HPU:0", tuple(notes))
        except GaudiMissingError as error:
            if kind == "hpu":
                raise InputError(f"training.device = hpu: {error}; or set training.device = cpu") from error
    if threads is not None:
        _set_threads(threads)
    used = tf.config.threading.get_intra_op_parallelism_threads() or os.cpu_count() or 1
    return Device("cpu", "/device:CPU:0", precision, f"CPU, {used} threads")


def _set_threads(threads: int) -> None:
    if tf.config.threading.get_intra_op_parallelism_threads() == threads:
        return
    try:
        tf.config.threading.set_intra_op_parallelism_threads(threads)
        tf.config.threading.set_inter_op_parallelism_threads(threads)
    except RuntimeError as error:
        raise InputError(
            f"training.threads = {threads}: TensorFlow is already running with other threads in this process; "
            "start a new process"
        ) from error
