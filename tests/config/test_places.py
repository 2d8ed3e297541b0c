"""Where stages run: pods and images."""

from __future__ import annotations

import pytest

from gaudi_bert.config.pipeline import load_pipeline


@pytest.mark.parametrize("tag", ["9.9", "9.90", "1e3", "2024-01-01", "0x10", "017", "20241121", "v1"])
def test_a_tag_is_the_text_that_was_given(tag: str) -> None:
    assert load_pipeline(None, [f"images.tag={tag}"]).images.tag == tag


def test_one_resource_of_a_pod_leaves_the_others_as_they_are() -> None:
    asked = load_pipeline(None, ["resources.data.cpu=2", "resources.training.memory=9Gi"]).resources
    assert (asked.data.cpu, asked.data.memory, asked.data.memory_limit) == ("2", "256Mi", "2Gi")
    assert (asked.training.cpu, asked.training.memory, asked.training.memory_limit) == ("200m", "9Gi", "9Gi")
    assert load_pipeline(None, []).resources.training.memory_limit == "4Gi"
