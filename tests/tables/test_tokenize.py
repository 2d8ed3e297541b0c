"""Tables of tokens are what the tokenizer says of each text, in order, whoever makes them; what is lost is counted."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

pyarrow = pytest.importorskip("pyarrow", exc_type=ImportError)
from pyarrow import parquet  # noqa: E402
from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers  # noqa: E402

from gaudi_bert.artefacts.base import NOTES_NAME  # noqa: E402
from gaudi_bert.artefacts.results import PlainResult, StageOutput  # noqa: E402
from gaudi_bert.common.errors import InputError  # noqa: E402
from gaudi_bert.config.sections import TokenizeSettings  # noqa: E402
from gaudi_bert.tables import tokenize as stage  # noqa: E402
from gaudi_bert.tables.tokenize import tokenize_texts  # noqa: E402
from tests.builders.command_line import succeed  # noqa: E402
from tests.builders.folders import contents  # noqa: E402
from tests.builders.reporters import a_run  # noqa: E402

L = 12
RNG = random.Random(5)
TEXTS = [" ".join(RNG.choices(["alpha", "beta", "gamma", "delta", "epsilon"], k=RNG.randint(1, 40))) for _ in range(300)]


def write_tokenizer(path: Path, kind: str) -> Tokenizer:
    """A byte-level BPE without special tokens, with RoBERTa's, or with a template that has segments."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<s>", "</s>"], show_progress=False)
    tokenizer.train_from_iterator(TEXTS[:50], trainer)
    if kind == "roberta":
        tokenizer.post_processor = processors.RobertaProcessing(("</s>", 1), ("<s>", 0))
    elif kind == "segments":
        template = "$A:1 </s>:1 <s>:2"
        tokenizer.post_processor = processors.TemplateProcessing(
            single=template, pair=f"{template} $B:3", special_tokens=[("<s>", 0), ("</s>", 1)]
        )
    tokenizer.enable_padding(length=64)  # what a tokenizer was saved with changes nothing
    tokenizer.enable_truncation(5)
    tokenizer.save(str(path))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


def write_lines(path: Path) -> str:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return str(path)


def rows_of(out: Path) -> list[list[int]]:
    return [row for path in sorted(out.glob("*.parquet")) for row in parquet.read_table(path)["input_ids"].to_pylist()]


def expected(tokenizer: Tokenizer, policy: str, special: bool) -> list[list[int]]:
    """Text by text, cut by hand: the special tokens stand around each piece as around a text."""
    around = tokenizer.encode("", add_special_tokens=special).ids
    starts = [0] if around[:1] == [0] and len(around) == 2 else []
    ends = around[len(starts) :]
    rows = []
    for text in TEXTS:
        ids, most = tokenizer.encode(text, add_special_tokens=False).ids, L - len(around)
        pieces = [ids[start : start + most] for start in range(0, len(ids), most)]
        stored = pieces if policy == "split" or len(pieces) == 1 else pieces[:1] if policy == "truncate" else []
        rows += [starts + piece + ends for piece in stored]
    return rows


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("kind", ["gpt", "roberta"])
@pytest.mark.parametrize("policy", ["split", "truncate", "drop"])
def test_the_rows_of_each_text(tmp_path: Path, kind: str, policy: str, special: bool) -> None:
    tokenizer = write_tokenizer(tmp_path / "any.json", kind)
    settings = TokenizeSettings(max_sequence_length=L, too_long=policy, special_tokens=special, part_bytes=3000)
    files = [write_lines(tmp_path / "texts.jsonl")]
    created = tokenize_texts(files, tmp_path / "any.json", tmp_path / "out", settings, a_run())
    rows = expected(tokenizer, policy, special)
    assert rows_of(tmp_path / "out") == rows
    content, added = created.content, len(tokenizer.encode("", add_special_tokens=special).ids)
    whole = [tokenizer.encode(text, add_special_tokens=False).ids for text in TEXTS]
    stored = sum(len(row) - added for row in rows)
    assert (content.texts, content.rows, content.tokens) == (len(TEXTS), len(rows), sum(map(len, rows)))
    assert content.too_long.rows == sum(len(ids) > L - added for ids in whole) > 0
    assert content.too_long.dropped_tokens == sum(map(len, whole)) - stored
    assert content.columns == ("input_ids",)
    assert len(content.files) > 4


