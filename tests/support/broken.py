"""A folder tier of two queues with keys, and bits flipped in records of it; for commands that meet damage."""

from __future__ import annotations

import base64
import json
import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from support.command_line import here

if TYPE_CHECKING:
    from pathlib import Path

COUNT = 400
BODY_BYTES = 1200
"""So that a queue's records have several blocks of 64 KiB."""
TOPIC = "orders"
SOUND = "payments"
"""A topic of which nothing is ever damaged."""


@dataclass
class Broken:
    """A tier in a folder.

    Attributes:
        folder: It.
        store: The broker's, whole.
        bodies: By topic, queue and offset.
    """

    folder: Path
    store: Path
    bodies: dict[tuple[str, int, int], bytes] = field(default_factory=dict)
    _before: dict[Path, bytes] = field(default_factory=dict)

    @property
    def url(self) -> str:
        return f"file://{self.folder}"

    def flip(self, queue_id: int, offset: int, topic: str = TOPIC) -> None:
        """Flip a bit of a message's body."""
        body = self.bodies[topic, queue_id, offset]
        for path in sorted(self.folder.rglob("*")):
            if path.is_file() and (at := (data := path.read_bytes()).find(body)) >= 0:
                self._before.setdefault(path, data)
                path.chmod(0o644)
                path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
                return
        raise AssertionError(f"no object has {topic}/{queue_id}@{offset}")

    def mend(self) -> None:
        """Put back what was there, byte for byte."""
        for path, data in self._before.items():
            path.write_bytes(data)
        self._before.clear()


def keys_of(number: int) -> str:
    """Keys of a message: each key of two messages, neighbours by half of a queue."""
    return f"key-{number % (COUNT // 2)}"


def build(folder: Path, *, seal: bool = True) -> Broken:
    """Make it, with records as they are, not packed.

    Args:
        folder: Where; there is one.
        seal: Everything is sealed.
    """
    rng = random.Random(7)
    made = Broken(folder / "tier", folder / "store")
    lines = folder / "messages.jsonl"
    with lines.open("w") as out:
        for topic in (TOPIC, SOUND):
            for number in range(COUNT):
                for queue_id in (0, 1):
                    body = made.bodies[topic, queue_id, number] = rng.randbytes(BODY_BYTES)
                    row = {
                        "topic": topic,
                        "queue_id": queue_id,
                        "keys": keys_of(number),
                        "body_base64": base64.b64encode(body).decode(),
                    }
                    out.write(json.dumps(row) + "\n")
    here("store", "create", made.store).good()
    here("store", "put", made.store, lines).good()
    options = ("--once", "--compress", "none", *(("--seal",) if seal else ()))
    here("attach", made.store, "--to", made.url, *options).good()
    return made
