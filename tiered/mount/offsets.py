"""Where each group of consumers is, and what it acknowledged beyond: in memory, and in the tier.

Overview
    ``ConsumerOffsets`` is the table that requests read and write, of one thread. ``OffsetsKeeper`` holds its place in the
    tier: ``meta/mount/<name>/`` below the broker's prefix, with a lease and a journal of its own (docs/formats/mount.md).
    What has changed since the last snapshot becomes one entry; nothing has changed, nothing is written. The offsets that a
    decommissioned broker left are taken over once; the journal then names them, and what groups say here counts. What groups
    that pop acknowledge (``tiered.mount.popping``) goes into the same entries, sooner: it is answered when it is there.

What can be lost
    After a crash: what was committed since the last snapshot, at most one interval (and while the store did not take one).
    Its messages come again. After a stop: nothing.

Ordering and fencing
    The lease keeps a second mount of the same name waiting, or sends it away; the journal fences a mount that was taken
    over: it ends with ``FencedError``, and its later offsets are nobody's.

Retries: an entry is tried until the store takes it or ``stop`` is set, and so is the lease, whatever the store says:
credentials that have expired come again, and meanwhile clients are served, and all offsets are in memory. ``trouble`` says
so, and the log. Limit: ``QUEUES_MAX`` of all groups together.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from dataclasses import field, replace
from operator import ge
from typing import TYPE_CHECKING, Any, Final

from backends.errors import BackendError
from backends.lazy_dataclass import dataclass
from tiered.api.broker_place import mounts_below
from tiered.errors import DataError, FencedError
from tiered.journal.append import JournalWriter
from tiered.journal.entry import EPOCH, INT_MAX, json_text
from tiered.journal.replay import JournalReader, UnknownActionError, trim_journal
from tiered.keys import JOURNAL
from tiered.mount.protocol import Code, RefusalError

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from backends.base import ObjectStore
    from tiered.clock import Clock
    from tiered.journal.entry import Action, Entry
    from tiered.journal.lease import LeaseState

# -- types of rows -------------------------------------------------------------------------------

_INT_SET = {int}


def check_ints(values: Iterable[Any], what: str) -> None:
    """Refuse (``ValueError``) what is not whole numbers from -1 to ``INT_MAX``."""
    found = tuple(values)
    if not found:
        return
    if set(map(type, found)) != _INT_SET or min(found) < -1 or max(found) >= INT_MAX:
        raise ValueError(f"{what} is {found!r:.200}")


def check_texts(values: Iterable[Any], what: str) -> None:
    """Refuse (``ValueError``) what is not texts."""
    for value in values:
        if type(value) is not str:
            raise ValueError(f"{what} is {value!r:.80}")


# -- in memory --------------------------------------------------------------------------------------

_LOG = logging.getLogger("tiered.mount")
OFFSETS: Final = "offsets"
HANDOVER: Final = "handover"
ACKS: Final = "acks"
MODES: Final = "modes"
QUEUES_MAX: Final = 1_000_000
PATIENCE_S: Final = 5.0
"""How long a store may fail that may help itself, before that is called trouble."""
_END: Final = 1 << 62
Name = tuple[str, str]
"""Group and topic."""
PopName = tuple[str, str, int]
"""Group, topic and queue id."""


class ConsumerOffsets:
    """The next queue offset that each group wants of each queue. For one thread."""

    def __init__(self, known: Mapping[Name, Mapping[int, int]] | None = None) -> None:
        """Begin with what was known."""
        self._table = {name: dict(row) for name, row in (known or {}).items()}
        self._count = sum(map(len, self._table.values()))
        self._changed: set[Name] = set()
        self._resets: dict[tuple[str, str, int], int] = {}

    def get(self, group: str, topic: str, queue_id: int) -> int | None:
        """Where a group is; None: it never said."""
        return self._table.get((group, topic), {}).get(queue_id)

    def commit(self, group: str, topic: str, queue_id: int, offset: int) -> None:
        """A group says where it is; where a person has put it elsewhere, only after it was told.

        Raises:
            RefusalError: There are too many, or it is not an offset.
        """
        if not 0 <= offset < _END or not 0 <= queue_id < _END:
            raise RefusalError(Code.SYSTEM_ERROR, f"{offset} is not an offset of queue {queue_id}")
        # As a broker does. What is known here is kept, and who is to be told is not.
        if self._resets and (group, topic, queue_id) in self._resets:
            return
        row = self._table.get((group, topic), {})
        if row.get(queue_id) == offset:
            return
        if queue_id not in row:
            if self._count >= QUEUES_MAX:
                raise RefusalError(Code.SYSTEM_BUSY, f"more than {QUEUES_MAX} consumer offsets")
            self._count += 1
            self._table[group, topic] = row
        row[queue_id] = offset
        self._changed.add((group, topic))

    def reset(self, group: str, topic: str, queue_id: int, offset: int) -> None:
        """A person puts a group elsewhere: who consumes now says where it is, again and again, until it is told."""
        self._resets.pop((group, topic, queue_id), None)
        self.commit(group, topic, queue_id, offset)
        self._resets[group, topic, queue_id] = offset

    def take_reset(self, group: str, topic: str, queue_id: int) -> int | None:
        """Where a consumer of the queue has to go that asks next; None: on. Told once; then it says where it is again."""
        if not self._resets:  # nearly always: pulls ask
            return None
        return self._resets.pop((group, topic, queue_id), None)

    def adopt(self, known: Mapping[Name, Mapping[int, int]], *, is_newer: bool = False) -> int:
        """Take over offsets of elsewhere where there are none, or in place of what there is; of how many queues."""
        count = 0
        for (group, topic), row in known.items():
            for queue_id, offset in row.items():
                if is_newer or self.get(group, topic, queue_id) is None:
                    self.commit(group, topic, queue_id, offset)
                    count += 1
        return count

    @property
    def group_count(self) -> int:
        """How many groups have an offset."""
        return len(self.all_groups())

    def all_groups(self) -> set[str]:
        """Groups that have an offset."""
        return {group for group, _ in self._table}

    def topics(self, group: str) -> list[str]:
        """Topics of which a group has offsets."""
        return [topic for name, topic in self._table if name == group]

    def groups(self, topic: str) -> list[str]:
        """Groups that have offsets of a topic."""
        return [group for group, name in self._table if name == topic]

    def row(self, group: str, topic: str) -> Mapping[int, int]:
        """A group's offsets by queue id."""
        return self._table.get((group, topic), {})

    def take_changes(self) -> list[list[Any]]:
        """Rows of an ``offsets`` action: what has changed since the last call."""
        changed, self._changed = self._changed, set()
        return [row_of(name, self._table[name]) for name in sorted(changed)]

    def put_back(self, rows: Sequence[Sequence[Any]]) -> None:
        """Rows that were taken were not written."""
        self._changed.update((str(row[0]), str(row[1])) for row in rows)