def test_segments_where_the_tokenizer_gives_them(tmp_path: Path) -> None:
    """As the template of a file, or the settings of a folder say; the general class of `transformers` gives none."""
    write_tokenizer(tmp_path / "tokenizer.json", "segments")
    settings, data = TokenizeSettings(max_sequence_length=L), [write_lines(tmp_path / "t.jsonl")]
    tokenize_texts(data, tmp_path, tmp_path / "none", settings, a_run())
    assert parquet.read_table(next((tmp_path / "none").glob("*.parquet"))).column_names == ["input_ids"]
    tokenize_texts(data, tmp_path / "tokenizer.json", tmp_path / "out", settings, a_run())
    (path,) = (tmp_path / "out").glob("*.parquet")
    table = parquet.read_table(path).to_pydict()
    for ids, types in zip(table["input_ids"], table["token_type_ids"], strict=True):
        assert types == [1] * (len(ids) - 1) + [2]
        assert ids[-2:] == [1, 0]


@pytest.mark.parametrize("policy", ["truncate", "split"])
def test_texts_are_cut_on_the_side_of_the_tokenizer(tmp_path: Path, policy: str) -> None:
    """Pieces of a text that is split follow each other from its beginning, whatever the side is."""
    tokenizer = write_tokenizer(tmp_path / "any.json", "roberta")
    tokenizer.enable_truncation(5, direction="left")
    tokenizer.save(str(tmp_path / "any.json"))
    tokenizer.no_truncation()
    settings = TokenizeSettings(max_sequence_length=L, too_long=policy)
    tokenize_texts([write_lines(tmp_path / "t.jsonl")], tmp_path / "any.json", tmp_path / "out", settings, a_run())
    ids = [tokenizer.encode(text).ids for text in TEXTS]
    ends = [row if len(row) <= L else [row[0], *row[1 - L :]] for row in ids]
    assert rows_of(tmp_path / "out") == (ends if policy == "truncate" else expected(tokenizer, "split", True))
    assert ends != expected(tokenizer, "truncate", True)


@pytest.mark.parametrize("kind", ["gpt", "roberta", "segments"])
@pytest.mark.parametrize("policy", ["truncate", "drop"])
def test_pairs_are_what_the_tokenizer_makes_of_two_texts(tmp_path: Path, kind: str, policy: str) -> None:
    tokenizer = write_tokenizer(tmp_path / "any.json", kind)
    pairs = [*zip(TEXTS[:120], TEXTS[120:240], strict=True), ("alpha", None), ("beta", None)]
    (tmp_path / "t.jsonl").write_text("".join(json.dumps({"a": one, "b": other}) + "\n" for one, other in pairs))
    settings = TokenizeSettings(max_sequence_length=67, too_long=policy, text_column="a", text_pair_column="b")
    created = tokenize_texts([str(tmp_path / "t.jsonl")], tmp_path / "any.json", tmp_path / "out", settings, a_run())
    complete = [tokenizer.encode(*filter(None, pair)) for pair in pairs]
    tokenizer.enable_truncation(67)
    cut = [tokenizer.encode(*filter(None, pair)) for pair in pairs]
    rows = [short for short, long in zip(cut, complete, strict=True) if policy == "truncate" or len(short) == len(long)]
    table = parquet.read_table(sorted((tmp_path / "out").glob("*.parquet"))[0]).to_pydict()
    assert table["input_ids"] == [row.ids for row in rows]
    assert ("token_type_ids" in table) == (kind == "segments")
    if kind == "segments":
        assert table["token_type_ids"] == [row.type_ids for row in rows]
    special = sum(complete[0].special_tokens_mask)
    too_long = [(short, long) for short, long in zip(cut, complete, strict=True) if len(short) < len(long)]
    assert created.content.too_long.rows == len(too_long) > 0
    dropped = sum(len(long) - (len(short) if policy == "truncate" else special) for short, long in too_long)
    assert created.content.too_long.dropped_tokens == dropped
    for other in ("split", "error"):
        wrong = settings.model_copy(update={"too_long": other})
        with pytest.raises(
            InputError,
            match=r"\(row \d+\): expected 1 to \d+ tokens, found \d+; .* truncate or drop \(a pair is not split\)",
        ):
            tokenize_texts([str(tmp_path / "t.jsonl")], tmp_path / "any.json", tmp_path / other, wrong, a_run())


