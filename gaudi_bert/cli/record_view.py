"""One record for people: what `inspect` found, a paragraph for each sequence."""

from __future__ import annotations

from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from rich.text import Text

    from gaudi_bert.stages.data.inspect import RecordView, SequenceView

__all__ = ["show_record"]

LABELS: dict[int | None, str] = {0: "really next", 1: "random next"}
COLOURS = ("cyan", "green", "magenta", "yellow", "blue", "red")


def show_record(view: RecordView, stream: TextIO) -> None:
    """Print one paragraph for each sequence, told apart by number and, on a terminal, by colour.

    A masked position shows as what is in the row, an arrow, and what was there: `[MASK]→house`.
    """
    from rich.console import Console
    from rich.text import Text

    console = Console(file=stream, highlight=False, soft_wrap=not stream.isatty())
    kind = f"packed, {len(view.sequences)} sequences" if view.packed else "unpacked"
    console.print(
        f"{view.file}, record {view.record}: {kind}, {view.tokens} tokens and {view.padding} of padding "
        f"in a row of {view.max_sequence_length}, {view.masked_slots} masked slots, {view.bytes} bytes",
        markup=False,
    )
    for sequence in view.sequences:
        colour = COLOURS[(sequence.number - 1) % len(COLOURS)]
        label = LABELS.get(sequence.next_sentence_label, "unknown")
        segments = " + ".join(str(length) for _, length in sequence.segments)
        head = f"{sequence.number}  {sequence.length} tokens ({segments}) from {sequence.start}, "
        console.print(Text(f"{head}{len(sequence.masked)} masked, {label}", style=f"bold {colour}"))
        console.print(_sentence(sequence, colour))
    for key, size in view.other_features.items():
        console.print(f"also holds {key} ({size} values)", markup=False)
    for problem in view.problems:
        console.print(Text(f"PROBLEM: {problem}", style="bold red"))


def _sentence(sequence: SequenceView, colour: str) -> Text:
    """The words of a sequence as styled text: word pieces joined, masked positions underlined."""
    from rich.text import Text

    words = sequence.tokens or [str(number) for number in sequence.input_ids]
    hidden = {masked.position: masked.token or str(masked.id) for masked in sequence.masked}
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
