"""`--overwrite` removes files that an artefact of ours can have written, and nothing else, whichever command takes it."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import typer

from gaudi_bert.artefacts.object_store import ObjectStore
from gaudi_bert.artefacts.work_folder import OWNED, is_owned
from gaudi_bert.cli.main import app
from tests.builders import tables
from tests.builders.bert_folder import good_folder, write_rows
from tests.builders.command_line import Done, refusal, run_command, succeed
from tests.builders.packing_case import make_case, sequences_for_hdf5, write_hdf5
from tests.builders.s3_server import S3Server, contents, quick, upload

SMALL = "--set model.hidden_size=8 --set model.num_attention_heads=2 --set model.intermediate_size=8"
RUN = "--set training.updates=1 --set training.global_batch_sequences=16 --engine pytorch"


@dataclass(frozen=True)
class Case:
    """A command that writes `{}`, and what makes its result another one: words that are added, or replaced."""

    words: str
    changed: str
    replaced: str = ""
    is_file: bool = False
    in_bucket: bool = True

    def words_for(self, out: object, *, changed: bool) -> list[str]:
        words = self.words if not changed else self.words.replace(self.replaced, self.changed) if self.replaced else ""
        return (words or f"{self.words} {self.changed}").format(out).split()


CASES = {
    "prepare": Case("prepare text.txt --train-vocab 64 --out {}", "--seed 2"),
    "tokenize": Case(
        "tokenize texts.csv --tokenizer model --text-column b --max-sequence-length 32 --out {}", "--too-long drop"
    ),
    "histogram": Case("histogram records --out {}", "others/records", "records", is_file=True),
    "plan": Case("plan histogram.json --algorithm lpfhp --out {}", "--seed 2", is_file=True),
    "write": Case("write records --plan plan.json --out {}", "--set packing.shard_multiple=2"),
    "pack records": Case("pack records --algorithm lpfhp --out {}", "--seed 2"),
    "pack a table": Case("pack rows.jsonl --max-sequence-length 32 --algorithm lpfhp --out {}", "--seed 2"),
    "pack rows": Case("pack rows.jsonl --row-lengths 8,32 --algorithm lpfhp --out {}", "--seed 2"),
    "convert": Case("convert for-hdf5 --to hdf5 --out {}", "others-for-hdf5", "for-hdf5", in_bucket=False),
    "train": Case(f"train --data packed-table --model model {RUN} --out {{}}", "--set training.seed=2"),
    "export": Case("export --checkpoint run --out {}", "run-2", "run"),
    "finetune": Case(
        "finetune --task embedding --data pairs.jsonl --evaluation pairs.jsonl --model model --engine pytorch "
        "--set finetune.epochs=1 --set finetune.batch_sequences=4 --out {}",
        "--set finetune.seed=2",
        in_bucket=False,
    ),
    "predict": Case("predict --model tuned --data texts.jsonl --out {}", "--max-sequence-length 16", is_file=True),
    "embed": Case("embed --model model --data texts.jsonl --out {}", "--max-sequence-length 16", is_file=True),
    "run a stage": Case("run stages.yaml --work work --stages prepare", "--set prepare.seed=2", in_bucket=False),
    "run": Case("run pipeline.yaml --render {}", "--set packing.seed=2", in_bucket=False),
}
NAMES = {
    "histogram": "out.json",
    "plan": "out.json",
    "predict": "out.jsonl",
    "embed": "out.npy",
    "run a stage": "work/x/examples",
}
IN_BUCKET = [name for name, case in CASES.items() if case.in_bucket]


def test_every_command_that_takes_the_option_is_here() -> None:
    group: Any = typer.main.get_command(app)
    takes = {
        name for name in group.commands if any(each.name == "overwrite" for each in group.get_command(None, name).params)
    }
    assert takes == {name.split()[0] for name in CASES}


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The input of all commands; `others` are other records."""
    for library in ("pyarrow", "torch", "transformers", "tokenizers"):
        pytest.importorskip(library, exc_type=ImportError)
    folder = tmp_path_factory.mktemp("good")
    make_case(folder, files=3, sequences_per_file=5)
    make_case(folder / "others", files=2, sequences_per_file=5, seed=4)
    tables.write_lines(folder / "rows.jsonl", tables.random_rows(31, 29, seed=4))
    good_folder(folder / "model")
    (folder / "text.txt").write_text("\n\n".join(f"The cat {n} sat.\nThe dog {n} ran.\nA hill." for n in range(9)))
    (folder / "texts.jsonl").write_text('{"text": "the cat sat"}\n{"text": "dogs runs"}\n')
    (folder / "texts.csv").write_text("a,b\n" + "1,the cat sat\n2,dogs runs\n" * 12)
    write_rows(folder / "pairs.jsonl", "embedding", 8, 0)
    (folder / "stages.yaml").write_text("name: x\nprepare:\n  text: text.txt\n  train_vocab: 64\n")
    (folder / "pipeline.yaml").write_text("name: x\nkubernetes:\n  access_mode: ReadWriteMany\n")
    for name, seed in (("for-hdf5", 1), ("others-for-hdf5", 2)):
        write_hdf5(folder / f"{name}-records" / "part.hdf5", sequences_for_hdf5(40, 29, 5, seed=seed))
        succeed("pack", f"{name}-records", "--algorithm", "lpfhp", "--out", name, folder=folder)
    tokenize = "tokenize texts.csv --tokenizer model --text-column b --max-sequence-length 32 --out tokens"
    succeed(*tokenize.split(), folder=folder)
    succeed("pack", "tokens", "--max-sequence-length", 32, "--algorithm", "lpfhp", "--out", "packed-table", folder=folder)
    write_rows(folder / "train.jsonl", "classification", 24, 0)
    tune = "finetune --task classification --data train.jsonl --model model --engine pytorch --out tuned"
    succeed(*tune.split(), "--set", "finetune.epochs=1", "--set", "finetune.batch_sequences=4", folder=folder)
    for name, seed in (("run", 1), ("run-2", 2)):
        words = f"train --data packed {SMALL} {RUN} --set training.seed={seed} --out {name}"
        succeed(*words.split(), folder=folder)
    return folder


