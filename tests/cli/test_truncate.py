"""``truncate``: a tier that has swallowed what never was is put right by a person's word."""

from __future__ import annotations

import contextlib
import json
import signal
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from support.tiers import TierBuilder, record_of

from backends.registry import open_store
from tiered.api.broker_place import Place
from tiered.local.interface import HoleReason, RecordBatch
from tiered.model import MessageQueue, QueueOffset

if TYPE_CHECKING:
    from pathlib import Path

    from support.command_line import CommandLine, Start

QUEUE = MessageQueue("orders", 0)
BOGUS = 1_000_000


class Shop:
    """A store that goes on, and its tier."""

    def __init__(self, tiered: CommandLine, folder: Path) -> None:
        self.tiered = tiered
        self.store, self.url = folder / "store", f"file://{folder}/tier"
        self.lines = folder / "lines"
        tiered.good("store", "create", self.store, "--log-file-size", "1MiB")

    def put(self, count: int) -> None:
        place = {"topic": QUEUE.topic, "queue_id": QUEUE.queue_id}
        line = json.dumps({**place, "properties": {}, "body_base64": "eA=="})
        self.lines.write_text(f"{line}\n" * count)
        self.tiered.good("store", "put", self.store, self.lines)

    def attach(self) -> dict[str, Any]:
        return self.tiered.good("attach", self.store, "--to", self.url, "--once", "--json").document

    def bounds(self) -> tuple[int, int]:
        (queue,) = self.tiered.good("ls", self.url, "--json").document["queues"]
        return queue["min_offset"], queue["commit_offset"]

    def swallow(self, holes: int, *, also: bytes | None = None) -> None:
        """Tier holes that the store never had, and behind them perhaps one message under their end's offset."""
        store = open_store(self.url)
        (journal,) = {
            i.key.removesuffix("lease") for i in store.list("") if i.key.endswith("/lease")
        }
        builder = TierBuilder(store, writer="0ddba11d", prefix=journal)
        end = builder.file(QUEUE).append_offset
        raw = record_of(QUEUE, end + holes, also) if also else b""
        sizes = np.zeros(holes + bool(also), np.int32)
        times = np.full(len(sizes), -1, np.int64)
        tags = np.full(len(sizes), int(HoleReason.MISSING), np.int64)
        if also:
            sizes[-1], times[-1], tags[-1] = len(raw), 1_700_000_000_000, 97
        builder.add_batch(
            RecordBatch(
                queue=QUEUE,
                base_offset=QueueOffset(end),
                data=raw,
                positions=np.zeros(len(sizes), np.int64),
                sizes=sizes,
                tag_codes=tags,
                store_timestamps_ms=times,
                physical_offsets=times,
            )
        )
        store.close()

    def truncate(self, end: int, *options: str | Path) -> Any:
        where = ("truncate", self.url, QUEUE.topic, "--queue", "0", "--to", str(end))
        return self.tiered(*where, *options)

    def require_whole(self) -> None:
        self.tiered.good("verify", self.url, "--deep", "--store", self.store)


@pytest.fixture
def shop(tiered: CommandLine, tmp_path: Path) -> Shop:
    made = Shop(tiered, tmp_path)
    made.put(30)
    assert made.attach()["messages"] == 30
    return made


def test_a_tier_that_swallowed_a_million_holes_goes_on_with_the_healthy_store(shop: Shop):
    shop.swallow(BOGUS, also=b"the one with the bad offset")
    shop.put(12)
    stuck = shop.attach()  # it is taken for a copy that lags
    assert (stuck["messages"], stuck["ahead_queues"]) == (0, 1)
    planned = shop.truncate(30, "--json", "--exit-code")
    assert planned.code == 1
    (step,) = planned.document["steps"]
    assert (step["to"], step["was"]) == (30, 30 + BOGUS + 1)
    assert (step["messages"], step["holes"], step["begins_anew"]) == (1, BOGUS, False)
    assert shop.bounds() == (0, 31 + BOGUS)
    done = shop.truncate(30, "--apply", "-", "--json").document["applied"]
    assert (done["steps"], done["was_applied"]) == (1, False)
    assert shop.bounds() == (0, 30)
    went_on = shop.attach()
    assert (went_on["messages"], went_on["ahead_queues"], went_on["truncated"]) == (12, 0, 0)
    assert shop.bounds() == (0, 42)
    shop.require_whole()
    assert len(shop.tiered.good("cat", shop.url, QUEUE.topic).rows) == 42
    kept = shop.tiered.good("cat", shop.url, QUEUE.topic, "--incarnation", "all").rows
    assert len(kept) == 43  # nothing is destroyed


def test_inside_a_part_also_where_real_messages_go_with_the_holes(shop: Shop):
    """The first wrong offset may lie before the end of what both have; the store gives those messages again."""
    shop.swallow(5)
    shop.put(3)
    shown = shop.truncate(17)
    assert "13 messages, 5 holes" in shown.text
    assert "real messages among them" in shown.text
    assert "nothing is changed" in shown.text
    shown = shop.truncate(17, "--apply", "-")
    assert shown.code == 0, shown.err
    assert shop.bounds() == (0, 17)
    assert shop.attach()["messages"] == 16
    assert shop.bounds() == (0, 33)
    shop.require_whole()


def test_where_only_holes_go_nothing_is_said_of_messages(shop: Shop):
    shop.swallow(5)
    shown = shop.truncate(30)
    assert "0 messages, 5 holes" in shown.text
    assert "real messages" not in shown.text


