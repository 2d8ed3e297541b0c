"""Google's TF1 checkpoints of BERT: `bert_model.ckpt.index` and `.data-00000-of-00001`, with `bert_config.json` beside them.

Our variables carry the names and the layout of `google-research/bert`, so a checkpoint is a table of them, nothing more. A
checkpoint written while training holds more (Adam's moments as `<variable>/adam_m`, counters); that is passed over.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import tensorflow as tf

from gaudi_bert.common.arrays import Float32Array, WeightArrays
from gaudi_bert.common.errors import FailedError, InputError

__all__ = ["find_google_checkpoint", "read_google_checkpoint", "write_google_checkpoint"]

INDEX = ".index"
SCOPES = ("bert/", "cls/")


def find_google_checkpoint(path: Path) -> Path | None:
    """The prefix of the TF1 checkpoint that `path` means: a prefix, its index file, or a folder that holds one; or None.

    Raises:
        InputError: the folder holds several.
    """
    if path.name.endswith(INDEX) and path.is_file():
        return path.with_name(path.name.removesuffix(INDEX))
    if Path(f"{path}{INDEX}").is_file():
        return path
    found = sorted(path.glob(f"*{INDEX}")) if path.is_dir() else []
    if len(found) > 1:
        raise InputError(f"{path}: holds {len(found)} TF1 checkpoints; name one, for example {found[-1].with_suffix('')}")
    return found[0].with_suffix("") if found else None


def read_google_checkpoint(prefix: Path) -> dict[str, Float32Array]:
    """The variables of BERT in a TF1 checkpoint, by name.

    Raises:
        InputError: it cannot be read, or holds no BERT.
    """
    try:
        reader = tf.train.load_checkpoint(str(prefix))
        names = reader.get_variable_to_shape_map()
        values = {name: reader.get_tensor(name) for name in names if _is_weight(name, names)}
    except (tf.errors.OpError, RuntimeError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise InputError(
            f"{prefix}: not a whole TF1 checkpoint ({reason}); copy its .index and .data files again"
        ) from error
    if not values:
        raise InputError(f"{prefix}: holds no variable below bert/; give a checkpoint of google-research/bert")
    return values


def _is_weight(name: str, names: Mapping[str, object]) -> bool:
    """Whether `name` is the model's, and not what an optimiser keeps of another variable."""
    return name.startswith(SCOPES) and name.rpartition("/")[0] not in names


def write_google_checkpoint(prefix: Path, variables: WeightArrays) -> None:
    """Write `variables` as a TF1 checkpoint, which `tf.compat.v1.train.Saver` and `tf.train.load_checkpoint` read.

    Raises:
        FailedError: the disk is full or the folder not writable.
    """
    names = sorted(variables)
    try:
        with tf.device("/CPU:0"):
            tf.raw_ops.SaveV2(
                prefix=str(prefix),
                tensor_names=names,
                shape_and_slices=[""] * len(names),
                tensors=[tf.constant(np.ascontiguousarray(variables[name])) for name in names],
            )
    except tf.errors.OpError as error:
        reason = " ".join(str(error).split())
        raise FailedError(f"{prefix}: cannot write ({reason}); free some space, or choose another folder") from error
