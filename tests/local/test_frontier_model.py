"""A running store's frontier against a model: random incarnations of a broker, with crashes after which it gives records up.

Two oracles. ``told_by_bytes`` reads the files once more, record by record in the plain way, and says what may be handed out
by the rules in ``docs/local-store.md``: a new look and a follower give exactly that, at any moment. The broker knows what
it wrote in the incarnation that counts: all of it that is listed is given, and nothing that was given up. (Between the two
is what a stale entry lists before its time, by naming the very place of a new record of that queue and offset. And where the
log has gone on in a new file, so that all before it counts, a follower that begins there takes a stale entry for a damaged
one, and finds the new record of its offset before the broker lists it.)
"""

from __future__ import annotations

import shutil
import struct
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import mkdtemp

from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from support import following
from support.broker_files import LOG_FILE_BYTES, QUEUE_FILE_BYTES, START_MS, FakeBroker

from tiered.format.record import MAGIC_BLANK, RecordError, decode_record
from tiered.model import MessageQueue

ENTRY = struct.Struct(">qiq")
BODIES = (b"x" * 100, b"y" * 100, b"z" * 299)
"""Two of one size: so new records end where given-up ones begin."""
Messages = dict[MessageQueue, dict[int, bytes]]


@dataclass
class Written:
    """A record of the incarnation that counts."""

    queue: MessageQueue
    offset: int
    place: int
    raw: bytes


@dataclass
class Incarnation:
    """A broker, and what it knows."""

    broker: FakeBroker
    records: list[Written] = field(default_factory=list)
    listed: int = 0

    def put(self, queue_id: int, body: bytes) -> None:
        queue = MessageQueue("t", queue_id)
        offset = self.broker.offsets.get(queue, 0)
        self.broker.now_ms += 1
        raw = self.broker.append(queue_id, body)
        self.records.append(Written(queue, offset, self.broker.position - len(raw), raw))

    def list(self, count: int) -> None:
        self.listed = min(len(self.records), self.listed + count)
        self.broker.dispatch(count)

    def restart(self, given_up: int) -> None:
        """Crash, and start again: the last records fail, and are cut off in memory; the rest is listed."""
        broker = self.broker
        broker.crash()
        kept = len(self.records) - min(given_up, len(self.records))
        lost = self.records[kept:]
        if lost:
            broker.write_log(lost[0].place + 95, b"!!!")
            broker.position = lost[0].place
        for file in broker.store.glob("commitlog/*"):
            if int(file.name) > max(0, broker.position - 1):
                file.unlink()  # a start deletes what lies behind the file with the end
        del self.records[kept:]
        broker.offsets = {one.queue: one.offset + 1 for one in self.records}
        self._list_all()
        broker.start(broker.now_ms + 1000)

    def _list_all(self) -> None:
        """A start lists what it keeps before it takes messages."""
        self.broker.undispatched.clear()
        for one in self.records[self.listed :]:
            self.broker.write_entry(one.queue, one.offset, one.place, len(one.raw))
        self.listed = len(self.records)

    def check_found(self, given: Messages, told: Messages) -> None:
        """What is told, and of the incarnation that counts only what a stale entry names wrongly."""
        places = {(one.queue, one.offset): one for one in self.records}
        for queue, found in given.items():
            for at in found.keys() - told.get(queue, {}).keys():
                one = places[queue, at]
                assert found[at] == one.raw
                assert entry(self.broker.store, queue, at) not in {-1, one.place}
        assert {queue: given.get(queue, {}) | found for queue, found in told.items()} == given

    def check(self, told: Messages) -> None:
        """All that is listed, and nothing that does not count."""
        given = {(queue, at): raw for queue, found in told.items() for at, raw in found.items()}
        known = {(one.queue, one.offset): one.raw for one in self.records}
        assert given.items() <= known.items()
        assert {(one.queue, one.offset) for one in self.records[: self.listed]} <= given.keys()


