"""Measure training of packed BERT on a GPU or a Gaudi card, in at most eight minutes, and print JSON.

    python benchmarks/card.py                          the device of this machine; needs the extra `pytorch`
    python benchmarks/card.py --device cpu --small     a rehearsal with a tiny model, in a minute

The output contains the losses next to those of the CPU (float32, no dropout). For BERT-base and BERT-large with 128 and 512
tokens in bfloat16, it contains the non-padding tokens per second, the fraction of the device's peak (the fastest product of
two matrices on the device), the speed-up over padded rows, the speed compared with `transformers` on padded rows, and the
memory. If there are two devices, it also contains training with two processes. Measurements for which no time is left are
null.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent))

import numpy as np
import torch
from records_data import DEPTH, HISTOGRAM, QUIET, VOCABULARY, frame, make_example
from training_data import count_training_flops_per_row

from gaudi_bert import __version__
from gaudi_bert.artefacts.packed import RecordMetadata
from gaudi_bert.artefacts.results import StageRun
from gaudi_bert.common.launch import find_free_port, torch_environment
from gaudi_bert.config.sections import PackingSettings, TrainingSettings
from gaudi_bert.engines import load_engine
from gaudi_bert.engines.protocol import Communicator, ModelSpec
from gaudi_bert.model.config import BertConfig
from gaudi_bert.model.heads import PretrainingHead
from gaudi_bert.tfrecords.write import pack_records
from gaudi_bert.training.batches import Batch, TrainingOrder, read_training_batches
from gaudi_bert.training.objective import PretrainingObjective, TrainingStep
from gaudi_bert.training.sources import RecordSource, open_local_records

MINUTES = 8.0
SIZES = {
    "bert-base": BertConfig(vocab_size=VOCABULARY),
    "bert-large": BertConfig(
        vocab_size=VOCABULARY, hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096
    ),
}
TINY = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 128}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
LENGTHS = (128, 512)
IMPLEMENTATIONS = {"sdpa": "torch", "flash_attention_2": "flash_attn"}


class Rehearsal(NamedTuple):
    """The sizes of the measurements."""

    tokens_an_update: int
    updates: int
    rounds: int
    sequences: int
    matrix: int
    updates_of_losses: int
    vocabulary: int


SMALL, FULL = Rehearsal(512, 1, 1, 100, 256, 3, 1500), Rehearsal(32_768, 8, 3, 6000, 8192, 50, VOCABULARY)


class Records(NamedTuple):
    """The same sequences packed and padded, with the lengths of Wikipedia."""

    packed: RecordSource
    padded: RecordSource
    factor: float
    mean_tokens: float


def make_records(folder: Path, length: int, size: Rehearsal) -> Records:
    """Write records with the given maximum length, and pack them."""
    histogram = HISTOGRAM.with_name(f"wikipedia-{length}.json")
    counts = np.array(json.loads(histogram.read_text(encoding="utf-8"))["counts"], float)
    lengths = np.random.default_rng(3).choice(np.arange(1, len(counts) + 1), size.sequences, p=counts / counts.sum())
    rng, records = np.random.default_rng(4), folder / f"records-{length}"
    records.mkdir()
    with (records / "part-0").open("wb") as handle:
        for each in lengths:
            handle.write(frame(make_example(int(max(each, 8)), length, rng, size.vocabulary)))
    packed = folder / f"packed-{length}"
    pack_records(records, packed, PackingSettings(depth=DEPTH), StageRun(QUIET))
    metadata = RecordMetadata.read(packed)
    return Records(
        open_local_records(packed),
        open_local_records(records),
        metadata.packing_factor,
        metadata.tokens / metadata.sequences,
    )


class Card:
    """A device, and how its time and memory are measured."""

    def __init__(self, kind: str, rounds: int) -> None:
        self.kind, self.rounds = kind, rounds
        engine = load_engine("pytorch")
        self.settings = TrainingSettings(device=kind, seed=1)
        self.communicator: Communicator = engine.connect_processes(self.settings, {})
        self.device = engine.open_device(self.settings)
        self.engine = engine

    @property
    def module(self) -> Any:
        """The module of torch for the device, or None for a CPU."""
        return getattr(torch, self.kind) if self.kind != "cpu" else None

    def seconds(self, function: Callable[[], Any], rounds: int | None = None) -> float:
        """Return the shortest time of several rounds. Each round includes waiting until the device is done."""
        function()
        times = []
        for _ in range(rounds or self.rounds):
            self.wait()
            started = time.perf_counter()
            function()
            self.wait()
            times.append(time.perf_counter() - started)
        return min(times)

    def wait(self) -> None:
        """Wait until the device is done."""
        if self.module is not None:
            self.module.synchronize()

    def forget(self) -> None:
        """Free unused memory, and reset the peak memory."""
        gc.collect()
        if self.module is not None:
            self.module.empty_cache() if self.kind == "cuda" else None
            self.module.reset_peak_memory_stats()

    def memory_bytes(self) -> int:
        """Return the peak memory since the last call of `forget`. For a CPU, return the peak memory of the process."""
        if self.module is not None:
            return int(self.module.max_memory_allocated())
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    def peak_flops(self, size: int) -> float:
        """Return the operations per second of a product of two bfloat16 matrices, the best of ten runs."""
        left, right = (torch.randn(size, size, device=self.device.name, dtype=torch.bfloat16) for _ in range(2))
        return 2 * size**3 / self.seconds(lambda: torch.mm(left, right), rounds=10)


class Ours:
    """Runs gaudi-bert's training step with its input."""

    def __init__(
        self,
        card: Card,
        config: BertConfig,
        source: RecordSource,
        rows: int,
        precision: str,
        *,
        compiled: bool | None = None,
    ) -> None:
        spec = ModelSpec(config, PretrainingHead())
        compiled = card.device.compiles if compiled is None else compiled
        model = card.engine.build_model(spec, card.device, seed=1, compute_dtype=precision, compiled=compiled)
        updates = card.engine.create_updates(model, card.settings, card.communicator, 1)
        self._step = TrainingStep(updates, card.communicator, card.settings, PretrainingObjective())
        order = TrainingOrder(seed=1, shuffle_packs=4096, rank=card.communicator.rank, size=card.communicator.size)
        self._batches = read_training_batches(source, config, rows, order)
        self._update = 0

    def run(self, updates: int) -> list[Any]:
        """Run a number of updates, and return their sums, which the device may not have computed yet."""
        sums = []
        for _ in range(updates):
            self._update += 1
            sums.append(self._step.run_update([next(self._batches)], self._update, learning_rate=1e-4))
        sums[-1]()
        return sums


