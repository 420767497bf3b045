"""A process that moves records uses memory again, and does not look for cycles where there are none."""

from __future__ import annotations

import ast
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

_FAULTS = """
import resource
from tiered.cli.serve import bound_malloc
if {bounds}:
    bound_malloc()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(50):
    some = [b"x" * (2 << 20) for _ in range(4)]
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
_COLLECTIONS = """
import gc
gc.set_threshold({young})
count = 0
def note(phase, _info):
    global count
    count += phase == "start"
gc.callbacks.append(note)
import numpy as np
from tiered.local.queue_reader import _copies
from tiered.format.block import RecordBlock
class Block:
    buffer = bytes(64 * 40_000)
starts = np.arange(0, 64 * 40_000, 128)
before = count
assert sum(map(len, _copies(Block, starts, starts + 64, list(range(0, 20_000, 100))))) == 64 * 20_000
print(count - before)
"""


def _run(program: str) -> int:
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    )
    return int(ast.literal_eval(done.stdout))


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc")
def test_blocks_of_records_come_from_memory_that_was_used_before():
    anew, again = _run(_FAULTS.format(bounds=False)), _run(_FAULTS.format(bounds=True))
    assert again * 5 < anew


def test_cutting_records_leaves_nothing_to_the_collector_of_cycles():
    assert _run(_COLLECTIONS.format(young=700)) <= 2


_ATTACH = """
import sys
from typing import TYPE_CHECKING
from tiered.attach.settings import IndexSettings
from tiered.attach.writer import Attachment, AttachSettings
from tiered.clock import SystemClock
from tiered.store.bulk import make_store
folder = {folder!r}
make_store(folder + "/store", topics=1, queues=4, messages=400, body_bytes=100,
           commitlog_file_bytes=1 << 20, seed=1, clock=SystemClock())
settings = AttachSettings(index=IndexSettings())
attachment = Attachment.open(folder + "/store", "file://" + folder + "/tier", settings)
assert attachment.run(once=True, merge=True).is_complete
attachment.close()
print("numpy.ma" in sys.modules)
"""


def test_a_writer_never_loads_what_numpy_loads_late(tmp_path: Path):
    """``numpy.ma`` costs as much as copying 30 MiB; ``np.unique`` loads it."""
    assert not _run(_ATTACH.format(folder=str(tmp_path)))
