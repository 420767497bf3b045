"""Restoring: a store directory of a tier, held to what Java found in the one that the tier was made of."""

from __future__ import annotations

import errno
import itertools
import json
import os
import shutil
import subprocess
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from support import oracle
from support.captures import LocalLog, captured, read_dump, unpack
from support.command_line import here
from support.mounts import Growing, mounted
from support.tier_checks import bounds
from zlib_ng import zlib_ng

from tiered.api.tier import open_tier
from tiered.clock import SystemClock
from tiered.errors import DataError, InvalidError, StoreUnavailableError
from tiered.format.record import Record, decode_record, encode_record
from tiered.mount import protocol
from tiered.mount import restore as module
from tiered.mount.restore import Restore, RestoreSelection, building, plan_restore
from tiered.store import disk
from tiered.store.restored import RestoredLog
from tiered.store.store_options import StoreOptions

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Tier = Callable[[str], tuple[Path, str]]

NAMES = (
    "s01-basic", "s04-batch-compress", "s06-expired", "s09-big-offsets", "s10-consumers",
    "s11-lmq-batchcq",
)  # fmt: skip
SMALL = ("--log-file-size", "256KiB", "--queue-items", "100")
OPTIONS = StoreOptions(256 << 10, 100)
PLACES = {"physical_offset", "offset_msg_id"}
Message = dict[str, Any]


def restored(url: str, folder: Path, *options: str | Path) -> Path:
    folder.mkdir(exist_ok=True)
    store = folder / "restored"
    here("restore", url, "--to", store, *SMALL, *options).good()
    return store


def without_places(messages: list[Message], *more: str) -> list[Message]:
    """Messages without what a restore changes; an id that is the offset id changes with it."""
    found = []
    for message in messages:
        left_out = PLACES | set(more)
        if message["msg_id"] == message["offset_msg_id"]:
            left_out |= {"msg_id"}
        found.append({k: v for k, v in message.items() if k not in left_out})
    return found


def messages_of(store: Path, folder: Path, *, holes: int = 0) -> dict[str, list[Message]]:
    """What another tier of the store has, by topic."""
    url = f"file://{folder}/again"
    ran = here("attach", store, "--to", url, "--once", "--json")
    assert ran.code == (1 if holes else 0), ran
    assert ran.document["missing"] == holes
    topics = {queue.topic for queue in bounds(url)}
    found = {topic: here("cat", url, topic).good().rows for topic in topics}
    return {topic: rows for topic, rows in found.items() if rows}


@pytest.mark.parametrize("name", NAMES)
def test_each_message_is_there_again_at_its_queue_offset(
    name: str, captured_tier: Tier, tmp_path: Path
):
    store = restored(captured_tier(name)[1], tmp_path)
    found = messages_of(store, tmp_path)
    wanted = {topic: messages for topic, messages in captured(name).messages.items() if messages}
    assert set(found) == set(wanted)
    for topic, messages in wanted.items():
        assert without_places(found[topic], "log_offset") == without_places(messages)


@pytest.mark.parametrize("name", ["s01-basic", "s09-big-offsets"])
def test_records_differ_in_their_place_alone_and_lie_in_the_order_of_their_store_times(
    name: str, captured_tier: Tier, tmp_path: Path
):
    original, url = captured_tier(name)
    store = restored(url, tmp_path)
    before, after = LocalLog(original), LocalLog(store)
    found = messages_of(store, tmp_path)
    for topic, messages in captured(name).messages.items():
        for was, now in zip(messages, found.get(topic, []), strict=True):
            old, new = before.record(was), after.record(now)
            assert old[:28] + old[36:] == new[:28] + new[36:]
            assert decode_record(new, 0).physical_offset == now["physical_offset"]
    everything = [one for messages in found.values() for one in messages]
    everything.sort(key=lambda one: one["physical_offset"])
    times = [one["store_timestamp_ms"] for one in everything]
    assert times == sorted(times)


def test_only_what_is_asked_for(captured_tier: Tier, tmp_path: Path):
    everything = captured("s01-basic").messages
    times = sorted(one["store_timestamp_ms"] for one in everything["orders"])
    begin, end = times[300], times[900]
    url = captured_tier("s01-basic")[1]
    options = ("--topics", "orders,uni*", "--from", str(begin), "--until", str(end))
    found = messages_of(restored(url, tmp_path, *options), tmp_path)
    for topic in ("orders", "unicode"):
        wanted = [m for m in everything[topic] if begin <= m["store_timestamp_ms"] < end]
        assert without_places(found.get(topic, []), "log_offset") == without_places(wanted)
    assert set(found) <= {"orders", "unicode"}


def test_a_dry_run_says_what_comes_and_writes_nothing(captured_tier: Tier, tmp_path: Path):
    url, to = captured_tier("s01-basic")[1], tmp_path / "restored"
    words = ("restore", url, "--to", to, *SMALL, "--json")
    said = here(*words, "--dry-run").good().document
    assert not to.exists()
    done = here(*words).good().document
    assert (said["is_dry_run"], done["is_dry_run"]) == (True, False)
    assert said["messages"] == captured("s01-basic").count
    assert said["size_bytes"] == done["size_bytes"]
    assert said["requests"] / 4 <= done["requests"] <= said["requests"] * 4 + 16
    assert said["request_dollars"] > 0
    assert said["seconds"] >= 0
    ran = here(*words, "--dry-run")
    assert (ran.code, "has been restored here already" in ran.err) == (2, True), ran.err


