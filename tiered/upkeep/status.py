"""Status of a tier: pure functions from what was read (state, lease, lag) to the document that ``tiered status`` shows.

``read_status`` does the reading: two requests a broker to find it, its checkpoint and entries, its lease, and a listing of
its mounts. What a writer's present rate comes to in requests and dollars a month, stands at the end.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from backends.errors import BackendError
from backends.lazy_dataclass import dataclass, picked
from backends.wrapping import Prices
from tiered.api.broker_place import Place, choose_place, find_places, no_tier, retry_places
from tiered.api.stores import what_to_do
from tiered.attach.observe import QueueLag, measure_lag
from tiered.errors import DataError, OtherVersionError, StoreUnavailableError
from tiered.journal.append import CHECKPOINT_ENTRIES
from tiered.journal.entry import document_of
from tiered.journal.lease import LeaseState, read_lease
from tiered.journal.replay import JournalReader
from tiered.keys import LEASE
from tiered.local.catalog import DEAD_PREFIX, SCHEDULE_TOPIC
from tiered.log.broker_tables import HANDOVER
from tiered.log.merge import FAN_IN, LAST_LEVEL, bundles_used, run_bytes
from tiered.log.parts import Parts
from tiered.log.reader import TierReader
from tiered.log.state import TierMachine, is_tail
from tiered.log.verify import require_same_id

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from backends.base import ObjectStore
    from tiered.journal.entry import Entry
    from tiered.local.interface import LocalStore, StoreReport, Waiting
    from tiered.log.state import Incarnation, TierState
    from tiered.model import MessageQueue, QueueOffset

FORMAT = 1
AT_ONCE = 8
"""Brokers read at once."""
NO_WRITER, STOPPED, WRITING, DECOMMISSIONED = "no writer", "stopped", "writing", "decommissioned"
STATES = (NO_WRITER, STOPPED, WRITING, DECOMMISSIONED)
"""Of a broker that can be read, the worst first: its writer has ended without giving its lease back; it has ended; it is at
work; the broker is gone."""
Document = dict[str, Any]


@dataclass(frozen=True, slots=True)
class LocalFacts:
    """What a local store adds to a status."""

    lag: Mapping[MessageQueue, QueueLag]  # of each local queue
    waiting: Waiting  # what is not proven committed
    report: StoreReport  # what was met there


@dataclass(frozen=True, slots=True)
class RetryLogFacts:
    """What was read of the retry log of one mount."""

    mount: str  # its name, with ``/address`` of one that is shared
    state: TierState | None  # what its journal says; None: it cannot be read
    reason: str = ""  # why not


@dataclass(frozen=True, slots=True)
class BrokerFacts:
    """What was read of one broker's tier."""

    place: Place
    state: TierState  # what the journal says
    journal_number: int  # its last entry
    lease: LeaseState | None  # the lease, or None
    local: LocalFacts | None = None  # of its local store, or None
    rate: Rate | None = None  # what its writer does, or None: none is at work, or it has just begun
    retry_logs: Sequence[RetryLogFacts] | None = None  # of its mounts; None: nobody looked


@dataclass(frozen=True, slots=True)
class UnreadBroker:
    """A broker of which nothing can be told, and why."""

    place: Place
    error: DataError | OtherVersionError | StoreUnavailableError
    """Its journal is damaged, lost, of another version, or what the store refuses until somebody mends that."""

    def document(self) -> Document:
        """As it stands in the document of ``tiered status``."""
        states = {DataError: "damaged", OtherVersionError: "another version"}
        known = (state for kind, state in states.items() if isinstance(self.error, kind))
        state = next(known, "refused")
        said = {"state": state, "reason": str(self.error), "exit_code": self.error.exit_code}
        return picked(self.place, "cluster", "broker", "prefix") | said


