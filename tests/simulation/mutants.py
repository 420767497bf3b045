"""Deliberate defects. Each must be found by some seed: this is what shows that the checker can fail."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from unittest import mock

from zlib_ng import zlib_ng

from backends.errors import AlreadyExistsError, BackendError, UnknownOutcomeError
from tiered.dispatch import rounds, sealer, uploads
from tiered.dispatch.dispatcher import TieredDispatcher
from tiered.dispatch.group_commit import GroupCommitter
from tiered.dispatch.rounds import RoundBuilder
from tiered.dispatch.sealer import Sealer
from tiered.dispatch.uploads import Uploader
from tiered.journal import checkpoint
from tiered.journal.entry import Entry, encode_entry
from tiered.journal.reader import JournalReader
from tiered.journal.writer import JournalWriter
from tiered.keys import checkpoint_key, entry_key
from tiered.log import composite, parting, seal, state
from tiered.log.composite import CompositeFlatFile, GroupCommit

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tiered.log.parts import Part

Patches = list[Any]


def _index_before_data() -> Patches:
    put_logs, put_indexes = Uploader.put_logs, Uploader.put_indexes

    def index_first(self: Uploader, commits: Any) -> Any:
        for commit in commits:
            times = commit.times()
            new = self._new_log(commit, times)
            put_indexes(self, [uploads._stored(commit, new.place, *times)])
        return put_logs(self, commits)

    return [mock.patch.object(Uploader, "put_logs", index_first)]


def _entry_before_index() -> Patches:
    def built(self: RoundBuilder, some: Any) -> Any:
        made = [self._uploader._new_index(one) for one in some]

        def later() -> None:
            self._uploader._put_all(made)

        self._late_indexes = [*getattr(self, "_late_indexes", []), later]  # type: ignore[attr-defined]
        return [
            rounds._Built(one, uploads._part(one, new.place), 0)
            for one, new in zip(some, made, strict=True)
        ]

    append = RoundBuilder._append

    def appended(self: RoundBuilder, actions: Any) -> None:
        append(self, actions)
        for later in getattr(self, "_late_indexes", []):
            later()

    return [
        mock.patch.object(RoundBuilder, "_build_some", built),
        mock.patch.object(RoundBuilder, "_append", appended),
    ]


def _recut_while_unknown() -> Patches:
    def make_history(self: JournalWriter[Any], entry: Entry) -> bool:
        key = entry_key(self._prefix, entry.number)
        data = encode_entry(entry)
        while True:
            try:
                self._store.put_if_absent(key, data)
                break
            except AlreadyExistsError:
                if not self._is_ours(entry, data):
                    return False
                break
            except UnknownOutcomeError as error:
                self._pause(0.1, "", error)
                entry = replace(entry, time_ms=self._clock.now_ms())
                data = encode_entry(entry)
            except BackendError as error:
                self._pause(0.1, "", error)
        self._reader.apply(entry, data)
        return True

    return [mock.patch.object(JournalWriter, "_make_history", make_history)]


def _exists_is_done() -> Patches:
    return [mock.patch.object(JournalWriter, "_is_ours", return_value=True)]


def _unknown_is_failed() -> Patches:
    """An unknown outcome of an entry ends the round, and its parts go into the next one."""
    settle = JournalWriter._settle

    def impatient(self: JournalWriter[Any], entry: Entry, data: bytes) -> bool:
        try:
            self._store.put_if_absent(entry_key(self._prefix, entry.number), data)
        except UnknownOutcomeError:
            return False
        except BackendError:
            return settle(self, entry, data)
        return True

    return [mock.patch.object(JournalWriter, "_settle", impatient)]


def _commit_too_early() -> Patches:
    early = property(lambda self: self._taken_offset)
    return [mock.patch.object(CompositeFlatFile, "commit_offset", early)]


def _switch_base_off_by_one() -> Patches:
    failed = CompositeFlatFile.log_failed

    def off(self: Any, *arguments: Any) -> None:
        failed(self, *arguments)
        self._log_taken += 1

    return [mock.patch.object(CompositeFlatFile, "log_failed", off)]


def _switch_forgets() -> Patches:
    """After a failed upload only what came since goes into the new segment."""
    failed = CompositeFlatFile.log_failed

    def forgets(self: Any, *arguments: Any) -> None:
        commit = self._uploading
        failed(self, *arguments)
        for _ in commit.batches:
            self._buffer.popleft()
        self._buffered -= commit.data_bytes

    return [mock.patch.object(CompositeFlatFile, "log_failed", forgets)]


def _generation_not_raised() -> Patches:
    def same(_self: Any, known: Any) -> int:
        return max(0, int(known.generation) - 1)

    return [mock.patch.object(state.TierMachine, "generation", same)]


def _not_looked_behind() -> Patches:
    return [mock.patch.object(JournalWriter, "_refuse_used_number", return_value=None)]


def _checkpoint_believed() -> Patches:
    def believed(self: JournalReader[Any], number: int) -> Any:
        key = checkpoint_key(self._prefix, number)
        line = self._store.get(key).partition(b"\n")[0]
        text = b"%s\n%08x\n" % (line, zlib_ng.crc32(line))
        found = checkpoint.decode_checkpoint(text, where=key)
        return self._machine.load(found.state), found.last

    return [mock.patch.object(JournalReader, "read_checkpoint", believed)]


def _replay_is_lax() -> Patches:
    part_of = state.part_of
    part = state._part

    def lax(work: Any, action: Any) -> None:
        """Takes a part wherever it begins."""
        life = work.life(action)
        row = part_of(action["part"])
        if life is not None and row.queue_offset > life.commit_offset:
            moved = replace(life, commit_offset=row.queue_offset, log_end=row.log_offset)
            work.put(action, moved)
        part(work, action)

    return [mock.patch.dict(state._HANDLERS, {"part": lax})]


def _fenced_goes_on() -> Patches:
    return [mock.patch.object(JournalWriter, "_refuse", return_value=None)]


def _gap_not_recorded() -> Patches:
    """What retention took is skipped without a word."""
    from tiered.dispatch.compensation import Compensation

    def silent(self: Compensation, file: CompositeFlatFile, end: Any) -> None:
        self._take(file, None)
        with file.lock:
            if file.is_settled:
                file.skip_to(end)

    return [mock.patch.object(Compensation, "_record_gap", silent)]


def _beginning_not_told() -> Patches:
    """A queue that the tier has never met begins with what retention has left of it."""
    from tiered.plugin.starting import Starting

    begin = Starting.__call__

    def silent(self: Starting, queue: Any, bounds: Any) -> Any:
        return max(begin(self, queue, bounds), bounds.min)

    return [mock.patch.object(Starting, "__call__", silent)]


def _anew_behind_what_expired() -> Patches:
    """A queue that is made anew begins with what retention has left of it."""
    begin = parting._begin_anew

    def silent(queue: Any, life: Any, bounds: Any, start: int = 0) -> Any:
        return begin(queue, life, bounds, max(start, bounds.min))

    return [mock.patch.object(parting, "_begin_anew", silent)]


def _later_part_first() -> Patches:
    """A part is named although the index of the one before it failed."""

    def gather(self: RoundBuilder, row: Any, results: Any) -> Any:
        built = []
        for stored, result in zip(row, results, strict=True):
            if isinstance(result, BackendError):
                self._index_failed(stored, result)
                self.submit(stored)
            else:
                built.append(result)
        return built

    return [mock.patch.object(RoundBuilder, "_gather", gather)]


def _trim_off_by_one() -> Patches:
    """What is repeated is not cut off exactly."""
    trim = composite.trim

    def off(batch: Any, start: Any) -> Any:
        return replace(trim(batch, start), base_offset=batch.base_offset) if start else batch

    return [mock.patch.object(composite, "trim", off)]


def _merge_loses() -> Patches:
    """Sealing leaves the last record of a run out."""
    join = Sealer._join

    def loses(self: Sealer, places: Any, stop: Any) -> Any:
        data = join(self, places, stop)
        if data is not None and len(data) > 60:
            data[-40:] = bytes(40)
        return data

    return [mock.patch.object(Sealer, "_join", loses)]


def _memory_not_given_back() -> Patches:
    report = GroupCommitter._report

    def keeps(self: GroupCommitter, file: Any, commit: Any, result: Any) -> None:
        with mock.patch.object(self._budget, "release", return_value=None):
            report(self, file, commit, result)

    return [mock.patch.object(GroupCommitter, "_report", keeps)]


def _gc_without_grace() -> Patches:
    from tiered.log.history import TierHistory
    from tiered.log.verify_listing import named_objects
    from tiered.plugin import survey

    plan = survey.plan_orphans

    def hasty(listed: Any, probes: Any, known: Any, *, limit: int) -> Any:
        named = {key for key, _ in named_objects(known.state)}
        base = known.base or known.state
        return plan(
            listed,
            probes,
            replace(known, protected=named, base=base, old_ms=1 << 60),
            limit=limit,
        )

    return [
        mock.patch.object(survey, "plan_orphans", hasty),
        mock.patch.object(TierHistory, "protected", return_value=set()),
    ]


def _gc_of_the_present_reign() -> Patches:
    from tiered.plugin import survey

    plan = survey.plan_orphans

    def greedy(listed: Any, probes: Any, known: Any, *, limit: int) -> Any:
        old_ms = known.old_ms + 4500
        return plan(listed, probes, replace(known, reign=1 << 60, old_ms=old_ms), limit=limit)

    return [mock.patch.object(survey, "plan_orphans", greedy)]


def _tail_not_held() -> Patches:
    """What was taken last is not held against the local store."""
    from tiered.dispatch.beginnings import Look
    from tiered.dispatch.continuity import Continuity

    return [mock.patch.object(Continuity, "look", return_value=Look.SAME)]


def _take_back_at_the_wrong_offset() -> Patches:
    """One message too many."""
    first = parting.first_difference

    def early(low: int, high: int, *rest: Any) -> tuple[int, bool]:
        end, is_common = first(low, high, *rest)
        return (end - 1 if low + 1 < end < high else end), is_common

    return [mock.patch.object(parting, "first_difference", early)]


def _incarnation_not_begun() -> Patches:
    """A queue that has nothing in common with the tier is taken for a copy that lags."""
    from tiered.dispatch import continuity

    plan = continuity.plan_change

    def silent(*arguments: Any, **more: Any) -> Any:
        change = plan(*arguments, **more)
        return None if change and change.is_anew else change

    return [mock.patch.object(continuity, "plan_change", silent)]


def _tail_forgotten() -> Patches:
    """What was taken back is not kept."""
    take_back = state._take_back

    def forgets(work: Any, action: Any) -> None:
        take_back(work, action)
        queue = state._queue(action)
        work.queues[queue] = work.queues[queue][-1:]

    return [mock.patch.dict(state._HANDLERS, {"take_back": forgets})]


def _read_behind_what_came() -> Patches:
    """What was read in bulk is taken also when other records have come since the look."""

    def takes(self: TieredDispatcher, file: CompositeFlatFile, batch: Any) -> None:
        with file.lock:
            if batch is None:
                self._commits.upload_if_due(file, flush=True)
            else:
                self._append(file, batch)

    return [mock.patch.object(TieredDispatcher, "_take_compensated", takes)]


def _batch_is_one() -> Patches:
    """Of several objects that were sent at once all count as stored when one is."""
    put = uploads.put_many_if_absent

    def lax(store: Any, objects: Any) -> Any:
        errors = put(store, objects)
        return errors if all(errors) else [None] * len(errors)

    return [mock.patch.object(uploads, "put_many_if_absent", lax)]


def _batch_out_of_order() -> Patches:
    """The outcomes of several objects are told in another order."""
    put = uploads.put_many_if_absent

    def turned(store: Any, objects: Any) -> Any:
        return put(store, objects)[::-1]

    return [mock.patch.object(uploads, "put_many_if_absent", turned)]


def _taken_while_a_gap_is_on_its_way() -> Patches:
    return [mock.patch.object(CompositeFlatFile, "hold", return_value=None)]


def _first_mark_kept() -> Patches:
    """A merged part has the mark of its first part: the next writer takes the queue back, though nothing changed."""
    return [_merged_differently(lambda part, run: replace(part, last=run[0].last))]


def _merged_differently(change: Callable[[Part, Any], Part]) -> Any:
    merge = Sealer._merge

    def other(self: Sealer, job: Any, run: Any, stop: Any) -> Any:
        part = merge(self, job, run, stop)
        return part and change(part, run)

    return mock.patch.object(Sealer, "_merge", other)


def _summed_up_differently(change: Callable[[Any, tuple[int, ...]], tuple[int, ...]]) -> Patches:
    """Whoever merges and whoever replays err alike."""
    summary = seal.summary

    def other(run: Any) -> tuple[int, ...]:
        return change(run, summary(run))

    return [mock.patch.object(seal, "summary", other), mock.patch.object(sealer, "summary", other)]


def _holes_of_the_last() -> Patches:
    return _summed_up_differently(lambda run, said: (*said[:4], run[-1].holes, *said[5:]))


def _times_of_ends() -> Patches:
    """Store times are taken to rise, from part to part."""
    return _summed_up_differently(
        lambda run, said: (*said[:5], run[0].store_min_ms, run[-1].store_max_ms)
    )


def _times_of_the_first_and_last() -> Patches:
    """Store times are taken to rise, within a commit."""

    def ends(self: GroupCommit) -> tuple[int, int]:
        real = [
            int(time_ms)
            for batch in self.batches
            for time_ms, size in zip(batch.store_timestamps_ms, batch.sizes, strict=True)
            if size > 0
        ]
        return (real[0], real[-1]) if real else (-1, -1)

    return [mock.patch.object(GroupCommit, "times", ends)]


def _holes_stay_behind_a_cut() -> Patches:
    head_of = parting.head_of

    def other(part: Part, count: int, **more: Any) -> Part:
        return head_of(part, count, **more | {"holes": 0})

    return [mock.patch.object(parting, "head_of", other)]


def _mark_stays_behind_a_cut() -> Patches:
    head_of = parting.head_of

    def other(part: Part, count: int, **more: Any) -> Part:
        return head_of(part, count, **more | {"last": part.last})

    return [mock.patch.object(parting, "head_of", other)]


def _tags_of_the_first() -> Patches:
    """Every item has its batch's first tag code."""
    encode = composite.encode_items

    def other(log_offset: Any, positions: Any, sizes: Any, tag_codes: Any) -> bytes:
        return encode(log_offset, positions, sizes, tag_codes * 0 + tag_codes[0])

    return [mock.patch.object(composite, "encode_items", other)]


