"""Quantities, and the resources that pods of a pipeline request."""

from __future__ import annotations

import pytest

from gaudi_bert.config.pipeline import load_pipeline
from gaudi_bert.runners.resources import evaluation_resources, quantity_value, training_resources
from tests.builders.agree import agree


@pytest.mark.parametrize(
    ("quantity", "value"),
    [("500m", 0.5), ("2", 2), ("409Gi", 409 * 2**30), ("1k", 1000), ("95000Mi", 95000 * 2**20), ("1e3", 1000)],
)
def test_quantities_have_values(quantity: str, value: float) -> None:
    agree(quantity_value(quantity), value)


@pytest.mark.parametrize("quantity", ["", "lots", "1GiB", "-1"])
def test_what_is_not_a_quantity_is_refused(quantity: str) -> None:
    with pytest.raises(ValueError, match="is not a quantity"):
        quantity_value(quantity)


def test_with_cards_requests_equal_limits() -> None:
    settings = load_pipeline(
        None,
        [
            *("resources.cards=8", "resources.workers=2", "kubernetes.efa=4", "resources.hugepages_2Mi=95000Mi"),
            "resources.training={cpu: 95, memory: 409Gi}",
        ],
    )
    training = training_resources(settings)
    assert training["requests"] == training["limits"]
    assert training["limits"]["vpc.amazonaws.com/efa"] == "4"
    one = evaluation_resources(settings.resources)
    assert one["limits"] == {"cpu": "11", "memory": "52352Mi", "habana.ai/gaudi": "1", "hugepages-2Mi": "11874Mi"}


def test_a_share_of_less_than_a_core_is_in_thousandths() -> None:
    settings = load_pipeline(None, ["resources.cards=8", "resources.training={cpu: 2, memory: 8Gi}"])
    assert evaluation_resources(settings.resources)["limits"]["cpu"] == "250m"
