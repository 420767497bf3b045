"""A fleet of mounts: who mounts what, and three processes of which one is killed."""

from __future__ import annotations

import contextlib
import json
import random
import re
import signal
import socket
import subprocess
import threading
from typing import TYPE_CHECKING, Any
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.captures import unpack
from support.command_line import command, environment, here
from support.mounts import Client, mounted, page
from support.oracle import free_ports
from support.waiting import until

from backends.memory import MemoryStore
from backends.s3_settings import S3Options
from tiered.addresses import Address, why_taken
from tiered.api.broker_place import Place
from tiered.clock import ManualClock, SystemClock
from tiered.errors import FencedError
from tiered.journal.lease import Holder
from tiered.keys import MEMBERS
from tiered.mount import fleet, protocol
from tiered.mount.fleet import SLACK, Members, choose
from tiered.mount.mount import Mount, MountSettings

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

BROKERS = tuple(f"broker-{number}" for number in range(5))
IDS = st.sets(st.text("abc:1", min_size=1, max_size=4), min_size=1, max_size=6)
PLACES = st.sets(st.builds(Place, st.sampled_from("cd"), st.text("xyz", min_size=1)), max_size=20)


@given(IDS, PLACES, st.randoms(use_true_random=False))
def test_each_broker_has_one_member_and_none_has_too_many(
    members: set[str], places: set[Place], rng: random.Random
):
    found = choose(members, places)
    assert set(found) == places
    assert set(found.values()) <= members
    for member in members:
        count = list(found.values()).count(member)
        assert count <= SLACK * len(places) / len(members) + 1
    shuffled_members, shuffled_places = sorted(members), sorted(places)
    rng.shuffle(shuffled_members)
    rng.shuffle(shuffled_places)
    assert choose(shuffled_members, shuffled_places) == found


def test_nobody_mounts_nothing():
    assert choose([], [Place("c", "b")]) == {}
    assert choose(["m"], []) == {}


def test_a_member_that_goes_moves_little_but_its_own():
    places = [Place("c", f"b{number}") for number in range(200)]
    before = choose("abcde", places)
    after = choose("abcd", places)
    moved = [place for place in places if before[place] != after[place]]
    its_own = [place for place in places if before[place] == "e"]
    assert len(moved) <= 1.5 * len(its_own)


def members(store: MemoryStore, clock: ManualClock, name: str, seed: int) -> Members:
    return Members(store, name, seconds=10.0, clock=clock, rng=random.Random(seed))


def test_members_see_each_other_until_one_is_silent_or_leaves(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Holder, "is_gone", lambda _self: False)
    store, clock = MemoryStore(), ManualClock()
    one, two, three = (members(store, clock, f"h:{n}", n) for n in range(3))
    for member in (one, two, three):
        member.join()
    assert one.alive() == ["h:0", "h:1", "h:2"]
    three.leave()
    assert one.alive() == ["h:0", "h:1"]
    clock.advance(6)
    one.renew()
    clock.advance(6)
    assert one.alive() == ["h:0"]  # the second has not renewed for 12 s
    two.renew()
    assert one.alive() == ["h:0", "h:1"]
    with pytest.raises(FencedError, match="a member h:0 incarnations"):
        members(store, clock, "h:0", 9).join()
    clock.advance(2 * fleet.FORGOTTEN_MS / 1000)
    one.renew()
    one.alive()
    assert [info.key for info in store.list(MEMBERS)] == [f"{MEMBERS}h~3a0/lease"]


def test_a_member_lives_while_it_waits_for_a_mount_that_drains(
    monkeypatch: pytest.MonkeyPatch,
):
    """Which may take as long as the lease; the others would begin to share out all that it mounts."""
    monkeypatch.setattr(Holder, "is_gone", lambda _self: False)
    store, drained, seconds = MemoryStore(), threading.Event(), 0.6
    mine, other = (
        Members(store, name, seconds=seconds, clock=SystemClock(), rng=random.Random(name))
        for name in ("h:0", "h:1")
    )
    member = fleet.Fleet(
        "memory",
        MountSettings(("h", 0), lease_s=seconds),
        options=S3Options(),
        clock=SystemClock(),
        rng=random.Random(1),
        tell=lambda _text: None,
    )
    goes = fleet._Running(thread=threading.Thread(target=lambda: drained.wait(3 * seconds)))
    member._running[Place("c", "b")] = goes
    assert goes.thread is not None
    goes.thread.start()
    mine.join()
    other.join()
    looking = threading.Thread(target=member._look, args=(store, mine))
    looking.start()
    seen = []
    while looking.is_alive():
        seen.append(other.alive())
        looking.join(0.05)
    assert not member._running
    assert all("h:0" in alive for alive in seen)


