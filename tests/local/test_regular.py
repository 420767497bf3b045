"""A FIFO, a socket or a device in the place of any of a store's files is refused by name; nobody waits for its other end."""

from __future__ import annotations

import os
import shutil
import socket
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from support import following
from support.broker_files import FakeBroker

from tiered.clock import ManualClock
from tiered.errors import InvalidError
from tiered.local.mapped_file_queue import open_regular
from tiered.store.embedded import MessageStore
from tiered.store.new_message import NewMessage
from tiered.store.store_options import StoreOptions

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.timeout(60)
OPTIONS = StoreOptions(8192, 10, index_slots=10, index_items=40)
NAMED = {"cluster": "c", "broker": "b"}
SMALL = ("abort", "checkpoint", "lock", "config/topics.json", "config/topicQueueMapping.json")
NAMES = (*SMALL, "brokerIdentity", "rocksdbstore/IDENTITY")


def put_fifo(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    os.mkfifo(path)


def files_of(store: Path) -> list[str]:
    found = {str(path.relative_to(store)) for path in store.rglob("*") if path.is_file()}
    return sorted(found | set(NAMES))


def read(store: Path) -> None:
    opened = following.open_store(store)
    try:
        following.follow_all(opened)
        following.read_all(opened)
    finally:
        opened.close()


@pytest.mark.parametrize("is_live", [False, True])
def test_no_file_of_a_store_can_hang_its_reader(tmp_path: Path, is_live: bool):
    broker = FakeBroker(tmp_path / "store")
    broker.start()
    broker.put(60)
    broker.crash()
    refused = 0
    written_at_start = {"abort", "checkpoint", "lock"} if is_live else set()
    for name in files_of(broker.store):
        if name in written_at_start:
            continue
        copy = tmp_path / "copy"
        shutil.copytree(broker.store, copy)
        other = FakeBroker(copy)
        if is_live:
            other.start()
        put_fifo(copy / name)
        refused += reads(copy, name)
        other.close()
        shutil.rmtree(copy)
    assert refused > 5


def reads(store: Path, name: str) -> bool:
    """Whether the store is refused; it may also not need the file."""
    said = refusal(lambda: read(store))
    assert name in said or not said
    return bool(said)


def refusal(work: Callable[[], None]) -> str:
    """What the refusal says; empty when there is none."""
    try:
        work()
    except InvalidError as error:
        return str(error)
    return ""


def write(store: Path) -> None:
    with MessageStore.open(store, **NAMED, clock=ManualClock(), options=OPTIONS) as opened:
        opened.append(NewMessage("another", 0, b"body"))


def test_no_file_of_a_store_can_hang_its_writer(tmp_path: Path):
    made = MessageStore.create(tmp_path / "store", **NAMED, clock=ManualClock(), options=OPTIONS)
    made.append(NewMessage("t", 0, b"body"))
    made.close()
    for name in [*files_of(tmp_path / "store"), "checkpoint.new", "config/topics.json.new"]:
        copy = tmp_path / "copy"
        shutil.copytree(tmp_path / "store", copy)
        put_fifo(copy / name)
        said = refusal(lambda: write(copy))  # noqa: B023 (called here)
        assert name in said or not said
        shutil.rmtree(copy)


@pytest.mark.parametrize("flags", [os.O_RDONLY, os.O_WRONLY, os.O_RDWR])
def test_only_regular_files_are_opened(tmp_path: Path, flags: int):
    fifo, address = tmp_path / "fifo", tmp_path / "socket"
    put_fifo(fifo)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(address))
        for path in (fifo, address, Path("/dev/null"), tmp_path):
            with pytest.raises(InvalidError, match="not a regular file"):
                open_regular(str(path), flags)
    regular = tmp_path / "regular"
    regular.write_bytes(b"bytes")
    os.close(open_regular(str(regular), flags))
    with pytest.raises(FileNotFoundError):
        open_regular(str(tmp_path / "none"), flags)
