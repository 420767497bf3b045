"""Offsets of consumers: the table, its journal in the tier, what a crash loses, and who is fenced."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import threading
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.captures import FOLDER
from support.mounts import mounted, tier_of
from support.waiting import until

from backends.errors import PermissionDeniedError
from backends.memory import MemoryStore
from tiered.clock import ManualClock, SystemClock
from tiered.errors import FencedError
from tiered.format.fastjson import loads
from tiered.format.remoting import Command
from tiered.journal.entry import Entry, encode_entry
from tiered.journal.replay import JournalReader, UnknownActionError
from tiered.local.layout import parse_offsets
from tiered.mount import protocol
from tiered.mount.mount import Mount, MountSettings
from tiered.mount.offsets import (
    Acknowledged,
    ConsumerOffsets,
    MountMachine,
    MountState,
    OffsetsKeeper,
)
from tiered.mount.protocol import Code, RefusalError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from backends.base import Version
    from tiered.clock import Clock

PREFIX = "00000000_c/b/meta/mount/b/"
NAMES = st.text(min_size=1, max_size=5)
TABLES = st.dictionaries(
    st.tuples(NAMES, NAMES),
    st.dictionaries(st.integers(0, 9), st.integers(0, 1 << 50), min_size=1, max_size=4),
    max_size=5,
)


def keeper(store: MemoryStore, seed: int = 1, clock: Clock | None = None) -> OffsetsKeeper:
    clock = clock or SystemClock()
    return OffsetsKeeper(store, store, PREFIX, clock, random.Random(seed), lease_s=10.0)


def begin(kept: OffsetsKeeper) -> Mapping[tuple[str, str], Mapping[int, int]]:
    return kept.begin(wait=False, announce=lambda _: None, stop=lambda _: True)


# -- the table ------------------------------------------------------------------------------------


def test_changes_are_taken_once_and_may_be_put_back():
    offsets = ConsumerOffsets({("g", "t"): {0: 5}})
    assert offsets.take_changes() == []
    offsets.commit("g", "t", 0, 5)
    assert offsets.take_changes() == []
    offsets.commit("g", "t", 1, 7)
    offsets.commit("a", "t", 0, 1)
    rows = offsets.take_changes()
    assert rows == [["a", "t", [0], [1]], ["g", "t", [0, 1], [5, 7]]]
    assert offsets.take_changes() == []
    offsets.put_back(rows[1:])
    assert offsets.take_changes() == rows[1:]
    assert offsets.get("g", "t", 1) == 7
    assert offsets.get("g", "t", 2) is None
    assert (offsets.groups("t"), offsets.topics("g"), offsets.group_count) == (["g", "a"], ["t"], 2)


@pytest.mark.parametrize("offset", [-1, 1 << 62])
def test_what_is_no_offset_is_refused(offset: int):
    with pytest.raises(RefusalError):
        ConsumerOffsets().commit("g", "t", 0, offset)


def test_offsets_of_elsewhere_count_only_where_there_are_none():
    offsets = ConsumerOffsets({("g", "t"): {0: 5}})
    assert offsets.adopt({("g", "t"): {0: 1, 1: 2}, ("h", "t"): {0: 3}}) == 2
    assert offsets.row("g", "t") == {0: 5, 1: 2}
    assert offsets.row("h", "t") == {0: 3}


# -- the journal ----------------------------------------------------------------------------------


def entry(number: int, epoch: int, *actions: Mapping[str, Any]) -> Entry:
    return Entry(number, epoch, "0badcafe", 1_700_000_000_000, actions)


def test_golden_bytes():
    rows = [["g", "t", [0, 1], [5, 7]]]
    assert encode_entry(entry(2, 1, {"do": "offsets", "rows": rows})) == (
        b'{"actions":[{"do":"offsets","rows":[["g","t",[0,1],[5,7]]]}],"epoch":1,"format":1,'
        b'"number":2,"previous":0,"time_ms":1700000000000,"writer":"0badcafe"}\n9d090cff\n'
    )


def test_golden_bytes_of_what_was_popped():
    acks = [["g", "t", 0, [7, 9, 12, 13], [5, 2]]]
    modes = [["g", "t", "POP", 0]]
    actions = ({"do": "acks", "rows": acks}, {"do": "modes", "rows": modes})
    assert encode_entry(entry(3, 1, *actions)) == (
        b'{"actions":[{"do":"acks","rows":[["g","t",0,[7,9,12,13],[5,2]]]},'
        b'{"do":"modes","rows":[["g","t","POP",0]]}],"epoch":1,"format":1,'
        b'"number":3,"previous":0,"time_ms":1700000000000,"writer":"0badcafe"}\n9aa7d4ea\n'
    )
    machine = MountMachine()
    state = machine.apply(MountState(1), entry(3, 1, *actions))
    assert state.acks == {("g", "t", 0): Acknowledged((7, 9, 12, 13), (5, 2))}
    assert state.modes == {("g", "t"): ("POP", 0)}
    assert machine.load(json.loads(b"".join(machine.dump_chunks(state)))) == state
    over = {"do": "acks", "rows": [["g", "t", 0, [], []]]}
    assert not machine.apply(state, entry(4, 1, over)).acks


@pytest.mark.parametrize(
    "row", [[[7], []], [[7, 7], []], [[7, 9, 9, 10], []], [[], [1]], [["7", 9], []]]
)
def test_acknowledgements_that_no_mount_can_have_made_are_damage(row: list[Any]):
    action = {"do": "acks", "rows": [["g", "t", 0, *row]]}
    with pytest.raises(ValueError, match=r"ascend|queue id"):
        MountMachine().apply(MountState(1), entry(2, 1, action))


@given(TABLES, st.integers(0, 9))
def test_a_state_is_the_same_when_it_is_read_again(table: dict[Any, Any], epoch: int):
    machine, state = MountMachine(), MountState(epoch, table)
    assert machine.load(json.loads(b"".join(machine.dump_chunks(state)))) == state


def test_what_comes_after_a_newer_epoch_is_no_history():
    machine = MountMachine()
    state = machine.apply(machine.initial(), entry(1, 1, {"do": "epoch", "epoch": 1}))
    state = machine.apply(state, entry(2, 1, {"do": "offsets", "rows": [["g", "t", [0], [5]]]}))
    state = machine.apply(state, entry(3, 2, {"do": "epoch", "epoch": 2}))
    late = machine.apply(state, entry(4, 1, {"do": "offsets", "rows": [["g", "t", [0], [9]]]}))
    assert late.offsets == {("g", "t"): {0: 5}}


def test_what_no_mount_says_is_refused():
    machine = MountMachine()
    state = machine.apply(machine.initial(), entry(1, 1, {"do": "epoch", "epoch": 1}))
    with pytest.raises(UnknownActionError):
        machine.apply(state, entry(2, 1, {"do": "dance"}))
    for rows in ([["g", "t", [0], []]], [["g"]], 5, [["g", "t", ["x"], [1]]]):
        with pytest.raises((TypeError, ValueError)):
            machine.apply(state, entry(2, 1, {"do": "offsets", "rows": rows}))


def test_the_next_mount_begins_where_the_last_was_saved():
    store = MemoryStore()
    first = keeper(store)
    assert begin(first) == {}
    first.save([["g", "t", [0], [5]]])
    first.save([["g", "t", [0, 1], [6, 1]], ["h", "u", [0], [2]]])
    first.end()
    assert begin(keeper(store, 2)) == {("g", "t"): {0: 6, 1: 1}, ("h", "u"): {0: 2}}


def test_a_second_mount_is_sent_away_and_one_that_was_taken_over_is_fenced():
    store = MemoryStore()
    first = keeper(store)
    begin(first)
    with pytest.raises(FencedError, match="another mount serves under this name"):
        begin(keeper(store, 2))
    first.end()  # as if its lease had expired while it hung
    second = keeper(store, 3)
    begin(second)
    second.save([["g", "t", [0], [5]]])
    with pytest.raises(FencedError):
        first.save([["g", "t", [0], [9]]])
    with pytest.raises(FencedError):
        first.renew()
    second.renew()
    second.end()
    assert begin(keeper(store, 4)) == {("g", "t"): {0: 5}}


def test_the_journal_stays_short_and_whole():
    store = MemoryStore()
    kept = keeper(store, clock=ManualClock())
    begin(kept)
    for offset in range(100):
        kept.save([["g", "t", [0], [offset]]])
    assert len(list(store.list(PREFIX))) < 45
    reader: JournalReader[MountState] = JournalReader(store, PREFIX, MountMachine())
    reader.catch_up()
    assert reader.state.offsets == {("g", "t"): {0: 99}}


def test_told_to_stop_while_the_store_is_away_a_save_ends():
    class Away(MemoryStore):
        is_away = False

        def put_if_absent(self, key: str, data: Any) -> None:
            if self.is_away:
                from backends.errors import UnavailableError

                raise UnavailableError("away")
            super().put_if_absent(key, data)

    store = Away()
    kept = keeper(store)
    begin(kept)
    store.is_away = True
    timer = threading.Timer(0.2, kept.abandon)
    timer.start()
    with pytest.raises(Exception, match="away"):
        kept.save([["g", "t", [0], [9]]])
    timer.join()


class Refusing(MemoryStore):
    """Credentials expire, and come again."""

    is_refusing = False

    def _ask(self) -> None:
        if self.is_refusing:
            raise PermissionDeniedError("the token has expired")

    def put_if_absent(self, key: str, data: Any) -> None:
        self._ask()
        super().put_if_absent(key, data)

    def compare_and_set(self, key: str, data: Any, expected: Version | None) -> Version:
        self._ask()
        return super().compare_and_set(key, data, expected)


def test_a_store_that_refuses_is_asked_again_until_it_takes_the_offsets(
    caplog: pytest.LogCaptureFixture,
):
    store = Refusing()
    kept = keeper(store)
    begin(kept)
    store.is_refusing = True
    for _ in range(3):
        kept.renew()
    saving = threading.Thread(target=kept.save, args=([["g", "t", [0], [9]]],))
    saving.start()
    until(lambda: "not kept" in kept.trouble, "trouble is told")
    assert "not kept" in caplog.text
    assert "the token has expired" in caplog.text
    assert saving.is_alive()
    store.is_refusing = False
    saving.join(60)
    kept.renew()
    kept.renew()
    assert caplog.text.count("lease could not be renewed") == 1
    assert caplog.text.count("lease is renewed again") == 1
    assert (kept.saved, kept.trouble) == (1, "")
    kept.end()
    assert begin(keeper(store, 2)) == {("g", "t"): {0: 9}}


def test_a_store_that_refuses_does_not_hide_that_another_has_taken_over():
    store = Refusing()
    kept = keeper(store)
    begin(kept)
    store.is_refusing = True
    errors: list[BaseException] = []

    def save() -> None:
        try:
            kept.save([["g", "t", [0], [9]]])
        except FencedError as error:
            errors.append(error)

    saving = threading.Thread(target=save)
    saving.start()
    until(lambda: bool(kept.trouble), "trouble is told")
    kept.end()
    store.is_refusing = False
    other = keeper(store, 3, ManualClock())
    other._journal.take_epoch({})
    saving.join(60)
    if not errors:  # which of both came first is open: then its offsets are history
        with pytest.raises(FencedError):
            kept.save([["g", "t", [0], [10]]])


# -- what a broker left ---------------------------------------------------------------------------


def test_a_brokers_own_file_is_read(tmp_path: Path):
    import tarfile

    with tarfile.open(FOLDER / "s10-consumers.tar.gz") as archive:
        member = archive.extractfile("s10-consumers/config/consumerOffset.json")
        assert member is not None
        found = parse_offsets(loads(member.read()))
    assert {"filtered", "failing", "careful", "ordered"} <= {group for group, _ in found}
    assert all(offset >= 0 for row in found.values() for offset in row.values())
    assert ("ordered", "other") in found


@pytest.mark.parametrize("data", [b"", b"{}", b"[]", b'{"offsetTable":{"t@g":{"x":1}}}'])
def test_what_is_no_such_file_is_refused(data: bytes):
    with pytest.raises(ValueError):
        parse_offsets(loads(data))


# -- through a mount ------------------------------------------------------------------------------

PLACE = {"consumerGroup": "g", "topic": "orders", "queueId": 1}


def test_offsets_survive_a_restart(tmp_path: Path):
    _, url = tier_of("s01-basic", tmp_path)
    known = {("g", "orders"): {1: 3, 2: 4}}
    with mounted(url, snapshot_s=3600.0, known_offsets=known) as served, served.client() as client:
        assert client.ask(protocol.QUERY_CONSUMER_OFFSET, **PLACE).fields == {"offset": "3"}
        client.tell(protocol.UPDATE_CONSUMER_OFFSET, commitOffset=17, **PLACE)
        assert client.ask(protocol.QUERY_CONSUMER_OFFSET, **PLACE).fields == {"offset": "17"}
        for field, value, code in (
            ("topic", "none", Code.TOPIC_NOT_EXIST),
            ("queueId", 99, Code.INVALID_PARAMETER),
            ("commitOffset", -3, Code.SYSTEM_ERROR),
        ):
            asked = {**PLACE, "commitOffset": 1, field: value}
            assert client.ask(protocol.UPDATE_CONSUMER_OFFSET, **asked).code == code
        client.pull("orders", 3, 0, sysFlag=4 | 1, commitOffset=11)
        served.stop()
        assert served.mount.is_drained
    with mounted(url) as served, served.client() as client:
        assert client.ask(protocol.QUERY_CONSUMER_OFFSET, **PLACE).fields == {"offset": "17"}
        found = client.ask(protocol.QUERY_CONSUMER_OFFSET, **{**PLACE, "queueId": 3})
        assert found.fields == {"offset": "11"}
        unknown = client.ask(protocol.QUERY_CONSUMER_OFFSET, **{**PLACE, "consumerGroup": "h"})
        assert unknown.code == Code.QUERY_NOT_FOUND


def test_offsets_are_kept_while_it_serves_and_a_mount_that_was_taken_over_ends(tmp_path: Path):
    _, url = tier_of("s01-basic", tmp_path)
    with mounted(url, snapshot_s=0.05, lease_s=1.0) as served, served.client() as client:
        client.tell(protocol.UPDATE_CONSUMER_OFFSET, commitOffset=17, **PLACE)
        while not served.mount.keeper.saved:  # type: ignore[union-attr]
            pass
        with pytest.raises(FencedError), mounted(url, wait=False):
            pass
        store, place = served.mount.store.opened.meter, served.mount.store.opened.place
        other = OffsetsKeeper(
            store, store, f"{place.prefix}meta/mount/broker-a/", ManualClock(), random.Random(), lease_s=1.0
        )  # fmt: skip
        other._journal.take_epoch({})
        client.tell(protocol.UPDATE_CONSUMER_OFFSET, commitOffset=18, **PLACE)
        served.thread.join(30)
        assert isinstance(served.errors[0], FencedError)
        assert client.is_ended()


def test_a_mount_goes_on_while_the_store_refuses_it(tmp_path: Path):
    """Expired credentials, say: what clients read is there, or is not, as before; where they are stays in memory."""
    _, url = tier_of("s01-basic", tmp_path)
    with mounted(url, snapshot_s=0.05, lease_s=1.0) as served, served.client() as client:
        mount, meter = served.mount, served.mount.store.opened.meter
        assert mount.keeper is not None
        with pytest.MonkeyPatch.context() as patch:

            def refuse(*_: object) -> None:
                raise PermissionDeniedError("the token has expired")

            patch.setattr(meter, "put_if_absent", refuse)
            patch.setattr(meter, "compare_and_set", refuse)
            client.tell(protocol.UPDATE_CONSUMER_OFFSET, commitOffset=17, **PLACE)
            until(lambda: bool(mount.fault() or served.errors), "it says so")
            assert not served.errors
            assert "the token has expired" in mount.fault()
            assert not mount.unready()
            up = {sample.name: sample.value for sample in mount.samples()}
            assert (up["tiered_mount_up"], up["tiered_mount_keeps_offsets"]) == (1, 0)
            assert client.pull("orders", 3, 0).code == Code.SUCCESS
            client.tell(protocol.UPDATE_CONSUMER_OFFSET, commitOffset=18, **PLACE)
            assert client.ask(protocol.QUERY_CONSUMER_OFFSET, **PLACE).fields == {"offset": "18"}
        until(lambda: not mount.fault(), "all is well again")
        served.stop()
        assert mount.is_drained
    with mounted(url) as served, served.client() as client:
        assert client.ask(protocol.QUERY_CONSUMER_OFFSET, **PLACE).fields == {"offset": "18"}


def test_a_mount_that_drains_longer_than_its_lease_lasts_keeps_its_place_until_then(tmp_path: Path):
    """Another waits for it. Else that one would go on without the last offsets, which come with the end of draining."""
    _, url = tier_of("s01-basic", tmp_path)
    settings = {"lease_s": 1.0, "snapshot_s": 3600.0}
    following: list[Mount] = []

    async def slow(_asked: object) -> Command:
        await asyncio.sleep(4.0)
        return Command(Code.SUCCESS)

    def follow() -> None:
        following.append(Mount.open(url, MountSettings(("127.0.0.1", 0), lease_s=1.0)))

    with mounted(url, **settings) as served, served.client() as client:
        assert served.mount.server is not None
        served.mount.server.handlers = {
            **served.mount.server.handlers,
            protocol.GET_BROKER_CONFIG: slow,
        }
        waiting = threading.Thread(target=follow)
        waiting.start()
        client.tell(protocol.UPDATE_CONSUMER_OFFSET, commitOffset=17, **PLACE)
        opaque = client.send(protocol.GET_BROKER_CONFIG)
        client.send(protocol.GET_MIN_OFFSET, topic="orders", queueId=0)
        assert client.receive().fields == {"offset": "0"}  # so what was sent before has come
        served.mount.stop()
        assert client.answer(opaque).code == Code.SUCCESS
        served.stop()
        assert served.mount.is_drained
        assert not served.errors
    waiting.join(60)
    with contextlib.closing(following[0]) as next_one:
        assert next_one.offsets.get("g", "orders", 1) == 17


def test_without_state_nothing_is_written(tmp_path: Path):
    _, url = tier_of("s01-basic", tmp_path)
    before = sorted(path for path in tmp_path.rglob("*") if path.is_file())
    with mounted(url, keeps_offsets=False) as served, served.client() as client:
        client.tell(protocol.UPDATE_CONSUMER_OFFSET, commitOffset=17, **PLACE)
        client.pull("orders", 0, 0)
    assert sorted(path for path in tmp_path.rglob("*") if path.is_file()) == before
    assert not {"put", "set", "delete"} & set(served.mount.store.opened.meter.snapshot().kinds)
