"""A log of very many offset ranges: what opening, planning and a checkpoint cost; and that runs say what was archived."""

from __future__ import annotations

import gc
import json
import random
import subprocess
import sys
import weakref
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING
from unittest import mock

import pyarrow as pa
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.archive_jobs import archive, check, job_context
from support.archive_states import COUNT, archived, plan, state, tier
from support.archives_made import loaded
from support.large_log import as_long_as_real
from support.tiers import TierBuilder

from backends.memory import MemoryStore
from backends.wrapping import WrappingStore
from tiered.archive import archived as archived_table
from tiered.archive.archived import GROUP_ROWS, OffsetRanges, SavedRun, _Group, table_of
from tiered.archive.columns import schema, topic_schema
from tiered.archive.job import log_writer
from tiered.archive.machine import ArchiveMachine, ArchiveState, archive_action
from tiered.archive.model import LOG, Archived, ArchiveQueue
from tiered.archive.selection import Selection
from tiered.archive.tables import plan_files
from tiered.errors import DataError
from tiered.journal.entry import Entry, encode_entry
from tiered.journal.replay import JournalReader, trim_journal
from tiered.keys import SHARD, checkpoint_key, entry_key
from tiered.log.parts import Segment, Segments
from tiered.log.state import TierMachine

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

ROOT = Path(__file__).parents[2]
MACHINE = ArchiveMachine()
REQUESTS_MAX, MIB_MAX = 20, 480


def queue(number: int) -> ArchiveQueue:
    return ArchiveQueue("c", "b", "t", number, 0)


# -- planning --------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    "queues", [1000, pytest.param(10_000, marks=[pytest.mark.slow, pytest.mark.timeout(900)])]
)
def test_planning_where_ninety_nine_in_a_hundred_are_archived(queues: int, tmp_path: Path) -> None:
    """A hundred segments of each queue, in a process of its own; ``pytest -s`` tells what it took."""

    def call(code: str) -> str:
        words = [sys.executable, "-c", f"from support.large_log import *; {code}"]
        ran = subprocess.run(
            words, check=True, stdout=subprocess.PIPE, cwd=ROOT, env={"PYTHONPATH": "tests:."}
        )
        return ran.stdout.decode()

    call(f"make({str(tmp_path)!r}, {queues})")
    found = json.loads(call(f"measure({str(tmp_path)!r})"))
    print(found)
    assert (found["tasks"], found["archived"]) == (queues - 4, 99 * queues + 4)
    assert found["requests"] <= REQUESTS_MAX
    assert found["archive_mib"] + found["tier_mib"] + found["plan_mib"] <= MIB_MAX


