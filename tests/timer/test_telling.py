"""What is told of timers: what handing over costs, how many there are, and how far a run is."""

from __future__ import annotations

import random
import threading
import time
import urllib.request
from queue import Queue
from typing import TYPE_CHECKING, Any

import pytest
from support.clocks import Shifted
from support.timer_stores import CAPTURED_MS
from support.timers import PREFIX, Box, Timers

from backends.memory import MemoryStore
from backends.wrapping import MeteredStore
from tiered.cli.serve import MetricsServer
from tiered.log.timers import HOUR_MS
from timer.dequeue import TimerReader
from timer.handover import BATCH, cost_document

if TYPE_CHECKING:
    from pathlib import Path

    from support.command_line import CommandLine


@pytest.mark.parametrize(
    ("hours", "rounds", "count"), [(1, 1, 1_000), (10, 10, 1_000), (24, 3, 300), (1, 5, 20_000)]
)
def test_the_cost_of_handing_over_is_what_it_takes(hours: int, rounds: int, count: int):
    store, rng = MeteredStore(MemoryStore()), random.Random(1)
    with Timers(store) as timers:
        now = timers.now_ms
        for _ in range(rounds):
            timers.put([now + rng.randrange(hours * HOUR_MS) for _ in range(count // rounds)])
        reader = TimerReader(store, PREFIX)
        reader.refresh()
        said = cost_document(list(reader.listing()))
        run, before = timers.run(Box(), batch=BATCH), store.snapshot()
        timers.clock.advance(3600 * hours)
        while run.step():
            pass
        after = store.snapshot()
    made = {name: one.requests for name, one in after.kinds.items()}
    for name, one in before.kinds.items():
        made[name] -= one.requests
    writes = made["put"] + made["list"] + made["compare_and_set"]
    assert (said["writes"], said["reads"]) == (pytest.approx(writes, rel=0.1), made["get"])
    assert said["dollars"] == pytest.approx(after.dollars - before.dollars, rel=0.1)
    assert said["dollars_per_million"] == said["dollars"] / count * 1e6


def test_many_hours_are_drawn_as_days(tiered: CommandLine, tmp_path: Path, store: Path):
    url = f"file://{store.parent}/tier"
    tiered("timer", "import", store, "--to", url, "--near", "0s")
    lines = tiered("timer", "ls", url, "--cost").text.splitlines()
    assert lines[0].split()[:3] == ["hour", "messages", "size"]
    assert "a million" in lines[-1]
    said = tiered("timer", "ls", url, "--cost", "--json").document
    assert said["cost"]["writes"] > 2 * len(said["hours"])


def test_times_are_told_and_understood_in_utc(
    tiered: CommandLine, store: Path, monkeypatch: pytest.MonkeyPatch
):
    url, told = f"file://{store.parent}/tier", []
    tiered("timer", "import", store, "--to", url, "--near", "0s")
    hour = tiered("timer", "ls", url).text.splitlines()[1].split()[0]
    for zone in ("UTC0", "XST-9:30"):
        monkeypatch.setenv("TZ", zone)
        time.tzset()
        ran = [tiered("timer", "ls", url), tiered("timer", "show", url, hour)]
        told.append([one.text for one in ran])
    monkeypatch.undo()
    time.tzset()
    assert told[0] == told[1]
    assert len(told[0][1].splitlines()) > 1


def test_a_run_tells_its_metrics(
    tiered: CommandLine, store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    url, ports = f"file://{store.parent}/tier", Queue[int]()

    class Told(MetricsServer):
        def __init__(self, *address: Any, **more: Any) -> None:
            super().__init__(*address, **more)
            ports.put(self.port)

    monkeypatch.setattr("tiered.cli.serve.MetricsServer", Told)
    tiered("timer", "import", store, "--to", url, "--near", "0s")
    clock = tiered.clock = Shifted()
    clock.shift_ms = CAPTURED_MS + 24 * HOUR_MS - clock.now_ms()
    found: list[str] = []

    def ask() -> None:
        base = f"http://127.0.0.1:{ports.get(timeout=60)}"
        text = ""
        while "tiered_timer_pending_messages" not in text:  # it is being opened
            with urllib.request.urlopen(f"{base}/metrics", timeout=60) as got:
                text = got.read().decode()
        found.append(text)
        for name in ("livez", "readyz"):
            with urllib.request.urlopen(f"{base}/{name}", timeout=60) as got:
                assert got.read() == b"ok"

    asking = threading.Thread(target=ask)
    asking.start()
    more = ("--to", tmp_path / "t", "--once", "--metrics-listen", "127.0.0.1:0", "--json")
    more = (*more, "--rate", "200")  # so that it lasts until it is asked
    done = tiered("timer", "run", url, *more).document
    asking.join()
    (text,) = found
    values = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert float(values["tiered_timer_up"]) == 1
    pending = float(values["tiered_timer_pending_messages"])
    assert 226 - done["handed"] <= pending <= 226
    assert float(values["tiered_timer_pending_hours"]) > 0
    assert float(values["tiered_timer_next_due_seconds"]) < 24 * 3600
