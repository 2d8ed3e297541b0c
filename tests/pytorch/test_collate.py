"""Batches for every target: masks as a naive loop makes them, positions where each type of model has them, static shapes."""

from __future__ import annotations

import numpy as np
import pytest

from gaudi_bert.common.errors import InputError

torch = pytest.importorskip("torch", reason="PYTORCH MISSING: install the extra dev to test packs for PyTorch")

from gaudi_bert.encoders.pack_inputs import PackInputs  # noqa: E402
from gaudi_bert.pytorch import PackCollator, model_inputs  # noqa: E402

IDS = [11, 12, 13, 21, 22, 31, 0]
ROWS = [
    {
        "input_ids": np.array(IDS, np.int32),
        "token_type_ids": np.array([0, 1, 1, 0, 1, 0, 0], np.int32),
        "position_ids": np.array([0, 1, 2, 0, 1, 0, 0], np.int32),
        "sequence_ids": np.array([1, 1, 1, 2, 2, 3, 0], np.int32),
        "labels": np.array([-100, 7, 8, -100, 9, -100, -100], np.int32),
        "seq_lens": np.array([3, 2, 1], np.int32),
        "next_sentence_labels": np.array([1, 0, 1], np.int32),
    },
    {
        "input_ids": np.array([41, 42, 43, 44, 45, 46, 47], np.int32),
        "token_type_ids": np.zeros(7, np.int32),
        "position_ids": np.arange(7, dtype=np.int32),
        "sequence_ids": np.ones(7, np.int32),
        "labels": np.array([-100, -100, -100, -100, -100, 5, -100], np.int32),
        "seq_lens": np.array([7], np.int32),
        "next_sentence_labels": np.array([0], np.int32),
    },
]


def naive_mask(causal: bool = False, window: int = 99) -> list:
    return [
        [
            [
                row["sequence_ids"][i] == row["sequence_ids"][j] and not (causal and j > i) and abs(i - j) <= window
                for j in range(7)
            ]
            for i in range(7)
        ]
        for row in ROWS
    ]


def test_the_mask_of_transformers_5_is_added_to_scores() -> None:
    batch = PackCollator("transformers-5", dtype=torch.bfloat16)(ROWS)
    mask = batch["attention_mask"]
    assert (mask.shape, mask.dtype) == ((2, 1, 7, 7), torch.bfloat16)
    assert (mask[:, 0] == 0).tolist() == naive_mask()
    assert set(mask.unique().tolist()) == {0.0, torch.finfo(torch.bfloat16).min}
    assert batch["labels"][0].tolist() == [-100, 7, 8, -100, 9, -100, -100]
    assert batch["seq_lens"].tolist() == [[3, 2, 1], [7, 0, 0]]
    assert set(model_inputs(batch)) == {"input_ids", "token_type_ids", "position_ids", "labels", "attention_mask"}


@pytest.mark.parametrize("target", ["transformers-4", "optimum-habana"])
def test_the_mask_of_transformers_4_has_three_axes(target: str) -> None:
    mask = PackCollator(target, PackInputs())(ROWS)["attention_mask"]
    assert mask.dtype == torch.int64
    assert mask.bool().tolist() == naive_mask()


def test_flash_has_one_row_without_padding() -> None:
    batch = PackCollator("flash", PackInputs())(ROWS)
    assert "attention_mask" not in batch
    expected = {
        "input_ids": [[11, 12, 13, 21, 22, 31, 41, 42, 43, 44, 45, 46, 47]],
        "position_ids": [[0, 1, 2, 0, 1, 0, 0, 1, 2, 3, 4, 5, 6]],
        "sequence_ids": [[1, 1, 1, 2, 2, 3, 4, 4, 4, 4, 4, 4, 4]],  # 0 would be padding
        "cu_seq_lens_q": [0, 3, 5, 6, 13],
        "cu_seq_lens_k": [0, 3, 5, 6, 13],
    }
    assert {name: batch[name].tolist() for name in expected} == expected
    assert batch["cu_seq_lens_q"].dtype == torch.int32
    assert (batch["max_length_q"], batch["max_length_k"], type(batch["max_length_q"])) == (7, 7, int)


@pytest.mark.parametrize(("model", "causal", "window"), [("bert", False, 99), ("gpt2", True, 99), ("modernbert", False, 64)])
def test_flex_has_a_block_mask(model: str, causal: bool, window: int) -> None:
    mask = PackCollator("flex", model)(ROWS)["attention_mask"]
    for each in mask.values() if isinstance(mask, dict) else [mask]:
        dense = [
            [[bool(each.mask_mod(b, 0, torch.tensor(i), torch.tensor(j))) for j in range(7)] for i in range(7)]
            for b in range(2)
        ]
        assert dense == naive_mask(causal, window)
        assert each.shape == (2, 1, 7, 7)


@pytest.mark.parametrize(
    ("model", "offset"), [("bert", 0), ("roberta", 2), ("roberta with another padding", 5), ("distilbert", 0), ("gpt2", 0)]
)
def test_positions_begin_where_the_type_of_model_has_them(model: str, offset: int) -> None:
    config = pytest.importorskip("transformers").RobertaConfig(pad_token_id=4)
    batch = PackCollator("transformers-5", config if " " in model else model)(ROWS)
    assert batch["position_ids"][0].tolist() == [offset + position for position in (0, 1, 2, 0, 1, 0, 0)]
    assert ("token_type_ids" in batch) == (model.startswith(("bert", "roberta")))  # those with two types


def test_what_cannot_work_is_refused_in_one_line() -> None:
    short = {**ROWS[0], "input_ids": ROWS[0]["input_ids"][:5]}
    unlabelled = [{name: values for name, values in row.items() if name != "labels"} for row in ROWS]
    refusals = {
        "gather_heads: .*labels.* input_ids": lambda: PackCollator(gather_heads=True)(unlabelled),
        "target = 'flush': .*transformers-5": lambda: PackCollator("flush"),
        "model type 'bort': ": lambda: PackCollator(model="bort"),
        "Linear: expected a transformers model": lambda: PackCollator(model=torch.nn.Linear(2, 2)),
        "target = 'optimum-habana': .*window": lambda: PackCollator("optimum-habana", PackInputs(window=3)),
        "gather_heads: .*target flash": lambda: PackCollator("flash", PackInputs(), gather_heads=True),
        "masked_slots = 2: a pack of this batch requires 3": lambda: PackCollator(gather_heads=True, masked_slots=2)(ROWS),
        "row_tokens = 1.5: must be an integer": lambda: PackCollator("flash", row_tokens=1.5),  # type: ignore[arg-type]
        "depth = 2: a pack of this batch requires 3": lambda: PackCollator(depth=2)(ROWS),
        r"input_ids: .*same length.* \[5, 7\]": lambda: PackCollator()([ROWS[0], short]),
    }
    for message, refused in refusals.items():
        with pytest.raises(InputError, match=message):
            refused()
