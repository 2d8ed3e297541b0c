"""Measure how fast `tokenize` makes tables from texts, compared with batch encoding by the tokenizer on the same texts in
memory.

    python benchmarks/tokenising.py [--megabytes 200] [--rounds 3]

The text is JSON lines. If the folder of `GAUDI_BERT_SHARED` contains the wiki-sample, its documents are used, and otherwise
Python's documentation. The documents are repeated with different words. The tokenizer is a byte-level BPE with 16,000 tokens
that is trained on these documents. Each measurement is a process of its own, and the measurements run in turn. `tokenize` is
measured completely, from the file to finished tables, including its start-up. `encode_batch_fast` and `encode_batch` process
1,000 texts at a time, without reading or writing files. All programs use all cores. The memory is the peak of `tokenize`.
"""

from __future__ import annotations

import argparse
import json
import resource
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from measuring import measure_seconds, print_figure, print_processor
from prepare import load_documents
from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers

from gaudi_bert.artefacts.results import StageRun
from gaudi_bert.common.progress import Reporter

LENGTH, VOCABULARY, BATCH = 512, 16_000, 1000


def train_byte_level_bpe(texts: list[str], size: int) -> Tokenizer:
    """Train a byte-level BPE tokenizer with RoBERTa's special tokens on texts."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<s>", "<pad>", "</s>"]
    trainer = trainers.BpeTrainer(vocab_size=size, special_tokens=special, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0))
    return tokenizer


def write_texts(folder: Path, megabytes: float) -> None:
    """Write texts.jsonl and tokenizer.json."""
    documents = ["\n".join(document) for document in load_documents()]
    tokenizer = train_byte_level_bpe(documents, VOCABULARY)
    tokenizer.save(str(folder / "tokenizer.json"))
    written, copy = 0, 0
    with open(folder / "texts.jsonl", "w", encoding="utf-8") as file:
        while written < megabytes * 1e6:
            for document in documents:
                text = document if not copy else document.replace("e", f"e{copy}", len(document) // 400)
                written += file.write(json.dumps({"text": text}) + "\n")
                if written >= megabytes * 1e6:
                    break
            copy += 1


def measure_tokenize(folder: Path) -> tuple[float, float]:
    """Return the CPU and elapsed seconds of `tokenize`, without the start of its process."""
    from gaudi_bert.config.sections import TokenizeSettings
    from gaudi_bert.tables.tokenize import tokenize_texts

    shutil.rmtree(folder / "tokens", ignore_errors=True)
    settings = TokenizeSettings(max_sequence_length=LENGTH)
    arguments = [str(folder / "texts.jsonl")], folder / "tokenizer.json", folder / "tokens", settings
    return measure_seconds(lambda: tokenize_texts(*arguments, StageRun(Reporter(quiet=True), overwrite=True)))


def measure_library(folder: Path, method: str) -> tuple[float, float]:
    """Return the CPU and elapsed seconds of batch encoding with a method of the library `tokenizers`."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    encode = getattr(tokenizer, method)
    cpu = wall = 0.0
    with open(folder / "texts.jsonl", encoding="utf-8") as file:
        while batch := [json.loads(line)["text"] for _, line in zip(range(BATCH), file, strict=False)]:
            taken = measure_seconds(lambda batch=batch: encode(batch))
            cpu, wall = cpu + taken[0], wall + taken[1]
    return cpu, wall


def measure(folder: Path, what: str) -> tuple[float, float, float]:
    """Run a measurement in a process of its own, and return its CPU seconds, elapsed seconds and peak memory in MiB."""
    command = [sys.executable, __file__, "--measure", what, "--folder", str(folder)]
    return tuple(json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout))


def main() -> None:
    """Parse the command line, measure all programs in turn, and print the figures."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--megabytes", type=float, default=200)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--measure")
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()
    if options.measure:
        cpu, wall = (
            measure_tokenize(options.folder)
            if options.measure == "ours"
            else measure_library(options.folder, options.measure)
        )
        usage = resource.getrusage(resource.RUSAGE_SELF)
        if options.measure == "ours":
            cpu = usage.ru_utime + usage.ru_stime
        print(json.dumps([cpu, wall, usage.ru_maxrss / 1024]))
        return
    print_processor()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_texts(folder, options.megabytes)
        names = ("ours", "encode_batch_fast", "encode_batch")
        rounds = [{what: measure(folder, what) for what in names} for _ in range(options.rounds)]
    print(f"{options.megabytes:.0f} MB of JSON lines, rows of at most {LENGTH} tokens:")
    for what in names:
        print_figure(f"{what}, CPU time", [options.megabytes / each[what][0] for each in rounds], "MB/s")
        print_figure(f"{what}, elapsed", [options.megabytes / each[what][1] for each in rounds], "MB/s")
    for what in names[1:]:
        print_figure(
            f"rate compared with {what}, CPU time", [each[what][0] / each["ours"][0] for each in rounds], "times", "0.9"
        )
        print_figure(
            f"rate compared with {what}, elapsed", [each[what][1] / each["ours"][1] for each in rounds], "times", "0.9"
        )
    print_figure("peak memory of tokenize", [each["ours"][2] for each in rounds], "MiB", "500")


if __name__ == "__main__":
    main()
