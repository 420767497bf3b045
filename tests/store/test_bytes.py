"""For equal input our files are a broker's, byte for byte: logs and consume queues of captured stores, written again."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from local.harness import unpack
from store.replayed import records_of, store_again

if TYPE_CHECKING:
    from pathlib import Path

WHOLE = ("s05-crash", "s07-compaction")
"""Their logs begin at 0, and every record names the cluster (see ``PARTS``)."""


def files(root: Path, folder: str) -> dict[str, bytes]:
    """What is in the files of a folder, without the zeros behind it, and without files of nothing but zeros."""
    found = {
        str(path.relative_to(root)): path.read_bytes().rstrip(b"\0")
        for path in (root / folder).rglob("0" * 8 + "*")
    }
    return {name: data for name, data in found.items() if data}


@pytest.mark.parametrize("name", WHOLE)
def test_log_and_consume_queues_are_the_brokers(name: str, tmp_path: Path):
    """Clock and host are given to us as the broker's were; nothing is masked."""
    theirs, ours = unpack(name, tmp_path / "theirs"), tmp_path / "ours"
    records = [record for record, _ in records_of(theirs)]
    store_again(records, ours, records[0].store_host)
    for folder in ("commitlog", "consumequeue"):
        wanted, found = files(theirs, folder), files(ours, folder)
        assert found.keys() == wanted.keys()
        assert [path for path, data in wanted.items() if found[path] != data] == []