def row_of(name: Name, row: Mapping[int, int]) -> list[Any]:
    """Group, topic, queue ids, offsets."""
    ids = sorted(row)
    return [*name, ids, [row[queue_id] for queue_id in ids]]


# -- in the tier ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Acknowledged:
    """What a group that pops has acknowledged of a queue at and above its offset, and what was given to it often."""

    ranges: tuple[int, ...] = ()  # first offset and end of each, ascending, none next to another
    counts: tuple[int, ...] = ()  # offset of a message in flight and how often it was given


@dataclass(frozen=True, slots=True)
class MountState:
    """Everything that a mount's journal says."""

    epoch: int = 0  # the newest epoch
    offsets: Mapping[Name, Mapping[int, int]] = field(default_factory=dict)
    """By group and topic, then by queue id."""
    handover: str = ""  # key of the broker's metadata whose offsets were taken over; empty: of none
    acks: Mapping[PopName, Acknowledged] = field(default_factory=dict)  # but for what is empty
    modes: Mapping[Name, tuple[str, int]] = field(default_factory=dict)
    """How groups are told to consume (``PULL``, ``POP``), and how many clients share a queue."""


class MountMachine:
    """What the actions mean; see ``tiered.journal.replay.Machine``.

    ``epoch``; ``offsets`` with rows of ``row_of``; ``handover`` with the ``key`` of a broker's metadata whose offsets are
    among them from here on; ``acks`` with rows of ``ack_row``; ``modes`` with rows of group, topic, mode and sharing.
    """

    def initial(self) -> MountState:
        """Nobody was here."""
        return MountState()

    def epoch(self, state: MountState) -> int:
        """The epoch."""
        return state.epoch

    def apply(self, state: MountState, entry: Entry) -> MountState:
        """One step of history; what is written under an older epoch is none.

        Raises:
            UnknownActionError: An action of another version.
            ValueError: One that no mount of this version can have made; ``LookupError`` and ``TypeError`` mean the same.
        """
        for action in entry.actions:
            if action.get("do") == EPOCH:
                check_ints((action["epoch"],), "an epoch")
                state = replace(state, epoch=action["epoch"])
            elif action.get("do") not in _KNOWN:
                raise UnknownActionError(f"{action.get('do')!r:.80}")
            # Of a mount that was fenced, which did not know it yet: its offsets are nobody's.
            elif entry.epoch != state.epoch:
                continue
            elif action["do"] == HANDOVER:
                check_texts((action["key"],), "a key")
                state = replace(state, handover=action["key"])
            elif action["do"] == ACKS:
                acks = {**state.acks, **_acks(action["rows"])}
                state = replace(
                    state, acks={name: row for name, row in acks.items() if row != _NONE}
                )
            elif action["do"] == MODES:
                state = replace(state, modes={**state.modes, **_modes(action["rows"])})
            else:
                state = replace(state, offsets={**state.offsets, **_rows(action["rows"])})
        return state

    def dump(self, state: MountState) -> Any:  # noqa: ANN401 (JSON values)
        """For a checkpoint."""
        rows = [row_of(name, row) for name, row in sorted(state.offsets.items())]
        known: dict[str, Any] = {"handover": state.handover} if state.handover else {}
        if state.acks:
            known[ACKS] = [ack_row(name, row) for name, row in sorted(state.acks.items())]
        if state.modes:
            known[MODES] = [[*name, *mode] for name, mode in sorted(state.modes.items())]
        return {"epoch": state.epoch, "rows": rows, **known}

    def dump_chunks(self, state: MountState) -> Iterator[bytes]:
        """The same as text."""
        yield json_text(self.dump(state))

    def load(self, document: Any) -> MountState:  # noqa: ANN401 (JSON values)
        """Undo ``dump``."""
        epoch, handover = document["epoch"], document.get("handover", "")
        check_ints((epoch,), "an epoch")
        check_texts((handover,), "a key")
        acks, modes = _acks(document.get(ACKS, [])), _modes(document.get(MODES, []))
        return MountState(epoch, _rows(document["rows"]), handover, acks, modes)


