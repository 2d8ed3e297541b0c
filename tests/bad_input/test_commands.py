"""Bad files and bad options, for every command that reads data: one line, exit code 2 (1 for a proof that fails), nothing
half-written; none hangs, dies, eats memory or shows a traceback.

`make test` runs every 11th case, and `make test-long` all.
"""

from __future__ import annotations

import gzip
import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.builders.command_line import foreign_prose, inside
from tests.builders.effort import tries
from tests.builders.watched_worker import WatchedWorker, command_in_process

LONGEST_LINE = 500

# Each command that reads a file of the user, and which file that is; `out` is what it makes.
COMMANDS: dict[str, tuple[str, str]] = {
    "pack records": ("records", "pack records --out out --algorithm lpfhp"),
    "pack parquet": ("rows.parquet", "pack rows.parquet --out out --max-sequence-length 32 --algorithm lpfhp"),
    "pack arrow": ("rows.arrow", "pack rows.arrow --out out --max-sequence-length 32 --algorithm lpfhp"),
    "pack lines": ("rows.jsonl", "pack rows.jsonl --out out --max-sequence-length 32 --algorithm lpfhp"),
    "histogram": ("records", "histogram records --out out.json"),
    "plan": ("histogram.json", "plan histogram.json --out out.json --algorithm lpfhp"),
    "write": ("records/part-1", "write records --plan plan.json --out out"),
    "write by a plan": ("plan.json", "write records --plan plan.json --out out"),
    "verify": ("packed/metadata.json", "verify records packed"),
    "verify records": ("records/part-2", "verify records packed"),
    "verify a part": ("packed/group-00000.json", "verify records packed --shard 0/2"),
    "verify a table": ("packed-table/__gaudi_bert__/metadata.json", "verify rows.parquet packed-table"),
    "inspect": ("records/part-0", "inspect records/part-0"),
    "inspect tokens": ("vocab.txt", "inspect records/part-0 --vocab vocab.txt"),
    "estimate": ("histogram.json", "estimate histogram.json --algorithm lpfhp"),
    "run": ("pipeline.yaml", "run pipeline.yaml --dry-run"),
    "train": ("packed/metadata.json", "train --data packed --out out --dry-run"),
    "finetune": ("train.jsonl", "finetune --task classification --data train.jsonl --model model --out out --dry-run"),
    "finetune labels": (
        "labels.txt",
        "finetune --task classification --data train.jsonl --labels labels.txt --model model --out out --dry-run",
    ),
    "predict rows": ("texts.jsonl", "predict --model model --data texts.jsonl --out out.json"),
    "predict by a config": ("model/config.json", "predict --model model --data texts.jsonl --out out.json"),
    "embed rows": ("texts.jsonl", "embed --model model --data texts.jsonl --out out.jsonl"),
    "embed by a config": ("model/config.json", "embed --model model --data texts.jsonl --out out.jsonl"),
    "embed by a tokenizer": ("model/tokenizer.json", "embed --model model --data texts.jsonl --out out.jsonl"),
    "embed by weights": ("model/model.safetensors", "embed --model model --data texts.jsonl --out out.jsonl"),
    "tokenize": ("texts.csv", "tokenize texts.csv --tokenizer model --text-column b --out out --max-sequence-length 32"),
    "export": ("model/config.json", "export --checkpoint model --out out"),
    "evaluate": ("model/model.safetensors", "evaluate --data packed --checkpoint model --out out.json"),
    "wait": ("pipeline.yaml", "wait pipeline.yaml"),
}


def listening(path: Path) -> None:
    with inside(path.parent), socket.socket(socket.AF_UNIX) as server:
        server.bind(path.name)


def content(data: bytes) -> Callable[[Path], None]:
    return lambda path: path.write_bytes(data) and None


def nested(opening: str, closing: str, levels: int = 20_000) -> bytes:
    return (opening * levels + "1" + closing * levels + "\n").encode()


