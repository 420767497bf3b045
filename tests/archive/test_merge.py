"""Small files become large ones: rows, proofs and readers stay; at each moment the old ones count, or the new one."""

from __future__ import annotations

import json
import random
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from support.archive_jobs import (
    MIDNIGHT,
    archive,
    check,
    is_shared,
    job_context,
    with_other_messages_behind,
)
from support.archive_merges import OTHER, SECOND, built, merged, named, seen
from support.archive_rows import files
from support.archives_made import loaded
from support.command_line import here, program
from support.journals import PREFIX
from support.tiers import QUEUE, TierBuilder

from backends.memory import MemoryStore
from backends.registry import open_store
from backends.s3_settings import S3Options
from tiered.api.broker_place import Place
from tiered.archive.clean import apply_clean, plan_clean
from tiered.archive.job import log_writer, run_job
from tiered.archive.machine import ArchiveMachine, forget_action, merge_action
from tiered.archive.merging import merge, merge_each, plan_merge
from tiered.archive.model import Truncation
from tiered.archive.plan import NO_LIMITS, Limits
from tiered.archive.tables import files_by_topic
from tiered.crashpoints import EXIT_CODE, VARIABLE
from tiered.errors import DataError, InvalidError
from tiered.journal.entry import Entry, decode_entry, encode_entry
from tiered.journal.replay import UnknownActionError
from tiered.model import MessageQueue
from tiered.upkeep.engine import local_engine

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from support.archive_fixtures import Sealed

    from backends.base import ObjectStore


def test_rows_and_proofs_stay_what_they_were() -> None:
    at = job_context(built().store)
    archive(at)
    before, offset_ranges = seen(at), log_writer(at).state.queues
    result = merged(at)
    assert (result.new_files, result.old_files, result.rows, result.entries) == (1, 6, 12, 1)
    assert seen(at) == before
    alone, new = named(at)
    assert is_shared(new)
    assert alone.startswith("data/topic_dir=other/")
    assert check(at).rows == len(before)
    for queue, found in log_writer(at).state.queues.items():
        for one, old in zip(found, offset_ranges[queue], strict=True):
            fields = {"key": "", "size_bytes": 0, "crc": 0}
            plain = [tuple(replace(f, **fields) for f in each.files) for each in (one, old)]
            assert plain[0] == plain[1]
            assert replace(one, files=()) == replace(old, files=())
    assert merged(at).planned == 0, "one file is as large as it gets"
    assert archive(at).entries == 0


def test_row_groups_are_as_large_whosever_rows_they_are() -> None:
    import io

    import pyarrow.parquet as pq

    at = job_context(built().store)
    archive(at)
    merged(at)
    file = pq.ParquetFile(io.BytesIO(at.archive.get(named(at)[-1])))
    (order,) = {file.metadata.row_group(n).sorting_columns for n in range(file.num_row_groups)}
    names = [file.schema_arrow.names[one.column_index] for one in order]
    assert names == ["topic", "queue_id", "incarnation", "queue_offset"]
    assert file.num_row_groups == 1
    found = file.read()
    marks = list(zip(*(found[name].to_pylist() for name in names), strict=True))
    assert marks == sorted(marks)
    assert {mark[1] for mark in marks} == {QUEUE.queue_id, SECOND.queue_id}
    said = {k.decode(): v.decode() for k, v in file.metadata.metadata.items()}
    assert (said["tiered.rows"], len(json.loads(said["tiered.row_ranges"]))) == ("12", 6)


def test_days_and_other_sizes_are_kept_apart() -> None:
    at = job_context(built(first=MIDNIGHT - 4).store)
    archive(at)
    days = {key.split("/")[1] for key in named(at)}
    assert len(days) == 2
    merged(at)
    assert {key.split("/")[-3] for key in named(at)} == days
    check(at)
    fresh = job_context(at.tier)
    archive(fresh)
    assert merged(fresh, small_bytes=1).planned == 0
    assert merged(fresh, merged_bytes=1).planned == 0


def test_merging_again_and_after_more_was_archived() -> None:
    tier = built()
    at = job_context(tier.store)
    archive(at)
    merged(at)
    tier.add([b"later"], roll=True)
    tier.add([b"open"], roll=True)
    run_job(at, local_engine(at.context, 1), small_bytes=1 << 20)
    before = seen(at)
    assert merged(at).new_files == 1
    assert seen(at) == before
    assert check(at).rows == len(before)


