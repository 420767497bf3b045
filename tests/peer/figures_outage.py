#!/usr/bin/env python3
"""An outage of the store under a steady input: what ``attach`` holds in memory meanwhile, what it tries, how it catches up.

    .venv/bin/python tests/peer/figures_outage.py [--seconds 600] [--rate 20] [--normal 2048] [--work DIR]

A store is written at ``--rate`` MiB/s while the S3 server refuses everything (503) for ``--seconds``. Before it, ``attach``
has caught up with ``--normal`` MiB: its normal speed. Behind it, input stops and the backlog drains. The server drops
data objects and keeps the journal (``localstack/nulls3.py``), so that the client is what is measured.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "localstack"))

import nulls3  # noqa: E402 (it is a program, no package)

from tiered.clock import SystemClock  # noqa: E402 (only with the project's root)
from tiered.store.embedded import MessageStore  # noqa: E402
from tiered.store.new_message import NewMessage  # noqa: E402
from tiered.store.store_options import StoreOptions  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

MIB = 1 << 20
KEPT_BYTES = 256 * 1024
QUEUES = 8
BODY_BYTES = 16 * 1024
STATED_MIB = 128 + 2 * 16 + 8 * 8 + 2 * 32 + 4
"""tiered/dispatch/settings.py with attach's defaults: buffers, windows, parts in one piece, and one merge."""
_FORK = multiprocessing.get_context("fork")


class Shared:
    """What the processes tell each other."""

    def __init__(self) -> None:
        self.refuses = _FORK.Value("b", 0)
        self.objects = _FORK.Value("q", 0)
        self.bytes = _FORK.Value("q", 0)
        self.refused = _FORK.Value("q", 0)
        self.tries = _FORK.Value("q", 0)
        self.wanted = _FORK.Value("q", 0)
        self.written = _FORK.Value("q", 0)
        self.messages = _FORK.Value("q", 0)


# -- the server -----------------------------------------------------------------------------------


class Counting(nulls3.Connection):
    """Counts data objects, and refuses everything while it is told to."""

    shared: Shared

    def head(self) -> bytes | None:
        while (head := super().head()) is not None:
            size = next(
                (int(line[15:]) for line in head.split(b"\r\n") if line.lower()[:15] == b"content-length:"),
                0,
            )  # fmt: skip
            is_data = head.startswith(b"PUT") and b"/commitlog/" in head.partition(b"\r\n")[0]
            if not self.shared.refuses.value:
                if is_data:
                    _add(self.shared.objects, 1)
                    _add(self.shared.bytes, size)
                return head
            _add(self.shared.refused, 1)
            _add(self.shared.tries, is_data)
            self.drop(size)
            nulls3.refuse(self, "503 Slow Down", "SlowDown")
        return None


def _add(value: Any, more: int) -> None:
    with value.get_lock():
        value.value += more


def serve(listener: socket.socket, shared: Shared) -> None:
    """Body of the server's process."""
    Counting.shared = shared
    nulls3.Connection = Counting
    small = nulls3.Small(KEPT_BYTES)
    while True:
        peer, _ = listener.accept()
        threading.Thread(target=nulls3.serve_until_gone, args=(peer, small), daemon=True).start()


# -- the broker -----------------------------------------------------------------------------------


def write(directory: Path, shared: Shared) -> None:
    """Body of the writer's process: appends as far as it is wanted to."""
    options = StoreOptions(256 * MIB)
    rng, ends = random.Random(1), threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ends.set())
    bodies = [rng.randbytes(BODY_BYTES) for _ in range(64)]
    with MessageStore.create(
        directory, cluster="c", broker="b", clock=SystemClock(), options=options
    ) as store:
        store.create_topic("t", queues=QUEUES)
        while not ends.is_set():
            if store.log_end >= shared.wanted.value:
                time.sleep(0.02)
                continue
            store.append_batch([NewMessage("t", n % QUEUES, body) for n, body in enumerate(bodies)])
            shared.written.value = store.log_end
            _add(shared.messages, len(bodies))


# -- measuring ------------------------------------------------------------------------------------


@dataclass
class Phase:
    """What was seen, sample by sample: time, bytes of data objects, resident memory in MiB."""

    samples: list[tuple[float, int, float]] = field(default_factory=list)

    @property
    def peak_mib(self) -> float:
        return max(mib for _, _, mib in self.samples)

    def speed_mib_s(self, low: int, high: int) -> float:
        """Between two counts of bytes."""
        begin = max(s for s in self.samples if s[1] <= low)
        end = min(s for s in self.samples if s[1] >= high)
        return (end[1] - begin[1]) / MIB / (end[0] - begin[0])