BAD_FILES: dict[str, Callable[[Path], None]] = {
    "absent": lambda path: None,
    "a pipe": os.mkfifo,
    "endless": lambda path: path.symlink_to("/dev/zero"),
    "a socket": listening,
    "a folder": Path.mkdir,
    "a loop of links": lambda path: path.symlink_to(path.name),
    "empty": content(b""),
    "noughts": content(bytes(4096)),
    "random": content(bytes((37 * n * n + 11 * n) % 251 for n in range(5000))),
    "not UTF-8": content(b'{"input_ids": [1], "a": "\xff"}\n'),
    "null": content(b"null\n"),
    "a list": content(b"[1, 2, 3]\n"),
    "an empty object": content(b"{}\n"),
    "deep lists": content(b'{"input_ids": ' + nested("[", "]")[:-1] + b"}\n"),
    "deep objects": content(nested('{"counts":', "}")),
    "5,000 digits": content(b'{"input_ids": [1, ' + b"9" * 5000 + b'], "counts": [' + b"9" * 5000 + b"]}\n"),
    "wrapping numbers": content(b'{"input_ids": [2, 4294967303, 3], "counts": [4294967303, 18446744073709551617]}\n'),
    "truths": content(b'{"input_ids": [true, false], "counts": [true], "max_sequence_length": true}\n'),
    "half a character": content(b'{"input_ids": [1], "text": "\\ud800"}\n'),
    "a name of a megabyte": content(b'{"' + b"n" * 2**20 + b'": [1]}\n'),
    "wrong types": content(b'{"input_ids": {"a": 1}, "counts": "x", "max_sequence_length": [], "groups": 5}'),
    "sizes beyond all memory": content(b'{"max_sequence_length": 1000000000000, "counts": []}\n'),
    "gzip": content(gzip.compress(b'{"input_ids": [1]}\n')),
    "Parquet's mark": content(b"PAR1" + bytes(40) + b"PAR1"),
    "an archive": content(b"PK\x03\x04" + bytes(99)),
    "numpy's mark": content(b"\x93NUMPY\x01\x00v\x00{'descr': '<i8', 'fortran_order': False, 'shape': (1%030d,), }\n" % 0),
    "YAML": content(b"a: &a [1, 1]\nb: &b [*a, *a, *a]\n"),
    "aliases": content(
        b"a0: &a0 [x, x]\n" + b"".join(b"a%d: &a%d [*a%d, *a%d]\n" % (n, n, n - 1, n - 1) for n in range(1, 40))
    ),
}
# Good after all: pipeline files without a key, and a folder of records that holds one file less.
TAKEN = {
    *(("run", bad) for bad in ("empty", "null", "an empty object")),
    ("embed by a tokenizer", "absent"),
    ("finetune labels", "YAML"),  # whose two lines are names of two labels
}
ANY_TEXT = {"inspect tokens"}
"""A vocabulary is a text of any kind."""
CHANGED = {name for name in COMMANDS if name.startswith("verify")}

