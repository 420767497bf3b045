"""Each wrong input has its own clear message, one line, and the exit code of the contract."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

import pytest
from support.command_line import CommandLine, attach

import backends.wrapping

if TYPE_CHECKING:
    from pathlib import Path

    from support.captures import Unpack


@pytest.fixture
def few_tries(monkeypatch: pytest.MonkeyPatch):
    """Give up at once; how often is tried is tested with the retrying store."""
    policy = backends.wrapping.RetryPolicy(tries_max=2, first_delay_s=0.01)
    monkeypatch.setattr(backends.wrapping, "RetryPolicy", lambda: policy)
    for name, value in (("ACCESS_KEY_ID", "a"), ("SECRET_ACCESS_KEY", "b"), ("REGION", "r")):
        monkeypatch.setenv(f"AWS_{name}", value)
    for name in ("AWS_PROFILE", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"):
        monkeypatch.delenv(name, raising=False)
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, "/nonexistent")


def make_rocksdb_queues(folder: Path) -> None:
    (folder / "consumequeue").mkdir(parents=True)
    (folder / "consumequeue" / "CURRENT").write_text("MANIFEST-000001\n")
    (folder / "commitlog").mkdir()


def make_dledger(folder: Path) -> None:
    (folder / "dledger-n0").mkdir(parents=True)


def make_other(folder: Path) -> None:
    folder.mkdir()
    (folder / "holiday.jpg").write_bytes(b"\xff\xd8")


STORES = {
    "missing": (lambda _folder: None, "no such directory"),
    "empty": (lambda folder: folder.mkdir(), "an empty directory, not a store"),
    "a file": (lambda folder: folder.write_text("x"), "not a directory"),
    "no store": (make_other, "not a RocketMQ store"),
    "RocksDB": (make_rocksdb_queues, "RocksDB, which is not supported"),
    "DLedger": (make_dledger, "DLedger, which is not supported"),
}


@pytest.mark.parametrize("kind", STORES)
def test_what_is_no_store(kind: str, tiered: CommandLine, basic_tier: str, tmp_path: Path):
    make, words = STORES[kind]
    make(tmp_path / "store")
    to = f"file://{tmp_path}/tier"
    for command in (
        ("attach", tmp_path / "store", "--to", to, "--once"),
        ("status", basic_tier, "--store", tmp_path / "store"),
        ("verify", basic_tier, "--store", tmp_path / "store"),
    ):
        ran = tiered(*command)
        assert ran.code == 2, ran.err
        assert words in ran.error
        assert str(tmp_path / "store") in ran.error
        assert ran.out == b""
    assert not (tmp_path / "tier").exists()


URLS = {
    "a bare name": ("tier", "a folder is written as ./tier"),
    "no bucket": ("s3://", "no bucket"),
    "a host": ("file://host/tier", "write file:///"),
    "relative": ("file:tier", "relative path"),
    "unknown scheme": ("frob://x/y", "nothing opens frob:// URLs; give file:///folder"),
    "nothing": ("", "not a URL"),
}


@pytest.mark.parametrize("kind", URLS)
def test_what_is_no_url(kind: str, tiered: CommandLine, basic: Path, tmp_path: Path):
    url, words = URLS[kind]
    url = url.format(tmp=tmp_path)
    commands: list[tuple[str | Path, ...]] = [("attach", basic, "--to", url, "--once")]
    commands += [("status", url), ("ls", url), ("cat", url, "t"), ("verify", url)]
    for command in commands:
        ran = tiered(*command)
        assert ran.code == 2, ran.err
        assert words in ran.error


def test_a_path_is_a_tier(
    tiered: CommandLine, basic: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Whole or relative; and it is the same tier as by its URL."""
    tiered.good("attach", basic, "--to", tmp_path / "a tier", "--once")
    monkeypatch.chdir(tmp_path / "a tier")
    by_url = tiered.good("ls", f"file://{tmp_path}/a%20tier", "--json").document
    for path in (str(tmp_path / "a tier"), ".", "../a tier", "./"):
        assert tiered.good("ls", path, "--json").document == by_url
    assert tiered.good("status", ".", "--json").document["url"] == f"file://{tmp_path}/a%20tier"
    tiered.good("doctor", ".")


