"""Where a broker's data lies under a tier's URL: which brokers there are, and which one is meant.

A place without a journal that has data objects is one as well, so that a lost journal is told, and never taken for a tier
that is not there: who opens it (``tiered.journal.reader``) refuses it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tiered.errors import InvalidError
from tiered.keys import DATA_ROOTS, JOURNAL, LEASE, PREFIX_BYTES_MAX, broker_prefix, unescape_name

if TYPE_CHECKING:
    from collections.abc import Sequence

    from backends.base import ObjectStore


_LISTED_MAX = 1000
"""A page of a listing; behind so many keys of others a new listing skips the rest of their folder."""
SIGNS = (JOURNAL, *DATA_ROOTS)
"""A broker has its data where one of these has an object."""
ANY_SIGN = (*SIGNS, LEASE)
"""For who rebuilds: a lease that remembers a journal may be all that is left."""
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


def require_fitting(url: str, place: Place) -> None:
    """Refuse a place below which not every key would fit into what all servers take.

    Asked before anything is written: the first key that is too long would come with the first long topic, much later.

    Args:
        url: Of the tier, as its opened store tells it.
        place: Below it.

    Raises:
        InvalidError: The path of the URL and the names of cluster and broker are too long together.
    """
    size = len((_key_path(url) + place.prefix).encode("utf-8", "surrogateescape"))
    if size > PREFIX_BYTES_MAX:
        raise InvalidError(
            f"the keys of this tier would begin with {size} bytes, and {PREFIX_BYTES_MAX} leave"
            " room for every topic",
            where=f"{url}/{place.prefix}",
            do="shorten the path of the URL, or give shorter names with --cluster and --broker",
        )


def _key_path(url: str) -> str:
    """What a tier's URL adds to each key: the path in a bucket. A folder's own path is in no key."""
    if not url.startswith("s3://"):
        return ""
    path = url.removeprefix("s3://").partition("/")[2]
    return f"{path}/" if path else ""


def find_places(store: ObjectStore, signs: Sequence[str] = SIGNS) -> list[Place]:
    """All brokers under the URL, by skipping from one to the next (two requests a broker, one at the end).

    Args:
        store: The tier's.
        signs: A broker has its data where there is an object below one of these; the first is looked for first.
    """
    found: list[Place] = []
    after = ""
    while True:
        for listed, info in enumerate(store.list("", start_after=after), 1):
            place = None if info.key <= after else _place_of(info.key)
            if place is not None:
                if _has_any(store, place, signs):
                    found.append(place)
                after = place.prefix[:-1] + "0"  # '0' follows '/': behind all keys of that folder
                break
            after = max(after, info.key.split("/", 1)[0] + "0" if "/" in info.key else info.key)
            if listed >= _LISTED_MAX:
                break
        else:
            return found


def _has_any(store: ObjectStore, place: Place, signs: Sequence[str]) -> bool:
    listings = (store.list(place.prefix + sign) for sign in signs)
    return any(next(iter(listing), None) is not None for listing in listings)


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


def choose_place(
    store: ObjectStore,
    cluster: str | None,
    broker: str | None,
    *,
    signs: Sequence[str] = SIGNS,
) -> Place:
    """The only broker there that fits the names given; its journal may be lost.

    Args:
        store: The tier's.
        cluster: Its name; None: any.
        broker: Likewise.
        signs: See ``find_places``.

    Raises:
        InvalidError: There is none, or more than one.
    """
    if cluster is not None and broker is not None:
        place = Place(cluster, broker)
        if not _has_any(store, place, signs):
            raise InvalidError(f"no tier of broker {broker} of cluster {cluster}", where=store.url)
        return place
    fitting = [
        place
        for place in find_places(store, signs)
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