def test_the_same_is_merged_into_the_same() -> None:
    tier = built().store
    first, second = job_context(tier), job_context(tier, seed=9)
    for at in (first, second):
        archive(at)
        merged(at)
    assert named(first) == named(second)
    assert [first.archive.get(k) for k in named(first)] == [
        second.archive.get(k) for k in named(second)
    ]


def test_two_merges_at_once_count_once() -> None:
    at = job_context(built().store)
    archive(at)
    before = seen(at)
    one, two = log_writer(at), log_writer(replace(at, rng=type(at.rng)(5)))
    plan = plan_merge(one.state, takes=lambda _queue: True)
    assert merge(at, one, plan).new_files == 1
    late = merge(at, two, plan)
    assert (late.new_files, late.overtaken, late.entries) == (0, 1, 0)
    assert seen(at) == before


def test_a_file_that_is_not_what_the_log_says_is_not_merged() -> None:
    at = job_context(built().store)
    archive(at)
    before = named(at)
    harm(at.archive, before[-1])
    with pytest.raises(DataError, match="other bytes than the archive's log says"):
        merged(at)
    assert named(at) == before


def two_topics(store: ObjectStore, prefix: str = PREFIX) -> TierBuilder:
    """Four sealed segments of each of two topics."""
    tier = TierBuilder(store, prefix=prefix)
    for queue in (QUEUE, OTHER):
        for body in (b"a", b"b", b"c", b"d", b"open"):
            tier.add([body], queue=queue, roll=True)
    return tier


def test_a_lost_file_holds_up_no_others() -> None:
    at = job_context(two_topics(MemoryStore("tier")).store)
    archive(at)
    lost = next(key for key in named(at) if "topic_dir=other/" not in key)
    at.archive.delete(lost)
    log = log_writer(at)
    plan = plan_merge(log.state, takes=lambda _queue: True)
    told: list[int] = []
    result = merge_each(at, log, plan, told=lambda done: told.append(done.new_files))
    assert (result.planned, result.new_files, result.entries, told) == (2, 1, 1, [1])
    ((failed, error),) = result.failed
    assert lost in {row_range.file.key for row_range in failed.row_ranges}
    assert isinstance(error, DataError)
    assert lost in str(error)
    with pytest.raises(DataError, match="is gone"):
        merged(at)
    assert len([key for key in named(at) if "topic_dir=other/" in key]) == 1
    assert len(named(at)) == 5


def test_a_file_that_another_has_merged_away_is_no_failure() -> None:
    at = job_context(two_topics(MemoryStore("tier")).store)
    archive(at)
    late, plan = log_writer(at), plan_merge(log_writer(at).state, takes=lambda _queue: True)
    merged(at)
    for key in {row_range.file.key for one in plan for row_range in one.row_ranges}:
        at.archive.delete(key)
    result = merge_each(at, late, plan)
    assert (result.overtaken, result.failed, result.entries) == (2, [], 0)


@pytest.mark.parametrize("what", ["--merge", "--key-index"])
def test_the_command_does_the_rest_and_then_says_damage(what: str, tmp_path: Path) -> None:
    with closing(open_store(f"file://{tmp_path}/tier", S3Options())) as store:
        two_topics(store, Place("c", "b").prefix)
    words = ("archive", f"file://{tmp_path}/tier", "--to", f"file://{tmp_path}/parquet")
    here(*words, "--pack-below", "0").good()
    lost = min((tmp_path / "parquet" / "data" / "topic_dir=other").rglob("*.parquet"))
    lost.unlink()
    ran = here(*words, what, "--json")
    assert (ran.code, "a file of the archive is gone" in ran.error) == (5, True)
    (failed,) = ran.document["failed"]
    if what == "--merge":
        assert (ran.document["new_files"], ran.document["old_files"]) == (1, 4)
    else:
        assert (ran.document["files"], Path(failed["key"]).name) == (7, lost.name)
    assert lost.name in failed["why"]


def harm(store: Any, key: str) -> None:
    data = store.get(key)
    store.delete(key)
    store.put_if_absent(key, data[:100] + bytes([data[100] ^ 1]) + data[101:])


