"""Topics of an embedded store of which the newest message of each key is kept: what is left, and what a crash leaves."""

from __future__ import annotations

import gzip
import json
import os
import random
import shutil
import tarfile
import threading
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from support.captures import FOLDER
from support.embedded import SMALL, create, reopen

from tiered.clock import ManualClock
from tiered.errors import ClosedError, DataError, InvalidError, StoreUnavailableError
from tiered.local.compaction_log import (
    ASIDE,
    CompactionLog,
    CompactionLogs,
    HeldFile,
    folders_of,
)
from tiered.local.mapped_file_queue import list_bases
from tiered.model import Boundary, MessageQueue, QueueOffset
from tiered.store import compacting
from tiered.store.compacting import Compactions, Longs, _Appender, _Queue
from tiered.store.disk import RowWriter
from tiered.store.new_message import NewMessage
from tiered.store.store_options import Compacting

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tiered.local.interface import RecordBatch
    from tiered.store.embedded import MessageStore

QUEUE = MessageQueue("prices", 0)
OPTIONS = replace(
    SMALL, compacting=Compacting(8_000, 30, interval_s=1e9), commitlog_file_bytes=16_384, message_bytes_max=4_000
)  # fmt: skip


def made(root: Path) -> MessageStore:
    store = create(root, OPTIONS)
    store.create_topic("prices", queues=2, is_compacted=True)
    return store


def send(
    store: MessageStore, *keys: str, body: bytes = b"x" * 300, queue: MessageQueue = QUEUE
) -> None:
    for key in keys:
        store.append(NewMessage(queue.topic, queue.queue_id, body, keys=key))
    store.wait_listed()


def read(store: MessageStore, queue: MessageQueue = QUEUE, start: int = 0) -> list[tuple[int, str]]:
    """As a consumer from the start: queue offsets and keys."""
    found: list[tuple[int, str]] = []
    low, end = store.reader.bounds(queue)
    at = max(low, start)
    while at < end:
        got = store.reader.get(queue, at)
        assert got.records
        found += [(record.queue_offset, record.properties["KEYS"]) for record in got.records]
        assert got.next_offset == found[-1][0] + 1
        at = got.next_offset
    return found


def log_of(store: MessageStore) -> CompactionLog:
    log = CompactionLog.open(store.root, QUEUE)
    assert log is not None
    return log


def check(store: MessageStore, sent: list[str]) -> None:
    found = read(store)
    offsets = [at for at, _ in found]
    assert offsets == sorted(set(offsets))
    assert all(sent[at] == key for at, key in found)
    last = {key: at for at, key in enumerate(sent)}
    assert set(last.values()) <= set(offsets), "the final state"
    if len(log_of(store).files):
        head = log_of(store).files[-1]
        assert set(range(head.first if head.count else len(sent), len(sent))) <= set(offsets), (
            "the head is whole"
        )


def test_the_newest_of_each_key_stays_where_it_is_and_gaps_are_passed_over(tmp_path: Path):
    with made(tmp_path / "s") as store:
        sent = ["once", *(f"k{n % 7}" for n in range(199))]
        send(store, *sent)
        whole = read(store)
        assert [key for _, key in whole] == sent
        counts = store.compact()
        assert (counts.passes, counts.gone_messages, counts.keys) == (1, counts.messages - 8, 8)
        check(store, sent)
        found = read(store)
        assert len(found) < 60
        gone = next(at for at in range(1, 200) if at not in dict(found))
        assert store.reader.get(QUEUE, gone).records[0].queue_offset == min(
            at for at, _ in found if at > gone
        )
        names = [list_bases(folder) for folder in folders_of(store.root, QUEUE)]
        assert names[0] == names[1]
        marks = json.loads(Path(store.root, "compaction/position-checkpoint").read_bytes())
        assert marks["queueOffsetMap"] == {"prices_0": log_of(store).files[-1].first - 1}
        for time_ms in (0, 1 << 50):
            low, end = store.reader.bounds(QUEUE)
            at = store.reader.offset_by_time(QUEUE, time_ms)
            assert at == (low if not time_ms else end)
        assert store.reader.offset_by_time(QUEUE, 0, Boundary.UPPER) == found[0][0]


