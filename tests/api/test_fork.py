"""A process that is forked after a read: what it inherits is refused at once, and what it opens itself works."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import warnings
from concurrent.futures import ProcessPoolExecutor
from typing import TYPE_CHECKING

import pytest
from support import captures
from support.command_line import here
from support.servers import use_server

import tiered
from tiered.api.local_and_tier import open_message_store
from tiered.errors import InvalidError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from support.servers import S3Server

    from tiered.api.aio import AsyncTier

FORK = multiprocessing.get_context("fork")
HANGS_AFTER_S = 100
"""A child that is not done by then is ended, so that its parent sees it."""


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return captures.unpack("s01-basic", tmp_path_factory.mktemp("captured"))


@pytest.fixture(params=["file", "s3"])
def url(
    request: pytest.FixtureRequest,
    store: Path,
    tmp_path: Path,
    ministack: S3Server,
    monkeypatch: pytest.MonkeyPatch,
) -> str:
    use_server(ministack, monkeypatch)
    url = f"file://{tmp_path}/tier" if request.param == "file" else f"s3://{ministack.bucket()}/t"
    here("attach", store, "--to", url, "--once").good()
    anew(url)  # what it loads is loaded once, and not by each child
    return url


@pytest.fixture(autouse=True)
def _no_advice() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", DeprecationWarning
        )  # of Python 3.12: this process has threads
        yield


def end_later() -> None:
    """End this child if it hangs (`faulthandler` of a forked process waits for a thread that is not there)."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(HANGS_AFTER_S)


def in_child(work: Callable[[], str]) -> str:
    """What ``work`` gives in a forked process."""
    ours, theirs = FORK.Pipe(duplex=False)

    def run() -> None:
        end_later()
        theirs.send(work())

    process = FORK.Process(target=run)
    process.start()
    theirs.close()
    try:
        return str(ours.recv())
    finally:
        process.join()
        ours.close()


def count(tier: tiered.Tier) -> int:
    return sum(1 for _ in tier.read("orders", 0))


def refusal(work: Callable[[], object]) -> str:
    """The message of the error by which an inherited thing is refused."""
    try:
        work()
    except InvalidError as error:
        return str(error)
    return "not refused"


def anew(url: str) -> str:
    with tiered.open(url) as tier:
        rows = sum(batch.num_rows for batch in tier.read_arrow("orders", 0))
        assert rows == count(tier)
        assert len(tier.query("orders", "nothing has this key").messages) == 0
        return str(rows)


def test_what_was_opened_before_is_refused_and_what_is_opened_anew_works(url: str):
    with tiered.open(url) as tier:
        whole = count(tier)
        reads = (
            lambda: count(tier),
            lambda: next(tier.read_topic("orders")),
            lambda: next(tier.follow("orders", 0, 0)),
            lambda: tier.query("orders", "k"),
            lambda: tier.offset_for_time("orders", 0, 1),
            tier.refresh,
        )
        for read in reads:
            said = in_child(lambda read=read: refusal(read))
            assert "forked" in said
            assert "spawn" in said
        assert in_child(lambda: str(tier.close())) == "None"
        assert in_child(lambda: anew(url)) == str(whole)
        assert in_child(lambda: in_child(lambda: anew(url))) == str(whole)
        assert count(tier) == whole  # nothing in a child has harmed it


def test_pools_that_fork(url: str):
    with tiered.open(url) as tier:
        whole = str(count(tier))
        with FORK.Pool(2) as pool:
            assert pool.map_async(anew, [url] * 3).get(HANGS_AFTER_S) == [whole] * 3
        with ProcessPoolExecutor(2, mp_context=FORK) as executor:
            futures = [executor.submit(anew, url) for _ in range(3)]
            assert [future.result(HANGS_AFTER_S) for future in futures] == [whole] * 3


def test_a_fork_while_other_threads_read(url: str):
    stop = threading.Event()
    with tiered.open(url, memory_bytes=2 << 20) as tier:
        whole = str(count(tier))

        def read() -> None:
            while not stop.is_set():
                count(tier)

        threads = [threading.Thread(target=read) for _ in range(3)]
        for thread in threads:
            thread.start()
        try:
            for _ in range(3):
                assert "forked" in in_child(lambda: refusal(lambda: count(tier)))
                assert in_child(lambda: anew(url)) == whole
        finally:
            stop.set()
            for thread in threads:
                thread.join()


