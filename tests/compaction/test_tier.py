"""Topics of a tier are compacted: what is left, what readers see, what verify, merging and a rebuild make of it."""

from __future__ import annotations

import random
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.compacting import (
    _SEEDS,
    ALWAYS,
    OTHER,
    QUEUE,
    THREE,
    Row,
    check,
    compact,
    final_state,
    mail,
    messages,
    old_value,
    read,
    rows_of,
    seal,
    two_passes,
    workplace,
)
from support.journals import PREFIX
from support.keyed import KeyedTier, Mail
from support.merging import merge

from backends.registry import open_store
from tiered.api.broker_place import Place
from tiered.api.tier import open as open_tier
from tiered.clock import ManualClock
from tiered.clock import SystemClock as RealTime
from tiered.compaction.passes import CAREFUL, EVERY, KAFKA, PassSettings
from tiered.dispatch.settings import Compression
from tiered.errors import InvalidError
from tiered.keys import parse_data_key
from tiered.local.interface import HoleReason
from tiered.log.history import named_bundles
from tiered.log.merge import MergePolicy
from tiered.log.reader import TierReader
from tiered.log.verify import verify_tier
from tiered.metrics import render
from tiered.model import MessageQueue, QueueOffset
from tiered.upkeep import compact_work
from tiered.upkeep.compact import Compactor, CompactPlan, CompactSettings, Spread
from tiered.upkeep.compact_thread import CompactionThread, Stopping
from tiered.upkeep.rebuild import apply_rebuild, plan_rebuild
from tiered.upkeep.workplace import Workplace

if TYPE_CHECKING:
    from backends.base import ObjectStore
    from tiered.local.interface import RecordBatch
    from tiered.log.parts import Part


def newest(mails: list[Mail]) -> set[int]:
    """Offsets of the newest of each key; and of the last message, which always stays."""
    last = {mail.keys: at for at, mail in enumerate(mails)}
    return {*last.values(), len(mails) - 1}


def filled(parts: list[list[Mail]], *, roll: bool = True) -> KeyedTier:
    tier = KeyedTier()
    for number, some in enumerate(parts):
        tier.post(QUEUE, some, roll=roll and number > 0)
    return tier


def test_the_newest_of_each_key_stays_in_its_place_and_byte_for_byte():
    parts = [[mail(f"k{n % 3}", b"%d" % n) for n in range(20)], [mail("k1"), mail("k9")] * 10]
    tier = filled([*parts, [mail("k2")]])
    before = dict(messages(tier))
    done = compact(tier, retention=KAFKA)
    kept = newest([*parts[0], *parts[1]])
    assert messages(tier) == [(at, before[at]) for at in sorted({*kept, 40})]
    assert (done["messages"], done["gone_messages"], done["keys"]) == (40, 40 - len(kept), 4)
    assert done["applied"]["steps"] == 1
    incarnation = tier.journal.state.incarnation(QUEUE)
    assert incarnation
    assert (incarnation.min_offset, incarnation.commit_offset) == (0, 41)
    assert incarnation.passes[-1].end == 40
    assert {part.section.gone > 0 for part in incarnation.parts()} == {True, False}
    check(tier)


def test_asking_for_an_offset_that_is_gone_gives_the_next_greater():
    tier = filled([[mail("a"), mail("a"), mail("a"), mail("b")] * 5, [mail("z")]])
    compact(tier)
    reader = TierReader(tier.store, PREFIX)
    reader.refresh()
    queue = reader.queue(QUEUE)
    assert [at for at, _ in read(queue, 3)] == [18, 19, 20]
    batch = queue.read(QueueOffset(3))
    assert batch is not None
    assert set(batch.records.tag_codes[batch.records.sizes == 0].tolist()) == {HoleReason.COMPACTED}


def test_what_is_open_or_too_young_is_not_touched():
    tier = KeyedTier()
    tier.post(QUEUE, [mail("a")] * 10)
    assert compact(tier)["steps"] == []
    tier.post(QUEUE, [mail("a")] * 10, roll=True)
    young = PassSettings(dirty_ratio=0, lag_ms_min=2**61)
    assert compact(tier, passes=young)["left"][0]["due"] == "nothing new"
    assert compact(tier)["gone_messages"] == 9
    assert [at for at, _ in messages(tier)] == [9, *range(10, 20)]


