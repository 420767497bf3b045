"""Filters by tag: ``A||B``, or ``*`` for every message.

By tag code in the index first, then by the text of the ``TAGS`` property, since different tags may share a code.
"""

from __future__ import annotations

from dataclasses import field
from typing import TYPE_CHECKING, Final

import numpy as np

from backends.lazy_dataclass import dataclass
from fetcher.filters.batch import (
    EXPRESSION_CHARS_MAX,
    FilterError,
    Properties,
    lookup,
    select_items,
)
from tiered.format.properties import TAGS, tag_hash

if TYPE_CHECKING:
    import numpy.typing as npt

    from tiered.local.interface import RecordBatch

ALL: Final = "*"
_SEPARATOR: Final = "||"
BLANKS: Final = "".join(map(chr, range(0x21)))
"""What Java's ``trim`` takes off: other blanks, such as U+00A0, are part of a tag."""


@dataclass(frozen=True, slots=True)
class TagFilter:
    """Messages with one of some tags; see ``Filter``."""

    expression: str  # as it was given
    names: frozenset[str] | None  # the tags; None for every message
    tag_codes: npt.NDArray[np.int32] | None = field(compare=False)
    """Their codes; None for every message."""

    def matches(self, properties: Properties) -> bool:
        return self.names is None or lookup(properties, TAGS) in self.names

    def select(self, batch: RecordBatch) -> npt.NDArray[np.int64]:
        """See ``Filter``. For ``*`` nothing is decoded."""
        names = self.names
        if names is None:
            return np.flatnonzero(batch.sizes > 0)
        return select_items(batch, self.tag_codes, (TAGS,), lambda row: row[0] in names)


def compile_tags(expression: str, *, strict: bool) -> TagFilter:
    """Make a filter of ``A||B``, with or without blanks around tags; an empty text is ``*``.

    ``*`` is every message only when it stands alone. ``strict`` refuses an expression that names no tag, which no message
    matches. FilterError: it is too long, consists of ``||`` alone, or names no tag.
    """
    if len(expression) > EXPRESSION_CHARS_MAX:
        what = f"the expression has more than {EXPRESSION_CHARS_MAX} characters"
        raise FilterError(what, expression, EXPRESSION_CHARS_MAX)
    if expression in {"", ALL}:
        return TagFilter(expression, None, None)
    parts = [name.strip(BLANKS) for name in expression.split(_SEPARATOR)]
    names = frozenset(parts) - {""}
    if not names and (strict or not expression.replace(_SEPARATOR, "")):
        raise FilterError("names no tag", expression, 0, expected="tags between ||, or *")
    codes = np.array(sorted(map(tag_hash, names)), np.int32)
    return TagFilter(expression, names, codes)