class Theirs:
    """Trains with `transformers` on padded rows: autocast, AdamW, and the head at every position."""

    def __init__(self, card: Card, config: BertConfig, batches: list[Batch], implementation: str) -> None:
        import transformers
        from training_peers import convert_unpacked_batch

        own = transformers.BertConfig(**config.to_json(), attn_implementation=implementation)
        dtype = torch.bfloat16 if implementation == "flash_attention_2" else torch.float32
        self._model = transformers.BertForPreTraining(own).to(card.device.name, dtype).train()
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-4, weight_decay=0.01)
        names = ("input_ids", "attention_mask", "token_type_ids", "labels", "next_sentence_label")
        self._batches = [
            {name: tensor.to(card.device.name) for name, tensor in convert_unpacked_batch(batch).items() if name in names}
            for batch in batches
        ]
        self._kind, self._update = card.kind, 0

    def run(self, updates: int) -> None:
        """Run a number of updates."""
        for _ in range(updates):
            batch = self._batches[self._update % len(self._batches)]
            self._update += 1
            self._optimizer.zero_grad()
            with torch.autocast(self._kind, torch.bfloat16):
                loss = self._model(**batch).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
            self._optimizer.step()


def compute_losses(card: Card, records: Records, config: BertConfig, updates: int) -> list[float]:
    """Return the loss after each update of eight packs, in float32."""
    sums = [each() for each in Ours(card, config, records.packed, 8, "float32").run(updates)]
    return [float(each[0] / each[1] + each[2] / each[3]) for each in sums]


