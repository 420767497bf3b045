"""Whole files go from the oldest on; what is left is exact, and so are the minima."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest
from support.embedded import SMALL, create, reopen
from support.stored import check_same, read_all

from tiered.clock import ManualClock, SystemClock
from tiered.errors import StoreUnavailableError
from tiered.model import MessageQueue
from tiered.store import embedded
from tiered.store.embedded import AgedFile, is_full, leave_in_use, plan_expiry
from tiered.store.live_reading import Status
from tiered.store.new_message import NewMessage
from tiered.store.store_options import Expiry

if TYPE_CHECKING:
    from pathlib import Path

HOUR_MS = 3_600_000
NOW_MS = 1_700_000_000_000
NOON = Expiry(hour=25)
"""It is never the hour."""


@pytest.mark.parametrize(
    ("settings", "more", "gone"),
    [
        (NOON, {}, []),
        (NOON, {"by_hand": True}, [0, 100]),
        (NOON, {"used_ratio": 0.75}, [0, 100]),
        (NOON, {"used_ratio": 0.85}, [0, 100, 200]),
        (Expiry(hour=25, files_max=1), {"by_hand": True}, [0]),
        (NOON, {"by_hand": True, "end": 199}, [0]),
        (NOON, {"by_hand": True, "held_from": 150}, [0]),
        (NOON, {"used_ratio": 0.9, "held_from": 150}, [0, 100, 200]),
        (NOON, {"used_ratio": 0.9, "end": 250}, [0, 100]),
        (Expiry(hour=25, reserve_s=1), {"by_hand": True}, [0, 100, 200]),
    ],
)
def test_the_plan(settings: Expiry, more: dict[str, object], gone: list[int]):
    ages_h = (100, 73, 71, 0)
    files = [AgedFile(at * 100, NOW_MS - age * HOUR_MS) for at, age in enumerate(ages_h)]
    wanted = {"used_ratio": 0.1, "end": 400, "held_from": None, "by_hand": False, **more}
    assert plan_expiry(files, settings, now_ms=NOW_MS, **wanted) == gone


def test_the_hour():
    import datetime as dt

    files = [AgedFile(0, 0), AgedFile(100, NOW_MS)]
    hour = dt.datetime.fromtimestamp(NOW_MS / 1000).astimezone().hour
    for at in range(24):
        gone = plan_expiry(
            files,
            Expiry(hour=at),
            now_ms=NOW_MS,
            used_ratio=0,
            end=400,
            held_from=None,
            by_hand=False,
        )
        assert gone == ([0] if at == hour else [])


def test_old_files_go_and_the_rest_is_exact(tmp_path: Path):
    root = tmp_path / "s"
    messages = [NewMessage("t", at % 2, b"x" * 1000, keys=f"k{at}") for at in range(700)]
    with create(root) as store:
        put = list(zip(messages, store.append_batch(messages), strict=True))
        assert store.wait_listed()
        logs = sorted((root / "commitlog").iterdir())
        for path in logs[:6]:
            os.utime(path, (1, 1))
        assert store.expire().log_files == 6
        assert store.expire().log_files == 0
        log_min = int(logs[6].name)
        left = [(m, w) for m, w in put if w.physical_offset >= log_min]
        for queue_id in range(2):
            queue = MessageQueue("t", queue_id)
            first = min(w.queue_offset for m, w in left if m.queue_id == queue_id)
            assert store.reader.bounds(queue) == (first, 350)
            got = store.reader.get(queue, 0)
            assert (got.status, got.next_offset) == (Status.OFFSET_TOO_SMALL, first)
            assert store.reader.get(queue, first).records[0].queue_offset == first
        assert store.reader.by_key("t", "k3") == []
        assert len(store.reader.by_key("t", "k699")) == 1
        put += [(m, store.append(m)) for m in messages[:3]]
    assert len(list((root / "consumequeue" / "t" / "0").iterdir())) < 7
    assert int(min((root / "commitlog").iterdir()).name) == log_min
    found = read_all(root)
    left = [(m, w) for m, w in put if w.physical_offset >= log_min]
    assert sum(map(len, found.values())) == len(left)
    for message, where in left:
        check_same(message, where, found[MessageQueue("t", message.queue_id)][where.queue_offset])
    for anew in (False, True):
        with reopen(root, anew=anew) as store:
            assert store.append(messages[0]).queue_offset == 352 + anew


def test_a_tier_holds_expiry_back(tmp_path: Path):
    clock = SystemClock()
    with create(tmp_path / "s", SMALL, clock) as store:
        store.append_batch([NewMessage("t", 0, b"x" * 1000)] * 300)
        assert store.wait_listed()
        for path in (tmp_path / "s" / "commitlog").iterdir():
            os.utime(path, (1, 1))
        store.hold_expiry(lambda: 65_536 * 2 + 5)
        assert store.expire().log_files == 2
        store.hold_expiry(None)
        assert store.expire().log_files > 1


@pytest.mark.parametrize(
    ("now_s", "in_use", "gone"),
    [
        (119, {100}, [0]),
        (120, {100}, [0, 100, 200]),
        (120, {100, 200}, [0, 100]),
        (120, {0}, []),
        (0, set(), [0, 100, 200]),
    ],
)
def test_a_file_in_use_is_spared_for_a_bounded_time(now_s: int, in_use: set[int], gone: list[int]):
    due = {100: 0}
    found = leave_in_use([0, 100, 200], in_use, due, now_ms=now_s * 1000, spare_s=120)
    assert found == gone


def test_the_store_spares_what_is_used(tmp_path: Path):
    clock = ManualClock()
    with create(tmp_path / "s", SMALL, clock) as store:
        store.append_batch([NewMessage("t", 0, b"x" * 1000)] * 300)
        assert store.wait_listed()
        for path in (tmp_path / "s" / "commitlog").iterdir():
            os.utime(path, (1, 1))
        with store.use_file(65_536 + 7):
            assert store.expire().log_files == 1
            clock.jump(119)
            assert store.expire().log_files == 0
            clock.jump(1)
            assert store.expire().log_files > 1


def test_a_disk_that_is_too_full_refuses_appends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """From 90 % on, until it is below 85 % again."""
    settings = Expiry()
    assert [is_full(ratio, settings, was_full=False) for ratio in (0.89, 0.9, 0.91)] == [0, 0, 1]
    assert [is_full(ratio, settings, was_full=True) for ratio in (0.84, 0.85, 0.91)] == [0, 1, 1]
    ratios = iter([0.91, 0.86, 0.5])
    real = embedded.look
    monkeypatch.setattr(embedded, "look", lambda parts: (real(parts)[0], next(ratios)))
    with create(tmp_path / "s") as store:
        for is_refused in (True, True, False):
            store.expire()
            if is_refused:
                with pytest.raises(StoreUnavailableError, match="too full"):
                    store.append(NewMessage("t", 0, b""))
            else:
                assert store.append(NewMessage("t", 0, b"")).queue_offset == 0
