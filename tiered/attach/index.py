"""The index thread of a writer: keys of what is in the tier already, collected and now and then made an object.

Overview: what is not covered yet is read from the journal's state (``tiered.index.indexer``), so the thread always runs
behind: it sees only what has been committed. Upload threads leave the records that they have just stored in a ``KeyFeed``,
and their keys are extracted here; what is not there (after a restart, say) is read from the tier. When there are enough
keys, or the oldest is old enough, the object is uploaded, and one action is handed to the build thread, which alone writes
the journal.

Ordering: object, then entry. An action that does not fit the state any more changes nothing, and its range is collected
again.

Bounds (I8): the feed's (64 MiB), and one part at a time, or the object that is being made (``IndexSettings.items_max``).
Dispatch and uploads never wait for this thread.

Retries and errors: what the tier or the disk could not do is tried again, with pauses, for ever; said at the first of a row
of failures and once a minute while they last. A defect ends this thread, not the writer: the tier is then complete but for
its index, an ERROR says so, and the writer counts as not well (``defect``).

After a crash: what was collected is gone, and is collected again by the next writer.
"""

from __future__ import annotations

import logging
import math
import threading
from dataclasses import replace
from typing import TYPE_CHECKING

from backends.errors import AlreadyExistsError, BackendError
from backends.local_files import MAKE_ROOM, is_full
from tiered.crashpoints import reached
from tiered.dispatch.group_commit import Fact
from tiered.dispatch.settings import Throttle
from tiered.errors import DataError
from tiered.index.indexer import IndexBuilder, Indexer, KeyFeed, StoredSection
from tiered.log.state import index_action

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from backends.base import ObjectStore
    from tiered.attach.settings import IndexSettings
    from tiered.clock import Clock
    from tiered.keys import ObjectId
    from tiered.log.composite import GroupCommit
    from tiered.log.parts import IndexObject, TierState

_LOG = logging.getLogger("tiered.index")
_PAUSE_S_MIN = 0.5
_PAUSE_S_MAX = 60.0
_IDLE_S = 1.0
_SAY_AGAIN_S = 60.0