def test_what_is_clean_is_not_written_again_until_it_is_dirty_enough():
    tier = filled([[mail(f"k{n}") for n in range(30)], [mail("x")]])
    compact(tier, passes=PassSettings())
    for _ in range(3):
        tier.post(QUEUE, [mail("k1")] * 5, roll=True)
    assert compact(tier, passes=PassSettings())["left"][0]["due"] == "not dirty enough"
    assert compact(tier, passes=PassSettings(dirty_ratio=0.1))["gone_messages"] > 5


def test_tombstones_stay_for_their_time_and_then_go():
    clock = ManualClock()
    tier = filled([[mail("a"), mail("b"), mail("a", b"")], [mail("c")]])
    day = 86_400_000
    compact(tier, retention=CAREFUL, clock=clock)
    assert [at for at, _ in messages(tier)] == [1, 2, 3]
    tier.post(QUEUE, [mail("d")], roll=True)
    clock.advance(day / 1000 - 1)
    compact(tier, retention=CAREFUL, clock=clock)
    assert [at for at, _ in messages(tier)] == [1, 2, 3, 4]
    tier.post(QUEUE, [mail("e")], roll=True)
    clock.advance(2)
    compact(tier, retention=CAREFUL, clock=clock)
    assert [at for at, _ in messages(tier)] == [1, 3, 4, 5]
    check(tier)


def test_messages_without_a_key_go_only_where_the_policy_says_so():
    some = [Mail(()), mail("a"), Mail(()), mail("a")]
    careful, kafka = filled([some, [mail("z")]]), filled([some, [mail("z")]])
    assert compact(careful)["steps"][0]["keyless"] == 2
    assert [at for at, _ in messages(careful)] == [0, 2, 3, 4]
    compact(kafka, retention=KAFKA)
    assert [at for at, _ in messages(kafka)] == [3, 4]


def test_inner_batches_are_refused_and_nothing_is_changed():
    tier = filled([[mail("a"), Mail((), inner=(mail("a"), mail("b")))], [mail("z")]])
    before = tier.journal.number
    with pytest.raises(InvalidError, match="inner batches"):
        compact(tier)
    assert tier.journal.number == before


def test_a_topic_that_is_not_there():
    with pytest.raises(InvalidError, match="no topic u"):
        Compactor(workplace(filled([[mail("a")]])), CompactSettings()).plan(["u"])


def test_a_plan_is_refused_when_parts_have_changed_and_known_when_it_was_applied():
    tier = filled([[mail("a")] * 4, [mail("a")] * 4, [mail("a")] * 4, [mail("z")]])
    first = Compactor(workplace(tier), CompactSettings(passes=ALWAYS, compression=None))
    plan = first.plan(["t"])
    later = Compactor(workplace(tier), CompactSettings(passes=ALWAYS, compression=None))
    assert later.apply(plan)["steps"] == 1  # judged anew
    again = first.apply(plan)
    assert (again["steps"], again["already_done"], again["was_applied"]) == (0, 1, True)
    tier.journal.catch_up()
    tier.post(QUEUE, [mail("b")] * 3, roll=True)
    plan = first.plan(["t"])
    tier.expire(QUEUE)
    with pytest.raises(InvalidError, match="moved on"):
        first.apply(plan)


def test_a_new_epoch_refuses_what_was_uploaded_under_the_old_one():
    tier = filled([[mail("a")] * 4, [mail("z")]])
    compactor = Compactor(workplace(tier), CompactSettings(passes=ALWAYS, compression=None))
    plan = compactor.plan(["t"])
    real = compactor.made

    def meanwhile(works: Any) -> Any:
        tier.journal.catch_up()
        tier.journal.take_epoch({"host": "other"})
        return real(works)

    compactor.made = meanwhile  # type: ignore[method-assign]
    with pytest.raises(InvalidError, match="another writer has taken over"):
        compactor.apply(plan)
    assert len(messages(tier)) == 5


