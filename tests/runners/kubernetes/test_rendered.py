"""What `--render` writes: kustomize builds it, the parts are in the order in which they are applied."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from gaudi_bert.common.errors import InputError
from gaudi_bert.config.pipeline import load_pipeline
from gaudi_bert.runners.kubernetes.manifests import render
from gaudi_bert.runners.kubernetes.rendered import write_rendered
from gaudi_bert.runners.stage_table import stages_of
from tests.builders.effort import LONG
from tests.k8s.cluster_settings import PIPELINES, VARIANTS, cluster_settings, existing_claims
from tests.k8s.manifest_checks import check_manifests

Json = dict[str, Any]

# Pipelines as they are, one that pretrains and one of a task, or in the long form all; the demos with cards too.
EXAMPLES = ("demo", "finetune-demo", "mlperf", "squad")
BUILT = [(path, "as it is") for path in PIPELINES if LONG or path.stem in EXAMPLES]
BUILT += [(path, "cards and mpijob") for path in PIPELINES if "demo" in path.stem]


@pytest.mark.repeated
@pytest.mark.parametrize(("pipeline", "variant"), BUILT, ids=[f"{path.stem}, {variant}" for path, variant in BUILT])
def test_kustomize_builds_it(variant: str, pipeline: Path, tmp_path: Path, kustomize: Callable[[Path], list[Json]]) -> None:
    settings = cluster_settings(pipeline, variant)
    manifests = render(settings)
    parts = ["data", "training"] if settings.pretrains else []
    parts += ["finetuning", "results"] if settings.finetunes else ["results"]
    assert write_rendered(settings, stages_of(settings), tmp_path) == parts
    built = {part: kustomize(tmp_path / part) for part in (".", *parts)}
    for part in parts:
        assert check_manifests(built[part], external=existing_claims(settings)) == []
    jobs = [item for part in parts for item in built[part] if "Job" in item["kind"]]
    configuration = next(_name(item) for item in built[parts[0]] if item["kind"] == "ConfigMap")
    assert re.fullmatch(f"{settings.name}-pipeline-[0-9a-f]{{10}}", configuration)
    plainly_named = json.loads(json.dumps(jobs).replace(configuration, f"{settings.name}-pipeline"))
    assert sorted(plainly_named, key=_name) == sorted(manifests.steps.values(), key=_name)
    everything = {(item["kind"], _name(item)) for part in parts for item in built[part]}
    together = {(item["kind"], _name(item)) for item in built["."]}
    with_cards = settings.resources.cards > 0
    assert together == ({(item["kind"], _name(item)) for item in built[parts[0]]} if with_cards else everything)


def _name(item: Json) -> str:
    return item["metadata"]["name"]


def test_some_stages_only_are_rendered(tmp_path: Path) -> None:
    assert write_rendered(load_pipeline(None), ["plan", "report"], tmp_path / "out") == ["data", "results"]
    assert sorted(path.name for path in (tmp_path / "out" / "data").iterdir()) == ["kustomization.yaml", "plan.yaml"]


def test_manifests_of_a_changed_pipeline_name_another_configuration(tmp_path: Path) -> None:
    mounted = []
    for name, overrides in (("before", []), ("after", ["packing.depth=5"]), ("again", [])):
        write_rendered(load_pipeline(None, overrides), ["plan"], tmp_path / name)
        job = yaml.safe_load((tmp_path / name / "data" / "plan.yaml").read_text())
        volumes = job["spec"]["template"]["spec"]["volumes"]
        mounted += [volume["configMap"]["name"] for volume in volumes if "configMap" in volume]
    before, after, again = mounted
    assert before == again != after


def test_a_folder_with_other_files_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("mine")
    with pytest.raises(InputError, match="holds other files"):
        write_rendered(load_pipeline(None), stages_of(load_pipeline(None)), tmp_path)


def test_with_a_queue_the_top_of_a_rendered_folder_holds_no_quota_for_training(tmp_path: Path) -> None:
    settings = load_pipeline(None, ["kubernetes.queue=gpus"])
    write_rendered(settings, stages_of(settings), tmp_path)
    listed = yaml.safe_load((tmp_path / "kustomization.yaml").read_text())["resources"]
    steps = ("prepare", "histogram", "plan", "write", "write-finish", "verify", "verify-finish")
    assert listed == ["base", *(f"data/{step}.yaml" for step in steps)]


def test_the_runtime_of_a_trainjob_is_applied_before_it(tmp_path: Path, kustomize: Callable[[Path], list[Json]]) -> None:
    """Kubeflow Trainer's webhook refuses a TrainJob whose runtime it does not know: two folders, one after the other."""
    settings = load_pipeline(None, VARIANTS["trainjob"])
    assert write_rendered(settings, stages_of(settings), tmp_path) == ["base", "data", "training", "results"]
    kinds = {part: {item["kind"] for item in kustomize(tmp_path / part)} for part in (".", "base", "training")}
    assert "TrainingRuntime" in kinds["base"]
    assert "TrainJob" not in kinds["."] | kinds["base"]
    assert "TrainJob" in kinds["training"]