# -- processes ------------------------------------------------------------------------------------


class Process:
    """A member in a process of its own."""

    def __init__(self, url: str, log: Path) -> None:
        self.log = log
        self.metrics = f"127.0.0.1:{next(free_ports())}"
        words = ("mount", url, "--auto", "--listen", "127.0.0.1:0", "--lease-seconds", "3")
        words += ("--metrics-listen", self.metrics)
        with log.open("wb") as complaints:
            self.process = subprocess.Popen(
                command((*words, "--refresh", "1", "--json")),
                stdout=subprocess.PIPE,
                stderr=complaints,
                env=environment(),
            )

    def served(self) -> dict[str, str]:
        """Address by broker, of those that it has not given up."""
        found: dict[str, str] = {}
        for line in self.log.read_text("utf-8").splitlines():
            if match := re.match(r"tiered: cluster-a/(\S+) at (\S+)$", line):
                found[match[1]] = match[2]
            elif match := re.match(r"tiered: cluster-a/(\S+) goes to ", line):
                found.pop(match[1], None)
        return found if self.process.poll() is None else {}

    def end(self, how: signal.Signals) -> tuple[int, bytes]:
        self.process.send_signal(how)
        out, _ = self.process.communicate(timeout=60)
        return self.process.returncode, out


@pytest.fixture
def brokers(tmp_path: Path) -> str:
    """Five brokers that were decommissioned, and one that was not, below one URL."""
    store, url = unpack("s10-consumers", tmp_path), f"file://{tmp_path}/tier"
    for broker in BROKERS:
        here("attach", store, "--to", url, "--broker", broker, "--decommission").good()
    here("attach", store, "--to", url, "--broker", "alive", "--once").good()
    return url


def test_three_processes_share_the_brokers_and_when_one_is_killed_the_others_take_its_own(
    brokers: str, tmp_path: Path
):
    with contextlib.ExitStack() as stack:
        found = [Process(brokers, tmp_path / f"log{number}") for number in range(3)]
        for one in found:
            stack.callback(one.process.communicate)
            stack.callback(one.process.kill)

        def spread() -> Iterator[str]:
            for one in found:
                yield from one.served()

        def is_settled() -> bool:
            return sorted(spread()) == sorted(BROKERS)

        def is_shared() -> bool:
            return is_settled() and sum(bool(one.served()) for one in found) >= 2

        def is_told() -> bool:
            texts = "".join(one.log.read_text("utf-8") for one in found)
            return "cluster-a/alive is not mounted: the broker was not decommissioned" in texts

        until(is_shared, "each broker mounted once, by several members", 90)
        until(is_told, "that one broker is none to be mounted", 90)
        victim = max(found, key=lambda one: len(one.served()))
        its_own = set(victim.served())
        victim.end(signal.SIGKILL)
        until(is_settled, "the others have taken all", 90)
        for one in found:
            for broker, address in one.served().items():
                with contextlib.closing(Client(address)) as client:
                    answer = client.ask(protocol.GET_BROKER_CLUSTER_INFO)
                    assert list(json.loads(answer.text())["brokerAddrTable"]) == [broker]
                    assert client.ask(protocol.GET_MAX_OFFSET, topic="work", queueId=0).fields == {
                        "offset": "33"
                    }
        assert its_own
        alive = [one for one in found if one is not victim]
        until(lambda: all(page(one.metrics, "/readyz")[0] == 200 for one in alive), "ready", 60)

        def know_the_end() -> bool:
            texts = [page(one.metrics, "/metrics")[1] for one in alive]
            return all("tiered_fleet_members 2" in text for text in texts)

        until(know_the_end, "who had nothing to take looks at its own time", 60)
        for one in alive:
            text = page(one.metrics, "/metrics")[1]
            assert "tiered_fleet_failed_brokers 0" in text
            for broker in one.served():
                assert f'tiered_mount_up{{broker="cluster-a/{broker}"}} 1' in text
            assert page(one.metrics, "/healthz") == (200, "ok")

        def knows_the_living_broker() -> int:
            texts = [page(one.metrics, "/metrics")[1] for one in alive]
            return sum("tiered_fleet_living_brokers 1" in text for text in texts)

        # It counts at the member whose turn the broker is, once that has looked; the killed one may have had it.
        until(lambda: knows_the_living_broker() == 1, "one counts the broker that lives", 60)
        for one in found:
            if one is not victim:
                served = one.served()
                code, out = one.end(signal.SIGTERM)
                assert code == 0
                names = {mount["name"] for mount in json.loads(out)["mounts"]}
                assert set(served) <= names


