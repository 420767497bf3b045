"""Cold reads with and without a replica: ``python -m tests.mount.figures_cold_reads [--gib 2] [--plot FILE]``.

A real broker has a backlog on its disk, and its tier has it, too, on MinIO where it is built, else in a folder. A producer
sends 1,000 messages a second, ``tiered attach`` tiers them, and one consumer is at the head. Then three consumers begin at
the start. Twice, in turn: without a replica, and with one. Before each run the page cache forgets the store and the tier.

Printed is a table: what the broker read from its disk while the laggards read, where the laggards' bytes came from, what
messages took from the store to the consumer at the head before and meanwhile, and what is missing or came twice. With
``--plot`` the broker's reads over time are drawn as an SVG. It wants a JDK, Maven, and a machine that does nothing else;
2 GiB take some eight minutes and 6 GiB of disk.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from support import oracle
from support.command_line import command, environment, program
from support.mounts import MountProcess, page
from support.servers import MINIO, run_minio

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

TOPIC, MIB, QUEUES, BODY = "bench-0", 1 << 20, 8, 1024
ALONE_S = 20.0
"""How long the head is measured without laggards."""
LAGGARDS = 3
JAVA = "-XX:TieredStopAtLevel=4 -Xmx1g"


@dataclass
class Outcome:
    """One run."""

    name: str
    disk_bytes: int = 0  # that the broker read while the laggards did
    reads: list[tuple[float, float]] = field(default_factory=list)  # seconds, MiB so far
    laggard_bytes: int = 0  # records that they were given
    replica_bytes: int = 0  # records that the replica gave, all of the tier
    alone_ms: int = 0  # p99 of the head
    beside_ms: int = 0
    seconds: float = 0.0  # until the last laggard had the backlog
    missing: int = 0
    twice: int = 0


class Counted:
    """A consumer that counts, in a process of its own."""

    def __init__(
        self, broker: oracle.Broker, group: str, folder: Path, *more: str, nice: str = "0"
    ) -> None:
        self._out = folder / f"{group}.out"
        words = ("client", "push", "--namesrv", broker.address, "--topic", TOPIC, "--group", group)
        with self._out.open("wb") as out, self._out.with_suffix(".log").open("wb") as log:
            self.process = subprocess.Popen(
                # Laggards would be on other machines: here they must not take the processor of those that are measured.
                ["nice", "-n", nice, oracle.ORACLE, *words, "--count", "--seconds", "3600", *more],
                stdout=out,
                stderr=log,
            )

    def lines(self) -> list[dict[str, Any]]:
        """One each second."""
        *whole, _ = self._out.read_bytes().split(b"\n")
        return [json.loads(line) for line in whole]

    def last(self) -> dict[str, Any]:
        """The newest of them."""
        return next(
            iter(reversed(self.lines())), {"messages": 0, "bytes": 0, "distinct": 0, "end": 0}
        )

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


def p99_ms(lines: Sequence[dict[str, Any]]) -> int:
    """Of what messages took, over these lines."""
    took: Counter[int] = Counter()
    for line in lines:
        took.update({int(ms): count for ms, count in line["took_ms"].items()})
    left = took.total() * 0.99
    for ms in sorted(took):
        left -= took[ms]
        if left <= 0:
            return ms
    return -1


def disk_bytes(pid: int) -> int:
    """What a process has had read from disks, mapped files included."""
    return int(
        re.findall(r"^read_bytes: (\d+)", Path(f"/proc/{pid}/io").read_text(), re.MULTILINE)[0]
    )


def forget(*folders: Path) -> None:
    """Have the page cache forget all files below; they must not be mapped."""
    for folder in folders:
        for path in filter(Path.is_file, folder.rglob("*")):
            file = os.open(path, os.O_RDONLY)
            os.fsync(file)
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(file)


@contextlib.contextmanager
def process(log: Path, *words: object) -> Iterator[subprocess.Popen[bytes]]:
    """A command of ours, until the end of the block."""
    with log.open("ab") as out:
        running = subprocess.Popen(command(tuple(words)), stdout=out, stderr=out, env=environment())
    try:
        yield running
    finally:
        running.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            running.wait(30)
        running.kill()
        running.wait()


def seed_head(store: Path, each: int) -> None:
    """The group of the consumer at the head is there already."""
    offsets = {f"{TOPIC}@head": dict.fromkeys(range(QUEUES), each)}
    (store / "config").mkdir(exist_ok=True)
    (store / "config" / "consumerOffset.json").write_text(json.dumps({"offsetTable": offsets}))


def watch(
    broker: oracle.Broker,
    laggards: Sequence[Counted],
    backlog: int,
    found: Outcome,
    seconds_max: float,
) -> None:
    """Until each laggard has the backlog, and a little more."""
    began_s, before = time.monotonic(), disk_bytes(broker.pid)
    while time.monotonic() < began_s + seconds_max:
        time.sleep(1.0)
        found.seconds = time.monotonic() - began_s
        found.disk_bytes = disk_bytes(broker.pid) - before
        found.reads.append((found.seconds, found.disk_bytes / MIB))
        if all(one.last()["messages"] >= backlog * 1.02 for one in laggards):
            return
    print("  the laggards did not get through in time", file=sys.stderr)


def serve(
    held: contextlib.ExitStack,
    folder: Path,
    asked: argparse.Namespace,
    url: str,
    *,
    has_replica: bool,
) -> tuple[oracle.Broker, str]:
    """A broker on the store, what tiers it, and a load; and where the replica tells its metrics."""
    store = folder / "store"
    some = next(path for path in (store / "commitlog").iterdir())
    items = next(path for path in (store / "consumequeue").rglob("0*") if path.is_file())
    settings = {
        "mappedFileSizeCommitLog": some.stat().st_size,
        "mappedFileSizeConsumeQueue": items.stat().st_size,
        "slaveReadEnable": "true",
        "accessMessageInMemoryMaxRatio": asked.ratio,
    }
    broker = held.enter_context(oracle.Broker(folder, store, **settings))
    broker.start()
    held.callback(broker.stop)
    metrics = f"127.0.0.1:{next(oracle.free_ports())}"
    attach = ("attach", store, "--to", url, "--freshness", "2", "--no-index")
    held.enter_context(process(folder / "attach.log", *attach))
    if has_replica:
        words = ("--listen", "127.0.0.1:0", "--replica-of-live", "--namesrv", broker.address)
        more = ("--metrics-listen", metrics, "--refresh", "2")
        held.enter_context(MountProcess(url, folder / "replica.log", *words, *more))
    sends = ("load", "--namesrv", broker.address, "--topic", TOPIC, "--queues", str(QUEUES))
    load = subprocess.Popen(
        [
            oracle.ORACLE,
            *sends,
            "--producers",
            "1",
            "--rate",
            "1000",
            "--body",
            "1024",
            "--seconds",
            "3600",
        ],
        stdout=subprocess.DEVNULL,
    )
    held.callback(load.wait)
    held.callback(load.kill)
    return broker, metrics


def measure(folder: Path, asked: argparse.Namespace, url: str, *, has_replica: bool) -> Outcome:
    """One run."""
    found, store = Outcome("with" if has_replica else "without"), folder / "store"
    backlog = asked.messages
    forget(store, folder / "data", folder / "tier")
    with contextlib.ExitStack() as held:
        broker, metrics = serve(held, folder, asked, url, has_replica=has_replica)
        head = Counted(broker, "head", folder)
        held.callback(head.end)
        time.sleep(10.0)  # all is warm
        first = len(head.lines())
        time.sleep(ALONE_S)
        second = len(head.lines())
        speed = ("--mib-per-second", str(asked.mib_per_second))
        laggards = []
        for number in range(LAGGARDS):
            laggards.append(
                Counted(broker, f"lag-{found.name}-{number}", folder, *speed, nice="10")
            )
            held.callback(laggards[-1].end)
        watch(broker, laggards, backlog, found, asked.seconds_max)
        found.alone_ms, found.beside_ms = (
            p99_ms(head.lines()[first:second]),
            p99_ms(head.lines()[second:]),
        )
        found.laggard_bytes = sum(one.last()["bytes"] for one in laggards)
        if has_replica:
            text = page(metrics, "/metrics")[1]
            (told,) = re.findall(
                r'^tiered_mount_read_bytes_total\{side="tier"\} (\S+)$', text, re.MULTILINE
            ) or ["0"]
            found.replica_bytes = int(float(told))
        # Up to the highest place that came, but for what two threads of each may have had in hand.
        lasts = [one.last() for one in laggards]
        found.missing = sum(max(0, one["end"] - one["distinct"] - 64) for one in lasts)
        found.twice = sum(one.last()["messages"] - one.last()["distinct"] for one in laggards)
    print(f"  {replace(found, reads=[])}", file=sys.stderr)
    return found


def rows(without: Outcome, beside: Outcome) -> Iterator[tuple[str, ...]]:
    """The table."""
    share = beside.replica_bytes / max(beside.laggard_bytes, 1)
    fell = beside.disk_bytes / max(without.disk_bytes, 1)
    yield "", "without a replica", "with it", "goal"
    yield "---", "---", "---", "---"
    yield (
        "broker's disk reads",
        f"{without.disk_bytes / MIB:.0f} MiB",
        f"{beside.disk_bytes / MIB:.0f} MiB: {fell:.3f}",
        "< 0.1",
    )
    yield (
        "laggards' records",
        f"{without.laggard_bytes / MIB:.0f} MiB",
        f"{beside.laggard_bytes / MIB:.0f} MiB",
        "",
    )
    yield (
        "of these from the tier",
        "0",
        f"{beside.replica_bytes / MIB:.0f} MiB: {share:.3f}",
        "≥ 0.95",
    )
    yield "until they had the backlog", f"{without.seconds:.0f} s", f"{beside.seconds:.0f} s", ""
    yield "head, p99 alone", f"{without.alone_ms} ms", f"{beside.alone_ms} ms", ""
    worse = beside.beside_ms / max(beside.alone_ms, 1)
    yield (
        "head, p99 beside laggards",
        f"{without.beside_ms} ms",
        f"{beside.beside_ms} ms: {worse:.2f} of alone",
        "≤ 1.2",
    )
    yield (
        "missing; given twice",
        f"{without.missing}; {without.twice}",
        f"{beside.missing}; {beside.twice}",
        "0; few",
    )


# -- the picture ----------------------------------------------------------------------------------

WIDTH, HEIGHT, LEFT, TOP = 640, 240, 70, 60
WITHOUT, WITH = "#c44e2b", "#0b5cad"


def picture(without: Outcome, beside: Outcome, gib: float) -> str:
    """The broker's disk reads over time, as an SVG."""
    seconds = max(one.reads[-1][0] for one in (without, beside))
    mib = max(1.0, *(row[1] for one in (without, beside) for row in one.reads))

    def line(one: Outcome, colour: str, name: str, at: int) -> str:
        points = " ".join(
            f"{LEFT + WIDTH * s / seconds:.1f},{TOP + HEIGHT * (1 - m / mib):.1f}"
            for s, m in [(0.0, 0.0), *one.reads]
        )
        key = f'<text x="{LEFT + at}" y="46" fill="{colour}">{name}: {one.reads[-1][1]:.0f} MiB</text>'
        return f'{key}<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>'

    size = f'width="{WIDTH + LEFT + 30}" height="{HEIGHT + TOP + 50}"'
    text = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="12" fill="#1b1f24">',
        f'<rect {size} fill="#ffffff"/>',
        f'<text x="{LEFT}" y="24" font-size="16">Broker\'s disk reads while 3 consumers read {gib:g} GiB of backlog</text>',
        f'<path d="M{LEFT} {TOP}v{HEIGHT}h{WIDTH}" fill="none" stroke="#d0d4d9"/>',
        f'<text x="{LEFT - 8}" y="{TOP + 8}" text-anchor="end">{mib:.0f} MiB</text>',
        f'<text x="{LEFT - 8}" y="{TOP + HEIGHT}" text-anchor="end">0</text>',
        f'<text x="{LEFT + WIDTH}" y="{TOP + HEIGHT + 18}" text-anchor="end">{seconds:.0f} s</text>',
        line(without, WITHOUT, "without a replica", 0),
        line(beside, WITH, "with one", 260),
    ]
    return "\n".join([*text, "</svg>", ""])