def test_by_time_what_is_gone_is_no_answer(tmp_path: Path):
    clock, times = ManualClock(), list[int]()
    with create(tmp_path / "s", OPTIONS, clock) as store:
        store.create_topic("prices", queues=2, is_compacted=True)
        for number in range(200):
            times.append(int(clock.now_ms()))
            send(store, f"once {number}" if number % 40 == 3 else f"k{number % 7}")
            clock.advance(1)
        store.compact()
        offsets = [at for at, _ in read(store)]
        assert len(offsets) < 60
        for at, time_ms in enumerate(times):
            lower = next(one for one in offsets if one >= at)
            upper = max((one for one in offsets if one <= at), default=offsets[0])
            assert store.reader.offset_by_time(QUEUE, time_ms) == lower
            assert store.reader.offset_by_time(QUEUE, time_ms, Boundary.UPPER) == upper


def test_its_thread_goes_on_after_an_error_of_any_kind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    real, calls, done = Compactions.advance, list[str](), threading.Event()

    def broken_once(compactions: Compactions) -> None:
        calls.append("")
        if len(calls) == 1:
            raise ZeroDivisionError("a defect")
        real(compactions)
        done.set()

    monkeypatch.setattr(compacting, "_COPY_S", 0.01)
    monkeypatch.setattr(Compactions, "advance", broken_once)
    with made(tmp_path / "s"):
        assert done.wait(30)


@pytest.mark.parametrize("seed", range(4))
def test_whatever_comes_a_reader_from_the_start_gets_the_final_state_and_the_whole_head(
    tmp_path: Path, seed: int
):
    rng = random.Random(seed)
    store = made(tmp_path / "s")
    sent: list[str] = []
    synced = {"": 0}
    try:
        for _ in range(25):
            act = rng.choice(["send", "send", "compact", "reopen", "copy", "crash", "expire"])
            if act == "send":
                keys = [f"k{rng.randrange(12)}" for _ in range(rng.randrange(60))]
                send(store, *keys, body=b"x" * rng.randrange(1, 900))
                sent += keys
            elif act == "compact":
                store.compact()
            elif act == "copy":
                store._compactions.advance()
            elif act == "expire" and sent:
                for path in sorted((tmp_path / "s" / "commitlog").iterdir())[:-1]:
                    os.utime(path, (1, 1))
                store.expire()
                synced = {path.name: used_bytes(path) for path in files_of(tmp_path / "s")}
            elif act == "reopen":
                store.close()
                store = reopen(tmp_path / "s", OPTIONS)
            elif act == "crash":
                store.flush()
                crashed(store, tmp_path / "s")
                damage_the_end(tmp_path / "s", rng, synced)
                store = reopen(tmp_path / "s", OPTIONS)
            if sent:
                store._compactions.advance()
                check(store, sent)
    finally:
        store.close()


def files_of(root: Path) -> list[Path]:
    return sorted(root.glob("compaction/compactionLog/prices/0/0*"))


def used_bytes(path: Path) -> int:
    return len(path.read_bytes().rstrip(b"\0"))


def damage_the_end(root: Path, rng: random.Random, synced: dict[str, int]) -> None:
    """Of the last file of records the machine may have kept anything that was not synced."""
    names = files_of(root)
    if names and rng.random() < 0.7:
        data = bytearray(names[-1].read_bytes())
        at = max(rng.randrange(len(data)), synced.get(names[-1].name, 0))
        data[at:] = bytes(len(data) - at)
        names[-1].write_bytes(data)


def test_what_the_commit_log_has_lost_is_read_from_the_compaction_log(tmp_path: Path):
    with made(tmp_path / "s") as store:
        send(store, *(f"k{n}" for n in range(40)), *["busy"] * 200)
        for path in sorted((tmp_path / "s" / "commitlog").iterdir())[:-1]:
            os.utime(path, (1, 1))
        assert store.expire().log_files > 2
        store.compact()
        keys = dict(map(reversed, read(store)))  # type: ignore[arg-type]
        assert set(keys) == {*(f"k{n}" for n in range(40)), "busy"}