_KNOWN: Final = frozenset({OFFSETS, HANDOVER, ACKS, MODES})
_NONE: Final = Acknowledged()


def ack_row(name: PopName, row: Acknowledged) -> list[Any]:
    """Group, topic, queue id, ranges, counts: all there is of the queue."""
    return [*name, list(row.ranges), list(row.counts)]


def _acks(rows: Any) -> dict[PopName, Acknowledged]:  # noqa: ANN401 (JSON values)
    """Undo ``ack_row``."""
    found: dict[PopName, Acknowledged] = {}
    for group, topic, queue_id, ranges, counts in rows:
        check_texts((group, topic), "a group or topic")
        check_ints((queue_id, *ranges, *counts), "a queue id, offset or count")
        if len(ranges) % 2 or len(counts) % 2 or any(map(ge, ranges, ranges[1:])):
            raise ValueError(f"ranges that do not ascend, or a half of a pair: {ranges!r:.80}")
        found[group, topic, queue_id] = Acknowledged(tuple(ranges), tuple(counts))
    return found


def _modes(rows: Any) -> dict[Name, tuple[str, int]]:  # noqa: ANN401 (JSON values)
    found: dict[Name, tuple[str, int]] = {}
    for group, topic, mode, sharing in rows:
        check_texts((group, topic, mode), "a group, topic or mode")
        check_ints((sharing,), "a number of clients")
        found[group, topic] = mode, sharing
    return found


