"""Our store and a real broker take turns on one directory, each stopped or killed; clients read what either has put.

Of every turn is asked: the broker changes nothing of what we wrote when it starts; a client pulls every message field by
field, and finds messages by key, by id and by time; an administrator is told the same offsets; we go on where it ended.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from support.embedded import reopen
from support.java_lines import as_java_tells
from support.journals import PREFIX
from support.oracle import CLUSTER, ORACLE, Broker, needs_java, run
from support.replayed import records_of
from support.timed import put_queue
from support.turns import OPTIONS, QUEUES, TOPIC, messages, write

from backends.memory import MemoryStore
from tiered.log.reader import StoreRanges, find_by_time
from tiered.model import Boundary

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from tiered.format.record import Record

pytestmark = [pytest.mark.java, needs_java]
Place = tuple[int, int]
LISTS = ("commitlog", "consumequeue")


def write_and_die(root: Path, host: str, turn: int) -> None:
    script = (
        "from pathlib import Path; from support.turns import write;"
        f"write(Path({str(root)!r}), {host!r}, {turn}, 'kill')"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.returncode == -9, done.stderr.decode()


def contents(root: Path, ours: str) -> dict[str, bytes]:
    """What log and consume queues hold, but for zeros; and the index, which a broker makes anew after a kill."""
    found = {
        str(path.relative_to(root)): path.read_bytes().rstrip(b"\0")
        for folder in (LISTS if ours == "kill" else (*LISTS, "index"))
        for path in (root / folder).rglob("*")
        if path.is_file()
    }
    return {name: data for name, data in found.items() if data}


def check_pulled(broker: Broker, records: Mapping[Place, Record]) -> None:
    lines = run("pull", "--namesrv", broker.address, "--topic", TOPIC)
    assert len(lines) == len(records)
    for line in lines:
        mine = as_java_tells(records[line["queue_id"], line["queue_offset"]])
        assert line == {name: mine[name] for name in line}


def check_found(broker: Broker, records: Mapping[Place, Record], turn: int) -> None:
    """By keys of this turn and the first, by unique id, and by the id that tells the place."""
    for key in (f"u{turn}", "k0-7"):
        wanted = {
            place
            for place, record in records.items()
            if key in record.properties.get("KEYS", "").split()
        }
        found = run("query", "--namesrv", broker.address, "--topic", TOPIC, "--key", key)
        assert wanted
        assert {(line["queue_id"], line["queue_offset"]) for line in found} == wanted
    place, record = next(item for item in records.items() if item[1].flag == -7)
    told = as_java_tells(record)
    for name in ("msg_id", "offset_msg_id"):
        words = ("--topic", TOPIC, "--msgid", told[name])
        (found,) = run("view", "--namesrv", broker.address, *words)
        assert (found["queue_id"], found["queue_offset"]) == place


def check_offsets(broker: Broker, records: Mapping[Place, Record], time_ms: int) -> None:
    """Minima, maxima and offsets by time as a client is told them, and as an administrator is."""
    lines = run("offsets", "--namesrv", broker.address, "--topic", TOPIC, "--time", str(time_ms))
    assert len(lines) == QUEUES
    ends = {}
    for line in lines:
        times = [
            records[place].store_timestamp_ms
            for place in sorted(place for place in records if place[0] == line["queue_id"])
        ]
        lower = sum(time < time_ms for time in times)
        assert (line["min_offset"], line["max_offset"]) == (0, len(times))
        assert line["earliest_store_timestamp_ms"] == times[0]
        assert line["search_lower"] == line["search_default"] == lower
        assert line["search_upper"] == max(0, sum(time <= time_ms for time in times) - 1)
        objects, held = MemoryStore(), [[(time, 10) for time in times]]
        view, ranges = put_queue(objects, held), StoreRanges(objects, PREFIX)
        for name, boundary in (("lower", Boundary.LOWER), ("upper", Boundary.UPPER)):
            found = find_by_time(view, ranges, time_ms, boundary)
            nothing = len(times) if boundary is Boundary.LOWER else 0
            told = nothing if found is None else found
            assert told == line[f"search_{name}"], "a tier says what the broker says"
        ends[line["queue_id"]] = (0, len(times))
    assert topic_status(broker) == ends


def topic_status(broker: Broker) -> dict[int, Place]:
    words = ("admin", "topicStatus", "-n", broker.address, "-t", TOPIC, "-c", CLUSTER)
    done = subprocess.run([ORACLE, *words], capture_output=True, text=True, timeout=60, check=True)
    rows = re.findall(r"^\S+ +(\d+) +(\d+) +(\d+) ", done.stdout, re.MULTILINE)
    return {int(queue): (int(low), int(end)) for queue, low, end in rows}


def in_topic(root: Path) -> dict[Place, Record]:
    return {
        (record.queue_id, record.queue_offset): record
        for record, _ in records_of(root)
        if record.topic == TOPIC
    }


def take_turns(folder: Path, endings: list[tuple[str, str]]) -> None:
    """For each turn: how ours ends, and how the broker does."""
    root, count = folder / "s", 0
    with Broker(folder, root) as broker:
        host = f"127.0.0.1:{broker._port}"
        for turn, (ours, theirs) in enumerate(endings):
            if ours == "kill":
                write_and_die(root, host, turn)
            else:
                write(root, host, turn, ours)
            records = in_topic(root)
            count += len(messages(turn))
            assert len(records) == count
            before = contents(root, ours)
            broker.start()
            check_pulled(broker, records)
            if turn % 2:  # each question is a client's process
                check_found(broker, records, turn)
                times = sorted(record.store_timestamp_ms for record in records.values())
                check_offsets(broker, records, times[count // 2])
            after = contents(root, ours)
            assert {name: after.get(name) for name in before} == before
            assert {name for name in after.keys() - before.keys() if "orders" in name} == set()
            told = broker.produce(TOPIC, 40, queues=QUEUES, tags="a,b", keys=5, inflight=8)
            count += 40
            broker.kill() if theirs == "kill" else broker.stop()
            records = in_topic(root)
            assert len(records) == count
            assert {(line["queue_id"], line["queue_offset"]) for line in told} <= records.keys()
    with reopen(root, OPTIONS) as store:
        assert (store.recovered is None) == (endings[-1][1] == "stop")


def test_one_turn(tmp_path: Path):
    take_turns(tmp_path, [("kill", "kill")])


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_five_turns(tmp_path: Path):
    ways = [
        ("close", "stop"),
        ("kill", "kill"),
        ("close", "kill"),
        ("kill", "stop"),
        ("kill", "kill"),
    ]
    take_turns(tmp_path, ways)
