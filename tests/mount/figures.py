"""Figures of the mount and of restoring: ``python -m tests.mount.figures [ROW ...]``; each prints a row of a table.

========= ======================================================================================================
row       what is measured
========= ======================================================================================================
folder    a real Java pull client, from a mount (tier: a folder) and from the real broker on the store, in turn
s3        the same, the tier on an S3 server of this machine
java-tier the same client, from a real broker whose own tiered store reads everything, nothing cached at its start
latency   pulls of 50 clients at once, all cached
parked    5,000 held pulls: memory and processor time
ready     a mount of 1,000 queues: time and requests until it serves
restore   ``tiered restore`` of a tier in a folder, beside ``cp`` and ``sync`` of the store
========= ======================================================================================================

The first three need a JDK and Maven; all want a machine that does nothing else. Java has its optimising compiler, as a
broker does that is no test's.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import resource
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from support import oracle
from support.command_line import program
from support.mounts import MountProcess, cpu_s, parked
from support.servers import MINIO, run_minio, run_ministack
from support.waiting import until

from tiered.format.remoting import SIZE_BYTES, Command, decode, encode, frame_size
from tiered.mount import protocol
from tiered.mount.protocol import Code

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

TOPIC, MIB = "bench-0", 1 << 20
JAVA = "-XX:TieredStopAtLevel=4 -Xmx2g"
LISTEN = ("--listen", "127.0.0.1:0", "--no-state")
Row = tuple[str, str, str]
"""What, the goal, and what was reached."""


# -- the real client ------------------------------------------------------------------------------


def pulled(name_server: str, messages: int, pid: int) -> dict[str, Any]:
    """What a client says that pulls everything, and the processor time that the server took for it."""
    words = ("pull", "--namesrv", name_server, "--topic", TOPIC, "--count")
    used_s = cpu_s(pid)
    (said,) = oracle.run(*words, timeout_s=900)
    assert said["messages"] == messages, said
    said |= {"server_cpu_s": cpu_s(pid) - used_s}
    print(f"  {said}", file=sys.stderr)
    return said


def speed(found: list[dict[str, Any]]) -> tuple[float, float]:
    """MiB/s, and the server's processor seconds for a GiB; medians."""
    mib_s = statistics.median(one["bytes"] / MIB / one["seconds"] for one in found)
    return mib_s, statistics.median(one["server_cpu_s"] / one["bytes"] * (1 << 30) for one in found)


def compared(mount: list[dict[str, Any]], broker: list[dict[str, Any]]) -> str:
    """What was reached, where both have given the same."""
    assert len({one["mix"] for one in (*mount, *broker)}) == 1
    (ours, ours_cpu_s), (theirs, theirs_cpu_s) = speed(mount), speed(broker)
    cpu = f"server's CPU {ours_cpu_s:.1f} against {theirs_cpu_s:.1f} s/GiB"
    return f"{ours:.0f} against {theirs:.0f} MiB/s: {ours / theirs:.2f}; {cpu}"


def make_store(folder: Path, asked: argparse.Namespace, *, queues: int = 0) -> Path:
    """A store, once."""
    store = folder / f"store-{queues or asked.queues}"
    if not store.exists():
        sizes = ("--messages", str(asked.messages), "--body", str(asked.body))
        program(
            "bench", "make-store", store, *sizes, "--queues", str(queues or asked.queues)
        ).good()
    return store


def tier_of(store: Path, url: str, env: Mapping[str, str] | None = None) -> str:
    """A tier of it, once."""
    program("attach", store, "--to", url, "--once", "--no-index", env=env).good()
    return url


@contextlib.contextmanager
def broker_on(folder: Path, store: Path, **settings: object) -> Iterator[oracle.Broker]:
    """A broker on the store; it is told what its files have."""
    for name, where in (("CommitLog", "commitlog"), ("ConsumeQueue", "consumequeue")):
        some = next(path for path in (store / where).rglob("0*") if path.is_file())
        settings[f"mappedFileSize{name}"] = some.stat().st_size
    with oracle.Broker(folder, store, **settings) as broker:
        broker.start()
        yield broker


def beside_the_broker(folder: Path, asked: argparse.Namespace, url: str) -> str:
    """The mount and the broker, in turn."""
    by_mount, by_broker = [], []
    with (
        broker_on(folder, make_store(folder, asked)) as broker,
        MountProcess(url, folder / "mount.log", *LISTEN) as mount,
    ):
        for _ in range(asked.rounds):
            by_mount.append(pulled(mount.address, asked.messages, mount.process.pid))
            by_broker.append(pulled(broker.address, asked.messages, broker.pid))
    return compared(by_mount, by_broker)


