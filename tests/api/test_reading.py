"""The Python API: what it gives is what is in the tier, in order, once, and it says clearly what it cannot give."""

from __future__ import annotations

import os
import threading
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import pytest
from support.captures import in_topic
from support.opened import ORDERS, Made
from support.tiers import TIME_MS

from tiered.api.reading import interleave
from tiered.api.tier import open as open_tier
from tiered.errors import ClosedError, DataError, ExpiredError, InvalidError
from tiered.model import MessageQueue, QueueBounds

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from support.servers import S3Server


@pytest.fixture(scope="module")
def basic_tier(tmp_path_factory: pytest.TempPathFactory) -> str:
    from support.captures import unpack
    from support.command_line import attach

    store = unpack("s01-basic", tmp_path_factory.mktemp("stores"))
    return attach(store, tmp_path_factory.mktemp("tiers") / "basic")


@pytest.fixture(scope="module")
def batches_tier(tmp_path_factory: pytest.TempPathFactory) -> str:
    from support.captures import unpack
    from support.command_line import attach

    store = unpack("s11-lmq-batchcq", tmp_path_factory.mktemp("stores"))
    return attach(store, tmp_path_factory.mktemp("tiers") / "batches")


def made(*parts: int) -> Made:
    tier = Made()
    number = 0
    for count in parts:
        tier.add(*(b"body %d" % n for n in range(number, number + count)))
        number += count
    return tier


@pytest.mark.parametrize(
    ("fixture", "name", "topic"),
    [
        ("basic_tier", "s01-basic", "orders"),
        ("basic_tier", "s01-basic", "many-properties"),
        ("batches_tier", "s11-lmq-batchcq", "grouped"),
    ],
)
def test_messages_are_what_java_reads(
    fixture: str, name: str, topic: str, request: pytest.FixtureRequest
):
    expected = in_topic(name, topic)
    with open_tier(request.getfixturevalue(fixture)) as tier:
        assert topic in tier.topics()
        found = [
            message.to_json()
            for q in tier.queues(topic)
            for message in tier.read(topic, q.queue_id)
        ]
        mixed = [message.to_json() for message in tier.read_topic(topic, queues_at_once=3)]
    assert [{k: v for k, v in m.items() if k != "log_offset"} for m in found] == expected
    mixed.sort(key=lambda m: (m["queue_id"], m["queue_offset"]))
    assert mixed == found


def test_start_and_stop_are_half_open_and_cut_to_what_there_is():
    tier = made(5, 5)
    with tier.open() as opened:
        assert opened.bounds("orders", 0) == QueueBounds(0, 10)

        def offsets(*bounds: int | None) -> list[int]:
            return [m.queue_offset for m in opened.read("orders", 0, *bounds)]

        assert offsets(3, 7) == [3, 4, 5, 6]
        assert offsets(8) == [8, 9]
        assert offsets(0, 99) == list(range(10))
        assert offsets(4, 4) == offsets(7, 3) == offsets(99) == []
        with pytest.raises(InvalidError, match="below zero"):
            offsets(-1)


def test_what_is_not_there_is_said_at_once():
    with made(1).open() as tier:
        for call in (
            lambda: tier.read("orders", 7),
            lambda: tier.read("nothing", 0),
            lambda: tier.read("orders", 0, incarnation=3),
            lambda: tier.bounds("orders", 9),
            lambda: tier.offset_for_time("orders", 9, 0),
        ):
            with pytest.raises(InvalidError, match="no queue"):
                call()
        with pytest.raises(InvalidError, match="no topic"):
            tier.read_topic("nothing")
        with pytest.raises(InvalidError, match="contradict"):
            tier.read("orders", 0, tags="a", sql="b = 1")


@pytest.mark.parametrize("limit", [0, -1])
def test_limits_that_let_nothing_through_are_refused_at_the_call(limit: int):
    with made(3).open() as tier:
        for call in (
            lambda: tier.query("orders", "key", count=limit),
            lambda: tier.read_topic("orders", queues_at_once=limit),
            lambda: tier.read_topic_arrow("orders", queues_at_once=limit),
            lambda: tier.read_topic_records("orders", batch_bytes=limit),
            lambda: tier.read_records("orders", 0, batch_bytes=limit),
            lambda: tier.read_arrow("orders", 0, batch_bytes=limit),
            lambda: tier.follow("orders", 0, pause_s_max=limit),
        ):
            with pytest.raises(InvalidError, match=f"{limit}"):
                call()
        with pytest.raises(InvalidError, match="below zero: -1"):
            next(tier.follow("orders", 0, -1))
        assert len(tier.query("orders", "key", count=1)) == 0
    for options in ({"requests": limit}, {"memory_bytes": limit}):
        with pytest.raises(InvalidError):
            made(1).open(**options)