def test_a_store_where_a_tier_is_wanted_and_the_other_way_round(
    tiered: CommandLine, basic: Path, basic_tier: str, unpacked: Unpack, tmp_path: Path
):
    for command in ("status", "ls", "verify", "gc", "lease"):
        ran = tiered(command, basic)
        assert ran.code == 2
        assert ran.error.startswith(
            f"this is a RocketMQ broker's store, not a tier (file://{basic})"
        )
    folder = basic_tier.removeprefix("file://")
    for command in (
        ("attach", folder, "--to", tmp_path / "new", "--once"),
        ("store", "tail", folder),
    ):
        ran = tiered(*command)
        assert ran.code == 2
        assert "this is a tier, and a broker's store is wanted here" in ran.error
    other = unpacked("s01-basic")
    before = sorted(other.rglob("*"))
    ran = tiered("attach", basic, "--to", other, "--once")
    assert (ran.code, "the tier would lie in a RocketMQ broker's store" in ran.error) == (2, True)
    assert sorted(other.rglob("*")) == before


def test_a_prefix_that_leaves_no_room_for_keys(tiered: CommandLine, basic: Path, tmp_path: Path):
    too_long = ("--broker", "b" * 150)
    nobody = ("--endpoint-url", "http://127.0.0.1:1")  # is not even asked
    for to in ((f"file://{tmp_path}/tier",), ("s3://bucket", *nobody)):
        ran = tiered("attach", basic, "--once", *too_long, "--cluster", "c", "--to", *to)
        assert (ran.code, ran.out) == (2, b"")
        assert "leave room for every topic" in ran.error
        assert "--cluster and --broker" in ran.error
    assert not (tmp_path / "tier").exists()
    ran = tiered(
        "attach",
        basic,
        "--once",
        "--broker",
        "b" * 130,
        "--cluster",
        "c",
        "--to",
        f"file://{tmp_path}/tier",
    )
    assert ran.code == 0, ran.err


def test_what_cannot_keep_two_writers_apart_is_refused_unasked(tiered: CommandLine, basic: Path):
    """By what is known of the scheme: a host that is not there would be waited for."""
    ran = tiered("attach", basic, "--once", "--to", "http://no-such-host.invalid/tier")
    assert ran.code == 2
    assert "does not write conditionally" in ran.error
    assert "(http://no-such-host.invalid/tier)" in ran.error


def test_a_tier_without_timers_says_so(tiered: CommandLine, basic_tier: str):
    for words in (("ls", basic_tier), ("show", basic_tier, "12"), ("cancel", basic_tier, "id")):
        ran = tiered("timer", *words)
        assert (ran.code, ran.out) == (2, b"")
        assert "there are no timers here" in ran.error


@pytest.mark.parametrize("made", [True, False])
def test_an_empty_place_is_no_tier(made: bool, tiered: CommandLine, tmp_path: Path):
    if made:
        (tmp_path / "place").mkdir()
    url = f"file://{tmp_path}/place"
    for command in (("status", url), ("ls", url), ("cat", url, "t"), ("verify", url)):
        ran = tiered(*command)
        assert (ran.code, ran.out) == (2, b"")
        assert "there is no tier here" in ran.error
    assert (tmp_path / "place").exists() == made


@pytest.mark.usefixtures("few_tries")
@pytest.mark.parametrize("command", ["attach", "ls", "status", "verify"])
def test_an_endpoint_that_does_not_answer(command: str, tiered: CommandLine, basic: Path):
    with socket.create_server(("127.0.0.1", 0)) as server:
        refused = f"http://127.0.0.1:{server.getsockname()[1]}"
    for endpoint in (refused, "http://no-such-host.invalid"):
        url = "s3://bucket/prefix"
        place = (basic, "--to", url, "--once") if command == "attach" else (url,)
        ran = tiered(command, *place, "--endpoint-url", endpoint, "--request-timeout", "2")
        assert ran.code == 3, ran.err
        assert endpoint in ran.error
        assert "check that the store can be reached" in ran.error


@pytest.mark.usefixtures("few_tries")
def test_an_endpoint_that_is_none(tiered: CommandLine):
    ran = tiered("ls", "s3://bucket/prefix", "--endpoint-url", "ftp://127.0.0.1")
    assert ran.code == 2
    assert "http" in ran.error


def test_no_url_of_the_tier(tiered: CommandLine, basic: Path):
    ran = tiered("attach", basic, "--once")
    assert ran.code == 2
    assert "--to" in ran.error


