"""The errors that callers and operators see, by what to do about them.

============ ==================================================== =========
kind         what the operator does                               exit code
============ ==================================================== =========
closed       nothing: the caller used a thing after closing it    70
fenced       find out which writer is the right one               4
unavailable  mend the endpoint, the network or the permissions    3
invalid      correct the argument, configuration or directory     2
data         look at the damage that is named; restore or repair  5
internal     report it: a defect of ours                          70
============ ==================================================== =========
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from tiered.version import __version__

if TYPE_CHECKING:
    from collections.abc import Iterable


class TieredStoreError(Exception):
    """Base of all. The message says what, where and what to do."""

    kind: ClassVar[str] = "internal"  # one of the six words of the table above
    exit_code: ClassVar[int] = 70  # what the command line ends with
    reason: ClassVar[str] = "defect"  # for programs: one of the list in docs/json.md

    def __init__(self, what: str, *, where: str = "", do: str = "") -> None:
        """Make an error ``WHAT (WHERE); DO THIS``.

        Args:
            what: What went wrong, as a clause without a full stop.
            where: File and offset, key, URL or option; may be empty.
            do: What to do about it; may be empty.
        """
        super().__init__(what + (f" ({where})" if where else "") + (f"; {do}" if do else ""))
        self.what = what
        self.where = where
        self.do = do


class ClosedError(TieredStoreError):
    """Used after it was closed."""

    kind = "closed"
    reason = "closed"


class FencedError(TieredStoreError):
    """Another writer has taken over, or holds the lease."""

    kind = "fenced"
    exit_code = 4
    reason = "fenced"


class StoreUnavailableError(TieredStoreError):
    """An endpoint or object store cannot be reached, or refuses us."""

    kind = "unavailable"
    exit_code = 3
    reason = "unavailable"


class InvalidError(TieredStoreError):
    """Wrong usage, configuration or argument; a path, topic, queue or tier that does not exist or is not one."""

    kind = "invalid"
    exit_code = 2
    reason = "invalid"


class ExpiredError(InvalidError):
    """What was asked for has expired while it was being read."""

    reason = "expired"

    def __init__(self, what: str, next_offset: int, *, where: str = "") -> None:
        super().__init__(what, where=where, do=f"read on from offset {next_offset}")
        self.next_offset = next_offset  # the first queue offset that can still be read


class OtherVersionError(InvalidError):
    """What lies there is as it was written, and of a form that this version does not know: no damage.

    Nobody repairs, rebuilds or collects what is of another version.
    """

    reason = "other_version"

    def __init__(self, what: str, *, where: str = "") -> None:
        super().__init__(
            f"another version of tiered has written this: {what}",
            where=where,
            do=f"use the version that wrote it, or a newer one; this is {__version__}, which leaves it as it is",
        )


class MovedOnError(InvalidError):
    """A plan that is not carried out, since the tier is not any more what it was made of."""

    exit_code = 1
    reason = "moved_on"


class DataError(TieredStoreError):
    """A tier or store that cannot be opened or read at the asked place because it is damaged."""

    kind = "data"
    exit_code = 5
    reason = "damaged"


class JournalLostError(DataError):
    """A journal is gone, or has lost its end: what lies beside it tells of more than it does."""

    reason = "journal_lost"


class InternalError(TieredStoreError):
    """A defect of ours."""


def nearest(word: str, known: Iterable[str], likeness: float = 0.6) -> str:
    """The known word that was most likely meant, for advice; "" when none is as like as that (1: the same)."""
    import difflib  # noqa: PLC0415 (start-up loads only what is needed)

    folded = {one.casefold(): one for one in sorted(known)}
    found = difflib.get_close_matches(word.casefold(), folded, 1, likeness)
    return folded[found[0]] if found else ""


def no_topic(topic: str, known: Iterable[str], *, where: str) -> InvalidError:
    """The error of a topic that a tier has not; with the name that was most likely meant."""
    near = nearest(topic, known)
    return InvalidError(
        f"the tier has no topic {topic}",
        where=where,
        do=f"did you mean {near!r}?" if near else "`tiered ls URL` lists the topics",
    )
