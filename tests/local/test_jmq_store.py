"""JoyQueue's store directories: what its own store gives, growth, rollbacks, trimming, and damage of any kind."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from tempfile import mkdtemp
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support import jmq_stores as stores
from support.jmq_stores import Taken, Writer, bounds_of, follow, follow_all, open_store, read_all

from tiered.clock import ManualClock
from tiered.errors import ClosedError, InvalidError
from tiered.local import jmq, jmq_files, jmq_journal
from tiered.local.interface import HoleReason, LeaderEpoch
from tiered.model import MessageQueue, QueueOffset

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tiered.local.jmq import JmqStore

WINDOWS = (1, 5000, 1 << 20)
RELAXED = settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@pytest.fixture(scope="module", autouse=True)
def _clean_up() -> Iterator[None]:
    yield
    stores.drop_pristine()


# -- what the broker's own store gives ---------------------------------------------------------------


def check_all(taken: Taken, name: str) -> None:
    """Every committed message of the dump, field by field, and no other."""
    wanted = stores.dump(name)
    assert {queue for queue, lines in taken.lines.items() if lines} == wanted.keys()
    for queue, lines in wanted.items():
        assert taken.lines[queue] == stores.shown(lines)
    assert not any(taken.holes.values())


@pytest.fixture(autouse=True)
def closed_behind_it() -> Iterator[None]:
    """A process has room for so many descriptors."""
    yield
    stores.close_stores()


@pytest.mark.parametrize("window_bytes", WINDOWS)
@pytest.mark.parametrize("name", stores.NAMES)
def test_following_gives_what_is_committed(name: str, window_bytes: int):
    check_all(follow_all(open_store(stores.pristine(name)), window_bytes), name)


@pytest.mark.parametrize(
    ("bytes_max", "count_max"),
    [
        (2000, 7),
        *(
            pytest.param(*some, marks=pytest.mark.slow)
            for some in ((1, 100), (1 << 20, 1), (1 << 20, 100))
        ),
    ],
)
@pytest.mark.parametrize("name", ["j01-basic", "j02-crash-torn"])
def test_reading_gives_what_is_committed(name: str, bytes_max: int, count_max: int):
    store = open_store(stores.pristine(name))
    check_all(read_all(store, bytes_max, count_max), name)


@pytest.mark.parametrize("name", stores.NAMES)
def test_reading_begins_anywhere(name: str):
    store, wanted = open_store(stores.pristine(name)), stores.dump(name)
    for queue, lines in wanted.items():
        for index in [*range(min(lines), max(lines) + 1, 13), max(lines)]:
            taken = Taken()
            batch = store.read(queue, QueueOffset(index), bytes_max=1, count_max=1)
            assert batch is not None
            assert batch.base_offset == index
            taken.add(batch)
            line = taken.lines[queue][index]
            assert line == stores.shown(lines)[index]
            # A batch is not divided.
            last = index
            while (
                line["batch"]
                and last + 1 in lines
                and (lines[last + 1]["journal_position"] == line["journal_position"])
            ):
                last += 1
            assert batch.end_offset == last + 1
        end = QueueOffset(max(lines) + 1)
        assert store.read(queue, end, bytes_max=1, count_max=1) is None
    assert store.read(MessageQueue("none", 0), QueueOffset(0), bytes_max=1, count_max=1) is None


@pytest.mark.parametrize("has_indexes", [True, False])
@pytest.mark.parametrize("name", stores.NAMES)
def test_bounds_are_those_of_the_store(name: str, has_indexes: bool, tmp_path: Path):
    path = stores.copy(name, tmp_path)
    if not has_indexes:
        for folder in path.glob("topics/*/*/index"):
            shutil.rmtree(folder)
    found, wanted = bounds_of(open_store(path)), stores.dump(name)
    for group in stores.positions(name):
        for number, (left, right) in group["partitions"].items():
            queue = MessageQueue(group["topic"], int(number))
            lines = wanted.get(queue, {})
            if has_indexes or group["topic"] != "trimmed":
                assert found.pop(queue) == (left, max(lines, default=left - 1) + 1)
            else:  # nobody says where the broker begins: the journal does, a little earlier
                low, end = found.pop(queue)
                assert (low < left, end) == (True, right)
    assert not found


def test_without_index_files_all_is_the_same(tmp_path: Path):
    path = stores.copy("j01-basic", tmp_path)
    for folder in path.glob("topics/*/*/index/*"):
        if folder.parts[-4] != "trimmed":
            shutil.rmtree(folder)
    store = open_store(path)
    check_all(follow_all(store, 4000), "j01-basic")
    check_all(read_all(store, 1 << 20, 7), "j01-basic")


@pytest.mark.parametrize("name", stores.NAMES)
def test_a_time_finds_the_first_message_stored_then_or_later(name: str):
    store = open_store(stores.pristine(name))
    for queue, lines in stores.dump(name).items():
        times = [lines[index]["store_time_ms"] for index in sorted(lines)]
        first, end = min(lines), max(lines) + 1
        for wanted in {*times[::50], min(times) - 1, max(times), max(times) + 1}:
            late = [n for n, time in enumerate(times) if time >= wanted]
            found = store.offset_by_time(queue, wanted)
            assert found == (first + late[0] if late else end)
    assert store.offset_by_time(MessageQueue("none", 0), 0) == 0


def test_terms_are_told_as_far_as_the_journal_was_walked():
    store = open_store(stores.pristine("j01-basic"))
    assert store.lineage(MessageQueue("none", 0)) is None
    follow_all(store, 1 << 20)
    for queue, lines in stores.dump("j01-basic").items():
        firsts: dict[int, int] = {}
        for index in sorted(lines):
            firsts.setdefault(lines[index]["term"], index)
        found = store.lineage(queue)
        assert found is not None
        assert found.epochs == tuple(LeaderEpoch(term, first) for term, first in firsts.items())
    assert {found.number for found in store.lineage(MessageQueue("orders", 0)).epochs} == {1, 3}


def test_what_waits_and_what_is_left_out_is_told():
    store = open_store(stores.pristine("j01-basic"))
    waiting = store.waiting()
    assert waiting.records == 17
    assert waiting.size_bytes == 210139 - 206931
    assert "orders/1" in waiting.reason
    assert not waiting.is_behind_damage
    assert [one.name for one in store.report().left_out] == ["orders/tx"]
    crashed = open_store(stores.pristine("j02-crash")).waiting()
    assert crashed.size_bytes == (703_237 - 244_636 + 210_392) + 245
    assert crashed.records == 3718


# -- growth ------------------------------------------------------------------------------------------


QUEUE = MessageQueue("t", 0)


def bodies(taken: Taken, queue: MessageQueue = QUEUE) -> list[bytes]:
    from base64 import b64decode

    return [b64decode(line["body_base64"]) for _, line in sorted(taken.lines[queue].items())]


@RELAXED
@given(data=st.data(), window_bytes=st.sampled_from([1, 300, 5000]))
def test_growth_in_steps(data: st.DataObject, window_bytes: int):
    """Whatever is appended, torn and committed in between: what came is what is committed, once and in order."""
    folder = Path(mkdtemp(prefix="tiered-jmq-"))
    try:
        writer, sent, committed = Writer(folder, file_bytes=900), dict[int, list[bytes]](), {}
        writer.commit()
        clock = ManualClock()
        store = open_store(folder, clock)
        follower, taken = store.follow({}), Taken()
        for step in range(data.draw(st.integers(1, 12))):
            for _ in range(data.draw(st.integers(0, 6))):
                partition, count = data.draw(st.integers(0, 2)), data.draw(st.integers(1, 3))
                body = b"%d" % step + data.draw(st.binary(max_size=200))
                writer.append(partition, body, count=count)
                row = sent.setdefault(partition, [])
                row += [body + b"%d" % n for n in range(count)] if count > 1 else [body]
            match data.draw(st.sampled_from(["commit", "half", "none", "wait"])):
                case "commit":
                    writer.commit()
                    committed = {number: len(row) for number, row in sent.items()}
                case "half":
                    path = writer.folder / "checkpoint.json"
                    path.write_text(path.read_text()[: data.draw(st.integers(0, 40))])
                case "wait":
                    clock.advance(10)
            follow(follower, window_bytes, taken)
            for number, row in sent.items():
                got = bodies(taken, MessageQueue("t", number))
                assert got == row[: committed.get(number, 0)]
                assert len(got) == taken.ends.get(MessageQueue("t", number), 0)
        store.refresh()
        ends = {queue.queue_id: bounds.end for queue, bounds in store.queues().items()}
        assert ends.items() >= committed.items()
        assert not any(taken.holes.values())
        if any(sent.values()):
            assert bool(store.waiting().size_bytes) == (sent != {
                n: row[: committed.get(n, 0)] for n, row in sent.items()})  # fmt: skip
        store.close()
    finally:
        shutil.rmtree(folder)


def test_nothing_is_confirmed_before_a_checkpoint_was_read(tmp_path: Path):
    writer = Writer(tmp_path)
    writer.append(0, b"a")
    (writer.folder / "checkpoint.json").write_text('{"indexPosition":12')
    store = open_store(tmp_path)
    assert follow_all(store, 1000).ends == {}
    assert "no checkpoint.json" in store.waiting().reason
    writer.commit()
    assert bodies(follow_all(store, 1000)) == [b"a"]
    (writer.folder / "checkpoint.json").write_text("")
    writer.append(0, b"b")
    store.refresh()
    assert bodies(follow_all(store, 1000)) == [b"a"]  # the last good one holds
    (writer.folder / "checkpoint.json").unlink()
    store.refresh()
    assert bounds_of(store) == {QUEUE: (0, 1)}


def test_new_topics_and_partitions_are_met(tmp_path: Path):
    clock = ManualClock()
    writer = Writer(tmp_path)
    writer.append(0, b"a")
    writer.commit()
    store = open_store(tmp_path, clock)
    follower, taken = store.follow({}), Taken()
    follow(follower, 1000, taken)
    writer.append(7, b"new partition")
    writer.commit()
    other = Writer(tmp_path, "a@b", 3)
    other.append(1, b"new topic")
    other.commit()
    clock.advance(6)
    follow(follower, 1000, taken)
    assert bodies(taken, MessageQueue("t", 7)) == [b"new partition"]
    assert bodies(taken, MessageQueue("a/b", 1)) == [b"new topic"]
    shutil.rmtree(other.folder.parent)
    clock.advance(6)
    follow(follower, 1000, taken)
    assert MessageQueue("a/b", 1) not in store.queues()


def test_seek_and_starts(tmp_path: Path):
    writer = Writer(tmp_path, file_bytes=500)
    for number in range(40):
        writer.append(number % 2, b"%d" % number)
    writer.commit()
    store = open_store(tmp_path)
    follower = store.follow({QUEUE: QueueOffset(17), MessageQueue("t", 1): QueueOffset(99)})
    taken = follow(follower, 200, Taken())
    assert bodies(taken) == [b"34", b"36", b"38"]
    assert not taken.lines[MessageQueue("t", 1)]
    follower.seek(QUEUE, QueueOffset(3))
    again = follow(follower, 200, Taken())
    assert bodies(again) == [b"%d" % n for n in range(6, 40, 2)]
    follower.seek(QUEUE, QueueOffset(25))
    for number in range(40, 60, 2):
        writer.append(0, b"%d" % number)
    writer.commit()
    assert bodies(follow(follower, 200, Taken())) == [b"50", b"52", b"54", b"56", b"58"]
    assert not follower.take_fallen()


def test_an_idle_poll_reads_nothing(tmp_path: Path):
    path = stores.copy("j01-basic", tmp_path)
    store = open_store(path)
    follower = store.follow({})
    follow(follower, 1 << 20, Taken(parse=False))
    with (
        mock.patch.object(jmq_journal, "read_row", side_effect=AssertionError),
        mock.patch.object(jmq_journal, "read_checkpoint", side_effect=AssertionError),
        mock.patch.object(jmq, "find_groups", side_effect=AssertionError),
        mock.patch.object(jmq_journal, "find_partitions", side_effect=AssertionError),
        mock.patch("os.preadv", side_effect=AssertionError),
        mock.patch("os.pread", side_effect=AssertionError),
    ):
        assert follower.poll(1 << 20) == []
        assert follower.is_idle


# -- rollbacks and trimming --------------------------------------------------------------------------


@pytest.mark.parametrize("is_as_long", [True, False])
@pytest.mark.parametrize("file_bytes", [400, 100_000])
def test_a_rollback_is_a_fall(tmp_path: Path, file_bytes: int, is_as_long: bool):
    writer = Writer(tmp_path, file_bytes=file_bytes)
    for number in range(5):
        writer.append(0, b"old %d" % number)
        writer.append(1, b"old %d" % number)
    mark, nexts = writer.right, dict(writer.nexts)
    for number in range(5, 9):
        writer.append(0, b"old %d" % number)
    writer.commit()
    other = Writer(tmp_path, "other")
    other.append(0, b"x")
    other.commit()
    store = open_store(tmp_path)
    follower = store.follow({})
    assert len(bodies(follow(follower, 1000, Taken()))) == 9
    assert not follower.take_fallen()
    writer.roll_back(mark, nexts)
    if is_as_long:  # written again at the same positions before anybody looks
        for number in range(5, 9):
            writer.append(0, b"new %d" % number, term=4)
        writer.append(1, b"new")
        writer.commit()
    follow(follower, 1000, Taken())
    assert follower.take_fallen() == {QUEUE, MessageQueue("t", 1)}
    assert not follower.take_fallen()
    found = store.read(QUEUE, QueueOffset(5), bytes_max=1000, count_max=100)
    if not is_as_long:
        assert found is None
        assert bounds_of(store)[QUEUE] == (0, 5)
        for number in range(5, 9):
            writer.append(0, b"new %d" % number, term=4)
        writer.commit()
        found = store.read(QUEUE, QueueOffset(5), bytes_max=1000, count_max=100)
    taken = Taken()
    assert found is not None
    taken.add(found)
    assert bodies(taken) == [b"new 5", b"new 6", b"new 7", b"new 8"][: found.count]
    follower.seek(QUEUE, QueueOffset(5))
    assert bodies(follow(follower, 1000, Taken())) == [b"new 5", b"new 6", b"new 7", b"new 8"]
    follow_all(store, 1000)
    lineage = store.lineage(QUEUE)
    assert lineage is not None
    assert lineage.epochs == (LeaderEpoch(1, 0), LeaderEpoch(4, 5))


def test_a_commit_position_that_fell_is_a_fall(tmp_path: Path):
    writer = Writer(tmp_path)
    writer.append(0, b"a")
    mark = writer.right
    writer.append(0, b"b")
    writer.commit()
    store = open_store(tmp_path)
    follower = store.follow({})
    follow(follower, 1000, Taken())
    writer.commit(mark)
    follow(follower, 1000, Taken())
    assert follower.take_fallen() == {QUEUE}
    assert bounds_of(store) == {QUEUE: (0, 1)}


def test_a_topic_made_anew_is_a_fall(tmp_path: Path):
    writer = Writer(tmp_path)
    writer.append(0, b"a")
    writer.append(0, b"b")
    writer.commit()
    clock = ManualClock()
    store = open_store(tmp_path, clock)
    follower = store.follow({})
    follow(follower, 1000, Taken())
    shutil.rmtree(writer.folder.parent)
    clock.advance(6)
    assert follow(follower, 1000, Taken()).ends == {}
    writer = Writer(tmp_path)
    for body in (b"c", b"d", b"e"):
        writer.append(0, body)
    writer.commit()
    clock.advance(6)
    follow(follower, 1000, Taken())
    assert follower.take_fallen() == {QUEUE}
    assert bodies(follow_all(store, 1000)) == [b"c", b"d", b"e"]


def test_what_changes_during_a_read_is_thrown_away(tmp_path: Path):
    """The journal is cut and written again between the look and the read: nothing of either half comes out."""
    writer = Writer(tmp_path)
    writer.append(0, b"first")
    mark, nexts = writer.right, dict(writer.nexts)
    writer.append(0, b"old")
    writer.commit()
    store = open_store(tmp_path)
    follower = store.follow({})
    read = jmq_journal._read_chunk

    def meanwhile(*arguments: Any) -> Any:
        found = read(*arguments)
        if writer.nexts[0] == 2:
            writer.roll_back(mark, nexts)
            for body in (b"new", b"newer"):
                writer.append(0, body, term=2)
            writer.commit()
        return found

    with mock.patch.object(jmq_journal, "_read_chunk", meanwhile):
        assert follower.poll(1 << 20) == []
    assert not follower.is_idle
    assert follower.take_fallen() == set()  # nothing had come yet
    assert bodies(follow(follower, 1 << 20, Taken())) == [b"first", b"new", b"newer"]


def test_files_that_vanish_on_the_left_are_read_on(tmp_path: Path):
    writer = Writer(tmp_path, file_bytes=600)
    for number in range(60):
        writer.append(0, b"%d" % number)
    writer.commit()
    clock = ManualClock()
    store = open_store(tmp_path, clock)
    follower, taken = store.follow({}), Taken()
    late = store.follow({})
    for batch in follower.poll(1):
        taken.add(batch)
    writer.trim(2)
    left = min(int(path.name) for path in (writer.folder / "index/0").iterdir()) // 12
    assert left
    follow(follower, 500, taken)
    assert bodies(taken) == [b"%d" % n for n in range(60)]  # through descriptors
    store.refresh()
    assert bounds_of(store) == {QUEUE: (left, 60)}
    first = store.read(QUEUE, QueueOffset(0), bytes_max=1, count_max=1)
    assert first is not None
    assert first.base_offset == left
    clock.advance(61)
    kept = follow(late, 1 << 20, Taken())
    links = [link for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
    held = [str(link.readlink()) for link in links]
    assert not [path for path in held if str(tmp_path) in path and "(deleted)" in path]
    assert bodies(kept)[-1] == b"59"
    low = min(kept.lines[QUEUE])
    assert 0 < low <= left
    assert sorted(kept.lines[QUEUE]) == list(range(low, 60))
    assert not any(kept.holes.values())
    assert not follower.take_fallen()
    assert not late.take_fallen()


def test_at_most_64_files_of_journals_are_open(tmp_path: Path):
    writer = Writer(tmp_path, file_bytes=100)
    for number in range(90):
        writer.append(0, b"%d" % number)
    writer.commit()
    store = open_store(tmp_path)
    assert len(bodies(follow_all(store, 1 << 20))) == 90
    assert 0 < store._cache.open_count <= 64
    store.close()
    assert not store._cache.open_count
    with pytest.raises(ClosedError):
        store.read(QUEUE, QueueOffset(0), bytes_max=1, count_max=1)


# -- damage ------------------------------------------------------------------------------------------


def flip(path: Path, at: int, mask: int = 1) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= mask
    path.write_bytes(data)


def damaged(tmp_path: Path) -> tuple[Writer, list[int]]:
    """A group of two partitions, all in one file, and where the messages of the first stand in it."""
    writer, places = Writer(tmp_path, file_bytes=1 << 20), []
    for number in range(8):
        places.append(writer.append(0, b"body %d" % number, count=1 + number % 3) + 128)
        writer.append(1, b"body of another %d" % number)
    writer.commit()
    return writer, places


@pytest.mark.parametrize("has_indexes", [True, False])
@pytest.mark.parametrize(
    ("at", "mask"),
    [
        (67, 1),
        (52, 1),
        (0, 64),
        (2, 1),
        (18, 1),
        (5, 1),
        (13, 1),
        (12, 4),
        (59, 4),
        (64, 128),
        (20, 16),
    ],
)  # body; checksum; size, twice; magic; partition; index, twice; count; size of the body; batch
@pytest.mark.parametrize("window_bytes", [1, 1 << 20])
def test_a_damaged_message_is_a_hole(
    tmp_path: Path, at: int, mask: int, window_bytes: int, has_indexes: bool
):
    """One message of three indexes, 9 to 11. Without index files they are said to be missing: nobody names the bytes."""
    if not has_indexes and at in {20, 59}:
        pytest.skip(
            "how many indexes a message takes is said by its header, and by the index files"
        )
    writer, places = damaged(tmp_path)
    store = open_store(tmp_path)
    whole = follow_all(store, 1 << 20)
    raw = whole.raws[QUEUE][9]
    flip(writer.folder / "0", places[5] + at, mask)
    if not has_indexes:
        for number in (0, 1):
            shutil.rmtree(writer.folder / "index" / str(number))
            (writer.folder / "index" / str(number)).mkdir()
    store = open_store(tmp_path)
    taken = follow_all(store, window_bytes)
    read = read_all(store, 1, 1)
    for found in (taken, read):
        for queue, lines in found.lines.items():
            assert lines.items() <= whole.lines[queue].items()
        assert not found.holes[MessageQueue("t", 1)]
        assert set(found.holes[QUEUE]) >= {9, 10, 11}
        assert set(found.holes[QUEUE]) | set(found.lines[QUEUE]) == set(range(15))
        if has_indexes:
            assert set(found.holes[QUEUE].items()) == {(n, HoleReason.DAMAGED) for n in (9, 10, 11)}
            assert len(found.quarantined[QUEUE, 9]) == len(raw)
    assert read.lines == taken.lines
    assert read.holes == taken.holes
    assert store.report().counters["holes_damaged" if has_indexes else next(
        iter(store.report().counters))] >= 3  # fmt: skip


def test_a_message_damaged_at_the_end_waits(tmp_path: Path):
    writer, _ = damaged(tmp_path)
    size = (writer.folder / "0").stat().st_size
    flip(writer.folder / "0", size - 20)
    store = open_store(tmp_path)
    taken = follow_all(store, 1000)
    assert taken.ends == {QUEUE: 15, MessageQueue("t", 1): 7}
    assert store.waiting().is_behind_damage
    assert "nothing sound follows" in store.waiting().reason
    writer.append(1, b"more")
    writer.commit()
    taken = follow_all(store, 1000)
    assert taken.holes[MessageQueue("t", 1)] == {7: HoleReason.DAMAGED}
    assert sorted(taken.lines[MessageQueue("t", 1)]) == [0, 1, 2, 3, 4, 5, 6, 8]


@pytest.mark.parametrize("has_indexes", [True, False])
def test_a_file_missing_in_the_middle(tmp_path: Path, has_indexes: bool):
    writer = Writer(tmp_path, file_bytes=500)
    for number in range(40):
        writer.append(0, b"%d" % number)
    writer.commit()
    files = sorted(int(path.name) for path in writer.folder.iterdir() if path.name.isdigit())
    (writer.folder / str(files[3])).unlink()
    if not has_indexes:
        shutil.rmtree(writer.folder / "index/0")
    store = open_store(tmp_path)
    taken = follow_all(store, 1 << 20)
    assert taken.holes[QUEUE]
    assert set(taken.holes[QUEUE].values()) == {HoleReason.MISSING}
    assert sorted([*taken.holes[QUEUE], *taken.lines[QUEUE]]) == list(range(40))
    assert read_all(store, 1000, 3).lines == taken.lines


def test_thousands_of_missing_messages_are_a_range(tmp_path: Path):
    writer = Writer(tmp_path, file_bytes=1 << 20)
    writer._index_bytes = 12 << 20
    writer.append(0, b"a")
    cut = writer.append(0, b"b", count=9000)
    end = writer.right
    writer.append(0, b"c")
    writer.commit()
    data = (writer.folder / "0").read_bytes()
    (writer.folder / "0").write_bytes(data[: 128 + cut])
    (writer.folder / str(end)).write_bytes(bytes(128) + data[128 + end :])
    store = open_store(tmp_path)
    taken = follow_all(store, 1 << 20)
    assert sorted(taken.lines[QUEUE]) == [0, 9001]
    assert not taken.holes[QUEUE]
    batch = store.read(QUEUE, QueueOffset(1), bytes_max=1, count_max=1)
    assert batch is not None
    assert batch.base_offset == 9001


@dataclass(frozen=True)
class Blow:
    """One damage: ``what`` at a share ``where`` of the ``file``-th file (modulo their number) of those of a kind."""

    kind: str
    file: int
    where: float
    what: str
    size: int


blows = st.builds(
    Blow,
    kind=st.sampled_from(["journal", "journal", "index", "checkpoint"]),
    file=st.integers(0, 80),
    where=st.floats(0, 1, exclude_max=True),
    what=st.sampled_from(
        ["flip", "flip", "zero", "ones", "cut", "absurd", "remove", "zeros behind"]
    ),
    size=st.sampled_from([1, 4, 20, 500, 4096, 70_000]),
)
PATTERNS = {
    "journal": "topics/*/*/[0-9]*",
    "index": "topics/*/*/index/*/[0-9]*",
    "checkpoint": "topics/*/*/checkpoint.json",
}


def strike(store: Path, blow: Blow) -> None:
    files = sorted(path for path in store.glob(PATTERNS[blow.kind]) if "/tx/" not in str(path))
    if not files:
        return
    file = files[blow.file % len(files)]
    if blow.what == "remove":
        file.unlink()
        return
    data = bytearray(file.read_bytes())
    at = int(blow.where * len(data))
    if blow.what == "cut":
        data = data[:at]
    elif blow.what == "zeros behind":
        data += bytes(blow.size)
    elif blow.what == "flip" and data:
        data[at] ^= 1 << blow.size % 8
    elif blow.what == "absurd":
        data[at : at + 4] = b"\x7f\xff\xff\xff"[: len(data[at : at + 4])]
    else:
        fill = b"\0" if blow.what == "zero" else b"\xff"
        data[at : at + blow.size] = fill * len(data[at : at + blow.size])
    file.write_bytes(data)


@RELAXED
@given(
    name=st.sampled_from(["j01-basic", "j02-crash-torn"]),
    damage=st.lists(blows, min_size=1, max_size=4),
    window_bytes=st.sampled_from([400, 3000, 1 << 20]),
)
def test_any_damage(name: str, damage: list[Blow], window_bytes: int):
    """What comes is what was there, at its index and place; both ways of reading agree; indexes are accounted for."""
    folder = Path(mkdtemp(prefix="tiered-jmq-"))
    try:
        path = stores.copy(name, folder)
        for blow in damage:
            strike(path, blow)
        store = open_store(path)
        taken = follow_all(store, window_bytes, parse=False)
        read = read_all(store, 50_000, 1000, parse=False)
        check_damaged(name, store, taken)
        check_damaged(name, store, read)
        store.close()
    finally:
        shutil.rmtree(folder)


def check_damaged(name: str, store: JmqStore, taken: Taken) -> None:
    truth = whole(name)
    for queue, raws in taken.raws.items():
        for index, raw in raws.items():
            known = truth[queue][index]
            # No checksum covers the rest: what is not compared with others may differ by what was flipped.
            assert len(raw) == len(known)
            assert raw[4:14] == known[4:14]
            end = 65 + int.from_bytes(known[61:65], "big")
            assert raw[61:end] == known[61:end]
    bounds = bounds_of(store)
    for queue, end in taken.ends.items():
        assert end <= bounds[queue][1] or bounds[queue][1] == 0


def whole(name: str) -> dict[MessageQueue, dict[int, bytes]]:
    """Every message of a captured store, uncommitted ones too."""
    if name not in _WHOLE:
        folder = Path(mkdtemp(prefix="tiered-jmq-"))
        path = stores.copy(name, folder)
        for group in stores.positions(name):
            nexts = {int(number): right for number, (_, right) in group["partitions"].items()}
            text = (
                f'{{"indexPosition":0,"partitions":{nexts},"version":1,'
                f'"replicationPosition":{group["right_position"]}}}'
            )
            topic = group["topic"].replace("/", "@")
            (path / f"topics/{topic}/{group['group']}/checkpoint.json").write_text(text)
        for index in path.glob("topics/trimmed/*/index"):
            shutil.rmtree(index)  # what the broker does not serve any more, too
        store = open_store(path)
        _WHOLE[name] = follow_all(store, 1 << 20, parse=False).raws
        store.close()
        shutil.rmtree(folder)
    return _WHOLE[name]


_WHOLE: dict[str, dict[MessageQueue, dict[int, bytes]]] = {}


@pytest.mark.parametrize("what", ["journal", "checkpoint.json", "lock", "index"])
def test_what_is_no_file_is_refused(tmp_path: Path, what: str):
    writer, _ = damaged(tmp_path)
    path = {
        "journal": writer.folder / "0",
        "checkpoint.json": writer.folder / "checkpoint.json",
        "lock": tmp_path / "lock",
        "index": writer.folder / "index/0/0",
    }[what]
    path.unlink(missing_ok=True)
    for make in (os.mkfifo, os.mkdir):
        make(path)
        with pytest.raises(InvalidError, match=path.name):
            _ = open_store(tmp_path).identity
        path.unlink() if make is os.mkfifo else path.rmdir()


def test_odd_names_are_passed_by(tmp_path: Path):
    writer, _ = damaged(tmp_path)
    wanted = follow_all(open_store(tmp_path), 1 << 20)
    for name in ("007", "12x", "-3", "99999999999999999999", "5.tmp", "²"):
        (writer.folder / name).write_bytes(b"x" * 500)
        (writer.folder / "index/0" / name).write_bytes(b"x" * 500)
    (writer.folder / "index/0/7").write_bytes(b"x" * 500)  # no multiple of an entry
    (tmp_path / "topics/file").write_text("")
    (tmp_path / "topics/.d.1700000000000.t.1/x").mkdir(parents=True)
    (writer.folder / "index/5.d.1700000000000").mkdir()
    (writer.folder / "index/40000").mkdir()
    (writer.folder.parent / "tx/0").mkdir(parents=True)
    (writer.folder.parent / "word").mkdir()
    store = open_store(tmp_path)
    assert follow_all(store, 1 << 20).lines == wanted.lines
    assert {one.name for one in store.report().left_out} == {
        ".d.1700000000000.t.1",
        "t/0/5.d.1700000000000",
        "t/0/40000",
        "t/tx",
        "t/word",
    }


def test_a_removed_partition_is_not_a_queue(tmp_path: Path):
    writer, _ = damaged(tmp_path)
    (writer.folder / "index/1").rename(writer.folder / "index/1.d.1700000000000")
    store = open_store(tmp_path)
    assert set(store.queues()) == {QUEUE}
    taken = follow_all(store, 300)
    assert sorted(taken.lines[QUEUE]) == list(range(15))
    assert not any(taken.holes.values())


def test_a_partition_in_two_groups_is_refused(tmp_path: Path):
    for group in (0, 1):
        writer = Writer(tmp_path, "t", group)
        writer.append(5, b"x")
        writer.commit()
    with pytest.raises(InvalidError, match="partition t/5 is in two groups, t/0 and t/1"):
        open_store(tmp_path)


def test_other_directories_are_no_store(tmp_path: Path):
    assert not jmq.is_jmq(str(tmp_path))
    (tmp_path / "topics").mkdir()
    assert not jmq.is_jmq(str(tmp_path))
    with pytest.raises(InvalidError, match="not a JoyQueue"):
        open_store(tmp_path)
    (tmp_path / "lock").touch()
    assert jmq.is_jmq(str(tmp_path))
    assert open_store(tmp_path).queues() == {}
    assert all(jmq.is_jmq(str(stores.pristine(name))) for name in stores.NAMES)


def test_a_running_broker_is_told_by_its_lock(tmp_path: Path):
    path = stores.copy("j02-crash", tmp_path)
    assert (path / "lock").exists()
    assert not open_store(path).identity.is_live  # left behind by a crash
    body = f"""
