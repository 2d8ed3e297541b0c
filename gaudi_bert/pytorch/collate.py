"""The collator, which makes batches of packs that a model's `forward` accepts.

Different software expects the boundaries between sequences in different forms. The target of a `PackCollator` selects the
form:

| target | how the batch describes the boundaries |
|---|---|
| `transformers-5` | `attention_mask` [B, 1, L, L], which is added to the scores, for `sdpa` and `eager` attention |
| `transformers-4`, `optimum-habana` | `attention_mask` [B, L, L] of 0 and 1, which their BERT makes an additive mask from |
| `flash` | one row with all sequences and without padding, `cu_seq_lens_q/k` and `max_length_q/k`; FlashAttention 2 only |
| `flex` | a `BlockMask`, for `attn_implementation="flex_attention"` |

Letters: B packs, L positions, Q masked slots, S sequences of a pack, T tokens of all packs.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch
import transformers

from gaudi_bert.common.arrays import MOST_TOKEN_ID, NOT_PREDICTED, AnyArray, IntArray, find_index_of_invalid_integer
from gaudi_bert.common.errors import InputError
from gaudi_bert.encoders.pack_inputs import PackInputs, build_mask_for_collator_target, shift_position_ids_for_model
from gaudi_bert.encoders.pack_inputs_trial import check_packed_outputs, determine_inputs_for_packs
from gaudi_bert.encoders.trial import MODEL_ERRORS, Pack, build_small_copy

TARGETS = ("transformers-5", "transformers-4", "optimum-habana", "flash", "flex")
_UNLIMITED = 1 << 62
_ATTENTION_IMPLEMENTATIONS = {"flash": "flash_attention_2", "flex": "flex_attention"}
_TOKEN_COLUMNS = ("input_ids", "token_type_ids", "position_ids", "sequence_ids", "labels")
_SEQUENCE_COLUMNS = ("seq_lens", "next_sentence_labels")
_MODEL_INPUTS = {
    *("input_ids", "attention_mask", "token_type_ids", "position_ids", "labels"),
    *("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"),
    *("masked_lm_positions", "masked_lm_labels", "sequence_positions", "sequence_labels", "next_sentence_label"),
}

Batch = dict[str, Any]


def model_inputs(batch: Batch) -> Batch:
    """Return the entries of a batch that models accept. `sequence_ids`, `seq_lens` and the user's columns are omitted."""
    return {name: value for name, value in batch.items() if name in _MODEL_INPUTS}