def test_a_fork_without_multiprocessing_ends_as_any_process_does(url: str):
    with tiered.open(url) as tier:
        count(tier)
        child = os.fork()
        if not child:
            code = 1
            try:
                end_later()
                with tier:
                    code = 0 if "forked" in refusal(lambda: count(tier)) else 2
            finally:
                os._exit(code)
        assert os.waitpid(child, 0)[1] == 0


def test_what_needs_no_store_works_in_a_child_amid_reads(url: str):
    """No lock of ours is held when a process is forked: names, bounds and what a notebook shows come at once."""
    stop = threading.Event()
    with tiered.open(url, memory_bytes=2 << 20) as tier:
        expected = (repr(tier), tier.topics(), tier.bounds("orders", 0))

        def look() -> None:
            while not stop.is_set():
                tier.refresh()
                next(tier.read("orders", 0))

        thread = threading.Thread(target=look)
        thread.start()
        try:
            for _ in range(3):
                seen = in_child(lambda: str((repr(tier), tier.topics(), tier.bounds("orders", 0))))
                assert seen == str(expected)
        finally:
            stop.set()
            thread.join()


def test_an_iterator_that_was_begun_before_is_refused(url: str):
    with tiered.open(url) as tier:
        batches = tier.read_arrow("orders", 0, batch_bytes=4096)
        first = next(batches)
        assert "forked" in in_child(lambda: refusal(lambda: list(batches)))
        assert first.num_rows + sum(batch.num_rows for batch in batches) == count(tier)


def test_a_child_that_ends_as_programs_do_ends(url: str):
    """With all that an interpreter does at its end: threads of pools are waited for, which are not in the child."""
    code = f"""
import os, sys, tiered
tier = tiered.open({url!r})
print(sum(1 for _ in tier.read("orders", 0)))
sys.stdout.flush()
child = os.fork()
if child:
    raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
with tiered.open({url!r}) as anew:
    print(sum(1 for _ in anew.read("orders", 0)))
tier.close()
raise SystemExit(7)
"""
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", code]
    ran = subprocess.run(
        command, capture_output=True, text=True, timeout=HANGS_AFTER_S, check=False
    )
    assert ran.returncode == 7, ran.stderr
    first, second = ran.stdout.split()
    assert first == second


def test_processes_that_are_spawned_read(url: str, tmp_path: Path):
    with tiered.open(url) as tier:
        whole = str(count(tier))
        code = f"""
import multiprocessing
import tiered

def read(url):
    with tiered.open(url) as tier:
        return sum(1 for _ in tier.read("orders", 0))

if __name__ == "__main__":
    with tiered.open({url!r}) as tier:
        next(tier.read("orders", 0))
        with multiprocessing.get_context("spawn").Pool(2) as pool:
            print(*pool.map(read, [{url!r}] * 2))
"""
        program = tmp_path / "spawning.py"
        program.write_text(code)
        command = [sys.executable, str(program)]
        ran = subprocess.run(
            command, capture_output=True, text=True, timeout=HANGS_AFTER_S, check=False
        )
        assert ran.stdout.split() == [whole] * 2, ran.stderr


def test_asyncio_in_a_child(url: str):
    """A loop and a tier of its own; what the parent's loop had is refused."""

    async def read() -> str:
        async with await tiered.open_async(url) as tier:
            return str([message.queue_offset async for message in tier.read("orders", 0)][-1])

    async def parent() -> None:
        async with await tiered.open_async(url) as tier:
            last = [message.queue_offset async for message in tier.read("orders", 0)][-1]
            assert in_child(lambda: asyncio.run(read())) == str(last)
            assert "forked" in in_child(lambda: refusal(lambda: asyncio.run(one_of(tier))))

    async def one_of(tier: AsyncTier) -> object:
        return await anext(tier.read("orders", 0))

    asyncio.run(parent())


def test_a_message_store_is_refused_too(url: str, store: Path):
    with open_message_store(str(store), url) as both:
        both.get_message("g", "orders", 0, 0)
        for ask in (
            lambda: both.get_message("g", "orders", 0, 0),
            lambda: both.bounds("orders", 0),
        ):
            assert "forked" in in_child(lambda ask=ask: refusal(ask))
        assert in_child(lambda: str(both.close())) == "None"