def _gap_to_the_end() -> Patches:
    """The gap of an emptied queue goes to its end: what has come between the two looks is passed over."""
    from tiered.dispatch.compensation import Compensation

    def other(self: Compensation, file: CompositeFlatFile, start: Any) -> bool:
        bounds = self._local.queues().get(file.queue)
        if bounds is None or bounds.min <= start:
            return False
        self._record_gap(file, bounds.end)
        return True

    return [mock.patch.object(Compensation, "_has_emptied", other)]


def _lag_not_looked_at() -> Patches:
    """A copy that lags, and grows by other messages and stays short, is taken for the same copy."""
    from tiered.dispatch.continuity import Continuity

    def known(self: Continuity, queue: Any) -> bool:
        return queue in self._lagging

    return [mock.patch.object(Continuity, "_is_lag_known", known)]


def _refused_take_back_counts() -> Patches:
    """A take-back that replay refused is taken for done."""
    from tiered.dispatch.continuity import Continuity

    done = Continuity._done

    def other(self: Continuity, file: CompositeFlatFile, change: Any) -> None:
        life = self._state().life(file.queue)
        done(self, file, replace(change, start=life.commit_offset) if life else change)

    return [mock.patch.object(Continuity, "_done", other)]


def _damaged_is_the_same() -> Patches:
    """A record that cannot be compared is taken for the one that it should be."""
    from tiered.dispatch.continuity import Continuity

    return [mock.patch.object(Continuity, "_is_vouched", return_value=True)]