@pytest.fixture
def place(good: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(good, tmp_path / "place"))


def everything_below(folder: Path) -> dict[str, object]:
    """What is in a folder, hidden or not: the content of files, the targets of links, None for folders."""
    found: dict[str, object] = {}
    for parent, folders, names in os.walk(folder):
        for name in (*folders, *names):
            path = Path(parent, name)
            is_link, shown = path.is_symlink(), str(path.relative_to(folder))
            found[shown] = os.readlink(path) if is_link else None if path.is_dir() else path.read_bytes()
    return found


def rejected(place: Path, words: list[str], *options: str, environment: dict[str, str] | None = None) -> str:
    """Run a command that must end with 2; the line that says why."""
    done: Done = run_command(*words, *options, folder=place, environment=environment)
    assert (done.returncode, done.stdout) == (2, ""), done
    return done.stderr.splitlines()[-1]


@contextmanager
def unchanged(read: Callable[[], object]) -> Iterator[None]:
    """Fail if what `read` returns is different after the block."""
    before = read()
    yield
    assert read() == before


# What others have written: files by their names, or the text of a single file.
OF_OTHERS: dict[str, dict[str, str] | str] = {
    "files": {"letter.txt": "Dear", "sub/photo.txt": "photo"},
    "settings": {
        "settings.json": '{"editor.tabSize": 4}',
        "__gaudi_bert__/settings.json": "not JSON",
        "kustomization.yaml": "resources: [mine.yaml]\n",
    },
    "names": dict.fromkeys(
        (
            *("config.json", "model.safetensors", "metadata.json", "packed-00000-00000.hdf5", "train/part-0-of-1.tfrecord"),
            *("checkpoints/update-1.safetensors", "tokens-00000-of-00001.parquet", "kustomization.yaml"),
        ),
        "mine",
    ),
    "file": "mine",
}


