"""What commands print of any encoder: lines of ours, and no progress bar, table or warning of a library."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest.importorskip("torch", exc_type=ImportError)
pytest.importorskip("transformers", exc_type=ImportError)

from tests.builders.bert_folder import write_rows
from tests.builders.command_line import run_command
from tests.builders.encoders import write_encoder
from tests.builders.tables import LENGTH, write_table

pytestmark = pytest.mark.slow

OURS = re.compile(
    r"(train|finetune|packing|verify-model|predict|embed): |evaluation after |[\d,]+ (of [\d,]+ )?rows|rows.jsonl: reads "
)
FEW = "--set=training.updates=2 --set=training.global_batch_sequences=8 --set=training.micro_batch_packs=2"
COMMANDS = [
    f"train --data table/packed --model m --out trained {FEW}",
    "finetune --task classification --data rows.jsonl --evaluation rows.jsonl --model trained --out tuned "
    f"--set=finetune.epochs=1 --set=finetune.max_sequence_length={LENGTH} --set=task.too_long=truncate",
    "predict --model tuned --data rows.jsonl --out answers.jsonl",
    "embed --model tuned --data rows.jsonl --out vectors.npy",
    "verify-model --huggingface trained --target transformers-5",
]


def test_commands_print_lines_of_ours_only(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    write_table(tmp_path / "table", 40, 1)
    write_encoder(tmp_path / "m", "roberta", "AutoModelForMaskedLM")
    write_rows(tmp_path / "rows.jsonl", "classification", 17, 1)
    capfd.readouterr()
    for command in COMMANDS:
        done = run_command(*command.split(), folder=tmp_path)
        assert done.returncode == 0, f"{command}: {done.stderr}"
        assert [line for line in re.split(r"[\r\n]+", done.stderr) if line and not OURS.match(line)] == [], command
        assert capfd.readouterr() == ("", ""), command
    for log in tmp_path.glob("*/engine.log"):
        assert "Loading weights" not in log.read_text(encoding="utf-8")
