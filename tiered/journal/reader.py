"""Reading a journal: newest checkpoint, then the entries behind it, in order.

Ordering: entries are applied by number without a hole. A missing number is the head only when nothing lies behind it;
when something does, a newer checkpoint is jumped to (old entries are deleted once two checkpoints cover them).
A checkpoint that fails its checksum is not believed: an older one, or replay from entry 1, gives the same state.

Threads: one reader belongs to one thread; the states that it gives are immutable and may go anywhere.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from backends.errors import ObjectNotFoundError
from tiered.errors import DataError
from tiered.journal.entry import Entry, decode_entry, open_text, seal_text
from tiered.keys import JOURNAL, checkpoint_key, entry_key, parse_journal_key

if TYPE_CHECKING:
    from backends.base import ObjectStore

S = TypeVar("S")


class Machine(Protocol[S]):
    """A pure state machine over entries. States are immutable."""

    def initial(self) -> S:
        """The state before entry 1."""
        ...

    def apply(self, state: S, entry: Entry) -> S:
        """The state after ``entry``. Pure.

        Raises:
            InvalidError: An action that this version does not know.
        """
        ...

    def generation(self, state: S) -> int:
        """The generation that reigns; 0 when none ever did."""
        ...

    def dump(self, state: S) -> Any:
        """The state as JSON values, for a checkpoint."""
        ...

    def load(self, document: Any) -> S:
        """Undo ``dump``."""
        ...


class JournalReader(Generic[S]):
    """Replays a journal and follows it.

    Attributes:
        state: The state after entry ``number``.
        number: The last entry that was applied; 0 for an empty journal.
        since_checkpoint: Entries applied since the newest checkpoint that is known.
    """

    def __init__(self, store: ObjectStore, prefix: str, machine: Machine[S]) -> None:
        self._store = store
        self._prefix = prefix
        self._machine = machine
        self.state = machine.initial()
        self.number = 0
        self.since_checkpoint = 0

    def catch_up(self) -> list[Entry]:
        """Apply everything that is new.

        Returns:
            The entries that were applied one by one (not those that a checkpoint covers).

        Raises:
            DataError: An entry is damaged, or one is missing in the middle and no checkpoint covers it.
            BackendError: The store could not be read.
        """
        entries, checkpoints = self._list_behind(self.number)
        for number in sorted(checkpoints, reverse=True):
            if number > self.number and self._jump(number):
                break
        return [self._step(number) for number in sorted(entries) if number > self.number]

    def behind(self, number: int) -> tuple[list[int], list[int]]:
        """Numbers of the entries and of the checkpoints behind ``number``."""
        return self._list_behind(number)

    def read_entry(self, number: int) -> tuple[Entry, bytes] | None:
        """An entry and its bytes; None when there is none with this number."""
        key = entry_key(self._prefix, number)
        try:
            data = self._store.get(key)
        except ObjectNotFoundError:
            return None
        return decode_entry(data, where=key), data

    def apply(self, entry: Entry) -> None:
        """Apply the next entry, which the caller knows to be in the store."""
        assert entry.number == self.number + 1
        self.state = self._machine.apply(self.state, entry)
        self.number = entry.number
        self.since_checkpoint += 1

    def checkpoint_bytes(self) -> bytes:
        """A checkpoint of the present state."""
        document = {"format": 1, "number": self.number, "state": self._machine.dump(self.state)}
        return seal_text(document)

    def _list_behind(self, number: int) -> tuple[list[int], list[int]]:
        after = entry_key(self._prefix, number) if number else ""
        entries: list[int] = []
        checkpoints: list[int] = []
        for info in self._store.list(self._prefix + JOURNAL, start_after=after):
            parsed = parse_journal_key(self._prefix, info.key)
            if parsed:
                (checkpoints if parsed[1] else entries).append(parsed[0])
        return entries, checkpoints

    def _jump(self, number: int) -> bool:
        key = checkpoint_key(self._prefix, number)
        try:
            document = open_text(self._store.get(key), where=key)
            self.state = self._machine.load(document["state"])
        except (DataError, ObjectNotFoundError, KeyError, TypeError, ValueError):
            return False  # a checkpoint only makes opening faster; replay gives the same state
        self.number = number
        self.since_checkpoint = 0
        return True

    def _step(self, number: int) -> Entry:
        if number != self.number + 1:
            raise DataError(
                f"journal entry {self.number + 1} is missing, and {number} is there",
                where=entry_key(self._prefix, self.number + 1),
                do="restore the entry, or rebuild the journal",
            )
        found = self.read_entry(number)
        if found is None:
            raise DataError(
                "a journal entry was listed and is gone",
                where=entry_key(self._prefix, number),
                do="run the command again; if it stays, rebuild the journal",
            )
        if found[0].number != number:
            raise DataError(
                f"a journal entry says of itself that it is number {found[0].number}",
                where=entry_key(self._prefix, number),
                do="restore the entry, or rebuild the journal",
            )
        self.apply(found[0])
        return found[0]
