"""Signals end a command at whatever moment they come, and none is lost."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tiered.cli import signals
from tiered.cli.signals import SignalWatch, Stopper
from tiered.clock import SystemClock
from tiered.store.embedded import MessageStore
from tiered.store.new_message import NewMessage
from tiered.store.store_options import StoreOptions

if TYPE_CHECKING:
    from collections.abc import Iterator

    from support.command_line import CommandLine, Start

ALL = [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
IMPORTS = """
import os, sys
number, moment = int(sys.argv[1]), int(sys.argv[2])
sys.argv = ["tiered", *sys.argv[3:]]
class Moments:
    count = 0
    def find_spec(self, *_):
        Moments.count += 1
        if Moments.count == moment:
            os.kill(os.getpid(), number)
sys.meta_path.insert(0, Moments())
from tiered.__main__ import main
try:
    main()
finally:
    if not moment:
        print(Moments.count)
"""
"""Sends the program a signal while its n-th module is being looked for; 0: never, and says how many there are."""
IGNORING = """
import ctypes, os, signal, sys, time, weakref
import tiered.__main__ as program
def hit():
    os.kill(os.getpid(), int(sys.argv[1]))
    time.sleep(0.2)  # a handler's turn
class Finalised:
    def __del__(self):
        hit()
def finaliser():
    Finalised()
def weak_reference():
    one = Finalised
    class Plain: pass
    plain = Plain()
    reference = weakref.ref(plain, lambda _: hit())
    del plain
def foreign_callback():
    ctypes.CFUNCTYPE(None)(hit)()
def catching_all():
    try:
        hit()
    except BaseException:
        pass
def run(*_):
    globals()[sys.argv[2]]()
    while True:
        time.sleep(0.01)
program.run = run
program.main()
"""
"""A program that meets a signal where Python, or a library, ignores exceptions."""


def ended(script: str, *arguments: object) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [sys.executable, "-c", script, *map(str, arguments)],
        capture_output=True,
        timeout=120,
        check=False,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )


@pytest.mark.parametrize(("number", "code"), ALL)
@pytest.mark.parametrize(
    "where", ["finaliser", "weak_reference", "foreign_callback", "catching_all"]
)
def test_a_signal_where_exceptions_are_ignored_still_ends_the_program(
    where: str, number: signal.Signals, code: int
):
    assert ended(IGNORING, int(number), where).returncode == code


@pytest.mark.parametrize("share", [0.02, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0])
def test_a_signal_while_a_module_is_imported_ends_cat(
    share: float, basic_tier: str, imports_of_cat: int
):
    moment = max(1, int(imports_of_cat * share))
    ran = ended(IMPORTS, int(signal.SIGTERM), moment, "cat", basic_tier, "unicode", "--follow")
    assert ran.returncode in {143, -signal.SIGTERM}, ran.stderr  # the latter before it has begun
    assert b"Traceback" not in ran.stderr


@pytest.mark.slow
def test_a_signal_while_any_module_is_imported_ends_cat(basic_tier: str, imports_of_cat: int):
    for moment in range(1, imports_of_cat + 1, 7):
        ran = ended(IMPORTS, int(signal.SIGHUP), moment, "cat", basic_tier, "unicode", "--follow")
        assert ran.returncode in {129, -signal.SIGHUP}, (moment, ran.stderr)


@pytest.fixture(scope="module")
def imports_of_cat(basic_tier: str) -> int:
    """How many modules are looked for until the messages are printed."""
    ran = ended(IMPORTS, 0, 0, "cat", basic_tier, "unicode", "--count", "60")
    assert ran.returncode == 0
    return int(ran.stdout.split()[-1])


@pytest.mark.parametrize(("number", "code"), ALL)
def test_a_signal_ends_cat_while_it_follows(
    number: signal.Signals, code: int, start: Start, basic_tier: str
):
    process = start("cat", basic_tier, "unicode", "--follow")
    lines = [process.stdout.readline() for _ in range(60)]
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (code, b"", b"")
    assert all(lines)


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGINT])
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="LEFT OUT: no /proc here")
def test_what_was_ignored_at_the_start_stays_ignored(
    number: signal.Signals, start: Start, basic_tier: str
):
    """As with ``nohup``, and with the background jobs of a shell without job control."""
    process = start(
        *("cat", basic_tier, "unicode", "--follow"),
        preexec_fn=lambda: signal.signal(number, signal.SIG_IGN),
    )
    try:
        assert process.stdout.readline()
        status = Path(f"/proc/{process.pid}/status").read_text("ascii")
    finally:
        process.terminate()
        process.communicate(timeout=60)
    assert process.returncode == 143
    ignored = next(line.split()[1] for line in status.splitlines() if line.startswith("SigIgn"))
    assert int(ignored, 16) >> (number - 1) & 1


def test_messages_are_put_whole_and_the_store_is_closed_when_put_is_cut_short(
    start: Start, tiered: CommandLine, tmp_path: Path
):
    store = tmp_path / "store"
    tiered.good("store", "create", store, "--log-file-size", "1MiB")
    line = b'{"topic": "t", "queue_id": 0, "properties": {}, "body_base64": "c3RvcmVkIQ=="}\n'
    process = start("store", "put", store, stdin=subprocess.PIPE)
    process.stdin.write(line * 64)
    process.stdin.flush()
    log = store / "commitlog" / f"{0:020d}"
    for _ in range(6000):
        if log.exists() and log.read_bytes().count(b"stored!") == 64:
            break
        threading.Event().wait(0.01)
    process.terminate()
    assert process.wait(60) == 143, "and not 0: its input has not ended"
    process.communicate()
    assert tiered.good("store", "recover", store, "--json").document["was_clean"]
    assert tiered.good("store", "info", store, "--json").document["messages"] == 64


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signals, "TOGETHER_S", 0.0)


class World:
    """A watch over a pipe of the test's own."""

    def __init__(self) -> None:
        self.codes: queue.Queue[int] = queue.Queue()
        self.tidied = threading.Event()
        self.watch = SignalWatch(self.codes.put, self.tidied.set)
        self._arrived, self._noted = os.pipe()
        self._thread = threading.Thread(target=self.watch.run, args=(self._arrived,), daemon=True)
        self._thread.start()

    def send(self, *numbers: int) -> None:
        os.write(self._noted, bytes(numbers))

    def end(self) -> None:
        self.send(signal.SIGINT, signal.SIGINT)
        self._thread.join(60)
        os.close(self._noted)
        os.close(self._arrived)


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    yield made
    made.end()


