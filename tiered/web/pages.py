"""What each page shows: from the watched state, or from a read with bounds, to the names that its template uses.

No figure is computed here that a command computes: documents are those of ``tiered status``, ``timer ls``, ``archive
--dry-run`` and ``doctor``. Pages raise ``TieredStoreError`` for what they cannot show; the server makes a page of that.
"""

from __future__ import annotations

from dataclasses import asdict, field, replace
from typing import TYPE_CHECKING, Any, Final

from backends.lazy_dataclass import dataclass, picked
from tiered.api.broker_place import TIMER_SIGNS, timers_of
from tiered.errors import DataError, InvalidError
from tiered.keys import QUARANTINE, parse_data_key
from tiered.log.lineage import Isolation, stable_end
from tiered.log.merge import run_bytes
from tiered.log.state import state_word
from tiered.model import MessageQueue
from tiered.upkeep.status import UnreadBroker, bills_requests, retry_remarks
from tiered.web import browse

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from backends.base import ObjectStore
    from fetcher.filters import Filter
    from tiered.clock import Clock
    from tiered.log.parts import Incarnation
    from tiered.log.reader import QueueReader
    from tiered.upkeep.doctor import Check
    from tiered.upkeep.status import Document
    from tiered.web.watch import ArchiveWatch, BrokerView, FleetView, LagSample, TierWatch

ROWS: Final = 200
"""Of a table on one page."""
MAPS_MAX: Final = 64
"""Queues of a topic that are drawn."""
PAIRS: Final = 5
"""Headers of a message that a list shows."""
PAIR_CHARS: Final = 80
"""Of the value of each."""
KEY_BYTES: Final = 1000
"""Of a key that an address has room for."""
HOURS_DRAWN: Final = 168
LAG_WARN_S: Final = 60.0
QUARANTINE_LISTED: Final = 10_000
FAIL, WARN, OK = "fail", "warn", "ok"
_ORDER: Final = {FAIL: 0, WARN: 1, OK: 2}
ROCKETMQ: Final = "rocketmq"


@dataclass(frozen=True, slots=True)
class PageQuery:
    """What the address of a page asks for."""

    values: Mapping[str, str]

    def text(self, name: str) -> str:
        """A value, or ""."""
        return self.values.get(name, "").strip()

    def need(self, name: str) -> str:
        """A value that the page cannot do without."""
        if name not in self.values:
            raise InvalidError(f"the address names no {name}", do="go there from the first page")
        return self.values[name]

    def number(self, name: str, default: int | None = None) -> int | None:
        """A whole number from 0 on."""
        said = self.text(name).replace(",", "")
        if not said:
            return default
        if not (said.isascii() and said.isdigit()) or len(said) > 18:  # noqa: PLR2004 (below 2**63)
            raise InvalidError(f"{name} is {said!r:.80}, and not a number", do="write digits")
        return int(said)

    @property
    def page(self) -> int:
        """Which page of a long table, from 0."""
        return self.number("page", 0) or 0


@dataclass(frozen=True, slots=True)
class Page:
    """What a template is given."""

    template: str
    title: str
    names: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PageSources:
    """What pages are made of."""

    url: str
    watch: TierWatch
    clock: Clock
    parse_time: Callable[[str, int], int]
    """UTC milliseconds of a text and of now."""
    time_text: Callable[[int], str]
    """Of UTC milliseconds."""
    doctor: Callable[[], Iterable[Check]]
    """What doctor says without writing."""
    archive: ArchiveWatch | None = None
    shows_bodies: bool = False


