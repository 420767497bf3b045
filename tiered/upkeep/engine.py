"""Who does the work: the caller itself, threads of this process, or Spark's tasks (``tiered.spark.driver``).

Overview: what reads or makes objects (an archive's files made, merged, verified, repaired, indexed and published; a tier's
keys read and bundles made by compaction) is a function of a ``WorkContext`` and of one thing to be done. An engine has it
done for many, in any order, and takes these as it comes to them. The caller plans before, and commits what came of it
behind: neither is an engine's.

Ordering: whatever a function writes is named by nothing until its caller has heard of it.

Threads: what an engine gives is a context, and within it an iterator. However the caller leaves the context, by an error of
its own too, what is under way is given up at once, by the caller, and behind it no thread is left. A mere iterator that an
error leaves behind would be closed by whichever thread collects it: one that works for it would wait for itself.

Retries: a function may be done twice, one after another or at once, by whom the caller has heard nothing of. So it makes the
same objects, adopts what lies there, and deletes nothing.
"""

from __future__ import annotations

import contextlib
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from itertools import islice, takewhile
from typing import TYPE_CHECKING, Protocol, TypeVar

from backends.errors import StoreFullError
from backends.lazy_dataclass import dataclass
from tiered.errors import TieredStoreError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from backends.base import ObjectStore

T = TypeVar("T")
V = TypeVar("V")
Outcomes = contextlib.AbstractContextManager["Iterator[tuple[T, V | Exception]]"]
"""What work came to, as an engine gives it: an iterator, within the context only."""


@dataclass(frozen=True, slots=True)
class WorkContext:
    """What one piece of work is done with."""

    tier: ObjectStore  # the tier's store, with retries
    prefix: str  # of the broker
    archive: ObjectStore  # the archive's store, with retries; the tier's where there is none


class Engine(Protocol):
    """Does work in any order, and takes it as it comes to it."""

    def __call__(self, do: Callable[[WorkContext, T], V], works: Iterable[T]) -> Outcomes[T, V]:
        """Have all of it done.

        Args:
            do: A function of a module, which workers elsewhere have too.
            works: What is to be done, each a thing that can be pickled.

        Returns:
            The context in which it is done: what each came to. That it failed is an outcome, not an exception. What is not
            done when the context is left is given up.
        """
        ...


@contextlib.contextmanager
def all_done(outcomes: Outcomes[T, V]) -> Iterator[Iterator[tuple[T, V]]]:
    """What an engine gives, for who wants all of it or nothing: the first failure is raised."""
    with outcomes as each:
        yield map(_succeeded, each)


def _succeeded(outcome: tuple[T, V | Exception]) -> tuple[T, V]:
    work, made = outcome
    if isinstance(made, Exception):
        raise made
    return work, made


Failed = list[tuple[T, Exception]]
"""Work that failed, and why, of who does the rest all the same."""


def while_room(works: Iterable[T], failed: Failed[V]) -> Iterator[T]:
    """Work, until some has failed for want of room: all of it would wait and fail, one after another."""
    return takewhile(lambda _: not any(isinstance(one[1], StoreFullError) for one in failed), works)


def first_failure(failed: Failed[T]) -> Exception | None:
    """The failure to end with: damage before what may pass."""
    errors = [error for _, error in failed]
    mine = [error for error in errors if isinstance(error, TieredStoreError)]
    return next(iter([*mine, *errors]), None)


@contextlib.contextmanager
def rolling(
    works: Iterable[T],
    do: Callable[[Sequence[T]], Sequence[V]],
    *,
    count: int,
    window: int,
    give_up: Callable[[], object] = lambda: None,
) -> Iterator[Iterator[tuple[T, V]]]:
    """Work done in threads, in a window that rolls on: the one scheduler of all engines.

    Args:
        works: Taken when there is a place for them.
        do: Does some work; what each came to. What it raises itself ends all.
        count: So much is given to it at once (> 0).
        window: So many calls of it are under way (> 0); each has another one waiting.
        give_up: Called at once when what is under way is in vain: an error ends all, or the caller wants no more.
    """
    running: dict[Future[Sequence[V]], list[T]] = {}
    with ThreadPoolExecutor(window, "tiered-archive") as pool:
        is_in_vain = True
        try:
            yield _rolled(pool, running, works, do, count=count, window=window)
            is_in_vain = bool(running)
        finally:
            for future in running:
                future.cancel()
            if is_in_vain:
                give_up()


def _rolled(
    pool: ThreadPoolExecutor,
    running: dict[Future[Sequence[V]], list[T]],
    works: Iterable[T],
    do: Callable[[Sequence[T]], Sequence[V]],
    *,
    count: int,
    window: int,
) -> Iterator[tuple[T, V]]:
    """What ``rolling`` gives. It holds nothing that it would have to end: wherever it is left, nothing is lost."""
    ahead = iter(works)
    while True:
        while len(running) < 2 * window and (some := list(islice(ahead, count))):
            running[pool.submit(do, some)] = some
        if not running:
            return
        done, _ = wait(running, return_when=FIRST_COMPLETED)
        for one in done:
            yield from zip(running.pop(one), one.result(), strict=True)


def local_engine(context: WorkContext, jobs: int) -> Engine:
    """Work in threads of this process."""

    def run(do: Callable[[WorkContext, T], V], works: Iterable[T]) -> Outcomes[T, V]:
        def some(those: Sequence[T]) -> list[V | Exception]:
            return [_outcome(do, context, work) for work in those]

        return rolling(works, some, count=1, window=jobs)

    return run


def own_engine(context: WorkContext) -> Engine:
    """Work in the caller's own thread, one thing after another, each when it is asked for."""

    def run(do: Callable[[WorkContext, T], V], works: Iterable[T]) -> Outcomes[T, V]:
        return contextlib.nullcontext((work, _outcome(do, context, work)) for work in works)

    return run


def _outcome(do: Callable[[WorkContext, T], V], context: WorkContext, work: T) -> V | Exception:
    try:
        return do(context, work)
    except Exception as error:  # noqa: BLE001 (of any kind it is an outcome)
        return error
