"""JSON as brokers write it into ``config/``: fastjson's habits, read without guessing.

Beyond JSON: keys without quotes (``{1:23}``), objects and arrays as keys (they come back as their
canonical JSON text), commas before a closing bracket, control characters inside strings. Not
tolerated: text that ends early, or goes on behind its end. A broker rewrites these files in place,
so a reader can meet either, and must then try again or take the ``.bak``.
"""

from __future__ import annotations

import json
from typing import Any, Final

DEPTH_MAX: Final = 100
_SPACE: Final = " \t\r\n"
_BARE_END: Final = frozenset(_SPACE + ',:{}[]"')
_DECODER: Final = json.JSONDecoder(strict=False)
_TOO_MANY_DIGITS: Final = "a number of more digits than Python reads"


class JsonError(ValueError):
    """Text that is not JSON of this kind, or not all of it."""

    def __init__(self, what: str, position: int) -> None:
        super().__init__(f"{what} at character {position}")
        self.position = position  # character at which it fails


def loads(text: str | bytes) -> Any:  # noqa: ANN401 (JSON is of any type)
    """Parse a whole document, as UTF-8; strict JSON takes the fast way. JsonError: empty, incomplete, or not JSON."""
    try:
        document = text if isinstance(text, str) else text.decode("utf-8")
    except UnicodeDecodeError as error:
        raise JsonError("bytes that are no UTF-8", error.start) from error
    try:
        return json.loads(document)
    except json.JSONDecodeError:
        return _Tolerant(document).document()
    except RecursionError as error:
        raise JsonError("too deeply nested", 0) from error
    except ValueError as error:
        raise JsonError(_TOO_MANY_DIGITS, 0) from error


def canonical(value: Any) -> str:  # noqa: ANN401 (JSON is of any type)
    """One text for each value: keys sorted, no blanks."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)


class _Tolerant:
    """A recursive descent over one document."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._depth = 0

    def document(self) -> Any:  # noqa: ANN401 (JSON is of any type)
        value = self._value()
        if self._peek():
            raise JsonError("more text behind the end", self._at)
        return value

    def _peek(self) -> str:
        while self._at < len(self._text) and self._text[self._at] in _SPACE:
            self._at += 1
        return self._text[self._at : self._at + 1]

    def _take(self, wanted: str) -> bool:
        if self._peek() != wanted:
            return False
        self._at += 1
        return True

    def _value(self) -> Any:  # noqa: ANN401 (JSON is of any type)
        opening = self._peek()
        if opening not in {"{", "["}:
            return self._scalar()
        self._depth += 1
        if self._depth > DEPTH_MAX:
            raise JsonError("too deeply nested", self._at)
        self._at += 1
        value = self._object() if opening == "{" else self._array()
        self._depth -= 1
        return value

    def _scalar(self) -> Any:  # noqa: ANN401 (JSON is of any type)
        """A string, number or word; the standard decoder knows how."""
        try:
            value, self._at = _DECODER.raw_decode(self._text, self._at)
        except json.JSONDecodeError as error:
            raise JsonError(error.msg, error.pos) from error
        except ValueError as error:
            raise JsonError(_TOO_MANY_DIGITS, self._at) from error
        return value

    def _object(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        while not self._take("}"):
            key = self._key()
            if not self._take(":"):
                raise JsonError("no colon behind a key", self._at)
            found[key] = self._value()
            self._comma_before("}")
        return found

    def _array(self) -> list[Any]:
        found: list[Any] = []
        while not self._take("]"):
            found.append(self._value())
            self._comma_before("]")
        return found

    def _comma_before(self, closing: str) -> None:
        if not self._take(",") and self._peek() != closing:
            raise JsonError(f"neither a comma nor {closing}", self._at)

    def _key(self) -> str:
        """A quoted string, a bare word or number, or any value as its canonical text."""
        if self._peek() in {"{", "["}:
            return canonical(self._value())
        if self._peek() == '"':
            return str(self._scalar())
        start = self._at
        while self._at < len(self._text) and self._text[self._at] not in _BARE_END:
            self._at += 1
        if self._at == start:
            raise JsonError("no key", start)
        return self._text[start : self._at]