def test_a_file_that_the_options_do_not_fit_is_refused_before_the_first_is_read(tmp_path: Path) -> None:
    write_tokenizer(tmp_path / "tokenizer.json", "roberta")
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.csv").write_text("id,comment\n1,alpha\n")
    (tmp_path / "texts" / "b.csv").write_text("id,text\n1,alpha\n")
    settings = TokenizeSettings(max_sequence_length=9, text_column="comment")
    with pytest.raises(InputError, match=r"b\.csv: line 1: .* the column 'comment' is missing"):
        tokenize_texts([str(tmp_path / "texts")], tmp_path, tmp_path / "out", settings, a_run())
    assert not (tmp_path / "out").exists()


def test_shards_and_what_was_killed_give_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_tokenizer(tmp_path / "tokenizer.json", "roberta")
    files, settings = [write_lines(tmp_path / "t.jsonl")], TokenizeSettings(max_sequence_length=L, part_bytes=3000)

    def run(name: str, shard: tuple[int, int] | None = None) -> StageOutput | PlainResult:
        return tokenize_texts(files, tmp_path, tmp_path / name, settings, a_run(part=shard))

    names = [file.name for file in run("whole").content.files]
    whole, out = contents(tmp_path / "whole"), tmp_path / "shards"
    assert [type(run("shards", (number, 3))) for number in (2, 0)] == [PlainResult, PlainResult]
    assert not (out / NOTES_NAME / "tokens.json").exists()
    assert isinstance(run("shards", (1, 3)), StageOutput)
    assert contents(out) == whole
    # Killed: the table of one part is not named yet, that of another is there without its summary, a third is gone.
    (out / names[1]).rename(out / f".{names[1]}.tmp")
    (out / names[4]).unlink()
    for gone in ("tokens.json", *(Path(names[n]).with_suffix(".json") for n in (1, 2))):
        (out / NOTES_NAME / gone).unlink()
    assert (run("shards").skipped, contents(out)) == (False, whole)
    assert run("shards").skipped
    # Batches and threads change nothing but the row groups.
    monkeypatch.setattr(stage, "_BATCH_CHARACTERS", 50)
    run("batches")
    assert rows_of(tmp_path / "batches") == rows_of(tmp_path / "whole")


def test_row_groups_and_empty_texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = write_tokenizer(tmp_path / "tokenizer.json", "roberta")
    (tmp_path / "t.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in ["", "alpha", " \n ", *TEXTS]))
    monkeypatch.setattr(stage, "_BATCH_TEXTS", 7)
    monkeypatch.setattr(stage, "_ROW_GROUP_TOKENS", 100)
    settings = TokenizeSettings(max_sequence_length=512)
    created = tokenize_texts([str(tmp_path / "t.jsonl")], tmp_path, tmp_path / "out", settings, a_run())
    assert (created.content.texts, created.content.empty_texts, created.content.rows) == (303, 2, 301)
    assert rows_of(tmp_path / "out") == [tokenizer.encode(text).ids for text in ["alpha", *TEXTS]]
    with parquet.ParquetFile(tmp_path / "out" / created.content.files[0].name) as table:
        assert table.metadata.num_row_groups > 20


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"too_long": "error", "max_sequence_length": 9},
            r"t\.jsonl: line 1 \(row 1\): expected 1 to 9 tokens, found \d+; increase",
        ),
        ({"max_sequence_length": 2}, "--max-sequence-length 2: .* adds 2 special tokens to each row, .* at least 3"),
        ({"max_sequence_length": 3, "too_long": "drop"}, "every text is empty or too long"),
    ],
)
def test_what_cannot_be_leaves_nothing_behind(tmp_path: Path, options: dict, message: str) -> None:
    write_tokenizer(tmp_path / "tokenizer.json", "roberta")
    (tmp_path / "t.jsonl").write_text("".join(json.dumps({"text": f"beta {text}"}) + "\n" for text in TEXTS))
    files = [str(tmp_path / "t.jsonl")]
    with pytest.raises(InputError, match=message):
        tokenize_texts(files, tmp_path, tmp_path / "out", TokenizeSettings(**options), a_run())
    assert not (tmp_path / "out").exists()


def test_the_table_is_packed_to_the_length_of_its_rows(tmp_path: Path) -> None:
    write_tokenizer(tmp_path / "tokenizer.json", "roberta")
    write_lines(tmp_path / "t.jsonl")
    succeed("tokenize", "t.jsonl", "--tokenizer", ".", "--max-sequence-length", 32, "--out", "tokens", folder=tmp_path)
    figures = json.loads(succeed("pack", "tokens", "--out", "packed", "--verify", "--json", folder=tmp_path).stdout)
    assert (figures["max_sequence_length"], figures["rows"]) == (32, len(rows_of(tmp_path / "tokens")))
