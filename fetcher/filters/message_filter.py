"""What a filter can do, and the error of an expression that is none."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final, Protocol, TypeAlias

from tiered.errors import InvalidError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from tiered.local.face import RecordBatch

Properties: TypeAlias = Mapping[str, str] | Mapping[bytes, bytes]
"""The properties of one message by name, as text or as stored (UTF-8)."""

EXPRESSION_CHARS_MAX: Final = 1 << 16
"""Of either kind. RocketMQ has no bound of its own; 64 Ki characters are a list of some thousand texts."""
_EXCERPT_CHARS = 40


class Filter(Protocol):
    """Which messages are wanted. Immutable; for any number of threads."""

    @property
    def expression(self) -> str:
        """As it was given."""
        ...

    @property
    def tag_codes(self) -> npt.NDArray[np.int32] | None:
        """An index entry with none of these tag codes is not wanted (unless it is of an inner batch); None: any."""
        ...

    def matches(self, properties: Properties) -> bool:
        """Whether a message with these properties is wanted. Never raises."""
        ...

    def select(self, batch: RecordBatch) -> npt.NDArray[np.int64]:
        """Numbers of the items that are wanted, ascending.

        Holes are never wanted. An item of an inner batch counts by the inner message that it is.

        Raises:
            DataError: A record or inner batch is damaged.
        """
        ...


class FilterError(InvalidError):
    """An expression that is none.

    Attributes:
        position: Where, in characters from 0; the expression's length for its end.
        expected: What could stand there, in words; may be empty.
    """

    def __init__(self, what: str, expression: str, position: int, *, expected: str = "") -> None:
        """Say what is wrong at a place of the expression."""
        before = expression[max(0, position - _EXCERPT_CHARS) : position]
        behind = expression[position : position + _EXCERPT_CHARS]
        super().__init__(
            what,
            where=f"filter expression, character {position + 1}: {before!r}, then {behind!r}",
            do=f"expected {expected}" if expected else "",
        )
        self.position = position
        self.expected = expected