def test_who_reads_keeps_the_files_that_a_pass_replaces(tmp_path: Path):
    with made(tmp_path / "s") as store:
        send(store, *(f"k{n % 5}" for n in range(150)))
        store._compactions.advance()
        log = log_of(store)
        store.compact()
        batch = log.read(0, log.end, bytes_max=1 << 30, count_max=1 << 20)
        parts = [batch]
        while parts[-1].end_offset < log.end:
            parts.append(
                log.read(parts[-1].end_offset, log.end, bytes_max=1 << 30, count_max=1 << 20)
            )
        assert sum(int(np.count_nonzero(one.sizes)) for one in parts) == 150
        assert not any(one.quarantined for one in parts)
        assert log_of(store).files[0].count == 5


def test_keys_that_do_not_fit_into_the_map_are_looked_at_in_rounds(tmp_path: Path):
    options = replace(OPTIONS, compacting=replace(OPTIONS.compacting, memory_bytes=128 * 4))
    with create(tmp_path / "s", options) as store:
        store.create_topic("prices", queues=1, is_compacted=True)
        sent = [f"k{n % 20}" for n in range(300)]
        send(store, *sent)
        counts = store.compact()
        assert counts.rounds > 3
        assert counts.messages - counts.gone_messages == 20
        check(store, sent)


def test_a_tombstone_goes_with_what_it_deletes(tmp_path: Path):
    with made(tmp_path / "s") as store:
        send(store, "a", "b")
        send(store, "a", body=b"")
        send(store, *["c"] * 60)
        store.compact()
        assert {key for _, key in read(store)} == {"b", "c"}


def test_a_message_without_a_key_is_refused_and_batch_queues_are(tmp_path: Path):
    with made(tmp_path / "s") as store:
        with pytest.raises(InvalidError, match="without a key"):
            store.append(NewMessage("prices", 0, b"x"))
        store.append(NewMessage("other", 0, b"x"))
        with pytest.raises(InvalidError, match="cannot be compacted"):
            store.create_topic("both", queues=1, is_batch=True, is_compacted=True)


def test_a_damaged_record_stops_passes_of_its_queue_only_and_is_told(tmp_path: Path):
    with made(tmp_path / "s") as store:
        other = MessageQueue("prices", 1)
        for queue in (QUEUE, other):
            send(store, *(f"k{n % 5}" for n in range(150)), queue=queue)
        store._compactions.advance()
        path = next(Path(store.root).glob("compaction/compactionLog/prices/0/0*0"))
        data = bytearray(path.read_bytes())
        data[1_200] ^= 0xFF
        path.write_bytes(data)
        assert store.compact().passes == 1
        assert "damaged" in store._compactions.failures[QUEUE]
        log = log_of(store)
        batch = log.read(0, log.end, bytes_max=1 << 30, count_max=1 << 20)
        assert len(batch.quarantined) == 1
        found = [at for at, _ in read(store)]
        assert found == sorted({*range(150)} - {int(batch.quarantined[0].queue_offset)})


def test_files_without_a_list_are_an_error_where_none_can_be_made(tmp_path: Path):
    with made(tmp_path / "s") as store:
        send(store, *(f"k{n}" for n in range(150)))
        store._compactions.advance()
    min(Path(store.root).glob("compaction/compactionCq/prices/0/0*")).unlink()
    zeroed(tmp_path / "s", "Log", 0, 20)
    with pytest.raises(DataError, match="no list"):
        reopen(tmp_path / "s", OPTIONS)


def test_a_pass_comes_by_itself(tmp_path: Path):
    options = replace(OPTIONS, compacting=replace(OPTIONS.compacting, interval_s=0.0))
    with create(tmp_path / "s", options, ManualClock()) as store:
        store.create_topic("prices", queues=1, is_compacted=True)
        send(store, *(f"k{n % 5}" for n in range(150)))
        for _ in range(600):
            if store._compactions.counts.passes:
                break
            store._compactions._stop.wait(0.1)
        assert store._compactions.counts.passes