def told_by_bytes(store: Path, started_ms: int) -> Messages:
    """What may be handed out of the files as they are, record by record."""
    files = sorted(store.glob("commitlog/*"))
    log = {int(file.name): file.read_bytes() for file in files}
    newest = max((base for base in log if sound(log, base)), default=0)
    end = walked(store, log, newest, started_ms)
    found: Messages = {}
    for folder in store.glob("consumequeue/t/*"):
        queue = MessageQueue("t", int(folder.name))
        for file in sorted(folder.iterdir()):
            entries = ENTRY.iter_unpack(file.read_bytes())
            for offset, (place, size, _) in enumerate(entries, int(file.name) // ENTRY.size):
                raw = sound(log, place) if size and place < end else b""
                if raw and names(raw) == (queue, offset):
                    found.setdefault(queue, {})[offset] = raw
    return found


def walked(store: Path, log: dict[int, bytes], place: int, started_ms: int) -> int:
    """Where the walk stops: unsound, stored before the start behind something newer, or not listed."""
    has_met_new = False
    while True:
        base = place - place % LOG_FILE_BYTES
        data = log.get(base, b"")
        if int.from_bytes(data[place - base + 4 : place - base + 8], "big") == MAGIC_BLANK:
            place = base + LOG_FILE_BYTES
            continue
        raw = sound(log, place)
        if not raw:
            return place
        stored_ms = decode_record(raw, 0).store_timestamp_ms
        if has_met_new and stored_ms < started_ms:
            return place
        if entry(store, *names(raw)) != place:
            return place
        has_met_new |= stored_ms >= started_ms
        place += len(raw)


def sound(log: dict[int, bytes], place: int) -> bytes:
    """The record at a place, if it is one and says so."""
    base = place - place % LOG_FILE_BYTES
    data = log.get(base, b"")
    try:
        found = decode_record(data, place - base)
    except RecordError:
        return b""
    raw = data[place - base : place - base + found.size]
    return raw if found.physical_offset == place else b""


def names(raw: bytes) -> tuple[MessageQueue, int]:
    found = decode_record(raw, 0)
    return MessageQueue(found.topic, found.queue_id), found.queue_offset


def entry(store: Path, queue: MessageQueue, offset: int) -> int:
    """The place that a queue lists at an offset; -1 where it lists none."""
    at = offset * ENTRY.size
    base = at - at % QUEUE_FILE_BYTES
    file = store / "consumequeue" / queue.topic / str(queue.queue_id) / f"{base:020d}"
    if not file.exists():
        return -1
    place, size, _ = ENTRY.unpack_from(file.read_bytes(), at - base)
    return int(place) if size else -1


steps = st.one_of(
    st.tuples(st.just("put"), st.integers(0, 2), st.sampled_from(BODIES)),
    st.tuples(st.just("put"), st.just(0), st.just(BODIES[0])),
    st.tuples(st.just("list"), st.integers(1, 6), st.just(b"")),
    st.tuples(st.just("list"), st.just(100), st.just(b"")),
    st.tuples(st.just("restart"), st.integers(0, 12), st.just(b"")),
)


@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@example(  # a new record stands where a stale entry names it, before the broker lists the one ahead of it
    before=43,
    given_up=7,
    incarnations=[
        [
            ("put", 0, BODIES[0]),
            ("put", 0, BODIES[2]),
            ("list", 100, b""),
            ("put", 1, BODIES[0]),
            ("put", 0, BODIES[0]),
            ("list", 100, b""),
        ]
    ],
)
@example(  # the last put begins a file, and the entry that was given up still stands where the one before is not listed yet
    before=38,
    given_up=1,
    incarnations=[[*[("put", 0, BODIES[0])] * 3, ("put", 1, BODIES[0]), ("put", 0, BODIES[0])]],
)
@given(
    before=st.integers(0, 45),
    given_up=st.integers(0, 12),
    incarnations=st.lists(st.lists(steps, max_size=12), min_size=1, max_size=4),
)
def test_what_counts_is_handed_out_and_nothing_else(
    before: int, given_up: int, incarnations: list[list[tuple[str, int, bytes]]]
):
    """Whatever stands behind the end: given-up records in step with the new ones, one of them or many, stale entries."""
    folder = Path(mkdtemp(prefix="tiered-frontier-"))
    incarnation = Incarnation(FakeBroker(folder / "store"))
    try:
        incarnation.broker.start(START_MS)
        for number in range(before):
            incarnation.put(number % 2, BODIES[0])
        incarnation.list(before)
        incarnation.restart(given_up)
        for one in incarnations:
            follow_through(incarnation, one)
            incarnation.restart(given_up)
    finally:
        incarnation.broker.close()
        shutil.rmtree(folder)


def follow_through(incarnation: Incarnation, todo: list[tuple[str, int, bytes]]) -> None:
    """Some steps; at each of them a new look, and a follower from the beginning."""
    early = following.open_store(incarnation.broker.store)
    follower, taken = early.follow({}), following.Taken()
    started_ms = int((incarnation.broker.store / "abort").stat().st_mtime_ns // 1_000_000)
    for what, number, body in todo:
        if what == "put":
            incarnation.put(number, body)
        elif what == "list":
            incarnation.list(number)
        else:
            break
        told = told_by_bytes(incarnation.broker.store, started_ms)
        incarnation.check(told)
        following.drain(follower, taken)
        assert dict(taken.raw) == told
        late = following.open_store(incarnation.broker.store)
        late.refresh()
        assert dict(following.read_all(late).raw) == told
        incarnation.check_found(dict(following.follow_all(late, 700).raw), told)
        late.close()
    early.close()
