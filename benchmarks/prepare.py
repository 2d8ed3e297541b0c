"""How fast text becomes pretraining examples, and in how much memory.

    python benchmarks/prepare.py [MEGABYTES] [WORKERS]

The text is Python's own documentation, repeated (with other random numbers each time, since a document's number seeds them).
"""

from __future__ import annotations

import resource
import sys
import tempfile
import time
from pathlib import Path

from gaudi_bert.common.progress import Reporter
from gaudi_bert.config import PrepareSettings
from gaudi_bert.corpus.documentation import documentation_documents
from gaudi_bert.corpus.python_texts import python_texts
from gaudi_bert.stages.prepare import prepare


def write_text(path: Path, megabytes: float) -> int:
    """Write about `megabytes` of text, one sentence a line; the bytes written."""
    documents = (
        "\n\n".join("\n".join(sentences) for sentences in documentation_documents(python_texts("python-docs"))) + "\n\n"
    )
    copies = max(1, round(megabytes * 1e6 / len(documents.encode("utf-8"))))
    path.write_text(documents * copies, encoding="utf-8")
    return path.stat().st_size


def processor_seconds() -> float:
    """What this process and its ended workers have used."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def main() -> None:
    """Prepare at duplicates 1 and 5, and print what it took."""
    megabytes = float(sys.argv[1]) if len(sys.argv) > 1 else 20.0
    workers = int(sys.argv[2]) if len(sys.argv) > 2 else 1
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        size = write_text(folder / "text.txt", megabytes)
        prepare(PrepareSettings(), folder / "warm-up", pipeline_folder=folder, reporter=Reporter(quiet=True), workers=1)
        vocabulary = str(folder / "warm-up" / "vocab.txt")
        for duplicates in (1, 5):
            settings = PrepareSettings(text="text.txt", vocab=vocabulary, duplicates=duplicates)
            started, used = time.perf_counter(), processor_seconds()
            out = folder / f"duplicates-{duplicates}"
            made = prepare(settings, out, pipeline_folder=folder, reporter=Reporter(quiet=True), workers=workers)
            seconds, used = time.perf_counter() - started, processor_seconds() - used
            sequences = sum(split["sequences"] for split in made["splits"].values())
            print(
                f"duplicates {duplicates}, {workers} workers: {size / 1e6:.1f} MB of text in {seconds:.1f} s: "
                f"{size / 1e6 / seconds:.2f} MB/s, {sequences / seconds:,.0f} examples/s; "
                f"a second of one processor: {size / 1e6 / used:.2f} MB, {sequences / used:,.0f} examples"
            )
    print(f"largest memory of this process: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MB")


if __name__ == "__main__":
    main()