def fill(out: Path, content: dict[str, str] | str) -> None:
    for name, text in ({"": content} if isinstance(content, str) else content).items():
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).write_text(text)


@pytest.mark.parametrize("others", OF_OTHERS)
@pytest.mark.parametrize("name", CASES)
def test_what_is_not_ours_is_rejected_and_not_touched(name: str, others: str, place: Path) -> None:
    words, out = CASES[name].words_for(NAMES.get(name, "out"), changed=False), place / NAMES.get(name, "out")
    fill(out, OF_OTHERS[others])
    for options in ((), ("--overwrite",)):
        with unchanged(lambda: everything_below(place)):
            line = rejected(place, words, *options)
        assert "choose another" in line
        assert "pass --overwrite" not in line


@pytest.mark.parametrize("name", [name for name in CASES if "run" not in name])
def test_hidden_files_of_others_stay(name: str, place: Path) -> None:
    if CASES[name].is_file:
        (place / f".{NAMES[name]}.mine").write_text("mine")
    (place / "out" / ".git").mkdir(parents=True)
    (place / "out" / ".git" / "HEAD").write_text("mine")
    before = everything_below(place)
    succeed(*CASES[name].words_for(NAMES.get(name, "out"), changed=False), folder=place)
    assert before.items() <= everything_below(place).items()


@pytest.mark.parametrize("name", CASES)
def test_ours_is_replaced_only_if_it_is_all_ours(name: str, place: Path) -> None:
    case, out = CASES[name], NAMES.get(name, "out")
    succeed(*case.words_for(out, changed=False), folder=place)
    words, before = case.words_for(out, changed=True), everything_below(place)
    with unchanged(lambda: everything_below(place)):
        assert "--overwrite" in rejected(place, words)
    outside = place.parent / "outside"
    outside.mkdir()
    (outside / "photo.txt").write_text("photo")
    for path in foreign_paths(place / out, case.is_file, outside):
        if name == "run" and not path.is_symlink():
            continue  # manifests are replaced one by one, and nothing is removed
        with unchanged(lambda: everything_below(place.parent)):
            line = rejected(place, words, "--overwrite")
        assert str(path.relative_to(place)) in line
        assert "pass --overwrite" not in line
    succeed(*words, "--overwrite", folder=place)
    assert everything_below(place) != before
    assert (outside / "photo.txt").read_text() == "photo"


def foreign_paths(out: Path, is_file: bool, outside: Path) -> Iterator[Path]:
    """Make one file of others after the other in the place of an artefact; each is away before the next comes."""
    content = {path: path.read_bytes() for path in ([out] if is_file else out.rglob("*")) if path.is_file()}
    if not is_file:
        for name in ("notes.txt", ".secret", "mine/notes.txt"):
            (out / name).parent.mkdir(exist_ok=True)
            (out / name).write_text("mine")
            yield out / name
            (out / name).unlink()
    linked = max(path for path in content if path.name != "settings.json")
    linked.unlink()
    linked.symlink_to(outside / "photo.txt")
    yield linked
    linked.unlink()
    linked.write_bytes(content[linked])
    folders = [] if is_file else sorted({path.parent for path in content} - {out})
    if folders:
        folders[-1].rename(outside / "moved")
        folders[-1].symlink_to(outside / "moved")
        yield folders[-1]
        folders[-1].unlink()
        (outside / "moved").rename(folders[-1])