def test_a_topic_or_queue_that_is_not_there(tiered: CommandLine, basic_tier: str):
    for command in ("cat", "ls"):
        ran = tiered(command, basic_tier, "no-such-topic")
        assert ran.code == 2
        assert "no topic no-such-topic" in ran.error
        assert "`tiered ls URL` lists the topics" in ran.error
    ran = tiered("cat", basic_tier, "orders", "--queue", "9")
    assert ran.code == 2
    assert "no queue 9, only 0-3" in ran.error


@pytest.mark.parametrize(
    "words",
    [
        ("cat", "order"),
        ("ls", "ORDERS"),
        ("query", "oders", "--key", "k"),
        ("delete-topic", "Orders"),
    ],
)
def test_a_misspelled_topic_gets_a_suggestion(
    words: tuple[str, ...], tiered: CommandLine, basic_tier: str
):
    ran = tiered(words[0], basic_tier, *words[1:])
    assert ran.code == 2
    assert ran.error.endswith("; did you mean 'orders'?")


@pytest.mark.parametrize("name", ["bundle.zip", "bundle.tar", "bundle"])
def test_a_support_bundle_under_a_name_of_another_form(
    name: str, tiered: CommandLine, basic_tier: str, tmp_path: Path
):
    ran = tiered("support-bundle", basic_tier, tmp_path / name)
    assert (ran.code, "a support bundle is a .tar.gz" in ran.err) == (2, True), ran.err
    assert not (tmp_path / name).exists()
    tiered("support-bundle", basic_tier, tmp_path / "bundle.tgz").good()


def test_the_address_of_an_s3_server_is_no_tier(tiered: CommandLine):
    ran = tiered("ls", "http://127.0.0.1:1/bucket/prefix")
    assert "s3://bucket/prefix" in ran.error
    assert "--endpoint-url" in ran.error


def test_the_tier_of_another_store_is_refused(
    tiered: CommandLine, basic: Path, packed: Path, tmp_path: Path
):
    """Both are broker-a of cluster-a, but not the same directory."""
    url = f"file://{tmp_path}"
    tiered.good("attach", basic, "--to", url, "--once", "--topics", "sparse")
    ran = tiered("attach", packed, "--to", url, "--once")
    assert ran.code == 2
    assert "belongs to another store" in ran.error
    tiered.good("attach", packed, "--to", url, "--once", "--broker", "other", "--topics", "mixed")


def test_several_brokers_must_be_told_apart(tiered: CommandLine, basic: Path, tmp_path: Path):
    url = f"file://{tmp_path}"
    for broker in ("a", "b"):
        only = ("--broker", broker, "--topics", "sparse")
        tiered.good("attach", basic, "--to", url, "--once", *only)
    ran = tiered("cat", url, "sparse")
    assert ran.code == 2
    assert "cluster-a/a, cluster-a/b" in ran.error
    assert len(tiered.good("cat", url, "sparse", "--broker", "a").rows) == 5
    assert len(tiered.good("--broker", "b", "cat", url, "sparse").rows) == 5
    wrong = tiered("ls", url, "--broker", "c")
    assert wrong.code == 2
    brokers = tiered.good("status", url, "--json").document["brokers"]
    assert [broker["broker"] for broker in brokers] == ["a", "b"]
    assert tiered("ls", url, "--cluster", "x", "--broker", "a").code == 2


def test_a_damaged_journal_is_damage(tiered: CommandLine, unpacked: Unpack, tmp_path: Path):
    url = attach(unpacked("s08-crash-continue"), tmp_path / "tier")
    for file in (tmp_path / "tier").rglob("journal/*"):
        file.chmod(0o600)
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 1
        file.write_bytes(data)
    for command in (("status", url), ("ls", url), ("cat", url, "load")):
        ran = tiered(*command)
        assert (ran.code, ran.out) == (5, b"")
        assert "journal/" in ran.error
    checked = tiered("verify", url, "--json")
    assert checked.code == 1
    assert checked.document["problem_counts"]["journal"] >= 1


@pytest.mark.parametrize(
    "words", [("verify", "--store"), ("status", "--store"), ("gc", "--plan"), ("gc", "--apply")]
)
def test_an_empty_name_is_not_taken_for_no_option(
    tiered: CommandLine, basic_tier: str, words: tuple[str, str]
):
    """As of a variable that is not set: `verify --store "$STORE"` held the tier against nothing, and called it whole."""
    command, option = words
    ran = tiered(command, basic_tier, option, "")
    assert (ran.code, option in ran.error, "names nothing" in ran.error) == (2, True, True)