@dataclass(frozen=True, slots=True)
class Cut:
    """One page of a long table."""

    rows: Sequence[Any]
    page: int
    pages: int
    total: int

    @classmethod
    def of(cls, rows: Sequence[Any], page: int, most: int = ROWS) -> Cut:
        """The rows of a page; of one behind the last, the last."""
        pages = max(1, -(-len(rows) // most))
        page = min(page, pages - 1)
        return cls(rows[page * most : (page + 1) * most], page, pages, len(rows))


# -- the fleet ---------------------------------------------------------------------------------------


def fleet(sources: PageSources, query: PageQuery) -> Page:
    """All brokers, worst first."""
    view = sources.watch.view()
    rows = sorted(
        [*map(fleet_row, view.brokers), *map(_unread_row, view.unread)],
        key=lambda row: (_ORDER[row["level"]], -(row["lag_seconds"] or 0), row["broker"]),
    )
    names = {"cut": Cut.of(rows, query.page), "is_billed": bills_requests(sources.url)}
    names["counts"] = {level: sum(row["level"] == level for row in rows) for level in _ORDER}
    names["has_lag"] = any(row["lag_messages"] is not None for row in rows)
    return Page("fleet.html", "Brokers", {**names, **_when(view)})


def fleet_row(view: BrokerView) -> dict[str, Any]:
    """A broker on the first page."""
    document = view.document
    level, remarks = health_of(document)
    return {name: document[name] for name in _OF_FLEET} | {"level": level, "remarks": remarks}


_OF_FLEET: Final = (
    *("cluster", "broker", "messages", "queue_count", "size_bytes", "object_bytes"),
    *("lag_messages", "lag_seconds", "updated_ms", "rate"),
)


def _unread_row(one: UnreadBroker) -> dict[str, Any]:
    said = one.document()
    known = {name: said.get(name) for name in _OF_FLEET}
    return known | {"level": FAIL, "remarks": [f"{said['state']}: {said['reason']}"]}


def health_of(document: Document) -> tuple[str, list[str]]:
    """How a broker is, and why. What is explained and recorded is told elsewhere, and is no trouble."""
    remarks = []
    lease, gone = document["lease"], document["decommissioned_ms"] is not None
    if not gone and (lease is None or not lease["is_held"]):
        given = lease is None or lease["is_released"]
        remarks.append("no writer" if given else "its writer went without giving the lease back")
    if document["quarantined"]:
        remarks.append(f"{document['quarantined']:,} damaged records are in quarantine")
    if (document["lag_seconds"] or 0) >= LAG_WARN_S:
        remarks.append(f"{document['lag_seconds']:,.0f} s behind the broker")
    waiting = document["waiting"]
    if waiting and waiting["records"]:
        remarks.append(f"{waiting['records']:,} records wait: {waiting['reason']}")
    logs = document["retry_logs"] or ()
    remarks += retry_remarks(log for log in logs if log["dead"] or log["reason"])
    return WARN if remarks else OK, remarks or (["decommissioned"] if gone else [])


def _when(view: FleetView) -> dict[str, Any]:
    return {"looked_ms": view.looked_ms, "trouble": view.trouble}


# -- a broker, a topic, a queue ----------------------------------------------------------------------


def _broker(sources: PageSources, query: PageQuery) -> tuple[BrokerView, dict[str, Any]]:
    view = sources.watch.view()
    cluster, name = query.need("cluster"), query.need("broker")
    found = view.broker(cluster, name)
    if isinstance(found, UnreadBroker):
        raise found.error
    place = {"cluster": cluster, "broker": name}
    if isolation := query.text("isolation"):
        if isolation not in {one.value for one in Isolation}:
            raise InvalidError(
                f"{isolation!r:.80} is no isolation level",
                do="give read_committed or read_uncommitted",
            )
        place["isolation"] = isolation  # as long as one stays at this broker
        found = replace(found, reader=found.reader.seeing(Isolation(isolation)))
    kind = found.facts.state.store.get("kind", ROCKETMQ)
    body_word = "value" if kind == "kafka" else "body"
    return found, {"place": place, "kind": kind, "body_word": body_word, **_when(view)}


def broker(sources: PageSources, query: PageQuery) -> Page:
    """A broker: who writes, what it holds, and its topics."""
    view, names = _broker(sources, query)
    document = view.document
    wanted = query.text("find").casefold()
    rows = [topic for topic in document["topics"] if wanted in topic["topic"].casefold()]
    if document["lag_messages"] is not None:
        rows.sort(key=lambda row: (-(row["lag_seconds"] or 0), row["topic"]))
    cut = Cut.of(rows, query.page)
    level, remarks = health_of(document)
    names |= {
        "document": document,
        "level": level,
        "remarks": remarks,
        "cut": cut,
        "find": query.text("find"),
        "lag": _lag_chart(view.lags.get("", ())),
        "sparks": {
            row["topic"]: line(_points(view.lags.get(row["topic"], ()), 60)) for row in cut.rows
        },
        "is_billed": bills_requests(sources.url),
        "now_ms": sources.clock.now_ms(),
    }
    return Page("broker.html", view.place.broker, names)


def _lag_chart(samples: Sequence[LagSample]) -> dict[str, Any] | None:
    """A curve of the lag, in messages; None: there is no local store to compare with, or nothing was seen yet."""
    if not samples:
        return None
    points = _points(samples)
    return {
        "points": line(points),
        "most": int(max(value for _, value in points)),
        "most_s": max(one.seconds for one in samples),
        "first_ms": samples[0].time_ms,
        "last_ms": samples[-1].time_ms,
        "last": samples[-1].messages,
    }


def _points(samples: Sequence[LagSample], most: int = 240) -> list[tuple[int, float]]:
    return thinned([(one.time_ms, float(one.messages)) for one in samples], most)


def topic(sources: PageSources, query: PageQuery) -> Page:
    """A topic: its queues, each with its segments in a row."""
    view, names = _broker(sources, query)
    name = query.need("topic")
    found = next((one for one in view.document["topics"] if one["topic"] == name), None)
    if found is None:
        raise InvalidError(f"there is no topic {name}", do="choose one of its broker's page")
    cut = Cut.of(found["queues"], query.page)
    drawn = {}
    for row in cut.rows[:MAPS_MAX]:
        incarnations = view.facts.state.queues.get(MessageQueue(name, row["queue_id"]), ())
        if incarnations:
            drawn[row["queue_id"]] = _map_rows(
                sources, view, name, row["queue_id"], incarnations[-1]
            )
    names |= {
        "topic": found,
        "cut": cut,
        "maps": drawn,
        "lag": _lag_chart(view.lags.get(name, ())),
    }
    return Page("topic.html", name, names)


def _map_rows(
    sources: PageSources, view: BrokerView, name: str, queue_id: int, incarnation: Incarnation
) -> dict[str, list[ChartBar]]:
    """Rows of a segment map: segments with gaps; what of them is compressed; what is archived."""
    low, high = _bounds(incarnation)
    segments = [
        MapSpan(int(one.base_queue_offset), _end(one), "sealed" if one.sealed else "open")
        for one in incarnation.segments
    ]
    gaps = [MapSpan(gap.start, gap.end, "gap") for gap in incarnation.gaps]
    rows = {
        "segments": segments + gaps,
        "compressed": _packed_spans(incarnation),
        "archived": _archived_spans(sources, view, name, queue_id, incarnation),
    }
    return {kind: segment_bars(spans, low, high) for kind, spans in rows.items()}


def _end(segment: Any) -> int:  # noqa: ANN401 (a segment; its module loads with its values)
    return int(segment.parts.queue_end) if len(segment.parts) else int(segment.base_queue_offset)


def _bounds(incarnation: Incarnation) -> tuple[int, int]:
    gaps = [int(gap.start) for gap in incarnation.gaps]
    return min([int(incarnation.min_offset), *gaps]), int(incarnation.commit_offset)


def _packed_spans(incarnation: Incarnation) -> list[MapSpan]:
    parts = incarnation.parts()
    if not len(parts):
        return []
    starts = parts.column("queue_offset")
    ends = starts + parts.column("count")
    packed = parts.column("stored_bytes") < parts.column("records_bytes")
    pairs = zip(starts[packed].tolist(), ends[packed].tolist(), strict=True)
    return [MapSpan(start, end, "packed") for start, end in pairs]


def _archived_spans(
    sources: PageSources, view: BrokerView, name: str, queue_id: int, incarnation: Incarnation
) -> list[MapSpan]:
    if sources.archive is None:
        return []
    found = sources.archive.ranges(view.place, MessageQueue(name, queue_id), incarnation.number)
    return [MapSpan(start, end, "archived") for start, end in found]


def _queue_reader(view: BrokerView, query: PageQuery) -> tuple[QueueReader, int, int]:
    """What reads the incarnation that is meant, its place among its queue's, and how many there are."""
    number = query.number("queue")
    if number is None:
        raise InvalidError("the address names no queue", do="go there from the first page")
    queue = MessageQueue(query.need("topic"), number)
    readers = view.reader.incarnations(queue)
    if not readers:
        raise InvalidError(f"there is no queue {queue}", do="choose one of its topic's page")
    at = query.number("incarnation", len(readers) - 1) or 0
    if at >= len(readers):
        raise InvalidError(
            f"queue {queue} has no incarnation in place {at}", do="choose one of the queue's page"
        )
    return readers[at], at, len(readers)


def queue(sources: PageSources, query: PageQuery) -> Page:
    """A queue: the map of its segments, and a row for each."""
    view, names = _broker(sources, query)
    reader, at, count = _queue_reader(view, query)
    incarnation, name = reader.incarnation, reader.queue.topic
    document = _queue_document(view, reader.queue)
    rows = segment_rows(incarnation)
    maps = _map_rows(sources, view, name, reader.queue.queue_id, incarnation)
    damaged, is_all = _quarantined(view, reader.queue, incarnation)
    low, high = _bounds(incarnation)
    spans = [MapSpan(offset, offset + 1, "quarantined") for offset in damaged]
    maps["quarantined"] = segment_bars(spans, low, high)
    incarnations = view.facts.state.queues[reader.queue]
    names |= {
        "topic": name,
        "queue_id": reader.queue.queue_id,
        "queue": document,
        "incarnation": incarnation,
        "at": at,
        "is_last": at == count - 1,
        "incarnations": [
            {
                "at": number,
                "number": one.number,
                "state": state_word(incarnations, number),
                "reason": one.ended,
                "min_offset": int(one.min_offset),
                "commit_offset": int(one.commit_offset),
            }
            for number, one in enumerate(incarnations)
        ],
        "cut": Cut.of(rows, query.page),
        "maps": maps,
        "low": low,
        "high": high,
        "committed_end": stable_end(incarnation),
        "gaps": [asdict(gap) for gap in incarnation.gaps[:ROWS]],
        "quarantined": damaged[:ROWS],
        "is_all": is_all,
        "has_archive": sources.archive is not None,
    }
    return Page("queue.html", f"{name}, queue {reader.queue.queue_id}", names)


def _queue_document(view: BrokerView, wanted: MessageQueue) -> Document:
    for one in view.document["topics"]:
        if one["topic"] == wanted.topic:
            return next(row for row in one["queues"] if row["queue_id"] == wanted.queue_id)
    raise InvalidError(f"there is no topic {wanted.topic}", do="choose one of its broker's page")


def segment_rows(incarnation: Incarnation) -> list[dict[str, Any]]:
    """A row for each segment, newest first."""
    rows = []
    for segment in incarnation.segments:
        parts = segment.parts
        stored, plain = int(parts.stored_bytes().sum()) if len(parts) else 0, run_bytes(parts)
        rows.append(
            {
                "start": int(segment.base_queue_offset),
                "end": _end(segment),
                "state": "sealed" if segment.sealed else "open",
                "messages": parts.messages,
                "holes": parts.holes,
                "parts": len(parts),
                "size_bytes": stored,
                "plain_bytes": plain,
                "ratio": f"{plain / stored:.1f} to 1" if stored and stored < plain else "-",
                "times": parts.store_times,
            }
        )
    return rows[::-1]


def _quarantined(
    view: BrokerView, wanted: MessageQueue, incarnation: Incarnation
) -> tuple[list[int], bool]:
    """Queue offsets of the records in quarantine, by a listing; and whether it was all of the broker's."""
    if not incarnation.quarantined:
        return [], True
    prefix, found = view.place.prefix, list[int]()
    listed = view.reader.store.list(prefix + QUARANTINE)
    for number, info in enumerate(listed):
        if number >= QUARANTINE_LISTED:
            return sorted(found), False
        key = parse_data_key(prefix, info.key)
        if key and key.queue == wanted and key.incarnation == incarnation.number:
            found.append(key.begins)
    return sorted(set(found)), True


# -- messages ----------------------------------------------------------------------------------------


def messages(sources: PageSources, query: PageQuery) -> Page:
    """Messages of a queue from an offset or a time on, or of a topic with a key; only those that a filter lets pass."""
    view, names = _broker(sources, query)
    said = {name: query.text(name) for name in ("offset", "time", "key", "tag", "sql")}
    if names["kind"] != ROCKETMQ:
        said["key"] = query.values.get("key", "")  # any bytes are one, spaces at its ends too
    wanted = {name: value for name, value in said.items() if value}
    names |= {"topic": query.need("topic"), "said": said, "shows_bodies": sources.shows_bodies}
    topic_queues = sorted(q.queue_id for q in view.facts.state.queues if q.topic == names["topic"])
    names |= {"queue_ids": topic_queues, "missing": [], "turned": {}}
    if "key" in wanted:
        if set(wanted) & {"tag", "sql", "time", "offset"}:
            raise InvalidError(
                "a key is looked for in all queues of the topic", do="leave the other fields empty"
            )
        rows, names["missing"] = browse.find_by_key(view.reader, names["topic"], wanted["key"])
        names |= {"queue_id": None, "at": None, "found": None}
    else:
        reader, at, count = _queue_reader(view, query)
        found = _browsed(sources, query, reader, wanted)
        rows = list(found.rows)
        names |= {
            "queue_id": reader.queue.queue_id,
            "at": at if at < count - 1 else None,
            "found": found,
        }
        names |= {"low": int(reader.incarnation.min_offset), "high": int(reader.cursor.end)}
    names["columns"] = (6 if names["kind"] == ROCKETMQ else 5) + sources.shows_bodies
    names["rows"] = [_message_row(row, names, shows_bodies=sources.shows_bodies) for row in rows]
    return Page("messages.html", f"Messages of {names['topic']}", names)


def _browsed(
    sources: PageSources, query: PageQuery, reader: QueueReader, wanted: Mapping[str, str]
) -> browse.BrowsedPage:
    takes = _filter_of(wanted)
    if (before := query.number("before")) is not None:
        return browse.read_backward(reader, before, takes, sources.clock)
    start = query.number("offset")
    if "time" in wanted:
        if start is not None:
            raise InvalidError(
                "an offset and a time are two places to begin", do="give one of them"
            )
        try:
            time_ms = sources.parse_time(wanted["time"], sources.clock.now_ms())
        except ValueError as error:
            raise InvalidError(
                str(error), do="write it as 2026-07-01T12:00:00Z, or now-2h"
            ) from None
        start = int(reader.offset_by_time(time_ms))
    if start is None:  # the newest ones are what one looks for first
        return browse.read_backward(reader, int(reader.cursor.end), takes, sources.clock)
    return browse.read_forward(reader, start, takes, sources.clock)


def _filter_of(wanted: Mapping[str, str]) -> Filter | None:
    from fetcher.filters import FilterError, compile_filter  # noqa: PLC0415 (few pages filter)

    if "tag" in wanted and "sql" in wanted:
        raise InvalidError("a tag and an SQL92 expression are two filters", do="give one of them")
    try:
        if "sql" in wanted:
            return compile_filter(wanted["sql"], "SQL92")
        return compile_filter(wanted["tag"], "TAG") if "tag" in wanted else None
    except FilterError as error:
        raise InvalidError(f"the filter is not valid: {error}", do="see docs/reading.md") from error


_TIMES: Final = ("store_timestamp_ms", "timestamp_ms", "store_time_ms")


def _message_row(
    row: browse.BrowsedRow, names: Mapping[str, Any], *, shows_bodies: bool
) -> dict[str, Any]:
    """A row of the list. Kafka's and JoyQueue's messages have other words for some of it."""
    shown: dict[str, Any] = {"start": row.start, "end": row.end, "remark": row.remark}
    shown["is_damage"] = row.is_damage
    message = row.message
    if message is None:
        return shown
    body = browse.body_of(message)
    shown |= {
        "message": message,
        "queue_id": message.get("queue_id", message.get("partition", names["queue_id"])),
        "time_ms": next((message[name] for name in _TIMES if name in message), None),
        "key": browse.text_of(message.get("key_base64"), 80),
        "pairs": [
            (name, value if value is None or len(value) <= PAIR_CHARS else f"{value[:PAIR_CHARS]}…")
            for name, value in browse.pairs_of(message)[1][:PAIRS]
        ],
        "size_bytes": None if body is None else len(body),
        "preview": "",
    }
    if shows_bodies and body is not None:
        shown["preview"] = body[:80].decode("utf-8", "backslashreplace")
    return shown


def message(sources: PageSources, query: PageQuery) -> Page:
    """One message: everything that is stored of it, and its body where that is asked for."""
    view, names = _broker(sources, query)
    reader, at, count = _queue_reader(view, query)
    offset = query.number("offset")
    if offset is None:
        raise InvalidError("the address names no offset", do="go there from the list of messages")
    row = browse.read_one(reader, offset)
    if row is None:
        low, high = int(reader.incarnation.min_offset), int(reader.cursor.end)
        raise InvalidError(
            f"{reader.queue} has no queue offset {offset}, only [{low}, {high})",
            do="choose one of these",
        )
    body = browse.body_of(row.message) if row.message is not None else None
    key = browse.key_of(row.message) if row.message is not None else None
    names |= {
        "key": None if key is None else browse.shown_body(key),
        "searched": key.decode("utf-8", "surrogateescape")
        if key and len(key) <= KEY_BYTES
        else None,
        "pairs": browse.pairs_of(row.message) if row.message is not None else ("", []),
        "topic": reader.queue.topic,
        "queue_id": reader.queue.queue_id,
        "at": at if at < count - 1 else None,
        "offset": offset,
        "row": row,
        "end": int(reader.cursor.end),
        "low": int(reader.incarnation.min_offset),
        "fields": browse.without_body(row.message) if row.message is not None else {},
        "size_bytes": None if body is None else len(body),
        "body": browse.shown_body(body) if sources.shows_bodies and body is not None else None,
        "shows_bodies": sources.shows_bodies,
    }
    return Page("message.html", f"{reader.queue}@{offset}", names)


# -- timers, archive, costs, doctor -------------------------------------------------------------------


def _timer_rows(
    store: ObjectStore, view: BrokerView
) -> tuple[list[Any], dict[int, DataError]] | None:
    """The hours of a broker's timers; None: it has none."""
    from timer.dequeue import TimerReader  # noqa: PLC0415 (few brokers have timers)

    place = timers_of(view.place)
    signs = (next(iter(store.list(view.place.prefix + sign)), None) for sign in TIMER_SIGNS)
    if not any(sign is not None for sign in signs):
        return None
    reader, damaged = TimerReader(store, place.prefix), dict[int, DataError]()
    reader.refresh()
    return list(reader.listing(damaged)), damaged


def timers(sources: PageSources, query: PageQuery) -> Page:
    """Timers by hour."""
    from timer.handover import cost_document  # noqa: PLC0415 (likewise)

    view, names = _broker(sources, query)
    found = _timer_rows(sources.watch.store, view)
    hours, damaged = found or ([], {})
    rows = [
        {**picked(row, "hour_ms", "messages", "due_min_ms", "due_max_ms"), "bytes": row.size_bytes}
        for row in hours
    ]
    names |= {
        "has_timers": found is not None,
        "cut": Cut.of(rows, query.page),
        "bins": _bins(rows, sources.time_text),
        "cost": cost_document(hours),
        "damaged": [{"hour": hour, "reason": str(error)} for hour, error in damaged.items()],
        "messages": sum(row["messages"] for row in rows),
        "bytes": sum(row["bytes"] for row in rows),
    }
    return Page("timers.html", f"Timers of {view.place.broker}", names)


def _bins(rows: Sequence[Mapping[str, Any]], said: Callable[[int], str]) -> dict[str, Any]:
    """Bars by hour; by day where these are too many to look at."""
    if not rows:
        return {"bars": [], "unit": "hour"}
    unit, width_ms = ("hour", 3_600_000)
    first, last = rows[0]["hour_ms"], rows[-1]["hour_ms"]
    if (last - first) // width_ms >= HOURS_DRAWN:
        unit, width_ms = "day", 24 * 3_600_000
    while (last - first) // width_ms >= HOURS_DRAWN:
        unit, width_ms = "several days", width_ms * 2
    bins: dict[int, int] = {}
    for row in rows:
        begin = row["hour_ms"] // width_ms
        bins[begin] = bins.get(begin, 0) + row["messages"]
    low, high = min(bins), max(bins)
    filled = [(said(at * width_ms), bins.get(at, 0)) for at in range(low, high + 1)]
    return {"bars": histogram(filled), "unit": unit, "most": max(bins.values())}


def archive(sources: PageSources, query: PageQuery) -> Page:
    """What is archived, what is still to be, and the files."""
    view, names = _broker(sources, query)
    if sources.archive is None:
        return Page("archive.html", f"Archive of {view.place.broker}", {**names, "plan": None})
    found = sources.archive.summary(view)
    wanted = query.text("topic")
    if wanted:
        files = sources.archive.files(view.place, wanted)
        names["files"] = Cut.of(files, query.page)
    names |= {"plan": found.plan, "jobs": found.jobs, "topics": found.topics, "topic": wanted}
    names |= {"archive_url": sources.archive.url, "updated_ms": found.updated_ms}
    return Page("archive.html", f"Archive of {view.place.broker}", names)


def costs(sources: PageSources, query: PageQuery) -> Page:
    """What each writer's requests come to, and what is stored."""
    view = sources.watch.view()
    rows = [
        {name: one.document[name] for name in ("cluster", "broker", "rate", "object_bytes", "size_bytes",
                                               "plain_bytes", "space_amplification", "objects")}
        for one in view.brokers
    ]  # fmt: skip
    rows.sort(key=lambda row: (-(row["rate"] or {}).get("dollars_per_month", -1), row["broker"]))
    total = sum((row["rate"] or {}).get("dollars_per_month", 0) for row in rows)
    names = {
        "cut": Cut.of(rows, query.page),
        "total": total,
        "unread": [one.document() for one in view.unread],
        "is_billed": bills_requests(sources.url),
        "stored_bytes": sum(row["object_bytes"] for row in rows),
    }
    return Page("costs.html", "Costs", {**names, **_when(view)})


def doctor(sources: PageSources, query: PageQuery) -> Page:  # noqa: ARG001 (as all pages)
    """What is set up wrong, as far as that shows without writing."""
    return Page("doctor.html", "Doctor", {"checks": list(sources.doctor())})


PAGES: Final[Mapping[str, Callable[[PageSources, PageQuery], Page]]] = {
    "/": fleet,
    "/broker": broker,
    "/topic": topic,
    "/queue": queue,
    "/messages": messages,
    "/message": message,
    "/timers": timers,
    "/archive": archive,
    "/costs": costs,
    "/doctor": doctor,
}


# --------------------------------------------------------------------------------------------------
# Charts as numbers: where each bar, line and mark stands. Pure; the templates draw them as SVG.
#
# Coordinates are texts, ready for attributes. Every chart has at most as many shapes as it is wide.
# --------------------------------------------------------------------------------------------------


WIDTH: Final = 1000
"""Of a chart, in its own units."""
NARROW: Final = 2.0
"""What is narrower is drawn so wide, so that one gap of a million messages is seen."""


@dataclass(frozen=True, slots=True)
class MapSpan:
    """Queue offsets ``[start, end)`` of one kind."""

    start: int
    end: int
    kind: str  # ``sealed``, ``open``, ``gap``, ``archived``, ``packed`` or ``quarantined``


@dataclass(frozen=True, slots=True)
class ChartBar:
    """A rectangle."""

    x: str
    width: str
    kind: str
    title: str
    y: str = "0"
    height: str = "1"


@dataclass(slots=True)
class _BarRun:
    """Neighbours of one kind that are drawn as one."""

    x: float
    end_x: float
    span: MapSpan
    count: int = 1

    @property
    def bar(self) -> ChartBar:
        width = max(self.end_x - self.x, NARROW)
        many = f"{self.count:,} times " if self.count > 1 else ""
        title = f"{many}{self.span.kind}: [{self.span.start:,}, {self.span.end:,})"
        return ChartBar(_number(min(self.x, WIDTH - width)), _number(width), self.span.kind, title)


def segment_bars(spans: Iterable[MapSpan], low: int, high: int) -> list[ChartBar]:
    """A row of a segment map: neighbours of one kind that are too narrow to be told apart are one bar."""
    scale = WIDTH / max(high - low, 1)
    runs: list[_BarRun] = []
    for span in sorted(spans, key=lambda one: one.start):
        x, end_x = ((min(max(at, low), high) - low) * scale for at in (span.start, span.end))
        last = runs[-1] if runs else None
        if (
            last is not None
            and (last.span.kind, last.span.end) == (span.kind, span.start)
            and end_x - last.x < NARROW
        ):
            last.span, last.end_x = MapSpan(last.span.start, span.end, span.kind), end_x
            last.count += 1
        else:
            runs.append(_BarRun(x, end_x, span))
    return [one.bar for one in _few(runs)]


_COMMON: Final = ("sealed", "archived", "packed")


def _few(runs: list[_BarRun]) -> list[_BarRun]:
    """Of more than the chart is wide one at each place: what is rare before what is common."""
    if len(runs) <= WIDTH:
        return runs
    chosen: dict[int, _BarRun] = {}
    for one in runs:
        place = int(one.x)
        if place not in chosen or one.span.kind not in _COMMON:
            chosen[place] = one
    return [chosen[place] for place in sorted(chosen)]


def histogram(rows: Sequence[tuple[str, int]], height: int = 120) -> list[ChartBar]:
    """A bar for each row, side by side."""
    most, width = max((count for _, count in rows), default=0) or 1, WIDTH / max(len(rows), 1)
    bars = []
    for number, (name, count) in enumerate(rows):
        tall = max(height * count / most, 1.0 if count else 0.0)
        bars.append(
            ChartBar(
                _number(number * width),
                _number(max(width * 0.85, 0.5)),
                "count",
                f"{name}: {count:,}",
                _number(height - tall),
                _number(tall),
            )
        )
    return bars


def line(points: Sequence[tuple[int, float]], height: int = 120) -> str:
    """The points of a polyline, from the first time to the last."""
    if not points:
        return ""
    first, last = points[0][0], points[-1][0]
    most, span = max(value for _, value in points) or 1, max(last - first, 1)
    return " ".join(
        f"{_number((at - first) / span * WIDTH)},{_number(height - value / most * (height - 4))}"
        for at, value in points
    )


def thinned(points: Sequence[tuple[int, float]], most: int) -> list[tuple[int, float]]:
    """So many points at most: of neighbours the highest, since that is what one looks for."""
    step = -(-len(points) // most)
    if step <= 1:
        return list(points)
    return [
        max(points[at : at + step], key=lambda one: one[1]) for at in range(0, len(points), step)
    ]


def _number(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")
