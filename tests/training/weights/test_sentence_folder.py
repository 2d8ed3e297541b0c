"""What folders of sentence-transformers say, in its older and newer forms."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gaudi_bert.common.errors import InputError
from gaudi_bert.training.weights.sentence_folder import SentenceFolder, read_sentence_folder


def write(folder: Path, modules: list[str], pooling: dict[str, Any], transformer: dict[str, Any] | None = None) -> Path:
    paths = {"Transformer": "", "Pooling": "1_Pooling", "Normalize": "2_Normalize", "Dense": "2_Dense"}
    listed = [
        {"idx": n, "type": f"sentence_transformers.models.{kind}", "path": paths[kind]} for n, kind in enumerate(modules)
    ]
    (folder / "1_Pooling").mkdir(parents=True)
    (folder / "modules.json").write_text(json.dumps(listed), encoding="utf-8")
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling), encoding="utf-8")
    if transformer is not None:
        (folder / "sentence_bert_config.json").write_text(json.dumps(transformer), encoding="utf-8")
    return folder


def test_a_folder_like_minilm(tmp_path: Path) -> None:
    pooling = {"word_embedding_dimension": 384, "pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True}
    settings = {"max_seq_length": 256, "do_lower_case": False}
    folder = write(tmp_path / "a", ["Transformer", "Pooling", "Normalize"], pooling, settings)
    assert read_sentence_folder(folder) == SentenceFolder("mean", True, 256, False)


@pytest.mark.parametrize("mode", ["cls", "mean", "max"])
def test_the_newer_form(tmp_path: Path, mode: str) -> None:
    folder = write(tmp_path / "a", ["Transformer", "Pooling"], {"embedding_dimension": 3, "pooling_mode": mode})
    found = read_sentence_folder(folder)
    assert found is not None
    assert (found.pooling, found.normalize, found.max_sequence_length) == (mode, False, None)


def test_what_cannot_be_done(tmp_path: Path) -> None:
    assert read_sentence_folder(tmp_path) is None
    mean = {"pooling_mode_mean_tokens": True}
    with pytest.raises(InputError, match="has a module Dense"):
        read_sentence_folder(write(tmp_path / "dense", ["Transformer", "Pooling", "Dense"], mean))
    with pytest.raises(InputError, match="only one of cls, mean and max"):
        read_sentence_folder(write(tmp_path / "two", ["Transformer", "Pooling"], {**mean, "pooling_mode_max_tokens": True}))
    with pytest.raises(InputError, match="pools by pooling_mode_lasttoken"):
        read_sentence_folder(write(tmp_path / "last", ["Transformer", "Pooling"], {"pooling_mode_lasttoken": True}))
