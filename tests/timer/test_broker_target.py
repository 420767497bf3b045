"""Live brokers as the target: which answers mean what, what is asked again, and what comes once though answers are lost."""

from __future__ import annotations

import contextlib
import random
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.brokers import FakeCluster
from support.timers import Killed, Timers, wheel_record

from tiered.errors import FencedError, StoreUnavailableError
from tiered.format.block import parse_records
from tiered.format.properties import join_properties
from tiered.format.record import decode_record, encode_record
from tiered.format.remoting import Command
from timer.broker_target import WAITED_S, BrokerTarget, Outcome, Producer, deliver_at, outcome_of
from timer.records import asked_times

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from timer.dequeue import DueMessage
    from timer.handover import HandOver


TOO_FAR = (
    "timer message illegal, the delay time should not be bigger than the max delay 30000ms;"
    " or if set del msg, the delay time should be bigger than the current time"
)


@pytest.fixture
def timers() -> Iterator[Timers]:
    with Timers() as made:
        yield made


def target_of(
    cluster: FakeCluster,
    timers: Timers,
    source: str = "gone",
    is_ours: Callable[[], bool] = lambda: True,
) -> BrokerTarget:
    producer = Producer([cluster.address], timers.clock)
    cluster.clients.callback(producer.close)
    return BrokerTarget(
        producer, source=source, seed="s/", clock=timers.clock, stop=timers.stop, is_ours=is_ours
    )


def hand(timers: Timers, target: BrokerTarget, batch: int = 100) -> HandOver:
    """A whole run, which tries again as long as brokers are at fault."""
    run = timers.run(target, batch=batch)
    for _ in range(400):
        try:
            if not run.step():
                break
        except StoreUnavailableError:
            timers.clock.advance(0.5)
    return run


def keys(cluster: FakeCluster) -> list[str]:
    return sorted(r.properties["UNIQ_KEY"] for b in cluster.brokers.values() for r in b.got)


def wanted(count: int) -> list[str]:
    return [f"{n:032X}" for n in range(count)]


def test_a_message_keeps_what_users_gave_it_and_loses_what_the_first_broker_added(timers: Timers):
    timers.put(
        [timers.now_ms + 5_000],
        KEYS="a b", TAGS="t", colour="red", WAIT="true", DELAY="9", TIMER_DELAY_SEC="5", TRAN_MSG="true",
        TIMER_ROLL_TIMES="2", CLUSTER="c", TIMER_ENQUEUE_MS="1", MSG_REGION="r", TRACE_ON="true",
    )  # fmt: skip
    with FakeCluster("b") as cluster:
        hand(timers, target_of(cluster, timers))
        (got,) = cluster.brokers["b"].got
    assert got.properties == {
        "KEYS": "a b", "TAGS": "t", "colour": "red", "WAIT": "true", "UNIQ_KEY": wanted(1)[0],
        "REAL_TOPIC": "orders", "TIMER_DELIVER_MS": str(timers.now_ms + 6_000),
    }  # fmt: skip
    assert (got.queue_id, got.body, got.born_timestamp_ms) == (2, b"x" * 40, 1_600_000_000_000)


def test_two_brokers_share_them_and_the_other_one_takes_what_one_refuses(timers: Timers):
    timers.put([timers.now_ms + n for n in range(60)])
    with FakeCluster("a", "b") as cluster:
        cluster.brokers["a"].codes = [
            (14, "no"),
            (16, "no"),
            (2, "busy"),
            (215, "flow"),
            (1, "pc"),
            (3, "request type 310 not supported"),
        ] * 2
        run = hand(timers, target_of(cluster, timers))
        assert keys(cluster) == wanted(60)
        assert all(b.got for b in cluster.brokers.values())
    assert (run.counters.handed, run.counters.refused, run.counters.retries) == (60, 0, 0)


@pytest.mark.parametrize("is_stored", [True, False])
def test_a_send_without_an_answer_is_asked_about(is_stored: bool, timers: Timers):
    timers.put([timers.now_ms + n for n in range(40)])
    with FakeCluster("a", "b") as cluster:
        for broker in cluster.brokers.values():
            broker.swallows, broker.loses = (3, 0) if is_stored else (0, 3)
        hand(timers, target_of(cluster, timers))
        assert keys(cluster) == wanted(40)


@pytest.mark.parametrize("count", [1, 5])
def test_what_a_broker_stores_when_it_goes_on_after_a_pause_is_not_given_again(
    count: int, timers: Timers
):
    """It had stopped for longer than we wait, and answers questions as soon as it stores what was sent before."""
    timers.put([timers.now_ms + n for n in range(count)])
    with FakeCluster("a") as cluster:
        cluster.brokers["a"].freezes = count
        hand(timers, target_of(cluster, timers))
        assert keys(cluster) == wanted(count)


