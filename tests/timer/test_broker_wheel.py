"""A real broker goes on with the wheel of a timer run's directory: it delivers what waits, and nothing again."""

from __future__ import annotations

import contextlib
import os
import random
import threading
from typing import TYPE_CHECKING

import numpy as np
import pytest
from support.oracle import BROKER, CLUSTER, Broker, needs_java
from support.oracle import SMALL as FILES
from support.timer_stores import delivered
from support.timers import Timers, wheel_record

from tiered.clock import SystemClock
from tiered.log.timers import HOUR_MS
from tiered.store.store_options import StoreOptions
from timer.local_target import (
    LOG_FILE_BYTES,
    ROLL_S,
    SLOT,
    SLOTS,
    LocalTarget,
    PendingMessages,
    leave_wheel,
    log_file_bytes,
    plan_wheel,
)

if TYPE_CHECKING:
    from pathlib import Path

OPTIONS = StoreOptions(
    FILES["mappedFileSizeCommitLog"],
    FILES["mappedFileSizeConsumeQueue"] // 20,
    index_slots=1000,
    index_items=4000,
)
CLOCK = SystemClock()


def opened(folder: Path) -> LocalTarget:
    return LocalTarget.open(
        str(folder), cluster=CLUSTER, broker=BROKER, clock=CLOCK, rng=random.Random(), options=OPTIONS
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.java
@needs_java
@pytest.mark.timeout(600)
def test_a_broker_that_starts_on_our_directory_delivers_what_waits_and_nothing_again(
    tmp_path: Path,
):
    """Some are delivered, some due soon, one is cancelled, one is due in days."""
    folder, now = tmp_path / "store", CLOCK.now_ms()
    soon = now // 1000 * 1000 + 60_000
    dues = [now - 90_000 + n * 100 for n in range(40)] + [soon + n * 100 for n in range(30)]
    with Timers(clock=CLOCK) as timers:
        records = [wheel_record(n, due) for n, due in enumerate(dues)]
        records.append(wheel_record(70, soon, UNIQ_KEY="MARK", TIMER_DEL_UNIQKEY=f"{40:032X}"))
        records.append(wheel_record(71, soon + 80 * HOUR_MS))
        with contextlib.closing(opened(folder)) as target:
            timers.put_records(records[:1])
            while timers.hand(target, near_ms=100 * HOUR_MS).step():  # type: ignore[arg-type]
                pass
            timers._next = 1
            timers.put_records(records[1:])
            timers.hand(target, near_ms=100 * HOUR_MS)  # type: ignore[arg-type]
            while target.delivered < 40:
                target.tick()
            assert len(target.wheel) == 30
    pause = threading.Event()
    with Broker(tmp_path, folder) as broker:
        broker.start()
        for _ in range(240):
            if sum(end for _, end in broker.offsets("orders").values()) >= 69:
                break
            pause.wait(0.5)
        pause.wait(3.0)  # whatever else it would deliver comes by then
        broker.stop()
    came = {key: count for (topic, _, key), count in delivered(folder).items() if topic == "orders"}
    assert came == {f"{n:032X}": 1 for n in range(70) if n != 40}
    with contextlib.closing(
        opened(folder)
    ) as target:  # and the other way: what the broker did is known
        target.tick()
        assert (target.delivered, len(target.wheel)) == (0, 1)


def test_what_is_due_in_days_is_looked_at_before_and_slots_are_chained():
    now_ms, second = 1_700_000_000_000, 1_700_000_000 - 5
    dues = np.array([now_ms - 9_000, now_ms + 5_000, now_ms + 5_900, now_ms + 3 * ROLL_S * 1000])
    waiting = PendingMessages(
        dues, np.arange(4) * 100, np.full(4, 90), np.array([False, True, False, False])
    )
    units, slots = plan_wheel(waiting, (300, 90), second, now_ms)
    assert units["before"].tolist() == [-1, -1, 1, -1, -1]
    assert units["magic"].tolist() == [1, 5, 1, 3, 1]
    fires = units["written_ms"].astype(np.int64) + units["delay_ms"].astype(np.int64)
    assert fires[:4].tolist() == [second * 1000, *dues[1:3].tolist(), now_ms + ROLL_S * 1000]
    assert slots["second"].tolist() == [second, 1_700_000_005, 1_700_000_000 + ROLL_S]
    assert [*zip(slots["first"].tolist(), slots["last"].tolist(), slots["count"].tolist(), strict=True)] == [
        (0, 0, 1), (1, 2, 2), (3, 3, 1)
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("bases", "lengths", "expected"),
    [
        ([], [], LOG_FILE_BYTES),
        ([0], [5_200], 5_200),
        ([0], [64 << 20], 64 << 20),
        ([LOG_FILE_BYTES], [LOG_FILE_BYTES], LOG_FILE_BYTES),
        ([0, 5_200, 10_400], [5_200, 5_200, 100], 5_200),
        ([0, 5_200], [0, 0], 5_200),
        ([5_200, 15_600], [5_200, 5_200], 5_200),
        *(
            ([0], [cut], LOG_FILE_BYTES)
            for cut in (0, 1, 52, 100, 4096, 12_288, LOG_FILE_BYTES - 4096)
        ),
    ],
)
def test_files_of_the_log_are_as_large_as_a_broker_made_them(
    bases: list[int], lengths: list[int], expected: int
):
    assert log_file_bytes(bases, lengths) == expected


@pytest.mark.parametrize("cut", [0, 100, 4096])
def test_a_wheel_and_a_log_that_were_cut_are_made_as_a_broker_has_them(tmp_path: Path, cut: int):
    waiting = PendingMessages(
        np.array([1_700_000_005_000]), np.array([0]), np.array([90]), np.array([False])
    )

    def leave() -> tuple[bytes, bytes]:
        leave_wheel(
            str(tmp_path), waiting, (0, 90), queue_end=1, read_ms=1_700_000_000_000, now_ms=1_700_000_000_000
        )  # fmt: skip
        with log.open("rb") as units:
            return units.read(200), wheel.read_bytes()

    (tmp_path / "config").mkdir()
    log, wheel = tmp_path / "timerlog" / f"{0:020d}", tmp_path / "timerwheel"
    whole = leave()
    os.truncate(log, cut)
    os.truncate(wheel, cut)
    (tmp_path / "timerlog" / "17").mkdir()
    assert leave() == whole
    assert log.stat().st_size == LOG_FILE_BYTES
    assert wheel.stat().st_size == SLOTS * SLOT.itemsize
