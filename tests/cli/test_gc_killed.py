"""A real gc, killed in the middle on a folder: what it began can be ended, and the tier is whole (I11)."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from backends.local import LocalFolderStore

if TYPE_CHECKING:
    from pathlib import Path

    from support.command_line import CommandLine, Start

COUNT = 600


def litter(folder: Path) -> None:
    """Orphans of the epoch of the writer there."""
    store = LocalFolderStore(folder)
    prefix = "/".join(next(iter(store.list(""))).key.split("/")[:2])
    for at in range(COUNT):
        name = f"{at:020d}-{1:010d}-0badcafe-{at:010d}"
        store.put_if_absent(f"{prefix}/queue/lost/{0:010d}/{0:010d}/{name}", b"litter")
    store.close()


def test_i11_kill_in_the_middle_of_the_deletions(
    tiered: CommandLine, basic: Path, tmp_path: Path, start: Start
):
    folder, plan = tmp_path / "tier", tmp_path / "plan.json"
    url = f"file://{folder}"
    tiered.good("attach", basic, "--to", url, "--once")
    litter(folder)
    time.sleep(0.01)
    tiered.good("gc", url, "--grace", "1ms", "--plan", plan)
    lost = next(folder.rglob("lost"))
    before = sum(1 for path in lost.rglob("*-0badcafe-*"))
    with start("gc", url, "--apply", plan) as process:
        deadline = time.monotonic() + 120
        while sum(1 for path in lost.rglob("*-0badcafe-*")) == before:
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline
        process.kill()
        process.communicate(timeout=120)
    left = sum(1 for path in lost.rglob("*-0badcafe-*"))
    assert left < before == COUNT
    assert tiered.good("verify", url, "--deep").code == 0
    done = tiered.good("gc", url, "--apply", plan, "--json").document["applied"]
    assert done["deleted"] + done["already_gone"] == COUNT
    assert done["already_gone"] == COUNT - left
    assert not list(folder.rglob("*-0badcafe-*"))
    assert tiered.good("verify", url, "--deep", "--strict").code == 0
    on = tiered.good("attach", basic, "--to", url, "--once", "--json").document
    assert (on["messages"], on["is_complete"]) == (0, True)