STEPS = st.lists(
    st.one_of(
        st.lists(
            st.tuples(st.sampled_from(["a", "b", "c", "d", ""]), st.sampled_from([b"", b"v", b"x" * 300])),
            min_size=1,
            max_size=12,
        ),
        st.sampled_from(["compact", "compact", "merge", "seal", "little"]),
    ),
    max_size=14,
)  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(steps=STEPS, compresses=st.booleans())
def test_k5_whatever_comes_order_and_final_state_stay_and_the_head_is_whole(
    steps: list[Any], compresses: bool
):
    tier = KeyedTier()
    sent: list[tuple[str, bytes]] = []
    sealed_to = 0
    policy = MergePolicy(fan_in=2, own_bytes=1 << 20)
    compression = Compression() if compresses else None
    for step in steps:
        if isinstance(step, list):
            incarnation = tier.journal.state.incarnation(QUEUE)
            tier.post(
                QUEUE, [Mail((key,) if key else (), body=body) for key, body in step],
                roll=bool(incarnation and incarnation.segments and incarnation.segments[-1].sealed),
            )  # fmt: skip
            sent += step
        elif step == "seal" and sent:
            seal(tier)
            sealed_to = len(sent)
        elif step == "merge":
            merge(tier, policy, compression=compression)
        elif sent:
            memory = 128 * 3 if step == "little" else 1 << 16
            compact(tier, compression=compression, memory_bytes=memory)
        if not sent:
            continue
        check(tier)
        found = messages(tier)
        offsets = [at for at, _ in found]
        assert offsets == sorted(set(offsets))
        assert set(range(sealed_to, len(sent))) <= set(offsets), "the head is whole"
        last = {key: at for at, (key, _) in enumerate(sent) if key}
        assert set(last.values()) <= set(offsets), "tombstones wait for a day"
        assert {at for at, (key, _) in enumerate(sent) if not key} <= set(offsets)


def lose_and_rebuild(tier: KeyedTier, *, collected: bool) -> None:
    named = named_bundles(tier.journal.state)
    for info in list(tier.store.list(PREFIX)):
        inner = info.key[len(PREFIX) :]
        data = parse_data_key(PREFIX, info.key)
        if inner.startswith("journal/") or (collected and data and inner not in named):
            tier.store.delete(info.key)
    with ThreadPoolExecutor(2) as pool:
        plan = plan_rebuild(tier.store, PREFIX, pool)
    assert (plan.rebuilt.losses, plan.refused) == ([], [])
    apply_rebuild(workplace(tier), plan, accept_gaps=False)


@pytest.mark.parametrize("collected", [False, True])
def test_of_passes_of_one_moment_a_rebuild_takes_the_last(collected: bool):
    tier, clock = filled([[mail(f"k{n % 7}") for n in range(20)], [mail("z")]]), ManualClock()
    for number in range(5):
        compact(tier, clock=clock)
        tier.post(QUEUE, [mail(f"k{n % 7}", b"%d" % number) for n in range(9)], roll=True)
        tier.post(QUEUE, [mail("z")], roll=True)
    before = messages(tier)
    lose_and_rebuild(tier, collected=collected)
    assert messages(tier) == before


@pytest.mark.parametrize("collected", [False, True])
@pytest.mark.parametrize("end", [6, 10, 13, 20, 24])
def test_what_was_truncated_of_a_compacted_queue_does_not_come_back_with_a_rebuild(
    end: int, collected: bool
):
    """Under one epoch: the writer begins what it writes instead after the pass, and its count is below that of the pass."""
    tier = filled(
        [[mail(f"k{n % 3}") for n in range(10)], [mail("k1"), mail("k9")] * 5, [mail("x")]]
    )
    compact(tier)
    seal(tier)
    tier.post(QUEUE, [mail("y")] * 6, roll=True)
    tier.truncate(end, queue=QUEUE)
    for number in range(3):
        tier.post(
            QUEUE, [mail(f"k{n % 3}", b"other %d" % number) for n in range(8)], roll=number > 0
        )
    before = messages(tier)
    lose_and_rebuild(tier, collected=collected)
    assert messages(tier) == before


