"""Flipped bits in what no checksum covers, a record's queue, offset and flags, an entry's place: one message at most."""

from __future__ import annotations

import shutil
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import captures, following
from support.broker_files import LOG_FILE_BYTES, QUEUE_FILE_BYTES, TOPIC, FakeBroker
from support.following import flip_entry

from tiered.format.properties import tag_hash
from tiered.format.sysflag import MULTI_TAGS
from tiered.local.classification import (
    Case,
    are_wrong_tags,
    classify_entries,
    classify_orphans,
    place,
)
from tiered.local.interface import HoleReason
from tiered.model import MessageQueue, QueueOffset

if TYPE_CHECKING:
    from pathlib import Path

QUEUES, EACH = 3, 20
SIZE, QUEUE_ID, FLAG, OFFSET, SYS_FLAG, BORN, STORED = (
    (0, 4),
    (12, 4),
    (16, 4),
    (20, 8),
    (36, 4),
    (40, 8),
    (56, 8),
)
TOPIC_AT = (189, 1)


@dataclass(frozen=True)
class Put:
    """A record as it was written."""

    queue: MessageQueue
    offset: int
    place: int
    raw: bytes


@pytest.fixture
def puts(tmp_path: Path) -> list[Put]:
    """A stopped store, its records in log order; queues in turn."""
    return fill(FakeBroker(tmp_path / "store"))


def fill(broker: FakeBroker) -> list[Put]:
    broker.start()
    found = []
    for number in range(QUEUES * EACH):
        queue = MessageQueue(TOPIC, number % QUEUES)
        offset = broker.offsets.get(queue, 0)
        raw = broker.append(queue.queue_id)
        found.append(Put(queue, offset, broker.position - len(raw), raw))
    broker.dispatch()
    broker.stop()
    return found


