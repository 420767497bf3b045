"""The ledger: what runs that delete were about to do, and what they did; and the store's own clock.

A run writes a record before it changes anything and one when it has ended. The first one's time of writing, as the store
tells it, is the time by which the run holds ages: our own clock may be wrong, and the store's is what dates its objects.

A record's form is that of ``tiered.journal.entry.seal_text``. It says what a plan was by counts and a digest, not by a list,
so it stays small however much is deleted; ``gc`` deletes old records (``tiered.log.orphans.LEDGER_KEPT_MS``).
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from backends.errors import AlreadyExistsError, UnsupportedError
from tiered.crashpoints import reached
from tiered.errors import InvalidError
from tiered.journal.entry import seal_text
from tiered.keys import ledger_key

if TYPE_CHECKING:
    from collections.abc import Mapping

    from backends.base import ObjectStore
    from tiered.clock import Clock


class Ledger:
    """The records of one run."""

    def __init__(
        self, store: ObjectStore, prefix: str, clock: Clock, *, run: str, what: str
    ) -> None:
        """Write nothing yet.

        Args:
            store: The tier's store.
            prefix: Of the broker.
            clock: For the time stamps in keys.
            run: Random id of the run, 8 hex digits.
            what: The command.
        """
        self._store = store
        self._prefix = prefix
        self._clock = clock
        self._begun_ms = clock.now_ms()
        self._steps = 0
        self.run = run
        self.what = what

    def begin(self, fields: Mapping[str, Any]) -> int:
        """Say what is about to be done.

        Returns:
            The time, UTC ms, by the store's clock.

        Raises:
            InvalidError: The store does not tell when an object was written, or does not write conditionally.
            BackendError: It could not be written.
        """
        try:
            key = self.note("begin", fields)
        except UnsupportedError as error:
            raise InvalidError(
                "this store cannot create an object only if it is absent, so nothing is changed in it",
                where=self._store.url,
                do="use the store to which attach writes",
            ) from error
        reached("ledger-begun")
        now_ms = self._store.head(key).modified_ms
        if now_ms < 0:
            raise InvalidError(
                "this store does not tell when an object was written, so nothing can be called old",
                where=self._store.url,
            )
        return now_ms

    def end(self, fields: Mapping[str, Any]) -> None:
        """Say what was done.

        Raises:
            BackendError: It could not be written.
        """
        self.note("end", fields)
        reached("ledger-ended")

    def note(self, step: str, fields: Mapping[str, Any]) -> str:
        """Write one record; its key.

        Raises:
            BackendError: It could not be written.
        """
        key = ledger_key(self._prefix, self._begun_ms, self.run, self._steps)
        self._steps += 1
        known = {"format": 1, "run": self.run, "what": self.what, "step": step}
        text = seal_text({**known, "time_ms": self._clock.now_ms(), **fields})
        with contextlib.suppress(AlreadyExistsError):  # a try of ours whose answer was lost
            self._store.put_if_absent(key, text)
        return key
