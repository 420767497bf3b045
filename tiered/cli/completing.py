"""What a shell completes beside options: topics and brokers, of the tier or the store that the command line names so far.

A shell waits for it, and shows nothing of what goes wrong: so it asks for a moment only, and what fails completes nothing.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, Final

from backends.s3_settings import S3Options
from tiered.clock import SystemClock

if TYPE_CHECKING:
    from collections.abc import Iterable

    import click

    from backends.base import ObjectStore

TOPICS: Final = frozenset({"topic", "topics", "exclude"})
BROKERS: Final = frozenset({"broker", "brokers", "cluster"})
GIVE_UP_S: Final = 3.0


def names_for(context: click.Context, field: str, incomplete: str) -> list[str]:
    """What may stand for a value of a field, or of a list of such; nothing when nobody knows."""
    before, comma, last = incomplete.rpartition(",")
    found: Iterable[str] = ()
    with contextlib.suppress(Exception):  # a shell has no use for an error
        found = _topics(context) if field in TOPICS else _brokers(context, field)
    return [before + comma + name for name in sorted(found) if name.startswith(last)]


def _given(context: click.Context, name: str) -> Any:  # noqa: ANN401 (of any kind)
    """A parameter of the command, or one that stands further left."""
    at: click.Context | None = context
    while at is not None:
        if at.params.get(name):
            return at.params[name]
        at = at.parent
    return None


def _objects(context: click.Context) -> ObjectStore | None:
    from tiered.api.stores import open_for_reading

    url = _given(context, "url") or _given(context, "to")
    if not url:
        return None
    names = ("endpoint_url", "region", "profile", "path_style", "ca_bundle")
    options = S3Options(**{name: _given(context, name) for name in names}, timeout_s=GIVE_UP_S)
    store = open_for_reading(url, options, SystemClock(), give_up_s=GIVE_UP_S).store
    context.call_on_close(store.close)
    return store


def _topics(context: click.Context) -> set[str]:
    directory = None if _given(context, "url") else _given(context, "store")
    if directory:
        from tiered.local.layout import read_topics

        return set(read_topics(directory).names or ())
    from tiered.api.broker_place import choose_place
    from tiered.log.reader import TierReader

    store = _objects(context)
    if store is None:
        return set()
    place = choose_place(store, _given(context, "cluster"), _given(context, "broker"))
    reader = TierReader(store, place.prefix)
    reader.refresh()
    return {queue.topic for queue in reader.state.queues}


def _brokers(context: click.Context, field: str) -> set[str]:
    from tiered.api.broker_place import find_places

    store = _objects(context)
    places = find_places(store) if store is not None else []
    return {place.cluster if field == "cluster" else place.broker for place in places}
