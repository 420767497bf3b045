"""What makes a directory a store that someone writes to: lock, ``abort`` file, folders, checkpoint.

**Contract.** From ``begin`` to ``end`` the directory looks as under a running broker. Without ``end`` it looks as after
a broker's crash. For one thread at a time.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from backends.local_files import advice_for
from tiered.errors import InvalidError, StoreUnavailableError
from tiered.format.checkpoint import Checkpoint, encode_checkpoint
from tiered.local.files import open_regular
from tiered.local.layout import LOG_DIRECTORY, QUEUE_DIRECTORY
from tiered.local.liveness import ABORT_FILE
from tiered.store.durable import make_folder, replace_file, sync_folder
from tiered.store.startup import CHECKPOINT_FILE
from tiered.store.storelock import StoreLock

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType


class StoreHold:
    """Holds one directory, from construction to ``close``."""

    def __init__(self, root: str) -> None:
        """Take the lock.

        Raises:
            InvalidError: A broker or another writer holds it.
            StoreUnavailableError: The disk refuses it.
        """
        self.root = root
        with Disk(root):
            self._lock = StoreLock(root)

    @classmethod
    def of_new(cls, directory: str | os.PathLike[str]) -> StoreHold:
        """Hold a directory that is empty or missing.

        Raises:
            InvalidError: It has something in it.
            StoreUnavailableError: The disk refuses it.
        """
        root = Path(directory).absolute()
        if root.exists() and not (root.is_dir() and not any(root.iterdir())):
            raise InvalidError(
                "there is something already", where=str(root), do="name an empty directory"
            )
        with Disk(str(root)):
            make_folder(root)
        return cls(str(root))

    def begin(self, now_ms: int) -> None:
        """Mark the store as written to, since ``now_ms`` (UTC).

        Raises:
            OSError: It is not marked.
        """
        abort = Path(self.root, ABORT_FILE)
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        with os.fdopen(open_regular(os.fspath(abort), flags), "w", encoding="ascii") as file:
            file.write(str(os.getpid()))
        # Readers take records that were stored before this time for leftovers of an earlier run.
        os.utime(abort, ns=(now_ms * 1_000_000,) * 2)
        for name in (LOG_DIRECTORY, QUEUE_DIRECTORY):
            Path(self.root, name).mkdir(exist_ok=True)
        sync_folder(self.root)

    def write_checkpoint(self, store_ms: int, log_end: int) -> None:
        """Write down what is on the disk: everything below ``log_end``, its last store time ``store_ms``.

        Raises:
            OSError: It may not be written.
        """
        reached = Checkpoint(
            physical_timestamp_ms=store_ms,
            logics_timestamp_ms=store_ms,
            logics_physical_offset=log_end,
        )
        replace_file(Path(self.root, CHECKPOINT_FILE), encode_checkpoint(reached))

    def end(self) -> None:
        """Say that the store was stopped cleanly.

        Raises:
            OSError: A start may take it for a crash.
        """
        Path(self.root, ABORT_FILE).unlink()
        sync_folder(self.root)

    def close(self) -> None:
        """Give the lock free. Once is enough."""
        self._lock.close()


class Disk:
    """A block of work on the disk: the system's errors come out of it as ours."""

    def __init__(self, root: str, tell: Callable[[str], None] | None = None) -> None:
        """Make one for the store at ``root``; ``tell`` hears of an error before it is raised."""
        self._root = root
        self._tell = tell

    def __enter__(self) -> None:
        return None

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if not isinstance(error, OSError):
            return
        if self._tell is not None:
            self._tell(str(error))
        raise StoreUnavailableError(
            f"the store cannot be written: {error.strerror or error}",
            where=str(error.filename or self._root),
            do=advice_for(error, "look at the disk and its permissions"),
        ) from error
