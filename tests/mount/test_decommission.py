"""Decommissioning: what stands in its way, what it keeps, and what a mount makes of it."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.captures import unpack
from support.command_line import here
from support.mounts import mounted

from backends.base import ObjectInfo
from backends.memory import MemoryStore
from tiered.attach.decommission import RUNS, Near, look
from tiered.cli import attach
from tiered.clock import SystemClock
from tiered.errors import DataError, InvalidError
from tiered.keys import ObjectId, handover_key, parse_handover_key, recall_key
from tiered.log.broker_tables import HANDOVER, Handover, found_handover
from tiered.log.state import TierState
from tiered.mount import protocol
from tiered.mount.protocol import Code
from tiered.store.embedded import MessageStore
from tiered.store.new_message import NewMessage
from tiered.upkeep.rebuild import _with_handover

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tiered.attach.decommission import Decommissioned

NOW_MS = 1_700_000_000_000


def near(name: str, folder: Path) -> Near:
    return look(str(unpack(name, folder)), NOW_MS)


def counts(found: Near) -> dict[str, int]:
    return {one.what: one.count for one in found.pending}


def handed_over(name: str, folder: Path, *options: str) -> tuple[Path, str]:
    """A captured store and its tier, decommissioned."""
    store, url = unpack(name, folder), f"file://{folder}/tier"
    here("attach", store, "--to", url, "--decommission", *options).good()
    return store, url


# -- tables that were never written ---------------------------------------------------------------

TABLES = ("subscriptionGroup.json", "consumerOffset.json", "delayOffset.json")


def unused(folder: Path) -> Path:
    """The store of a broker of 4.9 that no group has ever used: it has only the table of topics."""
    store, lines = folder / "store", folder / "lines"
    here("store", "create", store).good()
    lines.write_text(json.dumps({"topic": "orders", "queue_id": 0, "body_base64": "eA=="}) + "\n")
    here("store", "put", store, lines).good()
    assert not any((store / "config" / name).exists() for name in TABLES)
    return store


@pytest.mark.parametrize("is_written", [False, True])
def test_a_broker_that_no_group_has_ever_used_has_no_table_of_groups(
    is_written: bool, tmp_path: Path
):
    store, url = unused(tmp_path), f"file://{tmp_path}/tier"
    if is_written:
        (store / "config" / "consumerOffset.json").write_text('{"offsetTable":{}}')
    ran = here("attach", store, "--to", url, "--decommission").good()
    assert "subscriptionGroup.json is not there: the broker has never had to write it" in ran.err
    with mounted(url) as served, served.client() as client:
        assert client.pull("orders", 0, 0).code == Code.SUCCESS


def used(store: Path) -> None:
    config = {"topicName": "%RETRY%g", "readQueueNums": 1, "writeQueueNums": 1, "perm": 6}
    path = store / "config" / "topics.json"
    table = json.loads(path.read_text())
    table["topicConfigTable"]["%RETRY%g"] = config
    path.write_text(json.dumps(table))


def has_offsets(store: Path) -> None:
    path = store / "config" / "consumerOffset.json"
    path.write_text('{"offsetTable":{"orders@g":{"0":1}}}')


def is_cut_off(store: Path) -> None:
    (store / "config" / "subscriptionGroup.json").write_text("{")


def keeps_rocksdb(store: Path) -> None:
    (store / "config" / "subscriptionGroups").mkdir()
    (store / "config" / "subscriptionGroups" / "CURRENT").touch()


@pytest.mark.parametrize("sign", [used, has_offsets, is_cut_off, keeps_rocksdb])
def test_a_table_that_is_missing_though_a_group_has_used_the_broker_is_asked_for(
    sign: Callable[[Path], None], tmp_path: Path
):
    store = unused(tmp_path)
    sign(store)
    wanted = {one.what: one.do for one in look(str(store), NOW_MS).pending}
    (told,) = (do for what, do in wanted.items() if "subscriptionGroup.json" in what)
    assert ("RocksDB" in told) == (sign is keeps_rocksdb)


# -- what is near ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "pending"),
    [
        ("s01-basic", {}),
        # 174 timed messages are pending, of which 8 were truncated
        ("s02-delay-timer", {"delayed messages": 60, "timed messages": 166}),
        ("s03-transactions", {"half messages": 15}),
        ("s10-consumers", {}),
    ],
)
def test_what_is_pending_is_what_the_broker_had_left(
    name: str, pending: dict[str, int], tmp_path: Path
):
    assert counts(near(name, tmp_path)) == pending


@pytest.mark.parametrize("cut", [None, 0, 4096, 1 << 20])
def test_a_wheel_that_was_cut_does_not_say_that_nothing_is_pending(cut: int | None, tmp_path: Path):
    store = unpack("s02-delay-timer", tmp_path)
    wheel = store / "timerwheel"
    if cut is None:
        wheel.unlink()
    else:
        os.truncate(wheel, cut)
    found = look(str(store), NOW_MS)
    assert counts(found)["timed messages"] >= 166
    assert any("timerwheel" in note for note in found.metadata.notes)


def test_what_was_popped_and_not_settled_and_what_waits_in_retry_topics_is_counted(tmp_path: Path):
    store = unpack("s10-consumers", tmp_path)
    queues = store / "consumequeue"
    shutil.copytree(queues / "other" / "0", queues / "rmq_sys_REVIVE_LOG_cluster-a" / "0")
    offsets = store / "config" / "consumerOffset.json"
    table = json.dumps(
        {
            "offsetTable": {
                "rmq_sys_REVIVE_LOG_cluster-a@CID_RMQ_SYS_REVIVE_GROUP": {"0": 15},
                "%RETRY%failing@failing": {"0": 70},
                "work@g": {"0": 3, "1": -1},
                "work@g@client": {"0": 9},
            }
        }
    )
    offsets.write_text(table)
    found = look(str(store), NOW_MS)
    assert counts(found) == {"popped messages": 5}
    assert found.retries == 2 + 24
    assert found.metadata.offsets["g", "work"] == {0: 3}
    assert ("g@client", "work") not in found.metadata.offsets


def test_a_table_that_is_not_there_stands_in_the_way(tmp_path: Path):
    store = unpack("s10-consumers", tmp_path)
    for suffix in ("", ".bak"):
        (store / "config" / f"consumerOffset.json{suffix}").unlink()
    (found,) = look(str(store), NOW_MS).pending
    assert found.what == "config/consumerOffset.json is not there"
    ran = here("attach", store, "--to", f"file://{tmp_path}/tier", "--decommission")
    assert ran.code == 1
    assert "not done: config/consumerOffset.json is not there" in ran.err


@pytest.mark.parametrize(
    ("name", "table"),
    [
        ("delayOffset", {"1": None}),
        ("delayOffset", {"one": 1}),
        ("consumerOffset", {"work@g": {"0": None}}),
        ("consumerOffset", {"work@g": {"0": "x"}}),
    ],
)
def test_a_table_with_something_else_in_it_stands_in_the_way(
    name: str, table: dict[str, Any], tmp_path: Path
):
    store = unpack("s10-consumers", tmp_path)
    (store / "config" / f"{name}.json").write_text(json.dumps({"offsetTable": table}))
    found = look(str(store), NOW_MS).pending
    assert [one.count for one in found if one.what.startswith(f"config/{name}.json: ")] == [0]


# -- the command ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("what", "offers"), [(RUNS, False), ("half messages", True)])
def test_only_what_can_be_given_up_is_offered_to_be(what: str, offers: bool):
    pending = [{"what": what, "count": 0, "do": "wait"}]
    told = {"is_decommissioned": False, "retries": 0, "notes": [], "pending": pending}
    assert ("--accept-pending" in attach.decommission_lines(told)[-1]) == offers


def test_with_something_pending_it_is_not_decommissioned_unless_that_is_given_up(tmp_path: Path):
    store, url = unpack("s03-transactions", tmp_path), f"file://{tmp_path}/tier"
    words = ("attach", store, "--to", url, "--decommission", "--json")
    ran = here(*words)
    assert ran.code == 1
    assert "tiered: not done: half messages (15); let the broker run until it" in ran.err
    told = ran.document["decommission"]
    assert (told["is_decommissioned"], told["key"]) == (False, "")
    assert [(one["what"], one["count"]) for one in told["pending"]] == [("half messages", 15)]
    with mounted(url, keeps_offsets=False) as served:
        assert served.mount.handover is None
    told = here(*words, "--accept-pending").good().document["decommission"]
    assert told["is_decommissioned"]
    with mounted(url, keeps_offsets=False) as served:
        assert served.mount.handover is not None
        assert served.mount.handover.pending == ({"what": "half messages", "count": 15},)


def test_all_segments_are_sealed_and_the_tier_is_whole(tmp_path: Path):
    store, url = unpack("s10-consumers", tmp_path), f"file://{tmp_path}/tier"
    ran = here("attach", store, "--to", url, "--decommission", "--json").good()
    assert ran.document["sealed_segments"] == 10
    told = ran.document["decommission"]
    # Two of users, with six retry topics and two for dead letters; the others every broker makes for itself.
    assert (told["topics"], told["system_topics"]) == (10, 15)
    assert "decommissioned: 10 topics, 14 groups" in ran.err
    here("verify", url, "--deep", "--store", store).good()


def test_topics_that_are_left_out_stand_in_the_way(tmp_path: Path):
    store, url = unpack("s10-consumers", tmp_path), f"file://{tmp_path}/tier"
    ran = here("attach", store, "--to", url, "--decommission", "--topics", "work")
    assert ran.code == 1
    assert "not done: messages of topics that --topics or --exclude leaves out (172)" in ran.err


def test_messages_of_static_topics_are_in_no_tier_and_stand_in_the_way(tmp_path: Path):
    store = unpack("s10-consumers", tmp_path)
    mapping = {"topicQueueMappingInfoMap": {"work": {}, "never-used": {}}}
    (store / "config" / "topicQueueMapping.json").write_text(json.dumps(mapping))
    url = f"file://{tmp_path}/tier"
    ran = here("attach", store, "--to", url, "--decommission")
    assert ran.code == 1
    queues = here("store", "info", store, "--json").document["queues"]
    assert "work" not in {row["topic"] for row in queues}  # left out by name
    assert "not done: messages of static topics (130); have the broker serve them" in ran.err


def test_no_writer_goes_on_until_the_broker_is_said_to_be_back(tmp_path: Path):
    store, url = handed_over("s10-consumers", tmp_path)
    ran = here("attach", store, "--to", url, "--once")
    assert ran.code == 2
    assert "was decommissioned" in ran.error
    assert b"decommissioned 20" in here("status", url).good().out
    assert here("status", url, "--json").good().document["brokers"][0]["decommissioned_ms"]
    here("attach", store, "--to", url, "--decommission").good()  # again does no harm
    here("attach", store, "--to", url, "--once", "--recommission").good()
    here("attach", store, "--to", url, "--once").good()
    assert b"decommissioned" not in here("status", url).good().out
    with mounted(url, keeps_offsets=False) as served:
        assert served.mount.handover is None


def test_a_rebuilt_journal_knows_whether_the_broker_is_gone(tmp_path: Path):
    store, url = handed_over("s10-consumers", tmp_path)
    (journal,) = (tmp_path / "tier").glob("*/*/journal")
    known = look(str(store), NOW_MS).metadata

    def lose_and_rebuild() -> str:
        shutil.rmtree(journal)
        shutil.rmtree(journal.parent / "meta" / "journal", ignore_errors=True)
        return here("rebuild", url, "--apply", "-").good().out.decode()

    assert "the broker was decommissioned" in lose_and_rebuild()
    assert here("attach", store, "--to", url, "--once").code == 2
    with mounted(url, keeps_offsets=False) as served:
        assert served.mount.handover is not None
        assert served.mount.handover.offsets == known.offsets
    here("attach", store, "--to", url, "--once", "--recommission").good()
    assert "decommissioned" not in lose_and_rebuild()
    here("attach", store, "--to", url, "--once").good()
    with mounted(url, keeps_offsets=False) as served:
        assert served.mount.handover is None
    here("attach", store, "--to", url, "--decommission").good()
    assert "the broker was decommissioned" in lose_and_rebuild()
    here("verify", url, "--deep", "--store", store).good()


def test_that_the_broker_is_back_counts_also_after_all_that_told_epochs_was_lost(tmp_path: Path):
    """Epochs that stored no message are known by what the broker left alone."""
    store, url = handed_over("s10-consumers", tmp_path)
    for _ in range(2):
        here("attach", store, "--to", url, "--once", "--recommission").good()
        here("attach", store, "--to", url, "--decommission").good()
    (journal,) = (tmp_path / "tier").glob("*/*/journal")

    def lose_and_rebuild() -> str:
        shutil.rmtree(journal)
        shutil.rmtree(journal.parent / "meta" / "journal", ignore_errors=True)
        (journal.parent / "lease").unlink()
        return here("rebuild", url, "--apply", "-").good().out.decode()

    assert "the broker was decommissioned" in lose_and_rebuild()
    here("attach", store, "--to", url, "--once", "--recommission").good()
    assert "decommissioned" not in lose_and_rebuild()


def test_a_rebuilt_journal_that_takes_the_mark_away_says_so():
    state, notes = replace(TierState(), store={"cluster": "c", HANDOVER: {"key": "gone"}}), []
    assert _with_handover(MemoryStore(), [], "p/", state, notes).store == {"cluster": "c"}
    assert "does not count as gone any more" in notes[0]


@pytest.mark.parametrize("began", ["before", "after"])
def test_a_broker_that_stops_while_its_store_is_read_is_not_decommissioned_yet(
    began: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """``mqshutdown`` does not wait: the last messages come when all that was there has been read."""
    store, url = unpack("s10-consumers", tmp_path), f"file://{tmp_path}/tier"
    begin = partial(
        MessageStore.open, store, cluster="cluster-a", broker="broker-a", clock=SystemClock()
    )
    brokers = [begin()] if began == "before" else []
    real = attach.hand_over

    def hand_over(*given: Any) -> Decommissioned | None:
        broker = brokers.pop() if brokers else begin()
        broker.append(NewMessage("work", 0, b"the last"))
        broker.close()
        return real(*given)

    words = ("attach", store, "--to", url, "--decommission", "--accept-pending", "--json")
    with monkeypatch.context() as patch:
        patch.setattr(attach, "hand_over", hand_over)
        ran = here(*words)
    assert (ran.code, ran.document["decommission"]["is_decommissioned"]) == (1, False)
    assert "tiered: not done: messages are not in the tier (1); attach again" in ran.err
    assert ("stopped while its store was read" in ran.err) == (began == "before")
    here(*words).good()
    here("verify", url, "--deep", "--store", store).good()


@pytest.mark.parametrize(
    "words", [("--once", "--accept-pending"), ("--decommission", "--recommission")]
)
def test_options_that_contradict_each_other_are_refused(words: tuple[str, ...], tmp_path: Path):
    store = unpack("s10-consumers", tmp_path)
    assert here("attach", store, "--to", f"file://{tmp_path}/tier", *words).code == 2


# -- what a mount makes of it ---------------------------------------------------------------------


def asked(group: str, topic: str, queue_id: int) -> dict[str, Any]:
    return {"consumerGroup": group, "topic": topic, "queueId": queue_id}


def test_a_mount_serves_topics_groups_and_offsets_as_the_broker_had_them(tmp_path: Path):
    store, url = handed_over("s10-consumers", tmp_path)
    known = look(str(store), NOW_MS).metadata
    with mounted(url) as served, served.client() as client:
        answer = client.ask(protocol.GET_ALL_TOPIC_CONFIG)
        table = json.loads(answer.text())["topicConfigTable"]
        names = {"work", "other", "%RETRY%failing", "%DLQ%failing", "%RETRY%ordered"}
        assert names <= set(table)
        assert not {"SCHEDULE_TOPIC_XXXX", "TBW102", "rmq_sys_wheel_timer"} & set(table)
        for name in names:
            row, was = table[name], known.topics[name]
            for field in (
                "readQueueNums",
                "topicFilterType",
                "topicSysFlag",
                "order",
                "attributes",
            ):
                assert row[field] == was[field], (name, field)
            assert row["perm"] == (6 if name.startswith("%RETRY%") else 4)
        for (group, topic), row in known.offsets.items():
            for queue_id, offset in row.items():
                found = client.ask(protocol.QUERY_CONSUMER_OFFSET, **asked(group, topic, queue_id))
                assert found.fields == {"offset": str(offset)}
        answer = client.ask(protocol.GET_SUBSCRIPTIONGROUP_CONFIG, group="ordered")
        assert json.loads(answer.text()) == known.groups["ordered"]


def test_a_queue_that_never_had_a_message_is_served(tmp_path: Path):
    """The tier does not know of it: only the broker's tables do."""
    _, url = handed_over("s01-basic", tmp_path)
    with mounted(url, keeps_offsets=False) as served, served.client() as client:
        answer = client.ask(protocol.GET_TOPIC_CONFIG, topic="sparse")
        assert json.loads(answer.text())["readQueueNums"] == 16
        assert client.pull("sparse", 15, 0, suspendTimeoutMillis=1).code == Code.PULL_NOT_FOUND
        assert (
            client.ask(protocol.GET_MAX_OFFSET, topic="sparse", queueId=15).fields["offset"] == "0"
        )