class PackCollator:
    """Combines packs into batches of tensors, in the form that the target library or attention kernel expects.

    When it is created, the collator runs the model on packs to find out which inputs the model requires. Calling the
    collator with rows of packs returns a batch of tensors. Columns with one value per sequence (weights, names, row numbers)
    keep their names in the batch. Numbers become a tensor [B, S], with 0 in slots without a sequence, and all other values
    become lists.

    Example:
        ```python
        collator = PackCollator("transformers-5", model)
        loader = PackedLoader(PackedDataset("packed/"), 4, collator)
        outputs = model(**model_inputs(next(iter(loader))))
        ```

    Args:
        target: The software for which batches are made, one of `TARGETS`.
        model: A model of `transformers`, its config, or its `model_type`. The collator first tries a small copy. It then
            tries the model itself, if you pass one, with its head and this target, in evaluation mode and in training mode.
            A config does not describe weights, heads or labels. With a config, the labels of a causal model are the next
            tokens, unless its `architectures` name a class for tags.
        gather_heads: Add `masked_lm_positions` and `masked_lm_labels` [B, Q], and `sequence_positions` and
            `next_sentence_label` [B, S], for `PackedBertForPreTraining`. The batch then has no `labels`.
        sequence_labels: The column with a label per sequence. Adds `sequence_labels` and `sequence_positions` [B, S] for
            `PackedBertForSequenceClassification`. The batch then has no `labels`.
        row_tokens: The number of tokens of the longest rows. The model is tried with such rows, and longer rows are
            rejected. By default, the number of positions of the model, but at least 512 and at most 1,024.
        masked_slots: Q, so that every batch has the same static shape. By default, the largest number in the batch.
        depth: S, so that every batch has the same static shape. By default, the largest number in the batch.
        dtype: The dtype of an additive mask, which must be the dtype in which the model computes.

    Raises:
        InputError: The target or the model type is unknown, the model does not work with packs, or the installed software
            does not support this target for this model.
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
            raise InputError(f"target = {target!r}: must be one of {', '.join(TARGETS)}")
        if row_tokens is not None and (type(row_tokens) is not int or row_tokens < 2):
            raise InputError(f"row_tokens = {row_tokens!r}: must be an integer of at least 2")
        if isinstance(model, str):
            try:
                model = transformers.AutoConfig.for_model(model)
            except MODEL_ERRORS as error:
                raise InputError(
                    f"model type {model!r}: the installed transformers does not support this type; pass the model or its "
                    "config"
                ) from error
        if not isinstance(model, PackInputs):  # `PackInputs` describes a model outside of transformers
            _check_attention_implementation(target, model)
        self.pack_inputs = determine_inputs_for_packs(model, target)
        if self.pack_inputs.embeds_without_mask:
            raise InputError(
                "the model multiplies its embeddings by the attention mask, so its `forward` cannot process packs; use "
                "PackedEncoder, or gaudi-bert train and finetune"
            )
        if gather_heads and sequence_labels is not None:
            raise InputError(
                f"sequence_labels = {sequence_labels!r}: cannot be combined with gather_heads, which is for pretraining; "
                "omit one of them"
            )
        if (gather_heads or sequence_labels is not None) and target == "flash":
            option = "gather_heads" if gather_heads else "sequence_labels"
            raise InputError(
                f"{option}: the option is not supported for target flash, whose batches contain no packs; omit it or use "
                "another target"
            )
        if target in ("transformers-4", "optimum-habana") and self.pack_inputs.has_attention_window:
            raise InputError(
                f"target = {target!r}: the mask of this target does not support layers with an attention window; use "
                "transformers-5 or flex"
            )
        self.target, self.gather_heads, self.masked_slots, self.depth = target, gather_heads, masked_slots, depth
        self.sequence_labels, self.dtype = sequence_labels, dtype
        self.row_tokens = row_tokens
        is_config = not isinstance(model, PackInputs | torch.nn.Module)
        if not isinstance(model, PackInputs) and not (
            is_config and target in _ATTENTION_IMPLEMENTATIONS
        ):  # a small copy cannot use FlashAttention or flex attention
            tried = build_small_copy(model, max_window=_UNLIMITED) if is_config else model
            self.row_tokens, _ = check_packed_outputs(
                tried, self.pack_inputs, self._make_batch_without_labels, row_tokens, training=True
            )

    def _make_batch_without_labels(self, rows: Sequence[Pack]) -> Batch:
        """Return a batch without labels. The collator uses such batches to test a model on packs."""
        arrays = self._stack_token_columns(rows)
        return (
            model_inputs(self._make_flat_batch(arrays, rows)) if self.target == "flash" else self._make_token_inputs(arrays)
        )

    def _make_token_inputs(self, arrays: dict[str, IntArray]) -> Batch:
        """Convert the arrays with one value per token to tensors, and add an attention mask.

        The mask has the form that the collator's target, such as `transformers-5` or `flex`, expects.
        """
        batch: Batch = {name: torch.from_numpy(values) for name, values in arrays.items() if name != "sequence_ids"}
        sequence_ids_BL = torch.from_numpy(arrays["sequence_ids"])
        return {
            **batch,
            "attention_mask": build_mask_for_collator_target(sequence_ids_BL, self.pack_inputs, self.target, self.dtype),
        }

    def __call__(self, rows: Sequence[Pack]) -> Batch:
        """Combine rows into a batch of tensors. Each row is a pack.

        Args:
            rows: Rows of a `PackedDataset`, all of the same length.

        Returns:
            The batch by name. Integers are int64.

        Raises:
            InputError: The rows have different lengths, are longer than `row_tokens`, lack a column that the collator needs,
                or contain more sequences or masked positions than there are slots.
        """
        if self.gather_heads and "labels" not in rows[0]:
            raise InputError(
                f"gather_heads: the option requires a column labels, but the packs contain only {', '.join(rows[0])}; omit "
                "the option"
            )
        if self.sequence_labels is not None and self.sequence_labels not in rows[0]:
            raise InputError(
                f"sequence_labels = {self.sequence_labels!r}: the packs do not contain this column; choose one of "
                f"{', '.join(rows[0])}"
            )
        arrays = self._stack_token_columns(rows)
        self._check_row_and_sequence_lengths(rows, arrays["sequence_ids"].shape[1])
        if self.target == "flash":
            return self._make_flat_batch(arrays, rows)
        batch = self._make_token_inputs(arrays)
        if self.gather_heads:
            del batch["labels"]
            batch |= self._make_masked_lm_inputs(arrays["labels"], rows)
        if self.sequence_labels is not None:
            batch.pop("labels", None)
            batch["sequence_positions"] = self._find_first_token_positions(rows)
            column = self.sequence_labels  # padded with -100 for integers, and with NaN for other numbers
            if np.issubdtype(rows[0][column].dtype, np.integer):
                batch["sequence_labels"] = self._make_sequence_column(rows, column, NOT_PREDICTED)
            else:
                batch["sequence_labels"] = self._pad_to_depth([row[column] for row in rows], np.nan, np.float32)
        batch["sequence_ids"] = torch.from_numpy(arrays["sequence_ids"])
        batch["seq_lens"] = self._make_sequence_column(rows, "seq_lens", 0)
        return batch | {name: self._collate_extra_column(rows, name) for name in self._find_extra_columns(rows)}

    def _find_extra_columns(self, rows: Sequence[Pack]) -> list[str]:
        """Return the names of the columns that the user added to the data with one value per sequence."""
        others = {name for name in rows[0] if name not in (*_TOKEN_COLUMNS, *_SEQUENCE_COLUMNS, self.sequence_labels)}
        return [name for name in rows[0] if name in others and all(len(row[name]) == len(row["seq_lens"]) for row in rows)]

    def _collate_extra_column(self, rows: Sequence[Pack], name: str) -> torch.Tensor | list[list[Any]]:
        """Return the values of one column that the user added to the data, for all sequences of a batch.

        Numbers are returned as a tensor [B, S] padded with 0, and all other values as one list per row.
        """
        values = [np.asarray(row[name]) for row in rows]
        if not all(np.issubdtype(each.dtype, np.number) or each.dtype == np.bool_ for each in values):
            return [each.tolist() for each in values]
        kind = np.result_type(*values)
        return self._pad_to_depth(values, 0, np.int64 if np.issubdtype(kind, np.integer) else kind)

    def _stack_token_columns(self, rows: Sequence[Pack]) -> dict[str, IntArray]:
        """Stack each column that the model requires, with one value per token, into an int64 array [B, L].

        A token column has one value per token.
        """
        names = [name for name in _TOKEN_COLUMNS if name in rows[0] and name != self.sequence_labels]
        arrays: dict[str, IntArray] = {}
        for name in names:
            if len({len(row[name]) for row in rows}) != 1:
                lengths = sorted({len(row[name]) for row in rows})
                raise InputError(
                    f"{name}: all rows of a batch must have the same length, but these rows have the lengths {lengths}"
                )
            matrix = np.stack([np.asarray(row[name]) for row in rows])
            _check_32_bit_integers(matrix.reshape(-1), name)
            arrays[name] = matrix.astype(np.int64)
        arrays["position_ids"] = shift_position_ids_for_model(arrays["position_ids"], self.pack_inputs)
        if not self.pack_inputs.takes_positions:
            del arrays["position_ids"]
        if not self.pack_inputs.takes_token_types:
            arrays.pop("token_type_ids", None)
        predicts_next = self.pack_inputs.is_causal and not self.pack_inputs.labels_own_token
        if predicts_next and "labels" in arrays:  # the first token of a sequence has no earlier token that could predict it
            arrays["labels"][np.diff(arrays["sequence_ids"], axis=1, prepend=-1) != 0] = NOT_PREDICTED
        return arrays

    def _check_row_and_sequence_lengths(self, rows: Sequence[Pack], length: int) -> None:
        """Raise an error if a row is longer than all rows that the model was tested with, or if a sequence is too long for
        the model.

        Sequences longer than `PackInputs.longest_sequence` would change the results of other sequences in the batch.
        """
        if self.row_tokens is not None and length > self.row_tokens:
            raise InputError(
                f"a row has {length} tokens, but the model was tested only with rows of {self.row_tokens}; "
                f"pass row_tokens={length} to PackCollator"
            )
        most = self.pack_inputs.longest_sequence
        if most is None:
            return
        lengths = np.concatenate([np.asarray(row["seq_lens"]) for row in rows])
        _check_32_bit_integers(lengths, "seq_lens")
        longest = int(max(lengths, default=0))
        if longest > most:
            raise InputError(
                f"a sequence has {longest} tokens, but a sequence of more than {most} makes this model change the positions "
                f"(RoPE) of all sequences in the batch; pack sequences of at most {most} tokens"
            )

    def _make_masked_lm_inputs(self, labels_BL: IntArray, rows: Sequence[Pack]) -> Batch:
        """Return the masked positions, their labels, and the inputs of the next-sentence head.

        The positions and the labels are int64 [B, Q].
        """
        rows_M, positions_M = np.nonzero(labels_BL != NOT_PREDICTED)
        counts_B = np.bincount(rows_M, minlength=len(rows))
        slots = self._choose_slot_count("masked_slots", self.masked_slots, int(counts_B.max()))
        slots_M = np.arange(len(rows_M)) - np.repeat(np.cumsum(counts_B) - counts_B, counts_B)
        positions_BQ = np.zeros((len(rows), slots), np.int64)
        masked_BQ = np.full((len(rows), slots), NOT_PREDICTED, np.int64)
        positions_BQ[rows_M, slots_M] = positions_M
        masked_BQ[rows_M, slots_M] = labels_BL[rows_M, positions_M]
        gathered = {
            "masked_lm_positions": torch.from_numpy(positions_BQ),
            "masked_lm_labels": torch.from_numpy(masked_BQ),
            "sequence_positions": self._find_first_token_positions(rows),
        }
        if "next_sentence_labels" in rows[0]:
            gathered["next_sentence_label"] = self._make_sequence_column(rows, "next_sentence_labels", NOT_PREDICTED)
        return gathered

    def _find_first_token_positions(self, rows: Sequence[Pack]) -> torch.Tensor:
        """Return the position of the first token of each sequence, and 0 for slots without a sequence.

        The result is int64 [B, S].
        """
        lengths_BS = self._make_sequence_column(rows, "seq_lens", 0)
        return (lengths_BS.cumsum(1) - lengths_BS) * (lengths_BS > 0)

    def _pad_to_depth(self, values: Sequence[AnyArray], padding_value: float, dtype: Any) -> torch.Tensor:
        """Stack one array of values per row into a tensor [B, S], padded with `padding_value`."""
        depth = self._choose_slot_count("depth", self.depth, max(map(len, values)))
        padded = np.full((len(values), depth), padding_value, dtype)
        for to, each in zip(padded, values, strict=True):
            to[: len(each)] = each
        return torch.from_numpy(padded)

    def _make_sequence_column(self, rows: Sequence[Pack], name: str, padding_value: int) -> torch.Tensor:
        """Return a column with one integer per sequence, padded with `padding_value`.

        The result is int64 [B, S].
        """
        for row in rows:
            _check_32_bit_integers(np.asarray(row[name]), name)
        return self._pad_to_depth([row[name] for row in rows], padding_value, np.int64)

    @staticmethod
    def _choose_slot_count(name: str, requested: int | None, needed: int) -> int:
        """Return the requested number of slots per pack for sequences or for masked tokens. If no number was requested,
        return the number that this batch needs.

        Raises:
            InputError: More slots are needed than requested.
        """
        if requested is not None and needed > requested:
            raise InputError(
                f"{name} = {requested}: a pack of this batch requires {needed}; pass the value in the data's metadata.json"
            )
        return needed if requested is None else requested

    def _make_flat_batch(self, arrays: dict[str, IntArray], rows: Sequence[Pack]) -> Batch:
        """Return a batch for FlashAttention, with all sequences in a single row without padding, and with the offset of each
        sequence.
        """
        real_BL = arrays["sequence_ids"] > 0
        lengths = list(chain.from_iterable(row["seq_lens"].tolist() for row in rows))
        ends = torch.tensor([0, *lengths], dtype=torch.int64).cumsum(0).to(torch.int32)
        flat = {name: torch.from_numpy(values[real_BL][np.newaxis]) for name, values in arrays.items()}
        joined = [{name: np.concatenate([row[name] for row in rows]) for name in self._find_extra_columns(rows)}]
        return {
            **flat,
            "cu_seq_lens_q": ends,
            "cu_seq_lens_k": ends,
            "max_length_q": max(lengths),
            "max_length_k": max(lengths),
            "sequence_ids": torch.from_numpy(np.repeat(np.arange(1, len(lengths) + 1), lengths)[np.newaxis]),
            "seq_lens": torch.tensor(lengths)[None],
            **{name: self._collate_extra_column(joined, name) for name in self._find_extra_columns(rows)},
        }


def _check_attention_implementation(target: str, model: Any) -> None:
    """Raise an error if the attention implementation of a model or config would ignore the boundaries between the sequences
    of a pack.
    """
    used = getattr(getattr(model, "config", model), "_attn_implementation", None)
    reads = {"flash": "flash" in str(used), "flex": used in (None, "flex_attention")}
    if not reads.get(target, "flash" not in str(used)):
        required = _ATTENTION_IMPLEMENTATIONS.get(target, "sdpa")
        actual = "the config or type names none" if used is None else f"the model has {used!r}"
        raise InputError(
            f"target = {target!r}: needs attn_implementation={required!r}, but {actual}, which would ignore the boundaries "
            "between sequences; open the model with that implementation, or use another target"
        )


def _check_32_bit_integers(values: AnyArray, name: str) -> None:
    """Raise an error if a value of the user's data is not an integer that fits into 32 bits."""
    wrong = find_index_of_invalid_integer(values, -MOST_TOKEN_ID - 1, MOST_TOKEN_ID)
    if wrong >= 0:
        raise InputError(f"{name}: a row contains {values[wrong]}, but all values must be integers of at most 32 bits")
