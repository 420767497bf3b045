"""Timers go from one real broker into the tier and to another one, whose wheel delivers them to a real push consumer."""

from __future__ import annotations

import json
import signal
import subprocess
import threading
import time
from collections import Counter
from typing import TYPE_CHECKING, Any, Self

import pytest
from support import oracle
from support.command_line import here, spawn
from support.timers import Killed, Timers
from support.waiting import until

from tiered.clock import SystemClock
from tiered.crashpoints import EXIT_CODE, VARIABLE
from tiered.format.properties import join_properties
from tiered.format.remoting import Command
from timer.broker_target import Ask, BrokerTarget, Producer, deliver_at

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path


pytestmark = [pytest.mark.java, oracle.needs_java, pytest.mark.timeout(900)]
CLOCK = SystemClock()
LATE_MS_MAX = 5_000
"""Between a message's time and its being in a consumer's hands, of nine in ten. A broker's wheel takes 1.1 s at most; two
brokers, a consumer and other tests on two processors took 1.8 s."""


class Push:
    """A push consumer in a process of its own; what it got, and when."""

    def __init__(self, broker: oracle.Broker, topic: str, log: Path) -> None:
        self.got: list[tuple[int, dict[str, Any]]] = []
        words = ("--namesrv", broker.address, "--topic", topic, "--group", "g", "--seconds", "600")
        with log.open("wb") as complaints:
            self._process = subprocess.Popen(
                [oracle.ORACLE, "push", *words], stdout=subprocess.PIPE, stderr=complaints
            )
        self._thread = threading.Thread(target=self._listen)
        self._thread.start()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                self.got.append((time.time_ns() // 1_000_000, json.loads(line)))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        self._thread.join()

    def late_ms(self, due_of: dict[str, int]) -> list[int]:
        """By how much each was late, ascending."""
        return sorted(at - due_of[message["msg_id"]] for at, message in self.got)


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[oracle.Broker]:
    with oracle.Broker(tmp_path, tmp_path / "target", recallMessageEnable=True) as made:
        made.start()
        yield made


def address(broker: oracle.Broker) -> tuple[str, int]:
    host, _, port = broker.address.partition(":")
    return host, int(port)


def send(broker: oracle.Broker, rows: Sequence[dict[str, str]]) -> None:
    producer = Producer([address(broker)], CLOCK)
    (target,) = producer.brokers_of("orders")
    commands = [
        Command(
            Ask.SEND_MESSAGE_V2,
            fields={
                "a": "g", "b": "orders", "c": "TBW102", "d": "4", "e": "0", "f": "0", "g": str(CLOCK.now_ms()),
                "h": "0", "i": join_properties(row).decode(), "j": "0", "k": "false", "m": "false",
            },
            body=(b"x",),
            language="PYTHON",
        )
        for row in rows
    ]  # fmt: skip
    answers, why = producer.ask_all(target.address, commands)
    assert [(one.code, one.remark) for one in answers if one and one.code] == [], why
    producer.close()


@pytest.mark.slow
def test_a_mark_cancels_what_is_due_with_it_whichever_came_first(broker: oracle.Broker):
    broker.produce("orders", 1, queues=4)
    due = str(CLOCK.now_ms() // 1000 * 1000 + 8_500)
    names = [f"{n:032X}" for n in range(6)]
    message = [{"UNIQ_KEY": name, "TIMER_DELIVER_MS": due} for name in names]
    mark = [
        {**one, "UNIQ_KEY": f"M{name}", "TIMER_DEL_UNIQKEY": name}
        for one, name in zip(message, names, strict=True)
    ]
    send(broker, [message[0], mark[0], mark[1], message[1], message[2]])
    send(broker, [mark[3], message[4], message[3], message[5]])
    until(lambda: CLOCK.now_ms() > int(due) + 4_000, "the time")
    came = {one["msg_id"] for one in broker_has(broker, "orders")} & set(names)
    assert came == {names[2], names[4], names[5]}


def dying(_refused: list[int]) -> list[int]:
    raise Killed


@pytest.mark.slow
def test_what_a_killed_run_gave_to_a_real_broker_is_known_there(
    broker: oracle.Broker, tmp_path: Path
):
    """Some of it waits in its wheel, some was due at once; the rest is given, and each is delivered once."""
    broker.produce("orders", 1, queues=4)
    with Timers(clock=CLOCK) as timers, Push(broker, "orders", tmp_path / "push") as push:
        until(lambda: push.got != [], "a consumer")
        push.got.clear()
        now = timers.now_ms // 1_000 * 1_000
        dues = [now - 2_000 + 1_000 * (n // 4) for n in range(50)]
        timers.put(dues)
        taken = {}
        for count in (20, 50):
            producer = Producer([address(broker)], CLOCK)
            target = BrokerTarget(producer, source="gone", seed="s/", clock=CLOCK, stop=timers.stop)
            run = timers.run(target, near_ms=3_600_000)
            if count == 20:
                give = target.give
                target.give = lambda messages, give=give: dying(give(messages[:20]))  # type: ignore[method-assign]
                with pytest.raises(Killed):
                    run.step()
            while count == 50 and run.step():
                pass
            taken[count] = run.counters
            target.close()
        assert (taken[50].found, taken[50].handed) == (20, 30)
        until(lambda: len(push.got) >= 50, "all messages")
        until(lambda: CLOCK.now_ms() > dues[-1] + 3_000, "more, if there were")
    assert all(message["queue_id"] == 2 for _, message in push.got)
    check_times(push, {f"{n:032X}": due + 1_000 for n, due in enumerate(dues)})


@pytest.mark.slow
def test_from_one_broker_into_the_tier_and_to_another_while_runs_and_brokers_end(
    broker: oracle.Broker, tmp_path: Path
):
    """The first broker is killed, and so is the second before it has anything; later it is stopped, with all in its wheel.

    (A broker that is killed then delivers twice by itself: docs/timers.md.)
    """
    url = f"file://{tmp_path}/tier"
    broker.produce("later", 1, queues=4)
    (tmp_path / "a").mkdir()
    with oracle.Broker(tmp_path / "a", tmp_path / "a" / "store") as first:
        first.start()
        began = CLOCK.now_ms()
        acked = first.produce(
            "later", 120, queues=4, delay_sec="100..180", keys=5, tags="x,y", props=2
        )
        acked += first.produce("later", 10, queues=4, delay_level="6", seed=2)
        first.kill()
    taking = ("timer", "import", tmp_path / "a" / "store", "--to", url, "--near", "10s", "--json")
    assert ended_at("timers-stored", *taking) == EXIT_CODE
    assert here(*taking).good().document["taken"] == 130
    listed = here("timer", "ls", url, "--messages", "-o", "jsonl").good().rows
    due_of = {
        row["msg_id"]: deliver_at(row["due_timestamp_ms"], row["properties"], 0) for row in listed
    }
    assert set(due_of) == {row["msg_id"] for row in acked}
    giving = ("timer", "run", url, "--to", f"namesrv://{broker.address}", "--near", "1h", "--json")
    with Push(broker, "later", tmp_path / "push") as push:
        until(lambda: push.got != [], "a consumer")
        push.got.clear()
        broker.kill()
        waiting = spawn(*giving, environment={VARIABLE: "timers-given"})
        assert ended_at("timers-giving", *giving, "--no-wait") != 0  # the other one is at work
        broker.start()
        waiting.communicate(timeout=100)
        assert waiting.returncode == EXIT_CODE
        runs = [spawn(*giving) for _ in range(2)]
        until(
            lambda: here("timer", "ls", url, "--json").good().document["hours"] == [],
            "all handed over",
        )
        broker.stop()
        for run in runs:
            run.send_signal(signal.SIGTERM)
        said = [json.loads(run.communicate(timeout=100)[0] or b"{}") for run in runs]
        broker.start()
        assert CLOCK.now_ms() < began + 95_000, "too slow a machine: some were due meanwhile"
        until(lambda: len(push.got) >= 130, "all messages", 300)
        until(lambda: CLOCK.now_ms() > max(due_of.values()) + 5_000, "more, if there were")
    assert [one.get("found", 0) for one in said].count(130) == 1
    check_times(push, due_of)


@pytest.mark.slow
def test_a_running_broker_keeps_what_is_taken_and_gets_none_of_it_twice(
    broker: oracle.Broker, tmp_path: Path
):
    """It cannot be told to forget; what is recalled there is cancelled in the tier, too."""
    url = f"file://{tmp_path}/tier"
    broker.produce("far", 1, queues=4)
    follow = spawn("attach", broker.store, "--to", url, "--timers", "--near", "5s", "--freshness", "1")  # fmt: skip
    try:
        broker.produce("far", 40, queues=4, delay_sec="50..60", recall_every=5, seed=3)
        sent_ms = CLOCK.now_ms()
        until(lambda: pending_in(url) == 32, "all in the tier")
        ran = here("timer", "run", url, "--to", f"namesrv://{broker.address}", "--once", "--json")
        assert (ran.good().document["handed"], pending_in(url)) == (32, 0)
    finally:
        follow.send_signal(signal.SIGTERM)
        told = follow.communicate(timeout=60)
    assert follow.returncode == 0, told
    until(lambda: len(broker_has(broker, "far")) >= 33, "all delivered")
    until(lambda: CLOCK.now_ms() > sent_ms + 65_000, "more, if there were")
    assert len(broker_has(broker, "far")) == 33


def pending_in(url: str) -> int:
    ran = here("timer", "ls", url, "--json")
    return -1 if ran.code else sum(row["messages"] for row in ran.document["hours"])


def broker_has(broker: oracle.Broker, topic: str) -> list[dict[str, Any]]:
    return oracle.run("pull", "--namesrv", broker.address, "--topic", topic)


def check_times(push: Push, due_of: dict[str, int]) -> None:
    """Each came once, none early, and nearly all within a second or so of the time that they asked for."""
    assert Counter(message["msg_id"] for _, message in push.got) == Counter(list(due_of))
    late = push.late_ms(due_of)
    print(f"late by {late[0]} to {late[-1]} ms, median {late[len(late) // 2]}")
    assert late[0] >= 0
    assert late[len(late) * 9 // 10] <= LATE_MS_MAX


def ended_at(point: str, *arguments: str | Path) -> int:
    process = spawn(*arguments, environment={VARIABLE: point})
    try:
        process.communicate(timeout=100)
    finally:
        process.kill()
    return process.returncode