def test_a_dry_run_of_many_queues_knows_that_they_are_read_side_by_side(tmp_path: Path):
    """Hundreds of them lie in a few bundles, and come with as few requests."""
    store, url = tmp_path / "store", f"file://{tmp_path}/tier"
    sizes = ("--messages", "2000", "--body", "256", "--queues", "200", "--topics", "2")
    here("bench", "make-store", store, *sizes).good()
    here("attach", store, "--to", url, "--once", "--no-index").good()
    words = ("restore", url, "--to", tmp_path / "restored", *SMALL, "--json")
    said, done = here(*words, "--dry-run").good().document, here(*words).good().document
    assert said["queues"] == 400
    assert done["requests"] <= said["requests"] + 16
    assert said["requests"] <= 2 * done["requests"]


# -- the tables -----------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["flipped", "gone"])
def test_what_a_broker_knew_is_verified_while_there_may_be_a_copy_of_it(how: str, tmp_path: Path):
    """Nobody else has its topics, groups and offsets; `verify --deep` never looked at them."""
    store, url = unpack("s10-consumers", tmp_path), f"file://{tmp_path}/tier"
    here("attach", store, "--to", url, "--decommission").good()
    here("verify", url).good()
    (kept,) = (path for path in (tmp_path / "tier").rglob("meta/handover/*") if path.is_file())
    data = kept.read_bytes()
    kept.unlink()
    if how == "flipped":
        kept.write_bytes(data[:40] + bytes([data[40] ^ 1]) + data[41:])
    ran = here("verify", url, "--json")
    assert ran.code == 1
    (problem,) = ran.document["problems"]
    assert "/meta/handover/" in problem["where"]
    assert "topics, groups and offsets" in problem["detail"]


def test_damaged_offsets_of_groups_are_told_and_what_is_advised_mends_it(tmp_path: Path):
    """One bit ended `mount` and `restore` with "run `tiered verify`", which looked elsewhere and called the tier whole."""
    original, url = unpack("s10-consumers", tmp_path), f"file://{tmp_path}/tier"
    here("attach", original, "--to", url, "--decommission").good()
    place = {"consumerGroup": "ordered", "topic": "other", "queueId": 1}
    with mounted(url) as served, served.client() as client:
        client.ask(protocol.UPDATE_CONSUMER_OFFSET, commitOffset=7, **place)
        served.stop()
    here("verify", url, "--deep").good()
    (journal,) = (tmp_path / "tier").rglob("meta/mount/*/journal")
    last = max(path for path in journal.iterdir() if path.name.isdigit())
    data = last.read_bytes()
    last.write_bytes(data[:40] + bytes([data[40] ^ 1]) + data[41:])
    found = here("verify", url, "--deep", "--json")
    assert (found.code, [one["kind"] for one in found.document["problems"]]) == (1, ["meta"])
    store = tmp_path / "restored"
    told = here("restore", url, "--to", store, *SMALL)
    assert (told.code, sorted(path.name for path in tmp_path.glob("*restored*"))) == (5, [])
    assert "the offsets that a mount has kept of consumer groups are damaged" in told.err
    assert f"all below {str(journal).removeprefix(f'{tmp_path}/tier/')}/:" in told.err
    with pytest.raises(DataError, match="the offsets that a mount has kept"), mounted(url):
        pass
    with mounted(url, keeps_offsets=False) as served:
        served.stop()
    here("restore", url, "--to", store, *SMALL, "--accept-damage").good()
    shutil.rmtree(journal)
    (journal.parent / "lease").unlink()
    here("verify", url, "--deep").good()
    with mounted(url) as served:
        served.stop()
    here("restore", url, "--to", tmp_path / "again", *SMALL).good()


def test_a_decommissioned_broker_has_its_tables_again(tmp_path: Path):
    original, url = unpack("s10-consumers", tmp_path), f"file://{tmp_path}/tier"
    here("attach", original, "--to", url, "--decommission").good()
    with mounted(url) as served, served.client() as client:
        place = {"consumerGroup": "ordered", "topic": "other", "queueId": 1}
        client.ask(protocol.UPDATE_CONSUMER_OFFSET, commitOffset=7, **place)
        served.stop()
    store = tmp_path / "restored"
    told = here("restore", url, "--to", store, *SMALL, "--json").good().document
    was, now = (
        {name: json.loads(_strict((path / "config" / name).read_text())) for name in TABLES}
        for path in (original, store)
    )
    topics, groups = (name for name in TABLES if name != "consumerOffset.json")
    kept = {"work", "other", "%RETRY%failing", "%DLQ%failing", "%RETRY%ordered"}
    made = now[topics]["topicConfigTable"]
    assert told["topics"] == len(made) - 4  # which every broker makes for itself
    for topic in kept:
        assert now[topics]["topicConfigTable"][topic] == was[topics]["topicConfigTable"][topic]
    assert now[groups]["subscriptionGroupTable"] == was[groups]["subscriptionGroupTable"]
    before = was["consumerOffset.json"]["offsetTable"]
    after = now["consumerOffset.json"]["offsetTable"]
    assert after == {name: row for name, row in before.items() if name.count("@") == 1} | {
        "other@ordered": before["other@ordered"] | {"1": 7}
    }


def test_offsets_of_a_mount_of_another_name_are_taken_when_it_is_said_and_told_of_when_not(
    tmp_path: Path,
):
    original, url = unpack("s10-consumers", tmp_path), f"file://{tmp_path}/tier"
    here("attach", original, "--to", url, "--decommission").good()
    kept = {"": 7, "served-as": 8, "pair/127.0.0.1:0": 9}  # (shared, by its --listen)
    for number, (mount, offset) in enumerate(kept.items()):
        name, _, address = mount.partition("/")
        with mounted(url, name=name or None, is_shared=bool(address)) as served:
            with served.client() as client:
                place = {"consumerGroup": "ordered", "topic": "other", "queueId": 1}
                client.ask(protocol.UPDATE_CONSUMER_OFFSET, commitOffset=offset, **place)
            served.stop()
        assert len(list((tmp_path / "tier").rglob("lease"))) == 2 + number
    for number, (mount, offset) in enumerate(kept.items()):
        store = tmp_path / f"of-{number}"
        words = ("--offsets-of", mount) if mount else ()
        ran = here("restore", url, "--to", store, *SMALL, *words, "--json").good()
        left_out = ran.document["left_out_mounts"]
        assert left_out == sorted({"broker-a", *kept} - {"", mount or "broker-a"})
        assert all(one in ran.err for one in left_out), ran.err
        table = json.loads(_strict((store / "config" / TABLES[2]).read_text()))["offsetTable"]
        assert table["other@ordered"]["1"] == offset
    ran = here("restore", url, "--to", tmp_path / "no", *SMALL, "--offsets-of", "nobody")
    assert (ran.code, "served-as" in ran.err) == (2, True), ran.err