def flip(store: Path, put: Put, field: tuple[int, int], bit: int) -> bytes:
    """Flip one bit of a big-endian field of a record; the record as it is then."""
    start, size = field
    file = store / "commitlog" / f"{put.place // LOG_FILE_BYTES * LOG_FILE_BYTES:020d}"
    data = bytearray(file.read_bytes())
    at = put.place % LOG_FILE_BYTES
    data[at + start + size - 1 - bit // 8] ^= 1 << bit % 8
    file.write_bytes(data)
    return bytes(data[at : at + len(put.raw)])


def unlist(store: Path, first: int) -> None:
    """Lose all entries from queue offset ``first`` on, as a power failure does."""
    for file in (path for path in (store / "consumequeue").rglob("0*") if path.is_file()):
        base = int(file.name) // 20
        kept = max(0, min(first - base, QUEUE_FILE_BYTES // 20)) * 20
        file.write_bytes(file.read_bytes()[:kept].ljust(QUEUE_FILE_BYTES, b"\0"))


def take(
    store: Path, **options: object
) -> tuple[following.Taken, dict[MessageQueue, tuple[int, int]]]:
    """Everything, both ways; what they give is the same."""
    opened = following.open_store(store, **options)
    followed, read = following.follow_all(opened, 5_000), following.read_all(opened)
    assert followed.raw == read.raw
    assert followed.holes == read.holes
    bounds = following.bounds_of(opened)
    opened.close()
    return followed, bounds


def check_only_lost(store: Path, puts: list[Put], lost: Put, raw: bytes) -> None:
    """One message is a hole with its bytes in quarantine; every other is there, and no queue is longer."""
    taken, bounds = take(store)
    assert bounds == {MessageQueue(TOPIC, number): (0, EACH) for number in range(QUEUES)}
    assert taken.holes == {lost.queue: {lost.offset: HoleReason.DAMAGED}}
    assert taken.quarantined == {(lost.queue, lost.offset): raw}
    for put in puts:
        if put is not lost:
            assert taken.raw[put.queue][put.offset] == put.raw


@pytest.mark.parametrize("which", [10, QUEUES * EACH - 1], ids=["middle", "last"])
@pytest.mark.parametrize("is_clean", [True, False])
@pytest.mark.parametrize(
    "blow",
    [(OFFSET, bit) for bit in (0, 1, 2, 5, 8, 20, 40, 62, 63)]
    + [(QUEUE_ID, bit) for bit in (0, 1, 2, 20, 31)]
    + [(TOPIC_AT, bit) for bit in (0, 2, 6, 7)],
)
def test_an_intact_entry_rules_over_a_flipped_record(
    tmp_path: Path, puts: list[Put], which: int, is_clean: bool, blow: tuple[tuple[int, int], int]
):
    """No other queue or offset comes into being, however far the bit reaches; the record is damaged where it is listed."""
    store = tmp_path / "store"
    if not is_clean:
        (store / "abort").write_text("1")
    raw = flip(store, puts[which], *blow)
    check_only_lost(store, puts, puts[which], raw)


@pytest.mark.parametrize("which", [33, 45, QUEUES * EACH - 1], ids=["first", "middle", "last"])
@pytest.mark.parametrize("bit", [0, 1, 2, 5, 8, 20, 40, 62, 63])
@pytest.mark.parametrize("is_clean", [True, False])
def test_a_record_that_nothing_lists_is_bounded_by_its_neighbours(
    tmp_path: Path, puts: list[Put], which: int, bit: int, is_clean: bool
):
    """Entries were lost: the records that agree with each other are listed again, a flipped one is damaged among them."""
    store = tmp_path / "store"
    if not is_clean:
        (store / "abort").write_text("1")
    unlist(store, 11)
    raw = flip(store, puts[which], OFFSET, bit)
    check_only_lost(store, puts, puts[which], raw)


@pytest.mark.parametrize("bit", [0, 1, 5, 20, 62, 63])
def test_without_consume_queues_a_flipped_offset_costs_one_message(
    tmp_path: Path, puts: list[Put], bit: int
):
    store = tmp_path / "store"
    shutil.rmtree(store / "consumequeue")
    raw = flip(store, puts[30], OFFSET, bit)
    check_only_lost(store, puts, puts[30], raw)


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("bit", [1, 5, 20, 62, 63])
def test_the_first_record_of_a_queue_is_bounded_by_those_behind_it(
    tmp_path: Path, puts: list[Put], which: int, bit: int
):
    store = tmp_path / "store"
    shutil.rmtree(store / "consumequeue")
    raw = flip(store, puts[which], OFFSET, bit)
    check_only_lost(store, puts, puts[which], raw)


@pytest.mark.parametrize("bit", [0, 3, 9, 20, 29, 31])
def test_a_flipped_size_of_a_record_costs_that_message_and_its_bytes_are_kept(
    tmp_path: Path, puts: list[Put], bit: int
):
    """The entry's size is right, and is not given up for one that no record bears out. (After an unclean stop a start
    would cut the log there.)"""
    store = tmp_path / "store"
    raw = flip(store, puts[10], SIZE, bit)
    check_only_lost(store, puts, puts[10], raw)


@pytest.mark.parametrize("field", [FLAG, BORN, STORED])
@pytest.mark.parametrize("bit", [0, 3, 31])
def test_flags_and_times_cost_nothing(
    tmp_path: Path, puts: list[Put], field: tuple[int, int], bit: int
):
    """They are the message's own: nothing here depends on them."""
    store = tmp_path / "store"
    raw = flip(store, puts[10], field, bit)
    taken, _ = take(store)
    assert not taken.holes
    assert taken.raw[puts[10].queue][puts[10].offset] == raw


def test_a_transaction_flag_of_a_listed_record_costs_nothing(tmp_path: Path, puts: list[Put]):
    """Flipped, it says that the record gets no entry. It has one."""
    store = tmp_path / "store"
    flip(store, puts[10], SYS_FLAG, 2)
    taken, _ = take(store)
    assert not taken.holes
    assert sum(map(len, taken.raw.values())) == len(puts)


@pytest.mark.parametrize("bit", [0, 3, 7, 11, 12, 20, 62, 63])
@pytest.mark.parametrize("is_clean", [True, False])
def test_a_flipped_place_in_an_entry_is_mended_from_the_log(
    tmp_path: Path, puts: list[Put], bit: int, is_clean: bool
):
    """Also when it names bytes within the log: they are no record of this queue and offset."""
    store = tmp_path / "store"
    if not is_clean:
        (store / "abort").write_text("1")
    put = puts[31]
    at = put.offset * 20
    file = (
        store / "consumequeue" / TOPIC / "1" / f"{at // QUEUE_FILE_BYTES * QUEUE_FILE_BYTES:020d}"
    )
    data = bytearray(file.read_bytes())
    data[at % QUEUE_FILE_BYTES + 7 - bit // 8] ^= 1 << bit % 8
    file.write_bytes(data)
    taken, bounds = take(store)
    if is_clean:
        assert not taken.holes
        assert taken.raw[put.queue][put.offset] == put.raw
    assert set(taken.holes) <= {put.queue}  # a start after a crash does not look at it again
    assert bounds == {MessageQueue(TOPIC, number): (0, EACH) for number in range(QUEUES)}


@pytest.mark.parametrize("bit", [0, 5, 17, 31, 32, 50, 62, 63])
@pytest.mark.parametrize("which", [0, 31, QUEUES * EACH - 1], ids=["first", "middle", "last"])
@pytest.mark.parametrize("is_clean", [True, False])
def test_a_flipped_tag_code_is_that_of_the_record(
    tmp_path: Path, puts: list[Put], which: int, bit: int, is_clean: bool
):
    """Who filters by it would never see the message."""
    store = tmp_path / "store"
    if not is_clean:
        (store / "abort").write_text("1")
    flip_entry(store, puts[which].queue, puts[which].offset, bit)
    opened = following.open_store(store)
    for taken in (following.follow_all(opened, 5_000), following.read_all(opened)):
        codes = [found.tag_code for queue in taken.messages.values() for found in queue.values()]
        assert codes == [tag_hash("a")] * len(puts)
        assert opened.report().wrong_tag_codes == 1
    opened.close()


@pytest.mark.parametrize(
    ("name", "queue", "count"),
    [
        ("s01-basic", MessageQueue("orders", 1), 2),
        ("s11-lmq-batchcq", MessageQueue("devices", 0), 2),
        ("s11-lmq-batchcq", MessageQueue("grouped", 1), 20),  # two batches of ten
        ("s03-transactions", None, 2),
    ],
)
def test_flipped_tag_codes_of_a_broker_s_queues(
    name: str, queue: MessageQueue | None, count: int, tmp_path: Path
):
    """Plain and batch queues, listed in light ones too, with tags and without: what Java had said before comes back."""
    store, truth = following.unpack(name, tmp_path), following.expected(name)
    queue = queue or min(truth.messages)
    file = min(
        path
        for row in ("consumequeue", "batchconsumequeue")
        for path in (store / row / queue.topic / str(queue.queue_id)).glob("0*")
    )
    unit = 20 if file.parts[-4] == "consumequeue" else 46
    data = bytearray(file.read_bytes())
    for at in (2 * unit + 12, 5 * unit + 19):
        data[at] ^= 0x10
    file.write_bytes(data)
    opened = following.open_store(store)
    assert following.follow_all(opened, 3_000).messages == truth.messages
    assert following.read_all(opened, 20_000, 50).messages == truth.messages
    assert opened.report().wrong_tag_codes == count
    opened.close()


@pytest.mark.parametrize("name", captures.NAMES)
def test_no_tag_code_of_a_broker_is_wrong(name: str, tmp_path: Path):
    """Nor of several tags in one, and of a retried or delayed message."""
    opened = following.open_store(following.unpack(name, tmp_path))
    following.follow_all(opened)
    following.read_all(opened)
    assert opened.report().wrong_tag_codes == 0
    opened.close()


def test_a_record_with_several_tags_has_the_code_of_their_text(tmp_path: Path):
    """The flag says that there are several; a broker takes the hash of all of it."""
    broker = FakeBroker(tmp_path / "store")
    broker.start()
    broker.put(3, sys_flag=MULTI_TAGS)
    broker.stop()
    opened = following.open_store(broker.store)
    taken = following.follow_all(opened)
    codes = [found.tag_code for found in taken.messages[MessageQueue(TOPIC, 0)].values()]
    assert codes == [tag_hash("a")] * 3
    assert opened.report().wrong_tag_codes == 0
    opened.close()


def test_a_far_jump_on_which_two_records_agree_is_a_range(tmp_path: Path):
    """Of very many offsets nothing is listed: the next batch begins behind them, and no item stands for any."""
    broker = FakeBroker(tmp_path / "store")
    broker.start()
    broker.put(5)
    queue = MessageQueue(TOPIC, 0)
    far = broker.offsets[queue] = 1 << 40
    for _ in range(3):
        broker.append()
    broker.stop()
    taken, bounds = take(broker.store)
    assert bounds == {queue: (0, far + 3)}
    assert taken.gaps == [(queue, 5, far)]
    assert not taken.holes
    assert sorted(taken.raw[queue]) == [*range(5), far, far + 1, far + 2]


def test_a_topic_deleted_and_made_again_does_not_get_its_old_records_back(tmp_path: Path):
    """What no entry lists and lies before all that the queue lists is of another incarnation."""
    broker = FakeBroker(tmp_path / "store")
    broker.start()
    broker.put(12)
    shutil.rmtree(broker.store / "consumequeue" / TOPIC)
    broker.offsets.clear()
    broker.put(4)
    broker.stop()
    taken, bounds = take(broker.store)
    queue = MessageQueue(TOPIC, 0)
    assert bounds == {queue: (0, 4)}
    assert sorted(taken.raw[queue]) == [0, 1, 2, 3]


def test_told_to_stop_a_follower_ends_in_the_middle_of_a_long_offset_range(tmp_path: Path):
    """What the log's order does not give is taken batch by batch: it stops between two of them."""
    broker = FakeBroker(tmp_path / "store")
    fill(broker)
    store = following.open_store(broker.store)
    asked = 0

    def stop() -> bool:
        nonlocal asked
        asked += 1
        return True

    follower = store.follow({}, stop)
    queue = MessageQueue(TOPIC, 0)
    follower.seek(queue, QueueOffset(0))
    for _ in range(3):
        follower.poll(1 << 20)
    assert asked
    follower.close()
    store.close()


# -- the pure functions ---------------------------------------------------------------------------


@given(
    start=st.integers(0, 1 << 40),
    count=st.integers(2, 30),
    blow=st.tuples(st.integers(0, 29), st.integers(0, 63)),
    knows=st.tuples(st.booleans(), st.booleans()),
)
def test_one_flipped_offset_is_found_and_put_where_it_belongs(
    start: int,
    count: int,
    blow: tuple[int, int],
    knows: tuple[bool, bool],
):
    """All others stay where they are, whatever the bit, unless nothing at all is there to compare."""
    which, bit = blow[0] % count, blow[1]
    knows_low, knows_high = knows
    if count == 2 and not (knows_low or knows_high):
        return  # one says this, one says that
    offsets = np.arange(start, start + count, dtype=np.int64)
    true = offsets.copy()
    offsets[which] = struct.unpack(">q", (int(true[which]) ^ 1 << bit).to_bytes(8, "big"))[0]
    low = start if knows_low else None
    high = start + count if knows_high else None
    found = place(offsets, np.ones(count, np.int64), np.zeros(count, np.int64), low, high)
    assert found[np.arange(count) != which].tolist() == true[np.arange(count) != which].tolist()
    if which or knows_low or count > 2:
        assert found[which] == true[which]


@given(st.lists(st.integers(1, 40), min_size=1, max_size=20), st.integers(0, 1 << 40))
def test_a_sound_chain_stays_as_it_is(counts: list[int], start: int):
    """Batches of any size, listed or not."""
    sizes = np.array(counts, np.int64)
    offsets = start + np.cumsum(sizes) - sizes
    lost = np.zeros(len(sizes), np.int64)
    assert place(offsets, sizes, lost, None, None).tolist() == offsets.tolist()
    assert place(offsets, sizes, lost, start, None).tolist() == offsets.tolist()


@pytest.mark.parametrize(("lost", "at"), [(0, 4), (90, 4), (91 * 5, 9)])
def test_offsets_are_left_out_only_where_the_log_lost_as_much(lost: int, at: int):
    """Queue offsets 0 to 3, then one that says 9."""
    offsets = np.array([0, 1, 2, 3, 9], np.int64)
    between = np.array([0, 0, 0, 0, lost], np.int64)
    found = place(offsets, np.ones(5, np.int64), between, 0, None)
    assert found.tolist() == [0, 1, 2, 3, at]


@pytest.mark.parametrize(
    ("facts", "case"),
    [
        ({"is_written": False}, Case.MISSING),
        ({"is_within": False}, Case.DANGLING),
        ({"is_sound": False, "is_trace": False}, Case.DANGLING),
        ({"is_sound": False}, Case.DAMAGED),
        ({"agrees": True}, Case.LISTED),
        ({"is_other_listed": True}, Case.FOREIGN),
        ({}, Case.DAMAGED),
    ],
)
def test_the_table_of_entries(facts: dict[str, bool], case: Case):
    usual = dict.fromkeys(("is_written", "is_within", "is_sound", "is_trace"), True)
    usual |= {"agrees": False, "is_other_listed": False}
    given_facts = {name: np.array([fact]) for name, fact in (usual | facts).items()}
    assert classify_entries(**given_facts).tolist() == [case]


@pytest.mark.parametrize(
    ("facts", "case"),
    [
        ({"is_message": False}, Case.NO_MESSAGE),
        ({"is_other_listed": True}, Case.DROPPED),
        ({"is_taken": True}, Case.DROPPED),
        ({}, Case.COUNTS),
        ({"fits": False}, Case.MISPLACED),
    ],
)
def test_the_table_of_orphans(facts: dict[str, bool], case: Case):
    usual = {"is_message": True, "is_other_listed": False, "is_taken": False, "fits": True}
    given_facts = {name: np.array([fact]) for name, fact in (usual | facts).items()}
    assert classify_orphans(**given_facts).tolist() == [case]


@pytest.mark.parametrize(
    ("code", "options", "is_wrong"),
    [
        (97, {}, False),
        (98, {}, True),
        (0, {}, True),
        (0, {"is_live": True}, False),  # not written yet
        (-(1 << 32), {"is_live": True}, False),  # its lower half
        (98, {"is_live": True}, True),
        (-(1 << 40), {}, True),
        (-(1 << 40), {"has_ext": True}, False),  # an address
        (98, {"has_ext": True}, True),
    ],
)
def test_the_table_of_tag_codes(code: int, options: dict[str, bool], is_wrong: bool):
    """Of the last of two entries; only that may be half written."""
    codes, hashes = np.array([0, code], np.int64), np.array([5, 97], np.int64)
    usual = {"has_ext": False, "is_live": False}
    assert are_wrong_tags(codes, hashes, **(usual | options)).tolist() == [True, is_wrong]