def test_an_old_incarnation_is_read_by_its_number():
    tier = made(3)
    tier.begin_again()
    tier.add(b"new")
    with tier.open() as opened:
        assert [m.body for m in opened.read("orders", 0)] == [b"new"]
        assert len(list(opened.read("orders", 0, incarnation=0))) == 3


def test_a_gap_is_passed_over():
    tier = made(2)
    tier.builder.gap(5, queue=ORDERS)
    tier.add(b"behind")
    with tier.open() as opened:
        assert [m.queue_offset for m in opened.read("orders", 0)] == [0, 1, 7]


def test_holes_have_no_message_and_inner_messages_have_one_each():
    tier = Made()
    tier.builder.add([b"a", None, b"b"], queue=ORDERS)
    with tier.open() as opened:
        assert [(m.queue_offset, m.body) for m in opened.read("orders", 0)] == [
            (0, b"a"),
            (2, b"b"),
        ]


def test_filters():
    with made(4).open() as tier:
        assert len(list(tier.read("orders", 0, tags="a || z"))) == 4
        assert list(tier.read("orders", 0, tags="z")) == []
        assert len(list(tier.read("orders", 0, sql="TAGS = 'a'"))) == 4
        assert list(tier.read_topic("orders", sql="TAGS = 'z'")) == []
        with pytest.raises(InvalidError):
            tier.read("orders", 0, sql="= =")


def test_offset_for_time_takes_milliseconds_and_datetimes():
    with made(5, 5).open() as tier:
        assert tier.offset_for_time("orders", 0, TIME_MS + 6) == 6
        assert tier.offset_for_time("orders", 0, TIME_MS + 6, upper=True) == 6
        assert tier.offset_for_time("orders", 0, TIME_MS - 1, upper=True) == 0
        assert tier.offset_for_time("orders", 0, TIME_MS + 99) == 10
        assert tier.offset_for_time("orders", 0, TIME_MS + 99, upper=True) == 9
        moment = datetime.fromtimestamp((TIME_MS + 6) / 1000, UTC)
        assert tier.offset_for_time("orders", 0, moment) == 6
        with pytest.raises(InvalidError, match="time zone"):
            tier.offset_for_time("orders", 0, datetime(2026, 1, 1))  # noqa: DTZ001


def test_query_finds_by_key(basic_tier: str):
    wanted = next(m for m in in_topic("s01-basic", "orders") if m["keys"])
    with open_tier(basic_tier) as tier:
        key = wanted["keys"].split()[0]
        found = tier.query("orders", key)
        assert wanted["msg_id"] in {message.msg_id for message in found}
        assert all(key in (message.keys or "").split() for message in found)
        (again,) = tier.query("orders", wanted["msg_id"])
        expected = {k: v for k, v in again.to_json().items() if k != "log_offset"}
        assert expected == wanted
        (same,) = tier.read(
            "orders", wanted["queue_id"], again.queue_offset, again.queue_offset + 1
        )
        assert same.to_json() == again.to_json()
        assert bytes(same.raw) == bytes(again.raw)
        assert len(tier.query("orders", "no such key")) == 0
        with pytest.raises(InvalidError, match="no topic order"):
            tier.query("order", key)


def test_a_message_says_what_cat_prints(basic_tier: str):
    with open_tier(basic_tier) as tier:
        message = next(tier.read("orders", 0))
    said = message.to_json()
    for name in ("topic", "queue_id", "queue_offset", "store_timestamp_ms", "born_timestamp_ms",
                 "born_host", "tags", "keys", "properties", "msg_id", "sys_flag", "flag",
                 "reconsume_times", "size", "log_offset"):  # fmt: skip
        assert getattr(message, name) == said[name], name
    assert message.store_time.timestamp() * 1000 == pytest.approx(message.store_timestamp_ms)
    assert repr(message) == "<Message orders/0@0>"
    alone = message.detached()
    assert alone.to_json() == said
    assert len(alone.raw.obj) == message.size


