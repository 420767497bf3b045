"""What goes wrong around the program, run as a process: its exit code, what it says and where, and what it leaves."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from support import captures, command_line, tier_checks
from support.command_line import here, program
from support.servers import S3Server, free_port
from support.waiting import until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping


def refused(ran: command_line.Ran, code: int, *words: str | Path) -> None:
    """It ended with ``code``, printed nothing, and its one error line has all these words."""
    assert ran.code == code, ran
    assert ran.out == b""
    for word in words:
        assert str(word) in ran.error


# -- the store ------------------------------------------------------------------------------------


def make_rocksdb_queues(folder: Path) -> None:
    (folder / "commitlog").mkdir(parents=True)
    (folder / "consumequeue").mkdir()
    (folder / "consumequeue" / "CURRENT").write_text("MANIFEST-000001\n")


def make_other(folder: Path) -> None:
    folder.mkdir()
    (folder / "notes.txt").write_text("nothing of a broker's")


NO_STORES: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing": (lambda _folder: None, "no such directory"),
    "a file": (lambda folder: folder.write_text("x"), "not a directory"),
    "empty": (Path.mkdir, "an empty directory, not a store"),
    "another": (make_other, "not a RocketMQ store"),
    "RocksDB": (make_rocksdb_queues, "RocksDB"),
}


@pytest.mark.parametrize("kind", NO_STORES)
def test_what_is_no_store_is_named_and_nothing_is_made(kind: str, tmp_path: Path) -> None:
    make, words = NO_STORES[kind]
    make(tmp_path / "store")
    ran = program("attach", tmp_path / "store", "--to", f"file://{tmp_path}/tier", "--once")
    refused(ran, 2, words, tmp_path / "store")
    assert not (tmp_path / "tier").exists()


def test_a_log_with_a_hole_names_the_missing_file(basic: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    shutil.copytree(basic, store)
    (store / "commitlog" / f"{5 * 262_144:020d}").unlink()
    ran = program("attach", store, "--to", f"file://{tmp_path}/tier", "--once")
    refused(ran, 5, f"no file {5 * 262_144:020d}", store / "commitlog")


def test_a_tier_inside_the_store(basic: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    shutil.copytree(basic, store)
    (tmp_path / "link").symlink_to(store)
    for place in (store / "tier of it", tmp_path / "link" / "tier of it", store):
        url = place.as_uri()
        refused(attach_to(store, url), 2, "inside the broker's store directory", store)
    assert sorted(p.name for p in store.iterdir()) == sorted(p.name for p in basic.iterdir())


def test_a_tier_where_a_link_in_the_store_leads(basic: Path, tmp_path: Path) -> None:
    """A commit log that lies elsewhere is brought in by a link; a broker may refuse to start on what is strange there."""
    store, log = tmp_path / "store", tmp_path / "disk" / "log"
    shutil.copytree(basic, store)
    log.parent.mkdir()
    shutil.move(store / "commitlog", log)
    (store / "commitlog").symlink_to(log)
    url = (log / "tier").as_uri()
    refused(attach_to(store, url), 2, "inside the broker's store directory", log)
    assert not (log / "tier").exists()
    attach_to(store, (log.parent / "tier").as_uri()).good()


# -- permissions ----------------------------------------------------------------------------------


@pytest.fixture
def anybody() -> Iterator[Path]:
    """A folder that every user reaches."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        yield Path(name)


UNPRIVILEGED = """
import os, sys
from tiered.__main__ import run
warm_up, arguments = sys.argv[1 : sys.argv.index("--")], sys.argv[sys.argv.index("--") + 1 :]
assert run(warm_up) == 0  # everything is loaded: another user may not be able to read this Python's files
os.setgroups([])
os.setegid(65534)
os.seteuid(65534)
sys.exit(run(arguments))
"""


@pytest.fixture
def unprivileged(basic: Path, tmp_path: Path) -> Callable[..., command_line.Ran]:
    """Runs the program as a user for whom permissions count."""
    warm = ("attach", basic, "--to", f"file://{tmp_path}/warm", "--once", "--quiet", "--topics", "")

    def run(*arguments: str | Path) -> command_line.Ran:
        if os.geteuid():
            return program(*arguments)
        words = tuple(map(str, arguments))
        done = subprocess.run(
            (sys.executable, "-c", UNPRIVILEGED, *map(str, warm), "--", *words),
            capture_output=True,
            env=command_line.environment(),
            timeout=120,
            check=False,
        )
        return command_line.Ran(words, done.returncode, done.stdout, done.stderr.decode())

    return run


def test_a_store_that_may_not_be_read(
    basic: Path, anybody: Path, unprivileged: Callable[..., command_line.Ran]
) -> None:
    store = anybody / "store"
    shutil.copytree(basic, store)
    (anybody / "tier").mkdir()
    (anybody / "tier").chmod(0o777)
    to = f"file://{anybody}/tier"
    for part in (store / "commitlog", store / "consumequeue", store):
        part.chmod(0o000)
        try:
            ran = unprivileged("attach", store, "--to", to, "--once")
        finally:
            part.chmod(0o755)
        refused(ran, 2, part, "Permission denied")
    assert not list((anybody / "tier").iterdir())


