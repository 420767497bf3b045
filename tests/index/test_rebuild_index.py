"""``tiered rebuild --index``, and what gc makes of index objects that nobody names any more."""

from __future__ import annotations

import json
import random
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from support import captures
from support.command_line import here
from support.journals import PREFIX
from support.keyed import Mail, batch_of
from support.tiers import PLACE, TierBuilder

from backends.memory import MemoryStore
from backends.wrapping import WrappingStore
from tiered.clock import ManualClock
from tiered.errors import FencedError
from tiered.journal.lease import Holder, Lease
from tiered.keys import JOURNAL
from tiered.log.parts import queue_action
from tiered.log.verify import verify_tier
from tiered.model import MessageQueue
from tiered.upkeep.rebuild import DroppedIndex, apply_rebuild_index, plan_rebuild_index
from tiered.upkeep.workplace import Workplace, in_new_epoch, journal_writer

if TYPE_CHECKING:
    from pathlib import Path

    from tiered.journal.append import JournalWriter
    from tiered.log.state import TierState

SMALL = ("--bundle-size", "16KiB", "--index-items", "2000")


@pytest.fixture
def url(tmp_path: Path) -> str:
    """A tier of a captured store, with several index objects."""
    store = captures.unpack("s01-basic", tmp_path)
    found = f"file://{tmp_path}/tier"
    here("attach", store, "--to", found, "--once", *SMALL).good()
    return found


def objects(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "tier").glob("*/*/index/*"))


def unindexed(url: str) -> int:
    return int(here("verify", url, "--json").document["recorded"]["unindexed_messages"])


def plan_of(url: str, *options: str) -> Any:
    return here("rebuild", url, "--index", "--json", *options).good().document


def answers(url: str) -> list[bytes]:
    return [here("query", url, "orders", "--key", f"key-{n}").good().out for n in range(0, 40, 9)]


def test_a_whole_index_leaves_nothing_to_do(url: str, tmp_path: Path):
    assert len(objects(tmp_path)) >= 2
    plan = plan_of(url, "--apply", "-")
    assert (plan["drop"], plan["unindexed_messages"], plan["applied"]) == ([], 0, None)
    assert here("rebuild", url, "--index", "--exit-code").good()


def test_lost_and_damaged_objects_are_made_again(url: str, tmp_path: Path):
    before = answers(url)
    first, *_, last = objects(tmp_path)
    first.unlink()
    data = bytearray(last.read_bytes())
    data[40] ^= 1
    last.write_bytes(data)
    plan = plan_of(url)
    assert sorted(one["reason"].partition(":")[0] for one in plan["drop"]) == ["block", "missing"]
    assert here("rebuild", url, "--index", "--exit-code").code == 1
    assert here("query", url, "orders", "--key", "key-9").code == 5
    applied = plan_of(url, "--apply", "-")["applied"]
    assert (applied["dropped"], applied["unindexed_messages"], applied["damaged"]) == (2, 0, [])
    assert answers(url) == before
    assert here("verify", url, "--deep").good()


def test_a_tier_that_never_had_an_index_gets_one(tmp_path: Path):
    store, url = captures.unpack("s04-batch-compress", tmp_path), f"file://{tmp_path}/tier"
    here("attach", store, "--to", url, "--once", "--no-index").good()
    assert unindexed(url) > 0
    file = tmp_path / "plan.json"
    here("rebuild", url, "--index", "--plan", file).good()
    assert json.loads(file.read_text())["unindexed_messages"] == unindexed(url)
    here("rebuild", url, "--index", "--apply", file).good()
    assert unindexed(url) == 0
    assert "it is of `tiered rebuild --index`" in here("gc", url, "--apply", file).error


def test_a_lost_journal_gives_the_index_up_and_the_next_writer_makes_it(url: str, tmp_path: Path):
    before = answers(url)
    for path in (tmp_path / "tier").glob("*/*/journal/*"):
        path.unlink()
    notes = here("rebuild", url, "--apply", "-", "--json").good().document["notes"]
    assert any("the key index" in note for note in notes)
    assert unindexed(url) == 2613
    here("attach", tmp_path / "s01-basic", "--to", url, "--once").good()
    assert (unindexed(url), answers(url)) == (0, before)


