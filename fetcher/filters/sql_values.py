"""How Java reads and compares values of different kinds, and when it fails.

A failure while evaluating is no answer of the three-valued logic: it ends the whole expression, and the message does
not match, whatever stands around it.
"""

from __future__ import annotations

import math
import re
import sys
from typing import Final

from fetcher.filters.sql_tree import Long, Value
from fetcher.filters.tags import BLANKS

INT_MAX: Final = 0x7FFF_FFFF
LONG_MAX: Final = 0x7FFF_FFFF_FFFF_FFFF
_DIGITS_PLAIN: Final = 19
_BMP_MAX: Final = "\uffff"
_DECIMAL: Final = re.compile(
    r"[+-]?(?:NaN|Infinity|(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?[fFdD]?)"
)
_HEX: Final = re.compile(
    r"([+-]?0[xX](?:[0-9a-fA-F]+\.?|[0-9a-fA-F]*\.[0-9a-fA-F]+)[pP])([+-]?[0-9]+)[fFdD]?"
)
_EXPONENT_MAX: Final = 1 << 30


class Unanswerable(Exception):  # noqa: N818 - no defect, and no error to anyone: the message does not match
    """Java throws here while it evaluates."""


def read_integer(text: str, bound: int) -> int:
    """As ``Integer.valueOf`` and ``Long.valueOf``: any decimal digits of the basic plane, a sign, no blanks.

    Args:
        text: To be read.
        bound: The greatest value; the least is ``-bound - 1``.

    Raises:
        Unanswerable: It is no such number, or out of bounds.
    """
    digits = text[1:] if text[:1] in {"+", "-"} else text
    if not digits.isdecimal() or (not digits.isascii() and max(digits) > _BMP_MAX):
        raise Unanswerable
    if len(digits) > _DIGITS_PLAIN:
        # As many zeros as it likes; Python refuses to read numbers of thousands of digits.
        digits = "".join([str(int(digit)) for digit in digits]).lstrip("0") or "0"
        if len(digits) > _DIGITS_PLAIN:
            raise Unanswerable
    value = -int(digits) if text[0] == "-" else int(digits)
    if not -bound - 1 <= value <= bound:
        raise Unanswerable
    return value


def read_double(text: str) -> float:
    """As ``Double.valueOf``: decimal or hexadecimal, NaN, Infinity, blanks around it.

    Raises:
        Unanswerable: It is no such number.
    """
    text = text.strip(BLANKS)
    if _DECIMAL.fullmatch(text):
        return float(text.rstrip("fFdD") if text[-1:] in "fFdD" else text)
    found = _HEX.fullmatch(text)
    if not found:
        raise Unanswerable
    return _read_hex(found[1], found[2])


def _read_hex(mantissa: str, power: str) -> float:
    """Java takes any exponent; what is too great for a double is infinite, or zero."""
    digits = power.lstrip("+-0") or "0"
    exponent = _EXPONENT_MAX if len(digits) > len(str(_EXPONENT_MAX)) else int(digits)
    sign = -1.0 if mantissa.startswith("-") else 1.0
    try:
        return float.fromhex(f"{mantissa}{'-' if power.startswith('-') else ''}{exponent}")
    except OverflowError:
        return sign * math.inf


def read_boolean(text: str) -> bool:
    """As ``Boolean.valueOf``: everything but ``true`` in any case is false."""
    return text.lower() == "true"


def order_doubles(left: float, right: float) -> int:
    """As ``Double.compare``: NaN equals itself and is above all, and -0.0 is below 0.0."""
    if left < right:
        return -1
    if left > right:
        return 1
    if left == right:
        return int(math.copysign(1.0, left) - math.copysign(1.0, right)) if left == 0 else 0
    return (left != left) - (right != right)  # noqa: PLR0124 - the test for NaN


def order_values(left: Value, right: Value) -> int:
    """Below 0, 0 or above, as ``ComparisonExpression`` orders two values that are not null.

    Raises:
        Unanswerable: A text is not the number that the other side asks for, or a truth value stands left of a text.
    """
    if isinstance(left, str):
        if isinstance(right, str):
            return (left > right) - (left < right)
        return _order(_read_as(left, right), right)
    if isinstance(right, str):
        if isinstance(left, bool):
            raise Unanswerable
        return _order(left, _read_as(right, left))
    if isinstance(left, bool) != isinstance(right, bool):
        return -1
    return _order(left, right)


def _read_as(text: str, model: Value) -> Value:
    """A text as what the other side is."""
    if isinstance(model, bool):
        return read_boolean(text)
    if isinstance(model, float):
        return read_double(text)
    if isinstance(model, Long):
        return read_integer(text, LONG_MAX)
    return read_integer(text, INT_MAX)


def _order(left: Value, right: Value) -> int:
    """Two numbers, or two truth values."""
    assert not isinstance(left, str | None)
    assert not isinstance(right, str | None)
    if isinstance(left, float) or isinstance(right, float):
        return order_doubles(float(left), float(right))  # a long loses its last bits, as in Java
    return (left > right) - (left < right)


assert sys.float_info.max_exp == 1024, "Python's float is Java's double"  # noqa: PLR2004
