"""The pipeline file as typed, frozen settings: the one place where a default lives.

A pipeline file is YAML; every key is optional. An unknown key or a wrong value is refused with the path of the key, what is
allowed and, for a misspelt key, the nearest right one. `--set packing.depth=4` changes one value after the file is read.
"""

from __future__ import annotations

from gaudi_bert.config.data import PackingSettings, PrepareSettings, TableSettings
from gaudi_bert.config.pipeline import PipelineSettings
from gaudi_bert.config.places import (
    DockerSettings,
    ImageSettings,
    KubernetesSettings,
    PodPlacement,
    PodResources,
    ResourceSettings,
    StoreSettings,
    Toleration,
)
from gaudi_bert.config.reading import load_pipeline, pipeline_from_mapping, section_from_mapping
from gaudi_bert.config.tasks import TASK_NAMES, PredictSettings, TaskName, TaskSettings
from gaudi_bert.config.training import FineTuneSettings, GaudiSettings, MlperfSettings, ModelSettings, TrainingSettings
from gaudi_bert.config.values import ALGORITHMS

__all__ = [
    "ALGORITHMS",
    "TASK_NAMES",
    "DockerSettings",
    "FineTuneSettings",
    "GaudiSettings",
    "ImageSettings",
    "KubernetesSettings",
    "MlperfSettings",
    "ModelSettings",
    "PackingSettings",
    "PipelineSettings",
    "PodPlacement",
    "PodResources",
    "PredictSettings",
    "PrepareSettings",
    "ResourceSettings",
    "StoreSettings",
    "TableSettings",
    "TaskName",
    "TaskSettings",
    "Toleration",
    "TrainingSettings",
    "load_pipeline",
    "pipeline_from_mapping",
    "section_from_mapping",
]
