"""A pipeline file as a whole."""

from __future__ import annotations

from pydantic import Field, model_validator

from gaudi_bert.config.data import PackingSettings, PrepareSettings
from gaudi_bert.config.places import DockerSettings, ImageSettings, KubernetesSettings, ResourceSettings, StoreSettings
from gaudi_bert.config.tasks import PredictSettings, TaskSettings
from gaudi_bert.config.training import FineTuneSettings, GaudiSettings, MlperfSettings, ModelSettings, TrainingSettings
from gaudi_bert.config.values import Settings

__all__ = [
    "PipelineSettings",
]


class PipelineSettings(Settings):
    """A pipeline file, whole."""

    name: str = Field("demo", pattern=r"^[a-z]([a-z0-9-]{0,40}[a-z0-9])?$", description="also the work folder's name")
    prepare: PrepareSettings = Field(default_factory=PrepareSettings)
    packing: PackingSettings = Field(default_factory=PackingSettings)
    model: ModelSettings = Field(default_factory=ModelSettings)
    training: TrainingSettings = Field(default_factory=TrainingSettings)
    task: TaskSettings = Field(default_factory=TaskSettings)
    finetune: FineTuneSettings = Field(default_factory=FineTuneSettings)
    predict: PredictSettings = Field(default_factory=PredictSettings)
    gaudi: GaudiSettings = Field(default_factory=GaudiSettings)
    mlperf: MlperfSettings = Field(default_factory=MlperfSettings)
    images: ImageSettings = Field(default_factory=ImageSettings)
    resources: ResourceSettings = Field(default_factory=ResourceSettings)
    store: StoreSettings = Field(default_factory=StoreSettings)
    docker: DockerSettings = Field(default_factory=DockerSettings)
    kubernetes: KubernetesSettings = Field(default_factory=KubernetesSettings)

    @property
    def finetunes(self) -> bool:
        """Whether it has the stage `finetune`."""
        return self.finetune.data is not None

    @property
    def predicts(self) -> bool:
        """Whether it has the stage `predict`."""
        return self.predict.data is not None

    @property
    def pretrains(self) -> bool:
        """Whether it has the stages of pretraining: always, unless it fine-tunes weights that somebody gives it."""
        return not self.finetunes or self.finetune.init_checkpoint is None

    @property
    def trains_as_mpijob(self) -> bool:
        """Whether training on a cluster takes an MPIJob, not a Job."""
        return self.kubernetes.training == "mpijob" or (self.kubernetes.training == "auto" and self.resources.workers > 1)

    @property
    def has_network_policy(self) -> bool:
        """Whether the pods of an MPIJob are closed to all others; policies know no pods on the node's own network."""
        has_mpijob = self.pretrains and self.trains_as_mpijob
        return has_mpijob and self.kubernetes.network_policy and not self.kubernetes.efa

    @model_validator(mode="after")
    def _task_is_whole(self) -> PipelineSettings:
        if self.finetunes and self.task.name is None:
            raise ValueError("finetune.data is set, but no task; set task.name, for example to classification")
        if self.predicts and not self.finetunes:
            raise ValueError("predict.data needs a model that this pipeline fine-tunes; set finetune.data and task.name")
        return self

    @model_validator(mode="after")
    def _training_fits_the_cluster(self) -> PipelineSettings:
        if self.resources.workers > 1 and not self.trains_as_mpijob:
            raise ValueError(
                f"kubernetes.training is `job`, which is one worker, but resources.workers is {self.resources.workers}; "
                "set kubernetes.training to mpijob or auto"
            )
        if self.kubernetes.efa and not (self.resources.cards and self.trains_as_mpijob):
            raise ValueError(
                "kubernetes.efa is for an MPIJob on cards; set resources.cards and resources.workers, or efa to 0"
            )
        return self
