"""The device that the graph is built for, and its threads.

On Gaudi the order of calls is fixed by its documentation: first the processes are connected (`distributed.connect`), then
`habana_frameworks.tensorflow.load_habana_module()` registers the device, and only then may a graph or a variable be made.
Each process sees one card, always as `/device:HPU:0`. bfloat16 is switched by `TF_BF16_CONVERSION` on Gaudi (never together
with a compute type of our own), and by the model's compute type on a CPU.
"""

from __future__ import annotations

import importlib
import os
from dataclasses import dataclass
from typing import Literal

import tensorflow as tf

from gaudi_bert.common.errors import InputError

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
    """

    kind: Literal["cpu", "hpu"]
    name: str
    compute_dtype: Literal["float32", "bfloat16"]
    description: str


def open_device(kind: Kind, precision: Literal["float32", "bfloat16"], threads: int | None = None) -> Device:
    """Open the device; call it after `distributed.connect` and before any variable is made.

    Args:
        kind: "auto" takes a Gaudi card if its software and a card are there, else the CPU.
        precision: of matrix products.
        threads: CPU threads of one operation; None for one a core.

    Raises:
        InputError: Gaudi was asked for and its software, driver or card is missing; or threads cannot be set any more.
    """
    if kind != "cpu":
        problem = _load_habana(precision)
        if problem is None:
            return Device("hpu", "/device:HPU:0", "float32", "Gaudi card HPU:0")
        if kind == "hpu":
            raise InputError(f"training.device = hpu: {problem}; or set training.device = cpu")
    if threads is not None:
        _set_threads(threads)
    used = tf.config.threading.get_intra_op_parallelism_threads() or os.cpu_count() or 1
    return Device("cpu", "/device:CPU:0", precision, f"CPU, {used} threads")


def _load_habana(precision: str) -> str | None:
    """Register the Gaudi device; return what is missing and its remedy, or None."""
    if precision == "bfloat16":
        os.environ.setdefault("TF_BF16_CONVERSION", "1")
    try:
        habana = importlib.import_module("habana_frameworks.tensorflow")
    except ImportError:
        return (
            "the package habana_frameworks is not installed; use the Gaudi training image, "
            "or install habana-tensorflow 1.14.0.493 with TensorFlow 2.15 on Python 3.10"
        )
    try:
        habana.load_habana_module()
    except (RuntimeError, OSError, tf.errors.OpError) as error:
        reason = " ".join(str(error).split())
        return f"load_habana_module() failed ({reason}); check the driver with hl-smi, and that this process may see a card"
    if not tf.config.list_physical_devices("HPU"):
        return "no Gaudi card is visible; check hl-smi and HABANA_VISIBLE_DEVICES, and that no other process holds the card"
    return None


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