@pytest.mark.parametrize("collected", [False, True])
def test_a_lost_journal_comes_back_compacted_and_the_passes_are_made_anew(collected: bool):
    """The rebuilt tier has what was left, whether or not the older objects are there still; nothing is called lost."""
    clock = ManualClock()
    tier = filled([[mail(f"k{n % 3}") for n in range(20)], [mail("k1")] * 9, [mail("z")] * 3])
    compact(tier, clock=clock)
    tier.post(QUEUE, [mail("k2"), mail("k9")] * 5, roll=True)
    tier.post(QUEUE, [mail("k1")])
    seal(tier)
    clock.advance(1.0)
    compact(tier, clock=clock)
    tier.post(QUEUE, [mail("y")], roll=True)
    before = messages(tier)
    lose_and_rebuild(tier, collected=collected)
    assert messages(tier) == before
    assert verify_tier(tier.store, PREFIX, deep=True).problems == []
    reader = TierReader(tier.store, PREFIX)
    reader.refresh()
    incarnation = reader.state.incarnation(QUEUE)
    assert incarnation
    assert incarnation.passes == ()
    tier.journal.catch_up()
    again = compact(tier, clock=clock)
    assert again["applied"]["steps"] == 1
    assert messages(tier) == before


def test_two_queues_share_a_bundle_and_an_entry():
    tier = KeyedTier()
    for queue in (QUEUE, OTHER):
        tier.post(queue, [mail("a")] * 5)
        tier.post(queue, [mail("z")], roll=True)
    before = tier.journal.number
    done = compact(tier)["applied"]
    assert (done["steps"], done["entries"], done["bundles"]) == (2, 1, 1)
    assert tier.journal.number == before + 1
    assert [at for at, _ in messages(tier, OTHER)] == [4, 5]
    check(tier)


def test_keys_that_went_to_several_queues_are_told_and_each_queue_keeps_its_own(
    monkeypatch: pytest.MonkeyPatch,
):
    tier = KeyedTier()
    for number, queue in enumerate((QUEUE, OTHER)):
        tier.post(queue, [mail(f"{number}-{n}") for n in range(500)])
        tier.post(queue, [mail("both"), mail("z")], roll=True)
        seal(tier, queue)
    found = Compactor(workplace(tier), CompactSettings(passes=ALWAYS)).plan(["t"])
    assert found.spread == (Spread("t", 2, 1002),)
    monkeypatch.setattr("tiered.upkeep.compact.KEYS_SAMPLED", 100)
    found = Compactor(workplace(tier), CompactSettings(passes=ALWAYS)).plan(["t"])
    (sampled,) = found.spread or (Spread("t", 0, 100),)
    assert 0 <= sampled.keys <= 2
    assert 100 <= sampled.of_keys <= 200
    compact(tier)
    assert {at for at, _ in messages(tier, OTHER)} == {at for at, _ in messages(tier)}


def left_across(rows: list[Row], looked_to: list[int], ends: list[int]) -> set[Row]:
    """What a pass over all queues leaves when tombstones need not wait for a time, told key by key."""
    looked = [row for row in rows if row[1] < looked_to[row[2]]]
    lasts = {row for row in rows if row[1] == ends[row[2]] - 1}
    unseen = set(rows) - set(looked)
    left = unseen | lasts | {row for row in looked if not row[3]}
    for row in {row[3]: row for row in sorted(looked) if row[3]}.values():
        older = {one for one in lasts if one[3] == row[3] and one[4] and one < row}
        if row[4] or older or any(one[0] <= row[0] for one in unseen):
            left.add(row)
    return left


