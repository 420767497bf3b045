"""Status of a tier: pure functions from what was read (state, lease, lag) to the document that ``tiered status`` shows.

``read_status`` does the reading: two requests a broker to find it, its checkpoint and entries, and its lease.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tiered.api.broker_place import Place, choose_place, find_places
from tiered.attach.lag import QueueLag, measure_lag
from tiered.errors import InvalidError
from tiered.journal.lease import LeaseState, read_lease
from tiered.keys import LEASE
from tiered.log.merge import bundles_used, run_bytes
from tiered.log.parts import Parts
from tiered.log.reader import TierReader
from tiered.log.takeback import is_tail
from tiered.upkeep.costs import Rate, rate_document, read_rate

if TYPE_CHECKING:
    from collections.abc import Mapping

    from backends.base import ObjectStore
    from tiered.local.face import LocalStore, StoreReport, Waiting
    from tiered.log.state import QueueLife, TierState
    from tiered.model import MessageQueue, QueueOffset

FORMAT = 1
Document = dict[str, Any]


@dataclass(frozen=True, slots=True)
class LocalFacts:
    """What a local store adds to a status.

    Attributes:
        lag: Of each local queue.
        waiting: What is not proven committed.
        report: What was met there.
    """

    lag: Mapping[MessageQueue, QueueLag]
    waiting: Waiting
    report: StoreReport


@dataclass(frozen=True, slots=True)
class BrokerFacts:
    """What was read of one broker's tier.

    Attributes:
        place: Which.
        state: What the journal says.
        journal_number: Its last entry.
        lease: The lease, or None.
        local: Of its local store, or None.
        rate: What its writer does, or None: none is at work, or it has just begun.
    """

    place: Place
    state: TierState
    journal_number: int
    lease: LeaseState | None
    local: LocalFacts | None = None
    rate: Rate | None = None


def read_status(
    store: ObjectStore,
    *,
    cluster: str | None,
    broker: str | None,
    local: LocalStore | None,
    now_ms: int,
) -> list[BrokerFacts]:
    """Read all brokers under a URL, or those that fit the names.

    Args:
        store: The tier's store.
        cluster: Only this cluster.
        broker: Only this broker.
        local: The local store of the one broker that is meant.
        now_ms: UTC.

    Raises:
        InvalidError: No tier fits; or more than one, and there is a local store.
    """
    if local is not None:
        identity = local.identity
        known = find_places(store)
        mine = Place(cluster or identity.cluster or "", broker or identity.broker or "")
        places = [mine] if mine in known else [choose_place(store, cluster, broker)]
    elif cluster is not None and broker is not None:
        places = [choose_place(store, cluster, broker)]
    else:
        places = [p for p in find_places(store) if _fits(p, cluster, broker)]
    if not places:
        raise InvalidError(
            "there is no tier here",
            where=store.url,
            do="check the URL; `tiered attach` makes a tier",
        )
    return [_read(store, place, local, now_ms) for place in places]


def _fits(place: Place, cluster: str | None, broker: str | None) -> bool:
    return cluster in {None, place.cluster} and broker in {None, place.broker}


def _read(store: ObjectStore, place: Place, local: LocalStore | None, now_ms: int) -> BrokerFacts:
    reader = TierReader(store, place.prefix)
    reader.refresh()
    lease, _ = read_lease(store, place.prefix + LEASE)
    if local is not None:
        local.refresh()  # behind the tier: else what a writer has tiered since would be ahead of the store
    facts = local_facts(local, reader.state, now_ms) if local else None
    number = reader.journal_number
    is_held = lease is not None and not lease.released and lease.expires_ms > now_ms
    rate = read_rate(store, place.prefix, number, now_ms) if is_held else None
    return BrokerFacts(place, reader.state, number, lease, facts, rate)


def local_facts(local: LocalStore, state: TierState, now_ms: int) -> LocalFacts:
    """Hold a local store against a tier."""
    lag = measure_lag(local, commit_offsets(state), now_ms)
    return LocalFacts(lag, local.waiting(), local.report())


def status_document(url: str, brokers: list[BrokerFacts], now_ms: int) -> Document:
    """The document of ``tiered status --json``."""
    return {
        "format": FORMAT,
        "url": url,
        "brokers": [broker_document(facts, now_ms) for facts in brokers],
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
        "cluster": facts.place.cluster,
        "broker": facts.place.broker,
        "prefix": facts.place.prefix,
        "store_id": state.store.get("store_id", ""),
        "journal_number": facts.journal_number,
        "updated_ms": state.updated_ms,
        "generation": state.generation,
        "writer": state.writer,
        "holder": dict(state.holder),
        "lease": _lease(facts.lease, now_ms),
        "refused_parts": state.refused_parts,
        **_totals(rows, set().union(*keys.values())),
        **_space(state),
        "rate": rate_document(facts.rate),
        "waiting": _waiting(local.waiting) if local else None,
        "local": _report(local.report) if local else None,
        "left_out": _left_out(local.report) if local else None,
        "topics": [
            {"topic": topic, **_totals(queues, keys.get(topic, set())), "queues": queues}
            for topic, queues in sorted(topics.items())
        ],
    }


def queue_rows(facts: BrokerFacts) -> list[Document]:
    """A row for each queue of the tier and of the local store, in order."""
    lag = facts.local.lag if facts.local else {}
    queues = sorted({*facts.state.queues, *lag})
    return [_queue(queue, facts.state.queues.get(queue, ()), lag.get(queue)) for queue in queues]


def _queue(queue: MessageQueue, lives: tuple[QueueLife, ...], lag: QueueLag | None) -> Document:
    life = lives[-1] if lives else None
    segments = [segment for one in lives for segment in one.segments]
    parts = Parts.joined(segment.parts for segment in segments)
    times = parts.store_times or (None, None)
    return {
        "topic": queue.topic,
        "queue_id": queue.queue_id,
        "incarnation": life.incarnation if life else None,
        "min_offset": life.min_offset if life else None,
        "commit_offset": life.commit_offset if life else None,
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
        "gaps": sum(len(one.gaps) for one in lives),
        "gap_messages": sum(gap.end - gap.start for one in lives for gap in one.gaps),
        "quarantined": sum(one.quarantined for one in lives),
        "ahead_messages": _ahead(life, lag),
        **_ended(lives),
    }


def _ahead(life: QueueLife | None, lag: QueueLag | None) -> int | None:
    """What the tier has behind the local end: a copy that lags, or one that has lost its tail."""
    return max(0, life.commit_offset - lag.local_max_offset) if life and lag else None


def _ended(lives: tuple[QueueLife, ...]) -> Document:
    """Lives that are over: whole ones, and ends that the broker took back."""
    tails = [life for number, life in enumerate(lives) if is_tail(lives, number)]
    return {
        "ended_lives": max(0, len(lives) - 1) - len(tails),
        "taken_back": len(tails),
        "taken_back_messages": sum(life.commit_offset - life.min_offset for life in tails),
    }


def _keys_by_topic(state: TierState) -> dict[str, set[str]]:
    """Keys of the bundles in which each topic has sections: queues, and topics, share them."""
    found: dict[str, set[str]] = {}
    for queue, lives in state.queues.items():
        of_topic = found.setdefault(queue.topic, set())
        for life in lives:
            for segment in life.segments:
                of_topic.update(bundle.key for bundle in segment.parts.bundles)
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
    "ended_lives",
    "taken_back",
    "taken_back_messages",
)


def _totals(rows: list[Document], keys: set[str]) -> Document:
    """Sums over queues, and the greatest lag; None where no queue tells.

    Args:
        rows: Of the queues.
        keys: Of the bundles in which any of these has something.
    """
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


def _waiting(waiting: Waiting) -> Document:
    return {
        "records": waiting.records,
        "size_bytes": waiting.size_bytes,
        "reason": waiting.reason,
    }


def _report(report: StoreReport) -> Document:
    return {
        "log_min": report.log_min,
        "log_end": report.log_end,
        "torn_bytes": report.torn_bytes,
        "foreign_entries": report.foreign_entries,
        "below_min_entries": report.below_min_entries,
        "damaged_records": report.damaged_records,
        "wrong_tag_codes": report.wrong_tag_codes,
        "rebuilt_queues": [str(queue) for queue in report.rebuilt_queues],
        "notes": list(report.notes),
    }


def _left_out(report: StoreReport) -> list[Document]:
    return [{"name": left.name, "reason": left.reason} for left in report.left_out]


def commit_offsets(state: TierState) -> dict[MessageQueue, QueueOffset]:
    """Commit offset of each queue's present life."""
    return {queue: lives[-1].commit_offset for queue, lives in state.queues.items()}