def test_a_tier_that_may_not_be_written_or_read(
    basic: Path, anybody: Path, unprivileged: Callable[..., command_line.Ran]
) -> None:
    place = anybody / "tier"
    place.mkdir()
    shutil.copytree(basic, anybody / "store")
    store, to = anybody / "store", f"file://{place}"
    place.chmod(0o555)
    refused(unprivileged("attach", store, "--to", to, "--once"), 3, place, "permission")
    place.chmod(0o755)
    here("attach", store, "--to", to, "--once").good()
    place.chmod(0o000)
    try:
        refused(unprivileged("status", to), 3, place, "permission")
    finally:
        place.chmod(0o755)


# -- S3 -------------------------------------------------------------------------------------------


def s3_environment(endpoint: str, key: str = "test", secret: str = "test") -> dict[str, str]:
    nothing = {"AWS_CONFIG_FILE": "/nonexistent", "AWS_SHARED_CREDENTIALS_FILE": "/nonexistent"}
    return {**S3Server("none", endpoint, key, secret).environment, **nothing}


def attach_to(
    store: Path, url: str, *options: str, env: Mapping[str, str] | None = None
) -> command_line.Ran:
    return program("attach", store, "--to", url, "--once", *options, env=env)


@pytest.mark.parametrize("url", ["s3://", "s3:///prefix", "s4://bucket/x", "bucket/x", "file:x"])
def test_what_is_no_url(url: str, basic: Path) -> None:
    refused(attach_to(basic, url, env=s3_environment("http://127.0.0.1:1")), 2)


