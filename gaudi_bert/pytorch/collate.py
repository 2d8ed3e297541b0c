"""Rows of packs to the batch that a model's `forward` takes, in the form that is right for its software.

| target | what carries the boundaries |
|---|---|
| `transformers-5` | `attention_mask` [B, 1, L, L], added to scores: right with `sdpa` and with `eager` |
| `transformers-4`, `optimum-habana` | `attention_mask` [B, L, L] of 0 and 1, from which their BERT makes such a mask |
| `flash` | all sequences in one row without padding; `cu_seq_lens_q/k`, `max_length_q/k`: FlashAttention 2 only |
| `flex` | a `BlockMask`: `attn_implementation="flex_attention"` |

Letters: B packs, L positions, Q masked slots, S sequences of a pack, T tokens of all packs.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch
import transformers

from gaudi_bert.common.arrays import MOST_TOKEN_ID, NOT_PREDICTED, AnyArray, IntArray, find_non_integer
from gaudi_bert.common.errors import InputError
from gaudi_bert.encoders.feeding import Feeding, fed_positions, target_mask
from gaudi_bert.encoders.feeding_trial import feeding_of, try_model
from gaudi_bert.encoders.trial import MODEL_ERRORS, Row, small_copy

TARGETS = ("transformers-5", "transformers-4", "optimum-habana", "flash", "flex")
_UNLIMITED = 1 << 62
_OWN_SOFTWARE = {"flash": "flash_attention_2", "flex": "flex_attention"}
_TOKEN_COLUMNS = ("input_ids", "token_type_ids", "position_ids", "sequence_ids", "labels")
_OF_SEQUENCES = ("seq_lens", "next_sentence_labels")
_FOR_MODELS = {
    *("input_ids", "attention_mask", "token_type_ids", "position_ids", "labels"),
    *("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"),
    *("masked_lm_positions", "masked_lm_labels", "sequence_positions", "sequence_labels", "next_sentence_label"),
}

Batch = dict[str, Any]


def model_inputs(batch: Batch) -> Batch:
    """The batch without what models do not take: `sequence_ids`, `seq_lens` and the data's own columns."""
    return {name: value for name, value in batch.items() if name in _FOR_MODELS}