def test_closing_leaves_a_pass_that_is_under_way_and_another_one_makes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(compacting, "_COPY_S", 3_600)  # what is aside goes when a queue is opened
    with made(tmp_path / "s") as store:
        send(store, *(f"k{n % 5}" for n in range(150)))
        compactions = store._compactions
        compactions.advance()
        real, chunks = compactions._go_on, 0

        def at_the_last_chunk() -> None:
            nonlocal chunks
            chunks += 1
            if chunks >= len(log_of(store).files):  # all were judged, some are built again
                compactions._stop.set()
            real()

        for mine in compactions._queues.values():
            mine._go_on = at_the_last_chunk
        with pytest.raises(ClosedError):
            compactions.compact(by_hand=False)
        assert len(read(store)) == 150
    assert list((tmp_path / "s").rglob(ASIDE)), "it was in the middle"
    with reopen(tmp_path / "s", OPTIONS) as store:
        assert store.compact().gone_messages > 0
        check(store, [f"k{n % 5}" for n in range(150)])


@pytest.mark.parametrize(
    "point", ["", "store-compacted-ready", "store-compacted-halfway", "store-compacted-swapped"]
)
def test_a_replica_is_given_what_came_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, point: str
):
    """From another store's log up to where its own begins; and a crash meanwhile is made good by the next try."""
    sent = [f"k{n % 50}" if n < 150 else f"k{n % 7}" for n in range(300)]
    with made(tmp_path / "other") as other, made(tmp_path / "s") as store:
        send(other, *sent)
        other._compactions.advance()
        store.begin_queue(QUEUE, QueueOffset(200))
        send(store, *sent[200:])
        store._compactions.advance()

        def pulled() -> Iterator[RecordBatch]:
            log, at = log_of(other), 0
            while at < log.end:
                batch = log.read(at, log.end, bytes_max=5_000, count_max=1 << 20)
                yield batch
                at = int(batch.end_offset)

        if point:
            store._compactions._stop.set()  # else its thread may meet the point, too
            store._compactions._thread.join()
            with monkeypatch.context() as patch:
                patch.setattr("tiered.store.compacting.reached", lambda name: crash(name, point))
                with pytest.raises(Crash):
                    store.refill(QUEUE, pulled())
            store.close()
            with reopen(tmp_path / "s", OPTIONS) as again:
                again.refill(QUEUE, pulled())
                check(again, sent)
                assert len(read(again)) < 150
            return
        with pytest.raises(InvalidError, match="in order"):
            store.refill(QUEUE, [*pulled()] * 2)
        assert store.refill(QUEUE, pulled()) == 200
        check(store, sent)
        assert len(read(store)) < 150
        send(store, *sent[:60])
        check(store, sent + sent[:60])
        with pytest.raises(InvalidError, match="nothing yet"):
            store.refill(MessageQueue("prices", 1), pulled())


class Crash(BaseException):
    pass


def crash(name: str, point: str) -> None:
    if name == point:
        raise Crash


def crashed(store: MessageStore, root: Path) -> None:
    """The directory as a machine that goes down leaves it; its thread does nothing more."""
    store._compactions.stop()
    # What is about to take the place of a small file may go while it is looked at; recovery does not need it.
    shutil.copytree(root, root.with_name("left"), ignore=shutil.ignore_patterns("*.new"))
    store.close()
    shutil.rmtree(root)
    root.with_name("left").rename(root)


def stop_thread(store: MessageStore) -> None:
    store._compactions._stop.set()
    store._compactions._thread.join()


def zeroed(root: Path, kind: str, at: int, size: int) -> None:
    path = root / f"compaction/compaction{kind}/prices/0/{0:020d}"
    data = bytearray(path.read_bytes())
    data[at : at + size] = bytes(size)
    path.write_bytes(data)


def crashed_behind_six(root: Path, *, expires: bool) -> list[int]:
    """Where the six records begin."""
    store = made(root)
    send(store, *(f"k{n}" for n in range(6)), body=b"x" * 100)
    send(store, *(f"o{n}" for n in range(150)), queue=MessageQueue("prices", 1))
    for path in sorted((root / "commitlog").iterdir())[:-1]:
        os.utime(path, (1, 1))
    store._compactions.advance()
    assert not expires or store.expire().log_files > 1
    assert len(read(store)) == 6
    crashed(store, root)
    file = CompactionLog.open(str(root), QUEUE).files[-1]  # type: ignore[union-attr]
    return [int(place) for place in file.units(0, 6)["physical_offset"]]


