"""The ends of log files: a record needs 8 bytes behind it, or it goes into the next file."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.embedded import create, reopen
from support.stored import check_same, read_all

from tiered.clock import ManualClock
from tiered.format.record import MAGIC_BLANK, SIZE_AND_MAGIC
from tiered.model import MessageQueue
from tiered.store import commitlog, disk
from tiered.store.new_message import NewMessage
from tiered.store.store_options import StoreOptions

QUEUE = MessageQueue("t", 0)


@pytest.fixture(autouse=True, scope="module")
def without_syncs():
    """Hundreds of stores are made here, and no crash is meant: nothing need reach the disk."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("fsync", "fdatasync"):
            patch.setattr(os, name, lambda _: None)
        yield


def write(folder: Path, messages: list[NewMessage], file_bytes: int, *, cuts: int = 0) -> list:
    """Store messages in batches; ``cuts`` times it is closed and opened in between."""
    options = StoreOptions(file_bytes, 5, index_slots=100, index_items=400)
    create(folder, options, ManualClock()).close()
    step = max(1, -(-len(messages) // (cuts + 1)))
    put = []
    for start in range(0, len(messages), step):
        with reopen(folder, options, ManualClock()) as store:
            put += store.append_batch(messages[start : start + step])
    return put


def write_some(descriptor: int, chunks: list[bytes], at: int) -> int:
    """As ``os.pwritev`` where the system takes a part only."""
    raw = b"".join(chunks)
    return os.pwrite(descriptor, raw[: 2 * len(raw) // 3 + 1], at)


@pytest.mark.slow
def test_every_remainder(tmp_path: Path):
    """Behind two records from none to a whole record more than fits: 8 bytes are a blank, 7 are too few."""
    message = NewMessage("t", 0, b"")
    size = write(tmp_path / "size", [message], 4096)[0].size_bytes
    for rest in range(size + 9):
        put = write(tmp_path / f"{rest}", [message] * 5, 2 * size + rest)
        in_file = 1 if rest < 8 else 2 if rest < size + 8 else 3
        file_bytes = 2 * size + rest
        assert [where.physical_offset for where in put] == [
            at // in_file * file_bytes + at % in_file * size for at in range(5)
        ]
        with (tmp_path / f"{rest}" / "commitlog" / f"{0:020d}").open("rb") as log:
            log.seek(in_file * size)
            left = file_bytes - in_file * size
            assert SIZE_AND_MAGIC.unpack(log.read(8)) == (left, MAGIC_BLANK)
            assert log.read() == bytes(left - 8)
        found = read_all(tmp_path / f"{rest}")[QUEUE]
        for where in put:
            check_same(message, where, found[where.queue_offset])


@settings(deadline=None, max_examples=40)
@given(
    bodies=st.lists(st.integers(0, 900), max_size=30),
    file_bytes=st.integers(1024, 3000),
    queues=st.integers(1, 3),
    cuts=st.integers(0, 3),
    count_max=st.integers(1, 9),
    chunks_max=st.sampled_from([0, 1, 3, 1024]),
)
def test_any_sizes(
    *, bodies: list[int], file_bytes: int, queues: int, cuts: int, count_max: int, chunks_max: int
):
    """Whether what is written is joined or not (``chunks_max`` at once), and whatever of it the system takes."""
    messages = [
        NewMessage("t", at % queues, bytes([at]) * size, tags=f"tag-{at}")
        for at, size in enumerate(bodies)
    ]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "s")
        if any(size > file_bytes - 250 for size in bodies):
            file_bytes += 900
        with pytest.MonkeyPatch.context() as patch:
            if chunks_max:
                patch.setattr(commitlog, "_CHUNK_BYTES_MIN", 0)
                patch.setattr(disk, "_CHUNKS_MAX", chunks_max)
                patch.setattr(os, "pwritev", write_some)
            put = write(path, messages, file_bytes, cuts=cuts)
        found = read_all(path, count_max)
    assert sum(map(len, found.values())) == len(messages)
    for message, where in zip(messages, put, strict=True):
        check_same(message, where, found[MessageQueue("t", message.queue_id)][where.queue_offset])
