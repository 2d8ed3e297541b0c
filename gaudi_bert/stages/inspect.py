"""The stage `inspect`: one record of a TFRecord file, shown so that a person can check it.

A record is packed when it has the features that only packing adds (`positions`, `next_sentence_positions`);
otherwise it is one unpacked example. Both are cut into sequences by `input_mask` (in a packed record it holds
the number of the sequence, in an unpacked one it is the number 1 throughout), and everything else is listed
under the sequence that it belongs to. What contradicts the contract is said under `problems`, not hidden:
this is the tool for looking at files that are wrong.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from gaudi_bert.common.errors import InputError
from gaudi_bert.common.features import PackedFeature, UnpackedFeature

__all__ = ["inspect", "show"]

COLOURS = ("cyan", "green", "magenta", "yellow", "blue", "red")
UNPACKED_KEYS = tuple(feature.key for feature in UnpackedFeature)
ADDED_KEYS = tuple(feature.key for feature in PackedFeature if feature.key not in UNPACKED_KEYS)
"""What only packing adds."""


def inspect(file: str | Path, record: int = 0, vocabulary: str | Path | None = None) -> dict[str, Any]:
    """What record number `record` (from 0) of `file` holds.

    Args:
        file: a TFRecord file, plain, GZIP or ZLIB, of packed or unpacked examples.
        record: the number of the record in the file.
        vocabulary: a vocab.txt (one token a line); with it, tokens are given beside their ids.

    Returns:
        JSON values: `file`, `record`, `bytes`, `packed`, `max_sequence_length`, `tokens`, `padding`,
        `sequences` (each with `number`, `start`, `length`, `input_ids`, `segments` as [[segment, tokens],
        ...], `masked` as [{position, id}], `next_sentence_label`, and tokens where a vocabulary is given),
        `problems`, and `other_features`.

    Raises:
        InputError: the file cannot be read, has no such record, or the record is not an example.
    """
    from gaudi_bert.records.schema import RecordError
    from gaudi_bert.records.wire.example import decode_example

    path = Path(file)
    payload = _payload(path, record)
    try:
        features = decode_example(payload)
    except RecordError as error:
        raise InputError(f"{path}: record {record}: {error}; inspect shows tf.train.Example records") from error
    packed = all(key in features for key in ADDED_KEYS)
    missing = [key for key in UNPACKED_KEYS if key not in features]
    if missing:
        raise InputError(
            f"{path}: record {record}: has no feature {', '.join(missing)} "
            f"(it has {', '.join(sorted(features)) or 'none'}); inspect shows BERT pretraining examples, packed or unpacked"
        )
    view: dict[str, Any] = {
        "file": path.name,
        "record": record,
        "bytes": len(payload),
        "packed": packed,
        "max_sequence_length": int(features["input_ids"].size),
        "masked_slots": int(features["masked_lm_ids"].size),
    }
    problems: list[str] = _size_problems(features, packed)
    sequences = [] if problems else _sequences(features, packed, problems)
    view["tokens"] = sum(sequence["length"] for sequence in sequences)
    view["padding"] = view["max_sequence_length"] - view["tokens"]
    view["sequences"] = sequences
    view["problems"] = problems
    known = UNPACKED_KEYS + (ADDED_KEYS if packed else ())
    view["other_features"] = {key: int(value.size) for key, value in sorted(features.items()) if key not in known}
    if vocabulary is not None:
        _add_tokens(sequences, Path(vocabulary), problems)
    return view


def _payload(path: Path, record: int) -> bytes:
    from gaudi_bert.records.wire.framing import read_records

    if record < 0:
        raise InputError(f"{path}: record {record}: records are numbered from 0; pass --record 0 or more")
    count = 0
    for payload in itertools.islice(read_records(path), record + 1):
        if count == record:
            return payload
        count += 1
    raise InputError(f"{path}: has {count} records, so there is no record {record}; the first is --record 0")


def _size_problems(features: Mapping[str, np.ndarray], packed: bool) -> list[str]:
    """Lists that must be of one length and are not; nothing further can be said of such a record."""
    kind = PackedFeature if packed else UnpackedFeature
    alike = [[feature.key for feature in kind if feature.axis == axis] for axis in ("tokens", "masked", "sequences")]
    return [
        f"{key} has {features[key].size} values, {first} has {features[first].size}"
        for first, *others in alike
        for key in others
        if features[key].size != features[first].size
    ]


def _sequences(features: Mapping[str, np.ndarray], packed: bool, problems: list[str]) -> list[dict[str, Any]]:
    """The sequences of a record, in order."""
    mask = features["input_mask"].astype(np.int64)
    count = int(mask.max(initial=0))
    sequences, start = [], 0
    for number in range(1, count + 1):
        places = np.flatnonzero(mask == number)
        if places.size == 0 or places[0] != start or places[-1] - places[0] + 1 != places.size:
            problems.append(f"input_mask is not 1..1 2..2 ... 0..0 (at sequence {number})")
            break
        end = start + places.size
        sequences.append(_sequence(features, packed, number, start, end, problems))
        start = end
    if count < 1 or np.any(mask < 0):
        problems.append("input_mask holds no sequence" if count < 1 else "input_mask holds negative numbers")
    if np.any(features["input_ids"][start:] != 0):
        problems.append("input_ids are not 0 in the padding")
    return sequences


def _sequence(
    features: Mapping[str, np.ndarray], packed: bool, number: int, start: int, end: int, problems: list[str]
) -> dict[str, Any]:
    """Sequence `number` at start .. end - 1 of the row."""
    masked = []
    slots = np.flatnonzero(features["masked_lm_weights"] == number)
    for slot in slots:
        position = int(features["masked_lm_positions"][slot])
        if not start <= position < end:
            problems.append(f"sequence {number}: masked position {position} is outside {start} .. {end - 1}")
        masked.append({"position": position - start, "id": int(features["masked_lm_ids"][slot])})
    label_slot = number - 1
    labels = features["next_sentence_labels"]
    if packed:
        if not np.array_equal(features["positions"][start:end], np.arange(end - start)):
            problems.append(f"sequence {number}: positions do not count from 0")
        if label_slot >= labels.size or features["next_sentence_weights"][label_slot] != 1:
            problems.append(f"sequence {number}: has no next_sentence_weights of 1")
        elif features["next_sentence_positions"][label_slot] != start:
            problems.append(f"sequence {number}: next_sentence_positions is not its start, {start}")
    return {
        "number": number,
        "start": start,
        "length": end - start,
        "input_ids": features["input_ids"][start:end].tolist(),
        "segments": [
            [int(segment), sum(1 for _ in members)]
            for segment, members in itertools.groupby(features["segment_ids"][start:end])
        ],
        "masked": masked,
        "next_sentence_label": int(labels[label_slot]) if label_slot < labels.size else None,
    }


def _add_tokens(sequences: Sequence[dict[str, Any]], vocabulary: Path, problems: list[str]) -> None:
    """Give the tokens beside the ids; an id outside the vocabulary is a problem and shows as its number."""
    try:
        tokens = vocabulary.read_text(encoding="utf-8").removesuffix("\n").split("\n")
    except OSError as error:
        raise InputError(f"{vocabulary}: cannot read the vocabulary: {error.strerror}; check the path") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{vocabulary}: is not UTF-8 text ({error}); pass a vocab.txt, one token a line") from error

    def token(number: int) -> str:
        return tokens[number] if 0 <= number < len(tokens) else f"<{number}>"

    for sequence in sequences:
        ids = [*sequence["input_ids"], *(masked["id"] for masked in sequence["masked"])]
        outside = sum(1 for number in ids if not 0 <= number < len(tokens))
        if outside:
            problems.append(
                f"sequence {sequence['number']}: {outside} ids are outside the vocabulary of {len(tokens)} tokens"
            )
        sequence["tokens"] = [token(number) for number in sequence["input_ids"]]
        for masked in sequence["masked"]:
            masked["token"] = token(masked["id"])


def show(view: Mapping[str, Any], stream: TextIO) -> None:
    """Print what `inspect` returned, for people: one paragraph a sequence, told apart by number and, on a
    terminal, by colour.

    A masked position shows as what is in the row, an arrow, and what was there: `[MASK]→house`.
    """
    from rich.console import Console
    from rich.text import Text

    console = Console(file=stream, highlight=False, soft_wrap=not stream.isatty())
    kind = f"packed, {len(view['sequences'])} sequences" if view["packed"] else "unpacked"
    console.print(
        f"{view['file']}, record {view['record']}: {kind}, {view['tokens']} tokens and {view['padding']} of padding "
        f"in a row of {view['max_sequence_length']}, {view['masked_slots']} masked slots, {view['bytes']} bytes",
        markup=False,
    )
    for sequence in view["sequences"]:
        colour = COLOURS[(sequence["number"] - 1) % len(COLOURS)]
        label = {0: "really next", 1: "random next"}.get(sequence["next_sentence_label"], "unknown")
        segments = " + ".join(str(length) for _, length in sequence["segments"])
        head = f"{sequence['number']}  {sequence['length']} tokens ({segments}) from {sequence['start']}, "
        console.print(Text(f"{head}{len(sequence['masked'])} masked, {label}", style=f"bold {colour}"))
        console.print(_sentence(sequence, colour))
    for key, size in view["other_features"].items():
        console.print(f"also holds {key} ({size} values)", markup=False)
    for problem in view["problems"]:
        console.print(Text(f"PROBLEM: {problem}", style="bold red"))


def _sentence(sequence: Mapping[str, Any], colour: str) -> Any:
    """The words of a sequence as styled text: word pieces joined, masked positions underlined."""
    from rich.text import Text

    words = sequence.get("tokens") or [str(number) for number in sequence["input_ids"]]
    hidden = {masked["position"]: masked.get("token", str(masked["id"])) for masked in sequence["masked"]}
    text = Text("   ")
    for position, word in enumerate(words):
        joined = word.startswith("##") and position not in hidden
        if position and not joined:
            text.append(" ")
        if position in hidden:
            text.append(f"{word}→{hidden[position]}", style=f"underline {colour}")
        else:
            text.append(word.removeprefix("##") if joined else word, style=colour)
    return text
