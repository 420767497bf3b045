"""Bodies of benchmark messages: JSON-like text, all of one length, made from a seed and the message's number.

========= ============================================================================
field     content
========= ============================================================================
id        the number, 12 digits
time      born time, UTC ms, 13 digits
event     one of eight words of seven letters, the message's tag too
user      ``u`` and 6 digits; low ones are more frequent
amount    3 digits, a point, 2 digits
token     random hexadecimal digits, which do not compress
text      words, few of them frequent, many of them rare; the rest of the body
========= ============================================================================

Of bodies of 1 KiB one after another, zlib level 6 makes about 2.8 of 1. A body that is too short for all of it is cut.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt
from numpy.lib.stride_tricks import sliding_window_view

if TYPE_CHECKING:
    Longs = npt.NDArray[np.int64]
    Words = npt.NDArray[np.uint64]
    Text = npt.NDArray[np.uint8]

EVENTS: Final = (
    "created",
    "shipped",
    "refused",
    "changed",
    "deleted",
    "expired",
    "delayed",
    "renewed",
)
_ID_DIGITS: Final = 12
_TIME_DIGITS: Final = 13
_USER_DIGITS: Final = 6
_TOKEN_WORDS: Final = 4
_TOKEN_DIGITS: Final = 16 * _TOKEN_WORDS
_USERS: Final = 1_000_000
_CENTS: Final = 100_000
_VOCABULARY: Final = 4_000
_POOL_BYTES_MAX: Final = 4 << 20
_SYLLABLES: Final = (
    *(first + second for first in "bdfghklmnprstwyz" for second in "aeio"),
    *("nd", "rk", "st", "ll"),
)
_ZIPF_EXPONENT: Final = 0.88
_END: Final = '"}'
_USER_SALT, _AMOUNT_SALT, _TEXT_SALT, _EVENT_SALT, _TOKEN_SALT = range(1, 6)
_HEX: Final = np.frombuffer(b"0123456789abcdef", np.uint8)


def mix(seed: int, salt: int, numbers: Longs) -> Words:
    """Random-looking 64-bit words, one for each number, the same for the same arguments (splitmix64)."""
    start = (seed * 0x9E37_79B9 + salt * 0xD1B5_4A32_D192_ED03) % (1 << 64)
    word = numbers.astype(np.uint64) * np.uint64(0x9E37_79B9_7F4A_7C15) + np.uint64(start)
    word = (word ^ (word >> np.uint64(30))) * np.uint64(0xBF58_476D_1CE4_E5B9)
    word = (word ^ (word >> np.uint64(27))) * np.uint64(0x94D0_49BB_1331_11EB)
    mixed: Words = word ^ (word >> np.uint64(31))
    return mixed


def event_numbers(seed: int, numbers: Longs) -> Longs:
    """Which of ``EVENTS`` each message has."""
    return (mix(seed, _EVENT_SALT, numbers) % np.uint64(len(EVENTS))).astype(np.int64)


def digits(values: Longs, count: int) -> Text:
    """Decimal digits, with zeros in front: one row of ``count`` for each value."""
    powers = 10 ** np.arange(count - 1, -1, -1, dtype=np.int64)
    return (values[:, None] // powers % 10 + ord("0")).astype(np.uint8)


def hex_digits(data: Text) -> Text:
    """Lower-case hexadecimal digits of rows of bytes: twice as wide."""
    pairs = np.stack((data >> 4, data & 15), axis=-1)
    return _HEX[pairs].reshape(len(data), -1)


class Bodies:
    """Makes bodies of one length. For any thread.

    Attributes:
        size: Bytes of each.
    """

    def __init__(self, body_bytes: int, seed: int, *, messages: int) -> None:
        """Prepare the words.

        Args:
            body_bytes: Of each body.
            seed: Of everything random.
            messages: How many will be made, about; few messages need fewer words.
        """
        self._seed = seed
        self._head, self._fields = _head()
        self._text_bytes = max(0, body_bytes - len(self._head) - len(_END))
        self.size = body_bytes
        wanted = min(_POOL_BYTES_MAX, messages * self._text_bytes)
        pool = _words(np.random.default_rng(seed), wanted + self._text_bytes + 1)
        self._windows = sliding_window_view(pool, self._text_bytes) if self._text_bytes else None

    def fill(self, out: Text, numbers: Longs, times_ms: Longs) -> None:
        """Write the bodies of messages.

        Args:
            out: One row of ``body_bytes`` for each message; written to.
            numbers: Of the messages.
            times_ms: When they were born, UTC.
        """
        head = np.tile(self._head, (len(numbers), 1))
        for name, column in self._columns(numbers, times_ms).items():
            at = self._fields[name]
            head[:, at : at + column.shape[1]] = column
        if self._windows is None:
            end = np.frombuffer(_END.encode(), np.uint8)
            whole = np.hstack((head, np.tile(end, (len(numbers), 1))))
            out[:] = whole[:, : self.size]
            return
        starts = mix(self._seed, _TEXT_SALT, numbers) % np.uint64(len(self._windows))
        width = len(self._head)
        out[:, :width] = head
        out[:, width:-2] = self._windows[starts]
        out[:, -2:] = np.frombuffer(_END.encode(), np.uint8)

    def _columns(self, numbers: Longs, times_ms: Longs) -> dict[str, Text]:
        seed = self._seed
        events = np.frombuffer("".join(EVENTS).encode(), np.uint8).reshape(len(EVENTS), -1)
        share = mix(seed, _USER_SALT, numbers) / 2.0**64
        cents = (mix(seed, _AMOUNT_SALT, numbers) % np.uint64(_CENTS)).astype(np.int64)
        tokens = np.stack(
            [mix(seed, _TOKEN_SALT + index, numbers) for index in range(_TOKEN_WORDS)], axis=1
        )
        return {
            "id": digits(numbers, _ID_DIGITS),
            "time": digits(times_ms, _TIME_DIGITS),
            "event": events[event_numbers(seed, numbers)],
            "user": digits((share**3 * _USERS).astype(np.int64), _USER_DIGITS),
            "whole": digits(cents // 100, 3),
            "cents": digits(cents % 100, 2),
            "token": hex_digits(tokens.view(np.uint8).reshape(len(numbers), -1)),
        }


def _head() -> tuple[Text, dict[str, int]]:
    """What stands in front of the words, and where the fields stand in it."""
    text = ""
    fields: dict[str, int] = {}
    for before, name, width in (
        ('{"id":"', "id", _ID_DIGITS),
        ('","time":', "time", _TIME_DIGITS),
        (',"event":"', "event", len(EVENTS[0])),
        ('","user":"u', "user", _USER_DIGITS),
        ('","amount":"', "whole", 3),
        (".", "cents", 2),
        ('","token":"', "token", _TOKEN_DIGITS),
    ):
        fields[name] = len(text) + len(before)
        text += before + "0" * width
    return np.frombuffer((text + '","text":"').encode(), np.uint8), fields


def _words(rng: np.random.Generator, size: int) -> Text:
    """At least ``size`` bytes of words with blanks between them, ranks after Zipf."""
    lengths = rng.integers(1, 5, _VOCABULARY)
    vocabulary = np.array(
        ["".join(rng.choice(_SYLLABLES, length)) for length in lengths], dtype=object
    )
    weights = 1 / np.arange(1, _VOCABULARY + 1) ** _ZIPF_EXPONENT
    count = size // 3 + 1  # a word and its blank have at least three bytes
    drawn = rng.choice(_VOCABULARY, count, p=weights / weights.sum())
    text = " ".join(vocabulary[drawn])
    return np.frombuffer(text[:size].encode(), np.uint8)
