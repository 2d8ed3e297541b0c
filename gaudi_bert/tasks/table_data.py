"""A packed table as training data of words: packs in the one global order, each token with what is to be predicted.

The tokenizer comes with the table (`tokenize` and `pack` leave it there). The masks of a token are a function of the seed,
the epoch, the row of the table that its sequence is from, and its position there: never of its pack, of the processes, or
of where a run was resumed. Memory does not grow with the table: it is that of a few row groups.

Letters: B packs, L positions, S sequences of a pack, N sequences of a batch, T tokens of these.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Literal, cast

import numpy as np

from gaudi_bert.artefacts.base import NOTES_NAME
from gaudi_bert.artefacts.pack_kinds import RowTables, row_table_path
from gaudi_bert.artefacts.packed import TableMetadata
from gaudi_bert.common.arrays import AnyArray, BoolArray, Int32Array, IntArray, mixed_words, random_words
from gaudi_bert.common.errors import InputError
from gaudi_bert.model.config import ModelSizes
from gaudi_bert.model.heads import TaskKind
from gaudi_bert.model.masking import NO_VOCABULARY, Vocabulary, draw_masks, masked_features, masked_slots
from gaudi_bert.reading.streams import StoredPacks
from gaudi_bert.rows.tokenizer import TOKENIZER_NAME, RowTokenizer, open_tokenizer
from gaudi_bert.tables.packed_parquet import TableFiles, open_tables
from gaudi_bert.training.input.batches import Batch, TrainingOrder, batches_in_order, each_pack_once
from gaudi_bert.training.run_plan import MicroBatch, RowPacks

EVALUATION_EPOCH = -1


@dataclass(frozen=True)
class TableSource:
    """A packed table of rows of one length, with its tokenizer."""

    path: Path
    metadata: TableMetadata
    packs: StoredPacks = field(repr=False)
    tokenizer: RowTokenizer

    @property
    def files(self) -> TableFiles:
        """The packs by their shards and numbers."""
        return cast(TableFiles, self.packs.files)

    @property
    def length(self) -> int:
        """Positions of a pack."""
        return self.metadata.max_sequence_length

    @property
    def identity(self) -> str:
        """What distinguishes this table from others, for the settings of a run."""
        return f"{self.metadata.identity()} {self.tokenizer.sha256}"


@dataclass(frozen=True)
class PackedTable:
    """A packed table, or those of rows of several lengths, ascending."""

    path: Path
    tables: tuple[TableSource, ...]

    @property
    def tokenizer(self) -> RowTokenizer:
        """That of all."""
        return self.tables[0].tokenizer

    @property
    def length(self) -> int:
        """Positions of the longest pack."""
        return self.tables[-1].length

    @property
    def row_packs(self) -> tuple[RowPacks, ...]:
        """The packs of each length where there are several, as `RunPlan.rows`."""
        return tuple(RowPacks(table.length, table.metadata.packs) for table in self.tables) if len(self.tables) > 1 else ()

    @property
    def identity(self) -> str:
        """What distinguishes it from others, for the settings of a run."""
        return " ".join(table.identity for table in self.tables)

    def total(self, figure: Literal["packs", "sequences", "tokens"]) -> int:
        """Of all lengths."""
        return sum(getattr(table.metadata, figure) for table in self.tables)


def open_packed_table(path: Path) -> PackedTable:
    """The packed tables in a folder of this machine, by the length of their rows.

    Raises:
        InputError: it holds none, or one without tokens or without its tokenizer.
    """
    several = RowTables.read_if_present(path)
    folders = [path] if several is None else [row_table_path(path, length) for length in several.row_lengths]
    return PackedTable(path, tuple(map(_open_table, folders)))


def _open_table(path: Path) -> TableSource:
    metadata = TableMetadata.read(path)
    if metadata.index_only:
        raise InputError(f"{path}: is an index, which holds no tokens; pack the table again without --index-only")
    if not (path / NOTES_NAME / TOKENIZER_NAME).is_file():
        raise InputError(
            f"{path}: packed without its tokenizer; tokenize the texts with `gaudi-bert tokenize`, which leaves it with the "
            f"table, or copy the tokenizer.json of its tokens to {path / NOTES_NAME}"
        )
    packs = open_tables(path, sorted(path.glob("packed-*.parquet")))
    return TableSource(path, metadata, packs, open_tokenizer(path / NOTES_NAME))


def check_table_fits(source: PackedTable, sizes: ModelSizes) -> None:
    """Refuse a table that the model cannot take."""
    if source.length > sizes.positions:
        raise InputError(
            f"{source.path}: its packs have {source.length} positions, the model has {sizes.positions}; pack the table to "
            "at most as many, or give the model more"
        )
    source.tokenizer.check_fits(sizes.vocab_size, sizes.segments)


def check_same_tokens(source: PackedTable, other: RowTokenizer) -> None:
    """Refuse a model, or a second table, whose tokenizer gives some token of the table another number."""
    ours, theirs = source.tokenizer.tokenizer.get_vocab(), other.tokenizer.get_vocab()
    token = min((token for token, number in ours.items() if theirs.get(token) != number), default=None, key=ours.__getitem__)
    if token is not None:
        raise InputError(
            f"{other.file}: has {token!r} as {theirs.get(token, 'no token')}, {source.path} as {ours[token]}; tokenize both "
            "with one tokenizer, that of the model"
        )


@dataclass(frozen=True)
class WordTargets:
    """What is predicted: words that were masked, or the next one."""

    kind: TaskKind
    seed: int
    share: float
    vocabulary: Vocabulary = NO_VOCABULARY

    def of_packs(self, packs: Sequence[Mapping[str, AnyArray]], epoch: int, length: int, depth: int) -> Batch:
        """The features of packs [B, ...], with targets and their weights, in the form of `model.heads.TaskHead`."""
        ids_BL, numbers_BL = (np.stack([pack[name] for pack in packs]) for name in ("input_ids", "sequence_ids"))
        ids_BL, numbers_BL = ids_BL.astype(np.int32), numbers_BL.astype(np.int32)
        positions_BL = np.stack([pack["position_ids"] for pack in packs]).astype(np.int32) * (numbers_BL > 0)
        segments = [pack.get("token_type_ids") for pack in packs]
        given = [each for each in segments if each is not None]
        counts_B = np.array([len(pack["seq_lens"]) for pack in packs])
        batch: Batch = {
            "input_ids": ids_BL,
            "input_mask": numbers_BL,
            "segment_ids": np.stack(given).astype(np.int32) if given else np.zeros_like(ids_BL),
            "positions": positions_BL,
            "sequence_weights": (np.arange(depth) < counts_B[:, np.newaxis]).astype(np.float32),
        }
        if self.kind == "causal-language-modelling":
            same_BL = np.pad((numbers_BL[:, 1:] == numbers_BL[:, :-1]) & (numbers_BL[:, 1:] > 0), [(0, 0), (0, 1)])
            following_BL = np.pad(ids_BL[:, 1:], [(0, 0), (0, 1)])
            return {**batch, "targets": following_BL * same_BL, "target_weights": same_BL.astype(np.float32)}
        slots = masked_slots(length, depth, self.share)
        return {**batch, **self._masked(packs, ids_BL, numbers_BL > 0, positions_BL, epoch, slots)}

    def _masked(
        self,
        packs: Sequence[Mapping[str, AnyArray]],
        ids_BL: Int32Array,
        real_BL: BoolArray,
        positions_BL: Int32Array,
        epoch: int,
        slots: int,
    ) -> Batch:
        lengths_N = np.concatenate([pack["seq_lens"] for pack in packs]).astype(np.int64)
        if int(lengths_N.sum()) != np.count_nonzero(real_BL):
            raise InputError("seq_lens and sequence_ids of a pack differ; pack the table again")
        rows_N = np.concatenate([pack["indices"] for pack in packs]).astype(np.uint64)
        starts_N = np.concatenate([pack.get("starts", np.zeros(len(pack["seq_lens"]))) for pack in packs])
        at_T = (np.repeat(starts_N, lengths_N) + positions_BL[real_BL]).astype(np.uint64)
        order_T, kinds_T = (
            mixed_words(np.repeat(mixed_words(random_words(1, self.seed, purpose, epoch + 1), rows_N), lengths_N), at_T)
            for purpose in ("masked words", "kinds of masks")
        )
        masks = draw_masks(ids_BL[real_BL], lengths_N, self.share, self.vocabulary, order_T, lambda masked: kinds_T[masked])
        is_masked_BL, changed_BL = np.zeros_like(real_BL), ids_BL.copy()
        is_masked_BL[real_BL], changed_BL[real_BL] = masks.is_masked, masks.input_ids
        return {**masked_features(is_masked_BL, ids_BL, slots), "input_ids": changed_BL}


def table_batches(
    source: PackedTable, targets: WordTargets, micro_batches: Iterable[MicroBatch], order: TrainingOrder
) -> Iterator[Batch]:
    """The share of a process in these micro-batches of packs, without end."""
    tables = source.tables

    def features(which: int, shards: IntArray, records: IntArray, epoch: int) -> Batch:
        return _features(tables[which], targets, shards, records, epoch)

    return batches_in_order([table.packs for table in tables], features, micro_batches, order, source.path)


def evaluation_table_batches(
    source: PackedTable, targets: WordTargets, batch_packs: int, rank: int, size: int, take_packs: int | None
) -> Iterator[Batch]:
    """Every pack once, always with the same masks; as `each_pack_once`, of each length in turn.

    `batch_packs` are of the longest rows, and of shorter ones as many slots; of `take_packs`, each length has its share.
    """

    def batches_of(table: TableSource) -> Iterator[Batch]:
        def read(shards: IntArray, records: IntArray) -> Batch:
            return _features(table, targets, shards, records, EVALUATION_EPOCH)

        take = None if take_packs is None else math.ceil(take_packs * table.metadata.packs / source.total("packs"))
        return each_pack_once(table.files, read, batch_packs * source.length // table.length, rank, size, take)

    return chain.from_iterable(map(batches_of, source.tables))


def _features(source: TableSource, targets: WordTargets, shards: IntArray, records: IntArray, epoch: int) -> Batch:
    """Some packs, their token numbers checked."""
    packs = source.files.read(shards, records)
    for shard, record, pack in zip(shards.tolist(), records.tolist(), packs, strict=True):
        ids = pack["input_ids"]
        if len(ids) != source.length or ids.min() < 0 or ids.max() >= source.tokenizer.vocabulary_size:
            wrong = f"{len(ids)} tokens" if len(ids) != source.length else f"the tokens {ids.min()} to {ids.max()}"
            raise InputError(
                f"{source.files.paths[shard]}: row {record} holds {wrong}; allowed are {source.length} tokens from 0 to "
                f"{source.tokenizer.vocabulary_size - 1:,}; pack the table again, or give the tokenizer of its tokens"
            )
    return targets.of_packs(packs, epoch, source.length, source.metadata.deepest_pack)
