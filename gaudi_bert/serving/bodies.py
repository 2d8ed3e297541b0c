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

from gaudi_bert.serving.schemas import RequestBody, RequestError, TextForms

# A JSON object in a request may have at most 200 keys. A field may have at most 1,000 values, and the whole body 100,000.
# Texts and token ids do not count.
_MAX_KEYS, _MAX_VALUES, _MAX_OTHER_VALUES = 200, 1_000, 100_000
_IDS_AT_ONCE = 1 << 16  # the number of bytes of token ids that are converted to Python integers at a time
_SPACE = re.compile(rb"[ \t\n\r]*")
_LITERAL = re.compile(rb"[^\s,:\[\]{}\"]{1,400}")
_IDS, _FIRST_ID = re.compile(rb"[-0-9, \t\n\r]*"), re.compile(rb"\[[ \t\n\r]*[-0-9]")
_OTHER_KEY = "an unknown key"
_PAIR = TextForms("a list of texts", ("text",))


def read_request(request_type: type[RequestBody], body: bytes, max_texts: int) -> Any:
    """Parse and validate the JSON body of a request.

    Args:
        request_type: The type of the requests of the route.
        body: The body.
        max_texts: The maximum number of texts in a list.

    Returns:
        The request, an instance of `request_type`.

    Raises:
        RequestError: The body is not JSON, a value is wrong, or there are too many values. The message names the position of
            the first problem, and contains no text of the request.
    """
    fields = {
        name: next((each for each in field.metadata if isinstance(each, TextForms)), None)
        for name, field in request_type.model_fields.items()
    }
    values = _BodyParser(body, max_texts).parse_object(fields)
    try:
        return request_type.model_validate(values)
    except ValidationError as error:
        problem = error.errors(include_url=False, include_context=False, include_input=False)[0]
        raise _wrong_value_error(str(problem["loc"][0]), problem["msg"]) from None


def _wrong_value_error(position: str, problem: str) -> RequestError:
    """Return the error for a wrong value at a position in the body, such as `inputs.3`."""
    return RequestError(422, "validation", f"`{position}`: {problem}")


def _not_json_error() -> RequestError:
    """Return the error for a body that is not a JSON object."""
    return RequestError(422, "validation", "the body must be a JSON object")


