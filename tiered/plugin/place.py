"""Where a broker's data lies under a tier's URL: which brokers there are, and which one is meant."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tiered.errors import InvalidError
from tiered.keys import JOURNAL, broker_prefix, unescape_name

if TYPE_CHECKING:
    from backends.base import ObjectStore


_SEGMENTS_MIN = 3
"""Cluster, broker and something below."""


@dataclass(frozen=True, slots=True, order=True)
class Place:
    """A broker's place.

    Attributes:
        cluster: Name of the cluster.
        broker: Name of the broker.
    """

    cluster: str
    broker: str

    @property
    def prefix(self) -> str:
        """Of its keys, ending in a slash."""
        return broker_prefix(self.cluster, self.broker)


def find_places(store: ObjectStore) -> list[Place]:
    """All brokers under the URL, by skipping from journal to journal (two requests a broker, one at the end)."""
    found: list[Place] = []
    after = ""
    while True:
        info = next(iter(store.list("", start_after=after)), None)
        if info is None:
            return found
        place = _place_of(info.key)
        if place is None:
            after = (
                info.key.split("/", 1)[0] + "0"
            )  # '0' follows '/': behind all keys of that folder
            continue
        if next(iter(store.list(place.prefix + JOURNAL)), None) is not None:
            found.append(place)
        after = place.prefix[:-1] + "0"


def _place_of(key: str) -> Place | None:
    segments = key.split("/")
    if len(segments) < _SEGMENTS_MIN or segments[0][8:9] != "_":
        return None
    index = 1
    while index < len(segments) and segments[index - 1].endswith("~+"):
        index += 1
    last = index
    while last < len(segments) and segments[last].endswith("~+"):
        last += 1
    try:
        cluster = unescape_name("/".join(segments[:index])[9:])
        place = Place(cluster, unescape_name("/".join(segments[index : last + 1])))
    except ValueError:
        return None
    return place if key.startswith(place.prefix) else None


def choose_place(store: ObjectStore, cluster: str | None, broker: str | None) -> Place:
    """The only broker there that fits the names given.

    Raises:
        InvalidError: There is none, or more than one.
    """
    if cluster is not None and broker is not None:
        place = Place(cluster, broker)
        if next(iter(store.list(place.prefix + JOURNAL)), None) is None:
            raise InvalidError(f"no tier of broker {broker} of cluster {cluster}", where=store.url)
        return place
    fitting = [
        place
        for place in find_places(store)
        if cluster in {None, place.cluster} and broker in {None, place.broker}
    ]
    if not fitting:
        raise InvalidError(
            "there is no tier here",
            where=store.url,
            do="check the URL; `tiered attach` makes a tier",
        )
    if len(fitting) > 1:
        names = ", ".join(f"{place.cluster}/{place.broker}" for place in fitting)
        raise InvalidError(
            f"several brokers have their data here: {names}",
            where=store.url,
            do="name one with --cluster and --broker",
        )
    return fitting[0]