def test_replay_refuses_merges_that_would_lose_or_double_rows() -> None:
    at = job_context(built().store)
    archive(at)
    log = log_writer(at)
    (plan,) = plan_merge(log.state, takes=lambda _queue: True)
    from tiered.archive.model import NewFile

    whole = NewFile(plan.key, 1, 2, plan.row_ranges)
    moved = replace(plan.row_ranges[0], file=replace(plan.row_ranges[0].file, key="elsewhere"))
    unknown = replace(plan.row_ranges[0], file=replace(plan.row_ranges[0].file, low=4711))
    wrong = [
        replace(whole, row_ranges=(moved, *plan.row_ranges[1:])),
        replace(whole, row_ranges=(unknown, *plan.row_ranges[1:])),
        replace(whole, key=plan.row_ranges[0].file.key),
    ]
    actions = [merge_action([one]) for one in wrong]
    (row,) = merge_action([whole])["files"]
    row = [*row[:3], row[3] + 1, *row[4:]]  # its rows
    actions.append({**merge_action([whole]), "files": [row]})
    before = log.state.queues
    for action in actions:
        log.append([action])
    assert (log.state.refused, log.state.queues) == (len(actions), before)
    log.append([merge_action([whole])])
    assert log.state.refused == len(actions)
    half = replace(whole, key="half", row_ranges=plan.row_ranges[:3])
    moved_half = [replace(p, file=replace(p.file, key=plan.key)) for p in half.row_ranges]
    log.append([merge_action([replace(half, row_ranges=tuple(moved_half))])])
    assert log.state.refused == len(actions) + 1, "the other half would lie in no file"


def test_what_the_broker_truncates_is_divided_from_what_it_shares_a_file_with() -> None:
    tier = TierBuilder()
    tier.add([b"x"], queue=SECOND, roll=True)
    tier.add([b"open"], queue=SECOND, roll=True)
    tier.add([b"a"])
    tier.add([b"b", b"old c", b"old d"], roll=True)
    tier.add([b"old e"], roll=True)
    at = job_context(tier.store)
    run_job(at, local_engine(at.context, 1), small_bytes=1 << 20)
    assert len(named(at)) == 1
    with_other_messages_behind(tier, b"new c", b"open")
    archive(at)
    bodies = {(row["queue_id"], row["queue_offset"]): row["body"] for row in seen(at)}
    mine = QUEUE.queue_id
    assert bodies == {(mine, 0): b"a", (mine, 1): b"b", (mine, 2): b"new c", (7, 0): b"x"}
    check(at)
    merged(at)
    assert check(at).rows == 4


def test_a_bare_forget_of_a_shared_file_is_refused() -> None:
    at = job_context(built().store)
    run_job(at, local_engine(at.context, 1), small_bytes=1 << 20)
    log = log_writer(at)
    queue = min(queue for queue in log.state.queues if queue.topic == QUEUE.topic)
    before = log.state.queues
    log.append([forget_action(queue, [0], Truncation(9, 0, 9))])
    assert (log.state.refused, log.state.queues, log.state.tails) == (1, before, {})


def test_replaced_files_are_deleted_last_and_after_a_grace() -> None:
    at = job_context(built().store)
    archive(at)
    before = seen(at)
    assert merged(at).old_files == 6
    log = log_writer(at)
    stray = "data/topic_dir=other/date=2023-11-14/of-somebody-else.parquet"
    at.archive.put_if_absent(stray, b"123")
    young = plan_clean(at, log.state, grace_ms=1000, limit=99)
    assert (young["young"], young["unnamed"], young["foreign"]) == (6, [], [stray])
    at.clock.advance(2)  # type: ignore[attr-defined]
    plan = plan_clean(at, log.state, grace_ms=1000, limit=4)
    assert (plan["deletion_count"], plan["is_cut"]) == (4, True)
    saved = json.loads(json.dumps(plan))
    assert apply_clean(at, log, saved)["deleted"] == 4
    assert apply_clean(at, log, saved) == {"deleted": 0, "deleted_bytes": 0, "already_gone": 0}
    plan = plan_clean(at, log.state, grace_ms=1000, limit=99)
    at.archive.delete(plan["deletions"][0][0])
    assert apply_clean(at, log, plan)["already_gone"] == 1
    assert log.state.replaced == ()
    assert at.archive.get(stray) == b"123"
    assert seen(at) == before
    check(at)
    with pytest.raises(InvalidError, match="is of"):
        apply_clean(replace(at, archive=MemoryStore("other")), log, plan)


def test_a_replaced_file_of_another_size_stops_the_run() -> None:
    at = job_context(built().store)
    archive(at)
    merged(at)
    log = log_writer(at)
    at.clock.advance(2)  # type: ignore[attr-defined]
    plan = plan_clean(at, log.state, grace_ms=0, limit=99)
    key = plan["deletions"][-1][0]
    at.archive.delete(key)
    at.archive.put_if_absent(key, b"somebody else's")
    with pytest.raises(InvalidError, match="another size"):
        apply_clean(at, log, plan)
    assert all(at.archive.head(row[0]) for row in plan["deletions"])


