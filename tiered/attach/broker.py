"""The broker whose store is attached: which place of a tier is its, and where its log ends, by its own word.

Names: those that are given, else those that the store says, else what the tier remembers, else ``DefaultCluster`` and
``broker``, which is said. A store that names several is refused until it is told which. A store that has just been made says
nothing of its broker until the broker's first topic is there. Names taken from nothing would be wrong for good, so a
follower waits for them: nothing can be missed meanwhile, since a store that has messages is taken as it is.

The log's end: ``GET_BROKER_RUNTIME_INFO``, in frames of ``tiered.format.remoting``; the answer's body is JSON with
``commitLogMaxOffset``. A broker that does not answer is asked again after a second at the earliest and is not an error: what
only it could confirm keeps waiting. Nothing is kept open between questions. For one thread at a time (the local store's
lock sees to it).
"""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING

from backends.local_files import LOST_AND_FOUND
from backends.registry import folder_of
from tiered.api.broker_place import Place, find_places, require_fitting
from tiered.errors import ClosedError, DataError, InvalidError
from tiered.local.layout import BATCH_DIRECTORY, LOG_DIRECTORY, QUEUE_DIRECTORY
from tiered.local.rocketmq import RocketMQOptions
from tiered.local.sources import folders_of, kind_of, open_store

if TYPE_CHECKING:
    import threading

    from backends.base import ObjectStore
    from tiered.attach.settings import AttachSettings
    from tiered.clock import Clock
    from tiered.local.interface import LocalStore, StoreIdentity

_LOG = logging.getLogger("tiered.attach")
GET_BROKER_RUNTIME_INFO = 28
ASK_AGAIN_S = 1.0
TIMEOUT_S = 2.0


class BrokerOffsets:
    """Knows the end of a broker's log, at most a second old."""

    def __init__(self, host: str, port: int, clock: Clock) -> None:
        self._host = host
        self._port = port
        self._clock = clock
        self._asked_s = float("-inf")
        self._known = 0
        self._has_warned = False

    def max_offset(self) -> int:
        """Physical offset behind the last record of the broker's log; 0 when it does not answer.

        What it said before does not count then: it may be starting, and have cut its log.
        """
        now_s = self._clock.monotonic_s()
        if now_s - self._asked_s < ASK_AGAIN_S:
            return self._known
        self._asked_s = now_s
        try:
            self._known = ask_max_offset(self._host, self._port)
            self._has_warned = False
        except (OSError, ValueError) as error:
            self._known = 0
            if not self._has_warned:
                _LOG.warning("broker %s:%d does not answer: %s", self._host, self._port, error)
            self._has_warned = True
        return self._known


def ask_max_offset(host: str, port: int, timeout_s: float = TIMEOUT_S) -> int:
    """One question, on a connection of its own.

    Raises:
        OSError: The broker cannot be reached, or did not answer in time.
        ValueError: Its answer is none.
    """
    from tiered.format.remoting import (  # noqa: PLC0415 (start-up loads only what is needed)
        Command,
        RemotingClient,
    )

    with RemotingClient(host, port, timeout_s) as connection:
        answer = connection.ask(Command(GET_BROKER_RUNTIME_INFO, language="PYTHON"))
    if answer.code:
        raise ValueError(f"it refused with code {answer.code}: {answer.remark}")
    table = json.loads(answer.text()).get("table", {})
    if "commitLogMaxOffset" not in table:
        raise ValueError("its answer has no commitLogMaxOffset")
    return int(table["commitLogMaxOffset"])


# -- names -----------------------------------------------------------------------------------------


_FOLDERS = (LOG_DIRECTORY, QUEUE_DIRECTORY, BATCH_DIRECTORY, "compaction", "config", "index")
DEFAULT = Place("DefaultCluster", "broker")
_LOOK_AGAIN_S = 0.5
_NAMELESS = (
    "does not tell its broker's name before its first topic is made: waiting for it"
    " (or give --cluster and --broker)"
)
_EMPTY = "is empty: waiting for a broker to begin its store there"


def open_named(
    directory: str, settings: AttachSettings, clock: Clock, stopping: threading.Event
) -> LocalStore:
    """Open a store directory; with ``waits_for_names`` look again while it cannot tell its names yet.

    Raises:
        ClosedError: ``stopping`` was set.
    """
    options = RocketMQOptions(
        cluster=settings.cluster,
        broker=settings.broker,
        broker_max_offset=settings.broker_max_offset,
        stop=stopping.is_set,
        with_timers=settings.timers_near_ms is not None,
    )
    is_said = False
    while True:
        is_bare = settings.waits_for_names and _is_bare(directory)
        if not is_bare:
            local = open_store(directory, clock=clock, options=options)
            if not settings.waits_for_names or not is_nameless(local):
                return local
            local.close()
        if not is_said:
            _LOG.warning("%s %s", directory, _EMPTY if is_bare else _NAMELESS)
            is_said = True
        if clock.wait(stopping, _LOOK_AGAIN_S):
            raise ClosedError("told to stop, before the store had told its names", where=directory)


