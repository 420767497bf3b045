"""A writer that is stopped for longer than its lease, at a random moment, while a second one works; then it wakes up."""

from __future__ import annotations

import fcntl
import random
import signal
import threading
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support import captures, command_line, tier_checks
from support.command_line import here
from support.faultproxy import FaultProxy, Rule
from support.growing import Growing, first_ms
from support.live import Attach
from support.waiting import until

NAME = "s05-crash"
LEASE_S = 2
HASTE_S = 20
"""Seconds beside the lease within which one that was replaced has ended, also on a busy machine."""
HELD_S_MAX = 2.5 * LEASE_S
OPTIONS = (*("--freshness", "0.1", *command_line.SMALL), "--lease-seconds", str(LEASE_S))


@dataclass(frozen=True)
class Run:
    """One run, as data, so that a pool of processes may take it.

    Attributes:
        seed: Decides every moment.
        whole: The captured store.
        folder: An empty one.
        url: Of the tier, which is not there yet.
        endpoint: The S3 server behind it; empty: a folder.
    """

    seed: int
    whole: Path
    folder: Path
    url: str
    endpoint: str = ""


@dataclass(frozen=True)
class Seen:
    """What a run has met.

    Attributes:
        paused_s: How long the first writer rested.
        held: Uploads and entries of the first writer that were held back.
        fenced_after_s: From SIGCONT to its end.
    """

    paused_s: float
    held: int
    fenced_after_s: float


class Holding(FaultProxy):
    """Keeps some of one writer's uploads and entries back, so that they land while it rests, or after."""

    def __init__(self, upstream_url: str, rng: random.Random) -> None:
        super().__init__(upstream_url)
        self._rng = rng
        self._lock = threading.Lock()
        self.held = 0
        self.holds = False

    def take(self, method: str, path: str) -> Rule | None:
        with self._lock:
            wanted = method == "PUT" and any(
                root in path for root in ("/bundle/", "/topic/", "/queue/", "/journal/")
            )
            if not (self.holds and wanted and self._rng.random() < 0.3):
                return None
            self.held += 1
            return Rule("held", method, seconds=self._rng.uniform(0.0, HELD_S_MAX))


class Arriving:
    """Messages that arrive all the time, in steps of random size, the last perhaps not whole; at the end all of them."""

    def __init__(self, growing: Growing, rng: random.Random) -> None:
        self._growing, self._rng = growing, rng
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        while not self._ends.wait(self._rng.uniform(0.02, 0.3)):
            step = self._rng.randrange(1, 40_000)
            self._growing.grow(min(self._growing.whole_end, self._growing.end + step))

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """No more come."""
        self._ends.set()
        self._thread.join()

    def finish(self) -> None:
        """All that are missing come at once."""
        self.stop()
        self._growing.grow(self._growing.whole_end)


def run(made: Run) -> Seen:
    """One run; every check is an assertion that names the seed."""
    growing = Growing(made.whole, made.folder / NAME)
    growing.start(first_ms(NAME) - 1000)
    try:
        seen = _run(made, growing, random.Random(made.seed))
        growing.crash()
        tier_checks.check_equal(made.url, captures.captured(NAME))
        tier_checks.check_sound(made.url, growing.store)
    except BaseException as error:
        error.add_note(f"seed {made.seed}, {made.url}")
        raise
    finally:
        growing.crash()
    return seen


def _run(made: Run, growing: Growing, rng: random.Random) -> Seen:
    arriving, proxy = Arriving(growing, random.Random(rng.random())), None
    more: tuple[str, ...] = ()
    with ExitStack() as stack:
        if made.endpoint:
            proxy = stack.enter_context(Holding(made.endpoint, random.Random(rng.random())))
            more = ("--endpoint-url", proxy.url)
        log = made.folder / "second.log"
        first = Attach(growing.store, made.url, made.folder / "first.log", (*OPTIONS, *more))
        second = Attach(growing.store, made.url, log, OPTIONS)
        arriving.start()
        stack.callback(arriving.stop)
        stack.enter_context(first)
        until(lambda: _broker(made.url).get("epoch") == 1, "a first writer")
        stack.enter_context(second)
        until(lambda: "waiting for the lease" in log.read_text(), "a second writer")
        if proxy:
            proxy.holds = True
        time.sleep(rng.uniform(0.0, 1.5))
        paused_s = _pause_past_the_lease(first, made.url, rng)
        began_s = time.monotonic()
        assert first.ended(within_s=LEASE_S + HASTE_S) == 4, first.log.read_text()
        fenced_s = time.monotonic() - began_s
        assert first.log.read_text().count("tiered: error: ") == 1, first.log.read_text()
        arriving.finish()
        count = captures.captured(NAME).count
        until(lambda: _broker(made.url)["messages"] == count, "all messages")
        assert second.stop()["epoch"] == 2
    return Seen(paused_s, proxy.held if proxy else 0, fenced_s)


def _pause_past_the_lease(first: Attach, url: str, rng: random.Random) -> float:
    """Stop it until another has taken over, and its lease is over, and perhaps longer; the seconds that it rested."""
    began_s = time.monotonic()
    pause(first, url)
    until(lambda: _broker(url)["epoch"] == 2, "a second epoch")
    left_s = began_s + LEASE_S - time.monotonic()
    time.sleep(max(0.0, left_s) + rng.choice((0.0, rng.uniform(0.0, 2.0))))
    first.send(signal.SIGCONT)
    return time.monotonic() - began_s


def _broker(url: str) -> dict[str, Any]:
    """What the tier says of its broker; nothing while there is no tier yet."""
    ran = here("status", url, "--json")
    found: dict[str, Any] = {} if ran.code == 2 else ran.good().document["brokers"][0]
    return found


def pause(attach: Attach, url: str) -> None:
    """Stop a writer, but not while it holds the lock of a folder: that would stop the other as well."""
    lock = Path(url.removeprefix("file://")) / ".tiered-tmp" / "lock"
    attach.pause()
    while url.startswith("file:") and is_locked(lock):
        attach.send(signal.SIGCONT)
        attach.pause()


def is_locked(path: Path) -> bool:
    """Whether anybody holds the lock of a folder."""
    with path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False