@pytest.mark.parametrize("known", range(0, 26, 5))
def test_a_run_that_was_killed_in_a_batch_is_gone_on_with(known: int, timers: Timers):
    """The next process asks both brokers, of each message, whether they have it."""
    timers.put([timers.now_ms + n for n in range(25)])
    with FakeCluster("a", "b") as cluster:
        first = target_of(cluster, timers)
        give, first.give = first.give, _dying  # type: ignore[method-assign]
        run = timers.run(first, batch=25)
        with pytest.raises(Killed) as died:
            run.step()
        give(died.value.args[0])
        del cluster.brokers["a"].got[known:]
        run = hand(timers, target_of(cluster, timers), batch=25)
        assert keys(cluster) == wanted(25)
        assert run.counters.found >= known


def _dying(messages: Sequence[DueMessage]) -> list[int]:
    raise Killed(messages)


def test_a_run_that_wakes_up_in_a_batch_sends_no_more_of_it(timers: Timers):
    """Another run has begun meanwhile, and gives each message once; what was on its way is asked about."""
    timers.put([timers.now_ms + n for n in range(600)])
    with FakeCluster("a") as cluster:
        asked = iter(range(10**6))
        paused = target_of(cluster, timers, is_ours=lambda: next(asked) < 2)
        run = timers.run(paused, batch=600)
        with pytest.raises(StoreUnavailableError, match="another run may have begun"):
            run.step()
        assert 0 < len(keys(cluster)) < 600
        hand(timers, target_of(cluster, timers), batch=600)
        assert keys(cluster) == wanted(600)
        with pytest.raises(StoreUnavailableError, match="another run may have begun"):
            run.step()
        with pytest.raises(FencedError):
            run.refresh()
        assert keys(cluster) == wanted(600)


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_kills_lost_answers_and_brokers_that_come_and_go(seed: int):
    """As long as no broker is away for longer than it is waited for, each message is with one broker, once."""
    rng = random.Random(seed)
    with Timers() as timers, FakeCluster("a", "b", "c") as cluster:
        dues = [timers.now_ms + rng.randrange(3_600_000) for _ in range(rng.randrange(1, 40))]
        timers.put(dues)
        for _ in range(rng.randrange(12)):
            for broker in cluster.brokers.values():
                broker.swallows, broker.loses = rng.choice([0, 0, 1, 2]), rng.choice([0, 0, 1])
                broker.codes = rng.choices(
                    [(2, "busy"), (14, "away"), (1, "full")], k=rng.randrange(4)
                )
            cluster.hidden = set(rng.sample("abc", rng.randrange(4)))
            target = target_of(cluster, timers)
            run = timers.run(target, batch=rng.randint(1, 12))
            for _ in range(rng.randrange(4)):
                with contextlib.suppress(StoreUnavailableError):
                    run.step()
            if rng.random() < 0.5:
                give, target.give = target.give, _dying  # type: ignore[method-assign]
                with contextlib.suppress(StoreUnavailableError, Killed):
                    try:
                        run.step()
                    except Killed as died:
                        give(died.args[0][: rng.randrange(12)])
                        raise
        for broker in cluster.brokers.values():
            broker.swallows = broker.loses = 0
            broker.codes = []
        cluster.hidden = set()
        hand(timers, target_of(cluster, timers))
        assert keys(cluster) == wanted(len(dues))


def test_messages_without_a_unique_id_are_known_again_too(timers: Timers):
    records = [wheel_record(n, timers.now_ms + 1) for n in range(12)]
    timers.put_records([one.replace(b"UNIQ_KEY", b"NONE_KEY") for one in records])
    with FakeCluster("a") as cluster:
        cluster.brokers["a"].swallows = 2
        hand(timers, target_of(cluster, timers))
        assert len(set(keys(cluster))) == len(keys(cluster)) == 12


def test_two_messages_of_one_id_are_two(timers: Timers):
    timers.put([timers.now_ms + 1] * 3, UNIQ_KEY="K")
    with FakeCluster("a") as cluster:
        cluster.brokers["a"].swallows = 1
        hand(timers, target_of(cluster, timers))
        assert keys(cluster) == ["K"] * 3


def test_a_broker_that_may_have_it_and_is_gone_is_waited_for(timers: Timers):
    timers.put([timers.now_ms + n for n in range(20)])
    with FakeCluster("a", "b") as cluster:
        cluster.brokers["a"].swallows = 1
        target = target_of(cluster, timers)
        run = timers.run(target)
        with pytest.raises(StoreUnavailableError, match="not taken"):
            run.step()
        cluster.hidden.add("a")
        with pytest.raises(StoreUnavailableError, match="broker a: no name server knows it"):
            run.step()
        in_time = len(keys(cluster))
        assert in_time < 20
        timers.clock.advance(WAITED_S)
        while run.step():
            pass
        assert len(keys(cluster)) == 20 + len(cluster.brokers["a"].got)  # those of a came twice
        assert sorted(set(keys(cluster))) == wanted(20)


