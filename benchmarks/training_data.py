"""Records, batches and training steps for the training benchmarks."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np
from records_data import DEPTH, LENGTH, QUIET, VOCABULARY, write_record_files

from gaudi_bert.artefacts.packed import RecordMetadata
from gaudi_bert.artefacts.results import StageRun
from gaudi_bert.config.sections import PackingSettings, TrainingSettings
from gaudi_bert.config.values import EngineName
from gaudi_bert.engines import load_engine
from gaudi_bert.engines.protocol import Communicator, ModelSpec
from gaudi_bert.model.config import BertConfig
from gaudi_bert.model.heads import PretrainingHead
from gaudi_bert.training.batches import Batch, TrainingOrder, read_training_batches
from gaudi_bert.training.objective import PretrainingObjective, TrainingStep
from gaudi_bert.training.sources import RecordSource, open_local_records

FILES, SEQUENCES_A_FILE, SEED = 4, 1500, 11

# BERT-base's width and number of heads, but fewer layers, because a benchmark with twelve layers takes minutes on two cores.
BASE_LIKE = BertConfig(vocab_size=VOCABULARY, num_hidden_layers=4)
SMALL = BertConfig(
    vocab_size=VOCABULARY, hidden_size=256, num_hidden_layers=4, num_attention_heads=4, intermediate_size=1024
)
TINY = BertConfig(vocab_size=VOCABULARY, hidden_size=128, num_hidden_layers=2, num_attention_heads=2, intermediate_size=512)


@dataclass(frozen=True)
class Records:
    """The same sequences unpacked and packed, with the lengths of Wikipedia at 512 tokens."""

    unpacked: RecordSource
    packed: RecordSource
    metadata: RecordMetadata

    @property
    def tokens_a_sequence(self) -> float:
        """The mean number of tokens in a sequence."""
        return self.metadata.tokens / self.metadata.sequences


def make_records(folder: Path) -> Records:
    """Write unpacked records, pack them, and open both."""
    from gaudi_bert.tfrecords.write import pack_records

    unpacked, packed = folder / "unpacked", folder / "packed"
    write_record_files(unpacked, FILES, SEQUENCES_A_FILE, SEED, LENGTH)
    pack_records(unpacked, packed, PackingSettings(depth=DEPTH), StageRun(QUIET, overwrite=True))
    return Records(open_local_records(unpacked), open_local_records(packed), RecordMetadata.read(packed))


@dataclass
class Trainer:
    """Runs gaudi-bert's training step with its input: reading, checking, forward and backward pass, clipping, AdamW.

    Args:
        config: The config of the model.
        source: The records.
        batch_packs: The number of rows in an update.
        engine: The engine that computes.
        precision: The precision of matrix products.
        communicator: The processes that train together.
    """

    config: BertConfig
    source: RecordSource
    batch_packs: int
    engine: EngineName = "tensorflow"
    precision: Literal["float32", "bfloat16"] = "float32"
    communicator: Communicator = field(default_factory=Communicator)
    update: int = 0
    seconds_waited: float = 0.0
    losses: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        settings = TrainingSettings(seed=1)
        engine, in_pytorch = load_engine(self.engine), self.engine == "pytorch"
        device = engine.open_device(settings) if in_pytorch else None
        spec = ModelSpec(self.config, PretrainingHead())
        model = engine.build_model(spec, device, seed=1, compute_dtype=self.precision, compiled=not in_pytorch)
        updates = engine.create_updates(model, settings, self.communicator, 1)
        self._step = TrainingStep(updates, self.communicator, settings, PretrainingObjective())
        self._batches = self._read()

    def _read(self) -> Iterator[Batch]:
        """Return an iterator over the training batches of this process."""
        order = TrainingOrder(seed=1, shuffle_packs=4096, rank=self.communicator.rank, size=self.communicator.size)
        return read_training_batches(self.source, self.config, self.batch_packs, order)

    def run(self, updates: int) -> None:
        """Run a number of updates, and wait until they are finished."""
        for _ in range(updates):
            started = time.perf_counter()
            batch = next(self._batches)
            self.seconds_waited += time.perf_counter() - started
            self.update += 1
            sums = self._step.run_update([batch], self.update, learning_rate=1e-4)()
            self.losses.append(float(sums[0] / sums[1] + sums[2] / sums[3]))


def count_training_flops_per_row(config: BertConfig, source: RecordSource, reads_all: bool = False) -> int:
    """Return the number of floating-point operations in the matrix products of one row, for the forward and backward pass
    (three times those of the forward pass).

    Args:
        config: The config of the model.
        source: The source of the rows.
        reads_all: Whether the last layer is computed at every position, as in other programs, instead of only at positions
            that a head reads.
    """
    schema = source.schema
    length, hidden, inner = schema.max_sequence_length, config.hidden_size, config.intermediate_size
    slots = getattr(schema, "masked_slots", schema.max_predictions)

    def layer(places: int) -> int:
        return 2 * hidden * (2 * length * hidden + 2 * places * hidden + 2 * places * inner + 2 * places * length)

    last = layer(length if reads_all else min(length, slots + source.depth))
    heads = 2 * slots * (hidden**2 + hidden * config.vocab_size) + 2 * source.depth * hidden * (hidden + 2)
    return 3 * ((config.num_hidden_layers - 1) * layer(length) + last + heads)


def read_first_batches(source: RecordSource, batch_packs: int, count: int) -> list[Batch]:
    """Return the first `count` batches, for programs that do not read gaudi-bert's records."""
    batches = read_training_batches(source, SMALL, batch_packs, TrainingOrder(seed=1, shuffle_packs=4096))
    return [{name: np.copy(value) for name, value in next(batches).items()} for _ in range(count)]