def test_what_groups_say_to_the_mount_counts_until_the_broker_was_back(tmp_path: Path):
    store, url = handed_over("s10-consumers", tmp_path)
    place = asked("ordered", "other", 1)
    with mounted(url) as served, served.client() as client:
        assert served.mount.inherited > 10
        before = int(client.ask(protocol.QUERY_CONSUMER_OFFSET, **place).fields["offset"])
        client.ask(protocol.UPDATE_CONSUMER_OFFSET, commitOffset=before - 5, **place)
        served.stop()
    with mounted(url) as served, served.client() as client:
        assert served.mount.inherited == 0
        assert client.ask(protocol.QUERY_CONSUMER_OFFSET, **place).fields == {
            "offset": str(before - 5)
        }
    here("attach", store, "--to", url, "--decommission").good()  # the same again changes nothing
    with mounted(url) as served, served.client() as client:
        assert served.mount.inherited == 0
        assert client.ask(protocol.QUERY_CONSUMER_OFFSET, **place).fields == {
            "offset": str(before - 5)
        }
    here("attach", store, "--to", url, "--once", "--recommission").good()
    here("attach", store, "--to", url, "--decommission").good()
    with mounted(url) as served, served.client() as client:
        assert served.mount.inherited > 10
        assert client.ask(protocol.QUERY_CONSUMER_OFFSET, **place).fields == {"offset": str(before)}


