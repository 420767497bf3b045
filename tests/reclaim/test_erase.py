"""Erasing: what was given up leaves the store, wherever it lies; everything else stays, byte for byte."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.aged import GRACE_S, Tier, keys_of, leased, merge_all, offsets, old_reader
from support.journals import PREFIX
from support.merging import gather, make, runs_of, text
from support.tiers import QUEUE, batch_of

from backends.errors import UnavailableError
from backends.testing.faulty import WRITES, Fault, FaultyStore, Rule, SimulatedCrash
from backends.wrapping import WrappingStore
from tiered.errors import FencedError, InvalidError
from tiered.format.bundle import read_table
from tiered.journal.entry import open_text
from tiered.keys import LEDGER
from tiered.log.merge import MergeOutput
from tiered.log.reader import TierReader
from tiered.log.verify import verify_tier
from tiered.model import MessageQueue, QueueOffset
from tiered.upkeep.expire import apply_steps, plan_delete_topic, plan_expire
from tiered.upkeep.gc import apply_erasure, find_given_up, plan_gc
from tiered.upkeep.rebuild import apply_rebuild, plan_rebuild

if TYPE_CHECKING:
    from backends.base import ByteRange, ObjectStore, Version
    from tiered.log.reader import QueueReader
    from tiered.upkeep.gc import GcPlan

PEOPLE = MessageQueue("people", 0)
SECRET = b"SECRET-PERSON"
Content = dict[MessageQueue, list[bytes]]


def planned(tier: Tier, grace_s: float = GRACE_S, *, erases: bool = True) -> GcPlan:
    return plan_gc(
        tier.store,
        tier.at.place,
        tier.clock,
        grace_ms=round(grace_s * 1000),
        max_deletions=10_000,
        erases=erases,
    )


def erase(
    tier: Tier, plan: GcPlan | None = None, store: ObjectStore | None = None
) -> dict[str, Any]:
    return apply_erasure(tier.workplace(store or tier.store), plan or planned(tier))


def delete_people(tier: Tier) -> None:
    apply_steps(tier.at, plan_delete_topic(tier.at, PEOPLE.topic, objects_max=99))
    tier.restart()
    # The ledger tells runs apart by their time, and by an id that is always the same here.
    tier.clock.advance(1)


def collect(tier: Tier) -> None:
    """A gc past the grace; then nothing is there that is not named."""
    tier.restart()
    tier.clock.advance(GRACE_S + 1)
    tier.apply(tier.plan())
    assert tier.data() == tier.named()


def content(tier: Tier) -> Content:
    """Every record of every queue, byte for byte."""
    reader = TierReader(tier.store, PREFIX)
    reader.refresh()
    found: Content = {}
    for queue, incarnations in reader.state.queues.items():
        for batch in reader.queue(queue).batches(QueueOffset(incarnations[-1].min_offset)):
            if batch.records is not None:
                found.setdefault(queue, []).append(bytes(batch.records.data))
    return {queue: [b"".join(data)] for queue, data in found.items()}


def topics_in_tables(tier: Tier) -> set[str]:
    """Whose sections lie in any bundle, named or not."""
    found: set[str] = set()
    for key in tier.data():
        data = tier.store.get(PREFIX + key)
        found.update(read_table(data, len(data), where=key).topics)
    return found


def items_in_tables(tier: Tier) -> int:
    """Queue offsets of which anything lies in any bundle."""
    found = 0
    for key in tier.data():
        data = tier.store.get(PREFIX + key)
        found += int(read_table(data, len(data), where=key).rows["count"].sum())
    return found


def holds_secret(tier: Tier) -> list[str]:
    return [i.key for i in tier.store.list("") if SECRET in tier.store.get(i.key)]


def shared() -> Tier:
    """Three rounds of two topics, each a bundle; one topic is deleted."""
    tier = Tier()
    for number in range(3):
        items = [b"%s %d" % (SECRET, number)]
        tier.builder.add_round(
            batch_of(number, items, queue=PEOPLE), batch_of(number, [b"plain"], queue=QUEUE)
        )
    delete_people(tier)
    return tier


def test_what_gc_deletes_is_not_all_and_gc_says_so():
    tier = shared()
    collect(tier)
    assert len(holds_secret(tier)) == 3
    plan = planned(tier, erases=False)
    assert (plan.given_up_bundles, plan.erases, plan.erasures) == (3, False, ())
    assert plan.given_up_bytes > 3 * len(SECRET)


def test_i11_a_deleted_topic_leaves_the_store_and_the_others_stay():
    tier = shared()
    before = content(tier)
    plan = planned(tier)
    assert {row.key.removeprefix(PREFIX) for row in plan.erasures} == tier.named()
    assert len(holds_secret(tier)) == 3  # a plan changes nothing
    done = erase(tier, plan)
    assert (done["bundles"], done["made"], done["already_done"], done["stays"]) == (3, 1, 0, [])
    assert done["given_up_bytes"] == plan.given_up_bytes
    assert done["gone_after_ms"] >= tier.clock.now_ms() + plan.grace_ms
    assert content(tier) == before
    assert verify_tier(tier.store, PREFIX, deep=True).is_clean
    tier.clock.advance(GRACE_S / 2)
    assert keys_of(planned(tier)) == set()  # the grace
    assert len(holds_secret(tier)) == 3
    collect(tier)
    assert holds_secret(tier) == []
    assert topics_in_tables(tier) == {QUEUE.topic}
    assert content(tier) == before
    assert verify_tier(tier.store, PREFIX, deep=True).is_clean
    again = planned(tier)
    assert (again.given_up_bundles, again.erasures) == (0, ())


def test_a_lost_journal_does_not_bring_it_back():
    tier = shared()
    before = content(tier)
    erase(tier)
    collect(tier)
    for info in list(tier.store.list(PREFIX + "journal/")):
        tier.store.delete(info.key)
    with ThreadPoolExecutor(2) as pool:
        apply_rebuild(tier.at, plan_rebuild(tier.store, PREFIX, pool), accept_gaps=False)
    assert content(tier) == before
    assert PEOPLE not in tier.restart().journal.state.queues


def test_out_of_compressed_bundles_too_and_they_stay_compressed():
    tier = Tier()
    bodies = [text(seed, 200_000) for seed in range(4)]
    tier.builder.add([bodies[0] + SECRET, bodies[1]], queue=PEOPLE)
    tier.builder.add([bodies[2], bodies[3]])
    gather(tier.builder)
    before = content(tier)
    stored = tier.builder.journal.state.incarnation(QUEUE).parts()[0].section  # type: ignore[union-attr]
    assert stored.is_packed
    delete_people(tier)
    del before[PEOPLE]
    collect(tier)
    assert topics_in_tables(tier) == {PEOPLE.topic, QUEUE.topic}
    assert erase(tier)["bundles"] == 1
    collect(tier)
    assert topics_in_tables(tier) == {QUEUE.topic}
    assert content(tier) == before
    part = tier.builder.journal.state.incarnation(QUEUE).parts()[0]  # type: ignore[union-attr]
    assert (part.section.is_packed, part.section.crc) == (True, stored.crc)
    assert verify_tier(tier.store, PREFIX, deep=True).is_clean


def test_what_has_expired_of_a_queue_that_goes_on_and_what_was_truncated_in_part():
    tier = Tier()
    tier.builder.add([SECRET + b" old", b"x"])
    tier.builder.add([b"new", SECRET + b" wrong"], roll=True)
    gather(tier.builder)
    tier.builder.truncate(3)
    tier.restart()
    tier.clock.advance(60)
    apply_steps(tier.at, plan_expire(tier.at, lambda _: 0, objects_max=99))
    tier.restart()
    before = content(tier)
    collect(tier)
    assert len(holds_secret(tier)) == 1
    assert erase(tier)["bundles"] == 1
    collect(tier)
    assert holds_secret(tier) == []
    assert content(tier) == before != {}
    assert verify_tier(tier.store, PREFIX, deep=True).is_clean


def test_what_is_named_whole_is_not_touched():
    tier = shared()
    whole = tier.builder.add([b"alone"])
    erase(tier)
    state = tier.restart().journal.state
    kept = state.incarnation(QUEUE).parts()  # type: ignore[union-attr]
    assert kept[len(kept) - 1] == whole


def test_each_stays_on_its_level_and_progress_is_told():
    tier = Tier()
    for number, level in enumerate((3, 2, 0)):
        some = ((PEOPLE, SECRET), (QUEUE, b"plain"))
        tier.builder.add_round(*(batch_of(number, [body], queue=queue) for queue, body in some))
        if level:
            runs = runs_of(tier.builder.journal.state)
            newest = [replace(run, parts=run.parts[-1:]) for run in runs]
            make(tier.builder, MergeOutput(level, tuple(newest)))
    delete_people(tier)
    steps: list[tuple[int, int]] = []
    apply_erasure(tier.at, planned(tier), told=lambda *step: steps.append(step))
    assert steps == [(1, 3), (2, 3), (3, 3)]
    parts = tier.restart().journal.state.incarnation(QUEUE).parts()  # type: ignore[union-attr]
    assert [part.bundle.level for part in parts] == [3, 2, 1]


class Slow(WrappingStore):
    """Each read takes 25 s; counts the writes of the lease."""

    renewals = 0

    def __init__(self, tier: Tier) -> None:
        super().__init__(tier.store)
        self._tier = tier

    def get(self, key: str, byte_range: ByteRange | None = None) -> bytes:
        self._tier.clock.advance(25 if "bundle/" in key else 0)
        return super().get(key, byte_range)

    def compare_and_set(self, key: str, data: bytes, expected: Version | None) -> Version:
        self.renewals += key.endswith("lease")
        return super().compare_and_set(key, data, expected)


def test_the_lease_is_prolonged_while_it_goes_on():
    tier = shared()
    slow = Slow(tier)
    assert erase(tier, planned(tier), slow)["bundles"] == 3
    assert slow.renewals >= 4  # taken, prolonged before each read but the first, given back


def test_it_needs_that_nobody_writes():
    tier = shared()
    plan = planned(tier)
    lease = leased(tier)
    assert planned(tier).is_writer_alive
    with pytest.raises(FencedError, match="a writer is at work"):
        erase(tier, plan)
    assert len(holds_secret(tier)) == 3
    tier.builder.add([b"more"])  # nobody was fenced
    lease.release()
    assert erase(tier, plan)["bundles"] == 3


@pytest.mark.parametrize("fault", [Fault.CRASH_BEFORE, Fault.CRASH_AFTER])
@pytest.mark.parametrize("key_part", ["ledger/", "lease", "journal/", "bundle/"])
@pytest.mark.parametrize("skip", [0, 1])
def test_a_crash_in_the_middle_and_again(fault: Fault, key_part: str, skip: int):
    tier = shared()
    before, plan = content(tier), planned(tier)
    rule = Rule(fault, key_part=key_part, skip=skip, times=1, operations=WRITES)
    try:
        erase(tier, plan, FaultyStore(tier.store, random.Random(1), rule))
    except SimulatedCrash:
        pass
    else:
        assert (key_part, skip) == ("bundle/", 1)  # there is one only
    assert content(tier) == before
    assert verify_tier(tier.store, PREFIX, deep=True).is_clean
    tier.clock.advance(60)  # for the lease of the dead process, were it another's
    done = erase(tier, plan)
    assert done["bundles"] + done["already_done"] == 3
    assert done["was_applied"] == (done["already_done"] == 3)
    collect(tier)
    assert holds_secret(tier) == []
    assert content(tier) == before


def test_a_store_that_fails_ends_it_and_the_same_plan_goes_on():
    tier = shared()
    plan = planned(tier)
    rule = Rule(Fault.UNAVAILABLE, key_part="bundle/", operations=frozenset({"get"}), times=1)
    with pytest.raises(UnavailableError):
        erase(tier, plan, FaultyStore(tier.store, random.Random(1), rule))
    assert erase(tier, plan)["bundles"] == 3


def test_a_reader_that_is_in_the_middle_goes_on():
    tier = shared()
    reader = old_reader(tier)
    first = record_of(reader, 0)
    erase(tier)
    collect(tier)
    assert record_of(reader, 1) != first == record_of(reader, 0)
    assert offsets(reader, 0) == [0, 1, 2]
    assert content(tier)[QUEUE] == [b"".join(record_of(reader, at) for at in range(3))]


def record_of(reader: QueueReader, offset: int) -> bytes:
    found = reader.read(QueueOffset(offset)).records  # type: ignore[union-attr]
    return bytes(found.data)[: found.sizes[0]]


def test_a_damaged_bundle_stays_and_is_named_and_the_others_are_done():
    tier = shared()
    doomed = min(tier.named())
    data = bytearray(tier.store.get(PREFIX + doomed))
    at = bytes(data).index(b"plain")
    data[at] ^= 1
    tier.store.delete(PREFIX + doomed)
    tier.store.put_if_absent(PREFIX + doomed, bytes(data))
    done = erase(tier)
    assert (done["bundles"], [row["key"] for row in done["stays"]]) == (2, [PREFIX + doomed])
    assert "fail their checksum" in done["stays"][0]["reason"]
    assert [row.key for row in planned(tier).erasures] == [PREFIX + doomed]


class Expiring(WrappingStore):
    """Somebody expires just before what was rewritten is named."""

    def __init__(self, tier: Tier) -> None:
        super().__init__(tier.store)
        self._tier = tier
        self._has_come = False
        self._is_made = False

    def put_if_absent(self, key: str, data: Any) -> None:
        self._is_made |= "/bundle/" in key
        if "journal/" in key and self._is_made and not self._has_come:
            self._has_come = True
            plan = plan_expire(self._tier.at, lambda _: 0, objects_max=99)
            assert apply_steps(self._tier.at, plan)["steps"] == 1
        super().put_if_absent(key, data)


def test_what_expires_meanwhile_does_not_stay_in_what_was_rewritten():
    tier = Tier()
    other = MessageQueue("other", 0)
    some = ((PEOPLE, b"x"), (other, SECRET), (QUEUE, b"plain"))
    tier.builder.add_round(*(batch_of(0, [body], queue=queue) for queue, body in sorted(some)))
    tier.builder.add([b"on"], queue=other, roll=True)
    delete_people(tier)
    tier.clock.advance(60)
    done = erase(tier, store=Expiring(tier))
    assert (done["bundles"], done["made"]) == (2, 2)
    collect(tier)
    assert holds_secret(tier) == []
    assert topics_in_tables(tier) == {other.topic, QUEUE.topic}
    assert verify_tier(tier.store, PREFIX, deep=True).is_clean


def test_a_plan_of_another_store_is_refused_and_one_that_is_old_does_what_is_left():
    tier = shared()
    plan = planned(tier)
    with pytest.raises(InvalidError, match="another store"):
        erase(tier, replace(plan, store={"cluster": "x"}))
    tier.restart()
    merge_all(tier)
    done = erase(tier, plan)
    assert done["bundles"] + done["already_done"] == 3


def test_the_ledger_says_what_was_done():
    tier = shared()
    erase(tier)
    keys = [info.key for info in tier.store.list(PREFIX + LEDGER)]
    every = [open_text(tier.store.get(key), where=key) for key in keys]
    begin, end = [record for record in every if record["what"] == "gc --erase"]
    assert (begin["what"], begin["plan"]["counts"]["erasures"]) == ("gc --erase", 3)
    assert (end["step"], end["bundles"], end["stays"]) == ("end", 3, 0)


def test_nothing_is_rewritten_when_a_named_object_is_gone():
    tier = shared()
    tier.store.delete(PREFIX + min(tier.named()))
    plan = planned(tier)
    assert plan.refusals
    assert plan.erasures == ()


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["round", "round", "roll", "merge", "gather", "expire", "back", "delete"]),
            st.integers(1, 3),
        ),
        min_size=2,
        max_size=10,
    )
)  # fmt: skip
def test_whatever_was_before_afterwards_only_what_is_named_is_there(steps: list[tuple[str, int]]):
    tier = Tier()
    for step, count in [("round", 2), *steps]:
        builder = tier.builder
        if step in {"round", "roll"}:
            batches = (
                batch_of(builder.file(queue).append_offset, [SECRET] * count, queue=queue)
                for queue in (PEOPLE, QUEUE)
            )
            builder.add_round(*batches, roll=step == "roll")
        elif step == "merge":
            merge_all(tier)
        elif step == "gather" and tier.named():
            gather(builder, count)
        elif step == "expire":
            tier.clock.advance(60)
            apply_steps(tier.at, plan_expire(tier.at, lambda _: 0, objects_max=99))
            tier.restart()
        elif step == "back":
            incarnation = builder.journal.state.incarnation(QUEUE)
            if incarnation and incarnation.commit_offset - count > incarnation.min_offset:
                builder.truncate(incarnation.commit_offset - count)
        elif step == "delete":
            delete_people(tier)
    before = content(tier)
    plan = planned(tier)
    if plan.erasures:
        erase(tier, plan)
    collect(tier)
    assert content(tier) == before
    state = tier.builder.journal.state
    assert find_given_up(tier.store, PREFIX, state) == []
    every = [incarnation for incarnations in state.queues.values() for incarnation in incarnations]
    assert items_in_tables(tier) == sum(
        part.count for incarnation in every for part in incarnation.parts()
    )
    assert verify_tier(tier.store, PREFIX, deep=True).is_clean
