"""What no message may show: the words of pydantic, which are for programmers, and regular expressions."""

from __future__ import annotations

import re

_PYDANTIC = re.compile(
    r"Input should|should (?:match|have|be)|valid (?:string|integer|number|list|tuple|dictionary|boolean)|unable to parse|"
    r"Value error|Extra inputs|Field required|instance of|constrained-|literal\[|function-|NoneType|pydantic"
)
_EXPRESSION = re.compile(r"\^\[|\\[dsw]|[\])][*+?{]|\[a-z|\[\^|\(\?")


def foreign_prose(message: str) -> str | None:
    """The first words of a message that are pydantic's, or the start of a regular expression; None where it has neither."""
    match = _PYDANTIC.search(message) or _EXPRESSION.search(message)
    return match[0] if match else None
