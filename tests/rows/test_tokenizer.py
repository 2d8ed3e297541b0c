"""The tokenizer of a folder: its files, its casing, ESM's vocab.txt."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from gaudi_bert.common.errors import InputError
from gaudi_bert.rows.tokenizer import copy_tokenizer, open_tokenizer
from tests.builders.bert_folder import VOCABULARY, write_tokenizer


def test_folders_without_a_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"holds no tokenizer; put tokenizer.json or vocab.txt there"):
        open_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}", encoding="utf-8")
    with pytest.raises(InputError, match="not a tokenizer"):
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


# --- proteins: EsmTokenizer has a vocab.txt and no tokenizer.json

ESM = ["<cls>", "<pad>", "<eos>", "<unk>", *"LAGVSERTIDPKQNFYMHWCXBUZO", ".", "-", "<null_1>", "<mask>"]


def test_a_folder_of_esm_is_read_as_transformers_reads_it(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", exc_type=ImportError)
    (tmp_path / "vocab.txt").write_text("\n".join(ESM), encoding="utf-8")
    library = transformers.EsmTokenizer(str(tmp_path / "vocab.txt"))
    library.save_pretrained(tmp_path)
    assert not (tmp_path / "tokenizer.json").exists()
    ours, random = open_tokenizer(tmp_path), np.random.default_rng(3)
    texts = ["".join(random.choice(list("LAGVSERTIDPKX.-1b <"), length)) for length in range(1, 60)]
    texts += ["MKT<mask>LV", "M K T", "mktl", "MK<null_1>A-.", " LA  GV "]
    for text, other in zip(texts, texts[::-1], strict=True):
        assert ours.tokenizer.encode(text).ids == library(text)["input_ids"], text
        assert ours.tokenizer.encode(text, other).ids == library(text, other)["input_ids"], (text, other)
    assert (ours.mask_id, ours.pad_id) == (library.mask_token_id, library.pad_token_id)
    assert set(ours.special_ids) == set(library.all_special_ids)
    copy_tokenizer(ours, tmp_path / "copy", {})
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "copy")(texts)["input_ids"] == library(texts)["input_ids"]


def test_a_vocabulary_that_is_not_esms_names_what_it_lacks(tmp_path: Path) -> None:
    (tmp_path / "vocab.txt").write_text("\n".join(ESM[1:]), encoding="utf-8")
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "EsmTokenizer"}', encoding="utf-8")
    with pytest.raises(InputError, match=r"vocab.txt: has no token <cls>; give the vocab.txt of an ESM model"):
        open_tokenizer(tmp_path)
