"""Java's own store reads what was made in bulk, field by field what our reader finds, and as a clean stop left it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from support.java_lines import check_as_java_reads
from support.oracle import needs_java

from tiered.clock import SystemClock
from tiered.store.bulk import make_store

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.java, needs_java]


def test_java_reads_what_was_made_in_bulk(tmp_path: Path):
    make_store(
        tmp_path / "s",
        messages=3000,
        body_bytes=500,
        queues=3,
        topics=11,
        seed=7,
        clock=SystemClock(),
        commitlog_file_bytes=1 << 18,
        consumequeue_file_items=50,
    )
    check_as_java_reads(tmp_path / "s", 3000)
