"""A real Java pull client, reading from a real broker and from a mount in its place: ``python -m tests.mount.figures``.

Needs a JDK and Maven, and a machine that does nothing else. The same store, the same client, one after the other; the
reading of the broker comes first and warms the page cache for the tier's copy of the store.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from support import oracle

from tests.e2e.harness import program
from tests.mount.harness import MountProcess

TOPIC = "bench-0"


def pull(name_server: str, folder: Path) -> tuple[int, float]:
    """How many messages a client read, and how long that took, in seconds."""
    began_s, out = time.monotonic(), folder / "pulled"
    words = ("pull", "--namesrv", name_server, "--topic", TOPIC)
    with out.open("wb") as file:
        subprocess.run([oracle.ORACLE, *words], stdout=file, check=True)
    seconds = time.monotonic() - began_s
    with out.open("rb") as file:
        count = sum(chunk.count(b"\n") for chunk in iter(lambda: file.read(1 << 20), b""))
    out.unlink()
    return count, seconds


def file_bytes(folder: Path) -> int:
    """Size of the files of a row: a broker has to be told what they have."""
    return next(path for path in folder.rglob("0*") if path.is_file()).stat().st_size


def main() -> None:
    """Make a store, read it twice, print a JSON line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--messages", type=int, default=200_000)
    parser.add_argument("--body", type=int, default=1024)
    parser.add_argument("--queues", type=int, default=8)
    parser.add_argument("--url", help="of the tier; default: a folder")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        store, url = folder / "store", asked.url or f"file://{folder}/tier"
        sizes = ("--messages", str(asked.messages), "--body", str(asked.body))
        made = program("bench", "make-store", store, *sizes, "--queues", str(asked.queues))
        made.good()
        program("attach", store, "--to", url, "--once", "--no-index").good()
        names = {
            "mappedFileSizeCommitLog": "commitlog",
            "mappedFileSizeConsumeQueue": "consumequeue",
        }
        sizes_of = {key: file_bytes(store / name) for key, name in names.items()}
        with oracle.Broker(folder, store, **sizes_of) as broker:
            broker.start()
            by_broker, broker_s = pull(broker.address, folder)
        with MountProcess(url, folder / "log", "--listen", "127.0.0.1:0") as mount:
            by_mount, mount_s = pull(mount.address, folder)
        assert by_broker == by_mount == asked.messages, (by_broker, by_mount)
    figures = {
        "messages": asked.messages,
        "body_bytes": asked.body,
        "broker_seconds": round(broker_s, 1),
        "mount_seconds": round(mount_s, 1),
        "ratio": round(broker_s / mount_s, 2),
    }
    sys.stdout.write(json.dumps(figures) + "\n")


if __name__ == "__main__":
    main()
