"""What could lose an answered message, or bring back a refused one: races of appends, syncs and ends, one step at a time."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from support.embedded import SMALL, SYNC, Groups, create, reopen
from support.stored import read_all

from tiered.clock import SystemClock
from tiered.errors import ClosedError, DataError, InvalidError, StoreUnavailableError
from tiered.local.layout import read_text
from tiered.model import MessageQueue, PhysicalOffset
from tiered.store import commitlog, disk, opening
from tiered.store.disk import RowWriter
from tiered.store.new_message import NewMessage

if TYPE_CHECKING:
    from pathlib import Path

    from tiered.local.interface import RecordBatch

GOOD, OTHER = NewMessage("t", 0, b"good"), NewMessage("t", 0, b"other")
SLOW = replace(SMALL, flush_interval_s=99, checkpoint_interval_s=99)


def bodies(root: Path) -> list[bytes]:
    return [record.body for record in read_all(root).get(MessageQueue("t", 0), {}).values()]


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of files that are brought to the disk."""
    found: list[str] = []
    real = disk._sync_file

    def sync(path: str) -> None:
        found.append(os.path.basename(path))  # noqa: PTH119 (text only)
        real(path)

    monkeypatch.setattr(disk, "_sync_file", sync)
    return found


def refuse(*_: object) -> None:
    raise OSError(errno.EIO, "Input/output error")


def test_a_sync_during_a_write_does_not_count_for_it(
    tmp_path: Path, synced: list[str], monkeypatch: pytest.MonkeyPatch
):
    writer = RowWriter()
    real = os.pwrite

    def write(descriptor: int, data: bytes, at: int) -> int:
        writer.sync()  # another thread's, before the bytes are there
        return real(descriptor, data, at)

    with monkeypatch.context() as patch:
        patch.setattr(disk.os, "pwrite", write)
        writer.write(str(tmp_path / "row"), 4096, 0, b"x")
    synced.clear()
    writer.sync()
    writer.close()
    assert synced == ["0" * 20]


def test_of_many_files_that_are_synced_at_once_none_counts_when_one_is_refused(
    tmp_path: Path, synced: list[str], monkeypatch: pytest.MonkeyPatch
):
    writer, count = RowWriter(), 2 * disk.SYNCED_ALONE_MAX
    for number in range(count):
        writer.write(str(tmp_path / "row"), 64, number * 64, b"x")
    counted = disk._sync_file

    def sync(path: str) -> None:
        (refuse if path.endswith(f"{64 * 7:020d}") else counted)(path)

    with monkeypatch.context() as patch:
        patch.setattr(disk, "_sync_file", sync)
        with pytest.raises(OSError, match="Input/output"):
            writer.sync()
    synced.clear()
    writer.sync()
    writer.close()
    assert sorted(synced) == [f"{64 * number:020d}" for number in range(count)]


def test_many_files_are_synced_also_when_the_interpreter_ends(tmp_path: Path):
    """Who closes a store from ``atexit`` gets no new threads any more."""
    program = (
        "import atexit, sys; from tiered.store.disk import RowWriter as Rows, SYNCED_ALONE_MAX as most; rows = Rows();"
        " rows.write(sys.argv[1], 64, 0, bytes(64 * 2 * most));"
        " atexit.register(lambda: print(rows.sync()))"
    )
    words = (sys.executable, "-c", program, str(tmp_path / "row"))
    ran = subprocess.run(words, capture_output=True, check=True)
    assert (ran.stdout, ran.stderr) == (b"None\n", b"")


def test_after_a_failed_sync_a_good_one_proves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The system tells of pages that it dropped once; whoever asks next is told that all is well."""
    store = create(tmp_path / "s", replace(SYNC, flush_interval_s=99, checkpoint_interval_s=99))
    groups = Groups(store)
    _, future = store.submit([GOOD])
    assert future is not None
    with monkeypatch.context() as patch:
        patch.setattr(disk.os, "fdatasync", refuse)
        with pytest.raises(StoreUnavailableError):
            store.flush()
    with pytest.raises(OSError, match="earlier sync"):
        groups.commits.run_once()
    assert isinstance(future.exception(0), OSError)
    assert store.confirm_offset == 0
    store.close()
    assert (tmp_path / "s" / "abort").exists()


def test_an_append_that_is_under_way_when_the_store_closes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """It must not write once the lock is given free: another process may be writing."""
    store = create(tmp_path / "s")
    store.append(GOOD)
    real = store._topics.has

    def has(queues: set[tuple[str, int]]) -> bool:
        found = real(queues)
        store.close()
        return found

    monkeypatch.setattr(store._topics, "has", has)
    with pytest.raises(ClosedError):
        store.append(OTHER)
    assert bodies(tmp_path / "s") == [b"good"]
    with reopen(tmp_path / "s") as again:
        assert again.recovered is None


def test_a_group_that_waits_when_the_store_closes(tmp_path: Path):
    store = create(tmp_path / "s", SYNC)
    groups = Groups(store)
    store._log.seal()
    (found,) = groups.together([[GOOD]])
    assert isinstance(found, ClosedError)
    store.close()
    assert bodies(tmp_path / "s") == []


def test_garbage_that_cannot_be_truncated_ends_the_appends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Whoever waited for the lock may not write over the beginning of it, nor may it look like a clean stop."""
    store = create(tmp_path / "s", SLOW)
    store.append(GOOD)
    with monkeypatch.context() as patch:
        patch.setattr(store._log, "_rows", _Half(store._log._rows))
        patch.setattr(commitlog.os, "truncate", refuse)
        with pytest.raises(StoreUnavailableError):
            store.append(OTHER)
    monkeypatch.setattr(store, "_check_room", lambda: None)  # it looked before
    with pytest.raises(StoreUnavailableError, match="cannot be written"):
        store.append(OTHER)
    store.close()
    assert (tmp_path / "s" / "abort").exists()