class IndexThread:
    """Makes the key index while a writer runs."""

    def __init__(
        self,
        *,
        store: ObjectStore,
        prefix: str,
        state: Callable[[], TierState],
        say: Callable[[Fact], None],
        next_id: Callable[[], ObjectId],
        settings: IndexSettings,
        clock: Clock,
        stop: threading.Event,
    ) -> None:
        """Wire it; ``run`` is the body of the thread."""
        self._feed = KeyFeed(clock)
        self._throttle = throttle = Throttle(settings.upload_rate_bytes_s, clock, stop)
        self._builder = IndexBuilder(
            store, prefix, next_id, directory=settings.directory, pace=throttle.take
        )
        self._indexer = Indexer(self._builder, store, prefix, self._feed)
        self._state = state
        self._say = say
        self._settings = settings
        self._clock = clock
        self._stop = stop
        self._wake = threading.Event()
        self._wanted = threading.Event()  # everything is to be named now
        self._flushed = threading.Event()
        self._since_s = 0.0
        self._late_s = math.inf
        self._done: TierState | None = None  # the state of which nothing was left
        self._is_failing = self._has_ended = False
        self._said_s = 0.0
        self.defect = ""  # by what defect the thread ended; empty: by none
        self.objects = 0  # made by this thread, and named
        self.items = 0  # in them
        self.size_bytes = 0  # of them
        self.failures = 0  # tries that failed
        # Objects that did not fit the state any more when the journal was to name them.
        self.refused = 0

    def reconfigure(self, settings: IndexSettings) -> None:
        """Go on at another pace, and with another age of objects."""
        self._settings = replace(self._settings, age_s=settings.age_s)
        self._throttle.set_rate(settings.upload_rate_bytes_s)

    @property
    def damaged(self) -> int:
        """Incarnations of queues that cannot be read on, for damage."""
        return len(self._indexer.damaged)

    @property
    def waits(self) -> int:
        """Messages (and holes) that no index covers yet, nor is about to."""
        return self._indexer.waits(self._state())

    @property
    def is_failing(self) -> bool:
        """The last try failed, or the thread has ended."""
        return self._is_failing

    def run(self) -> None:
        """Body of the thread; ends when told to, or by a defect, which is logged."""
        failures = 0
        try:
            while not self._stop.is_set():
                try:
                    is_busy = self._pass()
                    if failures:
                        _LOG.warning("the key index goes on")
                    failures, self._is_failing = 0, False
                except (BackendError, OSError, DataError) as error:
                    failures += 1
                    self._fail(error, failures)
                    continue
                if not is_busy:
                    self._clock.wait(self._wake, _IDLE_S)
                    self._wake.clear()
        except Exception as error:  # noqa: BLE001 (the writer goes on without an index)
            self.defect = f"the key index ended by a defect: {type(error).__name__}: {error}"
            _LOG.exception("the key index ended by a defect; messages are tiered without it")
        finally:
            self._is_failing = self._has_ended = True
            self._builder.reset()
            self._flushed.set()

    def stored(self, some: Sequence[GroupCommit]) -> None:
        """Keep records that were just stored, until this thread has taken their keys. From any thread."""
        if not self._has_ended:
            sections = []
            for commit in some:
                stored, number = commit.section()
                start = int(stored.table.rows["start"][number])
                place = stored.bundle.key, start, commit.log_offset
                sections.append(StoredSection(*place, commit.batches))
            if self._feed.offer(sections):
                self._wake.set()

    def wake(self) -> None:
        """Have the thread look at ``stop``."""
        self._wake.set()

    def flush(self, timeout_s: float, *, is_ending: bool = False) -> bool:
        """Have everything that is committed now indexed and named; for at most so long. From any thread.

        Args:
            is_ending: After half of that time, name what is collected by then instead of going on.

        Returns:
            Whether it was; what was not is indexed by the next writer.
        """
        self._flushed.clear()
        until_s = self._clock.monotonic_s() + timeout_s / 2
        self._late_s = until_s if is_ending else math.inf
        self._wanted.set()
        self._wake.set()
        self._clock.wait(self._flushed, timeout_s)
        self._wanted.clear()
        return self._flushed.is_set() and not self._stop.is_set() and self._state() is self._done

    def _pass(self) -> bool:
        """Take a step, and make an object if it is time; whether there may be more to do at once."""
        is_wanted = self._wanted.is_set()  # before the state, which so has all that is wanted
        state = self._state()
        self._feed.extract()
        taken = 0
        is_late = is_wanted and self._clock.monotonic_s() >= self._late_s
        if state is not self._done and not is_late:
            was_empty = self._builder.is_empty
            taken = self._indexer.step(state, items_max=self._settings.items_max)
            if was_empty:
                self._since_s = self._clock.monotonic_s()
            is_full = self._builder.count >= self._settings.items_max
            self._done = None if taken or is_full else state
        if self._is_due(is_all=is_wanted and not taken):
            self._publish()
            return True
        if not taken and is_wanted and (is_late or self._state() is self._done):
            self._flushed.set()
        return taken > 0

    def _is_due(self, *, is_all: bool) -> bool:
        if self._builder.is_empty:
            return False
        age_s = self._clock.monotonic_s() - self._since_s
        is_old = age_s >= self._settings.age_s
        return self._builder.count >= self._settings.items_max or is_old or is_all

    def _publish(self) -> None:
        """Make the object, and have the journal name it."""
        made = self._builder.finish()
        reached("index-object-stored")
        done = threading.Event()
        self._say(Fact(index_action([made]), done.set))
        while not (done.is_set() or self._stop.is_set()):
            self._clock.wait(done, 0.25)
            self._feed.extract()  # so that there is room for what is stored meanwhile
        if done.is_set():
            self._learn(made)
        self._builder.reset()
        self._done = None

    def _learn(self, made: IndexObject) -> None:
        if any(one.place.key == made.place.key for one in self._state().indexes):
            self.objects += 1
            self.items += made.count
            self.size_bytes += made.place.object_bytes
        else:
            self.refused += 1
            _LOG.info("a queue has changed while its index was made; it is made again")

    def _fail(self, error: BackendError | OSError | DataError, failures: int) -> None:
        self.failures += 1
        self._is_failing = True
        now_s = self._clock.monotonic_s()
        if failures == 1 or now_s - self._said_s >= _SAY_AGAIN_S:
            self._said_s = now_s
            # A store that a person must mend is told of by ``patience``, for all requests at once.
            is_told = isinstance(error, BackendError) and error.needs_a_person
            level = logging.DEBUG if is_told else logging.WARNING
            what = "the key index could not go on, trying again: %s%s"
            _LOG.log(level, what, error, _advice(error))
        if isinstance(error, AlreadyExistsError) or not isinstance(error, BackendError):
            # The work file is no use, or a cloned process writes under our id. What was collected is read again.
            self._builder.reset()
            self._done = None
        pause_s = min(_PAUSE_S_MAX, _PAUSE_S_MIN * 2.0 ** min(failures - 1, 30))
        self._clock.wait(self._stop, pause_s)


def _advice(error: BackendError | OSError | DataError) -> str:
    """What to do about a work file for which there is no room; the store's own troubles are told by ``patience``."""
    is_ours = not isinstance(error, BackendError) and is_full(error)
    return f"; {MAKE_ROOM} where the key index works (--index-dir)" if is_ours else ""