def test_to_its_first_offset_the_queue_begins_anew(shop: Shop):
    shop.swallow(5)
    assert "begins anew at 0" in shop.truncate(0).text
    assert shop.truncate(0, "--apply", "-").code == 0
    assert shop.bounds() == (0, 0)
    assert shop.attach()["messages"] == 30
    shop.require_whole()


def test_a_plan_in_a_file_is_carried_out_once_and_told_of_the_second_time(
    shop: Shop, tmp_path: Path
):
    shop.swallow(5)
    file = tmp_path / "plan.json"
    assert shop.truncate(30, "--plan", file).code == 0
    assert shop.bounds() == (0, 35)
    apply = ("truncate", shop.url, QUEUE.topic, "--apply", file)
    assert shop.tiered.good(*apply, "--json").document["applied"]["steps"] == 1
    again = shop.tiered.good(*apply, "--json").document["applied"]
    assert (again["steps"], again["already_done"], again["was_applied"]) == (0, 1, True)
    assert "was applied before" in shop.tiered.good(*apply).text
    shop.swallow(5)  # the same once more: another plan, and not the one that was applied
    assert shop.bounds() == (0, 35)
    done = shop.truncate(30, "--apply", "-", "--json").document["applied"]
    assert (done["steps"], done["was_applied"]) == (1, False)
    assert shop.bounds() == (0, 30)


def test_a_plan_of_a_queue_that_went_on_is_refused(shop: Shop, tmp_path: Path):
    file = tmp_path / "plan.json"
    assert shop.truncate(20, "--plan", file).code == 0
    shop.put(4)
    shop.attach()
    ran = shop.truncate(20, "--apply", file)
    assert ran.code == 1
    assert "does not begin or end where it did" in ran.error
    assert shop.bounds() == (0, 34)
    other = shop.truncate(21, "--apply", file)
    assert other.code == 2
    assert "20 as to, not 21" in other.error


def test_it_refuses_while_a_writer_incarnations(shop: Shop, start: Start):
    with start("attach", shop.store, "--to", shop.url, "--freshness", "0.1") as process:
        try:
            deadline = time.monotonic() + 120
            while shop.tiered.good("lease", shop.url, "--json").document["state"] != "held":
                assert time.monotonic() < deadline
                assert process.poll() is None
                time.sleep(0.1)
            ran = shop.truncate(20, "--apply", "-")
            assert ran.code == 4
            assert "a writer is at work" in ran.error
        finally:
            process.send_signal(signal.SIGTERM)
            process.communicate(timeout=120)
    assert shop.bounds() == (0, 30)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("orders", "--queue", "0"), "which queue is to end, and where"),
        (("orders", "--to", "3"), "which queue is to end, and where"),
        (("orders", "--queue", "0", "--to", "31"), "has queue offsets [0, 30)"),
        (("orders", "--queue", "7", "--to", "3"), "no queue orders/7"),
        (("nobody", "--queue", "0", "--to", "3"), "no queue nobody/0"),
        (("orders", "--queue", "0", "--to", "-1"), "must be at least 0"),
    ],
)
def test_wrong_usage(shop: Shop, words: tuple[str, ...], says: str):
    ran = shop.tiered("truncate", shop.url, *words)
    assert ran.code == 2
    assert says in ran.error
    assert shop.bounds() == (0, 30)


def test_at_the_end_there_is_nothing_to_truncate(shop: Shop):
    shown = shop.truncate(30, "--exit-code", "--apply", "-")
    assert shown.code == 0
    assert "nothing is to be truncated" in shown.text


def test_no_batch_is_divided(tiered: CommandLine, tmp_path: Path):
    """Its messages share one record."""
    url = f"file://{tmp_path}/tier"
    with contextlib.closing(open_store(url)) as store:
        TierBuilder(store, prefix=Place("c", "b").prefix).add(
            [b"alone", (4, b"four"), None], queue=QUEUE
        )

    def planned(end: int) -> Any:
        return tiered("truncate", url, QUEUE.topic, "--queue", "0", "--to", str(end))

    for end in (2, 3, 4):
        ran = planned(end)
        assert ran.code == 2
        assert "a batch of messages from 1 on" in ran.error
    assert [planned(end).code for end in (1, 5)] == [0, 0]


@pytest.mark.parametrize("is_gone", [True, False])
def test_a_part_that_nobody_can_divide_goes_whole(shop: Shop, tmp_path: Path, is_gone: bool):
    before = set((tmp_path / "tier").glob("*/*/bundle/*/*"))
    shop.swallow(5, also=b"a message")
    (bundle,) = set((tmp_path / "tier").glob("*/*/bundle/*/*")) - before
    bundle.chmod(0o600)
    bundle.unlink() if is_gone else bundle.write_bytes(bytes(bundle.stat().st_size))
    shown = shop.truncate(32)
    assert shown.code == 0, shown.err
    assert "ends at 30, where it ended at 36" in shown.text
    assert "not at    32: the index of the part there cannot be read" in shown.text
    shop.truncate(32, "--apply", "-")
    assert shop.bounds() == (0, 30)


def test_its_old_name_does_the_same(shop: Shop):
    shop.swallow(5)
    words = (shop.url, QUEUE.topic, "--queue", "0", "--to", "30", "--json")
    steps = [shop.tiered.good(name, *words).document["steps"] for name in ("truncate", "take-back")]
    assert steps[0] == steps[1]
    assert len(steps[0]) == 1