def test_damaged_metadata_is_told_and_nothing_is_served_without_it(tmp_path: Path):
    _, url = handed_over("s10-consumers", tmp_path)
    (path,) = (tmp_path / "tier").glob("*/*/meta/handover/*")
    path.write_bytes(path.read_bytes().replace(b'"perm":6', b'"perm":7', 1))
    ran = here("mount", url, "--listen", "127.0.0.1:0", "--no-state")
    assert ran.code == 5
    assert "meta/handover/" in ran.error


# -- the format -----------------------------------------------------------------------------------

NAMES = st.text(min_size=1, max_size=5)
CONFIGS = st.dictionaries(NAMES, st.dictionaries(NAMES, st.integers() | NAMES, max_size=3))
HANDOVERS = st.builds(
    Handover,
    st.integers(0, 1 << 45),
    CONFIGS,
    CONFIGS,
    st.dictionaries(
        st.tuples(NAMES, NAMES), st.dictionaries(st.integers(0, 99), st.integers(0, 1 << 60))
    ),
    st.dictionaries(st.integers(1, 18), st.integers(0, 1 << 60)),
    st.lists(st.fixed_dictionaries({"what": NAMES, "count": st.integers(0)})).map(tuple),
    st.lists(NAMES).map(tuple),
)


@given(HANDOVERS)
def test_what_is_written_is_what_is_read(handover: Handover):
    assert Handover.decode(handover.encode(), where="here") == handover


