"""The bytes that `prepare` makes: the same for ever for one seed, and the same after any number of kills."""

from __future__ import annotations

import hashlib
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gaudi_bert.common.progress import Reporter
from gaudi_bert.config import PrepareSettings
from gaudi_bert.stages.data.prepare import prepare
from tests.builders.effort import tries

SEED, KILLS = 5, tries(4, 20)


def write_text(path: Path) -> None:
    """101 documents of words over letters with accents, digits and punctuation."""
    rng = random.Random(17)
    words = ["".join(rng.choices("abcdeéöñßñ.,-'σ你0", k=rng.randint(1, 9))) for _ in range(211)]
    documents = [
        "\n".join(" ".join(rng.choices(words, k=rng.randint(1, 23))).capitalize() + "." for _ in range(rng.randint(1, 19)))
        for _ in range(101)
    ]
    path.write_text("\n\n".join(documents) + "\n", encoding="utf-8")


def digest(folder: Path) -> str:
    """SHA-256 of the vocabulary and the examples with their names."""
    hashed = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if path.suffix in (".tfrecord", ".txt"):
            hashed.update(path.relative_to(folder).as_posix().encode() + path.read_bytes())
    return hashed.hexdigest()


def prepared(out: Path, texts: list[Path], **changes: Any) -> str:
    settings = PrepareSettings(text=tuple(map(str, texts)), **changes)
    prepare(settings, out, pipeline_folder=out, reporter=Reporter(quiet=True), workers=1)
    return digest(out)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (
            {"train_vocab": 300, "max_sequence_length": 41, "max_predictions": 7},
            "b93479f4359bb0c8ea028441e9897c516dff4ad973dffcedad4800bf01d31c2b",
        ),
        (
            {"train_vocab": 150, "lower_case": False, "whole_word_masking": True, "duplicates": 2, "seed": 3},
            "b5aa3348234446729cc57a01e7061bd64b3b2046ed004cb3caf36637b728fcd5",
        ),
    ],
)
def test_the_same_seed_gives_the_same_examples_in_every_version(
    tmp_path: Path, changes: dict[str, Any], expected: str
) -> None:
    write_text(tmp_path / "text.txt")
    assert prepared(tmp_path / "out", [tmp_path / "text.txt"], **changes) == expected


def test_examples_of_wikipedia_stay_as_they_were(tmp_path: Path, shared_data: Path) -> None:
    texts = [shared_data / "wiki-sample" / f"text-{number}.txt" for number in range(2)]
    assert (
        prepared(tmp_path / "out", texts, train_vocab=4096, duplicates=2)
        == "9a836f0c009dffa3791cd899c7794942852023da773dea483edf9df1ebc19ec2"
    )


@pytest.mark.repeated
def test_prepare_killed_at_random_moments_gives_the_same_bytes(tmp_path: Path, repository: Path) -> None:
    write_text(tmp_path / "text.txt")
    command = [sys.executable, "-m", "tests.builders.kill_prepare", str(tmp_path / "text.txt"), str(tmp_path)]
    result = subprocess.run(
        [*command, str(SEED), str(KILLS)], capture_output=True, text=True, timeout=600, check=False, cwd=repository
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert int(result.stdout.splitlines()[-1].split()[1]) >= KILLS, result.stdout