class _BodyParser:
    """Parses the JSON body of one request, and stops at the first error.

    Args:
        body: The body.
        max_texts: The maximum number of texts in a list.
    """

    def __init__(self, body: bytes, max_texts: int) -> None:
        self._body, self._offset, self._max_texts = body, 0, max_texts
        self._remaining_values = _MAX_OTHER_VALUES
        # An escaped quote must not be mistaken for the end of a string. Therefore this copy of the body has underscores in
        # place of escaped backslashes and quotes. JSON allows backslashes only in strings.
        self._unescaped = body.replace(b"\\\\", b"__").replace(b'\\"', b"__") if b"\\" in body else body

    def parse_object(self, fields: Mapping[str, TextForms | None]) -> dict[str, Any]:
        """Parse the complete body, which must be a JSON object. Return the values of the known keys.

        Args:
            fields: The known keys. The value is the allowed forms of a field with texts, and None for another field.
        """
        values = {}
        for name in self._iterate_keys():
            forms, position = fields.get(name), name if name in fields else _OTHER_KEY
            value = self._read_small_value(position) if forms is None else self._read_texts(position, forms)
            if name in fields:
                values[name] = value
        if self._peek_byte():
            raise _not_json_error()
        return values

    def _peek_byte(self) -> bytes:
        """Skip white space, and return the next byte without moving past it. Return b"" at the end of the body."""
        spaces = _SPACE.match(self._body, self._offset)
        self._offset = self._offset if spaces is None else spaces.end()
        return self._body[self._offset : self._offset + 1]

    def _read_expected_byte(self, *expected: bytes) -> bytes:
        """Skip white space, then read one byte and return it. Raise an error unless it is one of the expected bytes."""
        found = self._peek_byte()
        if found not in expected:
            raise _not_json_error()
        self._offset += 1
        return found

    def _iterate_elements(self, opening: bytes, closing: bytes) -> Iterator[int]:
        """Iterate over a JSON list or object, and yield the index of each element. The caller must read an element before
        requesting the next one.

        This method reads the brackets and the commas itself.
        """
        self._read_expected_byte(opening)
        if self._peek_byte() == closing:
            self._offset += 1
            return
        for number in itertools.count():
            yield number
            if self._read_expected_byte(b",", closing) == closing:
                return

    def _iterate_keys(self) -> Iterator[str]:
        """Iterate over a JSON object, and yield each key. The caller must read the value of a key before requesting the next
        key.
        """
        for number in self._iterate_elements(b"{", b"}"):
            if number == _MAX_KEYS:
                raise RequestError(422, "validation", f"an object must not have more than {_MAX_KEYS} keys")
            if self._peek_byte() != b'"':
                raise _not_json_error()
            name = self._read_string()
            self._read_expected_byte(b":")
            yield name

    def _decode_json(self, part: bytes) -> Any:
        """Parse a part of the body that contains one complete JSON value, and return the value."""
        try:
            return from_json(part, allow_inf_nan=False, cache_strings=False)
        except ValueError:
            raise _not_json_error() from None

    def _skip_string(self) -> int:
        """Move past a JSON string, and return its start offset."""
        start, self._offset = self._offset, self._unescaped.find(b'"', self._offset + 1) + 1
        if not self._offset:
            raise _not_json_error()
        return start

    def _read_string(self) -> str:
        """Read and return the JSON string at the current offset."""
        start = self._skip_string()
        text: str = self._decode_json(self._body[start : self._offset])
        return text

    def _read_small_value(self, position: str) -> Any:
        """Read and return the value of a field that contains no texts. Raise an error if the value has too many elements."""
        mark, depth = self._peek_byte(), 0
        start = self._offset
        for _ in range(_MAX_VALUES):
            self._remaining_values -= 1
            if self._remaining_values < 0:
                break
            if mark == b'"':
                self._skip_string()
            elif mark in (b"[", b"{", b"]", b"}", b",", b":"):
                depth += {b"[": 1, b"{": 1, b"]": -1, b"}": -1}.get(mark, 0)
                self._offset += 1
            elif literal := _LITERAL.match(self._body, self._offset):
                self._offset = literal.end()
            else:
                raise _not_json_error()
            if depth <= 0:
                return self._decode_json(self._body[start : self._offset])
            mark = self._peek_byte()
        raise _wrong_value_error(position, "contains too many values")

    def _read_texts(self, position: str, forms: TextForms) -> Any:
        """Read and return the value of a field that contains texts. Raise an error if the field does not allow its form."""
        mark = self._peek_byte()
        if mark == b'"' and forms.allows_single_text:
            return self._read_string()
        if mark != b"[" or not forms.element_kinds:
            raise _wrong_value_error(position, f"must be {forms.description}")
        if "ids" in forms.element_kinds and _FIRST_ID.match(self._body, self._offset):
            return self._read_token_ids(position)
        return self._read_list(position, forms, self._max_texts, 413)

    def _read_list(self, position: str, forms: TextForms, max_elements: int, status: int) -> list[Any]:
        """Read and return a list of texts.

        Args:
            position: The position of the list in the body, for error messages.
            forms: The allowed forms of the elements.
            max_elements: The maximum number of elements.
            status: The HTTP status of the error if there are more elements.
        """
        items = []
        for number in self._iterate_elements(b"[", b"]"):
            if number == max_elements:
                raise RequestError(
                    status, "validation", f"`{position}`: must contain at most {max_elements:,} texts; send fewer"
                )
            items.append(self._read_element(f"{position}.{number}", forms))
        if not items:
            raise RequestError(422, "validation", f"`{position}`: must not be empty; send at least one text")
        return items

    def _read_element(self, position: str, forms: TextForms) -> Any:
        """Read and return one element of a list of texts."""
        mark = self._peek_byte()
        if mark == b'"' and "text" in forms.element_kinds:
            return self._read_string()
        if mark == b"[" and "ids" in forms.element_kinds:
            return self._read_token_ids(position)
        if mark == b"[" and "texts" in forms.element_kinds:
            return self._read_list(position, _PAIR, 2, 422)
        if mark == b"{" and "document" in forms.element_kinds:
            return self._read_document(position)
        raise _wrong_value_error(position, f"`{position.partition('.')[0]}` must be {forms.description}")

    def _read_document(self, position: str) -> str:
        """Read a JSON object that has a key `text`, and return the text."""
        text: str | None = None
        for name in self._iterate_keys():
            value = (
                self._read_string() if name == "text" and self._peek_byte() == b'"' else self._read_small_value(_OTHER_KEY)
            )
            text = value if name == "text" and isinstance(value, str) else text
        if text is None:
            raise _wrong_value_error(f"{position}.text", "must be a text")
        return text

    def _read_token_ids(self, position: str) -> array[int]:
        """Read a list of token ids, and return it as an array of 32-bit integers."""
        self._read_expected_byte(b"[")
        end, ids = self._body.find(b"]", self._offset), array("i")
        if end < 0 or not _IDS.fullmatch(self._body, self._offset, end):
            raise _wrong_value_error(position, "token ids must be integers")
        while self._offset <= end:
            is_last = end - self._offset <= _IDS_AT_ONCE
            stop = end if is_last else self._body.rfind(b",", self._offset, self._offset + _IDS_AT_ONCE)
            part = self._decode_json(b"[%s]" % self._body[self._offset : max(stop, self._offset)])
            if not part:
                raise _wrong_value_error(position, "a list of token ids must not be empty")
            try:
                ids.extend(part)
            except OverflowError:
                raise _wrong_value_error(position, "a token id is too large") from None
            self._offset = stop + 1
        return ids
