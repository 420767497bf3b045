"""``tiered query`` of an archive: what it finds there, and how little it reads for it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from tiered.cli.values import counted
from tiered.errors import InvalidError

if TYPE_CHECKING:
    from backends.base import ObjectStore
    from tiered.cli.call import Call

THREADS = 8
"""Files looked at at once."""


def is_archive(store: ObjectStore) -> bool:
    """Whether the place has an archive's log; one request."""
    from tiered.archive.model import LOG

    return next(iter(store.list(LOG)), None) is not None


def look(call: Call, archive: ObjectStore) -> list[bytes]:
    """The messages as lines of JSON, newest first.

    Raises:
        InvalidError: The archive has no such topic, or bodies are wanted as they were stored.
        DataError: The log or a file is damaged.
        BackendError: The store failed.
    """
    from tiered.archive.query.lines import lines
    from tiered.archive.query.lookup import lookup
    from tiered.archive.selection import MAX, MIN, Selection

    if call.flag("raw-body"):
        raise InvalidError("an archive has bodies unpacked", do="leave out --raw-body")
    low, high = call.time_ms("from"), call.time_ms("until")
    wanted = Selection(key=call.words("key")).among("topic", [call.argument("topic")])
    wanted = wanted.within(
        "store_ts", MIN if low is None else low * 1000, MAX if high is None else high * 1000 - 1
    )
    with ThreadPoolExecutor(THREADS, "tiered-query") as pool:
        found = lookup(archive, wanted, count=call.whole("count"), spread=pool.map)
    call.say(
        f"tiered: read {counted(found.groups_read, 'row group')} of"
        f" {counted(found.files_read, 'file')}, of {counted(found.files, 'file')} of the topic"
    )
    return list(lines(found.rows))
