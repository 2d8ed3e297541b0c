"""Google's TF1 checkpoints: `bert_model.ckpt.index` and `.data-00000-of-00001`.

Our variables carry the names and the layout of `google-research/bert`, so a checkpoint is a table of them. One written while
training holds more (Adam's moments as `<variable>/adam_m`, counters), which is ignored.
"""

from __future__ import annotations

from pathlib import Path

import tensorflow as tf

from gaudi_bert.common.arrays import Float32Array
from gaudi_bert.common.errors import InputError

_SCOPES = ("bert/", "cls/")


def read_google_checkpoint(prefix: Path) -> dict[str, Float32Array]:
    """The variables of BERT in a TF1 checkpoint, by name."""
    try:
        reader = tf.train.load_checkpoint(str(prefix))
        names = reader.get_variable_to_shape_map()
        # What an optimizer keeps of a variable is stored below its name.
        weights = [name for name in names if name.startswith(_SCOPES) and name.rpartition("/")[0] not in names]
        values = {name: reader.get_tensor(name) for name in weights}
    except (tf.errors.OpError, RuntimeError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise InputError(
            f"{prefix}: not a complete TF1 checkpoint ({reason}); copy its .index and .data files again"
        ) from error
    if not values:
        raise InputError(f"{prefix}: holds no variable below bert/; give a checkpoint of google-research/bert")
    return values