@contextlib.contextmanager
def tier_at(folder: Path) -> Iterator[str]:
    """On MinIO, where it is built."""
    path = subprocess.run([MINIO, "path"], check=True, capture_output=True, text=True).stdout
    if not Path(path.strip()).exists():
        yield f"file://{folder}/tier"
        return
    with run_minio(folder) as server:
        os.environ.update(server.environment)
        yield f"s3://{server.bucket()}/tier"


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--gib", type=float, default=2.0, help="of backlog")
    parser.add_argument(
        "--mib-per-second", type=float, default=20.0, help="of each laggard; 0: as fast as it can"
    )
    parser.add_argument(
        "--ratio", type=int, default=1, help="accessMessageInMemoryMaxRatio: per cent of all memory"
    )
    parser.add_argument(
        "--seconds-max", type=float, default=200.0, help="for the laggards, of each run"
    )
    parser.add_argument("--plot", type=Path, help="SVG to write")
    parser.add_argument(
        "--folder", type=Path, help="below which to work; default: that of temporary files"
    )
    asked = parser.parse_args()
    os.environ["ORACLE_JAVA_OPTS"] = JAVA
    oracle.CLUSTER, oracle.BROKER = "bench-cluster", "bench-broker"  # as the store has it
    asked.messages = int(asked.gib * (1 << 30) / (BODY + 130)) // QUEUES * QUEUES
    folder = Path(tempfile.mkdtemp(prefix="tiered-cold-", dir=asked.folder))
    try:
        sizes = ("--messages", str(asked.messages), "--body", str(BODY), "--queues", str(QUEUES))
        program("bench", "make-store", folder / "store", *sizes).good()
        seed_head(folder / "store", asked.messages // QUEUES)
        with tier_at(folder) as url:
            program("attach", folder / "store", "--to", url, "--once", "--no-index").good()
            without = measure(folder, asked, url, has_replica=False)
            beside = measure(folder, asked, url, has_replica=True)
        for row in rows(without, beside):
            print(f"| {' | '.join(row)} |", flush=True)
        if asked.plot:
            asked.plot.write_text(picture(without, beside, asked.gib), "utf-8")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