@settings(max_examples=100, deadline=None)
@given(
    rounds=st.lists(
        st.tuples(
            st.lists(
                st.tuples(
                    st.integers(0, 2), st.sampled_from(["a", "b", ""]),
                    st.sampled_from([b"", b"v"]), st.integers(0, 3),
                ),
                min_size=5, max_size=14,
            ),
            st.sets(st.integers(0, 2), min_size=1),
        ),
        min_size=1, max_size=3,
    ),
    waits=st.booleans(),
    memory=st.sampled_from([128 * 3, 1 << 20]),
)  # fmt: skip
def test_across_queues_the_newest_by_store_time_stays_and_a_dead_key_never_comes_back(
    rounds: list[tuple[list[tuple[int, str, bytes, int]], set[int]]], waits: bool, memory: int
):
    """Messages come in any order of store time, but older ones before a pass; any queues are sealed, or have none yet."""
    tier, clock, sent = KeyedTier(), ManualClock(), list[Row]()
    ends, sealed_to = [0] * 3, [0] * 3
    for number, (some, seals) in enumerate(rounds):
        for queue in THREE:
            at = queue.queue_id
            mine = [(1000 * number + ms, key, body) for q, key, body, ms in some if q == at]
            mails = [Mail((key,) if key else (), body=body, time_ms=ms) for ms, key, body in mine]
            if mails:
                tier.post(queue, mails, roll=0 < sealed_to[at] == ends[at])
            sent += [(ms, ends[at] + n, at, key, body) for n, (ms, key, body) in enumerate(mine)]
            ends[at] += len(mine)
            if at in seals and sealed_to[at] < ends[at]:
                seal(tier, queue)
                sealed_to[at] = ends[at]
        if not any(ends):
            continue
        before = rows_of(tier)
        retention = CAREFUL if waits else replace(CAREFUL, tombstone_retention_ms=0)
        options = {"retention": retention, "clock": clock, "memory_bytes": memory}
        done = compact(tier, across_queues=True, **options)
        clock.advance(86_401)
        after = rows_of(tier)
        assert final_state(after) == final_state(sent)
        assert set(after) >= left_across(before, sealed_to, ends)
        if done["steps"] and not waits:
            assert set(after) == left_across(before, sealed_to, ends)
        assert done["spread"] == []
        check(tier)


@pytest.mark.parametrize("where", ["open", "last"])
def test_a_tombstone_waits_for_an_old_value_that_stays_in_another_queue_and_goes_with_it(
    where: str,
):
    tier = KeyedTier()
    old_value(tier, where)
    two_passes(tier)
    assert [at for at, _ in messages(tier)] == [0, 1, 2]
    assert [at for at, _ in messages(tier, OTHER)] == [0, 1]
    tier.post(OTHER, [Mail(("y",), time_ms=9001)], roll=where == "last")
    seal(tier, OTHER)
    compact(tier, across_queues=True, clock=ManualClock(2 * ManualClock().now_ms()))
    assert [at for at, _ in messages(tier)] == [1, 2]
    assert [at for at, _ in messages(tier, OTHER)] == [2]


@pytest.mark.parametrize(
    ("where", "name", "wrong"),
    [
        ("open", "seen_until_ms", lambda *_: EVERY),
        ("last", "holds", lambda rows, _: np.zeros(len(rows), np.bool_)),
    ],
)
def test_a_tombstone_that_does_not_wait_would_be_found(
    where: str, name: str, wrong: Any, monkeypatch: pytest.MonkeyPatch
):
    tier = KeyedTier()
    old_value(tier, where)
    before = final_state(rows_of(tier))
    module = "compact_work" if name == "holds" else "compact"
    monkeypatch.setattr(f"tiered.upkeep.{module}.{name}", wrong)
    two_passes(tier)
    assert "k" not in before
    assert final_state(rows_of(tier))["k"] == b"old"


def test_keys_of_one_queue_each_are_none():
    tier = KeyedTier()
    for number, queue in enumerate((QUEUE, OTHER)):
        tier.post(queue, [mail(f"{number}-{n % 9}") for n in range(50)])
        seal(tier, queue)
    assert compact(tier)["spread"] == []


def test_a_key_is_found_by_the_index_where_its_message_lies_now():
    tier = filled([[mail("a"), mail("b"), mail("a"), mail("b"), mail("a")], [mail("z")]])
    tier.index()
    compact(tier)
    found = tier.ask("t", "b")
    assert [hit.queue_offset for hit in found.hits] == [3]
    assert [hit.queue_offset for hit in tier.ask("t", "a").hits] == [4]


