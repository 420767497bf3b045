"""`gc`, `expire`, `delete-topic` and `truncate` end at each named point; a plan goes on, and the tier is whole."""

from __future__ import annotations

import json
import time
from collections import Counter
from typing import TYPE_CHECKING

import pytest
from support import tier_checks
from support.command_line import here
from support.reclaiming import (
    LITTER,
    NO_GRACE,
    check_end,
    crash,
    keys_in,
    litter,
    minima,
    named,
    tiered_store,
)

from tiered.cli.planned import GC_THREADS

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = pytest.mark.timeout(180)
LOST = 3
"""Messages that a truncation ends a queue before."""
TTL = ("--ttl", "1s", "--max-deletions", "100000")


def test_i11_gc(
    stores: Callable[[str], Path], new_url: Callable[[Path], str], tmp_path: Path
) -> None:
    store, url, plan = stores("s01-basic"), new_url(tmp_path), tmp_path / "plan.json"
    tiered_store(store, url)
    lost = litter(url)
    crash("plan-saved", "gc", url, *NO_GRACE, "--plan", plan)
    due = keys_in(url) - named(url)
    assert lost < due
    apply = ("gc", url, "--apply", plan, "--max-deletions", "100000")
    for point in ("ledger-begun", "lease-taken", "epoch-taken"):
        crash(point, *apply)
        assert due <= keys_in(url), f"{point}: nothing may be deleted yet"
    planned = json.loads(plan.read_text())
    all_due = {one["key"] for one in planned["deletions"]}
    kinds = Counter(planned["kinds"])
    last = kinds["checkpoint"] + kinds["entry"] // 2  # what is left then lies in the journal
    left = len(all_due)
    for number in (1, 9, None):
        at = number or left - last
        crash(f"object-deleted:{at}", *apply)
        before, left = left, len(keys_in(url, every=True) & all_due)
        assert at <= before - left < at + GC_THREADS
    assert left <= kinds["checkpoint"] + kinds["entry"]
    crash("ledger-ended", *apply)
    assert keys_in(url) == named(url)
    done = here(*apply, "--json").good().document["applied"]
    assert (done["deleted"], done["already_gone"] >= len(due) > LITTER) == (0, True)
    check_end(url, store, set())


@pytest.mark.slow
def test_i11_what_was_given_up_is_erased(
    stores: Callable[[str], Path], new_url: Callable[[Path], str], tmp_path: Path
) -> None:
    """The same plan at each point, until what it rewrites is named; then once more, when nothing is left of it to do."""
    store, url, plan = stores("s01-basic"), new_url(tmp_path), tmp_path / "plan.json"
    here("attach", store, "--to", url, "--once").good()
    here("delete-topic", url, "large", "--apply", "-").good()
    here("gc", url, *NO_GRACE, "--erase", "--plan", plan).good()
    old = {row["key"] for row in json.loads(plan.read_text())["erasures"]}
    assert old
    apply = ("gc", url, "--apply", plan, *NO_GRACE[2:])
    for point in ("ledger-begun", "lease-taken", "epoch-taken", "merged-stored", "entry-begun:2"):
        crash(point, *apply)
        assert old <= named(url), point
    for point in ("entry-put:2", "lease-held", "ledger-ended"):
        crash(point, *apply)
        assert not old & named(url), point
    done = here(*apply, "--json").good().document["erased"]
    assert (done["bundles"], done["already_done"], done["was_applied"]) == (0, len(old), True)
    time.sleep(1.1)  # S3 tells times in seconds
    last = here("gc", url, *NO_GRACE, "--erase", "--apply", "-", "--json").good().document
    assert (last["given_up_bundles"], keys_in(url)) == (0, named(url))
    check_end(url, store, {"large"})


@pytest.mark.parametrize("what", ["expire", pytest.param("delete-topic", marks=pytest.mark.slow)])
def test_i11_a_topic_given_up(
    what: str, stores: Callable[[str], Path], new_url: Callable[[Path], str], tmp_path: Path
) -> None:
    """At each point another topic, planned anew; `expire` is given up half-way, `delete-topic` with its epoch."""
    store, url = stores("s01-basic"), new_url(tmp_path)
    tiered_store(store, url)
    points = ["ledger-begun", "entry-begun", "entry-put", "steps-appended", "ledger-ended"]
    topics = ["orders", "events", "unicode", "large", "many-properties"]
    if what == "delete-topic":
        points = ["lease-taken", "epoch-taken", "entry-put:2", "steps-appended", "lease-held"]
    for number, (point, topic) in enumerate(zip(points, topics, strict=True)):
        plan = tmp_path / f"plan{number}.json"
        some = (*TTL, "--topics", topic) if what == "expire" else (topic, *TTL[2:])
        if number:
            here(what, url, *some, "--plan", plan).good()
        else:
            crash("plan-saved", what, url, *some, "--plan", plan)
        apply = (what, url, *some, "--apply", plan)
        whole = minima(url, topic)
        crash(point, *apply)
        is_done = point.partition(":")[0] in {
            "entry-put", "steps-appended", "ledger-ended", "lease-held",
        }  # fmt: skip
        assert (minima(url, topic) != whole) is is_done, point
        done = here(*apply, "--json").good().document["applied"]
        assert (done["already_done"] > 0) is is_done
        assert all(low == high for low, high in minima(url, topic))
    check_end(url, store, set(topics))


@pytest.mark.slow
def test_i11_a_queue_truncated(
    stores: Callable[[str], Path], new_url: Callable[[Path], str], tmp_path: Path
) -> None:
    """At each point another queue; the same plan is carried out again, and the broker's store gives what was taken."""
    store, url = stores("s01-basic"), new_url(tmp_path)
    tiered_store(store, url)
    whole = tier_checks.bounds(url)
    points = [
        *("plan-saved", "ledger-begun", "lease-taken", "epoch-taken", "entry-begun:2"),
        *("entry-put:2", "steps-appended", "lease-held", "ledger-ended"),
    ]
    done_at = set(points[points.index("entry-put:2") :])
    queues = [queue for queue, (low, end) in sorted(whole.items()) if end - low > LOST]
    for number, (point, queue) in enumerate(zip(points, queues, strict=False)):
        low, end = whole[queue]
        where = ("truncate", url, queue.topic, "--queue", str(queue.queue_id))
        plan = tmp_path / f"plan{number}.json"
        planning = (*where, "--to", str(end - LOST), "--plan", plan)
        apply = (*where, "--apply", plan)
        if point == "plan-saved":
            crash(point, *planning)
        else:
            here(*planning).good()
            crash(point, *apply)
        is_done = point in done_at
        assert tier_checks.bounds(url)[queue] == (low, end - LOST if is_done else end), point
        done = here(*apply, "--json").good().document["applied"]
        assert (done["steps"], done["already_done"]) == (int(not is_done), int(is_done)), point
        assert tier_checks.bounds(url)[queue] == (low, end - LOST)
    assert number + 1 == len(points), "each point was tried"
    given = here("attach", store, "--to", url, "--once", "--json").good().document
    assert given["messages"] == LOST * len(points)
    assert tier_checks.bounds(url) == whole
    check_end(url, store, set())
