"""A small model's folder, and damage to its files."""

from __future__ import annotations

import copy
import json
import random
import struct
from pathlib import Path
from typing import Any

from gaudi_bert.rows.tokenizer import open_tokenizer
from tests.builders.bert_folder import write_bert
from tests.builders.damage import mutated

FILES = ("config.json", "tokenizer.json", "model.safetensors", "modules.json", "sentence_bert_config.json")
HOSTILE: tuple[Any, ...] = (
    *(None, True, 0, -1, 3, 1.5, 2**31, 2**63, 2**64 + 1, 10**30, float("nan"), float("inf")),
    *("", "x" * 5000, "\ud800", "../..", [], {}, [1, "a"], {"a": None}),
)


def good_folder(folder: Path) -> Path:
    """An encoder that says it is a classifier, with all files that `predict` and `embed` look at."""
    write_bert(folder, layers=1)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config |= {"architectures": ["BertForSequenceClassification"], "id2label": {"0": "a", "1": "b"}}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    (folder / "tokenizer.json").write_text(open_tokenizer(folder).tokenizer.to_str(), encoding="utf-8")
    modules = [{"type": "x.Transformer", "path": ""}, {"type": "x.Pooling", "path": "1_Pooling"}]
    (folder / "modules.json").write_text(json.dumps(modules), encoding="utf-8")
    (folder / "sentence_bert_config.json").write_text('{"max_seq_length": 32, "do_lower_case": false}', encoding="utf-8")
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text('{"pooling_mode_mean_tokens": true}', encoding="utf-8")
    return folder


def mutated_file(file: Path, rng: random.Random) -> bytes:
    """The bytes of a file after some damage: values of JSON replaced, or bytes."""
    data = file.read_bytes()
    if file.suffix == ".safetensors" and rng.random() < 0.5:
        size = struct.unpack("<Q", data[:8])[0]
        header = json.dumps(_with_damage(json.loads(data[8 : 8 + size]), rng)).encode()
        return struct.pack("<Q", len(header)) + header + data[8 + size :]
    if file.suffix == ".json" and rng.random() < 0.7:
        return json.dumps(_with_damage(json.loads(data), rng)).encode()
    return mutated(data, rng)


def _with_damage(content: Any, rng: random.Random) -> Any:
    """JSON with one to three of its values replaced, removed or added."""
    for _ in range(rng.randint(1, 3)):
        here = content
        while isinstance(here, dict | list) and here:
            keys = list(here) if isinstance(here, dict) else list(range(len(here)))
            key = rng.choice(keys)
            deeper = isinstance(here[key], dict | list) and here[key] and rng.random() < 0.8
            if deeper:
                here = here[key]
                continue
            if rng.random() < 0.2:
                del here[key]
            else:
                here[key] = copy.deepcopy(rng.choice(HOSTILE))
            break
    return content