@pytest.mark.parametrize(("at", "size"), [(1060 + 80, 20), (512, 512)])
def test_what_the_machine_lost_of_the_last_file_is_copied_anew(tmp_path: Path, at: int, size: int):
    """Also where the body, which alone has a checksum, is whole."""
    root = tmp_path / "s"
    places = crashed_behind_six(root, expires=False)
    assert places[4] == 1060
    assert places[1] + 200 < 512 < places[2]  # in the properties, behind the body
    zeroed(root, "Log", at, size)
    with reopen(root, OPTIONS) as again:
        again._compactions.advance()
        batch = log_of(again).read(0, 6, bytes_max=1 << 20, count_max=9)
        assert (batch.sizes > 0).tolist() == [True] * 6
        data, ends = bytes(batch.data), batch.positions + batch.sizes
        assert all(data[end - 1] for end in ends.tolist())


def test_what_the_commit_log_has_no_more_stays_though_a_record_before_it_is_damaged(tmp_path: Path):
    """It was on the disk before the commit log expired, so a crash has not taken it, and it is nowhere else."""
    root = tmp_path / "s"
    places = crashed_behind_six(root, expires=True)
    zeroed(root, "Log", places[4] + 80, 20)
    with reopen(root, OPTIONS) as again:
        batch = log_of(again).read(0, 6, bytes_max=1 << 20, count_max=9)
        assert (batch.sizes > 0).tolist() == [True] * 4 + [False, True]
        assert len(batch.quarantined) == 1


def test_of_the_last_file_what_its_list_has_not_lost_stays(tmp_path: Path):
    root = tmp_path / "s"
    crashed_behind_six(root, expires=True)
    zeroed(root, "Cq", 4 * 46, 46)
    with reopen(root, OPTIONS) as again:
        batch = log_of(again).read(0, 4, bytes_max=1 << 20, count_max=9)
        assert (batch.sizes > 0).tolist() == [True] * 4
        assert not batch.quarantined
        assert again.reader.get(QUEUE, 0).records[-1].queue_offset == 3


def test_a_file_is_on_the_disk_before_the_next_is_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """So that after a crash only the last one may be half written."""
    with made(tmp_path / "s") as store:
        stop_thread(store)
        send(store, *(f"k{n}" for n in range(60)))
        synced: list[int] = []
        sync, write = RowWriter.sync, RowWriter.write_file

        def noted_sync(self: RowWriter) -> None:
            sync(self)
            synced[:] = []

        def noted_write(self: RowWriter, path: str, file_bytes: int, at: int, data: bytes) -> None:
            write(self, path, file_bytes, at, data)
            synced.append(int(Path(path).name))
            assert len(set(synced)) == 1, "two files, neither of which was synced"

        monkeypatch.setattr(RowWriter, "sync", noted_sync)
        monkeypatch.setattr(RowWriter, "write_file", noted_write)
        store._compactions.advance()
        assert len(log_of(store).files) > 2


@pytest.mark.parametrize("number", [2, 3, 5, 8, 11])
def test_a_copy_that_the_disk_refused_in_the_middle_is_gone_on_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
):
    """Nothing comes twice, though files before were written; other queues are copied meanwhile."""
    with made(tmp_path / "s") as store:
        stop_thread(store)
        other, sent = MessageQueue("prices", 1), [f"k{n}" for n in range(120)]
        send(store, *sent)
        send(store, *sent, queue=other)
        left, write = [number], RowWriter.write_file

        def refused(self: RowWriter, path: str, file_bytes: int, at: int, data: bytes) -> None:
            left[0] -= "/prices/0/" in path
            if left[0] == 0 and "/prices/0/" in path:
                raise OSError(28, "No space left on device")
            write(self, path, file_bytes, at, data)

        monkeypatch.setattr(RowWriter, "write_file", refused)
        with pytest.raises(OSError, match="space"):
            store._compactions.advance()
        log = store._compactions.log(other)
        assert log is not None
        assert log.end == len(sent)
        store._compactions.advance()
        assert read(store) == list(enumerate(sent))


