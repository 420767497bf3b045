"""Damage of any kind: nothing crashes, hangs or is passed over; what is sound is handed out as it was."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import TYPE_CHECKING
from unittest import mock

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from support import following

from tiered.errors import DataError, InvalidError
from tiered.local import matching
from tiered.local.interface import HoleReason
from tiered.model import MessageQueue

if TYPE_CHECKING:
    from collections.abc import Iterator

NAMES = ("s05b-torn", "s08-crash-continue", "s06-expired", "s11-lmq-batchcq", "s03-transactions")
REFUSALS = ("the commit log has a hole", "no commit log", "not a RocketMQ store")
RELAXED = settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@dataclass(frozen=True)
class Blow:
    """One damage: ``what`` at a share ``where`` of the ``file``-th file (modulo their number) of ``row``."""

    row: str
    file: int
    where: float
    what: str
    size: int


blows = st.builds(
    Blow,
    row=st.sampled_from(["commitlog", "consumequeue", "batchconsumequeue"]),
    file=st.integers(0, 50),
    where=st.floats(0, 1, exclude_max=True),
    what=st.sampled_from(["flip", "zero", "ones", "cut", "absurd", "remove"]),
    size=st.sampled_from([1, 4, 20, 500, 4096, 70_000]),
)


@cache
def pristine(name: str) -> Path:
    return following.unpack(name, Path(mkdtemp(prefix="tiered-damage-")))


@pytest.fixture(scope="module", autouse=True)
def _clean_up() -> Iterator[None]:
    yield
    for name in NAMES:
        shutil.rmtree(pristine(name).parent, ignore_errors=True)
    pristine.cache_clear()


def strike(store: Path, blow: Blow) -> None:
    files = sorted(path for path in (store / blow.row).rglob("0*") if path.is_file())
    if not files:
        return
    file = files[blow.file % len(files)]
    if blow.what == "remove":
        file.unlink()
        return
    data = bytearray(file.read_bytes())
    # Aim at what is written: most of a file can be zeros.
    at = int(blow.where * max(1, len(bytes(data).rstrip(b"\0"))))
    if blow.what == "cut":
        data = data[:at]
    elif blow.what == "flip" and data:
        data[at] ^= 1 << blow.size % 8
    elif blow.what == "absurd":
        data[at // 4 * 4 : at // 4 * 4 + 4] = b"\x7f\xff\xff\xff"
    else:
        fill = b"\0" if blow.what == "zero" else b"\xff"
        data[at : at + blow.size] = fill * len(data[at : at + blow.size])
    file.write_bytes(data)


@RELAXED
@example(  # entries lost beside expired ones: the first record is no neighbour of what is listed before it
    name="s06-expired",
    damage=[Blow("consumequeue", 50, 0.57, "cut", 1)],
    is_clean=False,
    window_bytes=1,
    whole=False,
)
@example(  # of the only file that is left a part: it does not begin at a multiple of its size
    name="s08-crash-continue",
    damage=[
        Blow("commitlog", 0, 0.0, "flip", 1),
        Blow("commitlog", 0, 0.0, "remove", 1),
        Blow("commitlog", 0, 0.5, "cut", 1),
    ],
    is_clean=False,
    window_bytes=1,
    whole=False,
)
@given(
    name=st.sampled_from(NAMES),
    damage=st.lists(blows, min_size=1, max_size=4),
    is_clean=st.booleans(),
    window_bytes=st.sampled_from([400, 3_000, 1 << 16, 1 << 20]),  # one, or a few records
    whole=st.booleans(),
)
def test_any_damage(name: str, damage: list[Blow], is_clean: bool, window_bytes: int, whole: bool):
    """Messages and holes account for every queue offset, both ways of reading agree, sound bytes stay as they were."""
    folder = Path(mkdtemp(prefix="tiered-damage-"))
    try:
        directory = following.copy(pristine(name), folder)
        (directory / "abort").unlink(missing_ok=True)
        if not is_clean:
            (directory / "abort").write_text("1")
        for blow in damage:
            strike(directory, blow)
        said = ""
        try:
            store = following.open_store(directory, whole_log_bytes_max=(1 << 30) * whole)
            check(name, store, window_bytes)
            store.close()
        except (DataError, InvalidError) as error:
            said = str(error)
        assert not said or any(word in said for word in REFUSALS)
    finally:
        shutil.rmtree(folder)


def check(name: str, store: following.RocketMQStore, window_bytes: int) -> None:
    followed = following.follow_all(store, window_bytes)
    following.check_complete(store, followed)
    read = following.read_all(store, 50_000, 1_000)
    assert read.raw == followed.raw
    assert read.holes == followed.holes
    assert following.follow_all(store).raw == followed.raw
    truth = following.expected(name)
    for (queue, offset), raw in followed.quarantined.items():
        assert followed.holes[queue][offset] is HoleReason.DAMAGED
        assert raw
    for queue, found in followed.messages.items():
        for offset, message in found.items():
            # Bytes that no check covers may differ; the place in the log tells that it is the same message.
            known = truth.messages.get(queue, {}).get(offset)
            if known is not None and known.physical_offset == message.physical_offset:
                assert message.size == known.size


@pytest.mark.parametrize("name", ["s01-basic", "s06-expired", "s11-lmq-batchcq"])
def test_one_damaged_record_costs_one_message(name: str, tmp_path: Path):
    """A flipped body byte, record by record: that message is a hole with its raw bytes, all others are there."""
    directory = following.unpack(name, tmp_path)
    found = following.expected(name)
    everything = {
        (queue, offset): message
        for queue, messages in found.messages.items()
        for offset, message in messages.items()
    }
    last_file = max(message.physical_offset for message in everything.values()) // 262_144
    hit = [
        (key, message)
        for key, message in everything.items()
        # In the newest file a start would cut the log there.
        if message.physical_offset // 262_144 < last_file or name == "s11-lmq-batchcq"
    ][:: max(1, len(everything) // 12)]
    for (queue, offset), message in hit:
        file = directory / "commitlog" / f"{message.physical_offset // 262_144 * 262_144:020d}"
        at = message.physical_offset % 262_144
        raw = flip(file, at + 90)
        store = following.open_store(directory)
        taken = following.follow_all(store, 20_000)
        if int(store.report().log_end) > message.physical_offset:
            holes = dict(taken.holes[queue])
            assert set(holes.values()) == {HoleReason.DAMAGED}
            assert offset in holes
            assert taken.quarantined[queue, offset] == raw[at : at + message.size]
            lost = {(queue, o) for o in holes}
            assert {
                key for key in everything if key[1] not in taken.messages.get(key[0], {})
            } == lost
            assert store.report().damaged_records == len(lost)
            assert following.read_all(store).holes == taken.holes
        store.close()
        flip(file, at + 90)


def flip(file: Path, at: int) -> bytes:
    """Flip a byte; the file as it is then."""
    data = bytearray(file.read_bytes())
    data[at] ^= 0xFF
    file.write_bytes(data)
    return bytes(data)


def test_a_lost_page_of_the_log_in_the_middle(tmp_path: Path):
    """Zeros in the middle of an old file: holes for what they held, the rest is found by the consume queues."""
    directory = following.unpack("s01-basic", tmp_path)
    file = directory / "commitlog" / f"{262_144:020d}"
    data = bytearray(file.read_bytes())
    data[100_000:108_192] = bytes(8192)
    file.write_bytes(data)
    store = following.open_store(directory)
    taken = following.follow_all(store)
    following.check_complete(store, taken)
    lost = {
        (queue, offset)
        for queue, messages in following.expected("s01-basic").messages.items()
        for offset, message in messages.items()
        if message.physical_offset < 262_144 + 108_192
        and message.physical_offset + message.size > 262_144 + 100_000
    }
    holes = {(queue, offset) for queue, found in taken.holes.items() for offset in found}
    assert holes == lost
    assert len(lost) > 3
    assert {reason for found in taken.holes.values() for reason in found.values()} <= {
        HoleReason.DAMAGED,
        HoleReason.DANGLING,
    }
    store.close()


def test_consume_queues_are_rebuilt(tmp_path: Path):
    """Without any consume queue everything is still there, tag codes included."""
    directory = following.unpack("s01-basic", tmp_path)
    shutil.rmtree(directory / "consumequeue")
    store = following.open_store(directory)
    taken = following.follow_all(store)
    found = following.expected("s01-basic")
    assert taken.messages == found.messages
    assert following.read_all(store).messages == found.messages
    assert following.bounds_of(store) == found.bounds
    assert set(store.report().rebuilt_queues) == set(found.bounds)
    store.close()


def test_batch_queues_are_rebuilt(tmp_path: Path):
    directory = following.unpack("s11-lmq-batchcq", tmp_path)
    shutil.rmtree(directory / "batchconsumequeue")
    store = following.open_store(directory)
    found = following.expected("s11-lmq-batchcq")
    assert following.follow_all(store).messages == found.messages
    assert following.bounds_of(store) == found.bounds
    store.close()


@pytest.mark.parametrize(
    "bit",
    [*(28 * 8 + n for n in (1, 30, 55, 60, 62)), *(36 * 8 + n for n in (1, 10, 14))],
)
def test_a_flipped_bit_in_the_last_unit_of_a_batch_queue_invents_no_queue_offsets(
    bit: int, tmp_path: Path
):
    """No checksum covers its offset and its count; the queue would be a million holes longer."""
    directory = following.unpack("s11-lmq-batchcq", tmp_path)
    file = directory / "batchconsumequeue" / "grouped" / "1" / f"{0:020d}"
    data = bytearray(file.read_bytes())
    last = max(at for at in range(0, len(data), 46) if any(data[at + 8 : at + 12]))
    data[last + bit // 8] ^= 0x80 >> bit % 8
    file.write_bytes(data)
    store = following.open_store(directory)
    found = following.expected("s11-lmq-batchcq")
    assert following.bounds_of(store) == found.bounds
    taken = following.follow_all(store)
    assert taken.messages == found.messages
    assert not any(taken.holes.values())
    store.close()


def test_a_follower_finds_what_opening_did_not_look_for(tmp_path: Path):
    """In a large log only the tail is walked at opening; the follower takes in what no queue lists."""
    directory = following.unpack("s01-basic", tmp_path)
    shutil.rmtree(directory / "consumequeue" / "many-properties")
    store = following.open_store(directory, whole_log_bytes_max=0)
    taken = following.follow_all(store)
    assert taken.messages == following.expected("s01-basic").messages
    following.check_complete(store, taken)
    store.close()


def test_deleted_topics_stay_deleted(tmp_path: Path):
    """After a clean stop, records of a topic that is in no table and has no consume queue are left out by name."""
    directory = following.unpack("s01-basic", tmp_path)
    shutil.rmtree(directory / "consumequeue" / "unicode")
    table = directory / "config" / "topics.json"
    table.write_text(table.read_text().replace('"unicode":{', '"another":{'))
    store = following.open_store(directory)
    assert not [queue for queue in store.queues() if queue.topic == "unicode"]
    assert "unicode" in {left.name for left in store.report().left_out}
    store.close()


def test_a_wrong_size_in_an_entry_costs_nothing(tmp_path: Path):
    directory = following.unpack("s01-basic", tmp_path)
    file = directory / "consumequeue" / "orders" / "1" / f"{2000:020d}"
    flip(file, 20 * 7 + 11)
    flip(file, 20 * 9 + 8)
    store = following.open_store(directory)
    found = following.expected("s01-basic").messages
    assert following.follow_all(store).messages == found
    assert following.read_all(store).messages == found
    store.close()


def test_a_wrong_place_in_an_entry_is_mended_from_the_log(tmp_path: Path):
    directory = following.unpack("s01-basic", tmp_path)
    file = directory / "consumequeue" / "orders" / "1" / f"{2000:020d}"
    flip(file, 20 * 7 + 1)
    store = following.open_store(directory)
    found = following.expected("s01-basic").messages
    assert following.follow_all(store).messages == found
    assert following.read_all(store).messages == found
    assert MessageQueue("orders", 1) in store.report().rebuilt_queues
    store.close()


@settings(RELAXED, max_examples=15)
@example(  # the log ends before what the entries list
    name="s03-transactions",
    damage=[Blow("commitlog", 0, 0.9, "cut", 1)],
    is_clean=True,
    whole=False,
    units=(128, 1024, 8192),
)
@given(
    name=st.sampled_from(NAMES),
    damage=st.lists(blows, max_size=4),
    is_clean=st.booleans(),
    whole=st.booleans(),
    units=st.sampled_from([(1, 2, 8), (128, 1024, 8192)]),
)
def test_entries_read_once_say_what_the_files_say(
    name: str, damage: list[Blow], is_clean: bool, whole: bool, units: tuple[int, ...]
):
    folder = Path(mkdtemp(prefix="tiered-damage-"))
    try:
        directory = following.copy(pristine(name), folder)
        (directory / "abort").unlink(missing_ok=True)
        if not is_clean:
            (directory / "abort").write_text("1")
        for blow in damage:
            strike(directory, blow)
        found = []
        for limit in (matching._LISTED_BYTES_MAX, 0):  # with columns, and without
            with (
                mock.patch.object(matching, "_LISTED_BYTES_MAX", limit),
                mock.patch.object(matching, "_UNITS_READ", units),
            ):
                try:
                    store = following.open_store(directory, whole_log_bytes_max=(1 << 30) * whole)
                except (DataError, InvalidError) as error:
                    found.append(str(error))
                    continue
                taken = following.follow_all(store, 3_000)
                bounds = following.bounds_of(store)
                found.append((bounds, taken.raw, taken.holes, taken.gaps, store.report()))
                store.close()
        assert found[0] == found[1]
    finally:
        shutil.rmtree(folder)


SWAPPED = [
    ("s09-big-offsets", "consumequeue/far/1/00000000000000002000", "consumequeue/far/2/0"),
    ("s09-big-offsets", "consumequeue/far/0/0", "consumequeue/far/0/00000000000000002000"),
    ("s10-consumers", "consumequeue/%RETRY%failing/0/0", "consumequeue/work/1/0"),
    ("s11-lmq-batchcq", "batchconsumequeue/grouped/0/0", "batchconsumequeue/grouped/1/0"),
]


@pytest.mark.parametrize(("name", "one", "other"), SWAPPED)
def test_files_of_consume_queues_that_were_swapped_cost_nothing(
    name: str, one: str, other: str, tmp_path: Path
):
    """All that they list are another queue's records, or of other offsets: they count as missing, and are named."""
    store = following.unpack(name, tmp_path)
    paths = [path.parent / path.name.rjust(20, "0") for path in (store / one, store / other)]
    first, second = (path.read_bytes() for path in paths)
    paths[0].write_bytes(second)
    paths[1].write_bytes(first)
    truth = following.expected(name)
    source = following.open_store(store)
    for taken in (following.follow_all(source), following.read_all(source)):
        assert {queue: found for queue, found in taken.messages.items() if found} == truth.messages
        assert not any(taken.holes.values())
    notes = "\n".join(source.report().notes)
    assert all(str(path) in notes for path in paths)
    source.close()


