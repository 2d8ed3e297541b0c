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

from gaudi_bert.serving.schemas import AllowedTextTypes, RequestBody, RequestError

# A JSON object in a request may have at most 200 keys. A field may have at most 1,000 values, and the whole body 100,000.
# Texts and token ids do not count.
_MAX_KEYS, _MAX_VALUES, _MAX_OTHER_VALUES = 200, 1_000, 100_000
_IDS_AT_ONCE = 1 << 16  # the number of bytes of token ids that are converted to Python integers at a time
_SPACE = re.compile(rb"[ \t\n\r]*")
_LITERAL = re.compile(rb"[^\s,:\[\]{}\"]{1,400}")
_IDS, _FIRST_ID = re.compile(rb"[-0-9, \t\n\r]*"), re.compile(rb"\[[ \t\n\r]*[-0-9]")
_OTHER_KEY = "an unknown key"
_PAIR = AllowedTextTypes("a list of texts", ("text",))


def read_request(request_type: type[RequestBody], body: bytes, max_texts: int) -> Any:
    """Parse and validate the JSON body of a request.

    Args:
        request_type: The type of the requests of the route.
        body: The body.
        max_texts: The maximum number of texts in a list.

    Returns:
        The request, an instance of `request_type`.

    Raises:
        RequestError: The body is not JSON, a value is wrong, or there are too many values. The message names the path of the
            first wrong value, and contains no text of the request.
    """
    fields = {
        name: next((each for each in field.metadata if isinstance(each, AllowedTextTypes)), None)
        for name, field in request_type.model_fields.items()
    }
    values = _BodyParser(body, max_texts).parse_object(fields)
    try:
        return request_type.model_validate(values)
    except ValidationError as error:
        problem = error.errors(include_url=False, include_context=False, include_input=False)[0]
        raise _wrong_value_error(str(problem["loc"][0]), problem["msg"]) from None