def measure_model(card: Card, config: BertConfig, records: Records, size: Rehearsal, peak: float) -> dict[str, Any]:
    """Measure one model at one length."""
    length = records.packed.schema.max_sequence_length
    rows, updates = max(size.tokens_an_update // length, 1), size.updates
    seconds: dict[str, float] = {}
    memory: dict[str, int] = {}
    card.forget()
    for name, source in (("packed", records.packed), ("padded", records.padded)):
        ours = Ours(card, config, source, rows, "bfloat16")
        seconds[name] = card.seconds(lambda ours=ours: ours.run(updates))
        memory[name] = card.memory_bytes()
        del ours
        card.forget()
    sequences = {"packed": rows * updates * records.factor, "padded": rows * updates}
    rates = {name: sequences[name] / seconds[name] for name in seconds}
    work = rows * updates * count_training_flops_per_row(config, records.packed)
    batches = read_training_batches(records.padded, config, rows, TrainingOrder(seed=1, shuffle_packs=4096))
    some = [{name: np.copy(value) for name, value in next(batches).items()} for _ in range(2)]
    theirs: dict[str, Any] = {}
    for implementation, package in IMPLEMENTATIONS.items():
        theirs[implementation] = None
        if find_spec(package) is not None and (implementation == "sdpa" or card.kind == "cuda"):
            model = Theirs(card, config, some, implementation)
            done = card.seconds(lambda model=model: model.run(updates))
            theirs[implementation] = rows * updates * records.mean_tokens / done
            del model
            card.forget()
    tokens = rates["packed"] * records.mean_tokens
    return {
        "rows_an_update": rows,
        "tokens_per_second": tokens,
        "share_of_matrix_peak": work / seconds["packed"] / peak,
        "sequences_per_second": rates,
        "packing_factor": records.factor,
        "realized": rates["packed"] / rates["padded"],
        "realized_over_factor": rates["packed"] / rates["padded"] / records.factor,
        "transformers_tokens_per_second": theirs,
        "over_transformers_sdpa": tokens / theirs["sdpa"],
        "memory_bytes": memory["packed"],
    }


def measure_variants(card: Card, config: BertConfig, records: Records, size: Rehearsal) -> dict[str, float]:
    """Return the packed sequences per second on a GPU with deterministic kernels, with any kernels, and with compilation."""
    rows, rates = max(size.tokens_an_update // records.packed.schema.max_sequence_length, 1), {}
    for name, deterministic, compiled in (("default", True, False), ("any_kernels", False, False), ("compiled", True, True)):
        torch.use_deterministic_algorithms(deterministic)
        ours = Ours(card, config, records.packed, rows, "bfloat16", compiled=compiled)
        rates[name] = rows * size.updates * records.factor / card.seconds(lambda ours=ours: ours.run(size.updates))
        del ours
        card.forget()
    torch.use_deterministic_algorithms(True)
    return rates


def measure_two_processes(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the sequences per second of one process, and of two processes that train together, each on its own device."""
    rates = {}
    for size in (1, 2):
        port = find_free_port()
        command = [sys.executable, __file__, "--process", *sys.argv[1:]]
        shared = [
            torch_environment(rank, size, processes_per_host=size, address="127.0.0.1", port=port) for rank in range(size)
        ]
        running = [subprocess.Popen(command, env={**os.environ, **own}, stdout=subprocess.PIPE, text=True) for own in shared]
        printed = [process.communicate()[0] for process in running]
        if any(process.returncode for process in running):
            sys.exit(f"card.py: one of {size} processes failed; see its error above")
        rates[f"{size}"] = json.loads(printed[0])
    return {"sequences_per_second": rates, "two_over_one": rates["2"] / rates["1"]}


def measure_one_process(card: Card, size: Rehearsal, config: BertConfig) -> float:
    """Return the sequences per second of all processes together."""
    with tempfile.TemporaryDirectory() as folder:
        records = make_records(Path(folder), 128, size)
        rows = max(size.tokens_an_update // 128, 1)
        ours = Ours(card, config, records.packed, rows, "bfloat16")
        seconds = card.seconds(lambda: ours.run(size.updates))
    return rows * size.updates * records.factor * card.communicator.size / seconds


def main() -> None:
    """Parse the command line, and print the results as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("auto", "cpu", "cuda", "hpu"), default="auto")
    parser.add_argument("--small", action="store_true", help="use tiny models, to check that everything runs")
    parser.add_argument("--process", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    began, size = time.monotonic(), SMALL if arguments.small else FULL
    sizes = {"bert-base": BertConfig(vocab_size=size.vocabulary, **TINY)} if arguments.small else SIZES
    card = Card(_device(arguments.device), size.rounds)
    if arguments.process:
        rate = measure_one_process(card, size, sizes["bert-base"])
        if card.communicator.is_first:
            print(json.dumps(rate))
        return

    def in_time(function: Callable[[], Any], share: float) -> Any:
        """Call `function` if less than this fraction of the time has passed. A rehearsal has no time limit."""
        return function() if arguments.small or time.monotonic() - began < 60 * MINUTES * share else None

    peak = card.peak_flops(size.matrix)
    plain = BertConfig(vocab_size=size.vocabulary, **{**TINY, **NO_DROPOUT})
    with tempfile.TemporaryDirectory() as folder:
        records = {length: make_records(Path(folder), length, size) for length in LENGTHS}
        devices = {"card": card, "cpu": Card("cpu", size.rounds)}
        curves = {name: compute_losses(each, records[128], plain, size.updates_of_losses) for name, each in devices.items()}
        found = {
            name: {
                str(length): in_time(lambda c=config, r=records[length]: measure_model(card, c, r, size, peak), 0.75)
                for length in LENGTHS
            }
            for name, config in sizes.items()
        }
        several = card.module is None or card.module.device_count() > 1
        compared = None
        if card.kind == "cuda":
            compared = in_time(lambda: measure_variants(card, sizes["bert-base"], records[512], size), 0.75)
    result = {
        "card": card.device.description,
        "versions": {"gaudi-bert": __version__, "torch": torch.__version__},
        "matrix_peak_flops": peak,
        "losses": {**curves, "largest_difference": float(np.max(np.abs(np.subtract(*curves.values()))))},
        "models": found,
        "bert_base_512_sequences_per_second": compared,
        "two_processes": in_time(lambda: measure_two_processes(arguments), 0.85) if several else None,
        "seconds": round(time.monotonic() - began, 1),
    }
    print(json.dumps(result, indent=2))


def _device(asked: str) -> str:
    """Return the kind of the device, or end the benchmark if there is none."""
    if asked != "auto":
        return asked
    if find_spec("habana_frameworks") is not None:
        return "hpu"
    if torch.cuda.is_available():
        return "cuda"
    return sys.exit("card.py: no GPU and no Gaudi card is seen here; --device cpu --small rehearses on a CPU")


if __name__ == "__main__":
    main()