def test_follow_gives_what_is_committed_later_and_ends_when_told():
    tier, stop, found = made(3), threading.Event(), []
    with tier.open() as opened:
        for message in opened.follow("orders", 0, 1, stop=stop, pause_s_max=0.01):
            found.append(message.body)
            if len(found) == 2:
                tier.add(b"new")
            if len(found) == 3:
                stop.set()
    assert found == [b"body 1", b"body 2", b"new"]


def test_follow_begins_at_the_end_and_goes_into_a_new_incarnation():
    tier, stop, found = made(3), threading.Event(), []
    with tier.open() as opened:
        tier.begin_again()
        tier.add(b"first again")
        for message in opened.follow("orders", 0, stop=stop, pause_s_max=0.01):
            found.append((message.queue_offset, message.body))
            stop.set()
    assert found == [(0, b"first again")]


def test_follow_gives_what_came_in_place_of_what_was_truncated():
    tier, stop, found = made(1, 1, 1), threading.Event(), []
    with tier.open() as opened:
        for message in opened.follow("orders", 0, 0, stop=stop, pause_s_max=0.01):
            found.append((message.queue_offset, message.body))
            if len(found) == 3:
                tier.truncate(1)
                tier.add(b"other 1", b"other 2", b"other 3")
            if len(found) == 6:
                stop.set()
    assert found[:3] == [(n, b"body %d" % n) for n in range(3)]
    assert found[3:] == [(n, b"other %d" % n) for n in (1, 2, 3)]


def test_follow_with_a_start_to_come_waits_for_it():
    tier, stop, found = made(3), threading.Event(), []
    with tier.open() as opened:
        tier.add(b"3", b"4", b"5")
        for message in opened.follow("orders", 0, 5, stop=stop, pause_s_max=0.01):
            found.append(message.body)
            stop.set()
    assert found == [b"5"]


def test_several_iterators_at_once_have_read_ahead_of_their_own():
    tier = made(50)
    with tier.open() as opened:
        one, two = opened.read("orders", 0), opened.read("orders", 0, 10)
        pairs = [(next(one).queue_offset, next(two).queue_offset) for _ in range(40)]
        assert pairs == [(n, n + 10) for n in range(40)]
        assert opened._opened.fetcher.stats().streams == 2
        one.close()
        two.close()
        assert opened._opened.fetcher.stats().streams == 0
        assert len(list(opened.read("orders", 0))) == 50
        assert opened._opened.fetcher.stats().streams == 0  # it has come to the end