LONG, DIGITS = "x" * 100_000, "9" * 5000
LINES, NOT_A_COLUMN = "pack rows.jsonl --out out", ["nothing", "", LONG, "[", "a: b", "null", "7"]
OPTIONS: dict[str, tuple[str, list[str]]] = {
    "--max-sequence-length": (LINES, ["0", "-1", "1e9", DIGITS, "\u0661\u0662", "1_0", "99999999999", LONG]),
    "--depth": ("pack records --out out", ["0", "-1", "deep", DIGITS, "\u0663", "", LONG]),
    "--algorithm": ("pack records --out out", ["", "optimall", LONG, "\udc80"]),
    "--seed": ("plan histogram.json --out out.json", ["-1", "x", DIGITS, "\u0663", "1.5"]),
    "--columns": (f"{LINES} --max-sequence-length 32", ["nothing", ",", "", LONG, "\udc80"]),
    **{
        f"{option} TEXTS": ("tokenize texts.csv --tokenizer model --out out --max-sequence-length 32", values)
        for option, values in {
            "--text-column": [*NOT_A_COLUMN, "\udc80"],
            "--text-pair-column": ["nothing", "", LONG],
            "--delimiter": ["", ";;", "\n", LONG, "\udc80"],
            "--encoding": ["", "utf-9", "hex", LONG],
            "--on-bad-row": ["", "stopp", LONG],
            "--columns": ["text,b", "a,b", ",", "", LONG, "\udc80"],
            "--format": ["", "xml", "squad", "conll", "parquet", "jsonl", LONG],
        }.items()
    },
    "--text-column": ("embed --model model --data texts.csv --out out.jsonl", NOT_A_COLUMN),
    "--too-long": (f"{LINES} --max-sequence-length 8", ["", "cut", LONG]),
    "--shard": (
        "histogram records --out out.json",
        ["3/3", "-1/2", "1/0", "a/b", "\u0661/\u0662", "1", f"{DIGITS}/2", "1/" + "9" * 30],
    ),
    "--record": ("inspect records/part-0", ["-1", "99", DIGITS, "x"]),
    "--masked-slots": ("plan histogram.json --out out.json", ["0", "-1", "9" * 20, "x"]),
    "--out": (
        "pack records --algorithm lpfhp",
        ["/dev/null", "/dev/zero", "loop", "loop/deeper", "vocab.txt", "vocab.txt/x", "", ".", "..", "/", "n" * 300, LONG],
    ),
    "--out FILE": ("histogram records", ["/dev/null", "loop", "loop/x.json", "vocab.txt/x.json", "", "n" * 300]),
    "--plan": ("write records --out out", ["", "records", "rows.jsonl", LONG, "loop"]),
    "--set": (
        "run pipeline.yaml --dry-run",
        [
            *(f"packing.depth={value}" for value in (DIGITS, "[", "\u0663", "null", "{}")),
            *("a", "=", LONG, "packing=1", "packing.algorithm=null", "packing.group_bytes=1e400GiB"),
        ],
    ),
}


CASES = [
    *(("file", name, bad) for name in COMMANDS for bad in BAD_FILES),
    *(("option", option, value) for option, (_, values) in OPTIONS.items() for value in values),
]
SAMPLE = CASES[:: tries(11, 1)]


@pytest.mark.repeated
@pytest.mark.parametrize("case", SAMPLE, ids=[f"{kind}-{name}-{value[:30]}" for kind, name, value in SAMPLE])
def test_bad_input_is_one_line(worker: WatchedWorker, place: Path, case: tuple[str, str, str]) -> None:
    kind, name, bad = case
    (place / "loop").symlink_to("loop")
    (place / "pipeline.yaml").write_text("name: x\n")
    if kind == "file":
        path, command = COMMANDS[name]
        target = place / path
        shutil.rmtree(target) if target.is_dir() else target.unlink()
        BAD_FILES[bad](target)
        arguments = command.split()
    else:
        arguments = [*OPTIONS[name][0].split(), name.split()[0], bad]
    outcome = worker.run(command_in_process, arguments, place)
    assert outcome.how == "ended", outcome
    code, said = outcome.value
    lines = said.splitlines()
    assert "Traceback" not in said
    assert all(len(line) <= LONGEST_LINE for line in lines), f"a line of {max(map(len, lines))}"
    assert not list(place.rglob(".*.tmp"))
    if code == 0:
        assert kind == "option" or (name, bad) in TAKEN or name in ANY_TEXT, said
        return
    assert code == 2 or (code == 1 and name in CHANGED), said
    assert lines
    assert lines[-1].startswith("error: ")
    assert foreign_prose(lines[-1]) is None
    left = [path for path in (place / "out", place / "out.json", place / "out.jsonl") if path.exists()]
    finals = [path for path in left for path in ([path] if path.is_file() else path.glob("metadata.json"))]
    assert not finals
