"""What can be set about dispatch; the bound on its memory, its pace, and what it counts."""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import field, replace
from typing import TYPE_CHECKING

from backends.lazy_dataclass import dataclass
from tiered.errors import InvalidError
from tiered.format.bundle import PACK_LEVEL, PACK_LEVEL_MAX
from tiered.log.composite import CommitPolicy
from tiered.log.merge import BUNDLE_BYTES_MAX, FAN_IN, OWN_BYTES, MergePolicy

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from typing_extensions import Buffer

    from tiered.clock import Clock


# -- settings ----------------------------------------------------------------------------------------


MIB = 1024 * 1024
_SECTION_BYTES = 8 * 1024
"""Of a section in the round of a dispatcher that catches up, on average; of fewer bytes it costs more than they do."""


@dataclass(frozen=True, slots=True)
class Compression:
    """How merging compresses."""

    level: int = PACK_LEVEL  # of zstd

    def __post_init__(self) -> None:
        if not 1 <= self.level <= PACK_LEVEL_MAX:
            raise InvalidError(f"a level of zstd goes from 1 to {PACK_LEVEL_MAX}, not {self.level}")


@dataclass(frozen=True, slots=True, kw_only=True)
class DispatchSettings:
    """Settings of a dispatcher."""

    freshness_s: float = 2.0
    """A committed message is durable in the tier at most so long after it is seen, while the store answers."""
    bundle_bytes: int = 16 * MIB
    """A round's bundles are of about so many bytes; it is due at half as many more (``round_bytes``)."""
    buffer_bytes_max: int = 128 * MIB
    """Limit of the records held in memory; the module has the formula."""
    window_bytes: int = 30 * MIB
    """Bytes of the local log looked at in one step (more where queues are many, ``step_bytes``): two bundles of
    default size, with room to spare, so that they are not three."""
    uploads_max: int = 8  # bundles on their way at once
    segment_bytes_max: int = 1024 * MIB  # a segment of the commit log is rolled at this size
    segment_age_s_max: float = 86_400.0
    """And at this age, counted from its first part; a quiet queue's, too: nothing has to come behind it."""
    poll_s: float = 0.5
    """Pause between two looks at a store that grows slowly or not at all, at most; see ``pause_s``."""
    backoff_s_min: float = 0.1
    """First pause after a failed upload of a queue; doubled each time, with jitter."""
    backoff_s_max: float = 30.0  # greatest such pause
    fan_in: int = FAN_IN  # bundles of a level that are merged into the next
    merged_bytes_max: int = BUNDLE_BYTES_MAX  # of a bundle that merging makes
    own_bytes: int = OWN_BYTES
    """A queue (a topic) with so many bytes in a merge gets bundles of its own."""
    read_rate_bytes_s: int = 0  # bytes of the local store read in a second, at most; 0: no limit
    upload_rate_bytes_s: int = 0
    """Bytes uploaded in a second, at most; 0: no limit. Merging has the same limit once more."""
    compression: Compression | None = field(default_factory=Compression)
    """How merging compresses records at the last level; None: not at all."""
    compression_of: Callable[[str], Compression | None] | None = None
    """The same of a topic; None: of all as ``compression`` says."""
    rate_of: Callable[[str], int] = field(default=lambda _topic: 0)
    """Bytes of a topic that are copied in a second, at most; 0: no limit. Other topics do not wait for it."""
    pauses: Callable[[str], bool] = field(default=lambda _topic: False)
    """Whether nothing of a topic is taken for now, beside those that the journal says are paused."""

    def __post_init__(self) -> None:
        for name in (
            *("freshness_s", "bundle_bytes", "window_bytes", "uploads_max", "poll_s"),
            *("segment_bytes_max", "segment_age_s_max"),
        ):
            if getattr(self, name) <= 0:
                raise InvalidError(f"{name} must be above 0, not {getattr(self, name)}")
        if self.buffer_bytes_max < self.bundle_bytes:
            raise InvalidError(
                f"buffer_bytes_max ({self.buffer_bytes_max}) must not be below bundle_bytes"
                f" ({self.bundle_bytes})"
            )

    def step_bytes(self, queues: int = 0) -> int:
        """Bytes of the local log looked at in one step, within a quarter of the buffer; within half where queues are many.

        What a step costs goes by its queues as well as by its bytes.
        """
        many = min(queues * _SECTION_BYTES, self.buffer_bytes_max // 2)
        return max(min(self.window_bytes, max(1, self.buffer_bytes_max // 4)), many)

    def round_bytes(self, queues: int) -> int:
        """A round is taken when so much waits, of so many queues: larger ones have fewer and larger sections.

        What a section costs hardly depends on its size, from the local log to the journal: so many queues wait for more,
        within half of the buffer; the other half is for what comes while they are uploaded.
        """
        least = self.bundle_bytes + self.bundle_bytes // 2
        return max(least, min(queues * _SECTION_BYTES, self.buffer_bytes_max // 2))

    @property
    def pause_s(self) -> float:
        """Pause between two looks at the local store: a quarter of the freshness, and ``poll_s`` at most.

        Each look costs about the same, however little is new; a broker beside us has a better use for the processor.
        """
        return min(self.poll_s, max(0.02, self.freshness_s / 4))

    @property
    def commit_policy(self) -> CommitPolicy:
        """For ``CompositeFlatFile``."""
        return CommitPolicy(
            self.bundle_bytes,
            self.freshness_s,
            self.segment_bytes_max,
            round(self.segment_age_s_max * 1000),
        )

    @property
    def merge_policy(self) -> MergePolicy:
        """For ``tiered.log.merge``: bundles no larger than the buffer; segments as rolled."""
        return MergePolicy(
            fan_in=self.fan_in,
            bundle_bytes_max=min(self.merged_bytes_max, self.buffer_bytes_max),
            own_bytes=min(self.own_bytes, self.buffer_bytes_max),
            segment_bytes_max=self.segment_bytes_max,
            segment_age_ms_max=self.commit_policy.segment_age_ms_max,
            compresses=self.compression is not None or self.compression_of is not None,
        )

    def while_running(self, new: DispatchSettings) -> DispatchSettings:
        """These with what of new ones can change while a dispatcher runs."""
        return replace(self, **{name: getattr(new, name) for name in CHANGEABLE})


CHANGEABLE = (
    *("freshness_s", "segment_bytes_max", "segment_age_s_max"),
    *("read_rate_bytes_s", "upload_rate_bytes_s", "compression", "compression_of"),
    *("rate_of", "pauses"),
)
"""Of ``DispatchSettings``: what can change while a dispatcher runs."""


# -- budget ------------------------------------------------------------------------------------------
#
# The bound on the memory of dispatch (invariant I8).
#
# Memory of a dispatcher = ``buffer_bytes_max`` (records in buffers and in uploads, and 40 bytes an item until its entry is
# written) + one window of the local log, twice (as read, and as batches; ``step_bytes``, half of ``buffer_bytes_max`` at
# most) + one record beyond the limit, since a record is taken however large it is + one copy of each bundle that a store
# must have in one piece (``uploads_max`` times ``bundle_bytes``).
#
# Beside that, while bundles are merged: what is read for one bundle of at most ``merged_bytes_max`` (64 MiB, no more than
# ``buffer_bytes_max``), what of it is compressed, and once more the bundle for a store that must have it in one piece.
#
# Small bundles that were just written are kept in what is left of ``buffer_bytes_max``, at most a quarter of it, so that the
# merge that gathers them asks the store for nothing. They give way to everything else.

_KEPT_SHARE = 4
_KEPT_BUNDLES_MIN = FAN_IN
"""As many as a merge gathers have to fit; larger ones, as rounds of a dispatcher that catches up make them, are not kept."""


_CHUNK_BYTES = 96
"""What a chunk of a bundle takes besides its bytes: of a section with one small message that is as much again."""


class MemoryBudget:
    """Counts bytes held, and keeps bundles in what is left; never blocks. From any thread."""

    def __init__(self, bytes_max: int) -> None:
        self._lock = threading.Lock()
        self._kept: OrderedDict[str, tuple[Sequence[Buffer], int]] = OrderedDict()
        self.bytes_max = bytes_max
        self.used_bytes = 0
        self.peak_bytes = 0
        self.kept_bytes = 0

    def add(self, size_bytes: int) -> None:
        """Take so much."""
        with self._lock:
            self.used_bytes += size_bytes
            self.peak_bytes = max(self.peak_bytes, self.used_bytes)
            self._make_room(self.bytes_max - self.used_bytes)

    def keep(self, key: str, chunks: Sequence[Buffer], size_bytes: int) -> None:
        """Keep a bundle that is durable, the oldest of the others giving way; if it is small, and there is room."""
        kept_max = self.bytes_max // _KEPT_SHARE
        size_bytes += _CHUNK_BYTES * len(chunks)
        with self._lock:
            room = min(kept_max, self.bytes_max - self.used_bytes)
            if size_bytes <= min(room, kept_max // _KEPT_BUNDLES_MIN):
                self._make_room(room - size_bytes)
                self._kept[key] = chunks, size_bytes
                self.kept_bytes += size_bytes

    def kept(self, key: str, start: int, end: int) -> bytes | None:
        """Bytes ``[start, end)`` of a bundle; None when it is not kept."""
        with self._lock:
            found = self._kept.get(key)
        return b"".join(_cut(found[0], start, end)) if found else None

    def let_go(self, keys: Iterable[str]) -> None:
        """Keep these no longer."""
        with self._lock:
            for key in keys:
                self.kept_bytes -= self._kept.pop(key, ((), 0))[1]

    def _make_room(self, bytes_max: int) -> None:
        """Let go of the oldest until so much is kept. The lock is held."""
        while self._kept and self.kept_bytes > bytes_max:
            self.kept_bytes -= self._kept.popitem(last=False)[1][1]

    def release(self, size_bytes: int) -> None:
        """Give so much back."""
        with self._lock:
            self.used_bytes -= size_bytes
            assert self.used_bytes >= 0

    def has_room(self, size_bytes: int) -> bool:
        """Whether so much more would stay within the limit. An empty budget has room for anything (I9)."""
        with self._lock:
            return self.used_bytes == 0 or self.used_bytes + size_bytes <= self.bytes_max

    @property
    def under_pressure(self) -> bool:
        """Over three quarters of the limit is used: buffers should be committed early."""
        return 4 * self.used_bytes >= 3 * self.bytes_max


def _cut(chunks: Sequence[Buffer], start: int, end: int) -> Iterator[memoryview]:
    """Those bytes of the chunks, one behind the other."""
    at = 0
    for chunk in chunks:
        view = memoryview(chunk).cast("B")
        if at < end and start < at + len(view):
            yield view[max(0, start - at) : end - at]
        at += len(view)


# -- throttle ----------------------------------------------------------------------------------------
#
# Limits on bytes per second: of all, so that tiering never takes more of a disk or a line than it is given; and of single
# topics, so that a loud one leaves the line to the others.


class Throttle:
    """Spaces out transfers. From any thread."""

    def __init__(
        self, bytes_per_s: int, clock: Clock, stop: threading.Event, *, saved_s: float = 0.0
    ) -> None:
        """Allow ``bytes_per_s`` (0: no limit); ``stop`` ends a wait early.

        Args:
            saved_s: So much of a time without transfers is made up for after it.
        """
        self._rate = bytes_per_s
        self._clock = clock
        self._stop = stop
        self._saved_s = saved_s
        self._lock = threading.Lock()
        self._free_at_s = 0.0

    def set_rate(self, bytes_per_s: int) -> None:
        """Go on at another pace."""
        with self._lock:
            self._rate = bytes_per_s
            self._free_at_s = min(self._free_at_s, self._clock.monotonic_s())

    def take(self, size_bytes: int) -> None:
        """Wait until ``size_bytes`` more may be transferred. A large transfer delays those after it, not itself."""
        wait_s = self.count(size_bytes)
        if wait_s > 0:
            self._clock.wait(self._stop, wait_s)

    def count(self, size_bytes: int) -> float:
        """Count ``size_bytes`` as transferred; how many seconds too early that is."""
        if not self._rate or not size_bytes:
            return 0.0
        with self._lock:
            now_s = self._clock.monotonic_s()
            begin_s = max(now_s - self._saved_s, self._free_at_s)
            self._free_at_s = begin_s + size_bytes / self._rate
        return begin_s - now_s

    @property
    def is_free(self) -> bool:
        """Whether something may be transferred now."""
        return self._free_at_s <= self._clock.monotonic_s()


_SLICE_S = 0.25
"""A topic with a limit is copied in slices of what its rate gives in this time: the queues of it that are read at once
exceed it by as many."""
_SAVED_S = 1.0
"""Looks for what may be copied are less often than its slices."""


class TopicRates:
    """The limit of each topic that has one; nobody waits for it here. From any thread."""

    def __init__(self, rate_of: Callable[[str], int], clock: Clock, stop: threading.Event) -> None:
        self._clock = clock
        self._stop = stop
        self._is_ended = False
        self.reconfigure(rate_of)

    def reconfigure(self, rate_of: Callable[[str], int]) -> None:
        """Go on at other rates."""
        # A new table: late threads may still count in the old one.
        known: dict[str, tuple[int, Throttle]] = {}
        self._now = rate_of, known

    def end(self) -> None:
        """Allow nothing more of topics that have a limit."""
        self._is_ended = True

    def rate_of(self, topic: str) -> int:
        """The limit of a topic; 0: it has none."""
        return self._of(topic)[0]

    def allowed_bytes(self, topic: str, bytes_max: int) -> int:
        """How much of a topic may be copied at once now: one message at least, or 0; without a limit ``bytes_max``."""
        rate, throttle = self._of(topic)
        if not rate:
            return bytes_max
        may = throttle.is_free and not self._is_ended
        return min(bytes_max, max(1, int(rate * _SLICE_S))) if may else 0

    def count(self, topic: str, size_bytes: int) -> None:
        """Count ``size_bytes`` of a topic as copied."""
        self._of(topic)[1].count(size_bytes)

    def _of(self, topic: str) -> tuple[int, Throttle]:
        rate_of, known = self._now
        found = known.get(topic)
        if found is None:
            rate = rate_of(topic)
            throttle = Throttle(rate, self._clock, self._stop, saved_s=_SAVED_S)
            found = known.setdefault(topic, (rate, throttle))
        return found


# -- counters ----------------------------------------------------------------------------------------
#
# What a dispatcher counts. Plain numbers; docs/metrics.md is generated from the docstring of each field.


@dataclass(slots=True)
class DispatchCounters:
    """Totals since the dispatcher started."""

    messages: int = 0  # items committed, holes included
    record_bytes: int = 0  # bytes of records committed
    parts: int = 0  # parts committed
    bundles: int = 0  # bundles that they lie in
    rounds: int = 0  # journal entries written for them
    unmirrored: int = 0  # checkpoints of the journal of which there is no second copy
    uploads_failed: int = 0  # uploads that failed or whose outcome is unknown
    switches: int = 0  # file switches after a failed upload
    lock_misses: int = 0  # batches that dispatch left to compensation because a queue was busy
    compensated: int = 0  # batches taken by compensation
    gaps: int = 0  # gaps recorded
    truncated: int = 0
    """Times that a queue was ended at an earlier offset, because the broker has other messages from there on."""
    begun_anew: int = 0
    """Times that a queue began anew, because the broker has nothing of its history any more."""
    quarantined: int = 0  # damaged records put into quarantine
    missing: int = 0
    """Queue offsets of which the local store should have a message, and has nothing."""
    sealed_segments: int = 0  # segments sealed though nothing came behind them
    merged_bundles: int = 0  # bundles made by merging
    merged_parts: int = 0  # parts that were gathered into these
    merged_bytes: int = 0  # bytes of those, records and index, as they are before they are packed
    merged_stored_bytes: int = 0  # what is stored of them
    merges_failed: int = 0  # tries of merging that the store did not carry out; each is tried again
    unmergeable_bundles: int = 0
    """Bundles left as they are, because something in them is damaged or gone."""


# -- context -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DispatchContext:
    """What all parts of one dispatcher share."""

    settings: DispatchSettings  # limits and periods
    budget: MemoryBudget  # memory held
    clock: Clock  # time
    rng: random.Random  # jitter
    stop: threading.Event = field(default_factory=threading.Event)
    """Ends everything when set; nothing new is begun."""
    wake: threading.Event = field(default_factory=threading.Event)
    """Set when the scanner may have something to do."""
    room: threading.Event = field(default_factory=threading.Event)
    """Set when memory has been given back."""
    counters: DispatchCounters = field(default_factory=DispatchCounters)  # where to count

    def backoff_s(self, failures: int) -> float:
        """Pause before the next try, from the number of failures in a row: doubled each time, with jitter."""
        pause_s = self.settings.backoff_s_min * 2.0 ** min(failures - 1, 30)
        return min(pause_s, self.settings.backoff_s_max) * self.rng.uniform(0.5, 1.0)

    def throttle(self, bytes_per_s: int) -> Throttle:
        """A pace that ends with the dispatcher; 0: no limit."""
        return Throttle(bytes_per_s, self.clock, self.stop)
