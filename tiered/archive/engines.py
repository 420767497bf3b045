"""What does the work of an archive job. This one: threads of this process."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from itertools import islice
from typing import TYPE_CHECKING

from tiered.archive.model import Archived
from tiered.archive.packing import Work, do_work

if TYPE_CHECKING:
    from tiered.archive.workshop import Workshop

Outcome = tuple[Work, Archived | list[Archived] | Exception]
Engine = Callable[[Iterable[Work]], Iterator[Outcome]]
"""Does work in any order, and takes it as it comes to it; gives what each came to: what was archived (of a pack: for each of
its tasks, in order), or why not. Failure of work is an outcome, not an exception."""


def archived_of(outcome: Archived | list[Archived]) -> tuple[Archived, ...]:
    """What was archived, for each task."""
    return (outcome,) if isinstance(outcome, Archived) else tuple(outcome)


def local_engine(at: Workshop, jobs: int) -> Engine:
    """Work in threads of this process.

    Args:
        at: Tier and archive.
        jobs: How many at once (> 0).
    """

    def run(works: Iterable[Work]) -> Iterator[Outcome]:
        with ThreadPoolExecutor(jobs, "tiered-archive") as pool:
            places = (at.tier, at.place.prefix, at.archive)
            ahead = iter(works)
            running = {
                pool.submit(do_work, *places, work): work for work in islice(ahead, 2 * jobs)
            }
            try:
                while running:
                    done = next(as_completed(running))
                    work = running.pop(done)
                    for more in islice(ahead, 1):
                        running[pool.submit(do_work, *places, more)] = more
                    error = done.exception()
                    if error is not None and not isinstance(error, Exception):
                        raise error
                    yield work, error or done.result()
            finally:
                for future in running:
                    future.cancel()

    return run
