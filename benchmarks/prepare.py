"""Measure how fast `prepare` turns text into examples, compared with Google's script and with the tokenizer alone.

    pip install --no-deps --target GOOGLE tf-models-official==2.15.0 sentencepiece
    python benchmarks/prepare.py [--google GOOGLE] [--pairs 5] [--megabytes 1] [--duplicates 5]

All three programs process the same sentences with the same vocabulary on one thread. `prepare` is measured completely, from
the text file to the finished files. `create_pretraining_data.py` is measured from `create_training_instances` until its
files are closed. The tokenizer is measured as `encode_batch_fast` on the sentences in memory. Each measurement is a process
of its own, which first processes a few other sentences, so that no loading, compilation or caching is measured. The figures
are CPU times. If the folder of `GAUDI_BERT_SHARED` contains the wiki-sample, the text is the wiki-sample (above 2 MB, it is
repeated with different words). Otherwise, the text is Python's own documentation.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from measuring import print_figure

from gaudi_bert.artefacts.results import StageRun, to_json
from gaudi_bert.common.progress import Reporter
from gaudi_bert.config.sections import PrepareSettings
from gaudi_bert.corpus.prepare import prepare_examples

ROOT = Path(__file__).resolve().parent.parent
SEQUENCE_LENGTH, PREDICTIONS, VOCABULARY = 128, 20, 8192
QUIET = Reporter(quiet=True)


def load_documents() -> list[list[str]]:
    """Return documents as lists of sentences."""
    from gaudi_bert.corpus.documents import convert_texts_to_documents, detect_text_format, find_sources, read_documents
    from gaudi_bert.corpus.python_texts import load_python_texts

    folder = Path(os.environ.get("GAUDI_BERT_SHARED", ROOT.parent / "shared")) / "data" / "wiki-sample"
    if not folder.is_dir():
        return list(convert_texts_to_documents(load_python_texts("python-docs")).values())
    sources = find_sources([str(folder / "text-*.txt")], folder)
    return [document for source in sources for document in read_documents(source, detect_text_format(source))]


def write_texts(folder: Path, megabytes: float) -> int:
    """Write text.txt of about `megabytes` MB, other.txt with the last documents, and vocab.txt. Return the size of text.txt
    in bytes.
    """
    documents = load_documents()
    kept, size, copy = [], 0, 0
    while size < megabytes * 1e6:
        for document in documents[:-3]:
            # Change the words of each copy, because more text of the same kind would also contain more different words.
            text = "\n".join(document) if not copy else "\n".join(line.replace("e", f"e{copy}", 7) for line in document)
            kept.append(text)
            size += len(text.encode("utf-8")) + 2
            if size >= megabytes * 1e6:
                break
        copy += 1
    (folder / "text.txt").write_text("\n\n".join(kept) + "\n", encoding="utf-8")
    (folder / "other.txt").write_text("\n\n".join("\n".join(each) for each in documents[-3:]) + "\n", encoding="utf-8")
    settings = PrepareSettings(text="text.txt", train_vocab=VOCABULARY, duplicates=1)
    prepare_examples(settings, folder / "vocabulary", StageRun(QUIET, workers=1), pipeline_folder=folder)
    (folder / "vocabulary" / "vocab.txt").rename(folder / "vocab.txt")
    return (folder / "text.txt").stat().st_size


def make_prepare_run(folder: Path, duplicates: int, google: str) -> Callable[[str], int]:
    """Return a function that makes all examples of a text with `prepare`, and returns their number."""

    def run(name: str) -> int:
        settings = PrepareSettings(
            text=f"{name}.txt",
            vocab="vocab.txt",
            max_sequence_length=SEQUENCE_LENGTH,
            max_predictions=PREDICTIONS,
            duplicates=duplicates,
            evaluation_fraction=0,
        )
        out = Path(tempfile.mkdtemp(dir=folder))
        made = prepare_examples(settings, out, StageRun(QUIET, workers=1), pipeline_folder=folder)
        return int(to_json(made)["splits"]["train"]["sequences"])

    return run


def make_google_script_run(folder: Path, duplicates: int, google: str) -> Callable[[str], int]:
    """Return a function that makes all examples of a text with Google's script, and returns their number."""
    import random

    sys.path.append(google)
    from official.nlp.data import create_pretraining_data
    from official.nlp.tools import tokenization

    tokenizer = tokenization.FullTokenizer(vocab_file=str(folder / "vocab.txt"), do_lower_case=True)

    def run(name: str) -> int:
        instances = create_pretraining_data.create_training_instances(
            [str(folder / f"{name}.txt")],
            tokenizer,
            SEQUENCE_LENGTH,
            duplicates,
            0.1,
            0.15,
            PREDICTIONS,
            random.Random(1),
        )
        files = [str(folder / f"{name}-{number}.tfrecord") for number in range(8)]
        create_pretraining_data.write_instance_to_example_files(
            instances, tokenizer, SEQUENCE_LENGTH, PREDICTIONS, files, False, False
        )
        return len(instances)

    return run