def read_status(
    store: ObjectStore,
    *,
    cluster: str | None,
    broker: str | None,
    local: LocalStore | None,
    now_ms: int,
    selects: Callable[[str], bool] = lambda _topic: True,
    takes: Callable[[Place], bool] = lambda _place: True,
    told: Callable[[int, int], None] = lambda _count, _total: None,
) -> tuple[list[BrokerFacts], list[UnreadBroker]]:
    """Read all brokers under a URL, or those that fit the names. Of several one that cannot be read hides no other.

    Several are read a few at once, and without their rates, which take a request for each of their newest entries.

    Args:
        local: The local store of the one broker that is meant.
        selects: Topics that are to be tiered: what the tier has never met of others is not a lag.
        takes: Which of several brokers are meant.
        told: How many are read, of how many.

    Raises:
        InvalidError: No tier fits; or there is a local store, and more than one fits, or the tier is of another store.
        DataError: The only one that fits cannot be read; ``OtherVersionError`` likewise.
    """
    if local is not None:
        identity = local.identity
        known = find_places(store)
        mine = Place(cluster or identity.cluster or "", broker or identity.broker or "")
        places = [mine] if mine in known else [choose_place(store, cluster, broker)]
    elif cluster is not None and broker is not None:
        places = [choose_place(store, cluster, broker)]
    else:
        places = [
            place
            for place in find_places(store)
            if cluster in {None, place.cluster} and broker in {None, place.broker} and takes(place)
        ]
    if not places:
        raise no_tier(store)
    is_one = len(places) == 1

    def read(place: Place) -> BrokerFacts | UnreadBroker:
        reader = TierReader(store, place.prefix)
        try:
            facts = read_broker(
                reader, place, now_ms, local=local, selects=selects, with_rate=is_one
            )
            return replace(facts, retry_logs=read_retry_logs(store, place))
        except (DataError, OtherVersionError) as error:
            if is_one:
                raise
            return UnreadBroker(place, error)
        except BackendError as error:  # of this broker's objects alone, as in an archive class
            if is_one or error.retriable or not error.needs_a_person:
                raise
            return UnreadBroker(place, StoreUnavailableError(str(error), do=what_to_do(error)))

    found: list[BrokerFacts] = []
    unread: list[UnreadBroker] = []
    with ThreadPoolExecutor(AT_ONCE, "tiered-status") as pool:
        for count, one in enumerate(pool.map(read, places), 1):
            found += [one] if isinstance(one, BrokerFacts) else []
            unread += [one] if isinstance(one, UnreadBroker) else []
            told(count, len(places))
    return found, unread


def read_broker(
    reader: TierReader,
    place: Place,
    now_ms: int,
    *,
    local: LocalStore | None = None,
    selects: Callable[[str], bool] = lambda _topic: True,
    with_rate: bool = True,
) -> BrokerFacts:
    """Read what is new of a broker by its reader, which may have read it before.

    Args:
        with_rate: Read the newest entries as well, a request each, for what its writer does.
    """
    reader.refresh()
    store = reader.store
    lease, _ = read_lease(store, place.prefix + LEASE)
    if local is not None:
        require_same_id(reader.state, local)
        local.refresh()  # behind the tier: else what a writer has tiered since would be ahead of the store
    facts = local_facts(local, reader.state, now_ms, selects) if local else None
    number = reader.journal_number
    is_held = lease is not None and not lease.released and lease.expires_ms > now_ms
    rate = read_rate(store, place.prefix, number, now_ms) if is_held and with_rate else None
    return BrokerFacts(place, reader.state, number, lease, facts, rate)


def read_retry_logs(store: ObjectStore, place: Place) -> list[RetryLogFacts]:
    """What was sent back to mounts of a broker's tier: one listing where there was none, and a few requests for each log."""
    found = []
    for one in retry_places(store, place):
        reader = TierReader(store, one.prefix)
        try:
            reader.refresh()
            found.append(RetryLogFacts(one.mount, reader.state))
        except (DataError, OtherVersionError) as error:
            found.append(RetryLogFacts(one.mount, None, str(error)))
    return found


def local_facts(
    local: LocalStore, state: TierState, now_ms: int, selects: Callable[[str], bool]
) -> LocalFacts:
    """Hold a local store against a tier."""
    found = measure_lag(local, commit_offsets(state), now_ms)
    lag = {q: lag for q, lag in found.items() if q in state.queues or selects(q.topic)}
    return LocalFacts(lag, local.waiting(), local.report())


def status_document(
    url: str, brokers: list[BrokerFacts], unread: list[UnreadBroker], now_ms: int
) -> Document:
    """The document of ``tiered status --json``."""
    return {
        "format": FORMAT,
        "url": url,
        "brokers": [broker_document(facts, now_ms) for facts in brokers],
        "unread": [one.document() for one in unread],
    }