def _rows(rows: Any) -> dict[Name, dict[int, int]]:  # noqa: ANN401 (JSON values)
    """Undo ``row_of``."""
    found: dict[Name, dict[int, int]] = {}
    for group, topic, ids, offsets in rows:
        check_texts((group, topic), "a group or topic")
        check_ints((*ids, *offsets), "a queue id or offset")
        found[group, topic] = dict(zip(ids, offsets, strict=True))
    return found


def mounts_with_offsets(store: ObjectStore, prefix: str) -> list[str]:
    """Names of the mounts that have kept offsets of a broker's tier; of one that is shared with ``/address``. Sorted."""
    return [name for name, below in mounts_below(store, prefix) if not below]


@contextlib.contextmanager
def damage_told(url: str, prefix: str) -> Iterator[None]:
    """Say of damage in a mount's journal what it is, and what can be done; ``verify --deep`` names all of it."""
    try:
        yield
    except DataError as error:
        raise DataError(
            f"the offsets that a mount has kept of consumer groups are damaged: {error.what}",
            where=f"{url}/{error.where}",
            do=f"bring the object back from a copy; else delete {prefix}lease and all below {prefix}{JOURNAL}: groups begin"
            " where they were with the broker, and get again what came since; until then `tiered mount --no-state` serves"
            " the tier",
        ) from error


def kept_state(store: ObjectStore, prefix: str) -> MountState | None:
    """What a mount has kept; None: there is no such mount."""
    reader = JournalReader(store, prefix, MountMachine())
    with damage_told(store.url, prefix):
        reader.catch_up()
    return reader.state if reader.number else None