def test_of_a_part_no_group_is_beyond_what_is_there(tmp_path: Path):
    """It would pass over as many messages that are produced later; also of a topic that comes again only then."""
    original, url = unpack("s10-consumers", tmp_path), f"file://{tmp_path}/tier"
    here("attach", original, "--to", url, "--decommission").good()
    times = sorted(one["store_timestamp_ms"] for one in captured("s10-consumers").messages["work"])
    store = restored(url, tmp_path / "of", "--topics", "work", "--until", str(times[20]))
    was, now = (
        json.loads(_strict((path / "config" / "consumerOffset.json").read_text()))["offsetTable"]
        for path in (original, store)
    )
    found = here("attach", store, "--to", f"file://{tmp_path}/again", "--once", "--json").good()
    assert found.document["messages"] == 20
    ends = {
        str(queue.queue_id): end for queue, (_, end) in bounds(f"file://{tmp_path}/again").items()
    }
    assert was["work@careful"] == {"0": 30, "1": 30, "2": 30, "3": 30}
    assert now == {
        name: {queue: min(offset, ends[queue]) for queue, offset in row.items()}
        for name, row in was.items()
        if name.startswith("work@")
    }


def test_topics_without_messages_are_there_also_where_a_queue_has_expired_as_a_whole(
    tmp_path: Path,
):
    """Of the tier everything is restored, so all that the broker had is in the table."""
    original, url = unpack("s10-consumers", tmp_path), f"file://{tmp_path}/tier"
    here("store", "topic", original, "never", "--queues", "3").good()
    here("attach", original, "--to", url, "--decommission").good()
    here("expire", url, "--topics", "other", "--ttl", "1s", "--apply", "-").good()
    made = topics_of(restored(url, tmp_path / "whole"))
    assert {"work", "other", "never", "%RETRY%careful"} <= set(made)
    assert made["never"]["readQueueNums"] == 3
    of_a_part = topics_of(restored(url, tmp_path / "part", "--topics", "work"))
    assert not {"other", "never", "%RETRY%careful"} & set(of_a_part)


def topics_of(store: Path) -> dict[str, Any]:
    table = json.loads((store / "config" / "topics.json").read_text())
    return dict(table["topicConfigTable"])


TABLES = ("topics.json", "subscriptionGroup.json", "consumerOffset.json")


def _strict(text: str) -> str:
    from tiered.format.fastjson import loads

    return json.dumps(loads(text))


# -- cut short ------------------------------------------------------------------------------------


def half(store: Path) -> Path:
    """Where it lies until it is finished."""
    return building(str(store))


def log_of(store: Path) -> bytes:
    return b"".join(path.read_bytes() for path in sorted((store / "commitlog").iterdir()))


@pytest.mark.parametrize("stops_after", [0, 1, 5])
def test_what_was_stopped_goes_on_and_ends_as_if_it_had_not_been(
    stops_after: int, captured_tier: Tier, tmp_path: Path
):
    url = captured_tier("s01-basic")[1]
    whole = restored(url, tmp_path)
    chunks = iter([False] * stops_after)
    to = tmp_path / "stopped"
    with open_tier(url) as tier:
        plan = plan_restore(tier, RestoreSelection())

        def run(stop: Callable[[], bool]) -> bool:
            restore = Restore(
                tier, plan, str(to), OPTIONS, SystemClock(), memory_bytes=1 << 20, stop=stop
            )
            return restore.run().is_complete

        assert not run(lambda: next(chunks, True))
        assert not to.exists()
        assert not (half(to) / "commitlog").exists()  # where a broker would look
        with pytest.raises(InvalidError, match="something else"):
            Restore(
                tier,
                plan_restore(
                    tier, RestoreSelection(lambda topic: topic == "orders", wish="orders")
                ),
                str(to),
                OPTIONS,
                SystemClock(),
                memory_bytes=1 << 20,
            ).run()
        with max((half(to) / "commitlog.part").iterdir()).open("r+b") as file:
            file.seek(-100, 2)
            file.write(b"what a crash leaves behind the end")
        assert run(lambda: False)
    assert not (to / "abort").exists()
    assert not half(to).exists()
    assert sorted(records_of(to)) == sorted(records_of(whole))