def broker_document(facts: BrokerFacts, now_ms: int) -> Document:
    """One broker: who writes, totals, and each topic with its queues."""
    rows = queue_rows(facts)
    topics: dict[str, list[Document]] = {}
    for row in rows:
        topics.setdefault(row["topic"], []).append(row)
    state, local = facts.state, facts.local
    keys = _keys_by_topic(state)
    return {
        **picked(facts.place, "cluster", "broker", "prefix"),
        "store_id": state.store.get("store_id", ""),
        "journal_number": facts.journal_number,
        "decommissioned_ms": state.store.get(HANDOVER, {}).get("time_ms"),
        **picked(state, "updated_ms", "epoch", "writer", "refused_parts"),
        "holder": dict(state.holder),
        "lease": (lease := _lease(facts.lease, now_ms)),
        "state": _state_word(state, lease),
        "paused": [
            {**document_of(one), "lag_messages": _lag_of(rows, one.topic)} for one in state.paused
        ],
        **_totals(rows, set().union(*keys.values())),
        **_space(state),
        "rate": rate_document(facts.rate),
        "retry_logs": None
        if facts.retry_logs is None
        else [_retry_log(one) for one in facts.retry_logs],
        "waiting": picked(local.waiting, *_WAITING) if local else None,
        "local": _report(local.report) if local else None,
        "left_out": [document_of(left) for left in local.report.left_out] if local else None,
        "topics": [
            {"topic": topic, **_totals(queues, keys.get(topic, set())), "queues": queues}
            for topic, queues in sorted(topics.items())
        ],
    }


def _retry_log(log: RetryLogFacts) -> Document:
    """Messages that wait for their time, that were given out again, and dead letters; and what they take."""
    row: Document = {"mount": log.mount, "reason": log.reason}
    if log.state is None:
        return row | dict.fromkeys(_OF_RETRY_LOG)
    counts = [0, 0, 0]
    for queue, incarnations in log.state.queues.items():
        now = incarnations[-1]
        kind = (
            0 if queue.topic == SCHEDULE_TOPIC else 2 if queue.topic.startswith(DEAD_PREFIX) else 1
        )
        counts[kind] += now.commit_offset - now.min_offset
    sizes = [use.bundle.size_bytes for use in bundles_used(log.state)]
    said = (*counts, len(sizes), sum(sizes), log.state.updated_ms)
    return row | dict(zip(_OF_RETRY_LOG, said, strict=True))


def retry_remarks(logs: Iterable[Document]) -> Iterator[str]:
    """What somebody should know of the retry logs of a broker's mounts: a few words for each that has any such."""
    for log in logs:
        said = [f"{log[name]:,} {words}" for name, words in _RETRY_WORDS.items() if log[name]]
        said += ["cannot be read"] if log["reason"] else []
        if said:
            yield f"retry log of mount {log['mount']}: {', '.join(said)}"


_RETRY_WORDS = {"waiting": "waiting", "dead": "in the dead letter queue"}
_OF_RETRY_LOG = ("waiting", "retries", "dead", "objects", "object_bytes", "updated_ms")


def queue_rows(facts: BrokerFacts) -> list[Document]:
    """A row for each queue of the tier and of the local store, in order."""
    lag = facts.local.lag if facts.local else {}
    queues = sorted({*facts.state.queues, *lag})
    return [_queue(queue, facts.state.queues.get(queue, ()), lag.get(queue)) for queue in queues]


def _queue(
    queue: MessageQueue, incarnations: tuple[Incarnation, ...], lag: QueueLag | None
) -> Document:
    incarnation = incarnations[-1] if incarnations else None
    segments = [segment for one in incarnations for segment in one.segments]
    parts = Parts.joined(segment.parts for segment in segments)
    times = parts.store_times or (None, None)
    return {
        "topic": queue.topic,
        "queue_id": queue.queue_id,
        "incarnation": incarnation.number if incarnation else None,
        "min_offset": incarnation.min_offset if incarnation else None,
        "commit_offset": incarnation.commit_offset if incarnation else None,
        "local_max_offset": lag.local_max_offset if lag else None,
        "lag_messages": lag.messages if lag else None,
        "lag_bytes": lag.size_bytes if lag else None,
        "lag_seconds": round(lag.seconds, 3) if lag else None,
        "messages": parts.messages,
        "holes": parts.holes,
        "segments": len(segments),
        "sealed_segments": sum(segment.sealed for segment in segments),
        "objects": len({bundle.key for bundle in parts.bundles}),
        "size_bytes": int(parts.stored_bytes().sum()),
        "plain_bytes": run_bytes(parts),
        "store_min_ms": times[0],
        "store_max_ms": times[1],
        "gaps": sum(len(one.gaps) for one in incarnations),
        "gap_messages": sum(gap.end - gap.start for one in incarnations for gap in one.gaps),
        "quarantined": sum(one.quarantined for one in incarnations),
        # Behind the local end: it is a copy that lags, or one that has lost its tail.
        "ahead_messages": max(0, incarnation.commit_offset - lag.local_max_offset)
        if incarnation and lag
        else None,
        **_ended(incarnations),
    }


