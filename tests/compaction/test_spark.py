"""The same pass by Spark, one session for all tests: what is left, and what the plan says, are the core's."""

from __future__ import annotations

import json
import pickle
import random
import warnings
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from support.compacting import (
    ALWAYS,
    OTHER,
    QUEUE,
    check,
    final_state,
    mail,
    messages,
    old_value,
    rows_of,
    seal,
    two_passes,
)
from support.journals import PREFIX
from support.keyed import KeyedTier, Mail
from support.tiers import PLACE

from backends.registry import open_store
from backends.s3_settings import S3Options
from tiered.clock import ManualClock
from tiered.compaction.passes import CAREFUL, KAFKA, ROCKETMQ
from tiered.dispatch.settings import Compression
from tiered.errors import DataError, InvalidError
from tiered.keys import parse_data_key
from tiered.model import MessageQueue
from tiered.spark.driver import SparkOrder, open_session, spark_engine
from tiered.upkeep import compact
from tiered.upkeep.compact import Compactor, CompactPlan, CompactSettings
from tiered.upkeep.compact_work import BundleWork, make_bundle
from tiered.upkeep.engine import WorkContext
from tiered.upkeep.workplace import Workplace

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = [pytest.mark.spark, pytest.mark.filterwarnings("ignore")]
QUEUES = [MessageQueue("t", number) for number in range(3)]


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    conf = {
        "spark.driver.host": "127.0.0.1",
        "spark.local.dir": str(tmp_path_factory.mktemp("spark")),
        "spark.sql.warehouse.dir": str(tmp_path_factory.mktemp("warehouse")),
        "spark.driver.extraJavaOptions": "-XX:+UseSerialGC -XX:TieredStopAtLevel=1",
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = open_session("local[2,3]", conf)
    yield made
    made.stop()


def filled(folder: Path, seed: int = 1, *, keyless: bool = True) -> KeyedTier:
    """A tier of three queues, several segments each; keys go to any queue."""
    rng, tier = random.Random(seed), KeyedTier(open_store(f"file://{folder}", S3Options()))
    for queue in QUEUES:
        for part in range(5):
            some = [_mail(rng, keyless=keyless) for _ in range(60)]
            tier.post(queue, some, roll=part in {2, 4})
        seal(tier, queue)
    return tier


def _mail(rng: random.Random, *, keyless: bool) -> Mail:
    keys = () if keyless and rng.random() < 0.1 else (f"k{rng.randrange(40)}",)
    body = b"" if rng.random() < 0.1 else rng.randbytes(rng.randrange(1, 300))
    return Mail(keys, body=body, time_ms=1_600_000_000_000 + rng.randrange(1000))


RUNS: Counter[str] = Counter()
"""Of each tier: a run draws an id that none before has, since two with the same would be one that was cloned."""


def compacted(
    tier: KeyedTier, session: Any, plan: dict[str, Any] | None = None, **options: Any
) -> dict[str, Any]:
    """A pass, by Spark if there is a session."""
    clock, bundles = options.pop("clock", None) or ManualClock(), options.pop("bundles", 256)
    settings = CompactSettings(**{"passes": ALWAYS, "compression": None, **options})
    RUNS[tier.store.url] += 1
    rng = random.Random(RUNS[tier.store.url])
    at = Workplace(tier.store, tier.store, PLACE, clock, rng)
    order = SparkOrder(tier.store.url, PREFIX, None, S3Options())
    engine = session and spark_engine(session, order)
    compactor = Compactor(at, settings, engine=engine, bundles=bundles)
    planned = CompactPlan.of(plan, "here") if plan else compactor.plan(["t"])
    done = compactor.apply(planned) if planned.steps else None
    tier.journal.catch_up()
    return {**planned.document(), "applied": done}


def state(tier: KeyedTier) -> dict[MessageQueue, list[tuple[int, bytes]]]:
    return {queue: messages(tier, queue) for queue in QUEUES}


def told(plan: dict[str, Any]) -> dict[str, Any]:
    """What a plan says, whoever made it."""
    return {name: plan[name] for name in ("steps", "left", "spread", "gone_messages", "dollars")}


@pytest.mark.parametrize(
    "options",
    [
        {"retention": CAREFUL},
        {"retention": KAFKA, "compression": Compression()},
        {"retention": ROCKETMQ},
        {"retention": ROCKETMQ, "across_queues": True},
    ],
    ids=["careful", "kafka packed", "rocketmq", "across"],
)
def test_what_is_left_is_what_the_core_leaves(
    options: dict[str, Any], tmp_path: Path, session: Any
):
    mine, theirs = filled(tmp_path / "spark"), filled(tmp_path / "core")
    before = state(mine)
    assert before == state(theirs)
    for turn in range(2):  # the second pass meets what the first has left, and what is new
        one, two = compacted(mine, session, **options), compacted(theirs, None, **options)
        assert told(one) == told(two)
        assert one["applied"]["steps"] == two["applied"]["steps"] == 3
        left = state(mine)
        assert left == state(theirs)
        assert 0 < sum(map(len, left.values())) < sum(map(len, before.values()))
        check(mine)
        if not turn:
            for tier in (mine, theirs):
                for queue in QUEUES:
                    tier.post(
                        queue, [mail(f"k{n}", b"new") for n in range(queue.queue_id, 30)], roll=True
                    )
                    seal(tier, queue)


@pytest.mark.parametrize("where", ["open", "last"])
def test_a_tombstone_waits_for_an_old_value_in_another_queue(
    where: str, tmp_path: Path, session: Any
):
    mine = KeyedTier(open_store(f"file://{tmp_path}", S3Options()))
    old_value(mine, where)
    before = final_state(rows_of(mine))
    two_passes(mine, lambda tier, **options: compacted(tier, session, **options))
    assert final_state(rows_of(mine)) == {**before, "z": b"body"}
    assert [at for at, _ in messages(mine)] == [0, 1, 2]
    mine.post(OTHER, [Mail(("y",), time_ms=9001)], roll=where == "last")
    seal(mine, OTHER)
    later = ManualClock(2 * ManualClock().now_ms())
    compacted(mine, session, across_queues=True, clock=later)
    assert [[at for at, _ in messages(mine, queue)] for queue in (QUEUE, OTHER)] == [[1, 2], [2]]


def test_a_tombstone_waits_for_an_old_value_that_one_task_has_read_with_it(
    tmp_path: Path, session: Any
):
    """A clock was set back: the queue's newest message is older than the tombstone."""
    mine = KeyedTier(open_store(f"file://{tmp_path}", S3Options()))
    some = [Mail(("k",), body=b"", time_ms=2000), Mail(("x",), body=b"", time_ms=2000)]
    mine.post(QUEUE, [*some, Mail(("k",), body=b"old", time_ms=1000)])
    seal(mine)
    compacted(mine, session, across_queues=True, retention=ROCKETMQ)
    assert [at for at, _ in messages(mine)] == [0, 2]


def test_keys_of_several_queues_are_told(tmp_path: Path, session: Any):
    (row,) = compacted(filled(tmp_path), session)["spread"]
    assert (row["topic"], row["keys"], row["of_keys"]) == ("t", 40, 40)


def test_a_plan_of_another_process_is_carried_out(tmp_path: Path, session: Any):
    mine, theirs = filled(tmp_path / "spark"), filled(tmp_path / "core")
    plan = compacted(filled(tmp_path / "plan"), session, across_queues=True)
    plan = json.loads(json.dumps({**plan, "url": mine.store.url}))
    del plan["applied"]
    assert compacted(mine, session, plan, across_queues=True)["applied"]["steps"] == 3
    assert compacted(mine, session, plan, across_queues=True)["applied"]["was_applied"]
    compacted(theirs, None, across_queues=True)
    assert state(mine) == state(theirs)


def test_bundles_are_named_together_with_their_queue_and_small_queues_share_one(
    tmp_path: Path, session: Any, monkeypatch: pytest.MonkeyPatch
):
    mine = filled(tmp_path / "one")
    done = compacted(mine, session)["applied"]
    assert (done["bundles"], done["entries"]) == (1, 1)
    monkeypatch.setattr(compact, "RUN_BYTES_MAX", 4000)
    other = filled(tmp_path / "many")
    done = compacted(other, session, bundles=1)["applied"]
    assert done["entries"] == 3
    assert done["bundles"] > 3
    assert state(mine) == state(other)


def test_a_task_that_is_done_twice_adopts_its_bundle_and_no_other(tmp_path: Path):
    tier = filled(tmp_path)
    settings = CompactSettings(passes=ALWAYS, compression=None, retention=CAREFUL)
    at = Workplace(tier.store, tier.store, PLACE, ManualClock(), random.Random(1))
    compactor = Compactor(at, settings)
    asked: list[BundleWork] = []

    def made(works: Iterator[BundleWork]) -> Iterator[Any]:
        asked.extend(works)
        raise InvalidError("not now")

    compactor.made = made  # type: ignore[assignment]
    with pytest.raises(InvalidError, match="not now"):
        compactor.apply(compactor.plan(["t"]))
    (work,), bench = asked, WorkContext(tier.store, PREFIX, tier.store)
    first = make_bundle(bench, work)
    bundles = {info.key for info in tier.store.list(PREFIX) if parse_data_key(PREFIX, info.key)}
    again = pickle.loads(pickle.dumps(work))
    assert make_bundle(bench, again) == first
    assert {i.key for i in tier.store.list(PREFIX) if parse_data_key(PREFIX, i.key)} == bundles
    other = tuple([np.zeros_like(bits) for bits in some] for some in work.stays)
    with pytest.raises(DataError, match="other bytes"):
        make_bundle(bench, replace(work, stays=other))


def test_inner_batches_are_refused_by_workers_in_the_same_words(tmp_path: Path, session: Any):
    tier = KeyedTier(open_store(f"file://{tmp_path}", S3Options()))
    tier.post(QUEUES[0], [mail("a"), Mail((), inner=(mail("a"), mail("b")))])
    seal(tier, QUEUES[0])
    before = tier.journal.number
    with pytest.raises(InvalidError, match="inner batches"):
        compacted(tier, session)
    assert tier.journal.number == before
