"""What lies in an archive and counts for nobody goes by rule, whatever left it; and who sleeps meanwhile does no harm."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
from support.archive_jobs import archive, check, index, job_context, keys
from support.archive_merges import built, merged, named, seen
from support.newest_rows import History

from backends.memory import MemoryStore
from backends.wrapping import WrappingStore
from tiered.archive import job, latest, task
from tiered.archive.clean import apply_clean, plan_clean
from tiered.archive.job import log_writer
from tiered.archive.latest import delete_leftovers, folder_of, update_latest
from tiered.archive.model import is_made_key
from tiered.journal import append

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from support.tiers import TierBuilder

    from tiered.archive.job import JobContext

NOW_MS = 1_700_000_000_000


class KilledError(BaseException):
    """A run ends here."""


def kill(module: Any, point: str, do: Callable[[], Any]) -> None:
    """Do something that is killed when it reaches a point."""

    def reached(name: str) -> None:
        if name == point:
            raise KilledError

    with mock.patch.object(module, "reached", reached), suppress(KilledError):
        do()


class Sleepy(WrappingStore):
    """Lets somebody else come first, once, before a key that begins so is put."""

    def __init__(self, inner: MemoryStore, begin: str, meanwhile: Callable[[], object]) -> None:
        super().__init__(inner)
        self._begin, self._meanwhile = begin, meanwhile

    def put_if_absent(self, key: str, data: Any, *more: Any) -> Any:
        if self._begin and key.startswith(self._begin):
            self._begin = ""
            self._meanwhile()
        return super().put_if_absent(key, data, *more)


def timed(tier: TierBuilder) -> JobContext:
    """With a store that says when an object was written."""
    return job_context(tier.store, MemoryStore("archive", now_ms=lambda: NOW_MS))


def cleaned(at: JobContext, grace_ms: int = 0) -> Mapping[str, Any]:
    """Plan and result together."""
    log = log_writer(at)
    plan = plan_clean(at, log.state, grace_ms=grace_ms, limit=1000)
    return {**plan, **apply_clean(at, log, plan)}


def kinds(plan: Mapping[str, Any]) -> dict[str, int]:
    found = [kind for *_, kind in plan["deletions"]]
    return {kind: found.count(kind) for kind in set(found)}


def test_what_a_killed_merge_left_goes_though_no_later_merge_makes_it_again() -> None:
    tier = built()
    at = timed(tier)
    archive(at)
    kill(append, "entry-begun", lambda: merged(at))
    tier.add([b"more"], roll=True)
    tier.add([b"open"], roll=True)
    archive(at)
    merged(at)
    before = seen(at)
    at.clock.advance(5)  # type: ignore[attr-defined]
    young = plan_clean(at, log_writer(at).state, grace_ms=10_000, limit=99)
    assert (young["unnamed_count"], young["deletion_count"]) == (1, 0)
    assert kinds(cleaned(at)) == {"replaced": 8, "unnamed": 1}
    assert sorted(keys(at)) == sorted(named(at)), "readers of directories see each row once"
    assert seen(at) == before
    check(at)


def test_what_others_put_there_is_named_and_stays() -> None:
    at = timed(built())
    archive(at)
    strange = [
        "_bad/topic_dir=t/notes.side",
        "data/_SUCCESS",
        "data/topic_dir=t/date=2023-11-14/mine.parquet",
        "data/topic_dir=t/date=2023-11-14/.part-0.crc",
    ]
    for key in strange:
        at.archive.put_if_absent(key, b"x")
    at.clock.advance(5)  # type: ignore[attr-defined]
    plan = cleaned(at)
    assert (sorted(plan["foreign"]), plan["foreign_count"]) == (sorted(strange), 4)
    assert (plan["deletions"], plan["unnamed_count"]) == ([], 0)
    assert all(at.archive.head(key) for key in strange)
    assert all(map(is_made_key, named(at)))


def test_of_a_store_that_does_not_tell_times_all_is_young() -> None:
    at = job_context(built().store)
    kill(task, "archive-written", lambda: archive(at))
    at.clock.advance(10**9)  # type: ignore[attr-defined]
    plan = cleaned(at)
    assert plan["deletion_count"] == 0 < plan["unnamed_count"]


def test_an_index_of_nothing_and_old_probes_go() -> None:
    at = timed(built())
    archive(at)
    index(at.archive)
    merged(at)
    index(at.archive)
    at.archive.put_if_absent("_probe/probe-1", b"x")
    at.clock.advance(5)  # type: ignore[attr-defined]
    assert kinds(cleaned(at)) == {"replaced": 6}, "the first index is of files that are still there"
    at.clock.advance(4000)  # type: ignore[attr-defined]
    assert kinds(cleaned(at)) == {"probe": 1}
    assert len(keys(at, "_keys/")) == 2, "one covers the file of the other topic, too"


@pytest.mark.parametrize("doing", [archive, merged])
def test_who_sleeps_between_file_and_entry_makes_it_again(
    doing: Callable[[JobContext], Any],
) -> None:
    """``--clean`` takes the file meanwhile: an entry that named it would be of a file that is gone."""
    tier = built()
    at = timed(tier)
    if doing is merged:
        archive(at)
    else:  # the log has begun
        archive(replace(at, takes=lambda topic: topic == "other"))
    at.clock.advance(5)  # type: ignore[attr-defined]
    gone = list[str]()

    def meanwhile() -> None:
        gone.extend(key for key, *_, kind in cleaned(at)["deletions"] if kind == "unnamed")

    sleepy = Sleepy(at.archive, "_log/journal/", meanwhile)  # type: ignore[arg-type]
    doing(replace(at, archive=sleepy, bare=sleepy))
    assert gone
    if doing is merged:
        assert merged(at).new_files == 1, "it was made in vain, and is made by the next"
    assert not set(gone) & set(keys(at))
    assert sorted(key for key in keys(at) if key in named(at)) == sorted(named(at))
    check(at)
    assert log_writer(at).state.refused == 0


def test_a_table_of_a_run_that_sleeps_names_no_file_that_is_gone() -> None:
    history = History()
    history.grow()
    history.update("first")
    history.grow()
    store, plan = history.at.bare, history.plan()
    clock, later_ms = history.at.clock, 1_700_000_000_001
    clock.advance((later_ms - clock.now_ms()) / 1000)  # type: ignore[attr-defined]
    (folder,) = {folder_of(key) for key in history.files()}
    assert folder
    gone = list[str]()

    def meanwhile() -> None:
        gone.extend(info.key for info in delete_leftovers(store, folder, later_ms, later_ms))

    sleepy = Sleepy(store, f"{folder}versions/", meanwhile)  # type: ignore[arg-type]
    update_latest(sleepy, plan, clock, "asleep")
    assert any("/asleep/" in key for key in gone)
    assert history.rows() == history.expected()


def test_what_a_killed_first_run_of_a_table_left_goes_and_there_is_still_no_table() -> None:
    history = History()
    history.grow()
    kill(latest, "latest-written", lambda: history.update("first"))
    at = history.at
    at.clock.advance((1_700_000_000_001 - at.clock.now_ms()) / 1000)  # type: ignore[attr-defined]
    assert kinds(cleaned(at)) == {"table": 1}
    assert latest.latest_versions(at.archive, ["t"], lambda _topic: True) == {}
    assert history.update("second").number == 2
    assert history.rows() == history.expected()


def test_a_job_that_sleeps_while_the_log_is_trimmed_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Over 256 entries, in truth: it ended as if another had taken over (code 4)."""
    monkeypatch.setattr(job, "ENTRIES_KEPT", 3)
    monkeypatch.setattr(append, "CHECKPOINT_ENTRIES", 2)
    monkeypatch.setattr(append, "_CHECKPOINT_REST", 0)
    tier = built()
    at = job_context(tier.store)
    archive(replace(at, takes=lambda topic: topic == "other"))

    def meanwhile() -> None:
        for number in range(9):
            tier.add([b"%d" % number], roll=True)
            tier.add([b"open"], roll=True)
            archive(at)

    sleepy = Sleepy(at.archive, "_log/journal/", meanwhile)  # type: ignore[arg-type]
    result = archive(replace(at, archive=sleepy, bare=sleepy))
    assert (result.failed, result.segments, result.overtaken) == ([], 0, 6)
    check(at)
    log = log_writer(at)
    entries = [info.key for info in at.archive.list("_log/journal/")]
    assert f"_log/journal/{2:020d}" not in "".join(entries), "what it put in vain is not a history"
    assert log.state.refused == 0
