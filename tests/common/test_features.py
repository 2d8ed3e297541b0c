"""The features of examples: their numbers, names and sizes."""

from __future__ import annotations

import pytest

from gaudi_bert.common.features import Feature, PackedFeature, PackingMetrics, UnpackedFeature
from tests.oracles.packed_record import pack_sequences
from tests.oracles.wire import FLOAT_KEYS, UNPACKED_KEYS

AXES = {"tokens": 13, "masked": 5, "sequences": 2}


@pytest.mark.parametrize("kind", [UnpackedFeature, PackedFeature])
def test_numbers_are_places_in_the_order_of_names(kind: type[Feature]) -> None:
    keys = [feature.key for feature in kind]
    assert keys == sorted(keys)
    assert [int(feature) for feature in kind] == list(range(len(keys)))
    assert [feature.key for feature in kind if feature.kind == "float32"] == [key for key in keys if key in FLOAT_KEYS]


def test_names_and_sizes_are_those_of_the_contract() -> None:
    assert {feature.key for feature in UnpackedFeature} == set(UNPACKED_KEYS)
    empty = pack_sequences([], max_sequence_length=13, masked_slots=5, depth=2)
    assert {feature.key: AXES[feature.axis] for feature in PackedFeature} == {
        key: len(values) for key, values in empty.items()
    }


def test_metrics_of_a_packing_are_derived_from_what_was_counted() -> None:
    metrics = PackingMetrics(sequences=10, packs=4, tokens=30, slots=40, lower_bound=3)
    derived = (metrics.padding_tokens, metrics.efficiency, metrics.packing_factor, metrics.gap)
    assert derived == (10, 0.75, 2.5, 1)
    nothing = PackingMetrics(sequences=0, packs=0, tokens=0, slots=0, lower_bound=0)
    assert (nothing.padding_tokens, nothing.efficiency, nothing.packing_factor, nothing.gap) == (0, 1.0, 1.0, 0)