class _Half:
    """Writes all, and then says that it did not."""

    def __init__(self, inner: RowWriter) -> None:
        self._inner = inner

    def write(self, folder: str, file_bytes: int, offset: int, data: bytes) -> None:
        self._inner.write(folder, file_bytes, offset, data)
        raise OSError(errno.ENOSPC, "No space left on device")


def test_an_interrupted_append_is_truncated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    store = create(tmp_path / "s")
    real = os.pwrite

    def write(descriptor: int, data: bytes, at: int) -> int:
        real(descriptor, data, at)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(disk.os, "pwrite", write)
        with pytest.raises(KeyboardInterrupt):
            store.append_batch([OTHER, OTHER])
    store.append(GOOD)
    store.close()
    assert bodies(tmp_path / "s") == [b"good"]
    with reopen(tmp_path / "s") as again:
        assert again.recovered is None


def test_one_that_cannot_be_stored_does_not_fail_others(tmp_path: Path):
    store = create(tmp_path / "s", SYNC)
    wrong = replace(OTHER, born_timestamp_ms=1.5)  # type: ignore[arg-type]
    first, second, third = Groups(store).together([[GOOD], [wrong], [GOOD]])
    assert isinstance(second, InvalidError)
    assert isinstance(first, list)
    assert first[0].queue_offset == 0
    assert isinstance(third, list)
    assert third[0].queue_offset == 1
    store.close()
    assert bodies(tmp_path / "s") == [b"good", b"good"]


def test_a_future_that_somebody_cancels_does_not_end_the_flush_thread(tmp_path: Path):
    with create(tmp_path / "s", replace(SYNC, needs_replica=True)) as store:
        _, future = store.submit([GOOD])
        assert future is not None
        assert not future.cancel()
        store.acknowledge_replica(store.log_end)
        future.result(5)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_whatever_ends_a_thread_ends_the_store(tmp_path: Path):
    store = create(tmp_path / "s")

    def dispatch(_: RecordBatch) -> bool:
        raise ZeroDivisionError

    store.register(dispatch)
    store.append(GOOD)
    assert not store.wait_listed(timeout_s=5)
    with pytest.raises(StoreUnavailableError, match="ZeroDivisionError"):
        store.append(GOOD)
    store.close()
    assert (tmp_path / "s" / "abort").exists()


def test_a_replica_that_ends_within_a_record(tmp_path: Path):
    """A broker's replica acknowledges the bytes that came, wherever records begin."""
    store = create(tmp_path / "s", replace(SMALL, needs_replica=True, sync_timeout_s=0.1))
    receipts, future = store.submit([GOOD, OTHER])
    first, second = receipts
    assert future is not None
    for end in (3, 9, second.physical_offset - 1, second.physical_offset, store.log_end - 1):
        store.acknowledge_replica(PhysicalOffset(end))
        store.wait_listed(min(end, int(second.physical_offset)) if end > 9 else 0, timeout_s=0.05)
        assert not store._upkeep.failure
    assert store.wait_listed(second.physical_offset, timeout_s=60)
    assert store.listed_end == second.physical_offset
    store.acknowledge_replica(store.log_end)
    assert store.wait_listed(timeout_s=60)
    store.close()
    assert first.queue_offset == 0
    assert bodies(tmp_path / "s") == [b"good", b"other"]


def test_a_store_that_ends_within_a_record_closes_at_once(tmp_path: Path):
    clock = SystemClock()
    store = create(tmp_path / "s", replace(SMALL, needs_replica=True))
    store.submit([GOOD])
    store.acknowledge_replica(PhysicalOffset(20))
    begin_s = clock.monotonic_s()
    store.close()
    assert clock.monotonic_s() - begin_s < 10
    assert (tmp_path / "s" / "abort").exists()


