"""Values of settings: sizes, depths, limits, texts."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from gaudi_bert.common.errors import InputError
from gaudi_bert.config.pipeline import load_pipeline
from gaudi_bert.config.sections import FineTuneSettings, TableSettings, TaskSettings, TokenizeSettings, TrainingSettings
from gaudi_bert.config.values import describe_allowed_values, find_keys_changeable_on_resume


def test_sizes_in_bytes() -> None:
    sizes = {
        "1GiB": 2**30,
        "3MiB": 3 * 2**20,
        "2KiB": 2048,
        "1GB": 10**9,
        "128MB": 128_000_000,
        "0.5 kB": 500,
        "7": 7,
        "3B": 3,
    }
    assert {text: load_pipeline(None, [f"packing.group_bytes={text}"]).packing.group_bytes for text in sizes} == sizes


def test_of_two_lower_limits_the_higher_one_is_named() -> None:
    assert describe_allowed_values(TableSettings.model_fields["group_bytes"]) == "integer, >= 1,048,576"
    assert describe_allowed_values(TokenizeSettings.model_fields["part_bytes"]) == "integer, >= 1"


@pytest.mark.parametrize("given", [{"delimiter": text} for text in ("", ";;", "\n", '"')] + [{"encoding": "hex"}])
def test_a_separator_is_one_character_and_an_encoding_is_known(given: dict[str, str]) -> None:
    with pytest.raises(ValidationError, match=r"must be one character|utf-16"):
        TaskSettings(**given)  # type: ignore[arg-type]
    assert [TaskSettings(delimiter=tab).delimiter for tab in ("\t", "tab", "TAB", "\\t")] == ["\t"] * 4


def test_depths_within_the_limits() -> None:
    for value, depth in (("1", 1), ("1024", 1024), ("'7'", 7), ("max", "max")):
        assert load_pipeline(None, [f"packing.depth={value}"]).packing.depth == depth


def test_true_is_not_a_number() -> None:
    for key in ("packing.seed", "training.updates", "training.learning_rate", "packing.masked_slots"):
        with pytest.raises(InputError, match=rf"--set {key}=true: must be an? "):
            load_pipeline(None, [f"{key}=true"])
    assert load_pipeline(None, ["prepare.whole_word_masking=true"]).prepare.whole_word_masking


def test_only_texts_are_kept_as_they_are_written() -> None:
    changes = ["packing.depth=4", "images.tag=null", "kubernetes.scratch=2", "resources.data.cpu=0.5"]
    settings = load_pipeline(None, [*changes, "training.epsilon=1.0e-6"])
    assert (settings.packing.depth, settings.images.tag, settings.training.epsilon) == (4, None, 1e-6)
    assert (settings.kubernetes.scratch, settings.resources.data.cpu) == ("2", "0.5")


def test_what_is_free_is_no_part_of_a_run() -> None:
    both = {"device", "threads", "keep_checkpoints", "log_every_updates", "save_every_updates"}
    both |= {"fusion_bytes", "meeting_seconds", "stall_seconds", "engine", "compile"}
    both |= {"recompute", "deterministic", "gaudi_fused_attention"}
    assert find_keys_changeable_on_resume(FineTuneSettings) == both
    assert find_keys_changeable_on_resume(TrainingSettings) == both | {
        "evaluate_every_updates",
        "evaluate_packs",
        "measure_speedup",
    }