def stopped_or_killed(url: str, to: Path, when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave a restore half made: in the middle of its log, or when it has a log and tables but not its name."""
    if when == "log":
        assert not piecewise(url, to, lambda: True)
    else:

        def die(self: Restore) -> None:
            raise OSError(errno.EIO, "the machine ends here")

        with monkeypatch.context() as broken:
            broken.setattr(Restore, "_take_place", die)
            with pytest.raises(StoreUnavailableError, match="the machine ends here"):
                piecewise(url, to)
    assert not to.exists()
    assert half(to).exists()


def put_messages(to: Path) -> None:
    lines = to.with_name("lines")
    lines.write_text(json.dumps({"topic": "t", "queue_id": 0, "body_base64": "eA=="}) + "\n")
    here("store", "put", half(to), lines).good()


def begin_a_store(to: Path) -> None:
    other = to.with_name("other-store")
    here("store", "create", other).good()
    shutil.copytree(other, half(to), dirs_exist_ok=True)


def add_to(name: str, data: bytes = b"x") -> Callable[[Path], object]:
    def change(to: Path) -> None:
        path = half(to) / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes((path.read_bytes() if path.exists() else b"") + data)

    return change


def flip_a_bit(to: Path) -> None:
    folder = half(to) / "commitlog.part"
    path = min((folder if folder.exists() else half(to) / "commitlog").iterdir())
    data = bytearray(path.read_bytes())
    data[200] ^= 1
    path.write_bytes(data)


def lose_a_file(to: Path) -> None:
    min((half(to) / "commitlog").iterdir()).unlink()


def change_offsets(to: Path) -> None:
    """As a broker does on which a group has consumed."""
    path = half(to) / "config" / "consumerOffset.json"
    table = json.loads(path.read_text())
    table["offsetTable"]["t@g"] = {"0": 1}
    path.write_text(json.dumps(table))


CHANGES = {
    "log": (begin_a_store, flip_a_bit, add_to("note"), add_to("config/topics.json"),
            add_to("commitlog.part/notes"), add_to("abort")),
    "end": (put_messages, flip_a_bit, lose_a_file, change_offsets, add_to("note"),
            add_to("config/subscriptionGroup.json"), add_to("config/delayOffset.json"),
            add_to("commitlog/00000000000000000000")),
}  # fmt: skip


@pytest.mark.parametrize("when", ["log", pytest.param("end", marks=pytest.mark.slow)])
def test_what_somebody_has_changed_meanwhile_is_not_gone_on_with(
    when: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A broker may have stored messages there, and given its word for them: its own note is not taken for proof."""
    tier_of = Growing(tmp_path)
    tier_of.put("t", *map(str, range(50)))
    for number, change in enumerate(CHANGES[when]):
        to = tmp_path / f"restored-{number}"
        stopped_or_killed(tier_of.url, to, when, monkeypatch)
        change(to)
        before = {path: path.read_bytes() for path in half(to).rglob("*") if path.is_file()}
        with pytest.raises(InvalidError, match="somebody else has written here") as raised:
            piecewise(tier_of.url, to)
        assert "restore into another" in str(raised.value.do)
        after = {path: path.read_bytes() for path in half(to).rglob("*") if path.is_file()}
        assert {path: data for path, data in after.items() if path.name != "lock"} == {
            path: data for path, data in before.items() if path.name != "lock"
        }, number
        assert not to.exists()


def test_a_finished_store_is_not_restored_again(tmp_path: Path):
    """Whoever started a broker on it has messages there by now."""
    tier_of, to = Growing(tmp_path), tmp_path / "restored"
    tier_of.put("t", *map(str, range(50)))
    words = ("restore", tier_of.url, "--to", to, *SMALL)
    here(*words).good()
    lines = tmp_path / "lines"
    lines.write_text(json.dumps({"topic": "t", "queue_id": 0, "body_base64": "eA=="}) + "\n")
    here("store", "put", to, lines).good()
    before = {path: path.read_bytes() for path in to.rglob("*") if path.is_file()}
    for more, why in ((), "restored here already"), (("--topics", "t"), "something already"):
        ran = here(*words, *more)
        assert (ran.code, why in ran.err) == (2, True), ran
    assert {path: path.read_bytes() for path in to.rglob("*") if path.is_file()} == before
    assert not half(to).exists()


def test_what_comes_to_the_place_meanwhile_stays_and_the_store_takes_it_once_it_is_empty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    tier_of, to = Growing(tmp_path), tmp_path / "restored"
    tier_of.put("t", *map(str, range(50)))
    real = Restore._take_place

    def late(self: Restore) -> None:
        to.mkdir()
        (to / "mine").touch()
        real(self)

    with monkeypatch.context() as patch:
        patch.setattr(Restore, "_take_place", late)
        with pytest.raises(InvalidError, match="something has come there"):
            piecewise(tier_of.url, to)
    (to / "mine").unlink()
    assert piecewise(tier_of.url, to)
    assert len(records_of(to)) == 50


def test_a_tier_that_is_still_fed_is_restored_as_it_was_when_it_was_begun(tmp_path: Path):
    """Between being stopped and going on the tier gets more messages, and a queue that it did not have."""
    tier_of, to = Growing(tmp_path), tmp_path / "restored"
    url, many = tier_of.url, [str(number) for number in range(50)]

    def run(stops: bool) -> bool:
        with open_tier(url) as tier:
            plan = plan_restore(tier, RestoreSelection())
            restore = Restore(
                tier,
                plan,
                str(to),
                OPTIONS,
                SystemClock(),
                memory_bytes=1 << 20,
                stop=lambda: stops,
            )
            return restore.run().is_complete

    tier_of.put("old", *many)
    before = bounds(url)
    assert not run(stops=True)
    tier_of.put("old", *many)
    tier_of.put("new", *many)
    assert len(bounds(url)) > len(before)
    assert run(stops=False)
    here("attach", to, "--to", f"file://{tmp_path}/again", "--once").good()
    assert bounds(f"file://{tmp_path}/again") == before


def test_what_the_disk_has_not_taken_is_not_noted_and_the_same_goes_on_later(
    captured_tier: Tier, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """How far it is is noted beside the work: what is not synced is put again."""
    url, to = captured_tier("s01-basic")[1], tmp_path / "restored"
    whole = restored(url, tmp_path / "whole")
    monkeypatch.setattr(module, "SAVE_BYTES", 64 << 10)
    real, left = disk._sync_file, iter(range(4))

    def sync(path: str) -> None:
        if next(left, None) is None:
            raise OSError(errno.EIO, "the disk refuses it")
        real(path)

    with open_tier(url) as tier:
        plan = plan_restore(tier, RestoreSelection())
        restore = Restore(tier, plan, str(to), OPTIONS, SystemClock(), memory_bytes=1 << 20)
        with monkeypatch.context() as broken:
            broken.setattr(disk, "_sync_file", sync)
            with pytest.raises(StoreUnavailableError, match="the disk refuses it"):
                restore.run()
        noted = json.loads((half(to) / "restore.json").read_bytes())["log"]["end"]
        assert 1 << 18 < noted < (1 << 18) + restore.done_bytes
        again = Restore(tier, plan, str(to), OPTIONS, SystemClock(), memory_bytes=1 << 20)
        assert again.run().is_complete
    assert sorted(records_of(to)) == sorted(records_of(whole))


def test_a_sync_that_failed_once_is_not_made_good_by_the_next(
    captured_tier: Tier, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The system tells of a write that failed once, and drops it: the next sync says that all is well."""
    url, to = captured_tier("s01-basic")[1], tmp_path / "restored"
    monkeypatch.setattr(module, "SAVE_BYTES", 64 << 10)
    real, syncs = disk._sync_file, iter(range(1000))

    def sync(path: str) -> None:
        if next(syncs) == 4:
            raise OSError(errno.EIO, "the disk refuses it")
        real(path)

    with open_tier(url) as tier:
        plan = plan_restore(tier, RestoreSelection())
        restore = Restore(tier, plan, str(to), OPTIONS, SystemClock(), memory_bytes=1 << 20)
        with monkeypatch.context() as broken:
            broken.setattr(disk, "_sync_file", sync)
            with pytest.raises(StoreUnavailableError, match="the disk refuses it"):
                restore.run()
        noted = json.loads((half(to) / "restore.json").read_bytes())["log"]["end"]
        assert noted < (1 << 18) + restore.done_bytes


@pytest.mark.parametrize("full", ["log", "note"])
def test_a_disk_that_was_full_for_a_while_loses_and_doubles_nothing(
    full: str, captured_tier: Tier, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A chunk that was read, and is not in the log or only half, is read again."""
    url, to = captured_tier("s01-basic")[1], tmp_path / "restored"
    whole = restored(url, tmp_path / "whole")
    monkeypatch.setattr(module, "SAVE_BYTES", 64 << 10)
    holder, name = (disk.RowWriter, "write") if full == "log" else (module, "replace_file")
    real, calls = getattr(holder, name), iter(range(1 << 20))

    def write(*given: Any) -> None:
        if next(calls) == 3:
            raise OSError(errno.ENOSPC, "no space left on device")
        real(*given)

    with open_tier(url) as tier:
        plan = plan_restore(tier, RestoreSelection())

        def restore() -> Restore:
            return Restore(tier, plan, str(to), OPTIONS, SystemClock(), memory_bytes=1 << 20)

        with monkeypatch.context() as broken:
            broken.setattr(holder, name, write)
            with pytest.raises(StoreUnavailableError, match="no space left"):
                restore().run()
        assert restore().run().is_complete
    assert sorted(records_of(to)) == sorted(records_of(whole))


def test_whenever_it_is_killed_the_same_command_goes_on(
    captured_tier: Tier, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """What lies there before each step that changes the directory is what a crash leaves: it is gone on with from each."""
    url, to = captured_tier("s10-consumers")[1], tmp_path / "restored"
    monkeypatch.setattr(module, "SAVE_BYTES", 32 << 10)
    left: list[Path] = []

    def run(directory: Path) -> None:
        with open_tier(url) as tier:
            plan = plan_restore(tier, RestoreSelection())
            made = Restore(tier, plan, str(directory), OPTIONS, SystemClock(), memory_bytes=1 << 20)
            assert made.run().is_complete

    def watched(real: Callable[..., Any]) -> Callable[..., Any]:
        def step(*given: Any, **more: Any) -> Any:
            with lock:
                copy = tmp_path / f"left-{len(left)}"
                if half(to).exists():
                    words = ["cp", "-a", half(to), half(copy)]
                    if subprocess.run(words, check=False, capture_output=True).returncode == 0:
                        left.append(copy)
            return real(*given, **more)

        return step

    lock = threading.RLock()
    with monkeypatch.context() as patch:
        for holder, name in (
            *((Path, name) for name in ("mkdir", "replace", "rename", "unlink")),
            *((os, name) for name in ("fsync", "utime")),
            *((disk.RowWriter, name) for name in ("write", "sync")),
        ):
            patch.setattr(holder, name, watched(getattr(holder, name)))
        run(to)
    assert len(left) > 20
    for copy in (*left[:12], *left[12::5]):  # each is a restore
        run(copy)
        assert sorted(records_of(copy)) == sorted(records_of(to)), copy.name
        assert not {"abort", "commitlog.part", "restore.json.new"} & {
            one.name for one in copy.iterdir()
        }
        assert not half(copy).exists()


def records_of(store: Path) -> list[tuple[str, int, int]]:
    return [(record.topic, record.queue_id, record.queue_offset) for record in walk(log_of(store))]


def walk(log: bytes) -> Iterator[Record]:
    at = 0
    while at < len(log) and int.from_bytes(log[at : at + 4]):
        size = int.from_bytes(log[at : at + 4])
        if log[at + 4 : at + 8] != bytes.fromhex("cbd43194"):
            yield decode_record(log, at)
        at += size


def test_a_directory_with_something_in_it_is_refused(captured_tier: Tier, tmp_path: Path):
    (tmp_path / "file").touch()
    ran = here("restore", captured_tier("s01-basic")[1], "--to", tmp_path)
    assert ran.code == 2
    assert "there is something already" in ran.error
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_what_was_killed_within_its_first_note_is_begun_anew(captured_tier: Tier, tmp_path: Path):
    store = tmp_path / "restored"
    half(store).mkdir()
    (half(store) / "restore.json.new").write_text("{")
    url = captured_tier("s01-basic")[1]
    assert here("restore", url, "--to", store, *SMALL, "--dry-run").code == 0
    assert messages_of(restored(url, tmp_path), tmp_path)


def test_nothing_to_restore_is_an_error(captured_tier: Tier, tmp_path: Path):
    url = captured_tier("s01-basic")[1]
    ran = here("restore", url, "--to", tmp_path / "restored", "--topics", "none*")
    assert ran.code == 2
    assert "there is nothing to restore" in ran.error


# -- the tier has moved on ------------------------------------------------------------------------


def piecewise(url: str, to: Path, stop: Callable[[], bool] = lambda: False) -> bool:
    """Restore in chunks of 64 KiB, or go on; whether it came to the end."""
    with open_tier(url) as tier:
        plan = plan_restore(tier, RestoreSelection())
        made = Restore(tier, plan, str(to), OPTIONS, SystemClock(), memory_bytes=1, stop=stop)
        return made.run().is_complete


def refused(url: str, to: Path, why: str) -> None:
    """It does not go on, changes nothing, and what there is can be restored elsewhere."""
    before = {path: path.read_bytes() for path in half(to).rglob("*") if path.is_file()}
    with pytest.raises(InvalidError, match=why) as raised:
        piecewise(url, to)
    assert "into an empty directory" in str(raised.value.do)
    assert {path: path.read_bytes() for path in half(to).rglob("*") if path.is_file()} == before
    assert piecewise(url, to.with_name("elsewhere"))


def test_what_has_expired_since_it_was_cut_short_is_told(tmp_path: Path):
    tier_of, to = Growing(tmp_path), tmp_path / "restored"
    put_keyed(tier_of, KEYS)
    put_keyed(tier_of, KEYS)
    assert not piecewise(tier_of.url, to, lambda: True)
    here("expire", tier_of.url, "--ttl", "1ms", "--max-deletions", "1", "--apply", "-").good()
    ((low, end),) = bounds(tier_of.url).values()
    assert 0 < low < end
    ((*_, put, _, _, _),) = json.loads((half(to) / "restore.json").read_text())["next"]
    assert put < low
    why = rf"messages \[{put}, {low}\) of .* have expired, since the restore was begun"
    refused(tier_of.url, to, why)


def test_a_history_that_another_has_taken_the_place_of_is_not_gone_on_with(tmp_path: Path):
    tier_of, to = Growing(tmp_path), tmp_path / "restored"
    tier_of.put("t", *map(str, range(50)))
    assert not piecewise(tier_of.url, to, lambda: True)
    known = json.loads((half(to) / "restore.json").read_text())
    for place in (-2, -1):  # its incarnation, and how often an end of it was truncated
        noted = json.loads(json.dumps(known))
        noted["next"][0][place] += 1
        (half(to) / "restore.json").write_text(json.dumps(noted))
        with pytest.raises(InvalidError, match="began anew, or messages of it were truncated"):
            piecewise(tier_of.url, to)
    (half(to) / "restore.json").write_text(json.dumps(known))
    assert piecewise(tier_of.url, to)


KEYS = [f"k{number % 7}" for number in range(3000)]


def test_holes_that_the_log_was_not_begun_for_are_refused(tmp_path: Path):
    """An entry for no message would name the place of a real record."""
    tier_of, to = Growing(tmp_path), tmp_path / "restored"
    put_keyed(tier_of, KEYS)
    assert not piecewise(tier_of.url, to, lambda: True)
    compact(tier_of.url)
    refused(tier_of.url, to, "has been compacted, or has a gap now, since the restore was begun")


def test_holes_that_come_while_it_runs_are_refused(tmp_path: Path):
    """Objects that it was begun with are gone, and what came in their place has holes."""
    tier_of, to = Growing(tmp_path), tmp_path / "restored"
    put_keyed(tier_of, KEYS)
    with open_tier(tier_of.url) as tier:
        plan = plan_restore(tier, RestoreSelection())
        compact(tier_of.url)
        here("gc", tier_of.url, "--grace", "1ms", "--apply", "-").good()
        made = Restore(tier, plan, str(to), OPTIONS, SystemClock(), memory_bytes=1)
        with pytest.raises(InvalidError, match="has been compacted"):
            made.run()


def test_holes_that_it_was_begun_with_are_filled_though_they_have_expired(tmp_path: Path):
    """What it was begun for is noted, and goes for all of it."""
    tier_of, to = Growing(tmp_path), tmp_path / "restored"
    put_keyed(tier_of, KEYS)
    compact(tier_of.url)
    assert not piecewise(tier_of.url, to, lambda: True)
    assert json.loads((half(to) / "restore.json").read_text())["has_holes"]
    assert piecewise(tier_of.url, to)
    first = (to / "commitlog" / f"{1 << 18:020d}").read_bytes()
    assert first[4:8] == bytes.fromhex("cbd43194")


def put_keyed(tier_of: Growing, keys: list[str]) -> None:
    lines = tier_of.store.with_name("keyed")
    row = {"topic": "prices", "queue_id": 0, "body_base64": "eHh4eHh4eHh4eHh4eHh4eHh4eHh4"}
    lines.write_text("".join(json.dumps({**row, "keys": key}) + "\n" for key in keys))
    here("store", "put", tier_of.store, lines).good()
    here("attach", tier_of.store, "--to", tier_of.url, "--once", "--seal").good()


def compact(url: str) -> None:
    here("compact", url, "--topic", "prices", "--dirty-ratio", "0", "--apply", "-").good()


# -- what is in the log stays there ----------------------------------------------------------------


def tier_with_zeros(folder: Path) -> tuple[str, int]:
    """Of a queue with messages that have zeros, wherever in a sector; and how many messages it has."""
    store, url, lines = folder / "store", f"file://{folder}/tier", folder / "lines"
    rows = [
        {"topic": "n", "queue_id": 0, "properties": {"pad": "\0" * size}, "body_base64": "eA=="}
        for size in range(2, 1400, 2)
    ]
    lines.write_text("".join(json.dumps(row) + "\n" for row in rows))
    here("store", "create", store).good()
    here("store", "put", store, lines).good()
    here("attach", store, "--to", url, "--once").good()
    return url, len(rows)


def test_messages_that_have_zeros_do_not_end_the_log(tmp_path: Path):
    url, count = tier_with_zeros(tmp_path)
    store = restored(url, tmp_path)
    assert len(records_of(store)) == count
    assert len(messages_of(store, tmp_path)["n"]) == count


def test_damage_of_what_was_put_is_an_error_and_cuts_off_nothing(
    captured_tier: Tier, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """As of a disk that gives back other bytes than it was given."""
    to, real = tmp_path / "restored", Restore._topics
    left: list[bytes] = []

    def write(self: Restore, *given: Any) -> tuple[Any, set[str]]:
        topics = real(self, *given)
        with (half(to) / "commitlog" / f"{1 << 18:020d}").open("r+b") as file:
            file.seek(1000)
            file.write(bytes(200))
        left.append(log_of(half(to)))
        return topics

    monkeypatch.setattr(Restore, "_topics", write)
    with open_tier(captured_tier("s01-basic")[1]) as tier:
        plan = plan_restore(tier, RestoreSelection())
        restore = Restore(tier, plan, str(to), OPTIONS, SystemClock(), memory_bytes=1 << 20)
        with pytest.raises(DataError, match="is damaged, and the log was on the disk up to"):
            restore.run()
    assert left == [log_of(half(to))]


# -- queues of which nothing is left ---------------------------------------------------------------


def store_expired_by_half(folder: Path) -> tuple[Growing, int]:
    """A tier in which everything of a queue has expired, and nothing of another; where the first one stands."""
    tier_of = Growing(folder)
    tier_of.put("gone", *map(str, range(350)))
    here("attach", tier_of.store, "--to", tier_of.url, "--once", "--seal").good()
    here("expire", tier_of.url, "--topics", "gone", "--ttl", "1ms", "--apply", "-").good()
    tier_of.put("kept", *map(str, range(20)))
    ((low, end),) = (span for queue, span in bounds(tier_of.url).items() if queue.topic == "gone")
    assert low == end > 0
    return tier_of, end


@pytest.mark.parametrize("dies", [False, True])
@pytest.mark.parametrize(
    "items", ["350", *(pytest.param(n, marks=pytest.mark.slow) for n in ("100", "1000"))]
)
def test_an_emptied_queue_goes_on_where_it_stood(items: str, dies: bool, tmp_path: Path):
    tier_of, end = store_expired_by_half(tmp_path)
    store = tmp_path / "restored"
    sizes = ("--log-file-size", "256KiB", "--queue-items", items)
    here("restore", tier_of.url, "--to", store, *sizes).good()
    if dies:  # as after a crash of whoever works on it
        (store / "abort").touch()
    lines = tmp_path / "lines"
    row = {"topic": "gone", "queue_id": 0, "body_base64": "eA=="}
    lines.write_text(json.dumps(row) + "\n")
    here("store", "put", store, lines).good()
    again = f"file://{tmp_path}/again"
    here("attach", store, "--to", again, "--once").good()
    ((first, last),) = (span for queue, span in bounds(again).items() if queue.topic == "gone")
    assert (first, last) == (end, end + 1)


def test_where_nothing_is_selected_of_a_queue_it_goes_on_behind_what_it_had(tmp_path: Path):
    tier_of = Growing(tmp_path)
    tier_of.put("old", *map(str, range(50)))
    between = str(int(SystemClock().now_ms()) + 1)
    tier_of.put("new", *map(str, range(50)))
    store = restored(tier_of.url, tmp_path / "of", "--from", between)
    assert {record[0] for record in records_of(store)} == {"new"}
    again = f"file://{tmp_path}/again"
    here("attach", store, "--to", again, "--once").good()
    assert {queue.topic: span for queue, span in bounds(again).items()}["old"] == (50, 50)


# -- gaps and records of their own kind -----------------------------------------------------------


def tier_with_a_gap(folder: Path) -> tuple[str, int]:
    """Of a queue in whose middle an object is lost for good; how many messages that were."""
    store, url = unpack("s01-basic", folder), f"file://{folder}/tier"
    small = ("--bundle-size", "16KiB", "--segment-size", "32KiB")
    here("attach", store, "--to", url, "--once", *small).good()
    (prefix,) = (folder / "tier").glob("*/broker-a")
    for lost in (prefix / "journal", *prefix.glob("bundle/[1-9]")):
        shutil.rmtree(lost)
    sorted(prefix.glob("queue/large/0000000000/0000000000/*"))[1].unlink()
    here("rebuild", url, "--apply", "-", "--accept-gaps").good()
    (left,) = {row["gap_messages"] for row in here("status", url, "--json").document["brokers"]}
    assert left
    return url, left


def test_where_the_tier_has_a_gap_the_queue_goes_on_behind_it(tmp_path: Path):
    url, left = tier_with_a_gap(tmp_path)
    ran = here("restore", url, "--to", tmp_path / "restored", *SMALL, "--json").good()
    assert ran.document["filled_offsets"] == left
    found = messages_of(tmp_path / "restored", tmp_path, holes=left)
    for topic in {queue.topic for queue in bounds(url)}:
        wanted = here("cat", url, topic).good().rows
        assert without_places(found[topic], "log_offset") == without_places(wanted, "log_offset")


def test_holes_at_the_end_of_a_queue_count(tmp_path: Path):
    """What is restored ends behind a gap: whoever goes on with the store does not give these queue offsets anew."""
    url, left = tier_with_a_gap(tmp_path)
    rows = here("cat", url, "large").good().rows
    behind = next(
        now
        for was, now in itertools.pairwise(rows)
        if now["queue_id"] == was["queue_id"] and now["queue_offset"] > was["queue_offset"] + 1
    )
    store, until = tmp_path / "restored", str(behind["store_timestamp_ms"])
    words = ("--topics", "large", "--until", until)
    ran = here("restore", url, "--to", store, *SMALL, *words, "--json").good()
    assert ran.document["filled_offsets"] == left
    lines = tmp_path / "lines"
    line = {"topic": "large", "queue_id": behind["queue_id"], "body_base64": "eA=="}
    lines.write_text(json.dumps(line) + "\n")
    here("store", "put", store, lines).good()
    assert records_of(store)[-1] == ("large", behind["queue_id"], behind["queue_offset"])


def test_a_property_crc_covers_the_new_place(tmp_path: Path):
    """``enabledAppendPropCRC``: a CRC of the whole record stands at its end, digits last first."""
    (message, *_) = captured("s01-basic").messages["orders"]
    record = decode_record(LocalLog(unpack("s01-basic", tmp_path)).record(message), 0)
    from dataclasses import replace

    tail = b"__CRC32#\x01" + b"0" * 10 + b"\x02"
    raw = record.properties_raw + tail
    data = bytearray(
        encode_record(replace(record, properties_raw=raw, size=record.size + len(tail)))
    )
    (tmp_path / "restored").mkdir()
    log = RestoredLog.open(tmp_path / "restored", file_bytes=1 << 16)
    try:
        log.put(np.frombuffer(data, np.uint8), np.array([len(data)]))
        log.sync()
        log.end_log(0)
    finally:
        log.close()
    written = log_of(tmp_path / "restored")[: len(data)]
    assert decode_record(written, 0).physical_offset == 1 << 16
    digits = f"{zlib_ng.crc32(written[:-20]) & 0x7FFFFFFF:010d}"[::-1].encode()
    assert written[-20:] == b"__CRC32#\x01" + digits + b"\x02"


def test_a_record_that_fits_no_file_is_told(captured_tier: Tier, tmp_path: Path):
    url = captured_tier("s01-basic")[1]
    ran = here("restore", url, "--to", tmp_path / "restored", "--log-file-size", "64KiB")
    assert ran.code == 2
    assert "does not fit log files of 65536" in ran.error


# -- Java -----------------------------------------------------------------------------------------


@pytest.mark.java
@oracle.needs_java
@pytest.mark.parametrize("name", ["s06-expired", "s09-big-offsets", "s11-lmq-batchcq"])
def test_javas_own_store_reads_what_was_restored(name: str, captured_tier: Tier, tmp_path: Path):
    dumped = read_dump(oracle.dump(restored(captured_tier(name)[1], tmp_path)))
    wanted = captured(name)
    begun = {queue: found for queue, found in wanted.bounds.items() if found[1]}
    assert {queue: dumped.bounds[queue] for queue in begun} == begun
    for topic, messages in wanted.messages.items():
        assert without_places(dumped.messages.get(topic, [])) == without_places(messages)


@pytest.mark.slow
@pytest.mark.java
@oracle.needs_java
def test_javas_clients_pass_over_a_gap(tmp_path: Path):
    url, left = tier_with_a_gap(tmp_path)
    wanted = here("cat", url, "large").good().rows
    with oracle.Broker(tmp_path, restored(url, tmp_path)) as broker:
        broker.start()
        found = oracle.run("pull", "--namesrv", broker.address, "--topic", "large")
    assert left
    assert [(one["queue_id"], one["queue_offset"], one["msg_id"]) for one in found] == [
        (one["queue_id"], one["queue_offset"], one["msg_id"]) for one in wanted
    ]


@pytest.mark.java
@oracle.needs_java
def test_a_broker_starts_on_it_clients_read_everything_and_produce_more(
    captured_tier: Tier, tmp_path: Path
):
    store = restored(captured_tier("s06-expired")[1], tmp_path)
    wanted = captured("s06-expired")
    with oracle.Broker(tmp_path, store) as broker:
        broker.start()
        queues = {q.queue_id: b for q, b in wanted.bounds.items() if q.topic == "long-lived"}
        assert broker.offsets("long-lived") == queues
        found = oracle.run("pull", "--namesrv", broker.address, "--topic", "long-lived")
        ids = [(one["queue_id"], one["queue_offset"], one["msg_id"]) for one in found]
        assert ids == [
            (one["queue_id"], one["queue_offset"], one["msg_id"])
            for one in wanted.messages["long-lived"]
        ]
        emptied = {q.queue_id: b for q, b in wanted.bounds.items() if q.topic == "gone"}
        assert all(low == end > 0 for low, end in emptied.values())
        assert broker.offsets("gone") == emptied
        first = broker.produce("gone", len(emptied), queues=len(emptied), seed=3)
        assert {one["queue_id"]: one["queue_offset"] for one in first} == {
            queue_id: end for queue_id, (_, end) in emptied.items()
        }
        made = broker.produce("long-lived", 20, queues=len(queues), seed=3)
        ends = {queue_id: end for queue_id, (_, end) in queues.items()}
        for message in sorted(made, key=lambda one: (one["queue_id"], one["queue_offset"])):
            assert message["queue_offset"] == ends[message["queue_id"]]
            ends[message["queue_id"]] += 1
        at = ("--namesrv", broker.address, "--topic", "long-lived")
        key, new = "key-33", {one["msg_id"] for one in made}  # 35 have it; 64 are told at most
        of_key = {one["msg_id"] for one in wanted.messages["long-lived"] if one["keys"] == key}
        assert {one["msg_id"] for one in oracle.run("query", *at, "--key", key)} - new == of_key
        assert of_key
        # by unique id the client asks for the last three days only, and what is restored is older
        unique = made[5]["msg_id"]
        found = oracle.run("view", *at, "--msgid", unique)
        assert [one["msg_id"] for one in found] == [unique]
