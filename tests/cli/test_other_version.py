"""What another version has written is told as such (exit code 2), and no command changes a byte of it."""

from __future__ import annotations

import json
import tarfile
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tiered.journal.entry import seal_text

if TYPE_CHECKING:
    from collections.abc import Callable

    from support.command_line import CommandLine

OLD = Path(__file__).parents[1] / "data" / "tiers" / "before-bundles.tar.gz"
READING = (("status", "URL"), ("ls", "URL"), ("cat", "URL", "t"))
CHANGING = (
    ("rebuild", "URL", "--apply", "-", "--accept-gaps", "--accept-unread"),
    ("rebuild", "URL", "--index", "--apply", "-"),
    ("gc", "URL", "--grace", "1ms", "--apply", "-"),
    ("gc", "URL", "--grace", "1ms", "--erase", "--apply", "-"),
    ("expire", "URL", "--ttl", "1ms", "--apply", "-"),
    ("delete-topic", "URL", "orders", "--apply", "-"),
    ("truncate", "URL", "orders", "--queue", "0", "--to", "1", "--apply", "-"),
    ("verify", "URL", "--deep", "--repair"),
    ("attach", "STORE", "--to", "URL", "--once"),
)


def bytes_of(folder: Path) -> dict[str, bytes]:
    """Every object; what the backend itself keeps aside is none."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and ".tiered-tmp" not in path.parts
    }


def refuses_all(
    tiered: CommandLine, folder: Path, store: Path, commands: tuple[tuple[str, ...], ...]
) -> None:
    """Each ends with 2 and says why; not a byte is another afterwards."""
    before = bytes_of(folder)
    places = {"URL": f"file://{folder}", "STORE": str(store)}
    for command in commands:
        ran = tiered(*(places.get(word, word) for word in command))
        assert ran.code == 2, (command, ran.err)
        assert "version" in ran.err + ran.out.decode(), (command, ran.err)
        assert bytes_of(folder) == before, command


def test_a_tier_from_before_bundles(tiered: CommandLine, basic: Path, tmp_path: Path):
    """Its entries have the format number of ours, and it was told to be damaged: rebuild made it an empty one."""
    with tarfile.open(OLD) as archive:
        archive.extractall(tmp_path / "tier", filter="data")
    commands = tuple(one for one in (*READING, *CHANGING) if one[0] != "attach")
    refuses_all(tiered, tmp_path / "tier", basic, commands)


def newest(folder: Path, ending: str = "") -> Path:
    """The newest entry, or checkpoint."""
    (journal,) = folder.glob("*/*/journal")
    return max(
        path for path in journal.iterdir() if path.name.endswith(ending or path.name[-1:])
        and path.name.endswith(".checkpoint") == bool(ending)
    )  # fmt: skip


def with_members(path: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Another document, with a checksum that holds."""
    document = json.loads(path.read_bytes().partition(b"\n")[0])
    path.chmod(0o644)
    path.write_bytes(seal_text(change(document)))


def without(name: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda found: {key: value for key, value in found.items() if key != name}


SHAPES: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "format": lambda found: {**found, "format": 9},
    "no format": without("format"),
    "no number": without("number"),
    "number is text": lambda found: {**found, "number": str(found["number"])},
}
OF_ENTRIES: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "action": lambda found: {**found, "actions": [{"do": "something new"}]},
    "no do": lambda found: {**found, "actions": [{"did": "it"}]},
    "no bundles": lambda found: {**found, "actions": [{"do": "part"}]},
    "bundles are numbers": lambda found: {**found, "actions": [{"do": "part", "bundles": [1]}]},
    "no writer": without("writer"),
}
OF_CHECKPOINTS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "no state": without("state"),
    "state is nothing": lambda found: {**found, "format": 1, "state": {}},
    "state is text": lambda found: {**found, "state": "x"},
}


@pytest.mark.parametrize("shape", [*SHAPES, *OF_ENTRIES])
def test_an_entry_of_another_version(tiered: CommandLine, basic: Path, tmp_path: Path, shape: str):
    folder = made(tiered, basic, tmp_path)
    newest(folder, ".checkpoint").unlink()  # so that the entry is needed
    with_members(newest(folder), {**SHAPES, **OF_ENTRIES}[shape])
    refuses_all(tiered, folder, basic, (*READING, *CHANGING))


@pytest.mark.parametrize("shape", [*SHAPES, *OF_CHECKPOINTS])
def test_a_checkpoint_of_another_version(
    tiered: CommandLine, basic: Path, tmp_path: Path, shape: str
):
    folder = made(tiered, basic, tmp_path)
    with_members(newest(folder, ".checkpoint"), {**SHAPES, **OF_CHECKPOINTS}[shape])
    refuses_all(tiered, folder, basic, (*READING, *CHANGING))


@pytest.mark.parametrize("shape", SHAPES)
def test_a_lease_of_another_version(tiered: CommandLine, basic: Path, tmp_path: Path, shape: str):
    """It says nothing of messages, so readers go on; whoever would change something does not."""
    folder = made(tiered, basic, tmp_path)
    (lease,) = folder.glob("*/*/lease")
    with_members(lease, SHAPES[shape])
    commands = (*CHANGING[:1], *CHANGING[2:7], CHANGING[8], ("lease", "URL", "--break"))
    refuses_all(tiered, folder, basic, commands)
    tiered.good("cat", f"file://{folder}", "orders", "--count", "1")


@pytest.mark.parametrize("kind", ["bundle", "index"])
def test_an_object_of_another_version(tiered: CommandLine, basic: Path, tmp_path: Path, kind: str):
    folder = made(tiered, basic, tmp_path)
    for path in folder.glob(f"*/*/{kind}/**/*"):
        if path.is_file():
            data = bytearray(path.read_bytes())
            if kind == "bundle":  # the version's low byte, and the footer's checksum
                data[-11] = 9
                data[-8:-4] = zlib.crc32(data[-32:-8]).to_bytes(4, "big")
            else:
                data[-15] = 9
                covered = len(data) - int.from_bytes(data[-32:-28], "big") - 40
                covered -= 4 * int.from_bytes(data[-24:-20], "big")
                data[-12:-8] = zlib.crc32(data[covered:-12]).to_bytes(4, "big")
            path.chmod(0o644)
            path.write_bytes(bytes(data))
    refuses_all(tiered, folder, basic, (("verify", "URL", "--deep", "--repair"),))
    if kind == "index":
        refuses_all(tiered, folder, basic, (CHANGING[1],))
    else:
        (journal,) = folder.glob("*/*/journal")
        for path in journal.iterdir():
            path.unlink()
        refuses_all(tiered, folder, basic, CHANGING[:1])


def made(tiered: CommandLine, store: Path, tmp_path: Path) -> Path:
    """A tier of ours, with an index."""
    url = f"file://{tmp_path}/tier"
    tiered.good("attach", store, "--to", url, "--once", "--seal")
    return tmp_path / "tier"