@pytest.mark.parametrize("point", ["store-compacted-halfway", "store-compacted-swapped"])
@pytest.mark.parametrize("then", ["", "store-compacted-built"])
def test_a_pass_that_the_disk_refused_in_the_middle_is_finished_before_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, point: str, then: str
):
    root = tmp_path / "s"
    store = made(root)
    stop_thread(store)
    sent = [f"k{n % 30}" for n in range(200)]
    send(store, *sent)

    def refuse(name: str) -> None:
        if name == point:
            raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr("tiered.store.compacting.reached", refuse)
        with pytest.raises(StoreUnavailableError):
            store.compact()
    check_read(store, sent)
    with monkeypatch.context() as patch:
        patch.setattr("tiered.store.compacting.reached", lambda name: crash(name, then))
        try:
            store.compact()
        except Crash:
            crashed(store, root)
            store = reopen(root, OPTIONS)
    check_read(store, sent)
    send(store, "k1")
    store.compact()
    check(store, [*sent, "k1"])
    store.close()


def check_read(store: MessageStore, sent: list[str]) -> None:
    """Readers have the final state, whatever the files are just now."""
    found = read(store)
    last = {key: at for at, key in enumerate(sent)}
    assert set(last.values()) <= {at for at, _ in found}
    assert all(sent[at] == key for at, key in found)


def test_what_takes_no_fewer_files_is_left_and_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A broker fills a list to its last unit, where ours has a mark of its end: then a pass may need a file more."""
    with made(tmp_path / "s") as store:
        stop_thread(store)
        sent = [f"k{n % 85}" for n in range(86)] + [f"l{n}" for n in range(10)]
        send(store, *sent, body=b"x")
        with monkeypatch.context() as patch:
            fitting = _Appender._fitting

            def full(self: _Appender, sizes: Longs) -> int:
                return min(fitting(self, sizes) + 1, 30 - self.end.count)

            patch.setattr(_Appender, "_fitting", full)
            store._compactions.advance()
        assert [file.count for file in log_of(store).files[:-1]] == [30, 30, 30]
        for _ in range(2):
            assert store.compact().passes == 0
            assert "more files" in store._compactions.failures[QUEUE]
            check(store, sent)


def test_opening_a_log_reads_the_ends_of_its_files_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Each second there is one that shows what was copied: it must not cost what all of the log has."""
    with made(tmp_path / "s") as store:
        send(store, *(f"k{n}" for n in range(200)), body=b"x" * 900)
        store._compactions.advance()
        stop_thread(store)
        sizes: list[int] = []
        read_held = HeldFile.read

        def noted(self: HeldFile, at: int, size: int) -> bytes:
            sizes.append(size)
            return read_held(self, at, size)

        monkeypatch.setattr(HeldFile, "read", noted)
        log = log_of(store)
        assert max(sizes) < 1_500
        assert sum(sizes) < len(log.files) * 5_000


def test_what_a_log_gets_behind_its_end_is_seen_though_no_file_has_come(tmp_path: Path):
    with made(tmp_path / "s") as store:
        send(store, "a", "b")
        store._compactions.advance()
        logs = CompactionLogs(store.root, ManualClock())
        assert logs.log(QUEUE, 10).end == 2
        send(store, "c")
        store._compactions.advance()
        assert len(log_of(store).files) == 1
        assert logs.log(QUEUE, 10).end == 3


def test_what_comes_in_the_place_of_what_a_crash_took_is_compacted(tmp_path: Path):
    """The commit log has lost its end, and passes had been over offsets that others have now."""
    root, before = tmp_path / "s", tmp_path / "before"
    with made(root) as store:
        send(store, *(f"k{n % 5}" for n in range(60)))
        stop_thread(store)
    shutil.copytree(root, before)
    with reopen(root, OPTIONS) as store:
        send(store, *(f"k{n % 5}" for n in range(300)))
        assert store.compact().passes == 1
    shutil.rmtree(before / "compaction", ignore_errors=True)
    shutil.copytree(root / "compaction", before / "compaction")
    with reopen(before, OPTIONS) as store:
        send(store, *(f"l{n % 5}" for n in range(120)))
        assert store.compact().passes == 1
        assert len(read(store)) < 60
        assert {f"l{n}" for n in range(5)} <= {key for _, key in read(store)}


def test_of_few_queues_at_a_time_the_files_are_held_open(tmp_path: Path):
    """Who follows a broker reads each queue's log once or twice; a broker may have thousands of these."""
    queues = [MessageQueue("prices", number) for number in range(20)]
    with create(tmp_path / "s", OPTIONS) as store:
        store.create_topic("prices", queues=20, is_compacted=True)
        for queue in queues:
            send(store, "a", queue=queue)
        store._compactions.advance()
        stop_thread(store)
        logs = CompactionLogs(store.root, ManualClock())
        for _ in range(2):
            assert [logs.log(queue, 10).end for queue in queues] == [1] * 20
        assert list(logs._open) == queues[4:]


def test_a_log_that_may_not_be_read_is_an_error_of_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    with made(tmp_path / "s") as store:
        send(store, "a")
        store._compactions.advance()
        stop_thread(store)

        def refused(path: str) -> int:
            raise OSError(24, "Too many open files", path)

        with monkeypatch.context() as patch:
            patch.setattr("tiered.local.compaction_log.open_read_only", refused)
            with pytest.raises(InvalidError, match="Too many"):
                CompactionLogs(store.root, ManualClock()).log(QUEUE, 10)


def test_readers_have_a_log_while_a_replica_is_given_what_came_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    with made(tmp_path / "other") as other, made(tmp_path / "s") as store:
        send(other, *(f"k{n}" for n in range(50)))
        other._compactions.advance()
        store.begin_queue(QUEUE, QueueOffset(40))
        send(store, *(f"k{n}" for n in range(40, 50)))
        store._compactions.advance()
        stop_thread(store)
        seen = []

        def opened(*args: object, **options: object) -> object:
            seen.append(store._compactions.log(QUEUE))
            return _Queue(*args, **options)  # type: ignore[arg-type]

        monkeypatch.setattr("tiered.store.compacting._Queue", opened)
        batch = log_of(other).read(0, 50, bytes_max=1 << 20, count_max=50)
        store.refill(QUEUE, [batch])
        assert seen
        assert None not in seen


@pytest.fixture
def captured(tmp_path: Path) -> Path:
    """A broker's store, on which passes have run."""
    with tarfile.open(FOLDER / "s07-compaction.tar.gz") as archive:
        archive.extractall(tmp_path, filter="data")
    return tmp_path / "s07-compaction"


def lines() -> dict[int, list[tuple[int, str]]]:
    """What a real client got of it: queue offset and body, by queue."""
    found: dict[int, list[tuple[int, str]]] = {0: [], 1: []}
    for line in gzip.decompress((FOLDER / "s07-compaction.jsonl.gz").read_bytes()).splitlines():
        said = json.loads(line)
        if said["type"] == "compacted":
            found[said["queue_id"]].append((said["queue_offset"], said["keys"]))
    return found


def test_a_brokers_compaction_log_is_read_and_gone_on_with(captured: Path):
    with reopen(captured) as store:
        assert store.options.compacting.log_file_bytes == 23_000
        for queue_id, wanted in lines().items():
            queue = MessageQueue("prices", queue_id)
            assert read(store, queue) == wanted
            before = store.queues()[queue]
            send(store, *(f"key-{n % 40}" for n in range(200)), queue=queue)
            store.compact()
            found = read(store, queue)
            last = {
                **{key: at for at, key in wanted},
                **{f"key-{n % 40}": before + n for n in range(200)},
            }
            assert set(last.items()) <= {(key, at) for at, key in found}
            assert len(found) < len(wanted) + 200
    with reopen(captured) as store:
        assert read(store, MessageQueue("prices", 1)) == found


# -- lists that do not fit -----------------------------------------------------------------------------


