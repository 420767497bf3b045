"""``tiered archive --body``: what message bodies become."""

from __future__ import annotations

from typing import TYPE_CHECKING

from backends.local_files import read_regular
from tiered.cli.values import counted
from tiered.errors import InvalidError

if TYPE_CHECKING:
    from tiered.archive.body.wishes import Wishes
    from tiered.archive.job import Result
    from tiered.cli.call import Call


def read_options(call: Call) -> Wishes:
    """What the options wish.

    Raises:
        InvalidError: They make no sense, or name no file.
    """
    from tiered.archive.body.wishes import read_wishes

    return read_wishes(
        call.texts("body"),
        call.texts("body-schema"),
        call.texts("body-message"),
        has_records=call.flag("raw-records"),
        read=_read,
    )


def say_bodies(call: Call, result: Result) -> None:
    """Tell what did not become columns."""
    if result.misfits:
        call.say(
            f"tiered: the bodies of {counted(result.misfits, 'message')} did not fit their topic's columns, which are"
            " null there; column body_error says so, and _bad/ has the records with reasons"
        )
    if result.unknown:
        call.say(
            f"tiered: no columns can be inferred for {', '.join(result.unknown)}: no JSON object among the first messages;"
            " give --body-schema"
        )


def _read(name: str) -> bytes:
    try:
        return read_regular(name)
    except OSError as error:
        raise InvalidError(
            f"a schema of bodies cannot be read: {error.strerror}", where=name
        ) from None