def folder_row(folder: Path, asked: argparse.Namespace) -> Row:
    """From a folder."""
    url = tier_of(make_store(folder, asked), f"file://{folder}/tier")
    reached = beside_the_broker(folder, asked, url)
    return (
        "a real Java client pulls from a mount, tier in a folder",
        "≥ 0.80 of the broker",
        reached,
    )


def s3_row(folder: Path, asked: argparse.Namespace) -> Row:
    """From MinIO where it is built, else from ministack, which takes more of the machine."""
    program_path = subprocess.run([MINIO, "path"], check=True, capture_output=True, text=True)
    run = run_minio if Path(program_path.stdout.strip()).exists() else run_ministack
    with run(folder) as server:
        os.environ.update(server.environment)
        url = tier_of(make_store(folder, asked), f"s3://{server.bucket()}/tier")
        reached = beside_the_broker(folder, asked, url)
    return f"the same, tier on {server.name}", "≥ 0.50 of the broker", reached


def java_tier_row(folder: Path, asked: argparse.Namespace) -> Row:
    """From the broker's own tier."""
    store, tier = folder / "store-java", folder / "tier-java"
    shutil.copytree(make_store(folder, asked), store)
    settings = {
        "messageStorePlugIn": "org.apache.rocketmq.tieredstore.TieredMessageStore",
        "tieredBackendServiceProvider": "org.apache.rocketmq.tieredstore.provider.PosixFileSegment",
        "tieredStoreFilePath": tier,
        "tieredStoreGroupCommitTimeout": 0,
        "tieredStorageLevel": "FORCE",
    }
    want_bytes = asked.messages * (asked.body + 100)  # a record has some more
    with broker_on(folder, store, **settings) as broker:
        broker.produce(
            TOPIC, asked.queues, queues=asked.queues
        )  # it looks at queues that get something
        until(lambda: tree_bytes(tier) > want_bytes, "the Java tier has everything", 900)
        time.sleep(10.0)
    asked.messages += asked.queues
    found = []
    for _ in range(asked.rounds):
        with broker_on(folder, store, **settings) as broker:
            found.append(pulled(broker.address, asked.messages, broker.pid))
    mib_s, cpu = speed(found)
    what = "the same, from a broker whose own tiered store reads all of it"
    return what, "≤ half of ours", f"{mib_s:.0f} MiB/s; CPU {cpu:.1f} s/GiB"


def tree_bytes(folder: Path) -> int:
    """Size of all files below a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


# -- clients of our own ---------------------------------------------------------------------------


async def pulls_of_one(address: str, count: int, *, queue_id: int) -> list[float]:
    """Seconds that each of so many pulls took, one after the other, from a queue's beginning on."""
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port), limit=1 << 20)
    took, offset = [], 0
    for number in range(count):
        fields = {
            "consumerGroup": "g", "topic": TOPIC, "queueId": queue_id, "queueOffset": offset,
            "maxMsgNums": 32, "sysFlag": 4, "commitOffset": 0, "suspendTimeoutMillis": 0,
            "subscription": "*", "subVersion": 0,
        }  # fmt: skip
        texts = {name: str(value) for name, value in fields.items()}
        began_s = time.perf_counter()
        writer.writelines(encode(Command(protocol.PULL_MESSAGE, number, fields=texts)))  # type: ignore[arg-type]
        size = frame_size(await reader.readexactly(SIZE_BYTES))
        answer = decode(await reader.readexactly(size))
        took.append(time.perf_counter() - began_s)
        offset = int(answer.fields["nextBeginOffset"]) if answer.code == Code.SUCCESS else 0
    writer.close()
    return took


async def pulls_of_all(address: str, clients: int, each: int, queues: int) -> list[float]:
    """The same of many clients at once."""
    work = [pulls_of_one(address, each, queue_id=number % queues) for number in range(clients)]
    return [took for row in await asyncio.gather(*work) for took in row]


def latency_row(folder: Path, asked: argparse.Namespace) -> Row:
    """Everybody asks again as soon as he was answered, so one waits for all the others."""
    asked.messages = min(asked.messages, 100_000)
    url = tier_of(make_store(folder, asked), f"file://{folder}/tier")
    with MountProcess(url, folder / "mount.log", *LISTEN) as mount:
        each = asked.messages // asked.queues // 32 - 1
        asyncio.run(pulls_of_all(mount.address, asked.queues, each, asked.queues))
        took = sorted(asyncio.run(pulls_of_all(mount.address, 50, each, asked.queues)))
    p99_ms, median_ms = (1000 * took[int(share * len(took))] for share in (0.99, 0.5))
    reached = f"p99 {p99_ms:.1f} ms, median {median_ms:.1f} ms, {len(took):,} pulls"
    return "pulls of 50 clients without a pause, cached", "p99 ≤ 30 ms", reached


