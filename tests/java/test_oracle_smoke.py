"""The oracle itself: a real broker starts, takes messages, and its store can be read back."""

import json
import os
import shutil
import signal
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.oracle import free_ports

pytestmark = [
    pytest.mark.java,
    pytest.mark.skipif(
        os.environ.get("TIERED_REQUIRE") != "1"
        and not (shutil.which("javac") and shutil.which("mvn")),
        reason="no JDK with Maven",
    ),
]

ORACLE = Path(__file__).resolve().parents[1] / "oracle" / "oracle"
READY_SECONDS_MAX = 90
STOP_SECONDS_MAX = 60


@contextmanager
def server(log: Path, *arguments: str, stop: signal.Signals = signal.SIGTERM) -> Iterator[None]:
    """A server of the oracle, from its READY line to the end of the block."""
    with log.open("wb") as out:
        process = subprocess.Popen([ORACLE, *arguments], stdout=subprocess.PIPE, stderr=out)
    ready = threading.Event()

    def listen() -> None:
        for line in process.stdout:
            if line.startswith(b"READY"):
                ready.set()

    listener = threading.Thread(target=listen)
    listener.start()
    try:
        assert ready.wait(READY_SECONDS_MAX), f"{arguments[0]} not ready: {log.read_text()[-2000:]}"
        yield
    finally:
        process.send_signal(stop)
        try:
            process.wait(STOP_SECONDS_MAX)
        finally:
            process.kill()
            process.wait()
            listener.join()
            process.stdout.close()


def oracle(*arguments: str) -> list[dict[str, object]]:
    """The lines that a client command prints."""
    run = subprocess.run(
        [ORACLE, *arguments], capture_output=True, text=True, timeout=120, check=False
    )
    assert run.returncode == 0, run.stderr[-2000:]
    return [json.loads(line) for line in run.stdout.splitlines()]


def test_a_broker_takes_messages_and_the_dump_has_them(tmp_path: Path):
    ports = free_ports()
    address, broker = f"127.0.0.1:{next(ports)}", str(next(ports))
    store = tmp_path / "store"
    place = ["--store", str(store), "--namesrv", address, "--port", broker]
    load = ["--topic", "smoke", "--queues", "2", "--count", "100", "--seed", "7", "--tags", "a,b"]
    with (
        server(tmp_path / "namesrv.log", "namesrv", "--port", address.split(":")[1]),
        # The store must survive a crash anyway, and a clean stop sleeps for 10 to 17 seconds.
        server(tmp_path / "broker.log", "broker", *place, stop=signal.SIGKILL),
    ):
        acknowledged = oracle("produce", "--namesrv", address, *load)
        pulled = oracle("pull", "--namesrv", address, "--topic", "smoke")
    dumped = [
        row
        for row in oracle("dump", str(store))
        if row["type"] == "message" and row["topic"] == "smoke"
    ]
    told = sorted(row["msg_id"] for row in acknowledged)
    assert len(told) == 100
    assert sorted(row["msg_id"] for row in pulled) == told
    assert sorted(row["msg_id"] for row in dumped) == told
    by_place = {(row["queue_id"], row["queue_offset"]): row["msg_id"] for row in acknowledged}
    assert {(row["queue_id"], row["queue_offset"]): row["msg_id"] for row in dumped} == by_place