class OffsetsKeeper:
    """Lease and journal of a mount. ``begin``, then ``save`` and ``renew`` (each of one thread at a time), then ``end``."""

    def __init__(
        self,
        bare: ObjectStore,
        store: ObjectStore,
        prefix: str,
        clock: Clock,
        rng: random.Random,
        *,
        lease_s: float,
    ) -> None:
        """Read nothing yet.

        Args:
            bare: The tier's store, which does not retry by itself.
        """
        self._stop = threading.Event()
        self._store = store
        self._prefix = prefix
        self._journal: JournalWriter[MountState] = JournalWriter(
            bare,
            prefix,
            MountMachine(),
            clock=clock,
            rng=rng,
            stop=self._stop,
            on_failure=self._note_failure,
        )
        self._clock = clock
        self._failing_since_s: float | None = None
        self._unkept = self._unrenewed = ""
        self._lease = self._journal.lease(store, lease_s)
        self.renewal_s = self._lease.renewal_seconds
        self.saved = 0
        """Snapshots written."""
        self.handover = ""
        """Key of the broker's metadata whose offsets go along with what is saved next; set it when they are adopted."""

    def begin(
        self,
        *,
        wait: bool,
        announce: Callable[[LeaseState], None],
        stop: Callable[[float], bool],
        prove: Callable[[], None] = lambda: None,
    ) -> Mapping[Name, Mapping[int, int]]:
        """Take lease and epoch; the offsets that the last mount left.

        Args:
            prove: Called where no mount has been yet, before anything is written: refuses a store that keeps no two apart.
            stop: Waits so many seconds; True when we were told to stop.

        Raises:
            DataError: What was kept is damaged; the message says what to do.
            FencedError: Another mount serves under this name.
        """
        with damage_told(self._store.url, self._prefix):
            self._journal.catch_up()
        # A journal shows that a mount has written here before, so only the first of a name has to try the store.
        if not self._journal.number:
            prove()
        try:
            self._lease.acquire(wait=wait, announce=announce, stop=stop)
        except FencedError as error:
            raise FencedError(
                f"another mount serves under this name: {error.what}",
                where=error.where,
                do="stop it, or serve under another --name",
            ) from error
        self._journal.take_epoch(remembered=self._lease.remembered)
        self.handover = self._journal.state.handover
        return self._journal.state.offsets

    @property
    def kept(self) -> MountState:
        """What the journal says, as far as it was read and written here."""
        return self._journal.state

    def save(
        self,
        rows: Sequence[Sequence[Any]],
        acks: Sequence[Sequence[Any]] = (),
        modes: Sequence[Sequence[Any]] = (),
    ) -> None:
        """Make rows durable, all of them at once.

        Args:
            rows: Of ``ConsumerOffsets.take_changes``.
            acks: Of ``ack_row``.
            modes: Group, topic, mode and sharing.

        Raises:
            FencedError: Another mount has taken over.
            StoreUnavailableError: We were told to stop, and the store did not take them.
        """
        said = {OFFSETS: rows, ACKS: acks, MODES: modes}
        actions: list[Action] = [{"do": do, "rows": found} for do, found in said.items() if found]
        if self.handover != self._journal.state.handover:
            actions.append({"do": HANDOVER, "key": self.handover})
        # One entry for both: offsets without the name of the handover would be taken over from the broker again.
        self._journal.append(actions)
        self._failing_since_s = None
        if self._unkept:
            _LOG.warning("offsets of consumers are kept again")
            self._unkept = ""
        self.saved += 1
        if self._journal.write_checkpoint():
            self._trim()

    def _note_failure(self, error: BackendError) -> None:
        """An entry was not taken, and is tried again. Told once of each reason: a try comes every few seconds."""
        now_s = self._clock.monotonic_s()
        if self._failing_since_s is None:
            self._failing_since_s = now_s
        is_trouble = not error.retriable or now_s - self._failing_since_s >= PATIENCE_S
        if is_trouble and self._unkept != str(error):
            _LOG.error(
                "offsets of consumers are not kept, trying again; until then they are in memory alone: %s",
                error,
            )
            self._unkept = str(error)

    @property
    def trouble(self) -> str:
        """Why offsets are not kept, or our place is not, in one clause; empty: they are. From any thread."""
        if self._unkept:
            return f"offsets of consumers are not kept: {self._unkept}"
        if self._unrenewed:
            return f"the mount's lease is not renewed: {self._unrenewed}"
        return ""

    def renew(self) -> None:
        """Prolong the lease.

        Raises:
            FencedError: Another mount has it.
        """
        try:
            self._lease.renew()
        except BackendError as error:
            if not self._unrenewed:  # ``trouble`` has it while it lasts
                _LOG.warning("the mount's lease could not be renewed, trying again: %s", error)
            self._unrenewed = str(error)
        else:
            if self._unrenewed:
                _LOG.warning("the mount's lease is renewed again")
            self._unrenewed = ""

    def abandon(self) -> None:
        """End tries that are under way. From any thread."""
        self._stop.set()

    def end(self) -> None:
        """Free the lease."""
        self._lease.release()

    def _trim(self) -> None:
        """Delete entries of our own journal that two checkpoints cover. What stays costs nothing but room."""
        try:
            trim_journal(self._store, self._prefix, self._journal.number)
        except BackendError as error:
            _LOG.info("old entries of the mount's journal stay: %s", error)