def test_readers_that_begin_with_the_log_see_the_same(
    sealed: Callable[[str], Sealed], archive_url: str
) -> None:
    tier = sealed("s04-batch-compress")
    words = ("archive", tier.url, "--to", archive_url)
    here(*words, "--pack-below", "0", "--topics", "*-*").good()
    here(*words).good()
    merged = here(*words, "--merge", "--json").good().document
    assert merged["new_files"] > 0
    assert merged["replaced_files"] == merged["old_files"]
    for topic, messages in tier.dump.messages.items():
        queue = messages[-1]["queue_id"]
        mine = [m["body_crc"] for m in messages if m["queue_id"] == queue]
        question = f'SELECT count(*) AS n, sum(body_crc) AS crcs FROM "{topic}"'
        for more, crcs in (
            ("", [m["body_crc"] for m in messages]),
            (f" WHERE queue_id = {queue}", mine),
        ):
            (row,) = here("sql", archive_url, question + more, "-o", "jsonl").good().rows
            assert row == {"n": len(crcs), "crcs": sum(crcs)}


MATRIX = {
    "before write": ("--merge", "archive-rewriting:2"),
    "after write": ("--merge", "archive-rewritten:2"),
    "before commit": ("--merge", "entry-begun"),
    "after commit": ("--merge", "entry-put"),
    "while cleaning": ("--clean", "archive-deleted:2"),
    "before cleaning is said": ("--clean", "entry-begun"),
}


@pytest.mark.parametrize(
    "case",
    [
        key if key == "before commit" else pytest.param(key, marks=pytest.mark.slow)
        for key in MATRIX
    ],
)
def test_killed(case: str, sealed: Callable[[str], Sealed], archive_url: str) -> None:
    tier, (what, point) = sealed("s04-batch-compress"), MATRIX[case]
    words: Sequence[str] = ("archive", tier.url, "--to", archive_url)
    here(*words, "--pack-below", "0").good()
    old = len(files(archive_url))
    clean = ("--clean", "--grace", "0s", "--apply", "-")
    if what == "--clean":
        here(*words, "--merge").good()
    dying = clean if what == "--clean" else (what,)
    assert program(*words, *dying, env={VARIABLE: point}).code == EXIT_CODE
    assert verified(words) == tier.dump.count
    here(*words, "--merge").good()
    assert verified(words) == tier.dump.count
    done = here(*words, *clean, "--json").good().document
    assert done["deletion_count"] > 0
    assert verified(words) == tier.dump.count
    assert here(*words, "--clean", "--json").good().document["deletions"] == []
    assert len(files(archive_url)) < old
    left = [path for path in files(archive_url) if path.name not in files_named(archive_url)]
    assert left == []


def verified(words: Sequence[str]) -> int:
    document = here(*words, "--verify", "--json").good().document
    return int(document["rows"])


def files_named(url: str) -> set[str]:
    from backends.registry import open_store
    from backends.s3_settings import S3Options
    from tiered.archive.tables import read_archive

    store = open_store(url, S3Options())
    found = files_by_topic(read_archive(store))
    store.close()
    return {file.key.rpartition("/")[2] for some in found.values() for file in some}


GOLDEN = (
    b'{"actions":[{"do":"merge","files":[["merged/k",9,7,200,'
    b'[[["c","b","t",0,0],[[0,"k-0"],[100,"k-1"]]]]]]},'
    b'{"do":"clean","keys":["k-0"]}],"epoch":0,"format":1,"number":2,"previous":0,'
    b'"time_ms":5,"writer":"0badcafe"}\n'
)


def test_golden_bytes_of_the_new_actions() -> None:
    from support.archive_states import state
    from support.archives_made import row_ranges_of

    from tiered.archive.machine import clean_action
    from tiered.archive.model import NewFile, Replaced

    known = state(1, range(2))
    new = NewFile("merged/k", 9, 7, tuple(row_ranges_of(known.queues)))
    entry = Entry(2, 0, "0badcafe", 5, [merge_action([new]), clean_action(["k-0"])])
    data = encode_entry(entry)
    assert data[: data.index(b"\n") + 1] == GOLDEN
    found = ArchiveMachine().apply(known, decode_entry(data, where="x"))
    (offset_ranges,) = found.queues.values()
    assert {file.key for one in offset_ranges for file in one.files} == {"merged/k"}
    assert found.replaced == (Replaced("k-1", 9, 5),)
    assert loaded(found) == found


