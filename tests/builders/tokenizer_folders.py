"""Folders with a small tokenizer of each kind, and with the settings that `transformers` applies to it."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

from tests.builders.bert_folder import VOCABULARY

ESM = ["<cls>", "<pad>", "<eos>", "<unk>", *"LAGVSERTIDPKQNFYMHWCXBUZO", ".", "-", "<null_1>", "<mask>"]
BERT_SPECIAL = {
    "unk_token": "[UNK]",
    "sep_token": "[SEP]",
    "pad_token": "[PAD]",
    "cls_token": "[CLS]",
    "mask_token": "[MASK]",
}
ROBERTA_SPECIAL = {
    "bos_token": "<s>",
    "eos_token": "</s>",
    "sep_token": "</s>",
    "cls_token": "<s>",
    "unk_token": "<unk>",
    "pad_token": "<pad>",
    "mask_token": "<mask>",
}
TEXTS = [
    "The cat sat on the mat.",
    "the cat [SEP] the [MASK] dog <mask> </s> runs [CLS]",
    "Ünable DOGS, na\u0301ive \u4e2d\u56fd <x>the <y> river<x>!",
    "  two  spaces and\na line ",
    "hill " * 40,
    "x" * 130,
    "MKT<mask>LVAG SERT",
]


def wordpiece() -> Tokenizer:
    """BERT's tokenizer, cased, as an old tokenizer.json has it."""
    numbers = {token: number for number, token in enumerate(VOCABULARY)}
    made = Tokenizer(models.WordPiece(numbers, unk_token="[UNK]", max_input_chars_per_word=100))
    made.normalizer = normalizers.BertNormalizer(lowercase=False, strip_accents=False, handle_chinese_chars=False)
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    made.add_special_tokens(VOCABULARY[:5])
    return made