@contextmanager
def black_hole() -> Iterator[str]:
    """A server that takes every connection and never says a word."""
    kept: list[socket.socket] = []

    def accept(listener: socket.socket) -> None:
        with suppress(OSError):
            while True:
                kept.append(listener.accept()[0])

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=accept, args=(listener,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()
            for connection in kept:
                connection.close()


def test_servers_that_refuse_or_are_unknown_or_never_answer(basic: Path) -> None:
    """All at once: it is waiting, mostly."""
    attach = ("attach", basic, "--once", "--to", "s3://bucket/x")
    look = ("ls", "s3://bucket/x")
    with black_hole() as silent, ThreadPoolExecutor() as pool:
        tries = (
            (attach, f"http://127.0.0.1:{free_port()}"),
            (look, "http://no-such-host.invalid"),
            ((*attach, "--request-timeout", "1"), silent),
        )
        ended = [pool.submit(program, *words, env=s3_environment(to)) for words, to in tries]
        for (_, endpoint), ran in zip(tries, ended, strict=True):
            refused(ran.result(), 3, endpoint, "check that the store can be reached")


def test_a_bucket_that_is_not_there(ministack: S3Server, basic: Path) -> None:
    env = s3_environment(ministack.endpoint_url)
    refused(attach_to(basic, "s3://no-such-bucket/x", env=env), 3, "no-such-bucket")
    refused(program("status", "s3://no-such-bucket/x", env=env), 3, "no-such-bucket")


@pytest.mark.go
def test_wrong_keys(minio: S3Server, basic: Path) -> None:
    url = f"s3://{minio.bucket()}/x"
    for key, secret in ((minio.access_key, "wrong-secret"), ("nobody", "wrong-secret")):
        env = s3_environment(minio.endpoint_url, key, secret)
        ran = attach_to(basic, url, env=env)
        refused(ran, 3, minio.endpoint_url, "check the access key")
        assert "wrong-secret" not in ran.err
        refused(program("ls", url, env=env), 3, "check the access key")
    good = s3_environment(minio.endpoint_url, minio.access_key, minio.secret_key)
    assert attach_to(basic, url, env=good).code == 0


def test_no_keys_at_all(ministack: S3Server, basic: Path) -> None:
    env = s3_environment(ministack.endpoint_url) | {"AWS_EC2_METADATA_DISABLED": "true"}
    env |= {"AWS_ACCESS_KEY_ID": "", "AWS_SECRET_ACCESS_KEY": ""}
    refused(attach_to(basic, "s3://bucket/x", env=env), 2, "credentials", "AWS_ACCESS_KEY_ID")


# -- the tier -------------------------------------------------------------------------------------


def test_the_tier_of_another_store(
    stores: Callable[[str], Path], basic: Path, tmp_path: Path
) -> None:
    url = f"file://{tmp_path}"
    attach_to(basic, url).good()
    before = sorted(tmp_path.rglob("*"))
    refused(attach_to(stores("s10-consumers"), url), 2, "belongs to another store", tmp_path)
    assert sorted(tmp_path.rglob("*")) == before
    own_place = ("--cluster", "cluster-a", "--broker", "broker-b")
    attach_to(stores("s10-consumers"), url, *own_place).good()
    refused(program("ls", url), 2, "broker-a", "broker-b", "--broker")
    program("ls", url, "--broker", "broker-b").good()


def test_a_tier_of_a_newer_version(basic: Path, tmp_path: Path) -> None:
    url = f"file://{tmp_path}"
    attach_to(basic, url, "--topics", "sparse").good()
    (journal,) = tmp_path.glob("*/*/journal")
    numbers = [int(path.name) for path in journal.iterdir() if path.name.isdigit()]
    newer = {"format": 2, "number": max(numbers) + 1, "epoch": 1, "writer": "0badcafe"}
    line = json.dumps(newer | {"time_ms": 0, "previous": 0, "actions": []}).encode()
    (journal / f"{max(numbers) + 1:020d}").write_bytes(b"%s\n%08x\n" % (line, zlib.crc32(line)))
    before = sorted(tmp_path.rglob("*"))
    for ran in (
        attach_to(basic, url),
        program("status", url),
        program("cat", url, "sparse"),
        program("verify", url),
    ):
        refused(ran, 2, "another version", "journal")
    assert sorted(tmp_path.rglob("*")) == before


def test_a_damaged_object_is_found_and_nothing_of_it_is_printed(
    basic: Path, tmp_path: Path
) -> None:
    url = f"file://{tmp_path}"
    attach_to(basic, url, *command_line.SMALL).good()
    objects = program("ls", url, "orders", "--objects", "-o", "jsonl").rows
    parts = [(row["key"], part) for row in objects for part in row["parts"]]
    key, part = next(  # not the first of its queue
        one for one in parts if one[1]["queue_id"] == 2 and one[1]["queue_offset"] > 0
    )
    damaged = tmp_path / key
    data = bytearray(damaged.read_bytes())
    data[part["start"] + part["size_bytes"] // 3] ^= 0x10
    damaged.chmod(0o644)
    damaged.write_bytes(data)
    ran = program("cat", url, "orders", "--queue", "2")
    assert ran.code == 5
    assert damaged.name in ran.error
    found = ran.rows
    expected = [m for m in captures.captured("s01-basic").messages["orders"] if m["queue_id"] == 2]
    assert 0 < len(found) < len(expected)
    assert [m["msg_id"] for m in found] == [m["msg_id"] for m in expected[: len(found)]]
    assert program("cat", url, "orders", "--queue", "1").code == 0
    assert program("verify", url).code == 0
    verified = program("verify", url, "--deep", "--json")
    assert verified.code == 1
    assert damaged.name in verified.out.decode()


# -- a full disk ----------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ("mount", "-t", "tmpfs", "-o", "size=1m", "none", str(disk))
    try:
        done = subprocess.run(mount, capture_output=True, text=True, check=False)
        is_mounted, complaint = done.returncode == 0, done.stderr.strip()
    except OSError as error:
        is_mounted, complaint = False, str(error)
    if not is_mounted:
        pytest.skip(
            "LEFT OUT: a file system that fills up must be mounted, which takes root on Linux: "
            f"{complaint}"
        )
    try:
        yield disk
    finally:
        subprocess.run(("umount", str(disk)), check=True)


def test_a_full_disk(basic: Path, small_disk: Path) -> None:
    """What is durable stays and is sound; with more room it goes on from there."""
    url = f"file://{small_disk}/tier"
    ran = attach_to(
        basic, url, *command_line.SMALL, "--give-up-seconds", "3", "--drain-seconds", "1"
    )
    refused(ran, 3, small_disk)
    assert "space" in ran.err
    resize = ("mount", "-o", "remount,size=2m", str(small_disk))
    subprocess.run(resize, check=True)
    before = tier_checks.bounds(url)
    assert before
    tier_checks.check_sound(url)
    subprocess.run(("mount", "-o", "remount,size=16m", str(small_disk)), check=True)
    said = json.loads(attach_to(basic, url, "--json").good().out)
    assert said["messages"] == 2613 - sum(end - low for low, end in before.values())
    tier_checks.check_equal(url, captures.captured("s01-basic"))
    tier_checks.check_sound(url, basic)


def test_a_disk_that_is_full_for_a_while(basic: Path, small_disk: Path, tmp_path: Path) -> None:
    """A follower waits until there is room, also longer than its lease lasts, and goes on by itself."""
    url = f"file://{small_disk}/tier"
    log = tmp_path / "attach.log"
    with log.open("wb") as complaints:
        options = (*command_line.SMALL, "--freshness", "0.2", "--lease-seconds", "1")
        process = subprocess.Popen(
            command_line.command(("attach", basic, "--to", url, *options)), stderr=complaints
        )
    try:
        until(lambda: "space" in log.read_text(), "the full disk in the log")
        time.sleep(4)
        assert process.poll() is None
        subprocess.run(("mount", "-o", "remount,size=16m", str(small_disk)), check=True)
        dump = captures.captured("s01-basic")
        until(lambda: tier_checks.bounds(url) == dump.bounds, "everything in the tier")
        process.terminate()
        assert process.wait(120) == 0
    finally:
        process.kill()
        process.wait()
    tier_checks.check_equal(url, dump)
    tier_checks.check_sound(url, basic)
