"""A folder's tokenizer is that of `transformers`, after it was copied; our own reading applies settings or names them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gaudi_bert.common.errors import InputError
from gaudi_bert.config.sections import TaskSettings
from gaudi_bert.rows.tokenizer import RowTokenizer, open_tokenizer, read_tokenizer, save_tokenizer, wrap_tokenizer
from gaudi_bert.rows.tokenizer_files import read_tokenizer_files
from gaudi_bert.rows.tokenizing import tokenize_rows
from gaudi_bert.rows.types import RowPosition, TextRow
from tests.builders.bert_folder import VOCABULARY, write_tokenizer
from tests.builders.tokenizer_folders import BERT, CASED, ESM, KINDS, TEXTS, Kind, byte_level, wordpiece

PAIRS = [(text, other) for text in TEXTS for other in (TEXTS[0], TEXTS[1], TEXTS[4])]
MOST = 12


def ours(tokenizer: RowTokenizer, pairs: Sequence[tuple[str, str]] = PAIRS) -> list[Any]:
    """Tokens and segments of texts and pairs, complete and cut."""
    rows = [TextRow(RowPosition(0), text) for text in TEXTS] + [TextRow(RowPosition(0), *pair) for pair in pairs]
    found = []
    for most in (10_000, MOST):
        settings = TaskSettings(too_long="truncate")
        sequences = tokenize_rows(rows, tokenizer, task=None, settings=settings, max_sequence_length=most)
        bounds = sequences.offsets[1:-1]
        found.append([each.tolist() for each in np.split(sequences.input_ids, bounds)])
        found.append([each.tolist() for each in np.split(sequences.segment_ids, bounds)])
    return found


def theirs(library: Any, pairs: Sequence[tuple[str, str]] = PAIRS) -> list[Any]:
    """The same of a tokenizer of `transformers`; a model gets zeros where it returns no token types."""
    found = []
    for options in ({}, {"truncation": True, "max_length": MOST}):
        encoded = [library(*each, **options) for each in [*((text,) for text in TEXTS), *pairs]]
        found.append([each["input_ids"] for each in encoded])
        found.append([each.get("token_type_ids", [0] * len(each["input_ids"])) for each in encoded])
    return found


def read_without_transformers(folder: Path) -> RowTokenizer:
    library, settings = read_tokenizer_files(folder)
    return RowTokenizer(library, folder, settings)


def pairs_of(name: str) -> list[tuple[str, str]]:
    """Pairs that are cut, too, but for a tokenizer in Python, which cuts them in another way."""
    return [] if name.startswith("esm") else PAIRS


# Folders that say the same in different files.
SAME = [
    ["vocab-additional", "vocab-extra"],
    ["vocab-extra-named", "vocab-special-map"],
    ["json-cased", "json-general-segments"],
    ["json-general", "json-no-segments"],
    ["json-extra", "json-additional"],
    ["json-left", "json-truncates-left"],
]


def test_folders_that_tokenize_differently_have_different_identities(tmp_path: Path) -> None:
    names: dict[str, list[str]] = {}
    for name, kind in KINDS.items():
        if kind.needs_transformers is None:
            names.setdefault(read_without_transformers(kind.write(tmp_path / name)).sha256, []).append(name)
    assert [group for group in names.values() if len(group) > 1] == SAME


@pytest.mark.parametrize("name", KINDS)
def test_a_folder_is_read_as_transformers_reads_it(name: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", exc_type=ImportError)
    if int(transformers.__version__.split(".")[0]) < KINDS[name].since:
        pytest.skip(f"transformers {transformers.__version__} cannot open it")
    folder = KINDS[name].write(tmp_path / "m")
    pairs = pairs_of(name)
    expected = theirs(transformers.AutoTokenizer.from_pretrained(folder), pairs)
    opened = open_tokenizer(folder)
    assert ours(opened, pairs) == expected
    # What is copied computes the same there and here, with the files of the model and without.
    copied = tmp_path / "copy"
    copied.mkdir()
    save_tokenizer(opened, copied, 17)
    again = open_tokenizer(copied)
    assert (again.sha256, ours(again, pairs)) == (opened.sha256, expected)
    (copied / "config.json").write_text(json.dumps({"model_type": KINDS[name].model_type}), encoding="utf-8")
    library = transformers.AutoTokenizer.from_pretrained(copied)
    assert theirs(library, pairs) == expected
    assert theirs(library) == ours(again)
    assert library.model_max_length == 17
    assert open_tokenizer(copied).sha256 == opened.sha256
    assert {name: getattr(library, name) for name in opened.settings if name.endswith("_token")} == {
        name: value for name, value in opened.settings.items() if name.endswith("_token")
    }
    # An image without transformers reads the copy in the same way.
    assert ours(read_without_transformers(copied), pairs) == expected


@pytest.mark.parametrize("name", KINDS)
def test_our_own_reading_applies_a_setting_or_names_it(name: str, tmp_path: Path) -> None:
    kind, folder = KINDS[name], KINDS[name].write(tmp_path / "m")
    if kind.needs_transformers is not None:
        with pytest.raises(InputError, match=rf"tokenizer_config.json: {kind.needs_transformers}"):
            read_tokenizer_files(folder)
        return
    found = ours(read_without_transformers(folder), pairs_of(name))
    transformers = pytest.importorskip("transformers", exc_type=ImportError)
    major = int(transformers.__version__.split(".")[0])
    if major < kind.since or (major < 5 and name in ("json-general", "bpe-left", "albert", "albert-general")):
        return  # which version 4 gives segments
    assert found == theirs(transformers.AutoTokenizer.from_pretrained(folder), pairs_of(name))


def changed(settings: dict[str, Any], **files: Any) -> Kind:
    return Kind(wordpiece(), {**CASED, **settings}, files=files)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (changed({"truncation_side": "up"}), "truncation_side must be left or right, but is 'up'"),
        (
            Kind(None, {"tokenizer_class": "RobertaTokenizer"}, "roberta"),
            "contains a RobertaTokenizer without tokenizer.json",
        ),
        (Kind(byte_level(), BERT), "names the class BertTokenizer, but tokenizer.json contains another kind"),
        (
            changed({"added_tokens_decoder": {"3": {"content": "<x>"}}}),
            "expected the token id 3 for the added token '<x>', found",
        ),
        (changed({"never_split": ["cat"]}), "contains the setting never_split of BertTokenizer"),
        (changed({"added_tokens_decoder": 3}), "the file is not a valid tokenizer"),
        (Kind(None, [3]), r"tokenizer_config.json: expected an object, found \[3\]"),  # type: ignore[arg-type]
        (
            Kind(None, {"tokenizer_class": "EsmTokenizer"}, "esm", vocabulary=ESM[1:]),
            "does not contain the token <cls>; pass the vocab.txt",
        ),
        (
            Kind(None, {"tokenizer_class": "EsmTokenizer", "additional_special_tokens": ["<x>"]}, "esm", vocabulary=ESM),
            "names special tokens other than <cls>",
        ),
    ],
)
def test_what_is_wrong_is_named(kind: Kind, message: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=message):
        read_tokenizer_files(kind.write(tmp_path / "m"))


def test_pairs_of_esm_are_not_cut(tmp_path: Path) -> None:
    tokenizer = read_without_transformers(KINDS["esm"].write(tmp_path / "m"))
    with pytest.raises(
        InputError, match="row 0: the pair has 12 tokens or more, and pairs cannot be truncated for ESM models; shorten it"
    ):
        ours(tokenizer)


def test_folders_without_a_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"contains no tokenizer; put tokenizer.json or vocab.txt there"):
        open_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}", encoding="utf-8")
    with pytest.raises(InputError, match="the file is not a valid tokenizer"):
        open_tokenizer(tmp_path)
    with pytest.raises(InputError, match=r"nowhere: no such folder; check the path"):
        open_tokenizer(tmp_path / "nowhere")


def test_the_tokenizer_beside_the_prefix_of_a_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\n", encoding="utf-8")
    (tmp_path / "model.ckpt.index").touch()
    assert open_tokenizer(tmp_path / "model.ckpt").vocabulary_size == 5


def test_casing_is_the_folder_s_own(tmp_path: Path) -> None:
    cased = open_tokenizer(write_tokenizer(tmp_path / "cased", lower_case=False))
    assert cased.tokenizer.encode("Cat cat").tokens == ["[CLS]", "[UNK]", "cat", "[SEP]"]
    assert (cased.special_ids, cased.pad_id, cased.mask_id) == ((0, 1, 2, 3, 4), 0, 4)
    assert cased.vocabulary_size == len(VOCABULARY)


def test_the_mask_is_the_one_that_the_settings_name(tmp_path: Path) -> None:
    folder = KINDS["json-mask"].write(tmp_path / "m")
    for opened in (read_without_transformers(folder), open_tokenizer(folder)):  # which uses transformers if it is there
        assert (opened.mask_id, opened.pad_id) == (len(VOCABULARY), 0)
        assert opened.special_ids == (0, 1, 2, 3, 4, len(VOCABULARY))


def test_a_file_is_taken_as_it_is(tmp_path: Path) -> None:
    """With its own side, and the segments of its template; the settings of the folder around it are those of another."""
    folder = KINDS["json-truncates-left"].write(tmp_path / "m")
    (folder / "tokenizer_config.json").write_text("[]", encoding="utf-8")
    opened = read_tokenizer(folder / "tokenizer.json")
    assert (opened.truncation_side, opened.has_segments, opened.tokenizer.truncation) == ("left", True, None)


@pytest.mark.parametrize("name", ["vocab-additional", "json-left", "json-no-segments", "json-split", "bpe-prefix", "esm"])
def test_a_tokenizer_that_a_program_has_opened(name: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", exc_type=ImportError)
    library = transformers.AutoTokenizer.from_pretrained(KINDS[name].write(tmp_path / "m"))
    pairs = pairs_of(name)
    expected = theirs(library, pairs)
    opened = wrap_tokenizer(library)
    assert ours(opened, pairs) == expected
    assert opened.sha256 == open_tokenizer(tmp_path / "m").sha256
    library(TEXTS[0], truncation=True, max_length=4, padding="max_length")  # which changes the library's tokenizer
    assert ours(opened, pairs) == expected