import fcntl
file = open({str(path / "lock")!r}, "r+")
fcntl.lockf(file, fcntl.LOCK_EX)
print(1, flush=True)
input()
"""
    with subprocess.Popen(
        [sys.executable, "-c", body], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as broker:
        assert broker.stdout is not None
        assert broker.stdout.readline()
        identity = open_store(path).identity
        assert identity.is_live
        assert (identity.kind, identity.store_id) == ("jmq", "")
        broker.communicate(b"\n")
    with (path / "lock").open("r+") as lock:
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # nobody has taken it


@pytest.mark.slow
def test_nothing_is_written(tmp_path: Path):
    path = stores.copy("j01-basic", tmp_path)
    before = {str(file): file.stat() for file in path.rglob("*")}
    store = open_store(path)
    follow_all(store, 1 << 20)
    read_all(store, 1000, 10)
    after = {str(file): file.stat() for file in path.rglob("*")}
    assert {name: (one.st_mtime_ns, one.st_size, one.st_ino) for name, one in before.items()} == {
        name: (one.st_mtime_ns, one.st_size, one.st_ino) for name, one in after.items()
    }


@pytest.mark.parametrize(
    "text",
    [
        "", "{", "x", "[]", "7", '{"partitions":{}}', '{"indexPosition":1,"partitions":{0:1},"replicationPosition":',
        '{"indexPosition":1,"partitions":[],"replicationPosition":5,"version":1}',
        '{"indexPosition":-1,"partitions":{},"replicationPosition":5,"version":1}',
        '{"indexPosition":1,"partitions":{},"replicationPosition":5.5,"version":1}',
        '{"indexPosition":1,"partitions":{},"replicationPosition":true,"version":1}',
        '{"indexPosition":1,"partitions":{a:1},"replicationPosition":5,"version":1}',
        '{"indexPosition":1,"partitions":{},"replicationPosition":99999999999999999999,"version":1}',
        '{"indexPosition":1,"partitions":{},"replicationPosition":5,"version":0}',
        '{"indexPosition":1,"partitions":{},"replicationPosition":5,"version":1}}', "[" * 100_000,
    ],
)  # fmt: skip
def test_a_checkpoint_that_is_not_whole_says_nothing(text: str):
    assert jmq_files.parse_checkpoint(text.encode()) is None


def test_a_checkpoint_in_any_order():
    text = (
        b'{"version":1,"replicationPosition":5, "partitions":{4:595,\n\t"3":663},"indexPosition":9}'
    )
    assert jmq_files.parse_checkpoint(text) == jmq_files.JmqCheckpoint(5, 9, {4: 595, 3: 663})
