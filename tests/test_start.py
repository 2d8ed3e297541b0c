"""What a module loads when it is imported, in a fresh interpreter: what a command does not need is not waited for."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from tests.builders.command_line import run_python

DATA_MODULES = ["numba", "scipy", "highspy", "tensorflow", "matplotlib", "pyarrow", "tokenizers"]
# numba loads the bare package `scipy`, to see its version.
SOLVERS = ["scipy.optimize", "scipy.sparse", "highspy"]
OPTIONAL = ["tensorflow", "torch", "transformers", "horovod", "pyarrow", "docker", "kubernetes", "fsspec", "datasets", "trl"]


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("gaudi_bert", ["numpy", "typing_extensions", "importlib.metadata", *DATA_MODULES]),
        ("gaudi_bert.cli", ["numpy", *DATA_MODULES]),
        ("gaudi_bert.runners.local", DATA_MODULES),
        ("gaudi_bert.runners.kubernetes.run", ["kubernetes", "numpy", "tensorflow", "docker"]),
        pytest.param(
            "gaudi_bert.training.train",
            ["scipy.optimize", "highspy", "docker", "kubernetes"],
            marks=pytest.mark.skipif(find_spec("tensorflow") is None, reason="TENSORFLOW IS NOT INSTALLED"),
        ),
        ("gaudi_bert.tfrecords.write", ["tensorflow", "matplotlib", "tokenizers"]),
        ("gaudi_bert.corpus.prepare", ["tensorflow", "matplotlib"]),
    ],
)
def test_importing_does_not_load(module: str, absent: list[str]) -> None:
    done = run_python(f"import sys, {module}; print('LOADED', *[name for name in {absent!r} if name in sys.modules])")
    assert done.stdout.split() == ["LOADED"], done.stderr


@pytest.mark.parametrize(
    ("arguments", "absent"),
    [
        (["--help"], ["numpy", *OPTIONAL, *DATA_MODULES]),
        (["settings"], ["numpy", *OPTIONAL, *DATA_MODULES]),
        (["histogram", "missing/", "--out", "x.json"], [*OPTIONAL, *SOLVERS, "matplotlib", "tokenizers", "jinja2"]),
        (["plan", "{histogram}", "--out", "{out}"], [*OPTIONAL, "matplotlib", "tokenizers", "jinja2"]),
        (["estimate", "{histogram}", "--algorithms", "ffd"], [*OPTIONAL, "matplotlib", "tokenizers", "jinja2"]),
        (["run", "{missing}"], ["numpy", *OPTIONAL, *DATA_MODULES]),
    ],
    ids=lambda value: value[0],
)
def test_a_command_loads_nothing_that_it_does_not_need(tmp_path, arguments: list[str], absent: list[str]) -> None:
    (tmp_path / "histogram.json").write_text('{"max_sequence_length": 4, "counts": [3, 2, 1, 5]}')
    paths = {"histogram": tmp_path / "histogram.json", "out": tmp_path / "plan.json", "missing": tmp_path / "missing.yaml"}
    code = (
        "import atexit, sys; from gaudi_bert.cli import main; "
        f"atexit.register(lambda: print('LOADED', *[name for name in {absent!r} if name in sys.modules])); "
        "main(sys.argv[1:])"
    )
    done = run_python(code, *(argument.format(**paths) for argument in arguments))
    assert done.returncode in (0, 2), done.stderr
    assert done.stdout.splitlines()[-1] == "LOADED", done.stdout


def test_the_core_packs_lengths_without_any_extra_and_names_the_one_that_a_command_needs(tmp_path) -> None:
    """With the packages of extras hidden, as after `pip install gaudi-bert`."""
    extras = (
        "jinja2",
        "matplotlib",
        "markupsafe",
        "pyarrow",
        "safetensors",
        "tensorflow",
        "tokenizers",
        "torch",
        "transformers",
    )
    hide = f"import sys; sys.modules.update(dict.fromkeys({extras})); "
    done = run_python(hide + "import gaudi_bert; print(len(gaudi_bert.pack_lengths([128, 17, 300, 64, 212, 500], 512)))")
    assert done.stdout == "3\n", done.stderr
    (tmp_path / "histogram.json").write_text('{"max_sequence_length": 4, "counts": [3, 2, 1, 5]}')
    (tmp_path / "text.txt").write_text("one two three\n")
    main = hide + "import importlib.util as util; find = util.find_spec; "
    main += "util.find_spec = lambda name, *others: None if name in ('matplotlib', 'tokenizers') else find(name, *others); "
    main += "from gaudi_bert.cli import main; main(sys.argv[1:])"
    for arguments, extra in (
        (["estimate", str(tmp_path / "histogram.json"), "--picture", str(tmp_path / "x.png")], "report"),
        (["run", str(tmp_path / "demo.yaml"), "--work", str(tmp_path)], "text"),
        (["tokenize", str(tmp_path / "text.txt"), "--tokenizer=x", "--out=x", "--max-sequence-length=8"], "parquet,text"),
        (["evaluate", "--data", str(tmp_path), "--checkpoint", str(tmp_path)], "pytorch"),
    ):
        (tmp_path / "demo.yaml").write_text(f"name: demo\nprepare: {{text: {tmp_path}/text.txt, train_vocab: 300}}\n")
        done = run_python(main, *arguments)
        assert done.returncode == 2
        assert len(done.stderr.splitlines()) == 1
        assert f"[{extra}]'" in done.stderr, done.stderr
