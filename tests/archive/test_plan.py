"""Planning by ranges of queue offsets, at the size of a large tier; and the log's state as JSON."""

from __future__ import annotations

import gc
import hashlib
import json
import os
import time
from dataclasses import replace
from pathlib import Path

import pytest
from support.bundles import made_part

from tiered.api.broker_place import Place
from tiered.archive import moves
from tiered.archive.columns import schema
from tiered.archive.machine import ArchiveMachine, ArchiveState, archive_action, forget_action
from tiered.archive.model import (
    Archived,
    ArchiveLane,
    ParquetFile,
    SideFile,
    date_text,
    partition_value,
)
from tiered.archive.plan import plan_archive
from tiered.archive.selection import selection_of
from tiered.archive.tables import plan_files
from tiered.journal.checkpoint import CheckpointText, decode_checkpoint, encode_pieces
from tiered.journal.entry import Entry
from tiered.log.parts import Parts, QueueLife, Segment, TierState
from tiered.model import LogOffset, MessageQueue, QueueOffset

PLACE = Place("c", "b")
COUNT = 100
"""Messages of a segment."""
SECONDS_MAX = 120.0
"""Ten times what it takes here beside a full load; quadratic work would take hours."""


def segment(number: int, count: int = COUNT) -> Segment:
    base, first = LogOffset(number * 1000), QueueOffset(number * COUNT)
    times = number * 10, number * 10 + 9
    part = made_part(first, base, count, key=f"log-{number}", times=times, last=7)
    return Segment(base, first, 0, sealed=True, parts=Parts.of([part]))


def tier(queues: int, segments: int) -> TierState:
    rows = tuple(segment(number) for number in range(segments))
    end = QueueOffset(segments * COUNT)
    life = QueueLife(0, QueueOffset(0), end, LogOffset(segments * 1000), rows)
    return TierState(queues={MessageQueue("t", number): (life,) for number in range(queues)})


def archived(number: int) -> Archived:
    low, high = number * COUNT, (number + 1) * COUNT
    file = ParquetFile(f"k-{number}", low, high, COUNT, 9, 9, number * 10, number * 10 + 9, 5, 5)
    return Archived(low, high, 0, 0, 1000, (file,), None, ((f"log-{number}", "etag"),))


def state(queues: int, numbers: range) -> ArchiveState:
    found = tuple(map(archived, numbers))
    return ArchiveState({ArchiveLane("c", "b", "t", queue, 0): found for queue in range(queues)})


def plan(tier_state: TierState, archive: ArchiveState):
    return plan_archive(tier_state, PLACE, archive, takes=lambda _topic: True)


@pytest.mark.parametrize("queues", [5, pytest.param(100, marks=pytest.mark.slow)])
def test_a_thousand_segments_a_queue_of_which_nine_in_ten_are_archived(queues: int) -> None:
    there, known = tier(queues, 1000), state(queues, range(900))
    machine = ArchiveMachine()
    data = encode_pieces(1, 2, machine.dump_pieces(known))
    assert data is not None
    began_s = time.monotonic()
    loaded = machine.load(decode_checkpoint(data, where="x").state)
    found = plan(there, loaded)
    assert time.monotonic() < began_s + SECONDS_MAX
    assert loaded == known
    assert (len(found.tasks), found.archived_segments) == (100 * queues, 900 * queues)


def test_a_segment_that_was_joined_afterwards_is_archived_as_far_as_it_is_not() -> None:
    joined = replace(segment(0), parts=Parts.joined(segment(n).parts for n in range(3)))
    life = QueueLife(0, QueueOffset(0), QueueOffset(3 * COUNT), LogOffset(3000), (joined,))
    there = TierState(queues={MessageQueue("t", 0): (life,)})
    found = plan(there, state(1, range(1, 2))).tasks
    assert [(task.start, task.end, len(task.parts)) for task in found] == [
        (0, COUNT, 1),
        (2 * COUNT, 3 * COUNT, 1),
    ]


def test_other_brokers_incarnations_and_queues_do_not_count() -> None:
    lanes = state(1, range(1)).lanes
    ((lane, stretches),) = lanes.items()
    others = [replace(lane, broker="x"), replace(lane, incarnation=1), replace(lane, queue_id=1)]
    known = ArchiveState(dict.fromkeys(others, stretches))
    assert len(plan(tier(1, 1), known).tasks) == 1


def test_the_state_survives_json_and_replay_from_actions_gives_the_same() -> None:
    lane, machine = ArchiveLane("c", "b", "t", 0, 0), ArchiveMachine()
    side = SideFile("_bad/k", 2, 3, 4)
    second = replace(archived(1), holes=1, bad=1, files=(replace(archived(1).files[0], rows=98),))
    second = replace(second, side=side)
    actions = [archive_action(lane, archived(2), 0), archive_action(lane, second, 0)]
    actions += [forget_action(lane, [200], "mark"), archive_action(lane, archived(2), 1)]
    entry = Entry(1, 0, "0badcafe", 5, json.loads(json.dumps(actions)))
    found = machine.apply(machine.initial(), entry)
    assert found == ArchiveState({lane: (second, archived(2))}, {lane: ("mark",)}, 0, 5)
    data = encode_pieces(1, 2, machine.dump_pieces(found))
    assert data is not None
    assert decode_checkpoint(data, where="x") == CheckpointText(1, 2, machine.dump(found))
    assert machine.load(json.loads(json.dumps(machine.dump(found)))) == found