def test_a_topic_that_comes_late_loses_nothing_and_one_that_never_comes_is_refused(timers: Timers):
    timers.put([timers.now_ms + 1], REAL_TOPIC="later")
    timers.put([timers.now_ms + 2], REAL_TOPIC="never")
    timers.put([timers.now_ms + 3])
    with FakeCluster("a") as cluster:
        target = target_of(cluster, timers)
        run = timers.run(target)
        with pytest.raises(StoreUnavailableError, match="no broker has topic"):
            run.step()
        assert keys(cluster) == wanted(3)[2:]
        cluster.topics["later"] = ["a"]
        timers.clock.advance(WAITED_S - 60)
        with pytest.raises(StoreUnavailableError, match="no broker has topic never"):
            run.step()
        assert keys(cluster) == wanted(3)[::2]
        timers.clock.advance(60)
        while run.step():
            pass
        assert keys(cluster) == wanted(3)[::2]
    assert (run.counters.handed + run.counters.found, run.counters.refused) == (2, 1)


@pytest.mark.parametrize("topic", ["no such name!", "t" * 128])
def test_a_topic_name_that_no_broker_takes_is_refused_and_holds_up_nothing(
    topic: str, timers: Timers
):
    """A broker answers as one does that is at fault (1), so it would be asked for ever."""
    timers.put([timers.now_ms + 1], REAL_TOPIC=topic)
    timers.put([timers.now_ms + 2])
    with FakeCluster("a") as cluster:
        cluster.topics[topic] = ["a"]
        run = timers.run(target_of(cluster, timers))
        while run.step():
            pass
        assert keys(cluster) == wanted(2)[1:]
    assert (run.counters.handed, run.counters.refused, run.counters.retries) == (1, 1, 0)


@pytest.mark.parametrize(
    ("name", "value", "kept"),
    [
        ("colour", "re\x01d", ("re\x01d", 2)),
        ("REAL_QID", "\N{SUPERSCRIPT TWO}", (None, -1)),
        ("REAL_QID", "9" * 5_000, (None, -1)),
    ],
)
def test_a_message_whose_properties_are_odd_is_sent_and_holds_up_nothing(
    name: str, value: str, kept: tuple[str | None, int], timers: Timers
):
    due_ms = timers.now_ms + 5_000
    odd = wheel_record(0, due_ms, **{name: value.replace("\x01", "?")}).replace(b"?", b"\x01")
    timers.put_records([odd, wheel_record(1, due_ms)])
    with FakeCluster("a") as cluster:
        run = timers.run(target_of(cluster, timers))
        while run.step():
            pass
        got = cluster.brokers["a"].got
        assert keys(cluster) == wanted(2)
    assert (got[0].properties.get(name), got[0].queue_id) == kept


def test_without_any_broker_nothing_is_refused(timers: Timers):
    timers.put([timers.now_ms + 1])
    with FakeCluster("a") as cluster:
        target = target_of(cluster, timers)
        cluster.hidden.add("a")
        run = timers.run(target)
        for _ in range(3):
            with pytest.raises(StoreUnavailableError, match="no name server knows a broker"):
                run.step()
            timers.clock.advance(WAITED_S)
        cluster.hidden.clear()
        while run.step():
            pass
        assert keys(cluster) == wanted(1)
    assert run.counters.refused == 0


@pytest.mark.parametrize("why", ["version", "setting"])
def test_a_broker_without_timers_gets_each_message_when_it_is_due(why: str, timers: Timers):
    dues = [timers.now_ms + 1_000 * n for n in range(8)]
    timers.put(dues)
    with FakeCluster("a") as cluster:
        if why == "version":
            cluster.brokers["a"].server.version = 401
        else:
            cluster.brokers["a"].codes = [(1, "not enabled, timerWheelEnable is false")] * 8
        target = target_of(cluster, timers)
        run, seen = timers.run(target), [0]
        while len(cluster.brokers["a"].got) < 8:
            with contextlib.suppress(StoreUnavailableError):
                run.step()
            due = sum(due + 1_000 <= timers.now_ms for due in dues)
            assert seen[-1] <= len(cluster.brokers["a"].got) <= due
            seen.append(len(cluster.brokers["a"].got))
            timers.clock.advance(0.4)
        assert keys(cluster) == wanted(8)
    assert timers.now_ms - dues[-1] < 4_000