def test_what_is_not_known_stops_a_program() -> None:
    machine = ArchiveMachine()
    entry = Entry(1, 0, "0badcafe", 5, [{"do": "unheard of"}])
    with pytest.raises(UnknownActionError, match="unheard of"):
        machine.apply(machine.initial(), entry)


PACK = (
    b'{"actions":[{"do":"archive","offset_ranges":[[["c","b","t",0,0],0,[0,100,0,0,1000,'
    b'[["k-0",0,100,100,9,9,0,9,5,5]],null,[["log-0","etag"]]]],'
    b'[["c","b","t",1,0],0,[100,200,0,0,1000,'
    b'[["k-1",100,200,100,9,9,10,19,5,5]],null,[["log-1","etag"]]]]]},'
    b'{"bad":0,"began_ms":3,"do":"job","elapsed_ms":4,"engine":"local","failed"'
    b':0,"files":0,"holes":0,"overtaken":0,"planned":0,"planned_bytes":0,"program":"0.1","rows"'
    b':0,"run":"0badcafe","segments":0,"size_bytes":0,"source_bytes":0}],"epoch":0,"format":1,"number'
    b'":1,"previous":0,"time_ms":5,"writer":"0badcafe"}\n'
)


def test_golden_bytes_of_a_pack_and_a_record_and_all_or_nothing() -> None:
    from support.archive_states import archived

    from tiered.archive.machine import JobRecord, archive_action, job_action
    from tiered.archive.model import ArchiveQueue

    queues = [ArchiveQueue("c", "b", "t", queue, 0) for queue in (0, 1)]
    record = JobRecord("0badcafe", "0.1", "local", 3, 4)
    pack = archive_action([(queues[0], 0, archived(0)), (queues[1], 0, archived(1))])
    entry = Entry(1, 0, "0badcafe", 5, [pack, job_action(record)])
    data = encode_entry(entry)
    assert data[: data.index(b"\n") + 1] == PACK
    machine = ArchiveMachine()
    found = machine.apply(machine.initial(), decode_entry(data, where="x"))
    assert found.queues == {queues[0]: (archived(0),), queues[1]: (archived(1),)}
    assert found.jobs == (record,)
    late = archive_action([(queues[0], 0, archived(5)), (queues[1], 1, archived(6))])
    after = machine.apply(found, Entry(2, 0, "0badcafe", 6, [late]))
    assert (after.queues, after.refused) == (found.queues, 1)


@pytest.mark.parametrize(
    "seed", [1, *(pytest.param(n, marks=pytest.mark.slow) for n in range(2, 12))]
)
def test_whatever_is_done_in_whatever_order(seed: int) -> None:
    chance = random.Random(seed)
    tier, wanted = TierBuilder(), dict[tuple[int, int], bytes]()
    at = job_context(tier.store, seed=seed)
    ends = dict.fromkeys(range(4), 0)
    rival = replace(at, rng=random.Random(seed + 100))
    for step in range(25):
        doing = chance.choice(["add", "add", "archive", "archive", "merge", "clean", "limited"])
        who = chance.choice([at, rival])
        if doing == "add":
            queue = chance.randrange(4)
            items = [b"%d-%d" % (step, n) for n in range(chance.randrange(1, 5))]
            tier.add(items, queue=MessageQueue("t", queue), roll=True)
            tier.add([b"open"], queue=MessageQueue("t", queue), roll=True)
            for body in (*items, b"open"):
                wanted[queue, ends[queue]] = body
                ends[queue] += 1
        elif doing == "merge":
            merged(who, merged_bytes=chance.choice([10_000, 1 << 30]))
        elif doing == "clean":
            at.clock.advance(1)  # type: ignore[attr-defined]
            log = log_writer(who)
            plan = plan_clean(who, log.state, grace_ms=0, limit=chance.randrange(1, 9))
            apply_clean(who, log, plan)
        else:
            limits = Limits(bytes_max=300) if doing == "limited" else NO_LIMITS
            small = chance.choice([0, 1 << 20])
            run_job(who, local_engine(who.context, 1), small_bytes=small, limits=limits)
        found = {(row["queue_id"], row["queue_offset"]): row["body"] for row in seen(at)}
        assert len(found) == len(seen(at)), "a row twice"
        assert found.items() <= wanted.items()
        check(at)
    archive(at)
    found = {(row["queue_id"], row["queue_offset"]): row["body"] for row in seen(at)}
    open_ends = {(queue, end - 1) for queue, end in ends.items() if end}
    assert found == {mark: body for mark, body in wanted.items() if mark not in open_ends}
    assert log_writer(at).state.refused == 0
