"""Where a broker's data lies under a tier's URL: which brokers there are, which one is meant, which store belongs there.

A place without a journal that has data objects is one as well, so that a lost journal is told, and never taken for a tier
that is not there: who opens it (``tiered.journal.replay``) refuses it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from backends.errors import web_advice
from backends.lazy_dataclass import dataclass
from backends.registry import folder_of, probe
from tiered.errors import ClosedError, FencedError, InvalidError
from tiered.keys import (
    BUNDLE,
    DATA_ROOTS,
    JOURNAL,
    LEASE,
    MIRROR,
    MOUNT,
    PREFIX_BYTES_MAX,
    RETRIES,
    TIMER,
    broker_prefix,
    mount_prefix,
    unescape_name,
)

if TYPE_CHECKING:
    import random
    import threading
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from backends.base import Capabilities, ObjectStore
    from tiered.clock import Clock
    from tiered.journal.lease import Lease, LeaseState
    from tiered.local.interface import StoreIdentity

_LISTED_MAX = 1000
"""A page of a listing; behind so many keys of others a new listing skips the rest of their folder."""
_RETRY_BUNDLE = f"/{RETRIES}{BUNDLE}"
SIGNS = (JOURNAL, *DATA_ROOTS)
"""A broker has its data where one of these has an object."""
ANY_SIGN = (*SIGNS, LEASE)
"""For who rebuilds: a lease that remembers a journal may be all that is left."""
_SEGMENTS_MIN = 3
"""Cluster, broker and something below."""


@dataclass(frozen=True, slots=True, order=True)
class Place:
    """A broker's place."""

    cluster: str  # name of the cluster
    broker: str  # name of the broker

    @property
    def prefix(self) -> str:
        """Of its keys, ending in a slash."""
        return broker_prefix(self.cluster, self.broker)


@dataclass(frozen=True, slots=True, order=True)
class RetryPlace(Place):
    """The place of what was sent back to a mount of a broker's tier."""

    mount: str  # its name, with ``/address`` of one that is shared

    @property
    def prefix(self) -> str:
        """Of its keys, ending in a slash."""
        name, _, member = self.mount.partition("/")
        return mount_prefix(broker_prefix(self.cluster, self.broker), name, member) + RETRIES


def retry_places(store: ObjectStore, place: Place) -> list[RetryPlace]:
    """The retry logs of a broker's mounts, sorted."""
    return [
        RetryPlace(place.cluster, place.broker, mount)
        for mount, below in mounts_below(store, place.prefix)
        if below == RETRIES
    ]


def mounts_below(store: ObjectStore, prefix: str) -> list[tuple[str, str]]:
    """Mounts that have a journal below a broker's prefix, and for that of its retry log ``RETRIES``, else nothing. Sorted.

    Of one that is shared the name has ``/address``.
    """
    found: set[tuple[str, str]] = set()
    for key in _keys_of_mounts(store, prefix + MOUNT):
        at, journal, _ = key.removeprefix(prefix + MOUNT).partition(f"/{JOURNAL}")
        if journal:
            # The log's journal, or the second copies of its checkpoints; a mount's own has none.
            own = at.removesuffix(f"/{MIRROR[:-1]}").removesuffix(f"/{RETRIES[:-1]}")
            name, _, member = own.partition("/shared/")
            told = "/".join(map(unescape_name, (name, member) if member else (name,)))
            found.add((told, RETRIES if own != at else ""))
    return sorted(found)


def _keys_of_mounts(store: ObjectStore, prefix: str) -> Iterator[str]:
    """Keys below it, but of the bundles of a retry log, which may be many, a page at most."""
    after = ""
    while True:
        for listed, info in enumerate(store.list(prefix, start_after=after), 1):
            yield info.key
            at, bundle, _ = info.key.partition(_RETRY_BUNDLE)
            if bundle and listed >= _LISTED_MAX:
                after = f"{at}{bundle[:-1]}0"  # behind all of them
                break
        else:
            return