def test_gc_deletes_what_was_dropped_and_nothing_else(url: str, tmp_path: Path):
    lost, *_ = objects(tmp_path)
    data = bytearray(lost.read_bytes())
    data[-5] ^= 1
    lost.write_bytes(data)
    plan_of(url, "--apply", "-")
    kept = [path for path in objects(tmp_path) if path != lost]
    time.sleep(0.01)
    for _ in range(2):  # the first run still has it in the history of its grace
        plan = here("gc", url, "--grace", "1ms", "--apply", "-", "--json").good().document
        time.sleep(0.01)
        if objects(tmp_path) == kept:
            break
    assert objects(tmp_path) == kept, plan
    assert here("verify", url, "--deep", "--strict").good()


def unindexed_tier() -> tuple[Workplace, MemoryStore]:
    store, clock = MemoryStore(), ManualClock()
    builder = TierBuilder(store)
    for number in range(6):
        queue = MessageQueue("t", number)
        builder.add([b"body %d" % (10 * number + n) for n in range(10)], queue=queue)
    return Workplace(store, store, PLACE, clock, random.Random(5)), store


def test_epochs_of_those_who_only_tidy_up_do_not_end_it():
    at, _ = unindexed_tier()
    plan = plan_rebuild_index(at)
    other = replace(at, rng=random.Random(6))
    taken: list[int] = []

    def told(_what: str, _done: int, _total: int) -> None:
        taken.append(in_new_epoch(other).epoch)  # as gc does, with no writer alive

    done = apply_rebuild_index(at, plan, items_max=1, told=told)
    assert taken
    assert done["epoch"] > taken[-1]
    assert (done["unindexed_messages"], done["damaged"]) == (0, [])
    assert verify_tier(at.store, PREFIX, deep=True).problems == []
    again = apply_rebuild_index(at, plan, items_max=1)
    assert (again["was_applied"], again["objects"]) == (True, 0)


def test_a_living_writer_ends_it():
    at, store = unindexed_tier()
    plan = plan_rebuild_index(at)
    holder = Holder("elsewhere", "b", "s", 1, 1)
    lease = Lease(store, PREFIX, writer="33333333", holder=holder, seconds=1e6, clock=at.clock)

    def told(_what: str, _done: int, _total: int) -> None:
        if lease.try_acquire() is None:
            TierBuilder(store, writer="33333333")

    with pytest.raises(FencedError, match="a writer is at work"):
        apply_rebuild_index(at, plan, items_max=1, told=told)


def test_what_expires_beside_it_is_not_dropped_over_and_over():
    """An expiry drops the objects that are of no use any more; then a list with one of them drops nothing."""
    at, store = unindexed_tier()
    builder = TierBuilder(store, writer="33333333")
    for number in range(6, 9):
        queue = MessageQueue("t", number)
        mails = [Mail(keys=(f"{number}-{n}",)) for n in range(10)]
        builder.add_batch(batch_of(queue, 0, mails))
    apply_rebuild_index(at, plan_rebuild_index(at), items_max=1)
    made = journal_writer(at).state.indexes
    first, second = (
        next(one.place.key for one in made if one.covers[-1].queue.queue_id == number)
        for number in (7, 8)
    )
    queue = MessageQueue("t", 8)
    in_new_epoch(at, lambda journal: seal(journal, queue))

    class Racing(WrappingStore):
        has_come, entries = False, 0

        def put_if_absent(self, key: str, data: Any) -> None:
            if JOURNAL in key and first.encode() in bytes(data) and b'"drop"' in bytes(data):
                self.entries += 1
                assert self.entries < 5
                if not self.has_come:
                    self.has_come = True
                    place = {"position": 0, "min_from": 0, "min_to": 10}
                    journal_writer(at).append([queue_action("expire", queue, 0, **place)])
            super().put_if_absent(key, data)

    racing = Racing(store)
    plan = plan_rebuild_index(at)
    dropped = tuple(DroppedIndex(key, "made so") for key in (first, second))
    plan = replace(plan, steps=dropped)
    done = apply_rebuild_index(replace(at, bare=racing, rng=random.Random(8)), plan, items_max=10)
    assert done["unindexed_messages"] == 0
    named = {one.place.key for one in journal_writer(at).state.indexes}
    assert not {first, second} & named


def seal(journal: JournalWriter[TierState], queue: MessageQueue) -> None:
    (incarnation,) = journal.state.queues[queue]
    base = incarnation.segments[-1].base_offset
    journal.append([queue_action("seal", queue, incarnation.number, segment=base)])
