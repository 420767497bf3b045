"""What a command that changes a tier works with: the place, who writes it, a short epoch, plan files, and the ledger.

Order of such a command: the plan (saved, shown, or made of a plan file), the ledger's record of what is about to be done, a
epoch that fences every writer, a second look, the work.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Mapping  # noqa: TC003 (read at run time: tiered.journal.entry)
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Generic, NamedTuple, Self, TypeVar

from zlib_ng import zlib_ng

from backends.errors import PreconditionFailedError, UnsupportedError
from backends.lazy_dataclass import dataclass, picked
from backends.local_files import advice_for, read_regular, write_regular
from backends.wrapping import put_own, set_own
from tiered.api.broker_place import require_conditional_writes
from tiered.crashpoints import reached
from tiered.dispatch.group_commit import Uploader
from tiered.errors import FencedError, InvalidError, MovedOnError, OtherVersionError
from tiered.journal.append import JournalWriter
from tiered.journal.entry import as_document, document_of, seal_text
from tiered.journal.lease import Holder, JournalEnd, Lease, LeaseState, encode_lease, read_lease
from tiered.journal.replay import JournalReader
from tiered.keys import LEASE, ledger_key
from tiered.log.actions import Pause, action_of
from tiered.log.reader import TierReader
from tiered.log.state import TierMachine, TierState

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Iterator, Sequence

    from backends.base import ObjectStore
    from tiered.api.broker_place import Place
    from tiered.clock import Clock
    from tiered.journal.entry import Action

Step = TypeVar("Step")
GIVE_UP_S = 60.0
STEPS_MAX = 500
"""Steps in one journal entry."""


@dataclass(frozen=True, slots=True)
class Workplace:
    """One broker's tier, and what is needed to change it."""

    store: ObjectStore  # the tier's store, with retries
    bare: ObjectStore  # the same without, for the journal, which tries again by itself
    place: Place  # which broker
    clock: Clock  # time
    rng: random.Random  # for ids and jitter
    give_up_s: float = GIVE_UP_S  # a store that has refused an entry for so long is given up

    @property
    def prefix(self) -> str:
        """Of the broker's keys, ending in a slash."""
        return self.place.prefix

    def new_id(self) -> str:
        """A random id of 8 hex digits."""
        return f"{self.rng.getrandbits(32):08x}"

    def reader(self) -> TierReader:
        """Of the tier as it is now."""
        found = TierReader(self.store, self.prefix)
        found.refresh()
        return found


# --------------------------------------------------------------------------------------------------
# Who writes a tier, and freeing its lease by hand. ``break_lease`` writes a released lease under an id of its own, by
# compare-and-set. A writer that still lives meets that at its next renewal and stops by itself (exit code 4). One
# that hangs learns it when it goes on; until a new writer has begun its epoch it may still commit, which harms nothing: the
# journal has room for one history, and fences it then.
#
# Threads: none. After a crash the lease is as it was, or free.
# --------------------------------------------------------------------------------------------------

_TRIES = 5
HELD, EXPIRED, RELEASED, GONE, UNREADABLE, NONE = (
    "held",
    "expired",
    "released",
    "gone",
    "unreadable",
    "none",
)


@dataclass(frozen=True, slots=True)
class LeaseReport:
    """What is known of a tier's writer."""

    word: str
    """``held`` (somebody writes), ``expired``, ``released`` (ended cleanly, or broken), ``gone`` (its process, of
    this host, has ended), ``unreadable``, or ``none`` (no lease was ever taken)."""
    lease: LeaseState | None  # what the lease says; None when unreadable or absent
    state: TierState  # what the journal says: who wrote last
    now_ms: int  # our wall clock, against which the expiry was held
    number: int = 0  # of the last journal entry

    @property
    def is_held(self) -> bool:
        """A writer is alive, as far as can be told."""
        return self.word == HELD

    def document(self, place: Place, url: str) -> dict[str, Any]:
        """For ``tiered lease --json``."""
        lease = self.lease
        holder = lease and lease.holder
        return {
            "format": 1,
            "url": url,
            **picked(place, "cluster", "broker"),
            "state": self.word,
            "is_held": self.is_held,
            "writer": lease and lease.writer,
            "host": holder and holder.host,
            "pid": holder and holder.pid,
            "expires_ms": lease and lease.expires_ms,
            "now_ms": self.now_ms,
            "epoch": self.state.epoch,
            "present_writer": self.state.writer,
            "updated_ms": self.state.updated_ms,
        }