def choose_retries(
    store: ObjectStore, cluster: str | None, broker: str | None, mount: str
) -> RetryPlace:
    """The retry log of a mount of the only broker there that fits the names given; ``InvalidError``: it has none."""
    place = choose_place(store, cluster, broker)
    there = retry_places(store, place)
    wanted = RetryPlace(place.cluster, place.broker, mount)
    if wanted not in there:
        known = ", ".join(one.mount for one in there) or "no mount"
        raise InvalidError(
            f"nothing was sent back to a mount {mount!r}, but to {known}",
            where=store.url,
            do="name one of these",
        )
    return wanted


def require_fitting(url: str, place: Place) -> None:
    """Refuse a place below which not every key would fit into what all servers take.

    Asked before anything is written: the first key that is too long would come with the first long topic, much later.

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
            after = max(after, _behind(info.key))
            if listed >= _LISTED_MAX:
                break
        else:
            return found


def _behind(key: str) -> str:
    """The last key that may be passed over with one that is no broker's.

    Not its whole folder where that is a cluster's: a file that a person or a file manager leaves beside the brokers
    must hide none of them.
    """
    folder, slash, rest = key.partition("/")
    if not slash:
        return key
    if folder[8:9] != "_":
        return folder + "0"
    beside, deeper, _ = rest.partition("/")
    return f"{folder}/{beside}0" if deeper and "~+" not in folder + beside else key


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
    store: ObjectStore, cluster: str | None, broker: str | None, *, signs: Sequence[str] = SIGNS
) -> Place:
    """The only broker there that fits the names given; its journal may be lost.

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
        raise no_tier(store)
    if len(fitting) > 1:
        names = ", ".join(f"{place.cluster}/{place.broker}" for place in fitting)
        raise InvalidError(
            f"several brokers have their data here: {names}",
            where=store.url,
            do="name one with --cluster and --broker",
        )
    return fitting[0]


def no_tier(store: ObjectStore) -> InvalidError:
    """There is none; timers alone are said to be there, and a broker's store whose path was given."""
    from tiered.local.sources import kind_of  # noqa: PLC0415 (start-up loads only what is needed)

    folder = folder_of(store.url)
    kind = kind_of(str(folder)) if folder else None
    if kind:
        what, do = (
            f"this is {kind}, not a tier",
            "give the tier's URL; `tiered attach` makes a tier of it",
        )
    elif find_places(store, (TIMER + JOURNAL,)):
        what, do = "there are timers here, and no topics", "`tiered timer ls URL` lists them"
    else:
        what = "there is no tier here"
        do = web_advice(store.url) or "check the URL; `tiered attach` makes a tier"
    return InvalidError(what, where=store.url, do=do)


# -- does this store belong there ------------------------------------------------------------------


def require_conditional_writes(
    store: ObjectStore, rng: random.Random, where: str, *, below: str = ""
) -> Capabilities:
    """Refuse an object store on which two writers could not be kept apart; what the store can do.

    Args:
        below: Prefix of these objects, for who may write only there.

    Raises:
        InvalidError: It does not write conditionally.
    """
    found = probe(store, f"{rng.getrandbits(64):016x}", below=below)
    require_able(found, where)
    return found


def require_able(able: Capabilities, where: str) -> None:
    """Refuse a store that cannot write conditionally, by what it says of itself or was found out about it."""
    if not (able.put_if_absent and able.compare_and_set):
        raise InvalidError(
            "this store does not write conditionally, so two writers could not be kept apart",
            where=where,
            do="use AWS S3, MinIO, versitygw, LocalStack, or a local folder",
        )


def store_document(identity: StoreIdentity, place: Place) -> dict[str, Any]:
    """What a tier remembers of the local store that it belongs to."""
    return {
        "cluster": place.cluster,
        "broker": place.broker,
        "store_id": identity.store_id,
        "kind": identity.kind,
    }