@pytest.mark.usefixtures("fast")
@pytest.mark.parametrize(("number", "code"), ALL)
def test_the_first_signal_asks_and_the_second_cuts_short(
    number: signal.Signals, code: int, world: World
):
    asked = threading.Event()
    with Stopper(world.watch, asked.set, seconds=600) as stopper:
        world.send(signal.SIGCHLD)  # somebody else's
        world.send(number)
        assert asked.wait(60)
        assert (stopper.received, stopper.exit_code) == (number, code)
        assert world.codes.empty()
        for _ in range(600):  # the first moments count as one signal
            world.send(signal.SIGINT)
            with contextlib.suppress(queue.Empty):
                assert world.codes.get(timeout=0.1) == code
                break
        else:
            pytest.fail("the second signal did not end the process")


@pytest.mark.usefixtures("fast")
def test_what_does_not_end_in_time_is_ended(world: World, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(signals, "DRAIN_MORE_S", 0.1)
    with Stopper(world.watch, threading.Event().wait, seconds=0.1):  # stopping itself hangs
        world.send(signal.SIGTERM)
        assert world.codes.get(timeout=60) == 143


def test_a_signal_that_comes_twice_at_once_is_one(world: World):
    """``timeout`` sends it to the process and to its group; a shell that ends, too."""
    asked = threading.Event()
    with Stopper(world.watch, asked.set, seconds=600):
        world.send(signal.SIGTERM, signal.SIGTERM)
        assert asked.wait(60)
        with pytest.raises(queue.Empty):
            world.codes.get(timeout=2 * signals.TOGETHER_S)


def test_without_a_stopper_a_signal_ends_at_once_and_tidies_up(world: World):
    world.send(signal.SIGTERM)
    assert world.codes.get(timeout=60) == 143
    assert world.tidied.is_set()


HUGE = 1 << 30
"""Bytes that are read before the signal."""


def read_so_far(process: subprocess.Popen[bytes]) -> int:
    lines = Path(f"/proc/{process.pid}/io").read_text("ascii").splitlines()
    return int(dict(line.split(": ") for line in lines)["rchar"])


@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="nobody tells what a process reads")
def test_a_signal_ends_attach_while_it_looks_a_large_store_over(start: Start, tmp_path: Path):
    """Behind the end of a stopped broker's log there are files made beforehand, of zeros: 400 GiB to be looked over.

    They are written, not holes, which nobody reads; and one file under many names, which costs the disk 64 MiB.
    """
    store, log = tmp_path / "store", tmp_path / "store" / "commitlog"
    with MessageStore.create(
        store,
        cluster="c",
        broker="b",
        clock=SystemClock(),
        options=StoreOptions(commitlog_file_bytes=64 << 20),
    ) as made:
        made.append(NewMessage("t", 0, b"x"))
    zeros = tmp_path / "zeros"
    zeros.write_bytes(bytes(64 << 20))
    for number in range(1, 6_400):
        (log / f"{number * (64 << 20):020d}").hardlink_to(zeros)
    process = start("attach", store, "--to", f"file://{tmp_path}/tier")
    try:
        while process.poll() is None and read_so_far(process) < HUGE:
            threading.Event().wait(0.05)
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=30)  # all of it takes more than a minute
    finally:
        process.kill()
    assert process.returncode == 0, err