def test_what_is_due_later_than_a_broker_keeps_timers_is_sent_when_it_takes_it(timers: Timers):
    due_ms = [timers.now_ms + n for n in (2_000, 60_000)]
    timers.put(due_ms)
    with FakeCluster("a") as cluster:
        broker = cluster.brokers["a"]
        broker.codes = [(13, TOO_FAR)] * 2
        run = timers.run(target_of(cluster, timers))
        with pytest.raises(StoreUnavailableError, match="no timers further ahead than 30000 ms"):
            run.step()
        assert keys(cluster) == wanted(1)
        timers.clock.advance(20)
        with pytest.raises(StoreUnavailableError, match="no timers further ahead than 30000 ms"):
            run.step()
        timers.clock.advance(15)
        while run.step():
            pass
        assert keys(cluster) == wanted(2)
    assert (run.counters.handed + run.counters.found, run.counters.refused) == (2, 0)


def test_the_broker_that_has_them_still_gets_none_twice(timers: Timers):
    """It lives on and delivers its own copies; what it has not any more it is given."""
    dues = [timers.now_ms + 1_000 * n for n in range(10)]
    timers.put(dues)
    with FakeCluster("a", "b") as cluster:
        own = [decode_record(wheel_record(n, due), 0) for n, due in enumerate(dues)]
        cluster.brokers["a"].got += own[:4]
        target = target_of(cluster, timers, source="a")
        hand(timers, target)
        assert (keys(cluster), target.kept) == (wanted(10), 4)


@pytest.mark.parametrize(
    ("said", "asked"),
    [
        ({"TIMER_OUT_MS": "5000", "TIMER_DELIVER_MS": "5300"}, 5_300),
        ({"TIMER_OUT_MS": "5000", "TIMER_DELIVER_MS": "6000"}, 6_000),
        ({"TIMER_OUT_MS": "5000", "TIMER_DELAY_SEC": "4"}, 6_000),
        ({"TIMER_OUT_MS": "5000", "TIMER_DELIVER_MS": "5000"}, 6_000),
        ({"TIMER_OUT_MS": "5000", "TIMER_DELIVER_MS": "9000"}, 9_000),  # of a wheel of 5 s
        ({"TIMER_OUT_MS": "5000", "TIMER_DELIVER_MS": "99000"}, 6_000),
        ({"TIMER_OUT_MS": "5000", "TIMER_DELAY_SEC": "8"}, 9_000),
        ({"TIMER_OUT_MS": "5000", "TIMER_DELAY_MS": "7900", "TIMER_DELIVER_MS": "9999"}, 8_900),
        ({"TIMER_OUT_MS": "5000", "TIMER_DELAY_SEC": "5", "TIMER_DELAY_MS": "7900"}, 6_000),
        ({"TIMER_OUT_MS": "5000", "TIMER_DELAY_SEC": "x", "TIMER_DELIVER_MS": "9999"}, 6_000),
        ({"DELAY": "4"}, 5_000),
    ],
)
def test_the_time_that_was_asked_for(said: dict[str, str], asked: int):
    """As it is sent, and as our own wheel has it, which looks at whole seconds."""
    assert deliver_at(5_000, said, 1_000) == asked
    record = replace(decode_record(wheel_record(0, 0), 0), store_timestamp_ms=1_000)
    raw = join_properties(said)
    size = record.size - len(record.properties_raw) + len(raw)
    data = encode_record(replace(record, properties_raw=raw, size=size))
    block = parse_records(data, np.array([0]), np.array([size], np.int32))
    if "TIMER_OUT_MS" in said:
        assert asked_times(block, np.array([5_000])).tolist() == [max(asked, 6_000)]


@pytest.mark.parametrize(
    ("answer", "outcome"),
    [
        (None, Outcome.UNKNOWN),
        (Command(0), Outcome.TAKEN),
        (Command(10), Outcome.TAKEN),
        (Command(11), Outcome.TAKEN),
        (Command(12), Outcome.TAKEN),
        (Command(13), Outcome.REFUSED),
        (Command(13, remark="the message body size over max value, MAX: 4096"), Outcome.REFUSED),
        (Command(13, remark=TOO_FAR), Outcome.TOO_FAR),
        (Command(17), Outcome.ABSENT),
        (Command(26), Outcome.ABSENT),
        (Command(2), Outcome.AGAIN),
        (Command(3), Outcome.AGAIN),
        (Command(215), Outcome.AGAIN),
        (Command(1500), Outcome.AGAIN),
        (Command(1, remark="UNKNOWN_ERROR"), Outcome.UNKNOWN),
        (Command(1, remark="timerWheelEnable is false"), Outcome.NO_WHEEL),
        (Command(1, remark="create mapped file failed"), Outcome.AGAIN),
    ],
)
def test_what_answers_mean(answer: Command | None, outcome: Outcome):
    assert outcome_of(answer) is outcome