def _wrong_value_error(json_path: str, problem: str) -> RequestError:
    """Return the error for a wrong value. Its path in the body is, for example, `inputs.3`."""
    return RequestError(422, "validation", f"`{json_path}`: {problem}")


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

    def parse_object(self, text_types_by_key: Mapping[str, AllowedTextTypes | None]) -> dict[str, Any]:
        """Parse the complete body, which must be a JSON object. Return the values of the known keys.

        Args:
            text_types_by_key: For each known key whose value contains texts, the types that the value may have. For every
                other known key, None.
        """
        values = {}
        for name in self._iterate_keys():
            allowed, json_path = text_types_by_key.get(name), name if name in text_types_by_key else _OTHER_KEY
            value = (
                self._read_json_value(json_path) if allowed is None else self._read_text_or_list_of_texts(json_path, allowed)
            )
            if name in text_types_by_key:
                values[name] = value
        if self._peek_byte():
            raise _not_json_error()
        return values

    def _peek_byte(self) -> bytes:
        """Skip white space, and return the next byte without moving past it. Return b"" at the end of the body."""
        spaces = _SPACE.match(self._body, self._offset)
        self._offset = self._offset if spaces is None else spaces.end()
        return self._body[self._offset : self._offset + 1]

    def _read_allowed_byte(self, allowed_bytes: tuple[bytes, ...]) -> bytes:
        """Skip white space, then read one byte and return it. Raise an error unless it is one of the allowed bytes."""
        found = self._peek_byte()
        if found not in allowed_bytes:
            raise _not_json_error()
        self._offset += 1
        return found

    def _iterate_elements(self, opening: bytes, closing: bytes) -> Iterator[int]:
        """Iterate over a JSON list or object, and yield the index of each element. The caller must read an element before
        requesting the next one.

        This method reads the brackets and the commas itself.
        """
        self._read_allowed_byte((opening,))
        if self._peek_byte() == closing:
            self._offset += 1
            return
        for number in itertools.count():
            yield number
            if self._read_allowed_byte((b",", closing)) == closing:
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
            self._read_allowed_byte((b":",))
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

    def _read_json_value(self, json_path: str) -> Any:
        """Parse and return a JSON value of any type, for a field that contains no texts. Raise an error if the value has too
        many elements.
        """
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
        raise _wrong_value_error(json_path, "contains too many values")

    def _read_text_or_list_of_texts(self, json_path: str, allowed: AllowedTextTypes) -> str | array[int] | list[Any]:
        """Parse and return the value of a field that contains one text or several texts.

        A text may be a string or a list of token ids. Raise an error if the field does not allow a value of this type.
        """
        mark = self._peek_byte()
        if mark == b'"' and allowed.allows_single_text:
            return self._read_string()
        if mark != b"[" or not allowed.list_element_types:
            raise _wrong_value_error(json_path, f"must be {allowed.description}")
        if "ids" in allowed.list_element_types and _FIRST_ID.match(self._body, self._offset):
            return self._read_token_ids(json_path)
        return self._read_list_of_texts(json_path, allowed, self._max_texts, 413)

    def _read_list_of_texts(
        self, json_path: str, allowed: AllowedTextTypes, max_texts: int, status_if_longer: int
    ) -> list[Any]:
        """Parse a JSON list of texts at the current offset of the request body, and return the texts.

        Args:
            json_path: The path of the list in the body, such as `inputs`, for error messages.
            allowed: The allowed types of the texts, which may be strings or lists.
            max_texts: The maximum number of texts.
            status_if_longer: The HTTP status of the error if the list contains more texts.
        """
        items = []
        for number in self._iterate_elements(b"[", b"]"):
            if number == max_texts:
                raise RequestError(
                    status_if_longer, "validation", f"`{json_path}`: must contain at most {max_texts:,} texts; send fewer"
                )
            items.append(self._read_list_element(f"{json_path}.{number}", allowed))
        if not items:
            raise RequestError(422, "validation", f"`{json_path}`: must not be empty; send at least one text")
        return items

    def _read_list_element(self, json_path: str, allowed: AllowedTextTypes) -> str | array[int] | list[Any]:
        """Parse and return one element of a list of texts. Raise an error if an element of its type is not allowed."""
        mark = self._peek_byte()
        if mark == b'"' and "text" in allowed.list_element_types:
            return self._read_string()
        if mark == b"[" and "ids" in allowed.list_element_types:
            return self._read_token_ids(json_path)
        if mark == b"[" and "texts" in allowed.list_element_types:
            return self._read_list_of_texts(json_path, _PAIR, 2, 422)
        if mark == b"{" and "document" in allowed.list_element_types:
            return self._read_document(json_path)
        raise _wrong_value_error(json_path, f"`{json_path.partition('.')[0]}` must be {allowed.description}")

    def _read_document(self, json_path: str) -> str:
        """Read a JSON object that has a key `text`, and return the text."""
        text: str | None = None
        for name in self._iterate_keys():
            value = (
                self._read_string() if name == "text" and self._peek_byte() == b'"' else self._read_json_value(_OTHER_KEY)
            )
            text = value if name == "text" and isinstance(value, str) else text
        if text is None:
            raise _wrong_value_error(f"{json_path}.text", "must be a text")
        return text

    def _read_token_ids(self, json_path: str) -> array[int]:
        """Read a list of token ids, and return it as an array of 32-bit integers."""
        self._read_allowed_byte((b"[",))
        end, ids = self._body.find(b"]", self._offset), array("i")
        if end < 0 or not _IDS.fullmatch(self._body, self._offset, end):
            raise _wrong_value_error(json_path, "token ids must be integers")
        while self._offset <= end:
            is_last = end - self._offset <= _IDS_AT_ONCE
            stop = end if is_last else self._body.rfind(b",", self._offset, self._offset + _IDS_AT_ONCE)
            part = self._decode_json(b"[%s]" % self._body[self._offset : max(stop, self._offset)])
            if not part:
                raise _wrong_value_error(json_path, "a list of token ids must not be empty")
            try:
                ids.extend(part)
            except OverflowError:
                raise _wrong_value_error(json_path, "a token id is too large") from None
            self._offset = stop + 1
        return ids
