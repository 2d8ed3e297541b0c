"""Parse the JSON body of a request with limited memory.

A body of 8 MiB can contain millions of values, and as Python objects these values need much more memory than their bytes.
Therefore texts are counted while they are read, token ids are stored as 32-bit integers, all other fields may contain only a
few values, and reading stops at the first error. `read_request` parses a body, and pydantic then validates the fields.
"""

from __future__ import annotations

import itertools
import re
from array import array
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import ValidationError
from pydantic_core import from_json

from gaudi_bert.serving.schemas import Asked, RefusedError, Shape

_MOST_KEYS, _MOST_VALUES, _MOST_OTHER_VALUES = 200, 1_000, 100_000
"""Limits for everything except texts and token ids: the number of keys of an object, of values of one key, and of values in
the whole body.
"""
_IDS_AT_ONCE = 1 << 16  # this many bytes of token ids are converted to Python integers at a time
_SPACE = re.compile(rb"[ \t\n\r]*")
_LITERAL = re.compile(rb"[^\s,:\[\]{}\"]{1,400}")
_IDS, _FIRST_ID = re.compile(rb"[-0-9, \t\n\r]*"), re.compile(rb"\[[ \t\n\r]*[-0-9]")
_OTHER_KEY = "a key that is not known"
_PAIR = Shape("a list of texts", ("text",))


def read_request(kind: type[Asked], body: bytes, most_texts: int) -> Any:
    """Parse the body of a request.

    Args:
        kind: The type of the requests of the route.
        body: The body.
        most_texts: The maximum number of texts in a list.

    Returns:
        The request, an instance of `kind`.

    Raises:
        RefusedError: The body is not JSON, a value is wrong, or there are too many values. The message names the position of
            the first problem, and contains no text of the request.
    """
    fields = {name: _shape_of(field.metadata) for name, field in kind.model_fields.items()}
    values = _Reader(body, most_texts).request(fields)
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        problem = error.errors(include_url=False, include_context=False, include_input=False)[0]
        raise _wrong(str(problem["loc"][0]), problem["msg"]) from None


def _shape_of(metadata: list[Any]) -> Shape | None:
    """Return the shape in the annotations of a field, or None if the field contains no texts."""
    return next((each for each in metadata if isinstance(each, Shape)), None)


def _wrong(position: str, problem: str) -> RefusedError:
    """Return the error for a wrong value at a position in the body."""
    return RefusedError(422, "validation", f"`{position}`: {problem}")


def _not_json() -> RefusedError:
    """Return the error for a body that is not a JSON object."""
    return RefusedError(422, "validation", "the body is not a JSON object")


