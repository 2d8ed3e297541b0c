"""What is loaded when a module is imported and a command is run: what a command does not need is not waited for."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from tests.builders.command_line import run_python

DATA = {"numba", "scipy", "highspy", "tensorflow", "matplotlib", "pyarrow", "tokenizers"}
# numba loads the bare package `scipy`, to see its version.
SOLVERS = {"scipy.optimize", "scipy.sparse", "highspy"}
OPTIONAL = {"tensorflow", "torch", "transformers", "horovod", "pyarrow", "docker", "kubernetes", "fsspec", "datasets", "trl"}
PAGES = {"matplotlib", "jinja2"}
# In one interpreter, one after the other: what each may not have loaded.
STEPS: list[tuple[str, set[str]]] = [
    ("import gaudi_bert", {"numpy", "typing_extensions", "importlib.metadata", *DATA, *OPTIONAL}),
    ("import gaudi_bert.cli", {"numpy", "pydantic", *DATA, *OPTIONAL}),
    ("--help", {"numpy", "pydantic", *DATA, *OPTIONAL}),
    ("settings", {"numpy", *DATA, *OPTIONAL}),
    ("run missing.yaml", {"numpy", *DATA, *OPTIONAL}),
    ("import gaudi_bert.runners.kubernetes.run", {"kubernetes", "numpy", "tensorflow", "docker"}),
    ("import gaudi_bert.runners.local", DATA),
    ("import gaudi_bert.runs.records", {"tensorflow", "torch", "docker", "kubernetes", *SOLVERS}),
    ("histogram missing/ --out x.json", {*OPTIONAL, *SOLVERS, *PAGES, "tokenizers"}),
    ("plan histogram.json --out plan.json", {*OPTIONAL, *PAGES, "tokenizers"}),
    ("estimate histogram.json --algorithms ffd", {*OPTIONAL, *PAGES, "tokenizers"}),
    ("import gaudi_bert.tfrecords.write", {"tensorflow", "matplotlib", "tokenizers"}),
    ("import gaudi_bert.corpus.prepare", {"tensorflow", "matplotlib"}),
]
if not find_spec("safetensors"):  # which comes with an engine: `make test-fast` has none
    STEPS = [step for step in STEPS if "gaudi_bert.training" not in step[0]]
# Commands, each of which ends this interpreter's `main` and not the interpreter.
RUN = """
import sys
def run(words):
    from gaudi_bert.cli import main
    sys.argv = ["gaudi-bert", *words]
    try:
        main(words)
    except SystemExit as end:
        return end.code or 0
"""
EXTRAS = [
    "jinja2",
    "matplotlib",
    "markupsafe",
    "pyarrow",
    "safetensors",
    "tensorflow",
    "tokenizers",
    "torch",
    "transformers",
]


def test_nothing_is_loaded_that_is_not_needed(tmp_path: Path) -> None:
    (tmp_path / "histogram.json").write_text('{"max_sequence_length": 4, "counts": [3, 2, 1, 5]}')
    program = f"""{RUN}
import os
os.chdir({str(tmp_path)!r})
for step, absent in {STEPS!r}:
    if step.startswith("import "):
        exec(step)
    else:
        assert run(step.split()) in (0, 2), step
    print("LOADED", step, sorted(name for name in absent if name in sys.modules))
"""
    done = run_python(program)
    lines = [line for line in done.stdout.splitlines() if line.startswith("LOADED ")]
    assert lines == [f"LOADED {step} []" for step, _ in STEPS], done.stderr


def test_the_core_packs_lengths_without_any_extra_and_names_the_one_that_a_command_needs(tmp_path: Path) -> None:
    """With the packages of extras hidden, as after `pip install gaudi-bert`."""
    (tmp_path / "histogram.json").write_text('{"max_sequence_length": 4, "counts": [3, 2, 1, 5]}')
    (tmp_path / "text.txt").write_text("one two three\n")
    (tmp_path / "demo.yaml").write_text(f"name: demo\nprepare: {{text: {tmp_path}/text.txt, train_vocab: 300}}\n")
    needed = [
        (["estimate", "histogram.json", "--picture", "x.png"], "report"),
        (["run", "demo.yaml", "--work", "."], "text,pytorch,report"),
        (["tokenize", "text.txt", "--tokenizer=x", "--out=x", "--max-sequence-length=8"], "parquet,text"),
        (["evaluate", "--data", ".", "--checkpoint", "."], "pytorch"),
    ]
    program = f"""{RUN}
import importlib.util, os
os.chdir({str(tmp_path)!r})
sys.modules.update(dict.fromkeys({EXTRAS}))
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *others: None if name in ("matplotlib", "tokenizers") else find(name, *others)
import gaudi_bert
print(len(gaudi_bert.pack_lengths([128, 17, 300, 64, 212, 500], 512)))
for words, _ in {needed!r}:
    assert run(words) == 2, words
"""
    done = run_python(program)
    assert done.stdout == "3\n", done.stderr
    lines = done.stderr.splitlines()
    assert len(lines) == len(needed), done.stderr
    for line, (_, extra) in zip(lines, needed, strict=True):
        assert f"[{extra}]'" in line