def _expired_too_early() -> Patches:
    from tiered.plugin import expire

    plan = expire.plan_expiry

    def hasty(known: Any, now_ms: int, *rest: Any, **more: Any) -> Any:
        return plan(known, now_ms + 6000, *rest, **more)

    return [mock.patch.object(expire, "plan_expiry", hasty)]


def _expired_by_the_oldest() -> Patches:
    """A segment is as old as its oldest message."""
    from tiered.log import expiry

    def oldest(segment: Any) -> int:
        return min(part.store_min_ms for part in segment.parts)

    return [mock.patch.object(expiry, "newest_ms", oldest)]


def _gaps_go_with_an_expiry() -> Patches:
    expired = state.expired

    def other(*arguments: Any, **more: Any) -> Any:
        left = expired(*arguments, **more)
        return left and replace(left, gaps=())

    return [mock.patch.object(state, "expired", other)]


def _cloned_writer_goes_on() -> Patches:
    """A part of the own generation that was not sent is no reason to stop."""
    refuse = JournalWriter._refuse

    def other(self: JournalWriter[Any], entry: Entry, *rest: Any) -> None:
        if entry.writer != self.writer:
            refuse(self, entry, *rest)

    return [mock.patch.object(JournalWriter, "_refuse", other)]


MUTANTS: dict[str, Callable[[], Patches]] = {
    "index before data": _index_before_data,
    "entry before index": _entry_before_index,
    "an entry re-cut while its outcome is unknown": _recut_while_unknown,
    "unknown taken for failed": _unknown_is_failed,
    "exists taken for done": _exists_is_done,
    "commit moved too early": _commit_too_early,
    "switch base off by one": _switch_base_off_by_one,
    "a switch forgets what had failed": _switch_forgets,
    "generation not raised at restart": _generation_not_raised,
    "a won number counted without looking behind it": _not_looked_behind,
    "checkpoint believed unchecked": _checkpoint_believed,
    "replay takes a part wherever it begins": _replay_is_lax,
    "a fenced writer goes on": _fenced_goes_on,
    "a gap passed over in silence": _gap_not_recorded,
    "what expired before a queue was met is not told": _beginning_not_told,
    "what expired of a queue made anew is not told": _anew_behind_what_expired,
    "a part named before the one before it": _later_part_first,
    "repeated records taken twice": _trim_off_by_one,
    "sealing loses bytes": _merge_loses,
    "memory not given back": _memory_not_given_back,
    "gc without grace": _gc_without_grace,
    "gc of the running reign's objects": _gc_of_the_present_reign,
    "tail not held against the local store": _tail_not_held,
    "a take_back at the wrong offset": _take_back_at_the_wrong_offset,
    "incarnation not begun": _incarnation_not_begun,
    "what was taken back is forgotten": _tail_forgotten,
    "a batch is stored when one of it is": _batch_is_one,
    "outcomes of a batch in another order": _batch_out_of_order,
    "a merged part with its first part's mark": _first_mark_kept,
    "a merged part with its last part's holes": _holes_of_the_last,
    "a merged part with times that are taken to rise": _times_of_ends,
    "a part with times that are taken to rise": _times_of_the_first_and_last,
    "a part that is cut keeps no holes": _holes_stay_behind_a_cut,
    "a part that is cut keeps its mark": _mark_stays_behind_a_cut,
    "tag codes of a batch's first record": _tags_of_the_first,
    "the gap of an emptied queue goes to its end": _gap_to_the_end,
    "a lagging copy is not looked at when it grows": _lag_not_looked_at,
    "a take-back that replay refused counts": _refused_take_back_counts,
    "what cannot be compared is the same": _damaged_is_the_same,
    "expired too early": _expired_too_early,
    "a segment is as old as its oldest message": _expired_by_the_oldest,
    "gaps go with an expiry in front of them": _gaps_go_with_an_expiry,
    "a clone's entry is no reason to stop": _cloned_writer_goes_on,
}
RARE: dict[str, Callable[[], Patches]] = {
    "read in bulk behind what has come meanwhile": _read_behind_what_came,
    "records taken while a gap is on its way": _taken_while_a_gap_is_on_its_way,
}
"""Not found within the normal number of seeds, since too much has to meet; unit tests hold these."""
QUICK = ("exists taken for done", "switch base off by one")
"""Found within a few seeds, so that every run of the tests can afford them."""


@contextmanager
def defect(name: str) -> Iterator[None]:
    """The product with one defect."""
    patches = (MUTANTS | RARE)[name]()
    for patch in patches:
        patch.start()
    try:
        yield
    finally:
        for patch in reversed(patches):
            patch.stop()