def test_a_crash_before_the_entry_changes_nothing_and_planning_again_goes_on(
    monkeypatch: pytest.MonkeyPatch,
):
    tier = filled([[mail("a")] * 6, [mail("b")] * 6, [mail("z")]])
    before = messages(tier)

    class Crash(BaseException):
        pass

    def crash(point: str) -> None:
        if point == "compacted-stored":
            raise Crash

    with monkeypatch.context() as patch:
        patch.setattr("tiered.upkeep.compact_work.reached", crash)
        with pytest.raises(Crash):
            compact(tier)
    tier.journal.catch_up()
    assert messages(tier) == before
    check(tier)
    assert compact(tier)["applied"]["steps"] == 1
    assert [at for at, _ in messages(tier)] == [5, 11, 12]


def test_who_reads_meanwhile_sees_a_queue_before_or_after_and_never_a_mix():
    tier = filled([[mail(f"k{n % 4}") for n in range(40)], [mail("z")]])
    before = [at for at, _ in messages(tier)]
    held = TierReader(tier.store, PREFIX)
    held.refresh()
    queue, old = held.queue(QUEUE), []
    batches = queue.batches(QueueOffset(0), bytes_max=500)
    for batch in batches:  # compaction comes while this reader is in the middle
        rows = batch.records
        old += [rows.base_offset + int(n) for n in np.flatnonzero(rows.sizes > 0)]
        if len(old) == 4:
            compact(tier)
    assert old == before, "the objects that it knows are there until gc"
    after = [at for at, _ in messages(tier)]
    assert after == [36, 37, 38, 39, 40]
    seen: list[list[int]] = []
    done = threading.Event()

    def watch() -> None:
        while not done.is_set():
            seen.append([at for at, _ in messages(tier)])

    tier.post(QUEUE, [mail(f"k{n % 2}") for n in range(20)], roll=True)
    tier.post(QUEUE, [mail("y")], roll=True)
    first = [at for at, _ in messages(tier)]
    thread = threading.Thread(target=watch)
    thread.start()
    compact(tier)
    done.set()
    thread.join()
    last = [at for at, _ in messages(tier)]
    assert first != last
    assert all(one in (first, last) for one in seen)


def test_the_fetcher_and_arrow_pass_over_what_is_gone():
    url, place = "memory://compacted-topic", Place("c", "b")
    with patch("support.tiers.PREFIX", place.prefix), patch("support.keyed.PREFIX", place.prefix):
        tier = KeyedTier(open_store(url))
    for number in range(3):
        tier.post(QUEUE, [mail(f"k{n % 4}", b"x" * 3000) for n in range(40)], roll=number > 0)
    at = Workplace(tier.store, tier.store, place, ManualClock(), random.Random(next(_SEEDS)))
    for compression in (None, Compression()):
        compactor = Compactor(at, CompactSettings(passes=ALWAYS, compression=compression))
        compactor.apply(compactor.plan(["t"]))
        tier.journal.catch_up()
        tier.post(QUEUE, [mail("k1")], roll=True)
    with open_tier(url) as opened:
        read_ = [message.queue_offset for message in opened.read("t", 0)]
        arrow = [
            row
            for batch in opened.read_arrow("t", 0)
            for row in batch.column("queue_offset").to_pylist()
        ]
    assert read_ == arrow == [at for at, _ in messages(tier, prefix=place.prefix)]
    assert len(read_) < 60


