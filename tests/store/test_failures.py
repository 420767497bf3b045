"""Disks that fail and replicas that do not answer: told, never hidden, and the store ends as a crash leaves it."""

from __future__ import annotations

import errno
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from store.harness import SYNC, create, reopen
from store.reading import read_all

from tiered.errors import InvalidError, StoreUnavailableError
from tiered.model import MessageQueue
from tiered.store import disk
from tiered.store.new_message import NewMessage
from tiered.store.store_options import StoreOptions

if TYPE_CHECKING:
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

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(store._parts.index, "put", refuse)
        put = store.append(GOOD)
        assert not store.wait_listed(timeout_s=5)
    with pytest.raises(StoreUnavailableError, match="No space left"):
        store.append(BAD)
    store.close()
    with reopen(tmp_path / "s") as store:
        (record,) = store.reader.by_key("t", put.msg_id)
        assert record.body == b"good"


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
