"""Settings of the model, of training, of the Gaudi runtime and of the MLPerf log."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from gaudi_bert.config.values import Algorithm, Bytes, Depth, Settings

__all__ = [
    "FineTuneSettings",
    "GaudiSettings",
    "MlperfSettings",
    "ModelSettings",
    "TrainingSettings",
]


class ModelSettings(Settings):
    """BERT's size, named as in Hugging Face's config.json."""

    vocab_size: int | None = Field(
        None, ge=1, description="default: the data's vocabulary, or BERT's 30522 if it is unknown"
    )
    hidden_size: int = Field(128, ge=1)
    num_hidden_layers: int = Field(2, ge=1)
    num_attention_heads: int = Field(2, ge=1)
    intermediate_size: int = Field(512, ge=1)
    hidden_act: Literal["gelu", "gelu_new", "relu"] = "gelu"
    hidden_dropout_prob: float = Field(0.1, ge=0, lt=1)
    attention_probs_dropout_prob: float = Field(0.1, ge=0, lt=1)
    max_position_embeddings: int | None = Field(None, ge=1, description="default: the data's max_sequence_length")
    type_vocab_size: int = Field(2, ge=1)
    initializer_range: float = Field(0.02, gt=0)
    layer_norm_eps: float = Field(1e-12, gt=0)
    attention: Literal["bidirectional", "causal"] = "bidirectional"

    @model_validator(mode="after")
    def _heads_divide(self) -> ModelSettings:
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"hidden_size {self.hidden_size} is not a multiple of num_attention_heads {self.num_attention_heads}; "
                "choose a number of heads that divides it"
            )
        return self


class LoopSettings(Settings):
    """What pretraining and fine-tuning have in common."""

    device: Literal["auto", "cpu", "hpu"] = "auto"
    optimizer: Literal["adamw", "lamb"] = "adamw"
    learning_rate: float = Field(1.0e-3, gt=0)
    micro_batch_packs: int = Field(16, ge=1, description="packs of one forward and backward pass on one worker")
    decay_power: float = Field(1.0, gt=0, description="polynomial decay to 0: 1 is linear, 0.5 the predecessor's for LAMB")
    decay_from: Literal["warmup", "start"] = Field(
        "warmup",
        description="the decay is counted from the end of the warm-up, without a step there; or from the first update, as "
        "published for LAMB: the rate falls where the warm-up ends",
    )
    weight_decay: float = Field(0.01, ge=0, description="decoupled; never of biases and layer norms")
    layer_adaptation: Literal["all", "decayed"] = Field(
        "all", description="lamb only: scale the update of all variables (as published), or of the decayed ones (MLPerf)"
    )
    beta_1: float = Field(0.9, ge=0, lt=1)
    beta_2: float = Field(0.999, ge=0, lt=1)
    epsilon: float = Field(1e-6, gt=0)
    clip_norm: float = Field(1.0, ge=0, description="largest global gradient norm, after accumulation; 0: no clipping")
    precision: Literal["float32", "bfloat16"] = "float32"
    keep_checkpoints: int = Field(2, ge=1)
    log_every_updates: int = Field(50, ge=1)
    threads: int | None = Field(None, ge=1, description="CPU threads of one operation; default: one a core")
    fusion_bytes: Bytes = Field(64 * 2**20, description="several workers: gradients travel merged to at most this much")
    stall_seconds: float = Field(
        300,
        ge=1,
        description="several workers: one that shows no sign of work for so long (three times as long while it builds its "
        "graph or saves) ends the run, and is named",
    )
    metrics_port: int | None = Field(
        None,
        ge=1024,
        le=65_535,
        description="rank 0 serves its newest figures to Prometheus here, at /metrics; default: not",
    )
    watch_port: int = Field(0, ge=0, le=65_535, description="several workers: where rank 0 listens to the others; 0: any")
    seed: int = 12345


class TrainingSettings(LoopSettings):
    """How the model is trained."""

    global_batch_sequences: int = Field(128, ge=1, description="sequences (not packs) of one update, over all workers")
    updates: int = Field(1500, ge=1)
    warmup_updates: int = Field(100, ge=0)
    loss: Literal["token", "sequence"] = Field("token", description="masked-LM mean over tokens, or over sequences' means")
    loss_normalization: Literal["global", "balanced", "local"] = Field(
        "global",
        description="losses are divided by what the whole update holds (any workers and micro-batches: one big batch), "
        "by what a batch holds on average, or by what each micro-batch holds (the predecessor's)",
    )
    packing_correction: Literal["batch", "betas"] = Field(
        "batch",
        description="batch: fewer packs an update, so that it stays global_batch_sequences; betas: as many packs as there "
        "would be sequences unpacked, both betas to the power of the packing factor, and fewer updates",
    )
    target_masked_lm_accuracy: float | None = Field(
        None, gt=0, le=1, description="stop when an evaluation reaches it (MLPerf: 0.72)"
    )
    init_checkpoint: str | None = Field(
        None, description="weights to start from: a checkpoint of ours, a Hugging Face folder, or a TF1 checkpoint"
    )
    save_every_updates: int = Field(500, ge=1)
    evaluate_every_updates: int = Field(500, ge=1)
    evaluate_packs: int | None = Field(None, ge=1, description="packs of one evaluation during training; default: all")
    measure_speedup: bool = Field(
        False, description="time passes over packed and unpacked rows first: the realized speed-up, for two more graphs"
    )
    shuffle_packs: int = Field(4096, ge=1, description="packs of a file change places within so many while reading")


class FineTuneSettings(LoopSettings):
    """On what a model is trained for a task, and how. Keys mean what they mean in `training`.

    Of `micro_batch_packs` it is the most that a micro-batch holds.
    """

    data: str | None = Field(
        None,
        description="stage finetune: labelled rows to learn from, or `python-docstrings`; without it there is no such stage",
    )
    evaluation_data: str | None = Field(
        None, description="stage finetune: held-out rows of the same kind, or `python-docstrings`: the part that is held out"
    )
    init_checkpoint: str | None = Field(
        None,
        description="stage finetune: weights to start from: a Hugging Face folder, a TF1 checkpoint, or a run of ours; "
        "default: those that this pipeline pretrains itself; with weights given, it has no stages before `finetune`",
    )
    vocab: str | None = Field(
        None, description="stage finetune: a folder with the tokenizer; default: where the weights are"
    )
    max_sequence_length: int = Field(128, ge=8, le=8192, description="positions of a pack, and most tokens of a sequence")
    depth: Depth = Field(6, description="most sequences per pack, at most 1,024; or `max` for no limit")
    algorithm: Algorithm = "optimal"
    evaluation_depth: Depth = Field("max", description="the same for evaluations, where the batch does not matter")
    learning_rate: float = Field(5.0e-5, gt=0)
    epochs: int = Field(3, ge=1, description="how often each sequence is seen")
    batch_sequences: int = Field(32, ge=1, description="sequences (not packs) of one update, over all workers")
    warmup_share: float = Field(0.1, ge=0, le=1, description="share of the updates for which the learning rate rises")
    best_metric: str | None = Field(
        None, description="the metric whose best checkpoint is kept; default: accuracy, f1_micro, pearson, f1 or loss"
    )
    evaluate_every_updates: int | None = Field(None, ge=1, description="default: after each epoch")
    save_every_updates: int | None = Field(None, ge=1, description="default: after each epoch")


class GaudiSettings(Settings):
    """The Gaudi runtime's variables, set before its module is loaded; what the environment sets already is left alone."""

    bfloat16_list: str | None = Field(
        None, description="TF_BF16_CONVERSION, for precision bfloat16: a JSON list of operations to convert; default: ours"
    )
    recipe_cache: str | None = Field(
        None, description="TF_RECIPE_CACHE_PATH: a folder on a local disk that keeps compiled graphs from run to run"
    )
    initial_workspace_MB: int | None = Field(
        None, ge=1, description="HABANA_INITIAL_WORKSPACE_SIZE_MB: device memory set aside for the graph when it starts"
    )
    cluster_size: int | None = Field(
        None,
        ge=1,
        description="TF_PRELIMINARY_CLUSTER_SIZE: operations compiled together; 1000 for BERT-base",
    )
    hccl_memory_MB: int = Field(
        1536, ge=0, description="TF_HCCL_MEMORY_ALLOWANCE_MB: device memory kept for communication between cards"
    )
    cpu_fallback: bool = Field(
        True, description="false: TF_CPU_RUNTIME_FALLBACK=forbid, an operation that the card cannot run is an error"
    )


class MlperfSettings(Settings):
    """The log of an MLPerf submission; needs the package mlperf-logging."""

    log: bool = Field(False, description="write train/mlperf.log")
    organization: str = Field("unnamed", min_length=1, description="who submits")
    platform: str = Field("unnamed", min_length=1, description="the machine")
    division: Literal["closed", "open"] = "closed"
