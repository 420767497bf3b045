"""Planning by ranges of queue offsets, at the size of a large tier; and the log's state as JSON."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from support.archive_states import COUNT, archived, plan, segment, state, tier
from support.archives_made import loaded
from support.work import calls

from tiered.archive.archived import OffsetRanges
from tiered.archive.columns import schema
from tiered.archive.machine import ArchiveMachine, ArchiveState, archive_action, forget_action
from tiered.archive.model import (
    ArchiveQueue,
    SideFile,
    Truncation,
    date_text,
    partition_value,
)
from tiered.archive.selection import selection_of
from tiered.archive.tables import plan_files
from tiered.journal.entry import Entry
from tiered.log.parts import Incarnation, Parts, TierState
from tiered.model import LogOffset, MessageQueue, QueueOffset

if TYPE_CHECKING:
    from tiered.archive.plan import Plan

CALLS_MAX = 60
"""A segment, twice what it takes here; quadratic work would take thousands."""


@pytest.mark.parametrize("queues", [5, pytest.param(100, marks=pytest.mark.slow)])
def test_a_thousand_segments_a_queue_of_which_nine_in_ten_are_archived(queues: int) -> None:
    there, known = tier(queues, 1000), state(queues, range(900))
    read = loaded(known)
    plans: list[Plan] = []
    assert calls(lambda: plans.append(plan(there, read))) < CALLS_MAX * 1000 * queues
    (found,) = plans
    assert read == known
    assert (len(found.tasks), found.archived_segments) == (100 * queues, 900 * queues)


def test_a_segment_that_was_joined_afterwards_is_archived_as_far_as_it_is_not() -> None:
    joined = replace(segment(0), parts=Parts.joined(segment(n).parts for n in range(3)))
    incarnation = Incarnation(0, QueueOffset(0), QueueOffset(3 * COUNT), LogOffset(3000), (joined,))
    there = TierState(queues={MessageQueue("t", 0): (incarnation,)})
    found = plan(there, state(1, range(1, 2))).tasks
    assert [(task.start, task.end, len(task.parts)) for task in found] == [
        (0, COUNT, 1),
        (2 * COUNT, 3 * COUNT, 1),
    ]


def test_other_brokers_incarnations_and_queues_do_not_count() -> None:
    queues = state(1, range(1)).queues
    ((queue, offset_ranges),) = queues.items()
    others = [replace(queue, broker="x"), replace(queue, incarnation=1), replace(queue, queue_id=1)]
    known = ArchiveState(OffsetRanges.of(dict.fromkeys(others, offset_ranges)))
    assert len(plan(tier(1, 1), known).tasks) == 1


def test_the_state_survives_json_and_replay_from_actions_gives_the_same() -> None:
    queue, machine = ArchiveQueue("c", "b", "t", 0, 0), ArchiveMachine()
    side = SideFile("_bad/k", 2, 3, 4)
    second = replace(archived(1), holes=1, bad=1, files=(replace(archived(1).files[0], rows=98),))
    second = replace(second, side=side)
    actions = [archive_action([(queue, 0, archived(2))]), archive_action([(queue, 0, second)])]
    end = Truncation(9, 200, 300)
    actions += [forget_action(queue, [200], end), archive_action([(queue, 1, archived(2))])]
    entry = Entry(1, 0, "0badcafe", 5, json.loads(json.dumps(actions)))
    found = machine.apply(machine.initial(), entry)
    assert found == ArchiveState(
        OffsetRanges.of({queue: (second, archived(2))}), {queue: (end,)}, 0, 5
    )
    assert loaded(found) == found


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
    from tiered.spark.options import DDL

    assert [column.split()[0] for column in DDL.split(", ")] == schema().names