def test_damage_is_an_error_and_nothing_of_it_is_given(tmp_path: Path):
    from support.captures import unpack
    from support.command_line import attach

    url = attach(unpack("s01-basic", tmp_path), tmp_path / "tier")
    with open_tier(url) as tier:
        incarnation = tier._opened.state.incarnation(MessageQueue("orders", 0))
        assert incarnation is not None
        for part in incarnation.parts():
            (file,) = (tmp_path / "tier").rglob(part.bundle.key)
            data = bytearray(file.read_bytes())
            data[part.section.start + part.log_bytes // 2] ^= 0x40
            file.chmod(0o600)
            file.write_bytes(data)
    good = {
        m["queue_offset"]: m["msg_id"] for m in in_topic("s01-basic", "orders") if not m["queue_id"]
    }
    with open_tier(url) as tier:
        found = []
        with pytest.raises(DataError):
            found.extend(tier.read("orders", 0))
        assert all(good[m.queue_offset] == m.msg_id for m in found)


def test_closed():
    tier = made(3).open()
    reading = tier.read("orders", 0)
    tier.close()
    with pytest.raises(ClosedError):
        next(reading)
    tier.close()


def test_a_query_that_is_closed_under_says_so(basic_tier: str, monkeypatch: pytest.MonkeyPatch):
    """Its threads are shut down when it has found in the index where to look."""
    (wanted, *_) = in_topic("s01-basic", "orders")
    tier = open_tier(basic_tier)
    kind, real = type(tier._opened.store), type(tier._opened.store).get

    def closing(*arguments: Any) -> Any:
        tier.close()
        return real(*arguments)

    monkeypatch.setattr(kind, "get", closing)
    with pytest.raises(ClosedError):
        tier.query("orders", wanted["msg_id"])


def test_what_expires_while_it_is_read_says_where_to_go_on():
    tier = Made()
    tier.builder.add([b"x"] * 3, queue=ORDERS, roll=True)
    tier.builder.add([b"y"] * 3, queue=ORDERS, roll=True)
    with tier.open() as opened:
        tier.expire(0, 3)
        with pytest.raises(ExpiredError) as told:
            next(opened.read("orders", 0))
        assert told.value.next_offset == 3
        opened.refresh()
        assert [m.queue_offset for m in opened.read("orders", 0, told.value.next_offset)] == [
            3,
            4,
            5,
        ]


def test_a_tier_in_s3(s3_environment: S3Server, tmp_path: Path):
    from tiered.__main__ import run
    from tiered.cli.call import Surroundings

    bucket = s3_environment.bucket()
    store, url = str(tmp_path / "store"), f"s3://{bucket}/tier"
    make = ["bench", "make-store", store, "--messages", "60", "--queues", "3", "--quiet"]
    for arguments in (make, ["attach", store, "--to", url, "--once", "--quiet", "--nice", "0"]):
        assert run(arguments, Surroundings(dict(os.environ))) == 0
    with open_tier(url) as tier:
        found = [(m.queue_id, m.queue_offset, m.body) for m in tier.read_topic("bench-0")]
        rows = [row for b in tier.read_topic_arrow("bench-0") for row in b.to_pylist()]
        assert len({place[:2] for place in found}) == 60
        assert sorted((r["queue_id"], r["queue_offset"], r["body"]) for r in rows) == sorted(found)


def test_queues_of_several_topics():
    tier = made(1)
    tier.add(b"z", queue=MessageQueue("other", 2))
    with tier.open() as opened:
        assert opened.topics() == ["orders", "other"]
        assert opened.queues("other") == [MessageQueue("other", 2)]
        assert len(opened.queues()) == 2


def test_sources_take_turns_and_the_first_error_ends_all():
    def numbers(base: int, count: int, *, fails: bool = False) -> Iterator[int]:
        yield from range(base, base + count)
        if fails:
            raise DataError("made so")

    sources = [numbers(0, 3), numbers(10, 1), numbers(20, 2), numbers(30, 2)]
    assert list(interleave(sources, at_once=2)) == [0, 10, 1, 2, 20, 21, 30, 31]
    assert list(interleave([], at_once=2)) == []
    got = []
    with pytest.raises(DataError):
        got.extend(interleave([numbers(0, 9), numbers(10, 1, fails=True)], at_once=2))
    begun = interleave([numbers(0, 9)], at_once=2)
    assert next(begun) == 0
    begun.close()
    names = [t.name for t in threading.enumerate() if t.name.startswith("tiered-read")]
    assert not names


def test_an_error_does_not_wait_for_what_the_others_are_amid_of():
    go_on, is_amid = threading.Event(), threading.Event()
    in_vain: list[bool] = []

    def slow() -> Iterator[int]:
        yield 2
        is_amid.set()
        in_vain.append(not go_on.wait(60))

    def broken() -> Iterator[int]:
        yield 1
        is_amid.wait(20)
        raise DataError("made so")

    both = interleave([broken(), slow()], at_once=2)
    assert [next(both), next(both)] == [1, 2]
    try:
        with pytest.raises(DataError):
            next(both)
        assert not in_vain, "the other one still waits"
    finally:
        go_on.set()


def test_what_is_at_hand_is_made_without_a_thread_and_errors_wait_for_their_turn():
    class Source:
        def __init__(self, *elements: int | Exception, is_ready: bool) -> None:
            self.elements, self.is_ready = iter(elements), is_ready
            self.threads: set[int] = set()

        def __iter__(self) -> Source:
            return self

        def __next__(self) -> int:
            self.threads.add(threading.get_ident())
            element = next(self.elements)
            if isinstance(element, Exception):
                raise element
            return element

    here, far = Source(1, 3, is_ready=True), Source(2, 4, is_ready=False)
    assert list(interleave([here, far], at_once=2)) == [1, 2, 3, 4]
    assert here.threads == {threading.get_ident()}
    assert threading.get_ident() not in far.threads
    broken = Source(ValueError("broken"), is_ready=True)
    both = interleave([Source(1, is_ready=True), broken], at_once=2)
    assert next(both) == 1
    with pytest.raises(ValueError, match="broken"):
        next(both)


def test_who_cannot_say_whether_he_is_ready_fails_in_his_turn():
    class Unsure:
        @property
        def is_ready(self) -> bool:
            raise DataError("the journal is damaged", where="b")

        def __iter__(self) -> Unsure:
            return self

        def __next__(self) -> int:
            raise AssertionError

    both = interleave([iter([1, 2]), Unsure()], at_once=2)
    assert next(both) == 1
    with pytest.raises(DataError, match="the journal is damaged"):
        next(both)