def test_what_recovery_found_is_brought_to_the_disk(tmp_path: Path, synced: list[str]):
    """It becomes what the checkpoint covers and ``sync`` has answered; a killed process may have left it in memory."""
    store = create(tmp_path / "s", SLOW)
    store.append_batch([NewMessage("t", 0, bytes(30_000))] * 9)
    end = store.log_end
    store._upkeep.fail("killed")
    store.close()
    synced.clear()
    with reopen(tmp_path / "s", SLOW) as again:
        assert again.log_end == end
        files = {f"{base:020d}" for base in range(0, end, 65_536)}
        assert len(files) > 3
        assert files <= set(synced)


@pytest.mark.parametrize("anew", [True, False])
def test_recovery_of_a_store_that_looks_clean_is_marked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, anew: bool
):
    """Else a crash in it could leave lists that look whole, beside an index that is not."""
    with create(tmp_path / "s") as store:
        put = store.append(GOOD)
    if not anew:
        (tmp_path / "s/consumequeue/t/0" / ("0" * 20)).unlink()
    with monkeypatch.context() as patch:
        patch.setattr(opening, "replay", refuse)
        with pytest.raises(StoreUnavailableError):
            reopen(tmp_path / "s", anew=anew)
    assert read_text(f"{tmp_path}/s/abort") is not None
    with reopen(tmp_path / "s") as store:
        assert len(store.reader.by_key("t", put.msg_id)) == 1


def test_a_group_over_the_ends_of_files_is_on_the_disk_whole(tmp_path: Path, synced: list[str]):
    store = create(tmp_path / "s", SYNC)
    groups = Groups(store)
    synced.clear()
    found = groups.together([[NewMessage("t", 0, bytes(40_000))] for _ in range(4)])
    assert [one[0].queue_offset for one in found if isinstance(one, list)] == [0, 1, 2, 3]
    assert {f"{base:020d}" for base in range(0, store.log_end, 65_536)} <= set(synced)
    store.close()


def test_many_threads_leave_no_hole_and_no_id_twice(tmp_path: Path):
    store = create(tmp_path / "s", SYNC)
    found: list[tuple[int, int, str]] = []

    def work(queue: int) -> None:
        for _ in range(20):
            put = store.append(NewMessage("t", queue, b"x" * 300))
            found.append((queue, put.queue_offset, put.msg_id))
            rest, future = store.submit([NewMessage("t", queue, b"y" * 700)] * 3)
            found.extend((queue, each.queue_offset, each.msg_id) for each in rest)
            assert future is not None
            future.result(5)

    threads = [threading.Thread(target=work, args=(number % 2,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    store.close()
    for queue in (0, 1):
        assert sorted(at for one, at, _ in found if one == queue) == list(range(160))
    assert len({one for _, _, one in found}) == 320
    assert sum(map(len, read_all(tmp_path / "s").values())) == 320


def test_ids_of_a_great_batch_are_unique(tmp_path: Path):
    with create(tmp_path / "s", replace(SMALL, commitlog_file_bytes=64 << 20)) as store:
        count = (1 << 16) + 10
        ids = store._keys.take(count, 1) + store._keys.take(count, 1)
        assert len(set(ids)) == 2 * count


def test_a_forked_child_cannot_write(tmp_path: Path):
    """It has the parent's lock, and its own idea of where the log ends."""
    store = create(tmp_path / "s")
    store.append(GOOD)
    child = os.fork()
    if not child:
        try:
            store.append(OTHER)
        except StoreUnavailableError:
            store.close()
            os._exit(7)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert (tmp_path / "s" / "abort").exists()
    store.append(GOOD)
    store.close()
    assert bodies(tmp_path / "s") == [b"good", b"good"]


def test_a_last_file_that_is_missing(tmp_path: Path):
    """What it held was answered: it may not go without a word."""
    store = create(tmp_path / "s", SLOW)
    store.append_batch([NewMessage("t", 0, bytes(40_000))] * 5)
    assert store.wait_listed()
    store._upkeep.write_checkpoint()
    end = store.log_end
    store._upkeep.fail("killed")
    store.close()
    (tmp_path / f"s/commitlog/{end - end % 65_536:020d}").unlink()
    lists = tmp_path / "s/consumequeue/t/0" / ("0" * 20)
    before = lists.read_bytes()
    with pytest.raises(DataError, match=f"up to {end}"):
        reopen(tmp_path / "s")
    assert lists.read_bytes() == before  # nothing was changed
    (tmp_path / "s/checkpoint").unlink()
    with reopen(tmp_path / "s") as again:
        assert again.queue_end(MessageQueue("t", 0)) == 4