def byte_level(*, add_prefix_space: bool = False) -> Tokenizer:
    """RoBERTa's tokenizer."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space)
    special = [*("<s>", "<pad>", "</s>", "<unk>"), AddedToken("<mask>", lstrip=True, special=True)]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=special, initial_alphabet=alphabet, show_progress=False)
    made.train_from_iterator(TEXTS * 3, trainer)
    ends = [(token, made.token_to_id(token)) for token in ("</s>", "<s>")]
    made.post_processor = processors.RobertaProcessing(*ends, add_prefix_space=add_prefix_space)
    return made


def unigram(first: str = "[CLS]", last: str = "[SEP]", mask: str = "[MASK]", *, second: int = 1) -> Tokenizer:
    """The tokenizer of ALBERT or XLM-R."""
    made = Tokenizer(models.Unigram())
    made.normalizer = normalizers.Sequence([normalizers.NFKD(), normalizers.StripAccents(), normalizers.Lowercase()])
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    special = [first, "<pad>", last, "<unk>", mask]
    trainer = trainers.UnigramTrainer(vocab_size=90, special_tokens=special, unk_token="<unk>", show_progress=False)
    made.train_from_iterator(TEXTS * 3, trainer)
    made.post_processor = processors.TemplateProcessing(
        single=f"{first} $A {last}",
        pair=f"{first} $A {last} $B:{second} {last}:{second}",
        special_tokens=[(first, 0), (last, 2)],
    )
    return made


def truncating_left() -> Tokenizer:
    made = wordpiece()
    made.enable_truncation(9, direction="left")
    return made


@dataclass(frozen=True)
class Kind:
    """A folder: the library's tokenizer (None for a vocab.txt), settings, other files, and the type of the model.

    `needs_transformers` is what our own reading names when it rejects the folder; None if it reads it.
    """

    library: Tokenizer | None
    settings: dict[str, Any] | None
    model_type: str | None = "bert"
    files: dict[str, Any] = field(default_factory=dict)
    vocabulary: list[str] = field(default_factory=lambda: VOCABULARY)
    needs_transformers: str | None = None
    since: int = 4

    def write(self, folder: Path) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        if self.library is None:
            (folder / "vocab.txt").write_text("\n".join(self.vocabulary) + "\n", encoding="utf-8")
        else:
            self.library.save(str(folder / "tokenizer.json"))
        config = {"config.json": {"model_type": self.model_type}} if self.model_type else {}
        settings = {} if self.settings is None else {"tokenizer_config.json": self.settings}
        for name, content in {**config, **settings, **self.files}.items():
            (folder / name).write_text(json.dumps(content), encoding="utf-8")
        return folder


def _added(number: int, token: str, **flags: bool) -> dict[str, Any]:
    usual = {"content": token, "lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True}
    return {str(number): {**usual, **flags}}


BERT = {"tokenizer_class": "BertTokenizer"}
CASED = {**BERT, "do_lower_case": False, "strip_accents": False, "tokenize_chinese_chars": False}
MORE = len(VOCABULARY)
FAST = {"tokenizer_class": "PreTrainedTokenizerFast"}
ALL_INPUTS = ["input_ids", "token_type_ids", "attention_mask"]

KINDS: dict[str, Kind] = {
    "vocab": Kind(None, None),
    "vocab-cased": Kind(None, {**BERT, "do_lower_case": False}),
    "vocab-strip": Kind(None, {**BERT, "do_lower_case": False, "strip_accents": True, "tokenize_chinese_chars": False}),
    "vocab-additional": Kind(None, {**BERT, "additional_special_tokens": ["<x>", "<y>"]}),
    "vocab-extra": Kind(None, {**BERT, "extra_special_tokens": ["<x>", "<y>"]}, since=5),
    "vocab-extra-named": Kind(None, {**BERT, "extra_special_tokens": {"x_token": "<x>"}}),
    "vocab-added-json": Kind(None, BERT, files={"added_tokens.json": {"<x>": MORE, "River": MORE + 1}}),
    "vocab-special-map": Kind(
        None, BERT, files={"special_tokens_map.json": {**BERT_SPECIAL, "additional_special_tokens": ["<x>"]}}
    ),
    "vocab-decoder": Kind(
        None,
        {
            **BERT,
            "added_tokens_decoder": {
                **_added(2, "[CLS]"),
                **_added(MORE, "<x>", lstrip=True, rstrip=True),
                **_added(MORE + 1, "two", special=False, normalized=True, single_word=True),
            },
        },
    ),
    "vocab-mask": Kind(None, {**BERT, "mask_token": "<x>"}),
    "vocab-split": Kind(None, {**BERT, "split_special_tokens": True}),
    "vocab-left": Kind(None, {**BERT, "truncation_side": "left"}),
    "json-cased": Kind(wordpiece(), CASED),
    "json-general": Kind(wordpiece(), {**FAST, **BERT_SPECIAL}),
    "json-general-segments": Kind(wordpiece(), {**FAST, **BERT_SPECIAL, "model_input_names": ALL_INPUTS}),
    "json-no-segments": Kind(wordpiece(), {**CASED, "model_input_names": ["input_ids", "attention_mask"]}),
    "json-lower": Kind(wordpiece(), {**CASED, "do_lower_case": True}, needs_transformers="do_lower_case is true, but"),
    "json-strip": Kind(wordpiece(), {**CASED, "strip_accents": True}, needs_transformers="strip_accents is true, but"),
    "json-chinese": Kind(
        wordpiece(), {**CASED, "tokenize_chinese_chars": True}, needs_transformers="tokenize_chinese_chars is true, but"
    ),
    "json-usual": Kind(wordpiece(), None, needs_transformers="do_lower_case is true, but"),
    "json-split": Kind(wordpiece(), {**CASED, "split_special_tokens": True}),
    "json-extra": Kind(wordpiece(), {**CASED, "extra_special_tokens": ["<x>", "river"]}, since=5),
    "json-additional": Kind(wordpiece(), {**CASED, "additional_special_tokens": ["<x>", "river"]}),
    "json-mask": Kind(wordpiece(), {**CASED, "mask_token": "<x>"}),
    "json-left": Kind(wordpiece(), {**CASED, "truncation_side": "left"}),
    "json-truncates-left": Kind(truncating_left(), CASED),
    "bpe": Kind(byte_level(), {"tokenizer_class": "RobertaTokenizer", **ROBERTA_SPECIAL}, "roberta"),
    "bpe-left": Kind(byte_level(), {**FAST, **ROBERTA_SPECIAL, "truncation_side": "left"}, "roberta"),
    "bpe-prefix": Kind(
        byte_level(),
        {"tokenizer_class": "RobertaTokenizer", **ROBERTA_SPECIAL, "add_prefix_space": True},
        "roberta",
        needs_transformers="add_prefix_space is true, but",
    ),
    "bpe-general-prefix": Kind(
        byte_level(add_prefix_space=True), {**FAST, **ROBERTA_SPECIAL, "add_prefix_space": True}, "roberta"
    ),
    "albert": Kind(
        unigram(),
        {"tokenizer_class": "AlbertTokenizer", "unk_token": "<unk>", "pad_token": "<pad>"},
        "albert",
        needs_transformers="the tokenizer class AlbertTokenizer is supported only with transformers",
    ),
    "albert-general": Kind(unigram(), {**FAST, "unk_token": "<unk>", "pad_token": "<pad>"}, "albert"),
    "xlm-roberta": Kind(
        unigram("<s>", "</s>", "<mask>", second=0),
        {"tokenizer_class": "XLMRobertaTokenizer", **ROBERTA_SPECIAL},
        "xlm-roberta",
        needs_transformers="the tokenizer class XLMRobertaTokenizer is supported only with transformers",
    ),
    "esm": Kind(None, {"tokenizer_class": "EsmTokenizer"}, "esm", vocabulary=ESM),
    "esm-left": Kind(None, {"tokenizer_class": "EsmTokenizer", "truncation_side": "left"}, "esm", vocabulary=ESM),
    "unknown-setting": Kind(
        wordpiece(),
        {**CASED, "wordpieces_prefix": "##"},
        needs_transformers="the file contains the setting wordpieces_prefix",
    ),
}