def report_lease(store: ObjectStore, prefix: str, clock: Clock) -> LeaseReport:
    """Read the lease and the journal."""
    journal = JournalReader(store, prefix, TierMachine())
    journal.catch_up()
    lease, version = read_lease(store, prefix + LEASE)
    now_ms = clock.now_ms()
    word = lease_word(lease, now_ms, exists=version is not None)
    return LeaseReport(word, lease, journal.state, now_ms, journal.number)


def lease_word(lease: LeaseState | None, now_ms: int, *, exists: bool) -> str:
    """What a lease amounts to; see ``LeaseReport.word``."""
    if lease is None:
        return UNREADABLE if exists else NONE
    if lease.released:
        return RELEASED
    if lease.expires_ms <= now_ms:
        return EXPIRED
    return GONE if lease.holder.is_gone() else HELD


def break_lease(store: ObjectStore, prefix: str, clock: Clock, *, breaker: str) -> bool:
    """Free the lease, no matter who holds it; whether there was anything to free.

    Args:
        breaker: Our 8-hex-digit id, other than the holder's, so that the holder sees that it lost the lease.

    Raises:
        FencedError: It was written anew each time that we tried.
    """
    key = prefix + LEASE
    for _ in range(_TRIES):
        present, version = read_lease(store, key)
        if version is None or (present and present.released):
            return False
        end = present.end if present else JournalEnd()  # what it remembers is kept
        broken = LeaseState(Holder.present(), breaker, clock.now_ms(), released=True, end=end)
        try:
            set_own(store, key, encode_lease(broken), version)
        except PreconditionFailedError:
            continue  # renewed at this very moment
        return True
    raise FencedError("the lease changes faster than it can be broken", where=key, do="try again")


# --------------------------------------------------------------------------------------------------
# A short epoch for a command that must be sure that no writer is at work: lease, epoch, and the lease given back at
# once. **Fence, then look again.** A command that replaces or deletes by what it has read or listed (``gc``, ``delete-
# topic``, ``rebuild``) goes through ``in_new_epoch``: after the epoch's entry nothing that an earlier writer made can be
# named any more, however long it sleeps. So what came in between is there to be seen by then, and the work looks again
# at all that it presumes, and only then acts: ``gc`` follows the journal before each batch, ``delete-topic`` holds
# each step against the state, and ``rebuild`` lists.
#
# The lease is held only for the moment of taking the epoch, and that work: a writer that comes afterwards takes the
# next one, and what is done under ours stays right.
#
# A lease that has expired by our clock alone is watched first (``Lease.acquire``): a writer whose clock is behind ours
# renews it, and must not be fenced by a command that only tidies up.
# --------------------------------------------------------------------------------------------------

_SECONDS = 60.0
"""A lease that nobody renews: longer than taking an epoch and a few entries may last."""
_SECONDS_ANEW = 600.0
"""The same, where all of a tier is listed again, and a checkpoint written."""


class Anew(NamedTuple):
    """Where a journal begins anew that cannot be read."""

    number: int  # of its first entry, beyond all that may have been used
    state: TierState  # what went before


def journal_writer(at: Workplace) -> JournalWriter[TierState]:
    """A writer without an epoch of its own, at the head of the journal."""
    journal = _writer(at)
    journal.catch_up()
    return journal