def test_planning_looks_at_no_offset_range_of_a_queue_that_did_not_change(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The columns tell; a range is unpacked, and a segment made, only where it is not plainly archived or plainly new."""
    known = state(3, range(900))
    changed = next(iter(known.queues))
    one = known.queues[changed][400]
    draft = known.queues.draft()
    draft.put(changed, replace(one, end=one.end - 1, bad=1))
    read = loaded(ArchiveState(draft))
    looked: list[Archived] = []
    plain = _Group.offset_ranges

    def some(self: _Group, first: int, last: int) -> Iterator[Archived]:
        found = list(plain(self, first, last))
        looked.extend(found)
        return iter(found)

    monkeypatch.setattr(_Group, "offset_ranges", some)
    there = TierMachine().load(TierMachine().dump(tier(3, 1000)))
    made: list[Segment] = []
    of_row = Segments._segment
    monkeypatch.setattr(Segments, "_segment", lambda *of: made.append(of_row(*of)) or made[-1])
    assert len(plan(there, read).tasks) == 3 * 100 + 1
    assert [found.start for found in looked] == [one.start]
    assert len(made) == 3 * (100 + 1) + 1, "those that are not archived, and the last of each queue"


# -- runs ------------------------------------------------------------------------------------------

OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["add", "add", "change", "remove", "settle", "read"]),
        st.integers(0, 2),
        st.integers(0, 40),
    ),
    max_size=60,
)


def again(found: OffsetRanges) -> OffsetRanges:
    """As somebody else reads it."""
    return OffsetRanges([SavedRun(run.data) for run in found.runs])


@pytest.mark.slow
@given(OPERATIONS)
def test_runs_say_what_was_archived(steps: Sequence[tuple[str, int, int]]) -> None:
    """Whether they are joined at once, later or never."""
    plain: dict[int, dict[int, Archived]] = {0: {}, 1: {}, 2: {}}
    found = OffsetRanges()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tiered.archive.archived.SMALL_BYTES", 0)
        patch.setattr("tiered.archive.archived.GROUP_ROWS", 4)
        for what, at, number in steps:
            mine, before = plain[at], dict(found)
            draft = found.draft()
            if what == "add" and number not in mine:
                mine[number] = archived(number)
                draft.put(queue(at), mine[number])
            elif what == "change" and number in mine:
                mine[number] = replace(mine[number], bad=mine[number].bad + 1)
                draft.put(queue(at), mine[number])
            elif what == "remove" and number in mine:
                draft.remove(queue(at), mine.pop(number).start)
            elif what in {"settle", "read"}:
                patch.setattr("tiered.archive.archived._GROWTH", number % 3)
                draft = found.settled()
                draft = again(draft) if what == "read" else draft
            assert found == before, "what was known stays what it was"
            found = draft
            keys = Counter(
                file.key for some in plain.values() for o in some.values() for file in o.files
            )
            assert found.count_of(queue(at), f"k-{number}") == keys[f"k-{number}"]
            low, high = number * COUNT - 7, number * COUNT + 7
            near = [mine[n] for n in (number - 1, number) if n in mine]
            assert found.around(queue(at), low, high) == near
        saved = found.settled()
        for one in (found, saved, again(saved)):
            assert one == {
                queue(at): tuple(mine[number] for number in sorted(mine))
                for at, mine in plain.items()
                if mine
            }
        assert saved.settled() is saved, "what did not change makes no run"


def test_what_went_stays_away_when_only_newer_runs_are_joined(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tiered.archive.archived.SMALL_BYTES", 0)
    every = tuple(as_long_as_real(0, number) for number in range(1200))
    saved = OffsetRanges.of({queue(0): every}).settled()
    for gone in (5, 7):
        draft = saved.draft()
        draft.remove(queue(0), every[gone].start)
        saved = draft.settled()
    assert [len(run.numbers[0]) for run in saved.runs] == [1200, 2]
    assert again(saved) == {queue(0): (*every[:5], every[6], *every[8:])}


def test_a_run_that_was_joined_is_held_no_longer() -> None:
    first = OffsetRanges.of({queue(0): (archived(1),), queue(1): (archived(1),)}).settled()
    draft = first.draft()
    draft.put(queue(1), archived(2))
    second = draft.settled()
    gone = weakref.ref(first.runs[0])
    assert first.runs[0] not in second.runs
    del first, draft
    gc.collect()
    assert gone() is None


@pytest.mark.slow
def test_what_checkpoints_write_follows_what_is_archived(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each offset range is written a logarithm of times, and few shards say all of it."""
    monkeypatch.setattr("tiered.archive.archived.SMALL_BYTES", 1 << 12)
    store, queues, entries, each = MemoryStore(), 40, 400, 12
    log = JournalReader(store, LOG, MACHINE)
    written: dict[str, int] = {}
    sizes: list[int] = []

    def put(key: str, data: bytes) -> None:
        assert key not in written
        written[key] = len(data)

    known = MACHINE.initial()
    for number in range(1, entries + 1):
        actions = [
            archive_action([(queue(at), 0, as_long_as_real(at, number))])
            for at in (random.Random(number).sample(range(queues), each))
        ]
        known = MACHINE.apply(log.state, Entry(number, 0, "0badcafe", 5, actions))
        log.place(known, number)
        if not number % 4:
            log.store_checkpoint(put)
            each_bytes = [len(run.data) for run in log.state.queues.runs]
            sizes.append(len(each_bytes))
            assert all(one > 2 * two for one, two in pairwise(each_bytes))
    assert log.state.refused == 0
    wrote = sum(size for key, size in written.items() if key.startswith(f"{LOG}{SHARD}"))
    held = sum(len(run.data) for run in log.state.queues.runs)
    offset_ranges = entries * each
    assert held < 120 * offset_ranges
    assert wrote < 10 * held
    assert max(sizes) <= 6
    documents = [size for key, size in written.items() if "checkpoint" in key]
    assert max(documents) < 1000, "no checkpoint has an offset range itself"


def test_anybody_reads_a_run_as_parquet() -> None:
    one, two = archived(1), replace(archived(2), bad=3)
    run = SavedRun.of([table_of([(queue(0), one), (queue(0), two), (queue(1), GONE)])])
    assert run.queues == {queue(0): (0, 2), queue(1): (2, 3)}
    assert run.numbers.tolist() == [
        [100, 200, 0],
        [200, 300, 0],
        [10, 20, -1],
        [19, 29, -1],
        [0, 3, 0],
        [0, 0, 0],
    ]
    assert again(OffsetRanges([run])) == {queue(0): (one, two)}
    told = pa.parquet.read_table(pa.BufferReader(run.data)).to_pylist()
    assert [(row["topic"], row["queue_id"], row["start"]) for row in told] == [
        (b"t", 0, 100),
        (b"t", 0, 200),
        (b"t", 1, 0),
    ]
    assert told[0]["files"][0]["key"] == b"k-1"
    assert told[0]["sources"] == [{"key": b"log-1", "version": b"etag"}]


GONE = Archived(0, 0, 0, 0, 0, (), None, ())


def run_of(*rows: tuple[int, int, int]) -> bytes:
    """Of queues and offsets."""
    made = [(queue(at), replace(archived(0), start=low, end=high)) for at, low, high in rows]
    with mock.patch.object(SavedRun, "__init__", lambda self, data: setattr(self, "data", data)):
        return SavedRun.of([table_of(made)]).data


def parquet(table: pa.Table, **options: object) -> bytes:
    sink = pa.BufferOutputStream()
    pa.parquet.write_table(table, sink, store_schema=False, **options)
    return sink.getvalue().to_pybytes()


SOUND = table_of([(queue(0), archived(number)) for number in range(3)])
WHOLE = run_of((0, 0, 5))
HARMS: Mapping[str, bytes] = {
    "no run": b"PAR1",
    "cut": WHOLE[:-9],
    "longer": WHOLE + b"x",
    "overlap": run_of((0, 0, 10), (0, 9, 20)),
    "not in order": run_of((0, 10, 20), (0, 0, 5)),
    "twice": run_of((0, 10, 20), (0, 10, 10)),
    "ends before it begins": run_of((0, 10, 5)),
    "before the first": run_of((0, -1, 5)),
    "a queue twice": run_of((0, 0, 5), (1, 0, 5), (0, 5, 6)),
    "nothing": parquet(SOUND.slice(0, 0)),
    "a column less": parquet(SOUND.drop_columns(["unfit"])),
    "another column": parquet(SOUND.append_column("more", [[1, 2, 3]])),
    "a column of other values": parquet(SOUND.set_column(5, "start", [["1", "2", "3"]])),
    "values that are not there": parquet(SOUND.set_column(5, "start", [[1, None, 3]])),
    "small row groups": parquet(SOUND, row_group_size=2),
    "large row groups": parquet(SOUND.take([0] * 1200)),
    "a great many": parquet(SOUND.take([0] * 200_000), compression="zstd"),
}


@pytest.mark.parametrize("harm", HARMS)
def test_what_is_no_run_is_refused(harm: str) -> None:
    assert SavedRun(WHOLE).queues == {queue(0): (0, 1)}
    with pytest.raises((ValueError, TypeError, LookupError)):
        SavedRun(HARMS[harm])


def test_runs_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(ValueError, match="overlap"):
        OffsetRanges([SavedRun(run_of((0, 0, 10))), SavedRun(run_of((0, 5, 15)))])


# -- checkpoints of shards -------------------------------------------------------------------------


def a_log(
    store: MemoryStore, entries: int, checkpoints: Sequence[int]
) -> JournalReader[ArchiveState]:
    """With an entry for each offset range of a queue, up to some number, and checkpoints behind some."""
    log = replayed(store)
    for number in range(log.number + 1, entries + 1):
        actions = [archive_action([(queue(0), 0, as_long_as_real(0, number))])]
        entry = Entry(number, 0, "0badcafe", 5, actions, log.last)
        data = encode_entry(entry)
        store.put_if_absent(entry_key(LOG, number), data)
        log.apply(entry, data)
        if number in checkpoints:
            log.store_checkpoint(store.put_if_absent)
    return log


def shards(store: MemoryStore) -> list[str]:
    return [info.key for info in store.list(f"{LOG}{SHARD}")]


def replayed(store: MemoryStore) -> JournalReader[ArchiveState]:
    log = JournalReader(store, LOG, MACHINE)
    log.catch_up()
    return log


def cut(data: bytes) -> bytes:
    return data[:-1]


def flipped(data: bytes) -> bytes:
    return data[:40] + bytes([data[40] ^ 4]) + data[41:]


@pytest.mark.parametrize("harm", [cut, flipped, None])
@pytest.mark.parametrize("trimmed", [False, True])
def test_a_damaged_shard_costs_nothing_but_time(harm: object, *, trimmed: bool) -> None:
    store = MemoryStore()
    known = a_log(store, 9, [3, 7]).state
    if trimmed:
        assert trim_journal(store, LOG, 3) == 2, "entries 1 and 2"
    key = shards(store)[-1]
    data = store.get(key)
    store.delete(key)
    if callable(harm):
        store.put_if_absent(key, harm(data))
    with pytest.raises(DataError, match="shard") as raised:
        JournalReader(store, LOG, MACHINE).read_checkpoint(7)
    assert raised.value.where == key
    log = replayed(store)
    assert (log.state, log.number) == (known, 9)
    log.store_checkpoint(lambda key, data: None)
    assert log.state == known


class Crashing(WrappingStore):
    """Ends with the first checkpoint itself."""

    def put_if_absent(self, key: str, data: object) -> None:
        if key.endswith(".checkpoint"):
            raise KeyboardInterrupt
        self._inner.put_if_absent(key, data)  # type: ignore[arg-type]


def test_a_crash_between_shards_and_checkpoint_leaves_what_is_trimmed_later() -> None:
    store = MemoryStore()
    log = a_log(store, 3, [])
    with pytest.raises(KeyboardInterrupt):
        log.store_checkpoint(Crashing(store).put_if_absent)
    (orphan,) = shards(store)
    assert replayed(store).state == log.state
    follower = a_log(store, 9, [5, 7, 9])
    assert trim_journal(store, LOG, 2) == 0, "nothing is old enough"
    assert trim_journal(store, LOG, 7) > 0
    assert orphan not in shards(store)
    assert replayed(store).state == follower.state
    named = JournalReader(store, LOG, MACHINE).read_checkpoint_text(9)
    assert named is not None
    assert {name.key(LOG) for name in named.shards} <= set(shards(store))
    assert replayed(store).number == 9


def test_two_jobs_that_know_other_runs_say_the_same() -> None:
    """One has replayed all of it, the other has begun at a checkpoint: their runs differ, what they say does not."""
    store = MemoryStore()
    a_log(store, 6, [4])
    other = JournalReader(store, LOG, MACHINE)
    while other.step():
        pass
    mine = replayed(store)
    mine.store_checkpoint(store.put_if_absent)
    with pytest.raises(Exception, match="exists"):
        other.store_checkpoint(store.put_if_absent)
    assert other.state == mine.state == replayed(store).state


def test_trimming_keeps_old_shards_that_are_named_and_young_ones_that_are_not_yet(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tiered.archive.archived.SMALL_BYTES", 0)
    monkeypatch.setattr("tiered.archive.archived._GROWTH", 0)
    store = MemoryStore()
    known = a_log(store, 10, [3, 6, 9])
    with pytest.raises(KeyboardInterrupt):
        known.store_checkpoint(Crashing(store).put_if_absent)
    every = shards(store)
    assert len(every) == 4
    assert trim_journal(store, LOG, 6) == 6, "entries 1 to 5 and a checkpoint"
    assert shards(store) == every
    assert replayed(store).state == known.state


def test_trimming_relies_on_no_checkpoint_that_lost_a_shard() -> None:
    store = MemoryStore()
    known = a_log(store, 9, [3, 6, 9]).state
    lost = JournalReader(store, LOG, MACHINE).read_checkpoint_text(9)
    before = JournalReader(store, LOG, MACHINE).read_checkpoint_text(6)
    assert lost is not None
    assert before is not None
    only = {name.key(LOG) for name in lost.shards} - {name.key(LOG) for name in before.shards}
    store.delete(only.pop())
    assert trim_journal(store, LOG, 6) == 0, "6 would be the only one"
    assert trim_journal(store, LOG, 3) > 0
    assert replayed(store).state == known


def test_a_sleeper_s_checkpoint_of_shards_that_are_gone_is_not_believed() -> None:
    store = MemoryStore()
    a_log(store, 3, [3])
    sleeper = replayed(store)
    awake = a_log(store, 12, [6, 9, 12])
    while sleeper.number < 8:
        assert sleeper.step()
    assert trim_journal(store, LOG, 9) > 0
    sleeper.store_checkpoint(store.put_if_absent)
    assert replayed(store).state == awake.state
    trim_journal(store, LOG, 12)
    assert replayed(store).state == awake.state
    assert checkpoint_key(LOG, 8) not in {info.key for info in store.list(LOG)}


def test_a_run_leaves_few_entries_and_who_plans_next_reads_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tiered.archive.job.ENTRIES_KEPT", 3)
    monkeypatch.setattr("tiered.archive.job.COMMIT_FILES", 1)
    made = TierBuilder()
    for number in range(41):
        made.add([b"%d" % number], roll=True)
    at = job_context(made.store)
    ran = archive(at)
    assert (ran.segments, check(at).rows) == (40, 40)
    assert isinstance(at.bare, MemoryStore)
    kept = [info.key for info in at.bare.list(LOG)]
    assert len(kept) < 25, "of 41 entries, with a checkpoint each twelve"
    log = replayed(at.bare)
    assert log.since_checkpoint == 0
    assert log.state == log_writer(at).state
    assert archive(at).entries == 0


def test_a_frame_of_many_files_unpacks_each_row_group_once_and_makes_no_offset_ranges() -> None:
    """Of a million files it made each offset range four times, checked one by one: 23 CPU s."""
    known = loaded(state(10, range(5000)))
    with (
        mock.patch.object(_Group, "offset_ranges", side_effect=AssertionError),
        mock.patch.object(archived_table, "_Group", side_effect=_Group) as unpacked,
    ):
        found = plan_files(known, Selection())
        assert len(found.files) == len(found.keys()) == 5000
        assert topic_schema(known, "t") == schema()
    assert unpacked.call_count == -(-10 * 5000 // GROUP_ROWS)
    assert sum(len(file.row_ranges) for file in found.files) == 50_000


def test_offset_ranges_are_unpacked_a_row_group_at_a_time() -> None:
    known = loaded(state(3, range(1000)))
    with mock.patch.object(archived_table, "_Group", side_effect=_Group) as unpacked:
        assert [known.queues[one] for one in known.queues] == [
            tuple(map(archived, range(1000)))
        ] * 3
    assert unpacked.call_count == 3
