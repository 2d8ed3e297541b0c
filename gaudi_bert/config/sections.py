"""Settings of what a pipeline does: prepare and pack data, train, fine-tune a model for a task, and predict.

Each class is a section of a pipeline file, and each field is a key. The first line of the class and the descriptions of the
fields are the text of docs/settings.md. The descriptions are also the help of command-line options. The settings of where a
pipeline runs are in `places.py`.
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
    """Settings of the unpacked training examples, which are made from plain text or already exist as files."""

    text: str | tuple[str, ...] | None = Field(
        "python-docs",
        description="text files, folders or glob patterns, or a built-in text: `python-docs` or `python-docstrings`",
    )
    records: str | None = Field(
        None, description="existing unpacked TFRecords or HDF5 files, which replace the examples made from text"
    )
    evaluation_records: str | None = Field(
        None, description="existing unpacked TFRecords or HDF5 files with held-out examples"
    )
    vocab: str | None = Field(None, description="a vocab.txt; by default, a vocabulary is trained from the text")
    train_vocab: int = Field(
        8192, ge=64, le=1_000_000, description="number of tokens of the vocabulary that is trained from the text"
    )
    lower_case: bool = Field(True, description="lower-case the text and strip accents, as uncased BERT does")
    max_sequence_length: int = Field(128, ge=8, le=8192, description="number of slots of an example")
    max_predictions: int = Field(20, ge=1, le=8192, description="largest number of masked positions in a sequence")
    duplicates: int = Field(
        5, ge=1, le=1000, description="how often each document is used, with different masks and sentence pairs each time"
    )
    short_sequence_probability: float = Field(
        0.1, ge=0, le=1, description="probability that an example is made shorter, with a random length"
    )
    masked_lm_probability: float = Field(0.15, gt=0, lt=1, description="fraction of the tokens that is masked")
    whole_word_masking: bool = Field(False, description="mask all word pieces of a word together")
    evaluation_fraction: float = Field(
        0.1, ge=0, lt=1, description="fraction of the documents that is held out for evaluation"
    )
    shards: int = Field(8, ge=1, le=100_000, description="number of files with training examples")
    seed: int = Field(12345, description="seed of all random choices")


class PackingSettings(Settings):
    """How sequences are packed into rows."""

    algorithm: Algorithm = Field("optimal", description="the packing algorithm")
    depth: Depth = Field(3, description="largest number of sequences in a pack, from 1 to 1,024, or `max` for no limit")
    leftovers: Literal["best-fit", "complement"] = Field(
        "best-fit",
        description="with `nnls`: pack the sequences that remain at the end by best fit, or with padding as published",
    )
    effort: Literal["bounded", "unlimited"] = Field(
        "bounded",
        description="with `optimal`: stop the search when little can be gained, or continue it until the packing is optimal",
    )
    masked_slots: int | None = Field(
        None,
        ge=1,
        le=32768,
        description="largest number of masked positions in a pack (Q); must be at least max_predictions + depth, which is "
        "the default",
    )
    group_sequences: int = Field(
        500_000, ge=1, description="largest number of sequences in a group of files; each group is packed by itself"
    )
    group_bytes: Bytes = Field(2**30, description="largest size of a group of files")
    shard_multiple: int = Field(
        32, ge=1, le=4096, description="the number of shards of each group is a multiple of this number"
    )
    shard_bytes: Bytes = Field(128 * 10**6, description="largest size of a shard")
    seed: int = Field(12345, description="seed of all random choices")


class TableSettings(PackingSettings):
    """How the rows of a table are packed. These settings come only from the command line, not from a pipeline file.

    If there are several `row_lengths`, one packed table is written for each of them, and each sequence goes into the table
    with the shortest packs that can hold it. The settings of such a table contain all row lengths, and the length of its own
    packs as `max_sequence_length`.
    """

    # Packed tables have no masked positions. Sequences that the packing algorithm leaves over are always packed by best fit.
    # Therefore, users cannot change `leftovers` and `masked_slots` for tables.
    leftovers: ClassVar[Literal["best-fit"]] = "best-fit"  # type: ignore[misc]
    masked_slots: ClassVar[None] = None  # type: ignore[misc]

    depth: Depth = Field(
        "max", description="largest number of sequences in a pack, or `max`; default: 3 for records, max for tables"
    )
    group_bytes: Bytes = Field(
        2**30, ge=2**20, description="Tables: size of the rows that are in memory at once, such as 256MiB"
    )
    max_sequence_length: int = Field(ge=1, le=2**20, description="Tables: number of slots of a pack")
    row_lengths: RowLengthChoice | None = Field(
        None,
        description="Tables: up to three pack lengths, or `auto` for the cheapest ones; each length gets its own folder",
    )
    input_column: str = Field("input_ids", description="Tables: column that contains the token ids")
    too_long: Literal["error", "truncate", "split", "drop"] = Field(
        "error", description="Tables: what to do with rows that are longer than a pack"
    )
    columns: tuple[str, ...] | None = Field(None, description="Tables: pack only these columns")

    @property
    def explicit_row_lengths(self) -> tuple[int, ...]:
        """The row lengths that the user listed, in ascending order, or an empty tuple if the user listed none or chose
        `auto`.
        """
        return self.row_lengths if isinstance(self.row_lengths, tuple) else ()

    @property
    def accepted_sequence_lengths(self) -> range:
        """The range of sequence lengths that go into this packed table. Shorter sequences go into a table with shorter
        packs.
        """
        shorter = [length for length in self.explicit_row_lengths if length < self.max_sequence_length]
        return range(max(shorter, default=0) + 1, self.max_sequence_length + 1)

    @property
    def longest_row_length(self) -> int:
        """The length of the longest packs, which is also the maximum number of tokens in a row of the table."""
        return self.explicit_row_lengths[-1] if self.explicit_row_lengths else self.max_sequence_length


# --- model and training


class ModelSettings(Settings):
    """The size of the BERT model. The keys have the names that config.json of Hugging Face uses."""

    vocab_size: int | None = Field(
        None, ge=1, description="default: the size of the data's vocabulary, or 30522, as in BERT, if that is unknown"
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
            raise ValueError(
                f"model.num_attention_heads {heads} does not divide model.hidden_size {size}; change one of them"
            )
        return self


class LoopSettings(Settings):
    """Settings that pretraining and fine-tuning have in common.

    Attributes:
        section_name: The name of the section in a pipeline file, for messages.
    """

    section_name: ClassVar[str] = "training"

    engine: Annotated[Engine, CHANGEABLE_ON_RESUME] = Field(
        "auto",
        description="`auto` chooses TensorFlow if it is installed and the model is a BERT, and otherwise PyTorch; a resumed "
        "run keeps its engine",
    )
    device: Annotated[Literal["auto", "cpu", "cuda", "hpu"], CHANGEABLE_ON_RESUME] = Field(
        "auto",
        description="`cuda` is a GPU and `hpu` a Gaudi card; `auto` chooses a card or GPU if there is one, and otherwise "
        "the CPU",
    )
    compile: Annotated[bool | None, CHANGEABLE_ON_RESUME] = Field(
        None,
        description="compile the training step with XLA or torch.compile; by default, only if this makes training faster; a "
        "resumed run keeps the choice of the first run",
    )
    recompute: Annotated[bool, CHANGEABLE_ON_RESUME] = Field(
        False,
        description="PyTorch: keep only the input of each layer in memory, and compute the layer again in the backward "
        "pass; the results are bit-identical, but the computation grows by a third",
    )
    deterministic: Annotated[bool, CHANGEABLE_ON_RESUME] = Field(
        True,
        description="PyTorch on a GPU: use only deterministic kernels; without them, a resumed run may differ by rounding "
        "errors",
    )
    gaudi_fused_attention: Annotated[bool, CHANGEABLE_ON_RESUME] = Field(
        False, description="PyTorch, a BERT on a Gaudi card: compute attention with the vendor's kernel FusedSDPA"
    )
    optimizer: Literal["adamw", "lamb"] = "adamw"
    learning_rate: float = Field(1.0e-3, gt=0)
    micro_batch_packs: int = Field(16, ge=1, description="number of packs in one forward and backward pass of a worker")
    decay_power: float = Field(
        1.0, gt=0, description="power of the polynomial decay to 0; 1 is linear, and published LAMB recipes use 0.5"
    )
    decay_from: Literal["warmup", "start"] = Field(
        "warmup",
        description="`warmup` begins the decay at the end of the warm-up; `start` counts it from the first update, as "
        "published for LAMB, so that the learning rate drops when the warm-up ends",
    )
    weight_decay: float = Field(
        0.01, ge=0, description="decoupled weight decay, which is never applied to biases and layer norms"
    )
    layer_adaptation: Literal["all", "decayed"] = Field(
        "all",
        description="with `lamb`: scale the updates of all variables, as published, or only of those with weight decay, as "
        "in MLPerf",
    )
    beta_1: float = Field(0.9, ge=0, lt=1)
    beta_2: float = Field(0.999, ge=0, lt=1)
    epsilon: float = Field(1e-6, gt=0)
    clip_norm: float = Field(1.0, ge=0, description="largest global norm of the accumulated gradients; 0 means no clipping")
    precision: Precision = "float32"
    keep_checkpoints: Annotated[int, CHANGEABLE_ON_RESUME] = Field(2, ge=1)
    log_every_updates: Annotated[int, CHANGEABLE_ON_RESUME] = Field(50, ge=1)
    threads: Annotated[int | None, CHANGEABLE_ON_RESUME] = Field(
        None, ge=1, description="number of CPU threads of one operation; default: one per core"
    )
    fusion_bytes: Annotated[Bytes, CHANGEABLE_ON_RESUME] = Field(
        64 * 2**20, description="several workers: largest size of the merged buffers in which gradients are sent"
    )
    meeting_seconds: Annotated[float, CHANGEABLE_ON_RESUME] = Field(
        600, ge=1, description="PyTorch, several workers: how long the workers wait for each other before the run begins"
    )
    stall_seconds: Annotated[float, CHANGEABLE_ON_RESUME] = Field(
        300,
        ge=1,
        description="several workers: if a worker makes no progress for this long, all workers are stopped; the limit is "
        "three times as long while a worker builds its graph or saves a checkpoint",
    )
    seed: int = 12345


class TrainingSettings(LoopSettings):
    """How the model is pretrained."""

    global_batch_sequences: int = Field(
        128, ge=1, description="number of sequences (not packs) in one update, over all workers"
    )
    updates: int = Field(1500, ge=1)
    warmup_updates: int = Field(100, ge=0)
    loss: Literal["token", "sequence"] = Field(
        "token",
        description="masked-LM loss: `token` is the mean over all masked tokens, and `sequence` the mean of the mean losses "
        "of all sequences",
    )
    loss_normalization: Literal["global", "balanced", "local"] = Field(
        "global",
        description="`global` divides losses by the counts of the complete update, so that the number of workers and "
        "micro-batches does not matter; `balanced` divides by the counts of an average batch of this data; `local` divides "
        "by the counts of each micro-batch, as the trainer published by Habana does",
    )
    packing_correction: Literal["batch", "betas"] = Field(
        "batch",
        description="`batch` puts fewer packs into an update, so that it still contains global_batch_sequences; `betas` "
        "uses as many packs as there would be unpacked rows, raises both betas to the power of the packing factor, and "
        "makes fewer updates",
    )
    target_masked_lm_accuracy: float | None = Field(
        None, gt=0, le=1, description="stop as soon as an evaluation reaches this masked-LM accuracy (MLPerf: 0.72)"
    )
    init_checkpoint: str | None = Field(
        None, description="initial weights: a checkpoint of gaudi-bert, a Hugging Face folder, or a TF1 checkpoint"
    )
    save_every_updates: Annotated[int, CHANGEABLE_ON_RESUME] = Field(500, ge=1)
    evaluate_every_updates: Annotated[int, CHANGEABLE_ON_RESUME] = Field(500, ge=1)
    evaluate_packs: Annotated[int | None, CHANGEABLE_ON_RESUME] = Field(
        None, ge=1, description="number of packs in an evaluation during training; default: all"
    )
    measure_speedup: Annotated[bool, CHANGEABLE_ON_RESUME] = Field(
        False, description="before training, measure the speed-up over unpacked rows; this compiles two additional graphs"
    )
    shuffle_packs: int = Field(
        4096, ge=1, description="number of consecutive packs of a file that are shuffled together when they are read"
    )


class FineTuneSettings(LoopSettings):
    """How the model is trained for a task. Keys without a description mean the same as in `training`.

    `micro_batch_packs` is the largest number of packs in a micro-batch. If rows have several lengths, it is the number of
    the longest rows.
    """

    section_name: ClassVar[str] = "finetune"

    data: str | None = Field(
        None, description="stage finetune: the labelled training rows, or `python-docstrings`; required for this stage"
    )
    evaluation_data: str | None = Field(
        None, description="stage finetune: the labelled held-out rows, or `python-docstrings` for its held-out part"
    )
    init_checkpoint: str | None = Field(
        None,
        description="stage finetune: initial weights, from a Hugging Face folder, a TF1 checkpoint, or a run of gaudi-bert; "
        "by default, the pipeline pretrains them; if the key is set, `finetune` is the first stage",
    )
    vocab: str | None = Field(
        None, description="stage finetune: the folder with the tokenizer; default: the folder of the weights"
    )
    max_sequence_length: int = Field(
        128, ge=8, le=8192, description="number of slots of a pack, and largest number of tokens in a sequence"
    )
    row_lengths: RowLengthChoice | None = Field(
        None,
        description="up to three row lengths, such as 512,2048,8192, or `auto` for the cheapest ones; each sequence goes "
        "into the shortest row that can hold it; by default, all rows have max_sequence_length; if row_lengths is set, the "
        "default of max_sequence_length is the longest of them",
    )
    depth: Depth = Field(6, description="largest number of sequences in a pack, from 1 to 1,024, or `max` for no limit")
    algorithm: Algorithm = "optimal"
    evaluation_depth: Depth = Field("max", description="depth of the packs for evaluation")
    learning_rate: float = Field(5.0e-5, gt=0)
    epochs: int = Field(3, ge=1, description="how often the model is trained on each sequence")
    batch_sequences: int = Field(32, ge=1, description="number of sequences (not packs) in one update, over all workers")
    warmup_share: float = Field(0.1, ge=0, le=1, description="fraction of the updates during which the learning rate rises")
    best_metric: str | None = Field(
        None,
        description="metric that selects the best checkpoint; default: accuracy, f1_micro, pearson, f1 or loss, depending "
        "on the task",
    )
    evaluate_every_updates: int | None = Field(None, ge=1, description="default: number of updates in an epoch")
    save_every_updates: Annotated[int | None, CHANGEABLE_ON_RESUME] = Field(
        None, ge=1, description="default: number of updates in an epoch"
    )


class MlperfSettings(Settings):
    """Settings of the log file for an MLPerf submission. Writing the log requires the package mlperf-logging."""

    log: bool = Field(False, description="write train/mlperf.log")
    organization: str = Field("unnamed", min_length=1, description="organization that submits the result")
    platform: str = Field("unnamed", min_length=1, description="name of the machine on which the run takes place")
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
# For these tasks, the baseline in a report is the model before fine-tuning. For other tasks with a baseline, it is a model
# that always gives the same answer.
SEARCH_TASKS = ("embedding", "reranking")

TooLong = Literal["error", "truncate", "window"]
RetrievalLoss = Literal["cosent", "cosine", "listwise"]
RowFormat = Literal["jsonl", "csv", "tsv", "parquet", "conll", "squad", "txt"]
# What to do with an input row that cannot be read. `stop` ends the run before anything is computed. `skip` counts the row
# and continues with the next one.
OnBadRow = Literal["stop", "skip"]


class TaskSettings(Settings):
    """The task on which the model is fine-tuned, and how its data is read."""

    name: TaskName | None = Field(None, description="the task")
    text: str = Field("text", description="column (or key of JSON lines) of the text")
    text_pair: str = Field("text_pair", description="column of the second text, if rows are pairs of texts")
    label: str = Field("label", description="column of the label, which is a name, several names, or a number")
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
        description="embedding, reranking: column of a text, or of a list of texts, that does not answer; default: "
        "`negative`, `negatives`, `negative_1`, `negative_2`, ...",
    )
    id: str = Field("id", description="column with an identifier of the row, which is ignored")
    columns: tuple[str, ...] | None = Field(None, description="names of the columns of a CSV or TSV file without a header")
    no_header: bool = Field(False, description="with `columns`: the first line is a row, even if it looks like a header")
    labels: str | None = Field(
        None, description="file with one label name per line, if the labels in the data are line numbers"
    )
    format: RowFormat | None = Field(
        None, description="format of the data; default: according to the file's ending, JSON lines for a pipe"
    )
    delimiter: Delimiter | None = Field(
        None, description="the character between the cells of a CSV or TSV file; default: a comma or a tab"
    )
    encoding: Encoding = Field(
        "utf-8", description="encoding of the text, by its name in Python, such as cp1252, latin-1 or utf-16"
    )
    on_bad_row: OnBadRow = Field(
        "stop",
        description="what to do with a row that cannot be read: `stop` the command, or `skip` and count the row, which is "
        "then neither used for training nor predicted",
    )
    too_long: TooLong | None = Field(
        None,
        description="what to do with rows that have too many tokens: stop with an error, truncate them, or read them in "
        "windows; default: windows for tags, questions and language modelling, and truncate for other tasks; the number of "
        "such rows is printed",
    )
    stride: int | None = Field(
        None,
        ge=0,
        le=8192,
        description="number of tokens by which the windows of a row overlap; default: 128, or half a window if a window is "
        "shorter than 256",
    )
    n_best: int = Field(
        1, ge=1, le=1000, description="question answering: number of answers that are written for each question"
    )
    max_answer_tokens: int = Field(
        30, ge=1, le=8192, description="question answering: largest number of tokens in an answer"
    )
    null_score_threshold: float | None = Field(
        None,
        description="question answering: give no answer if the score of the empty answer is better by more than this; "
        "default: 0 if the training data contain questions without an answer; otherwise, an answer is always given",
    )
    loss: RetrievalLoss | None = Field(
        None,
        description="embedding, pairs with a score: `cosent` (default) or `cosine`; other rows of this task use in-batch "
        "negatives; reranking: `listwise` over the documents of a query; default: binary cross-entropy",
    )
    scale: float = Field(20.0, gt=0, description="embedding: factor of the cosines, which is the inverse of the temperature")
    symmetric: bool = Field(
        False, description="embedding, in-batch negatives: also train the model to find the anchor of each positive"
    )
    dimensions: tuple[Annotated[int, Field(ge=1)], ...] = Field(
        (), description="embedding: lengths to which the vectors can be truncated later (Matryoshka)"
    )
    pooling: Literal["cls", "mean", "max", "last"] | None = Field(
        None,
        description="embedding: how the vectors of the tokens are combined into one vector; default: the setting in the "
        "model folder, or mean",
    )
    query_prompt: str | None = Field(
        None,
        description="embedding: text that is put before an anchor (or `text`); default: the prompt `query` of the model "
        "folder, or none",
    )
    document_prompt: str | None = Field(
        None,
        description="embedding: text that is put before all other texts; default: the prompt `document` of the model "
        "folder, or none",
    )
    masked_lm_probability: float = Field(
        0.15, gt=0, lt=1, description="masked language modelling: fraction of the tokens that is masked"
    )
    _keys_set_by_user: frozenset[str] | None = PrivateAttr(None)

    @property
    def keys_set_by_user(self) -> frozenset[str]:
        """The names of the keys that the user has set.

        A column that the user names must exist in the data, and other keys that the user has set must suit the data. Keys
        that still have their default are ignored if they do not suit the data.
        """
        return frozenset(self.model_fields_set) if self._keys_set_by_user is None else self._keys_set_by_user

    def copy_with_user_settings(self, values: Mapping[str, Any]) -> TaskSettings:
        """Return a copy with changed values. Only the changed keys count as set by the user.

        Args:
            values: The new values by key. They must be valid, because they are not validated again.
        """
        settings = self.model_copy(update=dict(values))
        settings._keys_set_by_user = frozenset(values)  # noqa: SLF001 - its own class
        return settings


class TokenizeSettings(Settings):
    """How texts become rows of token ids. These settings come only from the command line, not from a pipeline file."""

    max_sequence_length: int = Field(
        ge=1, le=2**20, description="largest number of tokens in a row, including special tokens"
    )
    too_long: Literal["split", "truncate", "drop", "error"] = Field(
        "split", description="what to do with texts that have more tokens than a row"
    )
    special_tokens: bool = Field(True, description="add the tokenizer's special tokens to each row")
    text_column: str = Field("text", description="column (or key of JSON lines) of the text")
    text_pair_column: str | None = Field(
        None, description="column of the second text of a pair; by default, no second text is read"
    )
    files: TaskSettings = Field(
        default_factory=TaskSettings,
        description="how to read the files: the keys of `task` about their format, columns, encoding and bad rows",
    )
    part_bytes: Bytes = Field(64 * 2**20, ge=1)

    @property
    def row_reading_settings(self) -> TaskSettings:
        """The settings for reading rows of text. A second text is read only if the user named its column."""
        columns = {"text_column": "text", "text_pair_column": "text_pair"}
        named = {key: getattr(self, name) for name, key in columns.items() if name in self.model_fields_set}
        named |= self.files.model_dump(exclude_unset=True)
        return TaskSettings(text_pair=named.get("text", "text")).copy_with_user_settings(named)

    def to_json_fields(self) -> dict[str, Any]:
        """Return the settings by name as JSON values, as they are stored with the output. Settings without a value are left
        out.
        """
        own = self.model_dump(mode="json", exclude={"files"}, exclude_none=True)
        return own | self.files.model_dump(mode="json", exclude_unset=True, exclude_none=True)


class PredictSettings(Settings):
    """How predictions are made with the fine-tuned model of the pipeline."""

    data: str | None = Field(
        None, description="the rows to predict, or `python-docstrings` for its held-out part; required for this stage"
    )
    max_sequence_length: int | None = Field(
        None, ge=3, le=8192, description="largest number of tokens in a row; default: as the model was trained"
    )
    precision: InferencePrecision = "float32"
