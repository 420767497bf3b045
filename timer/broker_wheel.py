"""What a broker needs to go on with our wheel's timers: ``timerlog/``, ``timerwheel`` and ``config/timercheck``.

A broker that starts on a store without them reads its timer topic from the beginning, and delivers all of it again. So
where our wheel is stopped cleanly it leaves what a broker would have left: a unit of the timer log for each message that
waits, linked in the slot of its second; one of the topic's last record, by which a broker sees how far the topic was read;
and the note of when and how far that was. Only what waits has a unit, so nothing else is delivered.

The wheel has the one size that brokers give it. Files of the log are as large as those that lie there are by the distance
of their names; a length alone may be that of a file that was cut, and is taken only where a broker may have been told it.
The note is written last: without it, and
after a kill, a broker goes by what was noted at the clean stop before, and may deliver again what was delivered since.

Timer log unit (52 bytes, big-endian): size, position of the one before in its slot, magic (1; 2: to be rolled; 4: a delete
mark), time of writing, delay, physical offset, size of the record, hash of its topic (metrics only), 8 bytes that are free.
Wheel slot (32 bytes): its time in seconds, first and last position in the log, how many, 4 bytes that are free.
"""

from __future__ import annotations

import os
import struct
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np

from backends.lazy_dataclass import dataclass
from tiered.local.layout import TIMER_CHECK_FILE
from tiered.local.mapped_file_queue import is_row_name
from tiered.store.disk import make_folder, replace_file, sync_folder

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from timer.records import Flags, Longs

UNIT: Final = np.dtype(
    [
        *(("size", ">i4"), ("before", ">i8"), ("magic", ">i4"), ("written_ms", ">i8")),
        *(("delay_ms", ">i4"), ("physical", ">i8"), ("record_size", ">i4"), ("topic", ">i4")),
        ("free", ">i8"),
    ]
)
SLOT: Final = np.dtype(
    [("second", ">i8"), ("first", ">i8"), ("last", ">i8"), ("count", ">i4"), ("free", ">i4")]
)
LOG_FILE_BYTES: Final = 104_857_600
SLOTS: Final = 2 * 604_800
ROLL_S: Final = 2 * 86_400
"""What is due later is put into an earlier slot, and looked at again then."""
_BLANK: Final = struct.Struct(">iqi")
_BLANK_MAGIC: Final = 0xCBD43194 - (1 << 32)
_CHECK: Final = struct.Struct(">qqqq")
_CHECK_BYTES: Final = 4096
_DEFAULT, _ROLL, _DELETE = 1, 2, 4
_MIB, _UNITS_MIN = 1 << 20, 2


@dataclass(frozen=True, slots=True)
class PendingMessages:
    """Messages that wait in a wheel, in due order."""

    dues: Longs  # int64[n], as noted (``TIMER_OUT_MS``)
    physical: Longs  # int64[n], physical offsets of their records
    sizes: Longs  # int64[n], bytes of these
    marks: Flags  # bool[n], delete marks


def leave_wheel(
    root: str,
    waiting: PendingMessages,
    last: tuple[int, int],
    *,
    queue_end: int,
    read_ms: int,
    now_ms: int,
) -> None:
    """Leave what a broker needs; see the module.

    Args:
        last: Physical offset and size of the timer topic's last record.
        queue_end: One past that record's queue offset.
        read_ms: What was due by then was delivered.
    """
    check = Path(root, TIMER_CHECK_FILE)
    check.unlink(missing_ok=True)
    second = read_ms // 1000
    units, slots = plan_wheel(waiting, last, second, now_ms)
    end, file_bytes = _write_log(Path(root, "timerlog"), units)
    _write_wheel(Path(root, "timerwheel"), slots, file_bytes)
    sync_folder(root)
    noted = _CHECK.pack(second * 1000, end, queue_end, queue_end)
    replace_file(check, noted.ljust(_CHECK_BYTES, b"\0"))


