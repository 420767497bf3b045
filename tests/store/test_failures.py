"""Disks that fail and replicas that do not answer: told, never hidden, and the store ends as a crash leaves it."""

from __future__ import annotations

import errno
import os
from dataclasses import replace
from typing import TYPE_CHECKING, NoReturn

import pytest
from support.disks import small_disk
from support.embedded import SYNC, create, reopen
from support.stored import read_all
from support.waiting import until

from tiered.errors import InvalidError, StoreUnavailableError
from tiered.format.fastjson import loads
from tiered.model import MessageQueue
from tiered.store import disk, embedded, topictable
from tiered.store.new_message import NewMessage
from tiered.store.store_options import StoreOptions

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

GOOD, BAD = NewMessage("t", 0, b"good"), NewMessage("t", 0, b"bad")


def test_a_flush_that_fails_ends_the_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    store = create(tmp_path / "s", SYNC)
    store.append(GOOD)

    def refuse(_: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(disk.os, "fdatasync", refuse)
        with pytest.raises(StoreUnavailableError, match="flush failed"):
            store.append(BAD)
    with pytest.raises(StoreUnavailableError, match="earlier write failed"):
        store.append(BAD)
    store.close()
    assert (tmp_path / "s" / "abort").exists()
    with reopen(tmp_path / "s") as store:
        assert store.recovered is not None
        store.append(GOOD)
    bodies = [record.body for record in read_all(tmp_path / "s")[MessageQueue("t", 0)].values()]
    assert bodies in ([b"good", b"good"], [b"good", b"bad", b"good"])


def test_a_replica_that_does_not_answer(tmp_path: Path):
    options = replace(SYNC, needs_replica=True, sync_timeout_s=0.05)
    store = create(tmp_path / "s", options)
    with pytest.raises(StoreUnavailableError, match="may still be stored"):
        store.append(GOOD)
    store.acknowledge_replica(store.log_end)
    assert store.wait_listed(timeout_s=60)
    store.close()
    assert not (tmp_path / "s" / "abort").exists()


def test_lists_that_cannot_be_written_end_the_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """What was appended is in the log: the next start lists it."""
    store = create(tmp_path / "s")
    with monkeypatch.context() as patch:
        patch.setattr(store._parts.index, "put", refusing(errno.EIO))
        put = store.append(GOOD)
        assert not store.wait_listed(timeout_s=60)
    with pytest.raises(StoreUnavailableError, match="Input/output error"):
        store.append(BAD)
    store.close()
    with reopen(tmp_path / "s") as store:
        (record,) = store.reader.by_key("t", put.msg_id)
        assert record.body == b"good"


# -- a disk without room -------------------------------------------------------------------------------


def refusing(code: int) -> Callable[..., NoReturn]:
    def refuse(*_: object, **__: object) -> NoReturn:
        raise OSError(code, os.strerror(code))

    return refuse


@pytest.mark.parametrize("has_dispatcher", [False, True])
@pytest.mark.parametrize("place", ["index.put", "queue_rows.write"])
def test_listing_goes_on_when_there_is_room_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, has_dispatcher: bool
):
    monkeypatch.setattr(embedded, "_ROOM_S", 0.01)
    heard: list[int] = []
    with create(tmp_path / "s") as store:
        if has_dispatcher:
            store.register(lambda batch: heard.extend(range(batch.base_offset, batch.end_offset)))
        part, _, name = place.partition(".")
        with monkeypatch.context() as patch:
            patch.setattr(getattr(store._parts, part), name, refusing(errno.ENOSPC))
            put = [store.append(GOOD) for _ in range(3)]
            until(lambda: store._upkeep.lacks_room)
            put.append(store.append(GOOD))
        put.append(store.append(GOOD))
        assert store.wait_listed(timeout_s=60)
        assert [where.queue_offset for where in put] == list(range(5))
        for where in put:
            (record,) = store.reader.by_key("t", where.msg_id)
            assert record.queue_offset == where.queue_offset
        assert heard == (list(range(5)) if has_dispatcher else [])
    assert not (tmp_path / "s" / "abort").exists()
    assert len(read_all(tmp_path / "s")[MessageQueue("t", 0)]) == 5