def _ended(incarnations: tuple[Incarnation, ...]) -> Document:
    """Incarnations that are over: whole ones, and ends that the broker truncated."""
    tails = [
        incarnation
        for number, incarnation in enumerate(incarnations)
        if is_tail(incarnations, number)
    ]
    return {
        "ended_incarnations": max(0, len(incarnations) - 1) - len(tails),
        "truncated": len(tails),
        "truncated_messages": sum(
            incarnation.commit_offset - incarnation.min_offset for incarnation in tails
        ),
    }


def _keys_by_topic(state: TierState) -> dict[str, set[str]]:
    """Keys of the bundles in which each topic has sections: queues, and topics, share them."""
    found: dict[str, set[str]] = {}
    for one in state.placed():
        of_topic = found.setdefault(one.queue.topic, set())
        for parts in one.incarnation.tables():
            of_topic.update(bundle.key for bundle in parts.bundles)
    return found


def _space(state: TierState) -> Document:
    """What the bundles take: each level, and how much more is stored than is named."""
    levels: dict[int, Document] = {}
    for use in bundles_used(state):
        level = use.bundle.level
        empty = {"level": level, "objects": 0, "object_bytes": 0, "size_bytes": 0}
        row = levels.setdefault(level, empty)
        row["objects"] += 1
        row["object_bytes"] += use.bundle.size_bytes
        row["size_bytes"] += use.named_bytes
    rows = [levels[level] for level in sorted(levels)]
    stored = sum(row["object_bytes"] for row in rows)
    named = sum(row["size_bytes"] for row in rows)
    return {
        "object_bytes": stored,
        "levels": rows,
        "space_amplification": round(stored / named, 3) if named else None,
    }


_SUMMED = (
    "lag_messages",
    "lag_bytes",
    "messages",
    "holes",
    "segments",
    "size_bytes",
    "plain_bytes",
    "gaps",
    "gap_messages",
    "quarantined",
    "ended_incarnations",
    "truncated",
    "truncated_messages",
)


def _totals(rows: list[Document], keys: set[str]) -> Document:
    """Sums over queues, and the greatest lag; None where no queue tells."""
    totals: Document = {"queue_count": len(rows), "objects": len(keys)}
    for name in _SUMMED:
        known = [row[name] for row in rows if row[name] is not None]
        totals[name] = sum(known) if known or not name.startswith("lag_") else None
    ages = [row["lag_seconds"] for row in rows if row["lag_seconds"] is not None]
    totals["lag_seconds"] = max(ages) if ages else None
    return totals


def _lease(lease: LeaseState | None, now_ms: int) -> Document | None:
    if lease is None:
        return None
    holder = lease.holder
    return {
        "host": holder.host,
        "pid": holder.pid,
        "writer": lease.writer,
        "expires_ms": lease.expires_ms,
        "is_released": lease.released,
        "is_held": not lease.released and lease.expires_ms > now_ms,
    }


def _state_word(state: TierState, lease: Document | None) -> str:
    """One of ``STATES``."""
    if HANDOVER in state.store:
        return DECOMMISSIONED
    if lease is None or lease["is_released"]:
        return STOPPED
    return WRITING if lease["is_held"] else NO_WRITER


def worst_first(brokers: Iterable[Document], unread: Iterable[Document]) -> list[Document]:
    """A row a broker of the document of a status: what cannot be read, what has lost messages, who has no writer, ..."""
    rows = [
        {
            **{name: broker[name] for name in _FLEET},
            "writer": broker["lease"]["host"] if broker["state"] == WRITING else "",
            "reason": ", ".join(
                [
                    *(f"{one['topic']} is paused" for one in broker["paused"]),
                    *retry_remarks(broker["retry_logs"] or ()),
                ]
            ),
        }
        for broker in brokers
    ]
    rows.sort(
        key=lambda row: (
            -row["quarantined"],
            STATES.index(row["state"]),
            -row["gaps"],
            row["updated_ms"],
        )
    )
    names = ("state", "cluster", "broker", "reason")
    lost = sorted(unread, key=lambda one: -one["exit_code"])
    return [*({name: one[name] for name in names} for one in lost), *rows]


