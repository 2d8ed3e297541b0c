"""The rows that `python-docstrings` stands for, as files of a work folder: made once, before a model learns them.

`rows/train.jsonl` and `rows/evaluation.jsonl` hold `{"text": ..., "label": ...}`, a function of the Python that runs.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from gaudi_bert.artefacts.completion import Signature, begin_artefact
from gaudi_bert.common.built_in_texts import BUILT_IN_ROWS
from gaudi_bert.common.files import exclusive_lock, write_text
from gaudi_bert.common.progress import Reporter

if TYPE_CHECKING:
    from gaudi_bert.corpus.labelled_docstrings import LabelledText

__all__ = ["make_built_in_rows"]


def make_built_in_rows(training: Path, held_out: Path, *, reporter: Reporter, overwrite: bool = False) -> None:
    """Write both files of one folder, where they are not there yet.

    Several processes may call this at the same time: one writes, the others wait for it.

    Raises:
        InputError: another Python made them, and `overwrite` is False; or this one has no source files of its library.
        FailedError: they cannot be written.
    """
    from gaudi_bert.corpus.labelled_docstrings import HELD_OUT_OF, LABELS, labelled_docstrings
    from gaudi_bert.corpus.python_texts import python_texts

    folder, (name,) = held_out.parent, BUILT_IN_ROWS
    signature = Signature("rows", {"labels": LABELS, "held_out_of": HELD_OUT_OF}, {name: platform.python_version()})
    with exclusive_lock(folder, str(folder), wait=True):
        if begin_artefact(folder, held_out, signature, overwrite):
            return
        rows = labelled_docstrings(python_texts(name))
        write_text(training, _lines(row for row in rows if not row.held_out))
        write_text(held_out, _lines(row for row in rows if row.held_out))
    counted = sum(row.held_out for row in rows)
    reporter.say(f"{folder}: {len(rows) - counted:,} docstrings of {LABELS} packages, and {counted:,} held out")


def _lines(rows: Iterable[LabelledText]) -> str:
    return "".join(json.dumps({"text": row.text, "label": row.label}, ensure_ascii=False) + "\n" for row in rows)
