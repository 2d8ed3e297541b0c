"""Settings of downstream tasks: what the rows of their data are called and how they are read."""

from __future__ import annotations

from typing import Literal, get_args

from pydantic import Field

from gaudi_bert.config.values import Settings

__all__ = [
    "ROW_FORMATS",
    "TASK_NAMES",
    "PredictSettings",
    "RowFormat",
    "TaskName",
    "TaskSettings",
    "TooLong",
]

TaskName = Literal[
    "classification",
    "multi-label",
    "regression",
    "token-classification",
    "question-answering",
    "masked-language-modelling",
    "causal-language-modelling",
]
TASK_NAMES: tuple[str, ...] = get_args(TaskName)

RowFormat = Literal["jsonl", "csv", "tsv", "parquet", "conll", "squad", "txt"]
ROW_FORMATS: tuple[str, ...] = get_args(RowFormat)

TooLong = Literal["error", "truncate", "window"]


class TaskSettings(Settings):
    """A downstream task and how its data is read."""

    name: TaskName | None = Field(None, description="the task")
    text: str = Field("text", description="column (or key of a JSON line) of the text")
    text_pair: str = Field("text_pair", description="... of the second text of a pair, where there is one")
    label: str = Field("label", description="... of the label: a name, several names, or a number")
    tokens: str = Field("tokens", description="... of the words, for token classification")
    tags: str = Field("tags", description="... of the tag of each word")
    id: str = Field("id", description="... of a name of the row; read past")
    columns: tuple[str, ...] | None = Field(None, description="names of the columns of a CSV or TSV file without a header")
    labels: str | None = Field(
        None, description="a file with a label's name a line: labels in the data are its line numbers"
    )
    format: RowFormat | None = Field(None, description="of the data; default: by the ending of the file")
    too_long: TooLong = Field(
        "error", description="rows of too many tokens: refuse them, cut them, or take windows (token classification)"
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
        description="question answering: no answer where its score is better by more than this; default: 0 where the "
        "training data has questions without an answer, else there is always one",
    )
    masked_lm_probability: float = Field(0.15, gt=0, lt=1, description="masked language modelling: share of masked tokens")


class PredictSettings(Settings):
    """What the fine-tuned model of a pipeline answers."""

    data: str | None = Field(
        None,
        description="rows to answer, or `python-docstrings`: the part that is held out; without it there is no such stage",
    )
    max_sequence_length: int | None = Field(
        None, ge=3, le=8192, description="most tokens of a row; default: what the model was trained with"
    )
    precision: Literal["float32", "bfloat16"] = "float32"
