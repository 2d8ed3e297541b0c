"""Which hidden states the head of a task reads."""

from __future__ import annotations

import pytest

from gaudi_bert.model.heads import TaskHead, TaskKind


@pytest.mark.parametrize(
    ("kind", "feature"),
    [
        ("classification", "sequence_positions"),
        ("reranking", "sequence_positions"),
        ("token-classification", None),
        ("question-answering", None),
        ("masked-language-modelling", "masked_positions"),
        ("causal-language-modelling", None),
    ],
)
def test_a_head_reads_texts_masked_tokens_or_all_tokens(kind: TaskKind, feature: str | None) -> None:
    assert TaskHead(kind).positions_feature_name == feature
