"""The examples of every ``--help`` run as they stand: only places and addresses are put in for those that they name.

What serves until it is told to stop is told so. ``tiered bench`` takes minutes: ``test_demo_bench`` runs it with fewer
messages.
"""

from __future__ import annotations

import json
import shlex
import shutil
import signal
import tempfile
from typing import TYPE_CHECKING

import pytest
from support.captures import unpack

from tiered.__main__ import run
from tiered.cli.call import Surroundings
from tiered.cli.frame import program

if TYPE_CHECKING:
    from pathlib import Path
    from subprocess import Popen

    from support.command_line import CommandLine, Start
    from support.servers import S3Server

EXAMPLES = sorted(
    {
        line
        for path, command in program().walk()
        if path.split()[0] != "bench"
        for line in (command.epilog or "").splitlines()
    }
)
SERVES = {
    "tiered attach s3": ("tiering", 0),
    "tiered mount file": ("serving", 0),
    "tiered web": ("pages", 0),
    "tiered store tail --follow": ("", 143),
    "tiered timer run --to /data": ("handing over", 0),
}
"""What goes on until it is stopped, by the words that it has: what it says first, and how it ends then."""
CANNOT = {
    "tiered hand-back": (2, "no mount"),
    "tiered mount --namesrv": (3, "name server 127.0.0.1:1 does not answer"),
    "tiered timer run --to namesrv": (3, "127.0.0.1:1"),
    "tiered timer cancel": (2, "no pending message has the id"),
}
"""What asks for what is not here: its exit code, and what it says."""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A broker's store with timers, its tier, and an archive."""
    root = tmp_path_factory.mktemp("examples")

    def good(*arguments: str | Path) -> None:
        assert (
            run([*map(str, arguments), "--quiet"], Surroundings({"TIERED_ATTACH_NICE": "0"})) == 0
        )

    store, tier, archive = root / "store", f"file://{root}/tier", f"file://{root}/parquet"
    unpack("s02-delay-timer", root).rename(store)
    topics = (("orders", "order", 2000), ("prices", "item", 20), ("%RETRY%workers", "a", 3))
    lines = [
        json.dumps({"topic": topic, "keys": f"{key}-{number}", "tags": "paid", "body": "any"})
        for topic, key, count in topics
        for number in range(count)
    ]
    (root / "lines").write_text("\n".join(lines))
    good("store", "topic", store, "prices", "--queues", "1", "--compacted")
    good("store", "put", store, root / "lines")
    good("attach", store, "--to", tier, "--once", "--seal")
    good("archive", tier, "--to", archive)
    good("compact", tier, "--topic", "prices", "--archive", archive, "--apply", "-")
    good("timer", "import", store, "--to", tier, "--near", "0s")
    return root


def in_bucket(folder: Path, server: S3Server) -> str:
    """The objects of a folder, in a bucket of their own; its URL."""
    bucket, client = server.bucket(), server.client()
    try:
        for path in folder.rglob("*"):
            if path.is_file():
                key = f"prefix/{path.relative_to(folder)}"
                client.put_object(Bucket=bucket, Key=key, Body=path.read_bytes())
    finally:
        client.close()
    return f"s3://{bucket}/prefix"


def here(example: str, tmp_path: Path, made: Path, server: S3Server) -> str:
    """The example with our places in it."""
    for name in ("store", "tier", "parquet"):
        shutil.copytree(made / name, tmp_path / name)
    if "/data/other-store" in example:
        shutil.copytree(made / "store", tmp_path / "other-store")
    is_new = any(f"tiered {command}" in example for command in ("store create", "restore"))
    store = tmp_path / ("new" if is_new else "store")
    places = {
        "file:///tmp/tier": f"file://{tmp_path}/tier",
        "file:///tmp/parquet": f"file://{tmp_path}/parquet",
        "/data/rocketmq/store": str(store),
        "/tmp/store": str(store),
        "/data/store": str(store),
        "/data/other-store": str(tmp_path / "other-store"),
        "/data/timers": str(tmp_path / "timers"),
        "/tmp/": f"{tmp_path}/",
        "10.0.0.5:9876": "127.0.0.1:1",
        "10.0.0.7:9876,10.0.0.8:9876": "127.0.0.1:1",
        ":10911": ":0" if "127" in example else "127.0.0.1:0",
        ":9400": "127.0.0.1:0",
        ":8321": ":0" if "127" in example else "127.0.0.1:0",
    }
    if "s3://bucket/prefix" in example:
        places["s3://bucket/prefix"] = in_bucket(tmp_path / "tier", server)
    if "s3://bucket2/parquet" in example:
        places["s3://bucket2/parquet"] = in_bucket(tmp_path / "parquet", server)
    done, words = "", example
    while words:  # from left to right, so that nothing that was put in is replaced
        name = next((name for name in places if words.startswith(name)), words[0])
        done, words = done + places.get(name, name), words[len(name) :]
    return done


def fits(example: str, has: str) -> bool:
    return all(part in example for part in has.split()) and example.startswith("tiered")


@pytest.mark.parametrize("example", EXAMPLES)
def test_example(  # noqa: PLR0917 (fixtures)
    example: str,
    tiered: CommandLine,
    start: Start,
    made: Path,
    ministack: S3Server,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    (tmp_path / "tiered.toml").write_text("quiet = true\n")
    one = {"topic": "orders", "queue_offset": 2000, "body": "one"}
    (tmp_path / "messages.jsonl").write_text(json.dumps(one))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    line = here(example, tmp_path, made, ministack)
    line = line.removeprefix('eval "$(').removesuffix(')"').split(" > ")[0]
    said, _, piped = line.rpartition(" | ")
    words = shlex.split(piped)
    at = words.index("tiered")
    for word in words[:at]:
        name, _, tiered.environment[name] = word.partition("=")
    if said:
        line = shlex.split(said)[1]
        (tmp_path / "stdin").write_text(line + "\n")
        words.append(str(tmp_path / "stdin"))
    for name, value in ministack.environment.items():
        monkeypatch.setenv(name, value)
    for known, (first, code) in SERVES.items():
        if fits(example, known):
            stopped(start(*words[at + 1 :]), first, code)
            return
    code, told = next((end for has, end in CANNOT.items() if fits(example, has)), (0, ""))
    ran = tiered(*words[at + 1 :])
    assert ran.code == code, ran.err
    assert told in ran.err


def stopped(process: Popen[bytes], first: str, code: int) -> None:
    """Wait for its first words, stop it, and look how it ends."""
    assert process.stderr is not None
    assert process.stdout is not None
    with process:
        stream = process.stderr if first else process.stdout
        heard = stream.readline().decode()
        while first not in heard and (line := stream.readline().decode()):
            heard += line
        process.send_signal(signal.SIGTERM)
        err = process.stderr.read().decode()
        assert first in heard, heard + err
        assert process.wait(60) == code, err
