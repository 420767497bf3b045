"""The merge thread: gathers bundles into fewer, larger and tidier ones while messages are followed (``tiered.log.merge``).

Overview: it looks when rounds have made a fan-in of bundles, and now and then; while dispatch has much to catch up with,
when they have made eight times as many. A plan is carried out bundle by bundle: the runs of one are read (neighbouring
sections of a bundle with one request, and none if memory has kept the bundle), joined, compressed where they are done with,
and uploaded; its action is handed to the build thread, which alone writes the journal. When all are history the next is
planned.

Ordering: data, then the entry (I2). A merge changes only which parts a segment is made of, and replay takes it only if what
it presumes still holds; so it works on open segments while the same queue is written to.

Bounds (I8): one bundle (64 MiB) and what is read for it, once; one request at a time. Dispatch and uploads never wait for
this thread; while memory is short it begins nothing. Merging has the same upload rate as group commits, once more.

Retries and errors: what the store could not do is tried again with pauses that double up to ``backoff_s_max``, for ever;
who waits for this thread looks at ``trouble``. A damaged bundle is left as it is for the rest of this epoch: said once, and
counted. A key that exists means a cloned process: fenced.

After a crash, or ``close`` in the middle: a bundle that no entry names is an orphan; the next epoch plans again.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict, defaultdict
from typing import TYPE_CHECKING, Final

from backends.base import ByteRange
from backends.errors import AlreadyExistsError, BackendError, InvalidRangeError, ObjectNotFoundError
from backends.lazy_dataclass import dataclass
from tiered.crashpoints import reached
from tiered.dispatch.group_commit import Fact, refused, retry_level
from tiered.errors import DataError, TieredStoreError
from tiered.format.bundle import (
    TRAIN_BYTES_MIN,
    build_packed_section,
    build_section,
    pays,
    train,
)
from tiered.format.items import ITEM_BYTES
from tiered.log.bundles import SectionRow, bundle_row, encode_numbers
from tiered.log.flat_file import moved_items
from tiered.log.merge import LAST_LEVEL, fingerprint, plan_merge
from tiered.log.sections import split_section

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from typing_extensions import Buffer

    from backends.base import ObjectStore
    from tiered.dispatch.group_commit import Uploader
    from tiered.dispatch.settings import Compression, DispatchContext, DispatchSettings
    from tiered.format.bundle import Section
    from tiered.journal.entry import Action
    from tiered.log.bundles import StoredBundle
    from tiered.log.merge import MergeOutput, MergePlan, MergeRun
    from tiered.log.parts import Part
    from tiered.log.state import TierState


# -- packing -----------------------------------------------------------------------------------------
#
# Compresses sections of the last level. Keeps a dictionary for each topic, since its queues' records are alike.
#
# Ordering and threads: one thread at a time, that of the merger; zstd lets go of the interpreter lock meanwhile.
#
# Memory: ``TOPICS_MAX`` dictionaries of 32 KiB; and beside the records their compressed blocks, which are no larger.
#
# After a crash nothing is missed: each section has the dictionary that its blocks need in itself.

TOPICS_MAX: Final = 64
RETRAIN_BYTES: Final = 512 * 1024 * 1024
"""So many bytes of a topic share one dictionary; what comes later may be different."""


@dataclass(slots=True)
class _KnownBundles:
    dictionary: bytes
    bytes_left: int = RETRAIN_BYTES


class Packer:
    """Makes packed sections."""

    def __init__(self, compression: Compression) -> None:
        self._level = compression.level
        self._known: OrderedDict[str, _KnownBundles] = OrderedDict()

    def pack(
        self, topic: str, records: Buffer, items: Buffer, *, may_be_sparse: bool = False
    ) -> Section | None:
        """Compress the records of one section of a topic; None when it is not worth it. See ``build_section``."""
        dictionary = self._dictionary(topic, records)
        if not pays(dictionary, records, level=self._level):
            dictionary = b""
        return build_packed_section(
            records,
            items,
            level=self._level,
            dictionary=dictionary,
            may_be_sparse=may_be_sparse,
        )

    def _dictionary(self, topic: str, payload: Buffer) -> bytes:
        size = memoryview(payload).nbytes
        known = self._known.get(topic)
        if known is None or known.bytes_left <= 0:
            if size < TRAIN_BYTES_MIN:
                return known.dictionary if known else b""
            known = self._known[topic] = _KnownBundles(train(payload, level=self._level))
        known.bytes_left -= size
        self._known.move_to_end(topic)
        while len(self._known) > TOPICS_MAX:
            self._known.popitem(last=False)
        return known.dictionary


# -- merging -----------------------------------------------------------------------------------------


_LOG = logging.getLogger("tiered.dispatch")

_LOOK_S = 60.0
"""Between two looks when nothing is said to be due: expiry may have left bundles of which little is named."""
_READ_BYTES = 8 * 1024 * 1024
"""Of one request for neighbouring sections."""
_MUCH = 8
"""While dispatch catches up, merging waits for so many times the fan-in: 1 GiB of bundles of default size."""
_SLACK_BYTES = 64 * 1024
"""Sections with so much between them are read with one request."""


def plan_reads(parts: Iterable[Part]) -> list[list[Part]]:
    """Divide parts over requests: those that are neighbours in a bundle share one."""
    of_bundle: dict[str, list[Part]] = defaultdict(list)
    for part in parts:
        of_bundle[part.bundle.key].append(part)
    plans: list[list[Part]] = []
    for some in of_bundle.values():
        begin = end = 0
        for part in sorted(some, key=lambda one: one.section.start):
            start, stop = part.section.start, part.section.start + part.section.size_bytes
            is_near = end and start <= end + _SLACK_BYTES and stop - begin <= _READ_BYTES
            if is_near:
                plans[-1].append(part)
                end = max(end, stop)
            else:
                plans.append([part])
                begin, end = start, stop
    return plans


@dataclass(frozen=True, slots=True)
class MergedBundle:
    """A bundle that a merge has made."""

    output: MergeOutput  # what it was to be
    stored: StoredBundle  # what it is

    def action(self) -> Action:
        """For the journal."""
        return {
            "do": "merge",
            "bundles": [bundle_row(self.stored.bundle, self.stored.packed)],
            "positions": encode_numbers([run.position for run in self.output.runs]),
            "runs": encode_numbers([fingerprint(run.parts) for run in self.output.runs]),
        }


class Merger:
    """Carries plans out: reads, joins, uploads. One thread at a time."""

    def __init__(
        self,
        uploader: Uploader,
        store: ObjectStore,
        prefix: str,
        pace: Callable[[int], None],
        *,
        packer: Packer | None,
    ) -> None:
        """Wire it.

        Args:
            pace: Waits until so many bytes may be uploaded.
        """
        self._uploader = uploader
        self._store = store
        self._prefix = prefix
        self._pace = pace
        # What compresses a topic's records; None: nothing does.
        self.packer_of: Callable[[str], Packer | None] = lambda _topic: packer

    def make(self, output: MergeOutput, stop: Callable[[], bool]) -> MergedBundle | None:
        """Make one bundle; None when told to stop.

        Raises:
            DataError: A section is damaged or gone; ``where`` names its bundle.
        """
        data: dict[tuple[str, int], tuple[memoryview, memoryview]] = {}
        for some in plan_reads(part for run in output.runs for part in run.parts):
            if stop():
                return None
            data.update(self._read(some))
        sections = [self._join(run, data, packs=output.level == LAST_LEVEL) for run in output.runs]
        del data
        if stop():
            return None
        self._pace(sum(section.place.size_bytes for _, section in sections))
        stored = self._uploader.put_merged(output, sections)
        reached("merged-stored")
        return MergedBundle(output, stored)

    def _read(
        self, parts: Sequence[Part]
    ) -> Iterator[tuple[tuple[str, int], tuple[memoryview, memoryview]]]:
        key = self._prefix + parts[0].bundle.key
        begin = min(part.section.start for part in parts)
        end = max(part.section.start + part.section.size_bytes for part in parts)
        try:
            kept = self._uploader.budget.kept(parts[0].bundle.key, begin, end)
            found = memoryview(kept or self._store.get(key, ByteRange(begin, end)))
        except (ObjectNotFoundError, InvalidRangeError) as error:
            raise DataError(
                f"a bundle that the journal names is not there: {error}",
                where=key,
                do="run `tiered verify` to see what is damaged",
            ) from error
        for part in parts:
            place = part.section
            at = place.start - begin
            split = split_section(found[at : at + place.size_bytes], place, where=key)
            yield (part.bundle.key, place.start), split

    def _join(
        self,
        run: MergeRun,
        data: dict[tuple[str, int], tuple[memoryview, memoryview]],
        *,
        packs: bool,
    ) -> tuple[SectionRow, Section]:
        records: list[memoryview] = []
        items: list[memoryview | bytes] = []
        at = int(run.parts.rows["log_offset"][0])
        for part in run.parts:
            its_records, its_items = data[part.bundle.key, part.section.start]
            records.append(its_records[part.records_at : part.records_at + part.log_bytes])
            low = part.items_at * ITEM_BYTES
            mine = its_items[low : low + part.count * ITEM_BYTES]
            items.append(moved_items(mine, at - part.log_offset))
            at += part.log_bytes
        index = b"".join(items)
        section, may_be_sparse = None, run.parts.log_gone > 0
        packer = self.packer_of(run.queue.topic) if packs and run.parts.log_bytes else None
        if packer is not None:
            whole = b"".join(records)
            section = packer.pack(run.queue.topic, whole, index, may_be_sparse=may_be_sparse)
        return row_of(run), section or build_section(records, index, may_be_sparse=may_be_sparse)


def row_of(run: MergeRun) -> SectionRow:
    """What is said of the section that a run becomes."""
    rows = run.parts.rows
    first, last = rows[0], rows[-1]
    timed = rows["store_min_ms"] >= 0
    low = int(rows["store_min_ms"][timed].min()) if timed.any() else -1
    return SectionRow(
        run.queue,
        run.incarnation,
        run.segment,
        int(first["log_offset"]),
        int(first["queue_offset"]),
        int(rows["holes"].sum(dtype="i8")),
        low,
        int(rows["store_max_ms"].max()),
        int(last["last"]),
        run.truncated,
        run.parts.log_gone,
    )


class MergeThread:
    """Gathers what is due."""

    def __init__(
        self,
        uploader: Uploader,
        store: ObjectStore,
        prefix: str,
        context: DispatchContext,
        *,
        state: Callable[[], TierState],
        say: Callable[[Fact], None],
    ) -> None:
        settings = context.settings
        self._throttle = context.throttle(settings.upload_rate_bytes_s)
        self._uploader = uploader
        self._merger = Merger(uploader, store, prefix, self._throttle.take, packer=None)
        self.reconfigure(settings)
        self._prefix = prefix
        self._state = state
        self._say = say
        self._context = context
        self._counters = context.counters
        self._clock = context.clock
        self._stop = context.stop
        self._wake = threading.Event()
        self._new = 0
        self._is_busy = True  # it looks when it begins
        # Dispatch has much to catch up with; then this thread begins only when there is much to gather.
        self.stands_back = False
        self._damaged: set[str] = set()
        self._planned: MergePlan | None = None
        # The last error, and when the first of these came.
        self._trouble: tuple[BackendError, float] | None = None
        self._turn = threading.Lock()

    def reconfigure(self, settings: DispatchSettings) -> None:
        """Go on with others (``DispatchSettings.while_running``)."""
        self._throttle.set_rate(settings.upload_rate_bytes_s)
        self._policy = settings.merge_policy
        compression_of = settings.compression_of or (lambda _topic: settings.compression)
        packers: dict[Compression, Packer] = {}

        def packer_of(topic: str) -> Packer | None:
            wanted = compression_of(topic)
            return packers.setdefault(wanted, Packer(wanted)) if wanted else None

        self._merger.packer_of = packer_of

    def rounds_made(self, bundles: int) -> None:
        """Learn that so many bundles of level 0 are new. Of the build thread."""
        self._new += bundles
        if self._new >= self._policy.fan_in:
            self._wake.set()

    def wake(self) -> None:
        """Have the thread look at ``stop``."""
        self._wake.set()

    def run(self) -> None:
        """Body of the thread."""
        while not self._stop.is_set():
            if self._may_begin():
                self._new = 0
                while self.merge_once() and not self._context.budget.under_pressure:
                    pass
            self._is_busy = False
            self._clock.wait(self._wake, _LOOK_S)
            self._is_busy = True
            self._wake.clear()

    def _may_begin(self) -> bool:
        """Whether dispatch can spare the processor. While it catches up, more is gathered at once, and more rarely."""
        is_worth_it = not self.stands_back or self._new >= _MUCH * self._policy.fan_in
        return is_worth_it and not self._context.budget.under_pressure

    @property
    def is_busy(self) -> bool:
        """It gathers, or is about to look whether it should."""
        return self._wake.is_set() or self._is_busy

    def is_due(self) -> bool:
        """Whether something is to be gathered."""
        return plan_merge(self._state(), self._policy, leave=self._damaged) is not None

    def trouble(self) -> tuple[BackendError, float] | None:
        """What the store said last, and for how many seconds it has not done what was asked; None: it did."""
        known = self._trouble
        return known and (known[0], self._clock.monotonic_s() - known[1])

    def go_on(self) -> None:
        """Stand back no longer."""
        self.stands_back = False
        self._wake.set()

    def merge_once(self) -> bool:
        """Plan, and carry the plan out; whether there was one. From any thread; one waits for the other."""
        with self._turn:
            return self._merge()

    def _merge(self) -> bool:
        plan = plan_merge(self._state(), self._policy, leave=self._damaged)
        if plan is None or self._stop.is_set():
            return False
        if plan == self._planned:  # replay took nothing of it: it would be planned for ever
            self._damaged.update(bundle.key for bundle in plan.bundles)
            return True
        self._planned = plan
        told = [done for output in plan.outputs if (done := self._make(output)) is not None]
        for done in told:
            while not (done.is_set() or self._stop.is_set()):
                self._clock.wait(done, 0.25)
        self._uploader.budget.let_go(bundle.key for bundle in plan.bundles)
        reached("merge-known")
        return True

    def _make(self, output: MergeOutput) -> threading.Event | None:
        """Make a bundle, with as many tries as it takes; None when told to stop, or when something in it is damaged."""
        failures = 0
        while not self._stop.is_set():
            try:
                made = self._merger.make(output, self._stop.is_set)
                self._trouble = None
                return None if made is None else self._publish(made)
            except AlreadyExistsError as error:
                raise refused(error) from error
            except BackendError as error:
                failures += 1
                since_s = self._trouble[1] if self._trouble else self._clock.monotonic_s()
                self._trouble = error, since_s
                self._counters.merges_failed += 1
                if failures == 1:
                    _LOG.log(retry_level(error), "merging failed, trying again: %s", error)
                self._clock.wait(self._stop, self._context.backoff_s(failures))
            except TieredStoreError as error:
                self._leave(output, error)
                return None
        return None

    def _leave(self, output: MergeOutput, error: TieredStoreError) -> None:
        """Leave a damaged bundle as it is; where nobody knows which it is, all of them."""
        named = {bundle.key for run in output.runs for bundle in run.parts.bundles}
        found = {key for key in named if error.where == self._prefix + key} or named
        self._damaged |= found
        self._counters.unmergeable_bundles += len(found)
        _LOG.warning("a damaged bundle stays as it is: %s", error)

    def _publish(self, made: MergedBundle) -> threading.Event:
        done = threading.Event()
        self._say(Fact(made.action(), done.set))
        counters, runs = self._counters, made.output.runs
        counters.merged_parts += sum(len(run.parts) for run in runs)
        counters.merged_bytes += made.output.size_bytes
        counters.merged_stored_bytes += made.stored.bundle.size_bytes
        counters.merged_bundles += 1
        return done