def plan_wheel(
    waiting: PendingMessages, last: tuple[int, int], second: int, now_ms: int
) -> tuple[npt.NDArray[np.void], npt.NDArray[np.void]]:
    """Units of the log, and slots of the wheel that name them by number. Pure."""
    late_s, now_s = np.maximum(waiting.dues // 1000, second), now_ms // 1000
    is_far = late_s - now_s >= ROLL_S
    left = np.where(late_s - now_s - ROLL_S < ROLL_S // 3, ROLL_S // 2, ROLL_S)
    seconds = np.where(is_far, now_s + left, late_s)
    order = np.argsort(seconds, kind="stable")
    seconds, count = seconds[order], len(order)
    units = np.zeros(count + 1, UNIT)
    units["size"], units["written_ms"] = UNIT.itemsize, now_ms
    is_first = np.append(True, seconds[1:] != seconds[:-1])[:count]
    units["before"][:count] = np.where(is_first, -1, np.arange(count) - 1)
    magic = _DEFAULT | np.where(is_far, _ROLL, 0) | np.where(waiting.marks, _DELETE, 0)
    units["magic"][:count] = magic[order]
    fires_ms = np.where(
        is_far, seconds[np.argsort(order)] * 1000, np.maximum(waiting.dues, second * 1000)
    )
    units["delay_ms"][:count] = (fires_ms - now_ms)[order]
    units["physical"][:count], units["record_size"][:count] = (
        waiting.physical[order], waiting.sizes[order],
    )  # fmt: skip
    over_ms = (second - 60) * 1000  # in a slot that nobody looks at any more
    units[count] = (UNIT.itemsize, -1, _DEFAULT, over_ms, 0, *last, 0, 0)
    firsts = np.flatnonzero(is_first)
    slots = np.zeros(len(firsts), SLOT)
    slots["second"], slots["first"] = seconds[firsts], firsts
    slots["last"] = np.append(firsts[1:], count)[: len(firsts)] - 1
    slots["count"] = slots["last"] - slots["first"] + 1
    return units, slots


def log_file_bytes(bases: Sequence[int], lengths: Sequence[int]) -> int:
    """How large the log's files are to be, by those that lie there. Pure.

    Args:
        bases: Their names, ascending.
    """
    steps, size = [after - before for before, after in pairwise(bases)], max(lengths, default=0)
    if any(not size or step % size for step in steps):  # all were cut; else a file is missing
        size = min(steps)
    is_told = size % UNIT.itemsize == 0 or size % _MIB == 0
    return size if is_told and size >= _UNITS_MIN * UNIT.itemsize else LOG_FILE_BYTES


def _write_log(folder: Path, units: npt.NDArray[np.void]) -> tuple[int, int]:
    """Write the units in the place of all that was there; where they end, and how large a file is."""
    make_folder(folder)
    old = sorted(one for one in folder.iterdir() if is_row_name(one.name) and one.is_file())
    file_bytes = log_file_bytes([int(one.name) for one in old], [one.stat().st_size for one in old])
    for one in old:
        one.unlink()
    per_file = (file_bytes - _BLANK.size) // UNIT.itemsize
    units["before"] = _positions(units["before"].astype(np.int64), file_bytes)
    for low in range(0, len(units), per_file):
        some = units[low : low + per_file]
        base = low // per_file * file_bytes
        with (folder / f"{base:020d}").open("wb") as file:
            file.write(some.tobytes())
            if len(some) == per_file:
                left = file_bytes - per_file * UNIT.itemsize
                file.write(_BLANK.pack(left, 0, _BLANK_MAGIC))
            file.truncate(file_bytes)
            file.flush()
            os.fsync(file.fileno())
    sync_folder(os.fspath(folder))
    end = _positions(np.array([len(units) - 1]), file_bytes)
    return int(end[0]) + UNIT.itemsize, file_bytes


def _positions(numbers: Longs, file_bytes: int) -> Longs:
    """Where units lie in the log; -1 stays."""
    per_file = (file_bytes - _BLANK.size) // UNIT.itemsize
    at = numbers // per_file * file_bytes + numbers % per_file * UNIT.itemsize
    return np.where(numbers < 0, -1, at)


def _write_wheel(path: Path, slots: npt.NDArray[np.void], file_bytes: int) -> None:
    """Write the slots into an empty wheel."""
    slots["first"] = _positions(slots["first"].astype(np.int64), file_bytes)
    slots["last"] = _positions(slots["last"].astype(np.int64), file_bytes)
    path.unlink(missing_ok=True)
    with path.open("wb") as file:
        file.truncate(SLOTS * SLOT.itemsize)
        for slot in slots:
            file.seek(int(slot["second"]) % SLOTS * SLOT.itemsize)
            file.write(slot.tobytes())
        file.flush()
        os.fsync(file.fileno())
