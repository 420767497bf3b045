"""The command line as tests call it: in this process, or as a process; and captured stores."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
import tarfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tiered.__main__ import run
from tiered.cli.call import Surroundings
from tiered.clock import Clock, SystemClock

if TYPE_CHECKING:
    import pytest

STORES = Path(__file__).parent.parent / "data" / "stores"
Dump = Callable[[str, str], list[dict[str, Any]]]
Unpack = Callable[[str], Path]
Start = Callable[..., "subprocess.Popen[bytes]"]


@dataclass
class Ran:
    """How a command ended."""

    code: int
    out: bytes
    err: str

    @property
    def text(self) -> str:
        return self.out.decode()

    @property
    def document(self) -> Any:
        return json.loads(self.out)

    @property
    def lines(self) -> list[Any]:
        return [json.loads(line) for line in self.out.splitlines()]

    @property
    def error(self) -> str:
        """The one error line."""
        found = [line for line in self.err.splitlines() if line.startswith("tiered: error: ")]
        assert len(found) == 1, self.err
        assert "Traceback" not in self.err
        return found[0].removeprefix("tiered: error: ")


class CommandLine:
    """Runs command lines in this process."""

    def __init__(self, capture: pytest.CaptureFixture[bytes]) -> None:
        self._capture = capture
        self.environment: dict[str, str] = {
            "TIERED_ATTACH_NICE": "0"
        }  # it would be that of all tests
        self.clock: Clock = SystemClock()

    def __call__(self, *arguments: str | Path) -> Ran:
        self._capture.readouterr()
        code = run([str(a) for a in arguments], Surroundings(self.environment, self.clock))
        out, err = self._capture.readouterr()
        return Ran(code, out, err.decode())

    def good(self, *arguments: str | Path) -> Ran:
        """Run what must succeed."""
        ran = self(*arguments)
        assert ran.code == 0, ran.err
        return ran


def unpack(name: str, folder: Path) -> Path:
    with tarfile.open(STORES / f"{name}.tar.gz") as archive:
        archive.extractall(folder, filter="data")
    return folder / name


def attach(store: Path, folder: Path) -> str:
    url = f"file://{folder}"
    code = run(
        ["attach", str(store), "--to", url, "--once", "--quiet", "--nice", "0"], Surroundings({})
    )
    assert code == 0
    return url


def dump(name: str, topic: str) -> list[dict[str, Any]]:
    """What Java found in a topic, in queue order, with the fields of ``cat``."""
    found = []
    with gzip.open(STORES / f"{name}.jsonl.gz", "rt", encoding="utf-8") as lines:
        for line in lines:
            document = json.loads(line)
            if document.get("type") == "message" and document["topic"] == topic:
                if document["listed_topic"] != topic:
                    continue  # the same record, listed by a light queue
                for name_of in ("type", "system"):
                    document.pop(name_of)
                found.append({k: v for k, v in document.items() if not k.startswith("listed_")})
    return sorted(found, key=lambda message: (message["queue_id"], message["queue_offset"]))


def spawn(*arguments: str | Path, **options: object) -> subprocess.Popen[bytes]:
    """The program as a process."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("TIERED_")}
    return subprocess.Popen(
        [sys.executable, "-m", "tiered", *map(str, arguments)],
        stdout=options.pop("stdout", subprocess.PIPE),
        stderr=subprocess.PIPE,
        env={**environment, **options.pop("environment", {})},
        **options,
    )
