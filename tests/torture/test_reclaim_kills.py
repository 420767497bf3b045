"""`expire` and `gc` beside a running `attach`, each killed at random: what is left is whole, and as the broker has it."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from collections import Counter
from typing import TYPE_CHECKING

import pytest
from support import captures, command_line, tier_checks
from support.command_line import here
from support.live import Attach
from support.reclaiming import NO_GRACE, keys_in, named
from support.victims import FAST, NAME, Victim

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

EXPIRE = ("--ttl", "1s", "--max-deletions", "12")
"""A few segments a run, so that something is left to expire in every round."""
CODES = {0, 1, 4, -9}
"""Done; the tier has moved on since the plan was made; a writer has begun meanwhile; killed."""


class Reclaimers:
    """Processes of `expire` and `gc`, at most one of each, some of them killed.

    Attributes:
        met: How often each command ended with each code.
    """

    def __init__(self, url: str, rng: random.Random) -> None:
        self._url = url
        self._rng = rng
        self._running: dict[str, tuple[subprocess.Popen[bytes], float]] = {}
        self.met: Counter[tuple[str, int]] = Counter()

    def step(self) -> None:
        """Start what does not run, kill what has lived long enough."""
        for what, options in (("expire", EXPIRE), ("gc", NO_GRACE)):
            process, until_s = self._running.get(what, (None, 0.0))
            if process is None:
                arguments = command_line.command((what, self._url, *options, "--apply", "-"))
                started = subprocess.Popen(
                    arguments,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.PIPE,
                    env=command_line.environment(),
                )
                incarnations_s = self._rng.choice((0.3, 0.5, 0.7, 60.0)) * (
                    0.6 + self._rng.random()
                )
                self._running[what] = started, time.monotonic() + incarnations_s
            elif process.poll() is not None or time.monotonic() > until_s:
                self._end(what)

    def end(self) -> None:
        """Wait for some, kill the others."""
        for what in [*self._running]:
            if self._rng.random() < 0.5:
                self._running[what][0].wait(60)
            self._end(what)

    def _end(self, what: str) -> None:
        process, _ = self._running.pop(what)
        process.kill()
        _, complaints = process.communicate(timeout=60)
        assert process.returncode in CODES, (what, process.returncode, complaints.decode())
        self.met[what, process.returncode] += 1


@pytest.mark.parametrize(
    "rounds", [3, pytest.param(20, marks=[pytest.mark.slow, pytest.mark.timeout(600)])]
)
@pytest.mark.timeout(180)
def test_i11_reclaiming_beside_a_writer(
    rounds: int, stores: Callable[[str], Path], tmp_path: Path
) -> None:
    seed = int(os.environ.get("TIERED_TORTURE_SEED", "1"))
    rng, url = random.Random(seed), f"file://{tmp_path}/tier"
    victim = Victim(stores(NAME), tmp_path / "store", url)
    reclaimers = Reclaimers(url, rng)
    try:
        victim.grow(victim.growing.whole_end // 3)
        begun = here("attach", victim.growing.store, "--to", url, "--once", "--seal", *FAST)
        assert begun.code in {0, 1}, begun  # the last message may not be whole
        share = victim.growing.whole_end * 2 // 3 // rounds
        for _ in range(rounds):
            play(victim, reclaimers, rng, share, tmp_path / "attach.log")
            here("verify", url, "--deep").good()
        victim.growing.grow(victim.growing.whole_end)
        victim.growing.crash()
        here("attach", victim.growing.store, "--to", url, "--once", "--seal").good()
        check_end(victim.growing.store, url)
    finally:
        reclaimers.end()
        victim.close()
    print(f"\nseed {seed}: {dict(reclaimers.met)}", flush=True)
    assert sum(reclaimers.met.values()) >= rounds


def play(victim: Victim, reclaimers: Reclaimers, rng: random.Random, share: int, log: Path) -> None:
    """Messages arrive beside one or two writers' incarnations, while others expire and are deleted."""
    end = min(victim.growing.end + share, victim.growing.whole_end)
    for _ in range(rng.randrange(1, 3)):
        with Attach(victim.growing.store, url=victim.url, log=log, options=FAST) as attach:
            until_s = time.monotonic() + 0.8 + rng.random()
            while time.monotonic() < until_s:
                assert attach.is_running, log.read_text()[-2000:]
                reclaimers.step()
                victim.growing.grow(min(end, victim.growing.end + rng.randrange(1, 60_000)))
                time.sleep(rng.random() / 10)
            if rng.random() < 0.7:
                attach.kill()
            else:
                attach.send(signal.SIGTERM)
                code = attach.ended()
                # 143: cut short in its start. -SIGTERM: even before it had a handler.
                assert code in {0, 143, -signal.SIGTERM}, log.read_text()[-2000:]
    reclaimers.end()


def check_end(store: Path, url: str) -> None:
    """All garbage can go; what has not expired is what Java found, to the last message, byte for byte."""
    here("expire", url, *EXPIRE, "--apply", "-").good()
    time.sleep(0.01)
    here("gc", url, *NO_GRACE, "--apply", "-").good()
    assert keys_in(url) == named(url)
    dump = captures.captured(NAME)
    found = tier_checks.bounds(url)
    assert {queue: high for queue, (_, high) in found.items()} == {
        queue: high for queue, (_, high) in dump.bounds.items()
    }
    low = {queue.queue_id: low for queue, (low, _) in found.items() if queue.topic == "load"}
    assert max(low.values()) > 0, "nothing has expired"
    for topic, messages in dump.messages.items():
        least = {q.queue_id: at for q, (at, _) in found.items() if q.topic == topic}
        kept = [one for one in messages if one["queue_offset"] >= least[one["queue_id"]]]
        assert tier_checks.cat(url, topic) == kept
    tier_checks.check_sound(url, store)