_SOURCES = {"kafka": "Kafka", "jmq": "JoyQueue"}


def require_rocketmq(kind: object, what: str, where: str, do: str = "leave it out") -> None:
    """Refuse what only stores of RocketMQ have.

    Args:
        kind: Of the store, or of that which a tier belongs to; None: it does not say, so it is one of these.
        what: What needs such a store, as a clause.
    """
    if kind in _SOURCES:
        raise InvalidError(f"{what}, and this one is {_SOURCES[str(kind)]}'s", where=where, do=do)


def require_same_store(known: Mapping[str, Any], mine: Mapping[str, Any], where: str) -> None:
    """Refuse a tier of another store.

    Args:
        known: What the tier remembers; empty when it is new.
        mine: What the local store is.
    """
    known = {
        "cluster": "",
        "store_id": "",
        **known,
    }  # a rebuilt journal may know that the broker is gone, and no more
    if known["cluster"] and (known["cluster"], known["broker"]) != (
        mine["cluster"],
        mine["broker"],
    ):
        raise InvalidError(  # as where a folder takes names for one that differ only in case
            f"this tier belongs to {known['cluster']}/{known['broker']},"
            f" not to {mine['cluster']}/{mine['broker']}",
            where=where,
            do="choose another URL, or name this broker's place with --cluster and --broker",
        )
    if known["store_id"] and mine["store_id"] and known["store_id"] != mine["store_id"]:
        raise InvalidError(
            f"this tier belongs to another store ({known['cluster']}/{known['broker']},"
            f" id {known['store_id']}); this one has id {mine['store_id']}",
            where=where,
            do="choose another URL, or name this broker's place with --cluster and --broker",
        )


# -- timers --------------------------------------------------------------------------------------
#
# Where a broker's timers lie: ``timer/`` below its prefix, with a journal, a lease and bundles of their own.
#
# So taking and handing over timers never fences the writer of the broker's topics, and a reader of topics never meets a
# timer; everything that works on a tier works on this one as well.

TIMER_SIGNS: Final = (TIMER + JOURNAL, *(TIMER + sign for sign in SIGNS))
"""A broker has timers where one of these has an object."""
TIMER_ANY_SIGN: Final = (*TIMER_SIGNS, TIMER + LEASE)
"""For who rebuilds: a lease that remembers a journal may be all that is left."""


@dataclass(frozen=True, slots=True, order=True)
class TimerPlace(Place):
    """The place of a broker's timers."""

    @property
    def prefix(self) -> str:
        """Of their keys, ending in a slash."""
        return Place(self.cluster, self.broker).prefix + TIMER


def timers_of(place: Place) -> TimerPlace:
    """The place of a broker's timers."""
    return TimerPlace(place.cluster, place.broker)


def choose_timers(
    store: ObjectStore,
    cluster: str | None,
    broker: str | None,
    signs: Sequence[str] = TIMER_SIGNS,
) -> TimerPlace:
    """The only broker there that has timers and fits the names given."""
    try:
        return timers_of(choose_place(store, cluster, broker, signs=signs))
    except InvalidError as error:
        if "several" in error.what:
            raise
        raise InvalidError(
            "there are no timers here",
            where=store.url,
            do="check the URL; `tiered timer import STORE --to URL` brings timers",
        ) from error


def take_lease(
    lease: Lease,
    clock: Clock,
    stop: threading.Event,
    *,
    wait: bool,
    announce: Callable[[LeaseState], None] = lambda _state: None,
) -> None:
    """Take a lease, and wait for it if asked to, until told to stop.

    Raises:
        ClosedError: ``stop`` was set, and another has it.
        FencedError: Another has it, and we do not wait.
    """
    try:
        lease.acquire(wait=wait, announce=announce, stop=lambda seconds: clock.wait(stop, seconds))
    except FencedError as error:
        if stop.is_set():
            raise ClosedError(
                "told to stop while another's lease was waited for", do="run it again"
            ) from error
        raise