def _writer(at: Workplace, stop: threading.Event | None = None) -> JournalWriter[TierState]:
    return JournalWriter(
        at.bare,
        at.prefix,
        TierMachine(),
        writer=at.new_id(),
        clock=at.clock,
        rng=at.rng,
        stop=stop or threading.Event(),
        give_up_s=at.give_up_s,
    )


def _lease(at: Workplace, journal: JournalWriter[TierState], seconds: float) -> Lease:
    return Lease(
        at.store,
        at.prefix,
        writer=journal.writer,
        holder=Holder.present(),
        seconds=seconds,
        clock=at.clock,
        known=lambda: journal.end,
    )


def _acquire(at: Workplace, lease: Lease, stop: threading.Event) -> None:
    lease.acquire(
        wait=False,
        announce=lambda _state: None,
        stop=lambda seconds: at.clock.wait(stop, seconds),
    )


def in_new_epoch(
    at: Workplace,
    work: Callable[[JournalWriter[TierState]], None] = lambda _journal: None,
    *,
    anew: Anew | None = None,
) -> JournalWriter[TierState]:
    """Take lease and epoch, do some short work in the journal, and free the lease.

    Args:
        work: Looks again at what it presumes, and then acts.
        anew: The journal cannot be read, and begins there; ``work`` sees to the checkpoint.

    Raises:
        FencedError: A writer holds the lease, or took the epoch at the same moment.
    """
    journal = _writer(at) if anew else journal_writer(at)
    lease = _lease(at, journal, _SECONDS_ANEW if anew else _SECONDS)
    _acquire(at, lease, threading.Event())
    try:
        holder = asdict(Holder.present())
        if anew:
            journal.take_epoch_anew(anew.number, anew.state, {**holder, "rebuilt": True})
        else:
            journal.take_epoch(holder, remembered=lease.remembered)
        work(journal)
    finally:
        lease.release()
    return journal


# --------------------------------------------------------------------------------------------------
# The epoch of a command that uploads: lease, epoch and an uploader, from when there is something to write until it ends.
#
# Ordering: lease, epoch, then uploads, whose keys carry the epoch. So nothing that an earlier writer made can be
# named any more, and what a crash leaves here unnamed goes with the next ``gc``. The lease is renewed as the work goes on
# (``renew``): a command that hangs for longer than a minute may be followed by a writer, and is fenced then.
#
# Threads: one. Errors: a writer at work refuses us (``FencedError``).
# --------------------------------------------------------------------------------------------------


class UploadingEpoch:
    """One epoch over one broker's tier."""

    def __init__(self, at: Workplace, *, does: str, stop: threading.Event | None = None) -> None:
        """Read and write nothing yet.

        Args:
            does: What the epoch is for, as its entry says.
        """
        self._at = at
        self._does = does
        self._stop = stop or threading.Event()
        # Written to under the epoch, once it is taken; to be read before.
        self.journal = _writer(at, self._stop)
        self._lease = _lease(at, self.journal, _SECONDS)
        self._renew_at_s = 0.0
        self._uploader: Uploader | None = None

    @property
    def is_taken(self) -> bool:
        """There was something to write."""
        return self._uploader is not None

    def uploader(self) -> Uploader:
        """Take lease and epoch, when that is not done yet; what puts objects under it.

        Raises:
            FencedError: A writer holds the lease, or took the epoch at the same moment.
        """
        if self._uploader is None:
            at = self._at
            able = require_conditional_writes(at.store, at.rng, at.store.url)
            _acquire(at, self._lease, self._stop)
            holder = {**asdict(Holder.present()), self._does: True}
            self.journal.take_epoch(holder, remembered=self._lease.remembered)
            self._uploader = Uploader(
                at.store,
                at.prefix,
                epoch=self.journal.epoch,
                writer=self.journal.writer,
                clock=at.clock,
                escapes_case=not able.distinguishes_case,
            )
            self._renew_at_s = at.clock.monotonic_s() + self._lease.renewal_seconds
        return self._uploader

    def renew(self) -> None:
        """Prolong the lease, when that is due."""
        at = self._at
        if self.is_taken and at.clock.monotonic_s() >= self._renew_at_s:
            self._lease.renew()
            self._renew_at_s = at.clock.monotonic_s() + self._lease.renewal_seconds

    def end(self) -> None:
        """Give the lease back."""
        self._lease.release()


