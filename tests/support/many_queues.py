"""A tier of 1,000 queues, and how long its pages take: `python -m support.many_queues FOLDER` prints a table."""

from __future__ import annotations

import base64
import json
import statistics
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from support.command_line import here
from support.pages import served

if TYPE_CHECKING:
    from support.pages import Pages

TOPICS, QUEUES, MESSAGES = 100, 10, 40
SAID = {"cluster": "shop", "broker": "north"}
TOPIC = {**SAID, "topic": "topic-042"}
ASKED = {
    "brokers": ("/", {}),
    "a broker": ("/broker", SAID),
    "a topic": ("/topic", TOPIC),
    "a queue": ("/queue", {**TOPIC, "queue": 7}),
    "messages, the newest": ("/messages", {**TOPIC, "queue": 7}),
    "messages, by tag": ("/messages", {**TOPIC, "queue": 7, "tag": "paid"}),
    "messages, by SQL92": ("/messages", {**TOPIC, "queue": 7, "sql": "TAGS = 'paid'"}),
    "messages, by key": ("/messages", {**TOPIC, "key": "key-17"}),
    "a message": ("/message", {**TOPIC, "queue": 7, "offset": 11}),
    "timers": ("/timers", SAID),
    "archive": ("/archive", SAID),
    "costs": ("/costs", {}),
    "doctor": ("/doctor", {}),
}


def build(folder: Path) -> tuple[str, Path, str]:
    """URL of the tier, the store that it is of, URL of its archive, which has a half of it."""
    lines, store, url = folder / "lines", folder / "store", f"file://{folder}/tier"
    with lines.open("w") as out:
        for number in range(MESSAGES):
            body = base64.b64encode(
                json.dumps({"number": number, "text": "x" * 200}).encode()
            ).decode()
            for topic in range(TOPICS):
                for queue in range(QUEUES):
                    row = {
                        "topic": f"topic-{topic:03}",
                        "queue_id": queue,
                        "keys": f"key-{number}",
                        "tags": "paid" if number % 3 else "sent",
                        "body_base64": body,
                    }
                    out.write(json.dumps(row) + "\n")
    here("store", "create", store).good()
    here("store", "put", store, lines).good()
    names = [option for name, text in SAID.items() for option in (f"--{name}", text)]
    small = ("--bundle-size", "64KiB", "--buffer-size", "256KiB", "--segment-size", "2KiB")
    here("attach", store, "--to", url, "--once", "--seal", *names, *small).good()
    archive = f"file://{folder}/parquet"
    here("archive", url, "--to", archive, "--topics", "topic-04*", "--jobs", "2").good()
    return url, store, archive


def times(pages: Pages, rounds: int = 7) -> dict[str, tuple[float, float, float]]:
    """Of each page the seconds of its first load, the median of the others, and the longest of them."""
    found = {}
    for name, (path, said) in ASKED.items():
        seconds = []
        for _ in range(rounds):
            began_s = time.perf_counter()
            pages.good(path, **said)
            seconds.append(time.perf_counter() - began_s)
        first, *others = seconds
        found[name] = first, statistics.median(others), max(others)
    return found


def main(folder: Path) -> None:
    url, store, archive = build(folder)
    began_s = time.perf_counter()
    with served(url, "--store", store, "--archive", archive, "--bodies") as pages:
        started_s = time.perf_counter() - began_s
        found = times(pages)
    print(f"from the start of the program to its address: {started_s * 1000:.0f} ms")
    print("| page | first load, ms | later, median | later, longest |\n|---|---:|---:|---:|")
    for name, row in found.items():
        print(f"| {name} | " + " | ".join(f"{seconds * 1000:.0f}" for seconds in row) + " |")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
