"""A tier with something to reclaim, and commands that end at a named point."""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING, Any

from support import captures, command_line, tier_checks
from support.command_line import here, program

from backends.registry import open_store
from tiered.crashpoints import EXIT_CODE, VARIABLE

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager
    from pathlib import Path

    from backends.base import ObjectStore

NAME = "s01-basic"
OF_RECLAIM = frozenset(
    {"plan-saved", "ledger-begun", "object-deleted", "steps-appended", "ledger-ended"}
)
"""Points that only `gc`, `expire`, `delete-topic` and `truncate` reach."""
LITTER = 30
NO_GRACE = ("--grace", "1ms", "--max-deletions", "100000")

_BUNDLE = re.compile("/(bundle|topic|queue)/")


def opened(url: str) -> AbstractContextManager[ObjectStore]:
    from contextlib import closing

    return closing(open_store(url))


def tiered_store(store: Path, url: str) -> None:
    """Tier a captured store in small parts, which sealing merges."""
    here("attach", store, "--to", url, "--once", "--seal", *command_line.SMALL).good()


def litter(url: str) -> set[str]:
    """Objects that the present epoch has made and nobody names; their keys."""
    with opened(url) as store:
        prefix = next(i.key for i in store.list("") if "/journal/" in i.key).split("journal/")[0]
        keys = {
            f"{prefix}queue/lost/{0:010d}/{0:010d}/{at:020d}-{1:010d}-0badcafe-{at:010d}"
            for at in range(LITTER)
        }
        for key in keys:
            store.put_if_absent(key, b"litter")
    time.sleep(1.1)  # S3 tells times in seconds, and everything is to be older than the grace
    return keys


def keys_in(url: str, *, every: bool = False) -> set[str]:
    """Keys of the bundles that there are, or of all objects."""
    with opened(url) as store:
        return {info.key for info in store.list("") if every or _BUNDLE.search(info.key)}


def named(url: str) -> set[str]:
    """Keys that the journal names."""
    rows: Iterator[dict[str, Any]] = (
        here("ls", url, "--objects", "--json").good().document["objects"]
    )
    return {row["key"] for row in rows}


def crash(point: str, *arguments: str | Path) -> None:
    """Run a command that ends at a point; then nothing that is named is gone, and every byte is in order."""
    ran = program(*arguments, env={VARIABLE: point})
    assert ran.code == EXIT_CODE, (point, ran)
    url = str(arguments[1])
    assert named(url) <= keys_in(url), point
    tier_checks.check_sound(url)


def minima(url: str, topic: str) -> list[tuple[int, int]]:
    """[min, commit) of each queue of a topic."""
    found = tier_checks.bounds(url)
    return [bounds for queue, bounds in sorted(found.items()) if queue.topic == topic]


def check_end(url: str, store: Path, gone: set[str]) -> None:
    """All that was not given up is as the broker has it, all garbage can go, and a writer goes on."""
    time.sleep(1.1)
    here("gc", url, *NO_GRACE, "--apply", "-").good()
    assert keys_in(url) == named(url)
    dump = captures.captured(NAME)
    for topic, messages in dump.messages.items():
        assert tier_checks.cat(url, topic) == ([] if topic in gone else messages)
    on = here("attach", store, "--to", url, "--once", "--json").good().document
    assert (on["messages"], on["is_complete"]) == (0, True)
    tier_checks.check_sound(url, store)