def test_a_mount_is_opened_only_where_its_port_and_the_second_one_are_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Each opening takes requests, a lease and an epoch."""
    store, url = unpack("s10-consumers", tmp_path), f"file://{tmp_path}/tier"
    here("attach", store, "--to", url, "--decommission").good()
    port, real = next(free_ports()), Mount.open
    opened: list[int] = []

    def open_(at: str, settings: MountSettings, **more: Any) -> Mount:
        opened.append(settings.listen[1])
        return real(at, settings, **more)

    monkeypatch.setattr(Mount, "open", open_)
    listen = ("127.0.0.1", port + 1)  # its second one is taken
    member = fleet.Fleet(
        url,
        MountSettings(listen),
        options=S3Options(),
        clock=SystemClock(),
        rng=random.Random(1),
        tell=lambda _text: None,
    )
    running = threading.Thread(target=member.run)
    with socket.create_server(("127.0.0.1", port - 1)):
        running.start()
        try:
            until(lambda: any(mount.is_serving for _, mount in member.mounts()), "a mount", 60)
        finally:
            member.stop()
            running.join()
    assert opened == [port + 2]


@pytest.mark.parametrize(("host", "port"), [("192.0.2.1", 20_000), ("127.0.0.1", 70_000)])
def test_what_is_no_address_of_this_machine_is_not_free(host: str, port: int):
    assert why_taken(Address(host, port))


@pytest.mark.parametrize(
    ("error", "listen", "told"),
    [
        (None, ("192.0.2.1", 20_000), "no port from 20000 on is free: 192.0.2.1:20000: "),
        (ZeroDivisionError("0"), ("127.0.0.1", 0), "ended by a defect: ZeroDivisionError('0')"),
    ],
)
def test_it_is_told_why_a_broker_is_not_mounted(
    error: Exception | None,
    listen: tuple[str, int],
    told: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    store, url = unpack("s10-consumers", tmp_path), f"file://{tmp_path}/tier"
    here("attach", store, "--to", url, "--decommission").good()
    if error is not None:
        monkeypatch.setattr(Mount, "open", Mock(side_effect=error))
    texts: list[str] = []
    member = fleet.Fleet(
        url,
        MountSettings(listen),
        options=S3Options(),
        clock=SystemClock(),
        rng=random.Random(1),
        tell=texts.append,
    )
    running = threading.Thread(target=member.run)
    running.start()
    try:
        until(lambda: any("is not mounted" in text for text in texts), "a word", 60)
    finally:
        member.stop()
        running.join()
    assert any(f"is not mounted: {told}" in text for text in texts), texts


def test_options_that_mean_one_broker_are_refused(brokers: str):
    for words in (("--name", "x"), ("--shared",), ("--no-state",), ("--broker", "broker-1")):
        ran = here("mount", brokers, "--auto", *words)
        assert ran.code == 2
        assert f"--auto and {words[0]} contradict each other" in ran.error


def test_mounts_that_share_a_name_have_offsets_of_their_own(brokers: str):
    place = {"consumerGroup": "ordered", "topic": "other", "queueId": 1}
    options = {"broker": BROKERS[0], "is_shared": True, "wait": False}
    with (
        mounted(brokers, advertise=("127.0.0.1", 0), **options) as one,
        mounted(brokers, advertise=("localhost", 0), **options) as two,
        one.client() as client,
        two.client() as other,
    ):
        before = other.ask(protocol.QUERY_CONSUMER_OFFSET, **place).fields
        client.ask(protocol.UPDATE_CONSUMER_OFFSET, commitOffset=1, **place)
        assert client.ask(protocol.QUERY_CONSUMER_OFFSET, **place).fields == {"offset": "1"}
        assert other.ask(protocol.QUERY_CONSUMER_OFFSET, **place).fields == before