def sample(pid: int, shared: Shared, until: Callable[[], bool], seconds_max: float) -> Phase:
    """Look four times a second until something holds."""
    phase, deadline_s = Phase(), time.monotonic() + seconds_max
    while True:
        pages = int(Path(f"/proc/{pid}/statm").read_text("ascii").split()[1])
        if not pages:
            raise SystemExit("attach has ended: see attach.log")
        now_s = time.monotonic()
        phase.samples.append((now_s, shared.bytes.value, pages * os.sysconf("SC_PAGE_SIZE") / MIB))
        if until():
            return phase
        if now_s > deadline_s:
            raise SystemExit(f"not after {seconds_max:.0f} s: {phase.samples[-1]}")
        time.sleep(0.25)


def rows(work: Path, *, seconds: float, rate_mib_s: float, normal_mib: int) -> Iterator[str]:
    """The lines of the figure."""
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    shared = Shared()
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, work / "store", ignore_errors=True)
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=256))
        for body, arguments in ((serve, (listener, shared)), (write, (work / "store", shared))):
            process = _FORK.Process(target=body, args=arguments)
            process.start()
            stack.callback(process.join)
            stack.callback(process.terminate)
        shared.wanted.value = normal_mib * MIB
        while shared.written.value < shared.wanted.value:
            time.sleep(0.05)
        attach = _attach(work, f"http://127.0.0.1:{listener.getsockname()[1]}")
        stack.callback(attach.kill)
        yield from _measure(attach, shared, seconds, rate_mib_s)


def _attach(work: Path, endpoint: str) -> subprocess.Popen[bytes]:
    words = [
        "attach",
        str(work / "store"),
        "--to",
        "s3://outage/tier",
        "--freshness",
        "2",
        "--json",
    ]
    keys = {"AWS_ACCESS_KEY_ID": "k", "AWS_SECRET_ACCESS_KEY": "s", "AWS_REGION": "us-east-1"}
    with (work / "attach.log").open("wb") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "tiered", *words, "--endpoint-url", endpoint],
            stdout=subprocess.PIPE,
            stderr=log,
            env={**os.environ, **keys},
            cwd=ROOT,
        )


def _measure(
    attach: subprocess.Popen[bytes], shared: Shared, seconds: float, rate_mib_s: float
) -> Iterator[str]:
    def level() -> bool:
        return shared.bytes.value >= shared.written.value * 0.999

    begun = shared.written.value
    normal = sample(attach.pid, shared, level, 300)
    speed = normal.speed_mib_s(begun // 10, begun * 9 // 10)
    yield f"normal: {begun / MIB:.0f} MiB at {speed:.0f} MiB/s, at most {normal.peak_mib:.0f} MiB of memory"

    shared.refuses.value, objects, begin_s = 1, shared.objects.value, time.monotonic()

    def is_over() -> bool:
        gone_s = time.monotonic() - begin_s
        shared.wanted.value = begun + int(min(gone_s, seconds) * rate_mib_s * MIB)
        return gone_s >= seconds

    outage = sample(attach.pid, shared, is_over, seconds + 60)
    made = shared.objects.value - objects
    yield (
        f"outage: {seconds:.0f} s, {(shared.written.value - begun) / MIB:.0f} MiB came; {shared.tries.value} uploads"
        f" tried ({shared.refused.value} requests), {made} objects made, at most {outage.peak_mib:.0f} MiB of memory"
        f" (stated: {STATED_MIB} MiB and the program)"
    )
    stored = shared.bytes.value
    shared.refuses.value, begin_s = 0, time.monotonic()
    drain = sample(attach.pid, shared, level, 600)
    backlog = shared.bytes.value - stored
    first_s = next(at for at, size, _ in drain.samples if size > stored) - begin_s
    low, high = stored + backlog // 10, stored + backlog * 9 // 10
    drained, whole = drain.speed_mib_s(low, high), drain.speed_mib_s(stored, stored + backlog)
    yield (
        f"drain: first object after {first_s:.1f} s; {backlog / MIB:.0f} MiB at {drained:.0f} MiB/s"
        f" ({drained / speed:.0%} of normal; from the first object to the last {whole:.0f} MiB/s, {whole / speed:.0%}),"
        f" at most {drain.peak_mib:.0f} MiB of memory"
    )
    attach.send_signal(signal.SIGTERM)
    out, _ = attach.communicate(timeout=60)
    taken = json.loads(out)["messages"]
    yield f"messages: {shared.messages.value} written, {taken} tiered"


def main() -> None:
    """Print the figure."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "tiered-outage")
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--rate", type=float, default=20.0, help="MiB/s")
    parser.add_argument("--normal", type=int, default=2048, help="MiB")
    options = parser.parse_args()
    for line in rows(
        options.work, seconds=options.seconds, rate_mib_s=options.rate, normal_mib=options.normal
    ):
        print(line, flush=True)


if __name__ == "__main__":
    main()
