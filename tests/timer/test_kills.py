"""Real processes end at each named point of taking and handing over; the next ones go on, and nothing is lost or doubled."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from support.clocks import Shifted
from support.command_line import spawn
from support.points import points_listed
from support.timer_stores import CAPTURED_MS, delivered, held, pending

from tiered.crashpoints import EXIT_CODE, VARIABLE
from tiered.log.timers import HOUR_MS

if TYPE_CHECKING:
    from support.command_line import CommandLine

ROOT = Path(__file__).parents[2]
OF_IMPORT = ("timers-stored", "timers-committed")
OF_RUN = ("timers-giving:2", "timers-handed:3", "timers-given")
"""The last leaves a batch that was given, and that no entry speaks of."""


def ended_at(point: str, *arguments: str | Path) -> int:
    process = spawn(*arguments, environment={VARIABLE: point})
    try:
        process.communicate(timeout=100)
    finally:
        process.kill()
    return process.returncode


def test_each_point(tiered: CommandLine, store: Path):
    url, folder = f"file://{store.parent}/tier", store.parent / "timers"
    taking = ("timer", "import", store, "--to", url, "--near", "0s")
    for point in OF_IMPORT:
        assert ended_at(point, *taking) == EXIT_CODE
    tiered.good(*taking)
    assert held(store) == pending()
    giving = ("timer", "run", url, "--to", folder, "--near", "100000h")
    for point in OF_RUN:
        assert ended_at(point, *giving) == EXIT_CODE
    clock = tiered.clock = Shifted()
    clock.shift_ms = max(0, CAPTURED_MS + 240 * HOUR_MS - clock.now_ms())
    ran = tiered.good("timer", "run", url, "--to", folder, "--once", "--json").document
    assert (ran["found"] > 0, ran["waiting"], ran["next_hand_over_ms"]) == (True, 0, None)
    came = delivered(folder)
    assert {(topic, key): n for (topic, _, key), n in came.items()} == {
        (topic, key): n for (_, topic, key), n in pending().items()
    }
    report = tiered.good("verify", url, "--timers", "--deep", "--json").document
    assert report["format"] == 1


def test_the_table_lists_each_point_of_the_code_once():
    code = "".join(path.read_text("utf-8") for path in (ROOT / "timer").glob("*.py"))
    listed = points_listed("timers-")
    assert sorted(listed) == sorted(re.findall(r'reached\("(timers-[a-z]+)"\)', code))
    assert {point.partition(":")[0] for point in (*OF_IMPORT, *OF_RUN)} == {*listed}