# --------------------------------------------------------------------------------------------------
# Plans: what a command is going to do, shown, saved in a plan file, and carried out exactly so or not at all. As a
# document a plan is one JSON object of its fields: ``what`` (the command), the tier (``cluster``, ``broker``, ``store``,
# and ``history``, since one store may be tiered to several places), the journal's last entry, and what is to be done; in
# a file with a ``checksum`` over all of it, so that one that was edited or cut is refused. What else has to hold when it
# is carried out is each command's own business.
# --------------------------------------------------------------------------------------------------

FORMAT = 1
PlanDocument = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class TierPlan(Generic[Step]):
    """What a command is going to do to a tier, step by step."""

    ROWS: ClassVar[str] = "steps"
    """What the steps are called in documents."""

    format: int = FORMAT
    what: str  # the command
    url: str  # of the store
    cluster: str
    broker: str
    store: Mapping[str, Any]  # of the state, by which the tier is known again, at whatever URL
    history: str  # likewise
    journal_number: int  # of the last entry
    epoch: int
    made_ms: int
    steps: tuple[Step, ...]

    def document(self) -> PlanDocument:
        """As it is shown and saved."""
        document = document_of(self)
        steps = document.pop("steps")
        return {**document, self.ROWS: steps}

    @classmethod
    def of(cls, document: PlanDocument, where: str) -> Self:
        """Undo ``document``."""
        fields = dict(document)
        try:
            steps = fields.pop(cls.ROWS)
            return as_document(cls).decode({**fields, "steps": steps})
        except (LookupError, TypeError, ValueError) as error:
            raise OtherVersionError(f"this plan has another form: {error}", where=where) from error


AnyPlan = TypeVar("AnyPlan", bound=TierPlan[Any])


def plan_head(store: ObjectStore, place: Place, state: TierState, number: int) -> dict[str, Any]:
    """The fields by which a plan knows its tier."""
    return {
        "url": store.url,
        "cluster": place.cluster,
        "broker": place.broker,
        **tier_fields(state),
        "journal_number": number,
        "epoch": state.epoch,
    }


@contextmanager
def writing(what: str, path: str) -> Iterator[None]:
    """Have a disk that refuses what the block writes into a file told as ``InvalidError``."""
    try:
        yield
    except OSError as error:
        advice = advice_for(error, "name a file in a directory that can be written")
        raise InvalidError(
            f"the {what} cannot be written: {error.strerror}", where=path, do=advice
        ) from error


def save_plan(path: str, plan: PlanDocument) -> None:
    """Write a plan file, readable for people."""
    text = json.dumps({**plan, "checksum": _checksum(plan)}, indent=1) + "\n"
    with writing("plan", path):
        write_regular(path, text.encode())
    reached("plan-saved")


def load_plan(path: str, what: str, place: Place) -> PlanDocument:
    """Read a plan file."""
    try:
        plan = json.loads(read_regular(path))
    except OSError as error:
        raise InvalidError(f"the plan cannot be read: {error.strerror}", where=path) from error
    except (ValueError, RecursionError):
        plan = None
    if not isinstance(plan, dict):
        raise InvalidError(
            "this is not a plan", where=path, do="give a file that --plan has written"
        )
    wrong = ""
    if plan.pop("checksum", None) != _checksum(plan):
        wrong = "it was changed or cut"
    elif plan.get("format") != FORMAT:
        raise OtherVersionError(
            f"a plan of format {plan.get('format')!r:.80}, where {FORMAT} is known", where=path
        )
    elif plan.get("what") != what:
        wrong = f"it is of `tiered {plan.get('what')}`"
    elif (plan.get("cluster"), plan.get("broker")) != (place.cluster, place.broker):
        wrong = f"it is of the tier of {plan.get('cluster')}/{plan.get('broker')}"
    if wrong:
        raise InvalidError(f"this plan cannot be used: {wrong}", where=path, do="plan again")
    return plan