def compacted_and_expired(root: Path) -> tuple[list[tuple[int, str]], list[int]]:
    """A store whose compaction log alone has the older messages: what it reads, and the bases of its files."""
    with made(root) as store:
        send(store, *(f"k{n}" for n in range(90)), *(f"k{n % 7}" for n in range(110)))
        send(store, *["o"] * 60, queue=MessageQueue("prices", 1))
        for path in sorted((root / "commitlog").iterdir())[:-1]:
            os.utime(path, (1, 1))
        assert store.expire().log_files > 2
        store.compact()
        log = log_of(store)
        assert len([file for file in log.files if file.count]) > 2
        return read(store), [file.base for file in log.files]


def half_replaced(root: Path, kind: str, bases: list[int]) -> None:
    """What a process leaves that ends while it puts files in place, or a list of which a page is lost."""
    _, units = (Path(folder) for folder in folders_of(str(root), QUEUE))
    path = units / f"{bases[0]:020d}"
    if kind == "no list":
        path.unlink()
    elif kind == "list of another pass":
        path.write_bytes((units / f"{bases[1]:020d}").read_bytes())
    elif kind == "list too many":
        (units / f"{bases[-1] + 5 * 8_000:020d}").write_bytes(path.read_bytes())
    elif kind == "empty list":
        path.write_bytes(bytes(path.stat().st_size))
    elif kind == "list cut short":
        data = path.read_bytes()
        path.write_bytes(data[: 2 * 46] + bytes(len(data) - 2 * 46))


KINDS = ["no list", "list of another pass", "list too many", "empty list", "list cut short"]


@pytest.mark.parametrize("kind", KINDS)
def test_lists_that_do_not_fit_are_made_anew_of_the_records(tmp_path: Path, kind: str):
    root = tmp_path / "s"
    before, bases = compacted_and_expired(root)
    lists = {
        path.name: path.read_bytes() for path in Path(folders_of(str(root), QUEUE)[1]).iterdir()
    }
    half_replaced(root, kind, bases)
    log = CompactionLogs(str(root), ManualClock()).log(QUEUE, 1 << 40)
    batch = log.read(log.first, log.end, bytes_max=1 << 30, count_max=1 << 20)
    found = [int(at) + int(batch.base_offset) for at in np.flatnonzero(batch.sizes > 0)]
    assert found == [at for at, _ in before if at < batch.end_offset]
    with reopen(root, OPTIONS) as store:
        assert read(store) == before
        send(store, "k1")
        store._compactions.advance()
        assert read(store) == [*before, (200, "k1")]
    name, size = f"{bases[0]:020d}", 46 * log.files[0].count
    again = Path(folders_of(str(root), QUEUE)[1], name).read_bytes()
    assert again[:size] == lists[name][:size]


def test_files_that_a_broker_was_about_to_delete_are_not_taken_for_the_log(tmp_path: Path):
    root = tmp_path / "s"
    _, bases = compacted_and_expired(root)
    for folder in folders_of(str(root), QUEUE)[:1]:
        path = Path(folder, f"{bases[0]:020d}")
        path.rename(f"{path}.delete")
    with pytest.raises(DataError, match="half put in place"):
        CompactionLogs(str(root), ManualClock()).log(QUEUE, 1 << 40)
    with pytest.raises(DataError, match="no list"):
        reopen(root, OPTIONS)


@pytest.mark.parametrize("cut", [0, 1, 4096])
def test_a_file_of_records_that_was_cut_costs_no_other_its_bytes(tmp_path: Path, cut: int):
    """Its length became that of all: the last one, which was whole, was cut to it, and then the store was refused."""
    store = made(tmp_path / "s")
    send(store, *(f"k{n % 40}" for n in range(200)))
    assert store.wait_listed()
    assert store.compact().passes
    send(store, *(f"n{n % 40}" for n in range(60)))
    store.close()
    first, *others = files_of(tmp_path / "s")
    before = {path: path.read_bytes() for path in others}
    assert before
    os.truncate(first, cut)
    with pytest.raises(DataError, match="do not fit"):
        reopen(tmp_path / "s", OPTIONS)
    assert {path: path.read_bytes() for path in others} == before