class PackCollator:
    """Makes batches for one kind of model and software.

    Columns with one value for each sequence (weights, names, numbers of rows) keep their names: numbers as
    [B, S], 0 in slots without a sequence (where `seq_lens` is 0, too), anything else as lists.

    Args:
        target: one of `TARGETS`.
        model: a model of `transformers`, its config, or its `model_type` (with the usual settings of that type). How it has
            to be fed is tried on a small copy (`feeding_trial.py`); of a model, its own class is copied, and it is tried
            itself, with its head and this target, in evaluation and in training mode. A config does not describe weights,
            heads and labels: with it, labels of a causal model are the next tokens unless its `architectures` name tags.
        gather_heads: add `masked_lm_positions`, `masked_lm_labels` [B, Q], `sequence_positions` and `next_sentence_label`
            [B, S] for `PackedBertForPreTraining`, instead of `labels`.
        sequence_labels: a column with a value for each sequence: add `sequence_labels` and `sequence_positions` [B, S] for
            `PackedBertForSequenceClassification`, instead of `labels`.
        row_tokens: tokens of the longest rows: the model is tried with such rows, and longer ones are refused. Default: as
            many as it has positions, but 512 to 1,024.
        masked_slots, depth: Q and S, so that every batch has one static shape; else the largest of the batch.
        dtype: of an additive mask: that in which the model computes.

    Raises:
        InputError: an unknown target or model type, or a model that cannot be fed packs, or not for this target with the
            installed software.
    """

    def __init__(
        self,
        target: str = "transformers-5",
        model: Any = "bert",
        *,
        gather_heads: bool = False,
        sequence_labels: str | None = None,
        row_tokens: int | None = None,
        masked_slots: int | None = None,
        depth: int | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        if target not in TARGETS:
            raise InputError(f"target = {target!r}: one of {', '.join(TARGETS)} is allowed")
        if row_tokens is not None and (type(row_tokens) is not int or row_tokens < 2):
            raise InputError(f"row_tokens = {row_tokens!r}: must be an integer of at least 2")
        if isinstance(model, str):
            try:
                model = transformers.AutoConfig.for_model(model)
            except MODEL_ERRORS as error:
                problem = "transformers does not know it; give the model or its config"
                raise InputError(f"model type {model!r}: {problem}") from error
        if not isinstance(model, Feeding):  # which is for a model that is not one of transformers
            _check_software(target, model)
        self.feeding = feeding_of(model, target)
        if self.feeding.embeds_first:
            raise InputError(
                "its embeddings are multiplied with the mask, so no batch is right for its `forward`; use PackedEncoder, or "
                "gaudi-bert train and finetune"
            )
        if gather_heads and sequence_labels is not None:
            raise InputError(f"sequence_labels = {sequence_labels!r}: gather_heads is for pretraining; omit one of them")
        if (gather_heads or sequence_labels is not None) and target == "flash":
            raise InputError("gather_heads: heads gather from packs, and target flash has none; omit gather_heads")
        if target in ("transformers-4", "optimum-habana") and self.feeding.has_window:
            raise InputError(
                f"target = {target!r}: one 3-D mask cannot serve layers with a window; use transformers-5 or flex"
            )
        self.target, self.gather_heads, self.masked_slots, self.depth = target, gather_heads, masked_slots, depth
        self.sequence_labels, self.dtype = sequence_labels, dtype
        self.row_tokens = row_tokens
        is_config = not isinstance(model, Feeding | torch.nn.Module)
        if not isinstance(model, Feeding) and not (is_config and target in _OWN_SOFTWARE):  # which cannot be copied
            tried = small_copy(model, window=_UNLIMITED) if is_config else model
            self.row_tokens, _ = try_model(tried, self.feeding, self._model_batch, row_tokens, training=True)

    def _model_batch(self, rows: Sequence[Row]) -> Batch:
        """Return what any model, or the encoder below a head that gathers, is given for rows without labels."""
        arrays = self._joined(rows)
        return model_inputs(self._flattened(arrays, rows)) if self.target == "flash" else self._token_inputs(arrays)

    def _token_inputs(self, arrays: dict[str, IntArray]) -> Batch:
        batch: Batch = {name: torch.from_numpy(values) for name, values in arrays.items() if name != "sequence_ids"}
        sequence_ids_BL = torch.from_numpy(arrays["sequence_ids"])
        return {**batch, "attention_mask": target_mask(sequence_ids_BL, self.feeding, self.target, self.dtype)}

    def __call__(self, rows: Sequence[Row]) -> Batch:
        """A batch of rows, integers as int64; rows of unequal lengths, or without enough slots, are refused."""
        if self.gather_heads and "labels" not in rows[0]:
            raise InputError(f"gather_heads: the packs have no labels, but {', '.join(rows[0])}; omit gather_heads")
        if self.sequence_labels is not None and self.sequence_labels not in rows[0]:
            raise InputError(
                f"sequence_labels = {self.sequence_labels!r}: the packs have no such column, but {', '.join(rows[0])}"
            )
        arrays = self._joined(rows)
        self._check_lengths(rows, arrays["sequence_ids"].shape[1])
        if self.target == "flash":
            return self._flattened(arrays, rows)
        batch = self._token_inputs(arrays)
        if self.gather_heads:
            del batch["labels"]
            batch |= self._gathered(arrays["labels"], rows)
        if self.sequence_labels is not None:
            batch.pop("labels", None)
            batch["sequence_positions"] = self._first_positions(rows)
            column = self.sequence_labels  # -100 in slots without a sequence; NaN in a column of other numbers
            if np.issubdtype(rows[0][column].dtype, np.integer):
                batch["sequence_labels"] = self._per_sequence(rows, column, NOT_PREDICTED)
            else:
                batch["sequence_labels"] = self._padded([row[column] for row in rows], np.nan, np.float32)
        batch["sequence_ids"] = torch.from_numpy(arrays["sequence_ids"])
        batch["seq_lens"] = self._per_sequence(rows, "seq_lens", 0)
        return batch | {name: self._own_column(rows, name) for name in self._own_columns(rows)}

    def _own_columns(self, rows: Sequence[Row]) -> list[str]:
        others = {name for name in rows[0] if name not in (*_TOKEN_COLUMNS, *_OF_SEQUENCES, self.sequence_labels)}
        return [name for name in rows[0] if name in others and all(len(row[name]) == len(row["seq_lens"]) for row in rows)]

    def _own_column(self, rows: Sequence[Row], name: str) -> Any:
        values = [np.asarray(row[name]) for row in rows]
        if not all(np.issubdtype(each.dtype, np.number) or each.dtype == np.bool_ for each in values):
            return [each.tolist() for each in values]
        kind = np.result_type(*values)
        return self._padded(values, 0, np.int64 if np.issubdtype(kind, np.integer) else kind)

    def _joined(self, rows: Sequence[Row]) -> dict[str, IntArray]:
        """The columns with a value per token, int64 [B, L], as this model takes them."""
        names = [name for name in _TOKEN_COLUMNS if name in rows[0] and name != self.sequence_labels]
        arrays: dict[str, IntArray] = {}
        for name in names:
            if len({len(row[name]) for row in rows}) != 1:
                raise InputError("rows of unequal lengths in one batch: all packs of a batch have the same length")
            matrix = np.stack([np.asarray(row[name]) for row in rows])
            _check_whole(matrix.reshape(-1), name)
            arrays[name] = matrix.astype(np.int64)
        arrays["position_ids"] = fed_positions(arrays["position_ids"], self.feeding)
        if not self.feeding.positions:
            del arrays["position_ids"]
        if not self.feeding.token_types:
            arrays.pop("token_type_ids", None)
        predicts_next = self.feeding.causal and not self.feeding.labels_own_token
        if predicts_next and "labels" in arrays:  # the first token of a sequence follows from nothing
            first_BL = np.diff(arrays["sequence_ids"], axis=1, prepend=-1) != 0
            arrays["labels"][first_BL] = NOT_PREDICTED
        return arrays

    def _check_lengths(self, rows: Sequence[Row], length: int) -> None:
        """Refuse rows that the model was not tried with, and sequences that change others."""
        if self.row_tokens is not None and length > self.row_tokens:
            raise InputError(
                f"a row of {length} tokens: the model was tried with rows of {self.row_tokens}; "
                f"give PackCollator row_tokens={length}"
            )
        most = self.feeding.longest_sequence
        if most is None:
            return
        lengths = np.concatenate([np.asarray(row["seq_lens"]) for row in rows])
        _check_whole(lengths, "seq_lens")
        longest = int(max(lengths, default=0))
        if longest > most:
            raise InputError(
                f"a sequence of {longest} tokens: with more than {most}, this model changes the positions (RoPE) of all "
                f"sequences of a batch; pack sequences of at most {most} tokens"
            )

    def _gathered(self, labels_BL: IntArray, rows: Sequence[Row]) -> Batch:
        rows_M, positions_M = np.nonzero(labels_BL != NOT_PREDICTED)
        counts_B = np.bincount(rows_M, minlength=len(rows))
        slots = self._slots("masked_slots", self.masked_slots, int(counts_B.max()))
        slots_M = np.arange(len(rows_M)) - np.repeat(np.cumsum(counts_B) - counts_B, counts_B)
        positions_BQ = np.zeros((len(rows), slots), np.int64)
        masked_BQ = np.full((len(rows), slots), NOT_PREDICTED, np.int64)
        positions_BQ[rows_M, slots_M] = positions_M
        masked_BQ[rows_M, slots_M] = labels_BL[rows_M, positions_M]
        gathered = {
            "masked_lm_positions": torch.from_numpy(positions_BQ),
            "masked_lm_labels": torch.from_numpy(masked_BQ),
            "sequence_positions": self._first_positions(rows),
        }
        if "next_sentence_labels" in rows[0]:
            gathered["next_sentence_label"] = self._per_sequence(rows, "next_sentence_labels", NOT_PREDICTED)
        return gathered

    def _first_positions(self, rows: Sequence[Row]) -> torch.Tensor:
        """The first token of each sequence, int64 [B, S]; 0 where there is none."""
        lengths_BS = self._per_sequence(rows, "seq_lens", 0)
        return (lengths_BS.cumsum(1) - lengths_BS) * (lengths_BS > 0)

    def _padded(self, values: Sequence[AnyArray], empty: float, dtype: Any) -> torch.Tensor:
        """The values of the sequences of each row, [B, S], then `empty`."""
        depth = self._slots("depth", self.depth, max(map(len, values)))
        padded = np.full((len(values), depth), empty, dtype)
        for to, each in zip(padded, values, strict=True):
            to[: len(each)] = each
        return torch.from_numpy(padded)

    def _per_sequence(self, rows: Sequence[Row], name: str, empty: int) -> torch.Tensor:
        """A column with a value per sequence, int64 [B, S]."""
        for row in rows:
            _check_whole(np.asarray(row[name]), name)
        return self._padded([row[name] for row in rows], empty, np.int64)

    @staticmethod
    def _slots(name: str, requested: int | None, needed: int) -> int:
        if requested is not None and needed > requested:
            raise InputError(
                f"{name} = {requested}: a pack of this batch needs {needed}; take it from the data's metadata.json"
            )
        return needed if requested is None else requested

    def _flattened(self, arrays: dict[str, IntArray], rows: Sequence[Row]) -> Batch:
        real_BL = arrays["sequence_ids"] > 0
        lengths = list(chain.from_iterable(row["seq_lens"].tolist() for row in rows))
        ends = torch.tensor([0, *lengths], dtype=torch.int64).cumsum(0).to(torch.int32)
        flat = {name: torch.from_numpy(values[real_BL][np.newaxis]) for name, values in arrays.items()}
        joined = [{name: np.concatenate([row[name] for row in rows]) for name in self._own_columns(rows)}]
        numbers_T = np.repeat(np.arange(1, len(lengths) + 1), lengths)
        return {
            **flat,
            "cu_seq_lens_q": ends,
            "cu_seq_lens_k": ends,
            "max_length_q": max(lengths),
            "max_length_k": max(lengths),
            "sequence_ids": torch.from_numpy(numbers_T[np.newaxis]),
            "seq_lens": torch.tensor(lengths)[None],
            **{name: self._own_column(joined, name) for name in self._own_columns(rows)},
        }


def _check_software(target: str, model: Any) -> None:
    """Refuse a target whose boundaries the attention of a model, or of a config, does not read."""
    used = getattr(getattr(model, "config", model), "_attn_implementation", None)
    reads = {"flash": "flash" in str(used), "flex": used in (None, "flex_attention")}
    if not reads.get(target, "flash" not in str(used)):
        actual = "and a config or a type names none" if used is None else f"not {used}"
        raise InputError(
            f"target = {target!r}: needs a model with attn_implementation={_OWN_SOFTWARE.get(target, 'sdpa')!r}, {actual}: "
            "it would ignore where sequences begin; open the model so, or use another target"
        )


def _check_whole(values: AnyArray, name: str) -> None:
    """The user's own numbers must be integers of 32 bits, before they become int64."""
    wrong = find_non_integer(values, -MOST_TOKEN_ID - 1, MOST_TOKEN_ID)
    if wrong >= 0:
        raise InputError(f"{name}: a row holds {values[wrong]}; it must hold integers that fit into 32 bits")