def _is_bare(directory: str) -> bool:
    """A directory with nothing in it but directories with nothing in them: what is there before a broker's first start.

    Where it is a mount point ``lost+found`` is there, too, which only root may look into.
    """
    try:
        found = [one for one in Path(directory).iterdir() if one.name != LOST_AND_FOUND]
        return Path(directory).is_dir() and not any(
            not one.is_dir() or any(one.iterdir()) for one in found
        )
    except OSError:
        return False  # its opener reports it


def require_apart(directory: str, url: str) -> None:
    """Refuse a tier inside the store directory, in which nothing is ever written (I10), or where its links lead."""
    named = folder_of(url)
    if named is None:
        return
    stores = [Path(folder).resolve() for folder in folders_of(directory)]
    tier = named.resolve()
    folders = [
        *stores,
        *(Path(os.path.realpath(one / name)) for one in stores for name in _FOLDERS),
    ]
    if any(tier.is_relative_to(folder) for folder in folders):
        raise InvalidError(
            "the tier would lie inside the broker's store directory",
            where=str(tier),
            do="choose a folder outside of it",
        )
    if kind := kind_of(str(tier)):
        what = f"the tier would lie in {kind}"
        raise InvalidError(what, where=str(tier), do="choose a folder of its own")


def is_nameless(local: LocalStore) -> bool:
    """A broker runs on it, it has had no message yet, and a name is missing."""
    identity = local.identity
    if not identity.is_live or (identity.cluster is not None and identity.broker is not None):
        return False
    local.refresh()
    return not any(bounds.end for bounds in local.queues().values())


def place_of(store: ObjectStore, identity: StoreIdentity, settings: AttachSettings) -> Place:
    """Where a local store belongs in a tier.

    Names that are given rule. Else the store's own names, unless there is nothing there and another place remembers
    this very store: the names that a store tells can come and go with its files.

    Raises:
        InvalidError: Its keys would be too long for an object store, or its broker may have several names.
        DataError: The journal of a place that fits is lost or damaged, so nobody can tell whether it is this store's.
    """
    place = _chosen(store, identity, settings)
    require_fitting(store.url, place)
    if named_by(identity, settings, place) == "default":
        _LOG.warning(
            "the store does not tell its broker's name and cluster: taken for %s/%s;"
            " say which with --cluster and --broker, also later, if that is wrong",
            *(place.cluster, place.broker),
        )
    return place


def named_by(identity: StoreIdentity, settings: AttachSettings, place: Place) -> str:
    """Where a place's names come from: ``options``, ``store``, ``tier`` or, if only one of them does, ``default``."""
    cluster = settings.cluster or identity.cluster
    broker = settings.broker or identity.broker
    if (settings.cluster, settings.broker) == (place.cluster, place.broker):
        return "options"
    if (cluster, broker) == (place.cluster, place.broker):
        return "store"
    is_default = (not cluster and place.cluster == DEFAULT.cluster) or (
        not broker and place.broker == DEFAULT.broker
    )
    return "default" if is_default else "tier"


def _chosen(store: ObjectStore, identity: StoreIdentity, settings: AttachSettings) -> Place:
    cluster, broker = settings.cluster, settings.broker
    named = Place(
        cluster or identity.cluster or DEFAULT.cluster, broker or identity.broker or DEFAULT.broker
    )
    if cluster and broker:
        return named
    is_unsure = not broker and bool(identity.brokers)
    if identity.store_id:
        known = find_places(store)
        if named in known and not is_unsure:
            return named
        for place in known:
            fits = cluster in {None, place.cluster} and broker in {None, place.broker}
            if fits and _store_id(store, place) == identity.store_id:
                return place
    if is_unsure:
        raise InvalidError(
            f"the store does not tell its broker's name, which may be {', '.join(identity.brokers)}",
            do="say which with --broker (brokerName in the broker's configuration)",
        )
    return named


def _store_id(store: ObjectStore, place: Place) -> str | None:
    """Of the store that a place remembers; None when it does not say. What cannot be read may be this very store's."""
    from tiered.log.reader import TierReader  # noqa: PLC0415 (start-up loads only what is needed)

    reader = TierReader(store, place.prefix)
    try:
        reader.refresh()
    except (DataError, InvalidError) as error:
        is_damage = isinstance(error, DataError)
        mend = "run `tiered rebuild` there" if is_damage else error.do
        raise (type(error) if is_damage else InvalidError)(
            f"{error.what}; so nobody can tell whether it belongs to this store",
            where=error.where,
            do=f"{mend}, or say where this broker's place is with --cluster and --broker",
        ) from error
    found = reader.state.store.get("store_id")
    return str(found) if found else None
