"""A captured store written again into an empty directory, as its broker wrote it: the log first, then the consume queues."""

from __future__ import annotations

import fcntl
import os
import shutil
import struct
from typing import TYPE_CHECKING

from support import captures

if TYPE_CHECKING:
    from pathlib import Path

ENTRY = struct.Struct(">qiq")
LOG_FILE_BYTES = 262_144
FILLER_SIZE = 0x7FFF_FFFF


class Growing:
    """See the module.

    Attributes:
        store: The directory that grows.
        end: Physical offset up to which it was written.
    """

    def __init__(self, whole: Path, store: Path) -> None:
        self.store = store
        self.end = 0
        self._lock: int | None = None
        self._logs = {int(path.name): path.read_bytes() for path in (whole / "commitlog").iterdir()}
        self._entries = self._read_entries(whole)
        for name in ("config", "rocksdbstore"):
            shutil.copytree(whole / name, store / name)
        for name in ("commitlog", "consumequeue"):
            (store / name).mkdir()
        shutil.copy2(whole / "checkpoint", store)

    @staticmethod
    def _read_entries(whole: Path) -> list[tuple[int, int, Path, int, int, bytes]]:
        """(end of the record, its place, file, size of the file, place of the entry, entry) in log order."""
        found = []
        for path in (whole / "consumequeue").rglob("0*"):
            data = path.read_bytes() if path.is_file() else b""
            for at in range(0, len(data) - ENTRY.size + 1, ENTRY.size):
                place, size, _ = ENTRY.unpack_from(data, at)
                if size not in {0, FILLER_SIZE}:
                    entry = data[at : at + ENTRY.size]
                    name = path.relative_to(whole)
                    found.append((place + size, place, name, len(data), at, entry))
        return sorted(found)

    @property
    def whole_end(self) -> int:
        """How far it can grow."""
        return self._entries[-1][0]

    def grow(self, end: int) -> None:
        """Write the log up to ``end``, perhaps in the middle of a record, then list what is whole."""
        for base, data in sorted(self._logs.items()):
            start, stop = max(self.end, base), min(end, base + len(data))
            if start < stop:
                self._write(self._log_path(base), data[start - base : stop - base], start - base)
        for record_end, _, path, file_bytes, at, entry in self._entries:
            if self.end < record_end <= end:
                self._write(self.store / path, entry, at, file_bytes)
        self.end = end

    def _log_path(self, base: int) -> Path:
        return self.store / "commitlog" / f"{base:020d}"

    @staticmethod
    def _write(path: Path, data: bytes, at: int, file_bytes: int = LOG_FILE_BYTES) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            if os.fstat(descriptor).st_size < file_bytes:
                os.truncate(descriptor, file_bytes)
            os.pwrite(descriptor, data, at)
        finally:
            os.close(descriptor)

    # -- what else happens to it -----------------------------------------------------------------

    def expire(self, log_min: int) -> None:
        """Delete the log files below ``log_min``, then the consume-queue files that list nothing above."""
        for path in (self.store / "commitlog").iterdir():
            if int(path.name) + LOG_FILE_BYTES <= log_min:
                path.unlink()
        kept = {path for _, place, path, *_ in self._entries if place >= log_min}
        for path in {path for _, _, path, *_ in self._entries} - kept:
            newest = max((self.store / path).parent.glob("0*"), default=None)
            if newest is not None and newest != self.store / path:
                (self.store / path).unlink(missing_ok=True)

    def newest_log(self) -> Path:
        """The log file that is being written."""
        return max((self.store / "commitlog").iterdir())

    def start(self, started_ms: int) -> None:
        """A broker runs on it: the lock is held (so that other descriptors of this process leave it alone)."""
        self._lock = os.open(self.store / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
        wanted = struct.pack("@hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 0, 1, 0)
        fcntl.fcntl(self._lock, fcntl.F_OFD_SETLK, wanted)
        (self.store / "abort").write_text("1")
        os.utime(self.store / "abort", (started_ms / 1000,) * 2)

    def crash(self) -> None:
        """The broker is gone."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def stop(self) -> None:
        """The broker has ended cleanly."""
        (self.store / "abort").unlink(missing_ok=True)
        self.crash()


def first_ms(name: str) -> int:
    """When the first message of a captured store was stored."""
    messages = captures.captured(name).messages.values()
    return min(int(message["store_timestamp_ms"]) for topic in messages for message in topic)