def tier_fields(state: TierState) -> dict[str, Any]:
    """By which a plan knows its tier again, at whatever URL."""
    return {"store": dict(state.store), "history": state.history}


def require_same_tier(plan: TierPlan[Any], state: TierState) -> None:
    """Refuse a plan that was made of another tier."""
    for name, value in tier_fields(state).items():
        if getattr(plan, name) != value:
            raise moved_on(f"it is another tier, or one of another store ({name})")


def was_applied(planned: int, done: int, done_before: int) -> bool:
    """Whether all of a plan with work had been carried out before this run."""
    return planned > 0 and done == 0 and done_before == planned


def digest(plan: TierPlan[Any]) -> PlanDocument:
    """What the ledger keeps of a plan: its plain values, how long its lists are, and a digest that tells the plan's file."""
    document = plan.document()
    plain = {name: one for name, one in document.items() if not isinstance(one, list | dict)}
    counts = {name: len(one) for name, one in document.items() if isinstance(one, list | dict)}
    return {**plain, "counts": counts, "sha256": hashlib.sha256(_text(document)).hexdigest()}


def carry_out(
    at: Workplace,
    plan: TierPlan[Step],
    *,
    said: Callable[[Step], Action],
    is_done: Callable[[TierState, Step], bool],
    hold: Callable[[TierState, Step], None],
    in_epoch: bool,
    begun: Callable[[int], None] = lambda _store_now_ms: None,
) -> dict[str, Any]:
    """Append what of a plan's steps is not done yet, ``STEPS_MAX`` an entry, with a record in the ledger before and after.

    Args:
        hold: Raises ``moved_on`` when what a step presumes does not hold any more; asked again as others append.
        in_epoch: Steps change what only the tier's writer may change.
        begun: Called with the time by the store's clock, before anything is changed.

    Returns:
        ``steps`` that were carried out now, ``already_done``, ``entries`` written, ``epoch``, ``run``; and
        ``was_applied``: all of it had been done before.

    Raises:
        InvalidError: The tier has moved on in a way that matters.
        FencedError: A writer is at work, and an epoch is needed.
    """
    ledger = Ledger(at, plan.what)
    begun(ledger.begin(plan))
    done = {"steps": 0, "already_done": 0, "entries": 0}

    def hold_all(some: Sequence[Step], state: TierState) -> None:
        for step in some:
            hold(state, step)

    def append(journal: JournalWriter[TierState]) -> None:
        require_same_tier(plan, journal.state)
        due = [step for step in plan.steps if not is_done(journal.state, step)]
        done["already_done"] = len(plan.steps) - len(due)
        for start in range(0, len(due), STEPS_MAX):
            some = due[start : start + STEPS_MAX]
            journal.append([*map(said, some)], check=partial(hold_all, some))
            reached("steps-appended")
            done["entries"] += 1
            done["steps"] += len(some)

    journal = in_new_epoch(at, append) if in_epoch else journal_writer(at)
    if not in_epoch:
        append(journal)
    journal.write_checkpoint()
    ledger.end(done)
    return {
        **done,
        "was_applied": was_applied(len(plan.steps), done["steps"], done["already_done"]),
        "epoch": journal.epoch,
        "run": ledger.run,
    }