@pytest.mark.parametrize("name", IN_BUCKET)
def test_the_same_holds_in_a_bucket(name: str, place: Path, s3: S3Server) -> None:
    case, objects = CASES[name], ObjectStore(quick(s3.endpoint))
    environment = {**os.environ, "AWS_ENDPOINT_URL": s3.endpoint}
    bucket = f"s3://bucket/overwrite-{name.replace(' ', '-')}"
    out = f"{bucket}/{NAMES.get(name, 'out')}"
    fill(place / "mine", OF_OTHERS["file" if case.is_file else "names"])
    if case.is_file:
        objects.upload(place / "mine", out)
    else:
        upload(place / "mine", out, objects)
    words = case.words_for(out, changed=False)
    for options in ((), ("--overwrite",)):
        with unchanged(lambda: contents(bucket, objects)):
            assert "pass --overwrite" not in rejected(place, words, *options, environment=environment)
    for key in contents(bucket, objects):
        objects.remove(f"{bucket}/{key}")
    succeed(*words, folder=place, environment=environment)
    words = case.words_for(out, changed=True)
    if not case.is_file:
        for foreign in ("notes.txt", ".secret", "sub/photo.txt"):
            objects.write(f"{out}/{foreign}", b"mine")
            with unchanged(lambda: contents(bucket, objects)):
                assert foreign.split("/")[-1] in rejected(place, words, "--overwrite", environment=environment)
            objects.remove(f"{out}/{foreign}")
    before = contents(bucket, objects)
    with unchanged(lambda: contents(bucket, objects)):
        assert "--overwrite" in rejected(place, words, environment=environment)
    succeed(*words, "--overwrite", folder=place, environment=environment)
    assert contents(bucket, objects) != before


def test_another_artefact_of_ours_is_not_replaced(place: Path) -> None:
    with unchanged(lambda: everything_below(place)):
        for words in ("pack rows.jsonl --max-sequence-length 32 --out run", "export --checkpoint run-2 --out packed"):
            assert "choose another folder" in refusal(*words.split(), "--overwrite", folder=place)
        line = rejected(place, ["embed", "--model", "model", "--data", "texts.jsonl", "--out", "plan.json"], "--overwrite")
        assert re.search(r"plan\.json: .*\.npy, \.parquet, \.jsonl", line)
        line = rejected(place, ["evaluate", "--data", "packed", "--checkpoint", "run", "--out", "plan.json"])
        assert "plan.json: already exists, and no settings file shows that `gaudi-bert evaluate` wrote this file" in line


def test_vectors_with_another_ending_are_another_artefact(place: Path) -> None:
    succeed(*["embed", "--model", "model", "--data", "texts.jsonl", "--out", "v.npy"], folder=place)
    (place / "v.parquet").write_text("mine")
    line = rejected(place, ["embed", "--model", "model", "--data", "texts.jsonl", "--out", "v.parquet"], "--overwrite")
    assert "v.parquet: already exists" in line
    assert (place / "v.parquet").read_text() == "mine"


def test_bad_input_leaves_the_files_of_others(place: Path) -> None:
    """What was written is removed again after bad input, and nothing else."""
    (place / "bad.jsonl").write_text('{"input_ids": [1, 2]}\n{"input_ids": [1, "x"]}\n')
    (place / "out").mkdir()
    (place / "out" / ".letter").write_text("Dear")
    for more in ("--max-sequence-length 8", "--row-lengths 8,16"):
        with unchanged(lambda: everything_below(place)):
            refusal(*f"pack bad.jsonl --out out {more}".split(), folder=place)


def test_what_sits_beside_a_conversion_is_not_touched(place: Path) -> None:
    (place / "out_metadata.json").write_text("mine")
    for options in ((), ("--overwrite",)):
        with unchanged(lambda: everything_below(place)):
            line = refusal(*["convert", "for-hdf5", "--to", "hdf5", "--out", "out"], *options, folder=place)
        assert re.match(r"out_metadata\.json: .*choose another", line)


def test_patterns_match_names_of_ours_only() -> None:
    assert is_owned("checkpoints/update-00000001.safetensors", OWNED["train"].names)
    assert is_owned("checkpoints/.update-00000001.safetensors.0123abcd.tmp", OWNED["train"].names)
    assert is_owned("__gaudi_bert__/.settings.json.lock", OWNED["pack-table"].names)
    for name in ("update-00000001.safetensors", "checkpoints/update-x.safetensors", "checkpoints/a/update-1.safetensors"):
        assert not is_owned(name, OWNED["train"].names)
    assert not is_owned(".letter.lock", OWNED["train"].names)
    assert not is_owned("packed-00000-00000.tfrecord\n", OWNED["write"].names)