@pytest.mark.parametrize("error", [InvalidError("not now"), ZeroDivisionError("a defect")])
def test_a_thread_compacts_beside_a_writer_and_goes_on_after_an_error(
    error: Exception, monkeypatch: pytest.MonkeyPatch
):
    tier = filled([[mail(f"k{n % 3}") for n in range(20)], [mail("z")]])
    asked: list[str] = []

    def topics() -> list[str]:
        asked.append("")
        if len(asked) == 1:
            raise error
        return ["t", "not in the tier"]

    done = threading.Event()
    thread = CompactionThread(
        workplace(tier, RealTime()), CompactSettings(passes=ALWAYS), topics, interval_s=0.01
    )
    real = thread.round

    def told() -> None:
        real()
        thread._stop.set()  # another round, which finds nothing to do, says so in the counters
        done.set()

    monkeypatch.setattr(thread, "round", told)
    with thread:
        assert done.wait(60)
    assert (thread.counters.failures, thread.counters.passes) == (1, 1)
    assert (thread.counters.gone_messages, thread.counters.keys) == (17, 3)
    assert 0 < thread.counters.map_use < 1
    assert [at for at, _ in messages(tier)] == [17, 18, 19, 20]
    names = [sample.name for sample in thread.counters.samples()]
    assert render(thread.counters.samples()).count("# TYPE") == len(names) == 9


def test_a_thread_that_is_stopped_leaves_its_round():
    tier = filled([[mail("a")] * 9, [mail("z")]])
    thread = CompactionThread(workplace(tier), CompactSettings(passes=ALWAYS), lambda: ["t"], 1.0)
    thread._stop.set()
    with pytest.raises(Stopping):
        thread.round()
    assert len(messages(tier)) == 10


def test_a_topic_that_cannot_be_compacted_keeps_no_other_from_it():
    tier = KeyedTier()
    for topic in ("a", "t"):
        tier.post(MessageQueue(topic, 0), [mail("k")] * 9)
        tier.post(MessageQueue(topic, 0), [mail("z")], roll=True)
    inner = Mail(inner=(mail("x"), mail("y")))
    tier.post(MessageQueue("a", 0), [inner])
    tier.post(MessageQueue("a", 0), [mail("z")], roll=True)
    thread = CompactionThread(
        workplace(tier), CompactSettings(passes=ALWAYS), lambda: ["a", "t"], 1.0
    )
    with pytest.raises(InvalidError, match="inner batches"):
        thread.round()
    assert [at for at, _ in messages(tier)] == [8, 9]
    assert (thread.counters.passes, thread.counters.last_ms) == (1, 0)


def test_a_thread_that_is_stopped_leaves_what_it_carries_out(monkeypatch: pytest.MonkeyPatch):
    """What it had uploaded is nowhere named; how much there is left to do does not matter."""
    tier = filled([[mail("a")] * 9, [mail("z")]])
    thread = CompactionThread(workplace(tier), CompactSettings(passes=ALWAYS), lambda: ["t"], 1.0)
    real = Compactor.apply

    def stopped(compactor: Compactor, plan: CompactPlan) -> dict[str, Any]:
        thread._stop.set()
        return real(compactor, plan)

    monkeypatch.setattr(Compactor, "apply", stopped)
    with pytest.raises(Stopping):
        thread.round()
    assert len(messages(tier)) == 10


class Held(bytearray):
    """Bytes of which it can be told whether anybody has them still."""


def test_of_what_is_gathered_no_more_is_held_than_what_stays(monkeypatch: pytest.MonkeyPatch):
    """Little may stay of very much: so many messages make one section that all of their bytes fit into no memory."""
    tier = KeyedTier()
    for number in range(12):
        tier.post(QUEUE, [mail(f"k{n % 5}", b"x" * 3_000) for n in range(20)], roll=number == 11)
    read_part, held, most = compact_work.part_records, [], 0

    def noted(store: ObjectStore, prefix: str, queue: MessageQueue, part: Part) -> RecordBatch:
        nonlocal most
        batch = read_part(store, prefix, queue, part)
        batch.data = Held(batch.data)
        held.append(weakref.ref(batch.data))
        most = max(most, sum(one() is not None for one in held))
        return batch

    monkeypatch.setattr(compact_work, "part_records", noted)
    assert compact(tier)["steps"][0]["rewritten_parts"] == 11
    assert len(held) > 20
    assert most <= 3


def test_messages_without_a_key_are_counted_whole_in_rounds_too():
    tier = filled([[mail(f"k{n}") for n in range(40)], [mail("")] * 7, [mail("z")]])
    step = compact(tier, memory_bytes=128 * 10)["steps"][0]
    assert (step["rounds"] > 2, step["keyless"], step["tombstones"]) == (True, 7, 0)
