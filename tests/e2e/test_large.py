"""Messages as large as a broker may take, larger than every buffer: they pass, and a damaged one stops nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from support import tier_checks
from support.command_line import here

from tiered.clock import ManualClock
from tiered.model import MessageQueue
from tiered.store.embedded import MessageStore
from tiered.store.new_message import NewMessage
from tiered.store.store_options import StoreOptions

if TYPE_CHECKING:
    from pathlib import Path

LARGE_BYTES = 64 << 20
OPTIONS = StoreOptions(65 << 20, index_slots=100, index_items=400, message_bytes_max=LARGE_BYTES)
SMALL_BUFFERS = ("--bundle-size", "1MiB", "--buffer-size", "4MiB")


def make(directory: Path, *, large: int = 1) -> int:
    """Small, large, small, in one queue; where the first large record begins. Each large one has a log file of its own."""
    clock = ManualClock(1_700_000_000_000)
    with MessageStore.create(
        directory, cluster="c", broker="b", clock=clock, options=OPTIONS
    ) as store:
        store.append(NewMessage("t", 0, b"before"))
        body = bytes(range(256)) * (LARGE_BYTES // 256)
        at, *_ = [store.append(NewMessage("t", 0, body)).physical_offset for _ in range(large)]
        for _ in range(10):
            store.append(NewMessage("t", 0, b"behind"))
    return at


@pytest.mark.parametrize("options", [(), SMALL_BUFFERS], ids=["as it is", "small buffers"])
def test_i9_a_message_of_64_mib_passes(options: tuple[str, ...], tmp_path: Path) -> None:
    make(tmp_path / "store")
    url = f"file://{tmp_path}/tier"
    ran = here("attach", tmp_path / "store", "--to", url, "--once", "--json", *options).good()
    assert ran.document["messages"] == 12
    tier_checks.check_sound(url, tmp_path / "store")


def test_i9_a_damaged_record_of_64_mib_goes_to_quarantine_and_the_queue_goes_on(
    tmp_path: Path,
) -> None:
    store, url = tmp_path / "store", f"file://{tmp_path}/tier"
    at = make(
        store, large=4
    )  # in the last three files it would be the end of the log, as a broker has it
    log = store / "commitlog" / f"{0:020d}"
    with log.open("r+b") as file:
        file.seek(at + LARGE_BYTES // 2)
        file.write(b"damaged")
    ran = here("attach", store, "--to", url, "--once", "--json", *SMALL_BUFFERS)
    assert (ran.code, ran.document["quarantined"], ran.document["messages"]) == (1, 1, 15)
    assert tier_checks.bounds(url)[MessageQueue("t", 0)] == (0, 15)
    (put_aside,) = (path for path in (tmp_path / "tier").rglob("quarantine/**/*") if path.is_file())
    assert put_aside.stat().st_size > LARGE_BYTES
    tier_checks.check_sound(url)