_FLEET = (
    *("state", "cluster", "broker", "queue_count", "messages", "size_bytes", "gaps", "quarantined"),
    "updated_ms",
)


def _lag_of(rows: Iterable[Document], topic: str) -> int | None:
    """Messages of a topic that are not tiered; None without a local store."""
    lags = [row["lag_messages"] for row in rows if row["topic"] == topic]
    return sum(lag or 0 for lag in lags) if any(lag is not None for lag in lags) else None


_WAITING = ("records", "size_bytes", "reason")
_OF_STORE = (
    *("log_min", "log_end", "torn_bytes", "foreign_entries", "below_min_entries"),
    *("damaged_records", "wrong_tag_codes"),
)


def _report(report: StoreReport) -> Document:
    rebuilt = [str(queue) for queue in report.rebuilt_queues]
    return {
        **picked(report, *_OF_STORE),
        "rebuilt_queues": rebuilt,
        "notes": list(report.notes),
    }


def commit_offsets(state: TierState) -> dict[MessageQueue, QueueOffset]:
    """Commit offset of each queue's present incarnation."""
    return {queue: incarnations[-1].commit_offset for queue, incarnations in state.queues.items()}


# --------------------------------------------------------------------------------------------------
# What a writer's present rate comes to: requests and dollars a month, and how often a byte is written. Overview:
# ``read_rate`` reads the newest journal entries (``ENTRIES_MAX`` of the last hour at most), ``rate_of`` counts what
# they stand for, ``cost_of`` goes on like that for a month. An entry says which objects were put; what it does not say
# is reckoned: two requests for the entry itself, two in ``CHECKPOINT_ENTRIES`` for a checkpoint, each bundle read once
# when it is gathered. Reads by others, storage and transfer are not in it. Dollars are the list prices in
# ``backends.wrapping.Prices``, whatever store it is.
#
# All but ``read_rate`` is pure.
# --------------------------------------------------------------------------------------------------

LEASE_S: Final = 10.0
"""Unless told otherwise: a status does not know what a writer was told."""
MONTH_S: Final = 30 * 86_400
WINDOW_S: Final = 3600
ENTRIES_MAX: Final = 64
_WINDOW_S_MIN: Final = 10
_THREADS: Final = 16
_READ_BYTES: Final = 8 << 20
"""Of one request of the merger."""
_BUNDLE_BYTES: Final = 16 << 20
"""What a round is about when it is not for freshness that it is taken."""
_ROUND_WRITES: Final = 3 + 2 / CHECKPOINT_ENTRIES
"""Of a round of one bundle: the bundle, the entry, the listing behind it; and its share of a checkpoint."""


@dataclass(frozen=True, slots=True)
class Rate:
    """What a writer has done in so many seconds."""

    seconds: float  # until now
    entries: int = 0  # journal entries
    rounds: int = 0  # those that made parts durable
    puts: int = 0  # objects put: bundles and index objects
    reads: int = 0  # requests of the merger, about
    round_bytes: int = 0  # bytes of the bundles of rounds
    merged_bytes: int = 0  # of those that merging has made

    @property
    def writes(self) -> float:
        """Requests that are billed as writing, but for those of the lease."""
        return self.puts + self.entries * (2 + 2 / CHECKPOINT_ENTRIES)

    @property
    def write_amplification(self) -> float | None:
        """How often a byte was written, the first time included; None when nothing was."""
        if not self.round_bytes:
            return None
        return (self.round_bytes + self.merged_bytes) / self.round_bytes


@dataclass(frozen=True, slots=True)
class RunningCost:
    """Of a month."""

    requests: int  # to the store
    dollars: float  # for these
    freshness_dollars: float
    """What of it goes to rounds that did not fill a bundle; twice the freshness saves half of that."""
    lease_dollars: float  # what of it goes to renewing the lease


def bills_requests(url: str) -> bool:
    """Whether a store is of a kind that bills requests."""
    return url.startswith(("s3://", "s3a://"))


def read_rate(store: ObjectStore, prefix: str, number: int, now_ms: int) -> Rate | None:
    """The rate of the writer at work; None when its journal is too young to tell."""
    journal = JournalReader(store, prefix, TierMachine())
    numbers = range(max(1, number - ENTRIES_MAX + 1), number + 1)
    with ThreadPoolExecutor(_THREADS, "tiered-rate") as pool:
        found = list(pool.map(journal.read_entry, numbers))
    return rate_of([one[0] for one in found if one is not None], now_ms)


def rate_of(entries: Sequence[Entry], now_ms: int) -> Rate | None:
    """Count what the newest entries, in order, stand for; those of the last hour, the first of all being where it begins."""
    since_ms = now_ms - WINDOW_S * 1000
    recent = [entry for entry in entries if entry.time_ms >= since_ms]
    if len(recent) == len(entries) and recent:
        since_ms = recent.pop(0).time_ms
    seconds = (now_ms - since_ms) / 1000
    if not entries or seconds < _WINDOW_S_MIN:
        return None
    rounds = [_bundles(entry, "part") for entry in recent]
    merges = [_bundles(entry, "merge") for entry in recent]
    made = [size for sizes in rounds for size in sizes]
    merged = [size for sizes in merges for size in sizes]
    indexes = sum(
        len(action.get("objects", ()))
        for entry in recent
        for action in entry.actions
        if action["do"] == "index"
    )
    return Rate(
        seconds,
        len(recent),
        sum(map(bool, rounds)),
        len(made) + len(merged) + indexes,
        sum(-(-size // _READ_BYTES) for size in (*made, *merged)),
        sum(made),
        sum(merged),
    )


def _bundles(entry: Entry, do: str) -> list[int]:
    """Sizes of the bundles that an entry's actions of a kind name."""
    actions: Iterable[Any] = (action for action in entry.actions if action["do"] == do)
    return [row[1] for action in actions for row in action["bundles"]]


def cost_of(rate: Rate, *, lease_s: float = LEASE_S) -> RunningCost:
    """What a month at this rate costs."""
    prices = Prices()
    months = MONTH_S / rate.seconds  # how often it would be done in one
    write, read = prices.write_per_1000 / 1000, prices.read_per_1000 / 1000
    renewals = MONTH_S / (lease_s / 3)
    full = -(-rate.round_bytes // _BUNDLE_BYTES)
    early = max(0, rate.rounds - full) * _ROUND_WRITES
    dollars = (rate.writes * write + rate.reads * read) * months + renewals * write
    return RunningCost(
        round((rate.writes + rate.reads) * months + renewals),
        dollars,
        early * months * write,
        renewals * write,
    )


def rate_document(rate: Rate | None) -> dict[str, Any] | None:
    """For ``tiered status --json``."""
    if rate is None:
        return None
    cost, amplification = cost_of(rate), rate.write_amplification
    return {
        "seconds": round(rate.seconds, 3),
        **picked(rate, "rounds", "round_bytes", "merged_bytes"),
        "write_amplification": None if amplification is None else round(amplification, 3),
        "requests_per_month": cost.requests,
        "dollars_per_month": round(cost.dollars, 2),
        "freshness_dollars_per_month": round(cost.freshness_dollars, 2),
        "lease_dollars_per_month": round(cost.lease_dollars, 2),
    }


def rate_text(document: dict[str, Any], *, is_billed: bool) -> str:
    """The same for people."""
    rounds = document["rounds"]
    found = f"{document['requests_per_month']:,} requests a month at the present rate"
    if is_billed:
        found += f", ${document['dollars_per_month']:.2f} at list prices"
    if rounds:
        found += f"; a round every {document['seconds'] / rounds:.1f} s"
        if is_billed:
            found += f" (${document['freshness_dollars_per_month']:.2f} of it, for freshness)"
    if document["write_amplification"] is not None:
        found += f"; each byte written {document['write_amplification']:.1f} times"
    return found


def dearest(freshness_s: float, *, lease_s: float = LEASE_S) -> RunningCost:
    """What a writer costs at most that has something for every round, and never enough to fill a bundle."""
    merges = round(sum(1000 / FAN_IN**level for level in range(1, LAST_LEVEL + 1)))
    rounds = 1000
    puts, entries = rounds + merges, rounds + merges
    rate = Rate(rounds * freshness_s, entries, rounds, puts, puts)
    return cost_of(rate, lease_s=lease_s)