def moved_on(why: str, where: str = "") -> MovedOnError:
    """The tier is not any more what the plan was made of."""
    what = f"the tier has moved on since this was planned: {why}"
    return MovedOnError(what, where=where, do="nothing more is changed; plan again")


def _checksum(plan: PlanDocument) -> int:
    return zlib_ng.crc32(_text(plan))


def _text(plan: PlanDocument) -> bytes:
    return json.dumps(plan, sort_keys=True, separators=(",", ":")).encode()


# --------------------------------------------------------------------------------------------------
# The ledger: what runs that delete were about to do, and what they did; and the store's own clock. A run writes a
# record before it changes anything and one when it has ended. The first one's time of writing, as the store tells it,
# is the time by which the run holds ages: our own clock may be wrong, and the store's is what dates its objects.
#
# A record's form is that of ``tiered.journal.entry.seal_text``. It says what a plan was by counts and a digest, not by
# a list, so it stays small however much is deleted; ``gc`` deletes old records
# (``tiered.log.history.LEDGER_KEPT_MS``).
# --------------------------------------------------------------------------------------------------


class Ledger:
    """The records of one run."""

    def __init__(self, at: Workplace, what: str) -> None:
        self._at = at
        self._begun_ms = at.clock.now_ms()
        self._steps = 0
        self.run = at.new_id()
        self.what = what

    def begin(self, plan: TierPlan[Any]) -> int:
        """Say what is about to be done; the time, UTC ms, by the store's clock.

        Raises:
            InvalidError: The store does not tell when an object was written, or does not write conditionally.
        """
        store = self._at.store
        read_lease(store, self._at.prefix + LEASE)
        try:
            key = self.note("begin", {"plan": digest(plan)})
        except UnsupportedError as error:
            raise InvalidError(
                "this store cannot create an object only if it is absent, so nothing is changed in it",
                where=store.url,
                do="use the store to which attach writes",
            ) from error
        reached("ledger-begun")
        now_ms = store.head(key).modified_ms
        if now_ms < 0:
            raise InvalidError(
                "this store does not tell when an object was written, so nothing can be called old",
                where=store.url,
            )
        return now_ms

    def end(self, fields: Mapping[str, Any]) -> None:
        """Say what was done."""
        self.note("end", fields)
        reached("ledger-ended")

    def note(self, step: str, fields: Mapping[str, Any]) -> str:
        """Write one record; its key."""
        key = ledger_key(self._at.prefix, self._begun_ms, self.run, self._steps)
        self._steps += 1
        known = {"format": 1, "run": self.run, "what": self.what, "step": step}
        text = seal_text({**known, "time_ms": self._at.clock.now_ms(), **fields})
        put_own(self._at.store, key, text)
        return key


# --------------------------------------------------------------------------------------------------
# A topic is paused, or goes on: what a person tells the writer of a tier by an entry of its journal.
#
# Beside a running writer: neither lease nor epoch is taken; the entry is a guest's. A writer that has nothing to write
# looks for it every few seconds, and one that begins later meets it in the journal. Nothing is lost by it: what comes
# meanwhile is taken from the broker's store when the topic goes on, and what the broker has expired by then becomes a
# gap.
# --------------------------------------------------------------------------------------------------


def set_paused(at: Workplace, topic: str, *, is_paused: bool) -> dict[str, Any]:
    """Have a topic paused, or go on; once, however often it is asked for.

    Returns:
        ``is_changed``, ``since_ms`` (null: it is not paused), ``is_known`` (the tier has the topic).
    """
    journal = journal_writer(at)
    is_changed = (topic in journal.state.paused_topics) is not is_paused
    if is_changed:
        journal.append([action_of(Pause(topic, is_paused))])
    return {
        "topic": topic,
        "is_paused": is_paused,
        "is_changed": is_changed,
        "since_ms": next((o.since_ms for o in journal.state.paused if o.topic == topic), None),
        "is_known": any(queue.topic == topic for queue in journal.state.queues),
    }