def test_a_checkpoint_that_finds_no_room_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    with create(tmp_path / "s") as store:
        store.append(GOOD)
        assert store.wait_listed(timeout_s=60)
        with monkeypatch.context() as patch:
            patch.setattr(embedded, "replace_file", refusing(errno.EDQUOT))
            store._upkeep.write_checkpoint()
        store._upkeep.write_checkpoint()
        store.append(GOOD)
    assert not (tmp_path / "s" / "abort").exists()


def test_a_topic_that_could_not_be_saved_is_saved_before_its_first_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    table = tmp_path / "s" / "config" / "topics.json"
    with create(tmp_path / "s") as store:
        with monkeypatch.context() as patch:
            patch.setattr(topictable, "replace_config", refusing(errno.ENOSPC))
            for _ in range(2):
                with pytest.raises(StoreUnavailableError, match="No space left"):
                    store.append(NewMessage("new", 0, b"x"))
        assert "new" not in loads(table.read_bytes())["topicConfigTable"]
        store.append(NewMessage("new", 0, b"x"))
        assert "new" in loads(table.read_bytes())["topicConfigTable"]


def test_what_was_not_listed_is_told_when_the_store_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(embedded, "_ROOM_S", 0.01)
    store = create(tmp_path / "s")
    monkeypatch.setattr(store._parts.index, "put", refusing(errno.ENOSPC))
    put = store.append(GOOD)
    with pytest.raises(
        StoreUnavailableError, match=r"in no list: .*No space left.*nothing is lost"
    ):
        store.close()
    assert (tmp_path / "s" / "abort").exists()
    with reopen(tmp_path / "s") as store:
        assert len(store.reader.by_key("t", put.msg_id)) == 1


def test_listing_that_takes_too_long_is_told_when_the_store_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    store = create(tmp_path / "s")
    monkeypatch.setattr(store._reput, "step", lambda: False)
    monkeypatch.setattr(embedded, "_DRAIN_S", 0.0)
    store.append(GOOD)
    with pytest.raises(
        StoreUnavailableError, match=r"from 0 on, in no list: listing took too long"
    ):
        store.close()
    with reopen(tmp_path / "s") as store:
        assert store.reader.bounds(MessageQueue("t", 0)) == (0, 1)


def test_a_real_disk_that_is_full_and_then_is_not(tmp_path: Path):
    """Whatever finds no room first, log, lists, index, checkpoint or table: all goes on, and nothing is lost."""
    with small_disk(tmp_path / "disk", "600k") as disk_:
        stored: list[bytes] = []
        with create(disk_.path / "s") as store:
            refused = 0
            for number in range(4000):
                body = b"%06d" % number + b"x" * 200
                try:
                    store.append(NewMessage(f"t{number % 50}", 0, body, keys=f"k{number}"))
                    stored.append(body)
                except StoreUnavailableError as error:
                    if "No space left" not in str(error):
                        raise
                    refused += 1
                    if refused == 5:
                        disk_.resize("64m")
            assert refused >= 5
            assert store.wait_listed(timeout_s=120)
            for number in (0, 3999):
                assert len(store.reader.by_key(f"t{number % 50}", f"k{number}")) == 1
        assert not (disk_.path / "s" / "abort").exists()
        found = read_all(disk_.path / "s")
        bodies = sorted(record.body for records in found.values() for record in records.values())
        assert bodies == stored


@pytest.mark.parametrize(
    "name",
    [
        "flush_interval_s",
        "index_slots",
        "commitlog_file_bytes",
        "message_bytes_max",
        "topic_queues",
    ],
)
def test_options_are_checked(name: str):
    with pytest.raises(InvalidError, match=name):
        StoreOptions(**{name: 0})


def test_a_store_is_locked_while_it_is_open(tmp_path: Path):
    with create(tmp_path / "s"), pytest.raises(InvalidError, match="another writer"):
        reopen(tmp_path / "s")
    reopen(tmp_path / "s").close()