def parked_row(folder: Path, asked: argparse.Namespace) -> Row:
    """Each at a queue of its own, as far as there are so many."""
    asked.messages = 10_000
    url = tier_of(make_store(folder, asked, queues=1000), f"file://{folder}/tier-1000")
    with MountProcess(url, folder / "mount.log", *LISTEN) as mount:  # noqa: SIM117 (one is of the other)
        with parked(mount, TOPIC, clients=1000, each=5, queues=1000) as (more_bytes, _):
            began_s, used_s = time.monotonic(), cpu_s(mount.process.pid)
            time.sleep(2.0)
            share = (cpu_s(mount.process.pid) - used_s) / (time.monotonic() - began_s)
            reached = f"{more_bytes / MIB:.0f} MiB, {share:.1%} of a core"
    return (
        "5,000 held pulls over 1,000 connections, 1,000 queues",
        "≤ 100 MiB, ≤ 5 % of a core",
        reached,
    )


def ready_row(folder: Path, asked: argparse.Namespace) -> Row:
    """From the start of the process to its word that it serves, and what that asked of the store."""
    asked.messages = 10_000
    url = tier_of(make_store(folder, asked, queues=1000), f"file://{folder}/tier-1000")
    listen = ("--listen", "127.0.0.1:0")
    with MountProcess(url, folder / "first.log", *listen) as mount:
        mount.end(signal.SIGTERM)  # the first of a name tries what the store can do
    began_s = time.monotonic()
    with MountProcess(url, folder / "mount.log", *listen) as mount:
        ready_s, used_s = time.monotonic() - began_s, cpu_s(mount.process.pid)
        requests = mount.end(signal.SIGTERM)[1]["store_requests"]
    reached = (
        f"{ready_s:.1f} s ({used_s:.1f} of a processor), {requests} requests, the end's included"
    )
    return "a mount of 1,000 queues serves", "≤ 5 s, ≤ 20 requests", reached


# -- restoring ------------------------------------------------------------------------------------


def children_cpu_s() -> float:
    """Processor time of all programs that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def restore_row(folder: Path, asked: argparse.Namespace) -> Row:
    """Both write as much, and have it on the disk in the end."""
    store = make_store(folder, asked)
    url = tier_of(store, f"file://{folder}/tier")
    speeds: dict[str, list[float]] = {"restore": [], "cp": []}
    used_s: dict[str, list[float]] = {"restore": [], "cp": []}
    for _ in range(asked.rounds):
        target = folder / "restored"
        began_cpu_s = children_cpu_s()
        done = program("restore", url, "--to", target, "--json").good().document
        speeds["restore"].append(done["size_bytes"] / MIB / done["seconds"])
        used_s["restore"].append((children_cpu_s() - began_cpu_s) / done["size_bytes"] * (1 << 30))
        shutil.rmtree(target)
        began_s, began_cpu_s = time.monotonic(), children_cpu_s()
        subprocess.run(["cp", "-r", store, target], check=True)
        subprocess.run(["sync", "-f", target], check=True)
        speeds["cp"].append(done["size_bytes"] / MIB / (time.monotonic() - began_s))
        used_s["cp"].append((children_cpu_s() - began_cpu_s) / done["size_bytes"] * (1 << 30))
        shutil.rmtree(target)
    ours, plain = (statistics.median(row) for row in speeds.values())
    cpu_s_gib, plain_cpu_s_gib = (statistics.median(row) for row in used_s.values())
    cpu = f"CPU, start included, {cpu_s_gib:.1f} against {plain_cpu_s_gib:.1f} s/GiB"
    reached = f"{ours:.0f} against {plain:.0f} MiB/s: {ours / plain:.2f}; {cpu}"
    return (
        "`restore` of a tier in a folder, beside `cp` and `sync`",
        "as near as it can be",
        reached,
    )


ROWS: dict[str, Callable[[Path, argparse.Namespace], Row]] = {
    "folder": folder_row,
    "s3": s3_row,
    "java-tier": java_tier_row,
    "latency": latency_row,
    "parked": parked_row,
    "ready": ready_row,
    "restore": restore_row,
}


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("rows", nargs="*", default=list(ROWS), help="default: all")
    parser.add_argument("--messages", type=int, default=2_000_000)
    parser.add_argument("--body", type=int, default=1024)
    parser.add_argument("--queues", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    asked = parser.parse_args()
    if unknown := set(asked.rows) - set(ROWS):
        parser.error(f"no such row: {', '.join(sorted(unknown))}")
    os.environ["ORACLE_JAVA_OPTS"] = JAVA
    for name in asked.rows:
        with tempfile.TemporaryDirectory(prefix="tiered-figures-") as folder:
            row = ROWS[name](Path(folder), argparse.Namespace(**vars(asked)))
        print(f"| {' | '.join(row)} |", flush=True)


if __name__ == "__main__":
    main()