class _Reader:
    """Parses one body from its beginning to its end.

    Args:
        body: The body.
        most_texts: The maximum number of texts in a list.
    """

    def __init__(self, body: bytes, most_texts: int) -> None:
        self._body, self._at, self._most_texts = body, 0, most_texts
        self._values_left = _MOST_OTHER_VALUES
        # JSON has backslashes only inside strings. In this copy, escaped backslashes and quotes are replaced, so that the
        # end of a string is simply the next quote.
        self._unescaped = body.replace(b"\\\\", b"__").replace(b'\\"', b"__") if b"\\" in body else body

    def request(self, fields: Mapping[str, Shape | None]) -> dict[str, Any]:
        """Read the whole body, which must be an object, and return the values of the known keys.

        Args:
            fields: The shape of each known field, or None for a field that contains no texts.
        """
        values = {}
        for name in self._keys():
            shape, position = fields.get(name), name if name in fields else _OTHER_KEY
            value = self._few_values(position) if shape is None else self._shaped(position, shape)
            if name in fields:
                values[name] = value
        if self._next():
            raise _not_json()
        return values

    def _next(self) -> bytes:
        """Skip white space, and return the next byte without reading it. At the end of the body, return b""."""
        spaces = _SPACE.match(self._body, self._at)
        self._at = self._at if spaces is None else spaces.end()
        return self._body[self._at : self._at + 1]

    def _take(self, *expected: bytes) -> bytes:
        """Read the next byte, which must be one of the expected ones, and return it."""
        found = self._next()
        if found not in expected:
            raise _not_json()
        self._at += 1
        return found

    def _elements(self, opening: bytes, closing: bytes) -> Iterator[int]:
        """Read a list or an object. Before each element, yield its number. The caller must then read the element."""
        self._take(opening)
        if self._next() == closing:
            self._at += 1
            return
        for number in itertools.count():
            yield number
            if self._take(b",", closing) == closing:
                return

    def _keys(self) -> Iterator[str]:
        """Read an object, and yield each key. The caller must then read the value of the key."""
        for number in self._elements(b"{", b"}"):
            if number == _MOST_KEYS:
                raise RefusedError(422, "validation", f"an object has more than {_MOST_KEYS} keys")
            if self._next() != b'"':
                raise _not_json()
            name = self._text()
            self._take(b":")
            yield name

    def _decoded(self, part: bytes) -> Any:
        """Return the value of a part of the body that is complete JSON."""
        try:
            return from_json(part, allow_inf_nan=False, cache_strings=False)
        except ValueError:
            raise _not_json() from None

    def _skip_text(self) -> int:
        """Skip a string, and return the position at which it begins."""
        start, self._at = self._at, self._unescaped.find(b'"', self._at + 1) + 1
        if not self._at:
            raise _not_json()
        return start

    def _text(self) -> str:
        """Read a string."""
        start = self._skip_text()
        text: str = self._decoded(self._body[start : self._at])
        return text

    def _few_values(self, position: str) -> Any:
        """Read the value of a field that contains no texts. A value with too many elements is rejected."""
        mark, depth = self._next(), 0
        start = self._at
        for _ in range(_MOST_VALUES):
            self._values_left -= 1
            if self._values_left < 0:
                break
            if mark == b'"':
                self._skip_text()
            elif mark in (b"[", b"{", b"]", b"}", b",", b":"):
                depth += {b"[": 1, b"{": 1, b"]": -1, b"}": -1}.get(mark, 0)
                self._at += 1
            elif literal := _LITERAL.match(self._body, self._at):
                self._at = literal.end()
            else:
                raise _not_json()
            if depth <= 0:
                return self._decoded(self._body[start : self._at])
            mark = self._next()
        raise _wrong(position, "holds too many values")

    def _shaped(self, position: str, shape: Shape) -> Any:
        """Read the value of a field that contains texts, in one of the forms that its shape allows."""
        mark = self._next()
        if mark == b'"' and shape.is_alone:
            return self._text()
        if mark != b"[" or not shape.items:
            raise _wrong(position, f"must be {shape.described}")
        if "ids" in shape.items and _FIRST_ID.match(self._body, self._at):
            return self._ids(position)
        return self._items(position, shape, self._most_texts, 413)

    def _items(self, position: str, shape: Shape, most: int, status: int) -> list[Any]:
        """Read a list of texts.

        Args:
            position: The position of the list in the body, for errors.
            shape: The allowed forms of the elements.
            most: The maximum number of elements.
            status: The HTTP status if there are more elements.
        """
        items = []
        for number in self._elements(b"[", b"]"):
            if number == most:
                raise RefusedError(status, "validation", f"`{position}` has more than {most:,} texts; send fewer")
            items.append(self._item(f"{position}.{number}", shape))
        if not items:
            raise RefusedError(422, "validation", f"`{position}` cannot be empty; send at least one text")
        return items

    def _item(self, position: str, shape: Shape) -> Any:
        """Read one element of a list of texts."""
        mark = self._next()
        if mark == b'"' and "text" in shape.items:
            return self._text()
        if mark == b"[" and "ids" in shape.items:
            return self._ids(position)
        if mark == b"[" and "texts" in shape.items:
            return self._items(position, _PAIR, 2, 422)
        if mark == b"{" and "document" in shape.items:
            return self._document(position)
        raise _wrong(position, f"`{position.partition('.')[0]}` must be {shape.described}")

    def _document(self, position: str) -> str:
        """Read an object with a key `text`, and return the text."""
        text: str | None = None
        for name in self._keys():
            value = self._text() if name == "text" and self._next() == b'"' else self._few_values(_OTHER_KEY)
            text = value if name == "text" and isinstance(value, str) else text
        if text is None:
            raise _wrong(f"{position}.text", "must be a text")
        return text

    def _ids(self, position: str) -> array[int]:
        """Read a list of token ids into an array of 32-bit integers."""
        self._take(b"[")
        end, ids = self._body.find(b"]", self._at), array("i")
        if end < 0 or not _IDS.fullmatch(self._body, self._at, end):
            raise _wrong(position, "token ids must be integers")
        while self._at <= end:
            is_last = end - self._at <= _IDS_AT_ONCE
            stop = end if is_last else self._body.rfind(b",", self._at, self._at + _IDS_AT_ONCE)
            part = self._decoded(b"[%s]" % self._body[self._at : max(stop, self._at)])
            if not part:
                raise _wrong(position, "a list of token ids cannot be empty")
            try:
                ids.extend(part)
            except OverflowError:
                raise _wrong(position, "a token id is too large") from None
            self._at = stop + 1
        return ids
