"""Settings of what a pipeline does: prepare and pack data, train a model, fine-tune it for a task, predict."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import Field, PrivateAttr, model_validator

from gaudi_bert.config.values import (
    FREE,
    Algorithm,
    Bytes,
    Delimiter,
    Depth,
    Encoding,
    Engine,
    Precision,
    RowLengthChoice,
    Settings,
)

# --- data


class PrepareSettings(Settings):
    """Plain text to unpacked examples, or where the unpacked examples already are."""

    text: str | tuple[str, ...] | None = Field(
        "python-docs", description="files, folders or globs; or `python-docs`, `python-docstrings`"
    )
    records: str | None = Field(None, description="unpacked TFRecords or HDF5 files that exist already: nothing is prepared")
    evaluation_records: str | None = Field(None, description="held-out unpacked TFRecords or HDF5 files that exist already")
    vocab: str | None = Field(None, description="a vocab.txt; without it one of `train_vocab` tokens is trained")
    train_vocab: int = Field(8192, ge=64, le=1_000_000, description="tokens of the vocabulary trained from the text")
    lower_case: bool = Field(True, description="lower-case and strip accents, as uncased BERT does")
    max_sequence_length: int = Field(128, ge=8, le=8192, description="slots of an example")
    max_predictions: int = Field(20, ge=1, le=8192, description="most masked positions per sequence")
    duplicates: int = Field(
        5, ge=1, le=1000, description="how often each document is used, each time with other masks and pairs"
    )
    short_sequence_probability: float = Field(0.1, ge=0, le=1)
    masked_lm_probability: float = Field(0.15, gt=0, lt=1)
    whole_word_masking: bool = Field(False, description="mask whole words")
    evaluation_fraction: float = Field(0.1, ge=0, lt=1, description="share of documents held out before duplication")
    shards: int = Field(8, ge=1, le=100_000, description="files of training examples")
    seed: int = Field(12345, description="seed of every random choice")


class PackingSettings(Settings):
    """Packing sequences into rows."""

    algorithm: Algorithm = Field("optimal", description="the packing algorithm")
    depth: Depth = Field(3, description="most sequences per pack, at most 1,024; or `max` for no limit")
    leftovers: Literal["best-fit", "complement"] = Field(
        "best-fit", description="nnls only: remaining sequences are packed by best fit, or padded as published"
    )
    effort: Literal["bounded", "unlimited"] = Field(
        "bounded", description="optimal only: search no longer than can be gained, or on for the last pack"
    )
    masked_slots: int | None = Field(
        None, ge=1, le=32768, description="Q, masked positions per pack; default and least: max_predictions + depth"
    )
    group_sequences: int = Field(
        500_000, ge=1, description="most sequences per group of files; each group is packed on its own"
    )
    group_bytes: Bytes = Field(2**30, description="most bytes per group of files")
    shard_multiple: int = Field(32, ge=1, le=4096, description="the number of shards of a group is a multiple of this")
    shard_bytes: Bytes = Field(128 * 10**6, description="most bytes per shard")
    seed: int = Field(12345, description="seed of every random choice")


class TableSettings(Settings):
    """Packing the rows of a table. Only the command line sets this; no pipeline file has it.

    With `row_lengths`, the table that has packs of `max_sequence_length` is one of several, and a sequence is in that of the
    shortest packs that it fits.
    """

    max_sequence_length: int = Field(ge=1, le=2**20, description="tables: slots of a pack")
    row_lengths: RowLengthChoice | None = Field(
        None, description="tables: packs of up to three lengths, or of those that cost least, each in a folder"
    )
    input_column: str = Field("input_ids", description="tables: the column of token ids")
    algorithm: Algorithm = Field("optimal", description="the packing algorithm")
    effort: Literal["bounded", "unlimited"] = "bounded"
    depth: Depth = Field("max", description="most sequences per pack, or `max`; default: 3 of records, max of tables")
    too_long: Literal["error", "truncate", "split", "drop"] = Field(
        "error", description="tables: what to do with longer rows"
    )
    columns: tuple[str, ...] | None = Field(None, description="tables: pack only these columns")
    group_sequences: int = Field(500_000, ge=1)
    group_bytes: Bytes = Field(2**30, ge=2**20, description="tables: rows in memory at once, e.g. 256MiB")
    shard_multiple: int = Field(32, ge=1, le=4096)
    shard_bytes: Bytes = Field(128 * 10**6)
    seed: int = Field(12345, description="seed of every random choice")

    @property
    def given_lengths(self) -> tuple[int, ...]:
        """The lengths of rows, where there are several and they are known."""
        return self.row_lengths if isinstance(self.row_lengths, tuple) else ()

    @property
    def sequence_lengths(self) -> range:
        """The lengths of the sequences of these packs."""
        shorter = [length for length in self.given_lengths if length < self.max_sequence_length]
        return range(max(shorter, default=0) + 1, self.max_sequence_length + 1)

    @property
    def most_tokens(self) -> int:
        """Return the most tokens of a sequence of any of the tables: longer rows are too long."""
        return self.given_lengths[-1] if self.given_lengths else self.max_sequence_length


RowFormat = Literal["jsonl", "csv", "tsv", "parquet", "conll", "squad", "txt"]
OnBadRow = Literal["stop", "skip"]
"""What a row that cannot be read does: it stops all, before anything is computed; or it is skipped, and counted."""


class TokenizeSettings(Settings):
    """Making rows of tokens from texts. Only the command line sets this; no pipeline file has it."""

    max_sequence_length: int = Field(ge=1, le=2**20, description="most tokens of a row, special ones included")
    too_long: Literal["split", "truncate", "drop", "error"] = Field("split", description="what to do with longer texts")
    special_tokens: bool = Field(True, description="the tokens that the tokenizer adds to each row")
    text_column: str = Field("text", description="the column (or key of JSON lines) of the text")
    text_pair_column: str | None = Field(None, description="the column of the second text of a pair")
    columns: tuple[str, ...] | None = Field(None, description="names of the columns of a CSV or TSV file without a header")
    no_header: bool | None = Field(
        None, description="with `columns`: the first line is a row, though it looks like a header"
    )
    format: RowFormat | None = Field(None, description="default: by the ending, JSON lines of a pipe")
    delimiter: Delimiter | None = Field(None, description="CSV and TSV: what separates cells, such as ';' or tab")
    encoding: Encoding | None = Field(None, description="of the text, such as cp1252; default: utf-8")
    on_bad_row: OnBadRow | None = Field(
        None, description="a row that cannot be read; default: stop; skip counts and names it"
    )
    part_bytes: Bytes = Field(64 * 2**20, ge=1)

    @property
    def reading(self) -> TaskSettings:
        """Return how the files of texts are read; a second text is read where its column is named."""
        given = {"text_column": "text", "text_pair_column": "text_pair"}
        given |= {name: name for name in ("columns", "no_header", "format", "delimiter", "encoding", "on_bad_row")}
        named = {key: getattr(self, name) for name, key in given.items() if name in self.model_fields_set}
        return TaskSettings(text_pair=named.get("text", "text")).with_named(named)


# --- model and training


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
            heads, size = self.num_attention_heads, self.hidden_size
            raise ValueError(f"model.num_attention_heads {heads} does not divide model.hidden_size {size}; change one")
        return self


class LoopSettings(Settings):
    """Settings that pretraining and fine-tuning have in common.

    `section_name` is that of the section of a pipeline file, for messages.
    """

    section_name: ClassVar[str] = "training"

    engine: Annotated[Engine, FREE] = Field(
        "auto",
        description="auto: TensorFlow where it is installed and the model is a BERT, else PyTorch; "
        "a resumed run keeps its own",
    )
    device: Annotated[Literal["auto", "cpu", "cuda", "hpu"], FREE] = Field(
        "auto", description="cuda: a GPU, hpu: a Gaudi card; auto: what is there, a CPU where nothing else is"
    )
    compile: Annotated[bool | None, FREE] = Field(
        None,
        description="compile the model's step (XLA, torch.compile); default: where it pays; a resumed run keeps its own",
    )
    recompute: Annotated[bool, FREE] = Field(
        False,
        description="PyTorch: the backward pass computes each layer once more, to the same bits, and only the input of a "
        "layer stays in memory: a third more work",
    )
    deterministic: Annotated[bool, FREE] = Field(
        True, description="PyTorch on a GPU: only kernels that give the same bits twice; false: a resumed run may differ"
    )
    gaudi_fused_attention: Annotated[bool, FREE] = Field(
        False, description="PyTorch, a BERT on a Gaudi card: attention by the vendor's kernel FusedSDPA"
    )
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
    precision: Precision = "float32"
    keep_checkpoints: Annotated[int, FREE] = Field(2, ge=1)
    log_every_updates: Annotated[int, FREE] = Field(50, ge=1)
    threads: Annotated[int | None, FREE] = Field(
        None, ge=1, description="CPU threads of one operation; default: one per core"
    )
    fusion_bytes: Annotated[Bytes, FREE] = Field(
        64 * 2**20, description="several workers: gradients are sent in merged buffers of at most this size"
    )
    meeting_seconds: Annotated[float, FREE] = Field(
        600, ge=1, description="PyTorch, several workers: how long they wait for one another before the run begins"
    )
    stall_seconds: Annotated[float, FREE] = Field(
        300,
        ge=1,
        description="several workers: a worker that shows no sign of work for this long ends, and so do all others "
        "(three times as long while it builds its graph or saves)",
    )
    seed: int = 12345


class TrainingSettings(LoopSettings):
    """Pretraining the model."""

    global_batch_sequences: int = Field(128, ge=1, description="sequences (not packs) of one update, over all workers")
    updates: int = Field(1500, ge=1)
    warmup_updates: int = Field(100, ge=0)
    loss: Literal["token", "sequence"] = Field("token", description="masked-LM mean over tokens, or over sequences' means")
    loss_normalization: Literal["global", "balanced", "local"] = Field(
        "global",
        description="losses are divided by what the entire update holds (any workers and micro-batches: one big batch), "
        "by what a batch of this data holds on average, or by what each micro-batch holds (the predecessor's)",
    )
    packing_correction: Literal["batch", "betas"] = Field(
        "batch",
        description="batch: fewer packs per update, so that it still has global_batch_sequences; betas: as many packs as "
        "there would be sequences unpacked, both betas to the power of the packing factor, and fewer updates",
    )
    target_masked_lm_accuracy: float | None = Field(
        None, gt=0, le=1, description="stop when an evaluation reaches it (MLPerf: 0.72)"
    )
    init_checkpoint: str | None = Field(
        None, description="weights to start from: a checkpoint of ours, a Hugging Face folder, or a TF1 checkpoint"
    )
    save_every_updates: Annotated[int, FREE] = Field(500, ge=1)
    evaluate_every_updates: Annotated[int, FREE] = Field(500, ge=1)
    evaluate_packs: Annotated[int | None, FREE] = Field(
        None, ge=1, description="packs of one evaluation during training; default: all"
    )
    measure_speedup: Annotated[bool, FREE] = Field(
        False, description="first measure the speed-up over unpacked rows, which takes two more graphs"
    )
    shuffle_packs: int = Field(4096, ge=1, description="packs of a file are shuffled in windows of this many while reading")


class FineTuneSettings(LoopSettings):
    """Training a model for a task. Keys mean the same as in `training`.

    `micro_batch_packs` is the most that a micro-batch holds; of rows of several lengths, of the longest.
    """

    section_name: ClassVar[str] = "finetune"

    data: str | None = Field(
        None, description="stage finetune: labelled rows to learn from, or `python-docstrings`; required for this stage"
    )
    evaluation_data: str | None = Field(
        None, description="stage finetune: held-out rows of the same kind, or `python-docstrings`: the part that is held out"
    )
    init_checkpoint: str | None = Field(
        None,
        description="stage finetune: weights to start from: a Hugging Face folder, a TF1 checkpoint, or a run of ours; "
        "default: the weights that this pipeline pretrains; with given weights, `finetune` is the first stage",
    )
    vocab: str | None = Field(
        None, description="stage finetune: a folder with the tokenizer; default: where the weights are"
    )
    max_sequence_length: int = Field(128, ge=8, le=8192, description="positions of a pack, and most tokens of a sequence")
    row_lengths: RowLengthChoice | None = Field(
        None,
        description="rows of up to three lengths, as in 512,2048,8192: each sequence goes to the shortest that holds it; "
        "`auto`: those that cost least; default: all of max_sequence_length, which with given lengths is the last of them",
    )
    depth: Depth = Field(6, description="most sequences per pack, at most 1,024; or `max` for no limit")
    algorithm: Algorithm = "optimal"
    evaluation_depth: Depth = Field("max", description="the same for evaluations")
    learning_rate: float = Field(5.0e-5, gt=0)
    epochs: int = Field(3, ge=1, description="how often each sequence is seen")
    batch_sequences: int = Field(32, ge=1, description="sequences (not packs) of one update, over all workers")
    warmup_share: float = Field(0.1, ge=0, le=1, description="share of the updates for which the learning rate rises")
    best_metric: str | None = Field(
        None, description="the metric that selects the checkpoint; default: accuracy, f1_micro, pearson, f1 or loss"
    )
    evaluate_every_updates: int | None = Field(None, ge=1, description="default: after each epoch")
    save_every_updates: Annotated[int | None, FREE] = Field(None, ge=1, description="default: after each epoch")


class MlperfSettings(Settings):
    """The log of an MLPerf submission; needs the package mlperf-logging."""

    log: bool = Field(False, description="write train/mlperf.log")
    organization: str = Field("unnamed", min_length=1, description="who submits")
    platform: str = Field("unnamed", min_length=1, description="the machine")
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
"""Tasks whose baseline is the model before training."""

TooLong = Literal["error", "truncate", "window"]
RetrievalLoss = Literal["cosent", "cosine", "listwise"]


class TaskSettings(Settings):
    """A downstream task and how its data is read."""

    name: TaskName | None = Field(None, description="the task")
    text: str = Field("text", description="column (or key of a JSON line) of the text")
    text_pair: str = Field("text_pair", description="column of the second text of a pair, if there is one")
    label: str = Field("label", description="column of the label: a name, several names, or a number")
    tokens: str = Field("tokens", description="column of the words, for token classification")
    tags: str = Field("tags", description="column of the tag of each word")
    query: str = Field("query", description="reranking: column of the query")
    document: str = Field("document", description="reranking: column of a document")
    anchor: str = Field("anchor", description="embedding: column of the query")
    positive: str = Field(
        "positive", description="embedding, reranking: column of the text that answers; reranking also takes a list"
    )
    negative: str | None = Field(
        None,
        description="embedding, reranking: column of a text that does not answer, or of a list of them; default: "
        "`negative`, `negatives`, `negative_1`, `negative_2`, ...",
    )
    id: str = Field("id", description="column of a name of the row; ignored")
    columns: tuple[str, ...] | None = Field(None, description="names of the columns of a CSV or TSV file without a header")
    no_header: bool = Field(False, description="with `columns`: the first line is a row, though it looks like a header")
    labels: str | None = Field(None, description="a file with one label name per line; the data hold line numbers")
    format: RowFormat | None = Field(None, description="of the data; default: by the ending of the file")
    delimiter: Delimiter | None = Field(
        None, description="one character between the cells of a CSV or TSV file; default: a comma, or a tab"
    )
    encoding: Encoding = Field("utf-8", description="of the data's text, by Python's name: cp1252, latin-1, utf-16")
    on_bad_row: OnBadRow = Field(
        "stop",
        description="rows that cannot be read: `stop`, or `skip`: they are not trained on and have no answer",
    )
    too_long: TooLong | None = Field(
        None,
        description="rows with too many tokens: refuse them, cut them, or use windows; default: windows for tags, questions "
        "and language modelling, else cut; how many is printed",
    )
    stride: int | None = Field(
        None,
        ge=0,
        le=8192,
        description="tokens that neighbouring windows of one row share; default: 128, or half of a window of less than 256",
    )
    n_best: int = Field(1, ge=1, le=1000, description="question answering: answers printed for each question")
    max_answer_tokens: int = Field(30, ge=1, le=8192, description="question answering: the longest answer")
    null_score_threshold: float | None = Field(
        None,
        description="question answering: no answer where its score is better by more than this; default: 0 if the training "
        "data has questions without an answer, otherwise there is always one",
    )
    loss: RetrievalLoss | None = Field(
        None,
        description="embedding, pairs with a score: `cosent`, the default, or `cosine`; other rows have in-batch negatives. "
        "reranking: `listwise`, over the documents of a query; default: binary cross-entropy",
    )
    scale: float = Field(20.0, gt=0, description="embedding: what cosines are multiplied by, 1 / temperature")
    symmetric: bool = Field(False, description="embedding, in-batch negatives: find the anchor of each positive too")
    dimensions: tuple[Annotated[int, Field(ge=1)], ...] = Field(
        (), description="embedding: learn vectors that may be cut to these first values (Matryoshka)"
    )
    pooling: Literal["cls", "mean", "max", "last"] | None = Field(
        None, description="embedding: cls, mean, max or last; default: as in the model's folder, else mean"
    )
    query_prompt: str | None = Field(
        None, description="embedding: what precedes an anchor (or `text`); default: the folder's prompt `query`, or nothing"
    )
    document_prompt: str | None = Field(
        None, description="embedding: what precedes the other texts; default: the folder's prompt `document`, or nothing"
    )
    masked_lm_probability: float = Field(0.15, gt=0, lt=1, description="masked language modelling: share of masked tokens")
    _named: frozenset[str] | None = PrivateAttr(None)

    @property
    def named(self) -> frozenset[str]:
        """The keys that somebody named: they must apply to the rows, where a default may not."""
        return frozenset(self.model_fields_set) if self._named is None else self._named

    def with_named(self, values: Mapping[str, Any]) -> TaskSettings:
        """These settings as defaults, with `values`, checked already, by key: they alone are named."""
        settings = self.model_copy(update=dict(values))
        settings._named = frozenset(values)  # noqa: SLF001 - its own class
        return settings


class PredictSettings(Settings):
    """Predicting with the fine-tuned model of a pipeline."""

    data: str | None = Field(
        None, description="rows to answer, or `python-docstrings`: its held-out part; required for this stage"
    )
    max_sequence_length: int | None = Field(
        None, ge=3, le=8192, description="most tokens per row; default: as the model was trained"
    )
    precision: Precision = "float32"
