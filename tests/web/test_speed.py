"""Each page of a tier of 1,000 queues is there within 300 ms, once the state has been read."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from support.many_queues import build, times
from support.pages import served

if TYPE_CHECKING:
    from pathlib import Path

SECONDS_MAX = 0.3


@pytest.mark.slow
def test_pages_of_a_thousand_queues(tmp_path: Path):
    url, store, archive = build(tmp_path)
    with served(url, "--store", store, "--archive", archive, "--bodies") as pages:
        found = times(pages)
    late = {name: row for name, row in found.items() if row[1] > SECONDS_MAX}
    assert late == {}
