"""What an archive's log says, parsed and checked by the block: the same as one row at a time, and as strict."""

from __future__ import annotations

from collections import Counter
from dataclasses import astuple, replace
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.archives_made import loaded
from support.large_log import as_long_as_real

from tiered.archive import archived
from tiered.archive.archived import OffsetRanges, SavedRun
from tiered.archive.machine import ArchiveState
from tiered.archive.model import Archived, ArchiveQueue, ParquetFile, SideFile
from tiered.archive.selection import Selection
from tiered.archive.tables import Chosen, TableRows, choose_files, refuses_file
from tiered.journal.entry import as_object, as_row, row_of

if TYPE_CHECKING:
    from collections.abc import Sequence

QUEUE = ArchiveQueue("c", "b", "t", 0, 0)
STEP = 100

counts = st.integers(0, 2**62 - 1)
texts = st.text(max_size=9)
members = st.lists(st.tuples(texts, counts), max_size=2).map(tuple)
files = st.builds(
    ParquetFile, texts, counts, counts, counts, counts, counts, counts, counts, counts, counts
)
offset_ranges = st.builds(
    Archived,
    start=st.just(0),
    end=st.integers(1, STEP),
    holes=counts,
    bad=counts,
    source_bytes=counts,
    files=st.lists(files, max_size=3).map(tuple),
    side=st.none() | st.builds(SideFile, texts, counts, counts, counts),
    sources=st.lists(st.tuples(texts, texts), max_size=2).map(tuple),
    schema=counts,
    misfits=st.just(0) | counts,
    columns=st.just(0) | counts,
    has_records=st.booleans(),
    left_out=members,
    unfit=members,
)


def apart(found: Sequence[Archived]) -> list[Archived]:
    return [
        replace(one, start=number * STEP, end=number * STEP + one.end)
        for number, one in enumerate(found)
    ]


# -- the same --------------------------------------------------------------------------------------


@given(st.lists(offset_ranges, min_size=1, max_size=9), st.integers(1, 4))
def test_a_run_says_what_its_rows_say(made: list[Archived], rows: int) -> None:
    """Rare fields too: side files, misfits, columns, records, members that are left out or do not fit."""
    every = apart(made)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(archived, "GROUP_ROWS", rows)
        new = OffsetRanges.of({QUEUE: every})
        for found in (new, OffsetRanges([SavedRun(run.data) for run in new.settled().runs])):
            assert found[QUEUE] == tuple(every)
            assert [found.around(QUEUE, one.start, one.end) for one in every] == [
                [o] for o in every
            ]
            files = [astuple(file) for one in every for file in one.files]
            assert list(found.files(QUEUE)) == files
            assert found.columns(QUEUE)[-1].tolist() == [one.has_records for one in every]
    assert [as_row(Archived).decode(row_of(one)) for one in every] == every


@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.sampled_from("xyz"), st.integers(0, 3)),
        min_size=1,
        max_size=9,
    ),
    st.dictionaries(
        st.sampled_from(["queue_offset", "store_ts", "queue_id"]),
        st.tuples(st.integers(0, 400), st.integers(0, 600)),
    ),
)
def test_files_are_chosen_as_if_each_were_looked_at(
    made: list[tuple[int, str, int]], bounds: dict[str, tuple[int, int]]
) -> None:
    """Files that queues share, too."""
    queues: dict[ArchiveQueue, list[Archived]] = {}
    for queue, key, ms in made:
        mine = queues.setdefault(replace(QUEUE, queue_id=queue), [])
        start = len(mine) * STEP
        file = ParquetFile(key, start, start + STEP, STEP, 9, 9, ms, ms + 1, 5, 5)
        mine.append(Archived(start, start + STEP, 0, 0, 9, (file,), None, ()))
    bounds = {name: (low, low + more) for name, (low, more) in bounds.items()}
    if "store_ts" in bounds:
        bounds["store_ts"] = (bounds["store_ts"][0] * 10, bounds["store_ts"][1] * 10)
    wanted = Selection(bounds=bounds)
    known = ArchiveState(OffsetRanges.of(queues))
    expected, left, foreign = by_objects(known, wanted)
    for state in (known, loaded(known)):
        found = choose_files(state, wanted)
        assert found.files == expected
        assert (found.files_left, found.keys_left) == (Counter(left.values()), left.keys())
        assert found.foreign == foreign
        assert found.keys() == {key for _, key, _ in made}
        assert found.rows == sum(file.rows for file in expected)
        assert found.rows_all == STEP * len(made)


def by_objects(
    state: ArchiveState, wanted: Selection
) -> tuple[list[Chosen], dict[str, str], set[str]]:
    chosen: dict[str, Chosen] = {}
    left: dict[str, str] = {}
    foreign = set()
    for queue, one in state.queues.each():
        for file in one.files:
            if wanted.refuses(queue):
                foreign.add(file.key)
            if reason := wanted.refuses(queue) or refuses_file(wanted, file):
                left.setdefault(file.key, reason)
                continue
            each = chosen.setdefault(file.key, Chosen(file.key, file.size_bytes, []))
            each.row_ranges.append(TableRows(queue, file.low, file.high, file.rows))
    return list(chosen.values()), {k: v for k, v in left.items() if k not in chosen}, foreign


# -- as strict -------------------------------------------------------------------------------------

NOT_NUMBERS = ("1", 1.0, True, None, -2, 2**62, [1])
FORM = as_object(Archived)
ROW = row_of(as_long_as_real(0, 1).files[0])
OF_FILES: dict[str, list[Any]] = {
    "start": list(NOT_NUMBERS),
    "end": list(NOT_NUMBERS),
    "files": [
        None,
        7,
        [7],
        [[]],
        ["x" * 10],
        [ROW[:-1]],
        [[*ROW, 1]],
        [ROW, ROW[:-1]],
        [[7, *ROW[1:]]],
        *([[*ROW[:at], no, *ROW[at + 1 :]]] for at in range(1, 10) for no in NOT_NUMBERS),
    ],
}
OF_OTHERS: dict[str, list[Any]] = {
    **{name: list(NOT_NUMBERS) for name in ("holes", "bad", "source_bytes", "schema")},
    **{name: list(NOT_NUMBERS) for name in ("misfits", "columns")},
    "side": [7, ["k", 1, 2], ["k", 1, 2, 3, 4], [1, 1, 2, 3], ["k", 1, 2, "3"]],
    "sources": [None, 7, [7], [["a"]], [["a", "b", "c"]], [["a", 1]], [[1, "a"]]],
    "left_out": [7, [7], [["a"]], [[1, 1]], [["a", "1"]]],
    "unfit": [7, [7], [["a"]], [[1, 1]], [["a", True]]],
}


SOUND = FORM.encode(as_long_as_real(0, 1))


@pytest.mark.parametrize("name", [*OF_FILES, *OF_OTHERS])
def test_a_damaged_field_of_any_row_is_refused(name: str) -> None:
    for value in {**OF_FILES, **OF_OTHERS}[name]:
        with pytest.raises((ValueError, TypeError, LookupError)):
            FORM.decode({**SOUND, name: value})


@pytest.mark.parametrize("name", sorted(SOUND))
def test_a_row_without_a_field_is_refused(name: str) -> None:
    document = dict(SOUND)
    del document[name]
    with pytest.raises(ValueError):
        FORM.decode(document)