@given(HANDOVERS, st.data())
def test_a_changed_byte_is_found(handover: Handover, data: st.DataObject):
    raw = bytearray(handover.encode())
    at = data.draw(st.integers(0, len(raw) - 1))
    raw[at] ^= data.draw(st.integers(1, 255))
    with pytest.raises((DataError, InvalidError)):
        Handover.decode(bytes(raw), where="here")


def test_it_lies_there_as_the_documentation_shows():
    handover = Handover(
        1_700_000_000_000,
        {"t": {"perm": 6, "readQueueNums": 4}},
        {"g": {"groupName": "g"}},
        {("g", "t"): {1: 7, 0: 5}},
        {3: 12},
        ({"what": "half messages", "count": 1},),
    )
    assert handover.encode() == GOLDEN


GOLDEN = (
    b'{"consumer_offsets":[["g","t",[0,1],[5,7]]],"delay_offsets":[[3,12]],"format":1,'
    b'"groups":{"g":{"groupName":"g"}},"notes":[],"pending":[{"count":1,"what":"half messages"}],'
    b'"time_ms":1700000000000,"topics":{"t":{"perm":6,"readQueueNums":4}}}\n'
    b"b7726f2b\n"
)


@given(st.integers(0, 1 << 45), st.integers(0, 9**9), st.integers(0, 9**9))
def test_keys_say_who_wrote_them_and_whether_the_broker_is_back(
    time_ms: int, epoch: int, number: int
):
    made = ObjectId(epoch, "0badcafe", number)
    gone, back = (of("c/b/", time_ms, made) for of in (handover_key, recall_key))
    assert parse_handover_key("c/b/", gone) == (time_ms, made, False)
    assert parse_handover_key("c/b/", back) == (time_ms, made, True)
    for strange in (
        gone + "x",
        gone[:-1],
        "c/x" + gone,
        gone.replace("-", "_"),
        "c/b/meta/handover/",
    ):
        assert parse_handover_key("c/b/", strange) is None


def test_the_newest_of_what_lies_there_counts_by_epoch_and_then_by_time():
    def info(epoch: int, time_ms: int, *, is_back: bool = False) -> ObjectInfo:
        of = recall_key if is_back else handover_key
        return ObjectInfo(of("p/", time_ms, ObjectId(epoch, "0badcafe", 0)), 7, 0)

    assert found_handover([], "p/") == {}
    first, back, again = info(1, 500), info(2, 400, is_back=True), info(3, 300)
    assert found_handover([first], "p/")["key"] == first.key.removeprefix("p/")
    assert found_handover([back, first], "p/") == {}  # though a clock was set back
    assert found_handover([first, again, back], "p/") == {
        "key": again.key.removeprefix("p/"),
        "size_bytes": 7,
        "time_ms": 300,
    }
