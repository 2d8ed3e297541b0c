"""The whole path as a user takes it, through the command line: text to a trained BERT and its report, with odd sizes.

Written as one story, because each step needs what the one before it left on the disk.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from tests.builders.command_line import run_command, succeed
from tests.builders.folders import contents

STAGES = ("prepare", "histogram", "plan", "write", "verify", "train", "evaluate", "report")

PIPELINE = """
name: tiny
prepare: {text: text, train_vocab: 131, max_sequence_length: 37, max_predictions: 7, duplicates: 2, shards: 3,
          evaluation_fraction: 0.2}
packing: {depth: 5, shard_multiple: 3}
model: {hidden_size: 10, num_hidden_layers: 1, num_attention_heads: 2, intermediate_size: 14}
training: {device: cpu, global_batch_sequences: 11, micro_batch_packs: 3, updates: 5, warmup_updates: 2,
           save_every_updates: 3, evaluate_every_updates: 4, log_every_updates: 2}
"""


def write_text(folder: Path) -> None:
    """Thirteen documents of short sentences over a vocabulary small enough to train a WordPiece on."""
    generator = random.Random(7)
    words = ["alpha", "beta", "gamma", "delta", "river", "stone", "green", "quick", "sings", "under", "over", "the", "a"]
    folder.mkdir()

    def sentence() -> str:
        return " ".join(generator.choice(words) for _ in range(generator.randint(2, 9))).capitalize() + "."

    documents = ["\n".join(sentence() for _ in range(generator.randint(3, 11))) for _ in range(13)]
    (folder / "some.txt").write_text("\n\n".join(documents) + "\n")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which the whole pipeline has run once."""
    folder = tmp_path_factory.mktemp("pipeline")
    write_text(folder / "text")
    (folder / "tiny.yaml").write_text(PIPELINE)
    assert tuple(json.loads(succeed("run", "tiny.yaml", "--json", folder=folder).stdout)) == STAGES
    return folder


def test_no_artefact_names_this_machine(finished: Path) -> None:
    work = finished / "work" / "tiny"
    for name, data in contents(work).items():
        if name.endswith((".json", ".yaml", ".tfrecord", ".html")):
            assert str(finished).encode() not in data, name


def test_a_second_run_does_nothing_and_says_so(finished: Path) -> None:
    before = contents(finished / "work")
    done = succeed("run", "tiny.yaml", "--stages", "prepare,histogram,plan,write,verify,train", folder=finished)
    for stage in ("prepare train", "histogram train", "plan train", "write train"):
        line = next(line for line in done.stdout.splitlines() if line.replace(": ", " ").startswith(stage))
        assert "nothing to do" in line
    assert "verify train: every one of" in done.stdout  # which is proven each time
    assert contents(finished / "work") == before


def test_elsewhere_are_the_same_bytes_and_other_settings_are_refused_until_told_to_overwrite(
    finished: Path, tmp_path: Path
) -> None:
    write_text(tmp_path / "text")
    (tmp_path / "tiny.yaml").write_text(PIPELINE)
    run = ("run", "tiny.yaml", "--stages", "prepare,histogram,plan,write,verify", "--work", "other")
    succeed(*run, folder=tmp_path)
    ours, before = contents(finished / "work" / "tiny"), contents(tmp_path / "other" / "tiny")
    assert {name: data for name, data in ours.items() if name in before} == before
    refused = run_command(*run, "--set", "packing.depth=2", folder=tmp_path)
    assert refused.returncode == 2
    message = refused.stderr.splitlines()[-1]
    assert message.startswith("error: ")
    assert "depth: 5 there, 2 now" in message
    assert "--overwrite" in message
    assert contents(tmp_path / "other" / "tiny") == before
    succeed(*run, "--set", "packing.depth=2", "--overwrite", folder=tmp_path)
    metadata = json.loads((tmp_path / "other" / "tiny" / "packed" / "train" / "metadata.json").read_text())
    assert metadata["depth"] == 2
