"""Settings of the data side: preparing examples, and packing."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from gaudi_bert.config.values import Algorithm, Bytes, Depth, Settings

__all__ = [
    "PackingSettings",
    "PrepareSettings",
    "TableSettings",
]


class PrepareSettings(Settings):
    """Plain text to unpacked examples, or where the unpacked examples already are."""

    text: str | tuple[str, ...] | None = Field(
        "python-docs", description="files, folders or globs; or `python-docs`, `python-docstrings`"
    )
    records: str | None = Field(None, description="unpacked TFRecords that exist already: nothing is prepared")
    evaluation_records: str | None = Field(None, description="held-out unpacked TFRecords that exist already")
    vocab: str | None = Field(None, description="a vocab.txt; without it one of `train_vocab` tokens is trained")
    train_vocab: int = Field(8192, ge=64, le=1_000_000, description="tokens of the vocabulary trained from the text")
    lower_case: bool = Field(True, description="lower-case and strip accents, as uncased BERT does")
    max_sequence_length: int = Field(128, ge=8, le=8192)
    max_predictions: int = Field(20, ge=1, le=8192, description="most masked positions of one sequence")
    duplicates: int = Field(5, ge=1, le=1000, description="times each document is used with other masks and pairs")
    short_sequence_probability: float = Field(0.1, ge=0, le=1)
    masked_lm_probability: float = Field(0.15, gt=0, lt=1)
    whole_word_masking: bool = False
    evaluation_fraction: float = Field(0.1, ge=0, lt=1, description="share of documents held out before duplication")
    shards: int = Field(8, ge=1, le=100_000, description="files of training examples")
    seed: int = 12345


class PackingSettings(Settings):
    """How sequences are packed into rows."""

    algorithm: Algorithm = "nnls"
    depth: Depth = Field(3, description="most sequences per pack, at most 1,024; or `max` for no limit")
    leftovers: Literal["best-fit", "complement"] = Field(
        "best-fit", description="nnls only: what the loop leaves over is packed by best fit, or padded as published"
    )
    masked_slots: int | None = Field(None, ge=1, description="Q, masked positions a pack; default max_predictions + depth")
    group_sequences: int = Field(500_000, ge=1, description="a group of files is packed within itself: at most this many")
    group_bytes: Bytes = Field(2**30, description="... and at most this many bytes")
    shard_multiple: int = Field(32, ge=1, le=4096, description="the number of shards of a group is a multiple of this")
    shard_bytes: Bytes = Field(128 * 10**6, description="a shard is at most this big")
    seed: int = 12345


class TableSettings(Settings):
    """How the rows of a table are packed. Only the command line sets them; no pipeline file has them."""

    max_sequence_length: int = Field(ge=1, le=2**20, description="slots of a pack")
    algorithm: Algorithm = "lpfhp"
    depth: Depth = "max"
    too_long: Literal["error", "truncate", "split", "drop"] = "error"
    index_only: bool = False
    keep_together: str | None = None
    columns: tuple[str, ...] | None = None
    group_sequences: int = Field(500_000, ge=1)
    group_bytes: Bytes = Field(2**30, ge=2**20)
    shard_multiple: int = Field(32, ge=1, le=4096)
    shard_bytes: Bytes = Field(128 * 10**6)
    seed: int = 12345
