#!/usr/bin/env python3
"""Rows of the table of figures that need a real broker: what ``attach`` costs a broker under load, and by itself when idle.

    .venv/bin/python tests/peer/figures_live.py [--pairs 5] [--seconds 20] [--rate PER_PRODUCER]
        [--nice 10] [--attach=--OPTION ...] [--only live,idle]

One broker and one set of producers, warm, for all of a row. Intervals without and with ``attach`` take turns, in pairs whose
order changes; each ``attach`` has a new tier and begins at the present end, so that it follows and has nothing to catch up
with. Medians are printed, and of ratios the median of the pairs. Every interval is kept in ``DIR/live.jsonl``.
``figures.py --only live,idle`` prints the same rows.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[1]))

from support.oracle import Broker
from support.waiting import until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

ROOT = Path(__file__).resolve().parent.parent.parent
TICKS = os.sysconf("SC_CLK_TCK")
TOPIC = "figures"
BODY_BYTES = 1024
PRODUCERS = 4
WARM_UP_S = 10.0
SETTLE_S = 2.0
IDLE_S = 30.0
BROKER = {
    "mappedFileSizeCommitLog": 256 << 20,
    "mappedFileSizeConsumeQueue": 6_000_000,
    "maxHashSlotNum": 500_000,
    "maxIndexNum": 2_000_000,
}
"""Files as large as a broker's usually are: the oracle's own are tiny."""
Result = dict[str, Any]


@dataclass(frozen=True)
class Options:
    """How to measure.

    Attributes:
        pairs: Of intervals, one without and one with ``attach``.
        seconds: Length of an interval.
        rate: Messages per second of each producer; 0 for as fast as they are acknowledged.
        nice: Niceness of ``attach``.
        attach: Further options of ``attach``.
    """

    pairs: int = 5
    seconds: float = 20.0
    rate: int = 0
    nice: int = 0
    attach: tuple[str, ...] = ()


# -- what is measured -----------------------------------------------------------------------------


def cpu_seconds(pid: int) -> float:
    """User and system time of a process and its threads so far."""
    fields = Path(f"/proc/{pid}/stat").read_text("utf-8").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def machine_seconds() -> float:
    """Time that all cores together were busy since boot."""
    fields = Path("/proc/stat").read_text("ascii").split("\n", 1)[0].split()
    return sum(int(fields[i]) for i in (1, 2, 3, 6, 7)) / TICKS


class Load:
    """``oracle load``: producers that stay connected, and send for an interval when asked to."""

    def __init__(self, address: str, log: Path, rate: int) -> None:
        from support.oracle import ORACLE

        options = {"namesrv": address, "topic": TOPIC, "producers": PRODUCERS, "body": BODY_BYTES}
        words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
        with log.open("wb") as complaints:
            self._process = subprocess.Popen(
                [ORACLE, "load", *words, "--rate", str(rate)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=complaints,
                text=True,
            )
        self._log = log
        self.pid = self._process.pid

    def interval(self, seconds: float) -> Result:
        """Send for so long; what it took."""
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.write(f"{seconds}\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"the load broke off\n{self._log.read_text()}")
        return json.loads(line)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()


@dataclass
class Bench:
    """A running broker, its load, a place for tiers, and how much was sent to warm up."""

    broker: Broker
    load: Load
    work: Path
    options: Options
    sent: int
    count: int = field(default=0, init=False)

    def without(self) -> Result:
        time.sleep(SETTLE_S)
        return self._watched(lambda: self.load.interval(self.options.seconds), {})

    def attached(self) -> Result:
        """With ``attach`` that follows from now on; it must bring over all that was sent, and nothing else."""
        with self._attach("--start", "latest", *self.options.attach) as attach:
            time.sleep(SETTLE_S)
            result = self._watched(
                lambda: self.load.interval(self.options.seconds), {"attach": attach.pid}
            )
            level_s = self._wait_level(attach.url, result["sends"])
            said = attach.stop()
        if said["messages"] != result["sends"] or said["gaps"] or said["quarantined"]:
            raise SystemExit(f"attach brought over something else than was sent: {result} {said}")
        return result | {"level_s": level_s, "requests": said["requests"]}

    def idle(self) -> Result:
        """With ``attach`` that has brought over everything, and a broker to which nobody sends."""
        with self._attach(*self.options.attach) as attach:
            self._wait_level(attach.url, self.sent)
            time.sleep(2 * SETTLE_S)
            result = self._watched(lambda: time.sleep(IDLE_S) or {}, {"attach": attach.pid})
            said = attach.stop()
        return result | {"seconds": IDLE_S, "messages": said["messages"]}

    @staticmethod
    def _wait_level(url: str, messages: int) -> float:
        """Until the tier has so many messages, or more; the seconds it took."""
        from support import command_line

        def is_level() -> bool:
            ran = command_line.here("status", url, "--json")
            return ran.code == 0 and ran.document["brokers"][0]["messages"] >= messages

        return until(is_level, "everything that was sent is in the tier")

    @contextmanager
    def _attach(self, *options: str) -> Iterator[Any]:
        from support.live import Attach

        self.count += 1
        tier, log = self.work / f"tier-{self.count}", self.work / f"attach-{self.count}.log"
        with Attach(self.broker.store, tier.as_uri(), log, options) as attach:
            os.setpriority(os.PRIO_PROCESS, attach.pid, self.options.nice)  # before it has threads
            until(lambda: "tiered: tiering" in log.read_text(), "attach follows")
            yield attach
        shutil.rmtree(tier)

    def _watched(self, body: Callable[[], Result], more: Mapping[str, int]) -> Result:
        """Run something; how much CPU each took meanwhile, and what else was busy on this machine."""
        assert self.broker._broker is not None
        watched = {"broker": self.broker._broker._process.pid, "load": self.load.pid, **more}
        before = {name: cpu_seconds(pid) for name, pid in watched.items()}
        machine_before = machine_seconds()
        result = body()
        machine = machine_seconds() - machine_before
        spent = {name: cpu_seconds(pid) - before[name] for name, pid in watched.items()}
        others = max(0.0, machine - sum(spent.values()))
        result |= {f"{name}_cpu_s": seconds for name, seconds in spent.items()}
        return result | {"others_cpu_s": others}


@contextmanager
def bench(work: Path, options: Options) -> Iterator[Bench]:
    """A broker on a new store, and its producers, warm."""
    work.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=work) as name:
        folder = Path(name)
        with Broker(folder, folder / "store", **BROKER) as broker:
            broker.start()
            with Load(broker.address, folder / "load.log", options.rate) as load:
                sent = load.interval(WARM_UP_S)["sends"]
                yield Bench(broker, load, folder, options, sent)


# -- rows -----------------------------------------------------------------------------------------


def live_rows(work: Path, options: Options) -> Iterator[str]:
    """A broker under load, without and with ``attach``."""
    pairs: list[tuple[Result, Result]] = []
    with bench(work, options) as running:
        for number in range(options.pairs):
            if number % 2:
                attached = running.attached()
                without = running.without()
            else:
                without = running.without()
                attached = running.attached()
            pairs.append((without, attached))
            with (work / "live.jsonl").open("a", encoding="utf-8") as file:
                file.write(json.dumps({"without": without, "attached": attached}) + "\n")
    yield live_row(options, pairs)


def live_row(options: Options, pairs: list[tuple[Result, Result]]) -> str:
    """Both sides, and the ratios."""
    load = f"{options.rate:,} messages/s each" if options.rate else "as fast as it goes"
    more = "".join(f", {word}" for word in options.attach)
    more += f", nice {options.nice}" if options.nice else ""
    attached = [pair[1] for pair in pairs]
    share = [result["attach_cpu_s"] / result["seconds"] for result in attached]
    return (
        f"| live broker, {PRODUCERS} producers of 1 KiB, {load}, {len(pairs)} pairs of {options.seconds:.0f} s{more} "
        f"| {side(attached)}; attach {statistics.median(share):.2f} cores, "
        f"caught up {statistics.median(result['level_s'] for result in attached):.1f} s after the load ends "
        f"| without attach {side([pair[0] for pair in pairs])} | "
        f"| throughput {ratio(pairs, 'sends_per_s')}, p50 {ratio(pairs, 'p50_us')}, p99 {ratio(pairs, 'p99_us')}, "
        f"p99.9 {ratio(pairs, 'p999_us')} |"
    )


def side(results: list[Result]) -> str:
    """The medians of one side."""

    def median(name: str) -> float:
        return statistics.median(float(result[name]) for result in results)

    def cores(name: str) -> float:
        return statistics.median(result[name] / result["seconds"] for result in results)

    return (
        f"{median('sends_per_s'):,.0f} messages/s, p50 {median('p50_us'):,.0f}, p99 {median('p99_us'):,.0f}, "
        f"p99.9 {median('p999_us'):,.0f} us, broker {cores('broker_cpu_s'):.2f} cores"
    )


def ratio(pairs: list[tuple[Result, Result]], name: str) -> str:
    """With ``attach`` to without: the median of the pairs, and the extremes."""
    found = [attached[name] / without[name] for without, attached in pairs]
    return f"{statistics.median(found):.2f} ({min(found):.2f} to {max(found):.2f})"


def idle_rows(work: Path, options: Options) -> Iterator[str]:
    """An idle broker with ``attach`` beside it."""
    with bench(work, options) as running:
        result = running.idle()
    yield (
        f"| attach of an idle live store of {result['messages']:,} messages, {IDLE_S:.0f} s "
        f"| {100 * result['attach_cpu_s'] / IDLE_S:.2f} % of a core | "
        f"broker {100 * result['broker_cpu_s'] / IDLE_S:.1f} %, others {result['others_cpu_s'] / IDLE_S:.2f} cores | | |"
    )


def _unless_missing(
    rows: Callable[[Path, Options], Iterator[str]], name: str
) -> Callable[[Path, int], Iterator[str]]:
    """As ``figures.py`` wants it; without Java the row says that it was not measured."""

    def measured(work: Path, runs: int) -> Iterator[str]:
        if shutil.which("javac") and shutil.which("mvn"):
            yield from rows(work / "live", Options(pairs=runs))
        else:
            yield f"| {name} | not measured | | | |"

    return measured


ROWS = {
    "live": _unless_missing(live_rows, "live broker with attach"),
    "idle": _unless_missing(idle_rows, "attach of an idle live store"),
}


def main() -> None:
    """Print both rows."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "tiered-figures")
    parser.add_argument("--pairs", type=int, default=Options.pairs)
    parser.add_argument("--seconds", type=float, default=Options.seconds)
    parser.add_argument("--rate", type=int, default=Options.rate)
    parser.add_argument("--nice", type=int, default=Options.nice)
    parser.add_argument("--attach", action="append", default=[], metavar="WORD")
    parser.add_argument("--only", default="live,idle")
    arguments = parser.parse_args()
    options = Options(
        pairs=arguments.pairs,
        seconds=arguments.seconds,
        rate=arguments.rate,
        nice=arguments.nice,
        attach=tuple(arguments.attach),
    )
    for name in arguments.only.split(","):
        rows = {"live": live_rows, "idle": idle_rows}[name]
        for line in rows(arguments.work / "live", options):
            print(line, flush=True)


if __name__ == "__main__":
    main()