def test_a_few_records_alike_damaged_are_damaged_and_no_file_of_another_queue(tmp_path: Path):
    """The table of cases rules where only some of what a file lists is odd."""
    store = following.unpack("s09-big-offsets", tmp_path)
    truth = following.expected("s09-big-offsets").messages
    queue = MessageQueue("far", 1)
    for offset in range(10, 20):
        place = truth[queue][offset].physical_offset
        file = max(path for path in (store / "commitlog").iterdir() if int(path.name) <= place)
        data = bytearray(file.read_bytes())
        data[place - int(file.name) + 15] = 2
        file.write_bytes(data)
    source = following.open_store(store)
    taken = following.follow_all(source)
    assert taken.holes[queue] == dict.fromkeys(range(10, 20), HoleReason.DAMAGED)
    assert taken.messages[MessageQueue("far", 2)] == truth[MessageQueue("far", 2)]
    source.close()


def test_an_entry_flipped_below_the_log_s_first_byte_is_no_expired_one(tmp_path: Path):
    """What stands before it in the queue shows that its record has not expired: it is taken."""
    store = following.unpack("s06-expired", tmp_path)
    file = store / "consumequeue" / "long-lived" / "0" / f"{12_000:020d}"
    data = bytearray(file.read_bytes())
    data[50 * 20 + 5] ^= 8
    file.write_bytes(data)
    source = following.open_store(store)
    truth = following.expected("s06-expired")
    messages = {queue: found for queue, found in truth.messages.items() if found}
    assert following.follow_all(source).messages == messages
    assert following.bounds_of(source) == truth.bounds
    source.close()


def test_a_file_of_a_consume_queue_that_was_cut_hides_nothing_behind_it(tmp_path: Path):
    """A single damaged entry in the next file is bounded by its own neighbours."""
    store = following.unpack("s08-crash-continue", tmp_path)
    folder = store / "consumequeue" / "load" / "0"
    cut, following_file = folder / f"{8000:020d}", folder / f"{10_000:020d}"
    cut.write_bytes(cut.read_bytes()[:69])
    flip(following_file, 14 * 20)
    source = following.open_store(store)
    taken = following.follow_all(source)
    assert taken.messages == following.expected("s08-crash-continue").messages
    assert not taken.holes
    source.close()
