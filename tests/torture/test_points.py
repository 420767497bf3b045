"""A real process ends at each named point; the next one goes on, and nothing is lost, doubled or wrong."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import pytest
from support import captures, command_line, tier_checks
from support.command_line import here, program
from support.points import ROOT, points_in_code, points_listed
from support.reclaiming import OF_RECLAIM
from support.victims import FAST, Victim

from tiered.crashpoints import EXIT_CODE, VARIABLE

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

QUARANTINE = "quarantine-stored"
OF_MERGING = ("merged-stored", "merge-known")
OF_ARCHIVE = {
    *("archive-writing", "archive-written", "archive-rewriting", "archive-rewritten"),
    *("archive-condemned", "archive-deleted", "archive-repaired", "shard-stored"),
}
OF_COMPACTION = {"compacted-stored", "compacted-named", "latest-written", "latest-named"}
OF_OTHER_COMMANDS = OF_RECLAIM | OF_ARCHIVE | OF_COMPACTION
"""Points that `attach` never reaches; their command's own tests end a process there."""


def in_code() -> list[str]:
    """Those of the embedded store are in tests/store/test_crash_points.py."""
    paths = (ROOT / "tiered").rglob("*.py")
    return points_in_code(path for path in paths if path.parent.name != "store")


def test_the_table_lists_each_point_of_the_code_once():
    assert sorted(points_listed()) == sorted(set(in_code()))


@pytest.mark.timeout(900)
def test_each_point(
    stores: Callable[[str], Path], new_url: Callable[[Path], str], tmp_path: Path
) -> None:
    points = [name for name in points_listed() if name not in {QUARANTINE, *OF_OTHER_COMMANDS}]
    victim = Victim(stores("s05-crash"), tmp_path / "store", new_url(tmp_path))
    try:
        step = victim.growing.whole_end // (len(points) + 1)
        for point in points:
            victim.grow(step)
            ran = attach(victim.growing.store, victim.url, point)
            assert ran.code == EXIT_CODE, (point, ran)
            victim.check()
        victim.finish()
    finally:
        victim.close()
    assert victim.kills == len(points)


def test_killed_between_quarantine_and_entry(
    stores: Callable[[str], Path], new_url: Callable[[Path], str], tmp_path: Path
) -> None:
    """The raw bytes lie there twice then, and are counted once."""
    url, store = new_url(tmp_path), tmp_path / "store"
    shutil.copytree(stores("s01-basic"), store)
    damage(store, captures.captured("s01-basic").messages["orders"][200])
    assert attach(store, url, QUARANTINE).code == EXIT_CODE
    ran = here("attach", store, "--to", url, "--once", "--json")
    assert (ran.code, ran.document["quarantined"]) == (1, 1)
    tier_checks.check_sound(url, store)
    found = [m["queue_offset"] for m in tier_checks.cat(url, "orders")]
    assert len(found) == len(captures.captured("s01-basic").messages["orders"]) - 1


def attach(store: Path, url: str, point: str) -> command_line.Ran:
    """One run of the program that is to end at a point; merging goes on beside it, so it has the time that takes."""
    once = () if point in OF_MERGING else ("--once", "--seal")
    return program("attach", store, "--to", url, *once, *FAST, env={VARIABLE: point})


def damage(store: Path, message: captures.Message) -> None:
    """Flip bits in a record's body."""
    at = message["physical_offset"]
    file = store / "commitlog" / f"{at // 262144 * 262144:020d}"
    data = bytearray(file.read_bytes())
    data[at % 262144 + 120] ^= 0xFF
    file.write_bytes(data)


def test_without_the_variable_a_point_does_nothing_and_another_name_is_passed_by(tmp_path: Path):
    code = "from tiered.crashpoints import reached; reached('a'); print('on')"
    for variables in ({}, {VARIABLE: "b"}, {VARIABLE: "a:2"}):
        assert python(code, variables) == (0, "on\n")
    assert python(code, {VARIABLE: "a"}) == (EXIT_CODE, "")


def python(code: str, variables: dict[str, str]) -> tuple[int, str]:
    import subprocess
    import sys

    done = subprocess.run(
        [sys.executable, "-c", code],
        env=command_line.environment() | variables,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout
