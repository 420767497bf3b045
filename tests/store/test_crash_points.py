"""A real process ends at each named point of the store's work; what was answered is there, and the lists are exact."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from support.dying_store import OPTIONS, messages
from support.embedded import reopen
from support.points import ROOT, points_in_code, points_listed
from support.replayed import records_of
from support.stored import check_same, read_all

from tiered.crashpoints import EXIT_CODE
from tiered.format.items import ITEM
from tiered.model import MessageQueue

if TYPE_CHECKING:
    from tiered.store.embedded import MessageStore


def in_code() -> list[str]:
    return points_in_code((ROOT / "tiered" / "store").glob("*.py"))


def listed() -> list[str]:
    return points_listed("store-")


def test_the_table_lists_each_point_of_the_code_once():
    assert sorted(listed()) == sorted(in_code())
    assert len(set(listed())) == len(listed())


@pytest.fixture(scope="module")
def died(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for each point, with the store as its process left it."""
    folder = tmp_path_factory.mktemp("died")
    done = subprocess.run(
        [sys.executable, "-m", "support.dying_store", str(folder), *listed()],
        capture_output=True,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.returncode == 0, done.stderr.decode()
    ended = dict(json.loads(line) for line in done.stdout.splitlines())
    assert ended == dict.fromkeys(listed(), EXIT_CODE)
    return folder


@pytest.mark.parametrize("point", listed())
def test_what_was_answered_is_there(died: Path, point: str):
    root, given = died / point / "s", messages()
    told = [json.loads(line) for line in (died / point / "told").read_text().splitlines()]
    assert (root / "abort").exists()
    with reopen(root, OPTIONS) as store:
        assert store.recovered is not None
        check_kept(store)
        log_min = min((int(log.name) for log in (root / "commitlog").iterdir()), default=0)
        for at, offset, place, msg_id in told:
            if place < log_min:
                continue
            queue = MessageQueue(given[at].topic, given[at].queue_id)
            (record,) = store.reader.get(queue, offset, count_max=1).records
            assert (record.physical_offset, record.body) == (place, given[at].body)
            (same,) = store.reader.by_key(given[at].topic, msg_id)
            assert same.physical_offset == place
        ends = store.queues()
        put = store.append(given[0])
        assert put.queue_offset == ends.get(MessageQueue("t0", 0), 0)
    records = [record for record, _ in records_of(root)]
    sent = [record for record in records[:-1] if record.topic != "kept"]
    assert len({record.properties["KEYS"] for record in sent}) == len(sent)
    listed = [
        np.fromfile(path, ITEM)["physical_offset"][np.fromfile(path, ITEM)["size"] > 0]
        for path in (root / "consumequeue").glob("*/*/0*")
    ]
    there = np.sort(np.concatenate(listed))
    assert there[there >= log_min].tolist() == [record.physical_offset for record in records]
    found = read_all(root)
    assert sum(map(len, found.values())) == len(records)
    check_same(given[0], put, found[MessageQueue("t0", 0)][put.queue_offset])


def check_kept(store: MessageStore) -> None:
    """Of a compacted queue a consumer from the start gets the newest message of each key, and passes go on."""
    queue = MessageQueue("kept", 0)
    total = store.queues().get(queue, 0)
    for _ in range(2):
        at, newest = store.reader.bounds(queue)[0], {}
        while at < total:
            got = store.reader.get(queue, at)
            newest.update(
                (record.properties["KEYS"], record.queue_offset) for record in got.records
            )
            at = got.next_offset
        assert newest == {f"k{number % 7}": number for number in range(total)}
        store.compact()
    assert not list(Path(store.root).glob("compaction/*/*/*/compacting"))
