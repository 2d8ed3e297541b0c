"""What a pipeline needs where it runs: images, resources, and what `--dry-run` says of them."""

from __future__ import annotations

import pytest

from gaudi_bert import __version__
from gaudi_bert.config.pipeline import load_pipeline
from gaudi_bert.runners.requirements import (
    evaluation_resources,
    image_reference,
    preview_stage,
    quantity_value,
    training_resources,
)
from gaudi_bert.runners.stage_table import STAGES
from tests.builders.agree import agree


def test_each_stage_has_its_image_and_what_it_asks_for() -> None:
    settings = load_pipeline(
        None,
        [
            *("resources.cards=8", "resources.workers=2", "resources.data_workers=5", "images.tag=v1"),
            "resources.training={cpu: 95, memory: 409Gi}",
        ],
    )
    steps = {name: preview_stage(settings, name) for name in STAGES}
    assert steps["prepare"].image == "gaudi-bert-data:v1"
    assert [step.containers for step in steps.values()] == [5, 5, 5, 5, 1, 2, 1, 2, 1, 1]
    assert [step.cards for step in steps.values()] == [0, 0, 0, 0, 0, 8, 1, 8, 1, 0]
    assert str(steps["train"]) == "train: 2 x gaudi-bert-train-cpu:v1 (95 cpu, 409Gi, 8 cards)"
    assert "1 card)" in str(steps["evaluate"])


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
    asked = training_resources(settings)
    assert asked["requests"] == asked["limits"]
    assert asked["limits"]["vpc.amazonaws.com/efa"] == "4"
    one = evaluation_resources(settings.resources)
    assert one["limits"] == {"cpu": "11", "memory": "52352Mi", "habana.ai/gaudi": "1", "hugepages-2Mi": "11874Mi"}


def test_a_share_of_less_than_a_core_is_in_thousandths() -> None:
    settings = load_pipeline(None, ["resources.cards=8", "resources.training={cpu: 2, memory: 8Gi}"])
    assert evaluation_resources(settings.resources)["limits"]["cpu"] == "250m"


def test_images_have_registry_and_version() -> None:
    assert image_reference(load_pipeline(None).images, "gaudi-bert-data") == f"gaudi-bert-data:{__version__}"
    images = load_pipeline(None, ["images.registry=registry.example:5000/us", "images.tag=v2"]).images
    assert image_reference(images, "x") == "registry.example:5000/us/x:v2"