def make_tokenizer_run(folder: Path, duplicates: int, google: str) -> Callable[[str], int]:
    """Return a function that tokenizes all sentences of a text once, and returns the number of tokens."""
    from gaudi_bert.corpus.vocabulary import _make_wordpiece_tokenizer, read_vocabulary

    tokenizer = _make_wordpiece_tokenizer(read_vocabulary(folder / "vocab.txt").tokens, lower_case=True)
    sentences = {
        name: [line for line in (folder / f"{name}.txt").read_text(encoding="utf-8").split("\n") if line]
        for name in ("text", "other")
    }

    def run(name: str) -> int:
        return sum(len(encoding.ids) for encoding in tokenizer.encode_batch_fast(sentences[name], add_special_tokens=False))

    return run


KINDS = {"ours": make_prepare_run, "script": make_google_script_run, "tokenizer": make_tokenizer_run}


def measure_here(kind: str, folder: Path, duplicates: int, google: str) -> None:
    """Measure one run in this process, and print its CPU seconds and its count as JSON."""
    run = KINDS[kind](folder, duplicates, google)
    run("other")
    started = time.process_time()
    count = run("text")
    print(json.dumps({"seconds": time.process_time() - started, "count": count}))


def measure(kind: str, folder: Path, duplicates: int, google: str) -> dict[str, float]:
    """Measure one run in a process of its own, on one thread."""
    command = [sys.executable, __file__, "--kind", kind, "--folder", str(folder), "--google", google]
    one_thread = {"RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "TF_CPP_MIN_LOG_LEVEL": "3"}
    environment = {**os.environ, **one_thread, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path[1:]])}
    done = subprocess.run(
        [*command, "--duplicates", str(duplicates)], env=environment, capture_output=True, text=True, check=True
    )
    measured: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return measured


def compare(folder: Path, size: int, pairs: int, duplicates: int, google: str) -> None:
    """Print the speed of each program and the ratios of the times in each round."""
    kinds = [kind for kind in KINDS if kind != "script" or google]
    seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
    for _ in range(pairs):
        for kind in kinds:
            seconds[kind].append(measure(kind, folder, duplicates, google)["seconds"])
    for kind in kinds:
        print_figure(f"{kind}, {size / 1e6:.1f} MB of text", [size / 1e6 / each for each in seconds[kind]], "MB/s")
    if google:
        ratios = [theirs / own for theirs, own in zip(seconds["script"], seconds["ours"], strict=True)]
        print_figure(f"prepare beside Google's script, {duplicates} duplicates", ratios, "times", "15")
        ratios = [theirs / own for theirs, own in zip(seconds["script"], seconds["tokenizer"], strict=True)]
        print_figure("the tokenizer alone beside Google's script", ratios, "times")
    ratios = [alone / own for alone, own in zip(seconds["tokenizer"], seconds["ours"], strict=True)]
    print_figure(f"prepare beside the tokenizer alone, {duplicates} duplicates", ratios, "times", "0.5")


def main() -> None:
    """Parse the command line, and measure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--google", default="", help="folder that contains tf-models-official and sentencepiece")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--megabytes", type=float, default=1.0)
    parser.add_argument("--duplicates", type=int, default=5)
    parser.add_argument("--kind", choices=KINDS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.kind:
        measure_here(chosen.kind, chosen.folder, chosen.duplicates, chosen.google)
        return
    with tempfile.TemporaryDirectory() as name:
        size = write_texts(Path(name), chosen.megabytes)
        compare(Path(name), size, chosen.pairs, chosen.duplicates, chosen.google)


if __name__ == "__main__":
    main()
