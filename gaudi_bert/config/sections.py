"""The settings of a pipeline's work: preparing and packing data, training, fine-tuning for a task, and predicting.

Each class is a section of a pipeline file, and each field is a key. The descriptions of the fields are also the help of the
command-line options and the text of docs/settings.md. Settings of where a pipeline runs are in `places.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import Field, PrivateAttr, model_validator

from gaudi_bert.config.values import (
    CHANGEABLE_ON_RESUME,
    Algorithm,
    Bytes,
    Delimiter,
    Depth,
    Encoding,
    Engine,
    InferencePrecision,
    Precision,
    RowLengthChoice,
    Settings,
)

# --- data


class PrepareSettings(Settings):
    """Making unpacked examples from plain text, or naming unpacked examples that already exist."""

    text: str | tuple[str, ...] | None = Field(
        "python-docs",
        description="files, folders or glob patterns of text; or the built-in `python-docs`, `python-docstrings`",
    )
    records: str | None = Field(
        None, description="existing unpacked TFRecords or HDF5 files, which are used instead of preparing text"
    )
    evaluation_records: str | None = Field(None, description="existing held-out unpacked TFRecords or HDF5 files")
    vocab: str | None = Field(None, description="a vocab.txt; by default, a vocabulary of `train_vocab` tokens is trained")
    train_vocab: int = Field(8192, ge=64, le=1_000_000, description="size of the vocabulary that is trained from the text")
    lower_case: bool = Field(True, description="lower-case the text and strip accents, as uncased BERT does")
    max_sequence_length: int = Field(128, ge=8, le=8192, description="slots of an example")
    max_predictions: int = Field(20, ge=1, le=8192, description="largest number of masked positions in a sequence")
    duplicates: int = Field(
        5, ge=1, le=1000, description="how often each document is used, each time with other masks and sentence pairs"
    )
    short_sequence_probability: float = Field(0.1, ge=0, le=1)
    masked_lm_probability: float = Field(0.15, gt=0, lt=1)
    whole_word_masking: bool = Field(False, description="mask all word pieces of a word together")
    evaluation_fraction: float = Field(
        0.1, ge=0, lt=1, description="fraction of the documents that is held out for evaluation, before duplication"
    )
    shards: int = Field(8, ge=1, le=100_000, description="number of files with training examples")
    seed: int = Field(12345, description="seed of every random choice")


class PackingSettings(Settings):
    """Packing sequences into rows."""

    algorithm: Algorithm = Field("optimal", description="the packing algorithm")
    depth: Depth = Field(3, description="largest number of sequences in a pack, from 1 to 1,024, or `max` for no limit")
    leftovers: Literal["best-fit", "complement"] = Field(
        "best-fit",
        description="nnls only: how the sequences that remain at the end are packed: by best fit, or padded as published",
    )
    effort: Literal["bounded", "unlimited"] = Field(
        "bounded",
        description="optimal only: stop the search when it can gain little, or continue it for the very last pack",
    )
    masked_slots: int | None = Field(
        None, ge=1, le=32768, description="masked positions in a pack (Q); at least, and by default, max_predictions + depth"
    )
    group_sequences: int = Field(
        500_000, ge=1, description="largest number of sequences in a group of files, which is packed within itself"
    )
    group_bytes: Bytes = Field(2**30, description="largest size of a group of files")
    shard_multiple: int = Field(32, ge=1, le=4096, description="the number of shards of a group is a multiple of this")
    shard_bytes: Bytes = Field(128 * 10**6, description="largest size of a shard")
    seed: int = Field(12345, description="seed of every random choice")


class TableSettings(PackingSettings):
    """Packing the rows of a table. These settings come from the command line only, not from a pipeline file.

    With `row_lengths`, a packed table is one of several, and has packs of `max_sequence_length`. Each sequence then goes
    into the table with the shortest packs that can hold it.
    """

    # Packs of tables have no masked positions, and leftovers are always packed by best fit, so these are no keys of tables.
    leftovers: ClassVar[Literal["best-fit"]] = "best-fit"  # type: ignore[misc]
    masked_slots: ClassVar[None] = None  # type: ignore[misc]

    depth: Depth = Field(
        "max", description="largest number of sequences in a pack, or `max`; default: 3 for records, max for tables"
    )
    group_bytes: Bytes = Field(2**30, ge=2**20, description="Tables: size of the rows held in memory at once, e.g. 256MiB")
    max_sequence_length: int = Field(ge=1, le=2**20, description="Tables: slots of a pack")
    row_lengths: RowLengthChoice | None = Field(
        None, description="Tables: up to three pack lengths, or `auto` for the cheapest; each length gets its own folder"
    )
    input_column: str = Field("input_ids", description="Tables: the column of token ids")
    too_long: Literal["error", "truncate", "split", "drop"] = Field(
        "error", description="Tables: what to do with rows that are longer than a pack"
    )
    columns: tuple[str, ...] | None = Field(None, description="Tables: pack only these columns")

    @property
    def explicit_row_lengths(self) -> tuple[int, ...]:
        """The row lengths that were given, ascending. Empty if there is one length, or if `auto` chooses them."""
        return self.row_lengths if isinstance(self.row_lengths, tuple) else ()

    @property
    def accepted_sequence_lengths(self) -> range:
        """The lengths that sequences of this table can have: longer than the next shorter pack, up to its own packs."""
        shorter = [length for length in self.explicit_row_lengths if length < self.max_sequence_length]
        return range(max(shorter, default=0) + 1, self.max_sequence_length + 1)

    @property
    def longest_row_length(self) -> int:
        """The length of the longest packs of all tables. Rows with more tokens are too long."""
        return self.explicit_row_lengths[-1] if self.explicit_row_lengths else self.max_sequence_length


RowFormat = Literal["jsonl", "csv", "tsv", "parquet", "conll", "squad", "txt"]
OnBadRow = Literal["stop", "skip"]
"""What to do if a row cannot be read: stop before anything is computed, or skip the row and count it."""


# --- model and training


class ModelSettings(Settings):
    """The size of a BERT. The keys have the names of Hugging Face's config.json."""

    vocab_size: int | None = Field(
        None, ge=1, description="default: the size of the data's vocabulary, or 30522, as in BERT, if it is unknown"
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
    def _check_heads_divide_hidden_size(self) -> ModelSettings:
        if self.hidden_size % self.num_attention_heads:
            heads, size = self.num_attention_heads, self.hidden_size
            raise ValueError(f"model.num_attention_heads {heads} does not divide model.hidden_size {size}; change one")
        return self


class LoopSettings(Settings):
    """Settings that pretraining and fine-tuning share.

    Attributes:
        section_name: The name of the section in a pipeline file, for messages.
    """

    section_name: ClassVar[str] = "training"

    engine: Annotated[Engine, CHANGEABLE_ON_RESUME] = Field(
        "auto",
        description="auto: TensorFlow if it is installed and the model is a BERT, otherwise PyTorch; "
        "a resumed run keeps its engine",
    )
    device: Annotated[Literal["auto", "cpu", "cuda", "hpu"], CHANGEABLE_ON_RESUME] = Field(
        "auto",
        description="cuda is a GPU, hpu a Gaudi card; auto takes a card or GPU if there is one, and otherwise the CPU",
    )
    compile: Annotated[bool | None, CHANGEABLE_ON_RESUME] = Field(
        None,
        description="compile the training step (XLA, torch.compile); by default where it pays; a resumed run keeps its "
        "choice",
    )
    recompute: Annotated[bool, CHANGEABLE_ON_RESUME] = Field(
        False,
        description="PyTorch: keep only the input of each layer in memory and compute the layer again in the backward pass, "
        "with the same bits; costs a third more computation",
    )
    deterministic: Annotated[bool, CHANGEABLE_ON_RESUME] = Field(
        True, description="PyTorch on a GPU: use only deterministic kernels; if false, a resumed run may differ by rounding"
    )
    gaudi_fused_attention: Annotated[bool, CHANGEABLE_ON_RESUME] = Field(
        False, description="PyTorch, a BERT on a Gaudi card: compute attention with the vendor's kernel FusedSDPA"
    )
    optimizer: Literal["adamw", "lamb"] = "adamw"
    learning_rate: float = Field(1.0e-3, gt=0)
    micro_batch_packs: int = Field(16, ge=1, description="packs in one forward and backward pass of one worker")
    decay_power: float = Field(
        1.0, gt=0, description="power of the polynomial decay to 0: 1 is linear, 0.5 is used by published LAMB recipes"
    )
    decay_from: Literal["warmup", "start"] = Field(
        "warmup",
        description="warmup: the decay begins at the peak, at the end of the warm-up; start: it is counted from the first "
        "update, as published for LAMB, so that the rate drops where the warm-up ends",
    )
    weight_decay: float = Field(0.01, ge=0, description="decoupled weight decay, which biases and layer norms never have")
    layer_adaptation: Literal["all", "decayed"] = Field(
        "all",
        description="lamb only: scale the update of all variables, as published, or only of those with weight decay, as "
        "MLPerf",
    )
    beta_1: float = Field(0.9, ge=0, lt=1)
    beta_2: float = Field(0.999, ge=0, lt=1)
    epsilon: float = Field(1e-6, gt=0)
    clip_norm: float = Field(
        1.0, ge=0, description="largest global norm of the gradients, after accumulation; 0 means no clipping"
    )
    precision: Precision = "float32"
    keep_checkpoints: Annotated[int, CHANGEABLE_ON_RESUME] = Field(2, ge=1)
    log_every_updates: Annotated[int, CHANGEABLE_ON_RESUME] = Field(50, ge=1)
    threads: Annotated[int | None, CHANGEABLE_ON_RESUME] = Field(
        None, ge=1, description="CPU threads of one operation; default: one per core"
    )
    fusion_bytes: Annotated[Bytes, CHANGEABLE_ON_RESUME] = Field(
        64 * 2**20, description="several workers: gradients are sent in merged buffers of at most this size"
    )
    meeting_seconds: Annotated[float, CHANGEABLE_ON_RESUME] = Field(
        600, ge=1, description="PyTorch, several workers: how long they wait for each other before the run begins"
    )
    stall_seconds: Annotated[float, CHANGEABLE_ON_RESUME] = Field(
        300,
        ge=1,
        description="several workers: if a worker shows no sign of work for this long, all workers end (three times as long "
        "while it builds its graph or saves)",
    )
    seed: int = 12345


class TrainingSettings(LoopSettings):
    """Pretraining the model."""

    global_batch_sequences: int = Field(128, ge=1, description="sequences (not packs) in one update, over all workers")
    updates: int = Field(1500, ge=1)
    warmup_updates: int = Field(100, ge=0)
    loss: Literal["token", "sequence"] = Field(
        "token", description="masked-LM loss: the mean over all masked tokens, or the mean of the means of sequences"
    )
    loss_normalization: Literal["global", "balanced", "local"] = Field(
        "global",
        description="global: divide losses by the counts of the complete update, so that any workers and micro-batches give "
        "one large batch; balanced: by the counts of an average batch of this data; local: by the counts of each "
        "micro-batch, "
        "as Habana's published trainer did",
    )
    packing_correction: Literal["batch", "betas"] = Field(
        "batch",
        description="batch: put fewer packs into an update, so that it still has global_batch_sequences; betas: keep as "
        "many "
        "packs as there would be unpacked rows, raise both betas to the power of the packing factor, and make fewer updates",
    )
    target_masked_lm_accuracy: float | None = Field(
        None, gt=0, le=1, description="stop when an evaluation reaches this masked-LM accuracy (MLPerf: 0.72)"
    )
    init_checkpoint: str | None = Field(
        None, description="initial weights: a checkpoint of gaudi-bert, a Hugging Face folder, or a TF1 checkpoint"
    )
    save_every_updates: Annotated[int, CHANGEABLE_ON_RESUME] = Field(500, ge=1)
    evaluate_every_updates: Annotated[int, CHANGEABLE_ON_RESUME] = Field(500, ge=1)
    evaluate_packs: Annotated[int | None, CHANGEABLE_ON_RESUME] = Field(
        None, ge=1, description="packs in one evaluation during training; default: all"
    )
    measure_speedup: Annotated[bool, CHANGEABLE_ON_RESUME] = Field(
        False, description="first measure the speed-up over unpacked rows, which needs two more graphs"
    )
    shuffle_packs: int = Field(
        4096, ge=1, description="size of the windows in which the packs of a file are shuffled when they are read"
    )


class FineTuneSettings(LoopSettings):
    """Training a model for a task. Keys that are not described here mean the same as in `training`.

    `micro_batch_packs` is the largest number of packs in a micro-batch. For rows of several lengths, it counts the longest
    rows.
    """

    section_name: ClassVar[str] = "finetune"

    data: str | None = Field(
        None, description="stage finetune: labelled training rows, or `python-docstrings`; required for this stage"
    )
    evaluation_data: str | None = Field(
        None, description="stage finetune: held-out labelled rows, or `python-docstrings` for its held-out part"
    )
    init_checkpoint: str | None = Field(
        None,
        description="stage finetune: initial weights: a Hugging Face folder, a TF1 checkpoint, or a run of gaudi-bert; by "
        "default, the weights that this pipeline pretrains; if it is set, `finetune` is the first stage",
    )
    vocab: str | None = Field(
        None, description="stage finetune: a folder with the tokenizer; default: the folder of the weights"
    )
    max_sequence_length: int = Field(
        128, ge=8, le=8192, description="positions of a pack, and largest number of tokens in a sequence"
    )
    row_lengths: RowLengthChoice | None = Field(
        None,
        description="up to three row lengths, such as 512,2048,8192: each sequence goes into the shortest row that holds "
        "it; "
        "`auto` chooses the cheapest lengths; by default, all rows have max_sequence_length, which defaults to the last "
        "length",
    )
    depth: Depth = Field(6, description="largest number of sequences in a pack, from 1 to 1,024, or `max` for no limit")
    algorithm: Algorithm = "optimal"
    evaluation_depth: Depth = Field("max", description="depth of the packs for evaluations")
    learning_rate: float = Field(5.0e-5, gt=0)
    epochs: int = Field(3, ge=1, description="how often each sequence is seen")
    batch_sequences: int = Field(32, ge=1, description="sequences (not packs) in one update, over all workers")
    warmup_share: float = Field(0.1, ge=0, le=1, description="fraction of the updates during which the learning rate rises")
    best_metric: str | None = Field(
        None, description="the metric that selects the best checkpoint; default: accuracy, f1_micro, pearson, f1 or loss"
    )
    evaluate_every_updates: int | None = Field(None, ge=1, description="default: after each epoch")
    save_every_updates: Annotated[int | None, CHANGEABLE_ON_RESUME] = Field(
        None, ge=1, description="default: after each epoch"
    )


class MlperfSettings(Settings):
    """The log of an MLPerf submission, which needs the package mlperf-logging."""

    log: bool = Field(False, description="write train/mlperf.log")
    organization: str = Field("unnamed", min_length=1, description="the organization that submits")
    platform: str = Field("unnamed", min_length=1, description="the machine on which the run takes place")
    division: Literal["closed", "open"] = "closed"


# --- tasks

TaskName = Literal[
    "classification",
    "multi-label",
    "regression",
    "token-classification",
    "question-answering",
    "reranking",
    "embedding",
    "masked-language-modelling",
    "causal-language-modelling",
]
TASK_NAMES: tuple[str, ...] = get_args(TaskName)
SEARCH_TASKS = ("embedding", "reranking")
"""The tasks for which the model before training is the baseline."""

TooLong = Literal["error", "truncate", "window"]
RetrievalLoss = Literal["cosent", "cosine", "listwise"]


class TaskSettings(Settings):
    """A downstream task, and how to read its data."""

    name: TaskName | None = Field(None, description="the task")
    text: str = Field("text", description="column (or key of JSON lines) of the text")
    text_pair: str = Field("text_pair", description="column of the second text of a pair, if there is one")
    label: str = Field("label", description="column of the label: a name, several names, or a number")
    tokens: str = Field("tokens", description="token classification: column of the words")
    tags: str = Field("tags", description="token classification: column of the tags, one per word")
    query: str = Field("query", description="reranking: column of the query")
    document: str = Field("document", description="reranking: column of a document")
    anchor: str = Field("anchor", description="embedding: column of the query")
    positive: str = Field(
        "positive",
        description="embedding, reranking: column of the text that answers; for reranking, it may contain a list of texts",
    )
    negative: str | None = Field(
        None,
        description="embedding, reranking: column of a text, or a list of texts, that does not answer; default: "
        "`negative`, `negatives`, `negative_1`, `negative_2`, ...",
    )
    id: str = Field("id", description="column of a name for the row, which is ignored")
    columns: tuple[str, ...] | None = Field(None, description="names of the columns of a CSV or TSV file without a header")
    no_header: bool = Field(False, description="with `columns`: the first line is a row, even if it looks like a header")
    labels: str | None = Field(
        None, description="a file with one label name per line, if the labels in the data are line numbers"
    )
    format: RowFormat | None = Field(None, description="format of the data; default: as the file's ending says")
    delimiter: Delimiter | None = Field(
        None, description="the character between the cells of a CSV or TSV file; default: a comma, or a tab"
    )
    encoding: Encoding = Field(
        "utf-8", description="encoding of the data's text, by its name in Python: cp1252, latin-1, utf-16"
    )
    on_bad_row: OnBadRow = Field(
        "stop",
        description="what to do with a row that cannot be read: `stop`, or `skip` it, so that it has no prediction and is "
        "not "
        "used for training",
    )
    too_long: TooLong | None = Field(
        None,
        description="what to do with rows that have too many tokens: reject them, cut them, or read them in windows; "
        "default: "
        "windows for tags, questions and language modelling, and otherwise cut; their number is printed",
    )
    stride: int | None = Field(
        None,
        ge=0,
        le=8192,
        description="number of tokens by which the windows of a row overlap; default: 128, or half a window if it is "
        "shorter "
        "than 256",
    )
    n_best: int = Field(1, ge=1, le=1000, description="question answering: number of answers written for each question")
    max_answer_tokens: int = Field(
        30, ge=1, le=8192, description="question answering: largest number of tokens in an answer"
    )
    null_score_threshold: float | None = Field(
        None,
        description="question answering: give no answer if the score of the empty answer is better by more than this; "
        "default: "
        "0 if the training data has questions without an answer, and otherwise always give an answer",
    )
    loss: RetrievalLoss | None = Field(
        None,
        description="embedding, for pairs with a score: `cosent` (default) or `cosine`; other rows use in-batch negatives. "
        "reranking: `listwise` over the documents of a query; default: binary cross-entropy",
    )
    scale: float = Field(20.0, gt=0, description="embedding: factor of the cosines, the inverse of the temperature")
    symmetric: bool = Field(
        False, description="embedding, in-batch negatives: also learn to find the anchor of each positive"
    )
    dimensions: tuple[Annotated[int, Field(ge=1)], ...] = Field(
        (), description="embedding: numbers of first values to which vectors can be shortened (Matryoshka)"
    )
    pooling: Literal["cls", "mean", "max", "last"] | None = Field(
        None, description="embedding: how tokens become a vector; default: as the model folder says, otherwise mean"
    )
    query_prompt: str | None = Field(
        None,
        description="embedding: text put before an anchor (or `text`); default: the prompt `query` of the model folder, or "
        "none",
    )
    document_prompt: str | None = Field(
        None,
        description="embedding: text put before all other texts; default: the prompt `document` of the model folder, or "
        "none",
    )
    masked_lm_probability: float = Field(
        0.15, gt=0, lt=1, description="masked language modelling: fraction of the tokens that is masked"
    )
    _named: frozenset[str] | None = PrivateAttr(None)

    @property
    def keys_set_by_user(self) -> frozenset[str]:
        """The keys that the user set. They must apply to the rows, whereas a default may be ignored."""
        return frozenset(self.model_fields_set) if self._named is None else self._named

    def copy_with_user_settings(self, values: Mapping[str, Any]) -> TaskSettings:
        """Return a copy with `values`, which must be valid. Only the keys of `values` count as set by the user."""
        settings = self.model_copy(update=dict(values))
        settings._named = frozenset(values)  # noqa: SLF001 - its own class
        return settings


class TokenizeSettings(Settings):
    """Making rows of token ids from texts. These settings come from the command line only, not from a pipeline file."""

    max_sequence_length: int = Field(ge=1, le=2**20, description="largest number of tokens in a row, with special tokens")
    too_long: Literal["split", "truncate", "drop", "error"] = Field("split", description="what to do with longer texts")
    special_tokens: bool = Field(True, description="add the tokenizer's special tokens to each row")
    text_column: str = Field("text", description="the column (or key of JSON lines) that contains the text")
    text_pair_column: str | None = Field(None, description="the column that contains the second text of a pair")
    files: TaskSettings = Field(
        default_factory=TaskSettings,
        description="how to read the files, by the keys of `task` for the format, the columns, the encoding and bad rows",
    )
    part_bytes: Bytes = Field(64 * 2**20, ge=1)

    @property
    def row_reading_settings(self) -> TaskSettings:
        """The settings for reading the rows of the text files. A second text is only read if its column is named."""
        columns = {"text_column": "text", "text_pair_column": "text_pair"}
        named = {key: getattr(self, name) for name, key in columns.items() if name in self.model_fields_set}
        named |= self.files.model_dump(exclude_unset=True)
        return TaskSettings(text_pair=named.get("text", "text")).copy_with_user_settings(named)

    def to_json_fields(self) -> dict[str, Any]:
        """Return the settings that have a value in the form in which artefacts store them, by name, without sections."""
        own = self.model_dump(mode="json", exclude={"files"}, exclude_none=True)
        return own | self.files.model_dump(mode="json", exclude_unset=True, exclude_none=True)


class PredictSettings(Settings):
    """Predicting with the fine-tuned model of a pipeline."""

    data: str | None = Field(
        None, description="rows to predict, or `python-docstrings` for its held-out part; required for this stage"
    )
    max_sequence_length: int | None = Field(
        None, ge=3, le=8192, description="largest number of tokens in a row; default: as the model was trained"
    )
    precision: InferencePrecision = "float32"
