"""SIGINT, SIGTERM and SIGHUP: how a command is asked to end, at whatever moment.

Overview: nothing is ever raised from a handler. Python swallows such an exception where it ignores all of them (a lock of an
import, a finaliser, the callback of a weak reference), it comes late while the main thread is inside a library, and it may
cut a state in two that is saved cleanly afterwards. So the interpreter writes a signal's number into a pipe the moment that
it arrives, and a thread of our own, the *watch*, reads it there.

Ordering: the first signal asks a command that drains (``Stopper``), and ends any other at once: each may be killed at any
time, and what is durable stays. A second one, unless it comes with the first (``timeout`` and shells send it to a process
and to its group), ends the process, as does time: ``DRAIN_MORE_S`` beyond what draining may take, ``TIDY_S`` where nothing
drains. A process that is ended so still flushes stdout and runs what is registered with
``atexit`` (temporary folders, child processes, the cursor of a terminal), in a thread that nobody waits for any longer.

Where a command takes new settings while it runs (``SignalWatch.reload``), SIGHUP is that, however often, and no end.

A signal that was ignored when the program began stays so (``nohup``; SIGINT of a shell's background job), but for SIGTERM.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import select
import signal
import sys
import threading
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import TracebackType

DRAIN_MORE_S = 15.0
"""For what follows a drain: the index, a checkpoint, the lease, and requests that must meet their deadline."""
TIDY_S = 10.0
TOGETHER_S = 0.5
"""What comes so soon after the first signal is the same request."""
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Stopper:
    """Takes the first signal over while a ``with`` block runs."""

    def __init__(self, watch: SignalWatch, stop: Callable[[], None], *, seconds: float) -> None:
        """Have a first signal call ``stop``, in another thread, and leave the command ``seconds`` to drain."""
        self.received: signal.Signals | None = None  # the first signal that came; None so far
        self.seconds = seconds
        self._watch = watch
        self._stop = stop

    def __enter__(self) -> Self:
        self._watch.stopper = self
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._watch.stopper = None

    def ask(self, number: signal.Signals) -> None:
        """Ask the command to stop."""
        self.received = number
        self._stop()

    @property
    def exit_code(self) -> int:
        """Of a command that the signal cut short: 128 and its number."""
        return 0 if self.received is None else 128 + self.received


class SignalWatch:
    """Reads signals from a pipe; until ``begin`` is called, none come."""

    def __init__(
        self,
        end: Callable[[int], object] = os._exit,
        tidy: Callable[[], object] = atexit._run_exitfuncs,  # noqa: SLF001 (what temporary folders have registered)
    ) -> None:
        """Make a watch; ``end`` ends the process with an exit code, after ``tidy``."""
        # Answers SIGHUP, in place of ending; None: it ends as the others do.
        self.reload: Callable[[], object] | None = None
        # Of the command that drains; None while nothing is in hand.
        self.stopper: Stopper | None = None
        self._end = end
        self._tidy = tidy

    def begin(self) -> None:
        """Take the signals over, for as long as the process lives. In the main thread."""
        arrived, noted = os.pipe()
        os.set_blocking(noted, False)
        # Never blocks: a full pipe has signals enough in it.
        signal.set_wakeup_fd(noted, warn_on_full_buffer=False)
        for number in _SIGNALS:
            if number == signal.SIGTERM or signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, _note)
        threading.Thread(
            target=self.run, args=(arrived,), name="tiered-signals", daemon=True
        ).start()

    def run(self, arrived: int) -> None:
        """Wait for a first signal, answer it in another thread, and wait for a second one or until it is time."""
        first = _next_signal(arrived, None)
        while first == signal.SIGHUP and (reload := self.reload) is not None:
            # In a thread: this one must be free to see the signal that ends.
            threading.Thread(target=reload, name="tiered-reload", daemon=True).start()
            first = _next_signal(arrived, None)
        assert first is not None
        stopper, code = self.stopper, 128 + first
        answer = (lambda: stopper.ask(first)) if stopper else (lambda: self._tidy_and_end(code))
        # In a thread: this one must be free to see the second signal, and the time.
        threading.Thread(target=answer, name="tiered-ending", daemon=True).start()
        # What a shell and ``timeout`` send twice is one request.
        select.select([], [], [], TOGETHER_S)
        while _next_signal(arrived, 0.0):
            pass
        _next_signal(arrived, stopper.seconds + DRAIN_MORE_S if stopper else TIDY_S)
        # Reached only when the command did not end by itself in time.
        self._end(code)

    def _tidy_and_end(self, code: int) -> None:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
        with contextlib.suppress(Exception):
            self._tidy()
        self._end(code)


@contextlib.contextmanager
def at_end(tidy: Callable[[], object]) -> Iterator[None]:
    """Have ``tidy`` called should the process be ended within the block, in another thread than the one that works."""
    atexit.register(tidy)
    try:
        yield
    finally:
        atexit.unregister(tidy)


def _note(_number: int, _frame: object) -> None:
    """A handler must be there for the interpreter to write to the pipe."""


def _next_signal(arrived: int, seconds: float | None) -> signal.Signals | None:
    """The next of our signals; None once so many seconds have passed without one."""
    poll = select.poll()  # select() knows no descriptor above 1023, and a process may have more
    poll.register(arrived, select.POLLIN)
    while poll.poll(None if seconds is None else seconds * 1000):
        for number in os.read(arrived, 1):
            if number in _SIGNALS:
                return signal.Signals(number)
    return None
