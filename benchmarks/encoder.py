"""Compare `PackedEncoder` with `SentenceTransformer.encode` on short texts, by CPU time without start-up.

    pip install --no-deps --target PEER sentence-transformers
    PYTHONPATH=PEER python benchmarks/encoder.py [--rows 2000] [--rounds 3] [--models MiniLM RoBERTa ModernBERT] [--process]

The models are random models of the sizes of MiniLM, RoBERTa-base and ModernBERT-base with six layers, in float32 (the values
of the weights do not affect the speed). Their byte-level tokenizer is trained on the texts, which are comments of
GoEmotions. Both programs run in the same process on all its cores, in turn, after one small call each. With `--process`,
`gaudi-bert embed` with MiniLM's real weights is compared with sentence-transformers, each in a process of its own, including
its start-up. With `--files`, `embed` of a file of texts, including opening the model, is compared with `encode` alone, which
sorts texts by length and computes batches of 32. The texts are those of `serving.py`, and the figures are CPU times per
text, in float32 and, if the processor multiplies in bfloat16, also in bfloat16.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import numpy as np
from finetuning_data import SHARED, find_minilm_folder, read_emotions
from measuring import BenchmarkProcess, measure_seconds, print_figure, print_processor
from serving import draw_texts
from tokenising import train_byte_level_bpe

from gaudi_bert.common.processor import read_processor

PEER = """
import sys, json, numpy
from sentence_transformers import SentenceTransformer
model = SentenceTransformer(sys.argv[1], device="cpu")
numpy.save(sys.argv[3], model.encode([json.loads(line)["text"] for line in open(sys.argv[2])]))
"""


def make_model_configs() -> dict[str, Any]:
    """Return the configs of random models by name."""
    import transformers

    special = {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "cls_token_id": 0, "sep_token_id": 2}
    sizes = {"vocab_size": 8000, **special}
    small = {"hidden_size": 384, "num_attention_heads": 12, "intermediate_size": 1536, "num_hidden_layers": 6}
    base = {"num_hidden_layers": 6, "max_position_embeddings": 514}
    return {
        "MiniLM": transformers.BertConfig(**sizes, **small),
        "RoBERTa": transformers.RobertaConfig(**sizes, **base),
        "ModernBERT": transformers.ModernBertConfig(**sizes, num_hidden_layers=6),
    }


def compare(name: str, config: Any, texts: list[str], rounds: int) -> None:
    """Compare both programs in turn, in the same process."""
    import torch
    import transformers
    from sentence_transformers import SentenceTransformer

    from gaudi_bert.pytorch import PackedEncoder

    torch.manual_seed(1)
    with tempfile.TemporaryDirectory() as folder:
        transformers.AutoModel.from_config(config).save_pretrained(folder)
        tokenizer = transformers.PreTrainedTokenizerFast(
            tokenizer_object=train_byte_level_bpe(texts, 8000), pad_token="<pad>", cls_token="<s>", model_max_length=512
        )
        tokenizer.save_pretrained(folder)
        peer = SentenceTransformer(folder, device="cpu")
        ours = PackedEncoder(transformers.AutoModel.from_pretrained(folder), tokenizer)
    difference = np.abs(ours.embed(texts[:64]) - peer.encode(texts[:64])).max()
    taken = [
        (measure_seconds(lambda: ours.embed(texts)), measure_seconds(lambda: peer.encode(texts))) for _ in range(rounds)
    ]
    print(f"{name}: vectors differ by at most {difference:.1e}")
    print_figure(f"{name}, {len(texts)} texts, ours, CPU time", [mine[0] for mine, _ in taken], "s")
    print_figure("sentence-transformers, CPU time", [other[0] for _, other in taken], "s")
    print_figure(
        "compared with sentence-transformers, CPU time", [other[0] / mine[0] for mine, other in taken], "times", ">= 1.3"
    )
    print_figure("the same, elapsed", [other[1] / mine[1] for mine, other in taken], "times")


def compare_processes(texts: list[str], rounds: int) -> None:
    """Compare complete processes with MiniLM's weights, including their start-up."""

    def cpu(command: list[str]) -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(command, check=True, capture_output=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    with tempfile.TemporaryDirectory() as name:
        data = Path(name) / "texts.jsonl"
        data.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
        embed = [
            sys.executable,
            "-m",
            "gaudi_bert",
            "embed",
            "--model",
            str(find_minilm_folder()),
            "--data",
            str(data),
            "--overwrite",
        ]
        peer = [sys.executable, "-c", PEER, str(find_minilm_folder()), str(data), f"{name}/peer.npy"]
        taken = [(cpu([*embed, "--out", f"{name}/{number}.npy"]), cpu(peer)) for number in range(rounds)]
        difference = np.abs(np.load(f"{name}/0.npy") - np.load(f"{name}/peer.npy")).max()
    print(f"processes: vectors differ by at most {difference:.1e}")
    print_figure(f"`embed` of {len(texts)} texts, whole process, CPU time", [mine for mine, _ in taken], "s")
    print_figure("sentence-transformers, whole process, CPU time", [other for _, other in taken], "s")
    print_figure("compared with sentence-transformers, CPU time", [other / mine for mine, other in taken], "times", ">= 1.2")


class EmbedFile:
    """Embeds a file of texts with `gaudi-bert embed`, in one process."""

    def __init__(self, folder: str, texts: list[str], precision: str) -> None:
        self.data, self.out, self.precision = f"{folder}/texts.jsonl", f"{folder}/ours-{precision}.npy", precision
        Path(self.data).write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")

    def run(self, _: int) -> None:
        """Open the model, and embed all texts."""
        from gaudi_bert.common.progress import Reporter
        from gaudi_bert.config.sections import TaskSettings
        from gaudi_bert.tasks.predict import EmbedOptions, embed

        options, settings = EmbedOptions(precision=self.precision), TaskSettings(too_long="truncate")
        Path(self.out).unlink(missing_ok=True)
        embed(find_minilm_folder(), self.data, self.out, options, settings, reporter=Reporter(quiet=True))


class Encode:
    """Embeds texts with sentence-transformers, in one process."""

    def __init__(self, folder: str, texts: list[str], precision: str) -> None:
        import torch
        from sentence_transformers import SentenceTransformer

        self.model, self.texts, self.out = (
            SentenceTransformer(str(find_minilm_folder()), device="cpu"),
            texts,
            f"{folder}/{precision}.npy",
        )
        self.model.to(getattr(torch, precision))

    def run(self, _: int) -> None:
        """Embed all texts."""
        np.save(self.out, self.model.encode(self.texts, batch_size=32, convert_to_numpy=True))


def compare_files(count: int, rounds: int) -> None:
    """Print the CPU time per text of both programs, measured in turn."""
    for kind in ("mix", "passages"):
        for precision in ("float32", "bfloat16") if read_processor().multiplies_bfloat16 else ("float32",):
            texts, taken = draw_texts(kind, count, 3), []
            with tempfile.TemporaryDirectory() as folder:
                ours, peer = (BenchmarkProcess(each, folder, texts, precision) for each in (EmbedFile, Encode))
                for number in range(-1, rounds):
                    pair = (ours.measure_run(1), peer.measure_run(1))
                    taken += [(pair[0][0], pair[1][0])] if number >= 0 else []
                found = [np.load(f"{folder}/{name}.npy").astype(np.float32) for name in (f"ours-{precision}", precision)]
            name = f"file of {count} texts, {kind}, {precision}"
            print(f"{name}: vectors differ by at most {np.abs(found[0] - found[1]).max():.1e}", flush=True)
            print_figure(f"{name}: `embed`, CPU time per text", [1000 * mine / count for mine, _ in taken], "ms")
            print_figure(f"{name}: `encode`, CPU time per text", [1000 * other / count for _, other in taken], "ms")
            print_figure(
                f"{name}: `embed` compared with `encode`", [other / mine for mine, other in taken], "times", ">= 1.7"
            )


def main() -> None:
    """Parse the command line, and print the selected comparison."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--models", nargs="+", default=["MiniLM", "RoBERTa", "ModernBERT"])
    parser.add_argument("--process", action="store_true")
    parser.add_argument("--files", action="store_true")
    options = parser.parse_args()
    print_processor()
    if options.files:
        compare_files(options.rows, options.rounds)
        return
    texts = [text for text, _ in read_emotions(SHARED, "dev", options.rows)]
    if options.process:
        compare_processes(texts, options.rounds)
        return
    for name in options.models:
        compare(name, make_model_configs()[name], texts, options.rounds)


if __name__ == "__main__":
    main()