def test_files_are_chosen_by_what_the_log_says() -> None:
    known = state(2, range(10))
    wanted = selection_of({"topic": "t", "from": "25", "until": "45", "queue": "1"})
    found = plan_files(known, wanted)
    assert [file.key for file in found.files] == ["k-2", "k-3", "k-4"]
    assert found.files_left.total() == 7, "a key counts once, though two queues name it"


def test_names_of_partitions() -> None:
    assert partition_value("%RETRY%group") == "%25RETRY%25group"
    assert partition_value("plain-name_1.x") == "plain-name_1.x"
    assert partition_value("007") == "007~"
    assert partition_value("-1") == "-1~"
    assert partition_value("NULL") == "NULL~"
    long = [partition_value("ä" * 100 + end) for end in "ab"]
    assert len(set(long)) == 2
    assert all(len(f"topic_dir={value}") <= 255 for value in long)
    assert [date_text(day) for day in (0, 19_676, -400_000, -719_162, -719_163, 10**9)] == [
        "1970-01-01",
        "2023-11-15",
        "0874-11-02",
        "0001-01-01",
        "day-719163",
        "day1000000000",
    ]


def test_spark_s_schema_is_ours() -> None:
    from tiered.spark.source import DDL

    assert [column.split()[0] for column in DDL.split(", ")] == schema().names


CPU_SECONDS_MAX = 10.0
MIB_MAX = 400


@pytest.mark.slow
def test_a_million_segments_of_which_ninety_nine_in_a_hundred_are_archived() -> None:
    """Loaded and planned within ten CPU seconds and 400 MiB; ``pytest -s`` tells what it took."""
    queues = 1000
    there, machine = tier(queues, 1000), ArchiveMachine()
    packed = moves.Stretches.of(moves.Stretches(map(_as_long_as_real, range(990))).packed())
    lanes = {ArchiveLane("c", "b", "t", queue, 0): packed for queue in range(queues)}
    data = b"".join(machine.dump_pieces(ArchiveState(lanes)))
    gc.collect()
    before_mib, began_s = _resident_mib(), time.process_time()
    loaded = machine.load(json.loads(data))
    loaded_s, loaded_mib = time.process_time() - began_s, _resident_mib() - before_mib
    found = plan(there, loaded)
    took_s, took_mib = time.process_time() - began_s, _resident_mib() - before_mib
    print(
        f"checkpoint {len(data) >> 20} MiB; loaded in {loaded_s:.1f} CPU s, {loaded_mib} MiB;"
        f" planned: {took_s:.1f} CPU s, {took_mib} MiB"
    )
    assert (len(found.tasks), found.archived_segments) == (10 * queues, 990 * queues)
    assert took_s < CPU_SECONDS_MAX
    assert took_mib < MIB_MAX


def _as_long_as_real(number: int) -> Archived:
    """A stretch whose names and numbers are no shorter than real ones."""
    one = archived(number)
    digest = hashlib.sha256(b"%d" % number).hexdigest()
    key = f"data/topic_dir=orders/date=2026-03-07/{number % 8}-{digest[:16]}.parquet"
    size, crc = int(digest[16:23], 16), int(digest[24:32], 16)
    file = replace(one.files[0], key=key, size_bytes=size, crc=crc, body_crc_sum=crc * 100)
    source = f"bundle/{int(digest[32:40], 16):020d}", digest[:32]
    return replace(one, files=(file,), sources=(source,))


def _resident_mib() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") >> 20


def test_planning_looks_at_no_stretch_of_a_queue_that_did_not_change(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The columns tell; what is packed is unpacked only where a segment is not plainly archived or plainly new."""
    machine, known = ArchiveMachine(), state(3, range(900))
    changed = next(iter(known.lanes))
    stretches = list(known.lanes[changed])
    odd = (*stretches[:400], replace(stretches[400], end=stretches[400].end - 1, bad=1))
    lanes = {**known.lanes, changed: (*odd, *stretches[401:])}
    loaded = machine.load(json.loads(json.dumps(machine.dump(ArchiveState(lanes)))))
    looked: list[int] = []
    plain = moves.Packed.rows

    def rows(self: moves.Packed) -> tuple[Archived, ...]:
        looked.append(int(self.columns[0, 0]))
        return plain(self)

    monkeypatch.setattr(moves.Packed, "rows", rows)
    found = plan(tier(3, 1000), loaded)
    assert len(found.tasks) == 3 * 100 + 1
    assert set(looked) <= {stretches[n].start for n in range(256, 512, 128)}
    assert looked
