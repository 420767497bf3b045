"""Formats are promises: what each version wrote is read, and what is written today has the bytes of the newest."""

from __future__ import annotations

import json
import re
import shutil
import time
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import zstandard
from support.command_line import here
from support.golden import ANSWERS, MADE_WITH, PREFIX, ask, golden, packers, versions
from support.mounts import Client, mounted, records
from support.servers import missing
from support.waiting import until

import tiered
from backends.registry import open_store
from tiered.archive import lookup as archive_keys
from tiered.archive.model import SCHEMA_VERSION
from tiered.format import bundle
from tiered.format import object as objects
from tiered.format.remoting import Form
from tiered.journal import replay
from tiered.journal.entry import FORMAT_VERSION, seal_text
from tiered.keys import mount_prefix
from tiered.log import broker_tables
from tiered.log.reader import TierReader
from tiered.mount import protocol
from tiered.mount.offsets import Acknowledged, kept_state

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[2]
WRITTEN = list(versions())
QUESTIONS = [
    pytest.param(version, part, question, id=f"{version.name}: {part}: {question}")
    for version in WRITTEN
    for part, questions in json.loads((version / ANSWERS).read_text()).items()
    for question in questions
]


@pytest.fixture(params=WRITTEN, ids=lambda path: path.name)
def copy(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """What a version has written, to be changed."""
    shutil.copytree(request.param, tmp_path / "golden")
    return tmp_path / "golden"


def differences(then: Any, now: Any, at: str = "") -> Iterator[str]:
    """Where an answer lacks what it had; it may have more members."""
    if isinstance(then, dict) and isinstance(now, dict):
        for name, value in then.items():
            if name not in now:
                yield f"{at}.{name} is gone"
            else:
                yield from differences(value, now[name], f"{at}.{name}")
    elif isinstance(then, list) and isinstance(now, list) and len(then) == len(now):
        for number, pair in enumerate(zip(then, now, strict=True)):
            yield from differences(*pair, f"{at}[{number}]")
    elif then != now:
        yield f"{at} was {then!r:.200} and is {now!r:.200}"


@pytest.mark.parametrize(("version", "part", "question"), QUESTIONS)
def test_what_a_version_wrote_is_read(version: Path, part: str, question: str):
    then = json.loads((version / ANSWERS).read_text())[part][question]
    assert list(differences(then, ask(version, part, question))) == []


def test_a_difference_is_found():
    then = {"a": [{"b": 1}], "c": 2}
    assert list(differences(then, {"a": [{"b": 1, "new": 3}], "c": 2})) == []
    assert list(differences(then, {"a": [{"b": 2}]})) == [".a[0].b was 1 and is 2", ".c is gone"]


def test_what_is_written_today_has_the_same_bytes():
    """So a changed format is noticed: it gets a number, a reader of the old one, and a folder of its own."""
    newest = WRITTEN[-1]
    if json.loads((newest / MADE_WITH).read_text()) != packers():
        missing(f"what packed {newest.name}: another zlib, zstd or Parquet writes other bytes")
    made = golden()
    committed = {
        str(path.relative_to(newest)): path.read_bytes()
        for path in newest.rglob("*")
        if path.is_file() and path.parent != newest
    }
    assert made.keys() == committed.keys()
    assert [name for name in made if made[name] != committed[name]] == []


def test_each_kind_of_object_is_there():
    kinds = (
        "bundle",
        "queue",
        "quarantine",
        "index",
        "journal",
        "lease",
        "ledger",
        "meta/handover",
    )
    kinds += ("meta/journal", "timer/bundle", "timer/journal", "timer/meta/facts")
    kinds += tuple(
        f"meta/mount/broker-a/{kind}"
        for kind in ("lease", "journal", "retry/bundle", "retry/journal", "retry/meta/journal")
    )
    for kind in kinds:
        assert (WRITTEN[-1] / "tier" / PREFIX / kind).exists(), kind
    for kind in ("data", "_bad", "_keys", "_latest", "_log/journal", "_log/shard"):
        assert (WRITTEN[-1] / "archive" / kind).exists(), kind


def test_this_version_has_its_folder_and_its_changes():
    minor = tiered.__version__.rpartition(".")[0]
    assert WRITTEN[-1].name == minor
    changes = (ROOT / "CHANGELOG.md").read_text()
    assert re.search(rf"^## {re.escape(tiered.__version__)}\b", changes, re.MULTILINE)


def test_the_commands_of_the_page_run(copy: Path):
    page = (ROOT / "docs" / "upgrading.md").read_text()
    commands = re.findall(r"^\$ tiered (.*)$", page, re.MULTILINE)
    assert len(commands) == 3
    for command in commands:
        here(*command.replace("s3://bucket/prefix", f"file://{copy}/tier").split()).good()


def test_the_formats_of_the_page_are_those_of_the_code():
    page = (ROOT / "docs" / "upgrading.md").read_text()
    rows = dict(re.findall(r"^\| ([^|]+) \| (\d[^|]*) \|", page, re.MULTILINE))
    numbers = {name.partition(",")[0].partition(";")[0]: text for name, text in rows.items()}
    assert numbers == {
        "journal entry": str(FORMAT_VERSION),
        "checkpoint": str(replay.CHECKPOINT_FORMAT),
        "lease": str(FORMAT_VERSION),
        "bundle": f"1, or {bundle.FORMAT} where a section is sparse",
        "index object": str(objects.FORMAT),
        "timers' facts": str(FORMAT_VERSION),
        "a broker's tables": str(broker_tables.FORMAT),
        "Parquet file of an archive": str(SCHEMA_VERSION),
        "key index of an archive": str(archive_keys.FORMAT),
        "version of a table of newest rows": str(FORMAT_VERSION),
    }


def test_a_checkpoint_says_what_the_entries_say(copy: Path):
    """Replay from the first entry on, and from the newest checkpoint on, come to one state."""
    store = open_store(f"file://{copy}/tier")
    with_checkpoint = TierReader(store, PREFIX)
    with_checkpoint.refresh()
    for path in (copy / "tier" / PREFIX / "journal").glob("*.checkpoint"):
        path.unlink()
    without = TierReader(store, PREFIX)
    without.refresh()
    assert without.state == with_checkpoint.state


def newer_text(data: bytes) -> bytes:
    """The same with the next format number but three, and a checksum that holds."""
    return seal_text({**json.loads(data.partition(b"\n")[0]), "format": 5})


def newer_bundle(data: bytes) -> bytes:
    footer = data[-32:-12] + b"\0\5" + data[-10:-8]
    return data[:-32] + footer + zlib.crc32(footer).to_bytes(4, "big") + data[-4:]


def newer_object(data: bytes) -> bytes:
    covered = len(data) - 40 - int.from_bytes(data[-32:-28], "big")
    covered -= 4 * int.from_bytes(data[-24:-20], "big")
    trailer = data[covered:-16] + b"\0\5" + data[-14:-12]
    return data[:covered] + trailer + zlib.crc32(trailer).to_bytes(4, "big") + data[-8:]


def newer_keys(data: bytes) -> bytes:
    size = int.from_bytes(data[-16:-12], "big")
    head = json.loads(zstandard.decompress(data[-16 - size : -16]))
    packed = zstandard.compress(json.dumps({**head, "format": 5}).encode())
    end = len(packed).to_bytes(4, "big") + zlib.crc32(packed).to_bytes(4, "big")
    return data[: -16 - size] + packed + end + data[-8:]


MOUNT = ("mount", "URL", "--listen", "127.0.0.1:0")
NEWER = {
    f"tier/{PREFIX}journal/*24": (newer_text, ("ls", "URL")),
    f"tier/{PREFIX}journal/*23.checkpoint": (newer_text, ("ls", "URL")),
    f"tier/{PREFIX}lease": (newer_text, ("lease", "URL", "--break")),
    f"tier/{PREFIX}bundle/3/*": (newer_bundle, ("verify", "URL", "--deep")),
    f"tier/{PREFIX}index/*": (newer_object, ("verify", "URL", "--deep")),
    f"tier/{PREFIX}quarantine/*/*/*/*": (newer_object, ("verify", "URL", "--deep")),
    f"tier/{PREFIX}meta/handover/*": (newer_text, MOUNT),
    f"tier/{PREFIX}meta/mount/broker-a/journal/*3": (newer_text, MOUNT),
    f"tier/{PREFIX}meta/mount/broker-a/retry/journal/*5": (newer_text, MOUNT),
    f"tier/{PREFIX}meta/mount/broker-a/retry/bundle/*/*": (
        newer_bundle,
        ("verify", "URL", "--retries", "broker-a", "--deep"),
    ),
    f"tier/{PREFIX}timer/journal/*8": (newer_text, ("timer", "ls", "URL")),
    f"tier/{PREFIX}timer/meta/facts": (newer_text, ("verify", "URL", "--deep", "--timers")),
    "archive/_log/journal/*3.checkpoint": (newer_text, ("sql", "URL", "SHOW TABLES")),
    "archive/_latest/*/*/*/versions/*": (
        newer_text,
        ("sql", "URL", 'SELECT body FROM "prices$latest"'),
    ),
    "archive/_keys/*": (newer_keys, ("query", "URL", "orders", "--key", "order-3")),
}


@pytest.mark.parametrize("pattern", NEWER)
def test_a_newer_format_is_told_with_both_numbers(pattern: str, copy: Path):
    newer, command = NEWER[pattern]
    for path in copy.glob(pattern):
        path.write_bytes(newer(path.read_bytes()))
    part = pattern.partition("/")[0]
    ran = here(*(f"file://{copy}/{part}" if word == "URL" else word for word in command))
    said = ran.err + ran.text
    assert "another version of tiered has written this" in said, said
    assert re.search(r"(format is|format version) 5, where (1|2|1 to 2) (is|are) known", said), said
    if command[0] != "verify":  # which lists what it found
        assert (
            f"use the version that wrote it, or a newer one; this is {tiered.__version__}" in said
        )
    assert ran.code == (0 if command[0] == "query" else 2)  # files answer without their index


def test_the_python_api_reads_it(copy: Path):
    with tiered.open(f"file://{copy}/tier") as tier:
        bodies = [message.body for message in tier.read_topic("orders")]
        assert bodies[0] == b'{"order":2}'
        assert bodies[-1] == b"behind the gap"
        (found,) = tier.query("orders", "order-3")
        assert found.queue_offset == 3
        assert sum(batch.num_rows for batch in tier.read_topic_arrow("logs")) == 2


def test_a_mount_goes_on_with_its_offsets(copy: Path):
    store = open_store(f"file://{copy}/tier")
    kept = kept_state(store, mount_prefix(PREFIX, "broker-a"))
    assert kept is not None
    assert kept.offsets == {("pop", "orders"): {0: 2}, ("shop", "orders"): {0: 6}}
    assert kept.acks == {("pop", "orders", 0): Acknowledged((4, 5, 7, 8), (3, 2))}
    assert kept.modes == {("pop", "orders"): ("POP", 1)}
    assert kept.handover


def test_a_mount_gives_again_what_was_popped_and_sent_back(copy: Path):
    with mounted(f"file://{copy}/tier") as served, served.client(Form.JSON) as client:
        assert served.mount.inherited == 0  # the broker's offsets were taken over before
        assert served.mount.retries is not None
        popped = client.ask(
            protocol.POP_MESSAGE, consumerGroup="pop", topic="orders", queueId=0, maxMsgNums=32,
            invisibleTime=60_000, pollTime=0, bornTime=int(time.time() * 1000), initMode=0,
            expType="TAG", exp="*", order="false",
        )  # fmt: skip
        found = [(one.queue_offset, one.reconsume_times) for one in records(popped.text())]
        assert found == [(2, 0), (3, 2), (5, 0), (10, 0)]
        retried = "%RETRY%shop"
        until(lambda: said_end(client, retried) == "3", "what waited is given out")
        found = []
        while len(found) < 3:  # a pull ends with a segment
            answer = client.pull(retried, 0, len(found), consumerGroup="shop")
            found += [(one.queue_offset, one.reconsume_times) for one in records(answer.text())]
        assert found == [(0, 1), (1, 1), (2, 2)]
        client.heartbeat("c", "shop", "orders")
        place = records(answer.text())[-1].physical_offset  # of the log itself
        back = {"group": "shop", "offset": place, "originTopic": "orders", "delayLevel": -1}
        assert client.ask(protocol.CONSUMER_SEND_MSG_BACK, **back).code == protocol.Code.SUCCESS
        assert said_end(client, "%DLQ%shop") == "2"


def said_end(client: Client, topic: str) -> str:
    """Of its first queue, as the mount says it."""
    return client.ask(protocol.GET_MAX_OFFSET, topic=topic, queueId=0).fields["offset"]


def test_writers_go_on_in_it(copy: Path):
    """Each command that changes a tier plans and applies on what the version left, and what is left is whole."""
    url = f"file://{copy}/tier"
    here("gc", url, "--grace", "1ms", "--apply", "-").good()
    here("expire", url, "--ttl", "1ms", "--topics", "orders", "--apply", "-").good()
    here("truncate", url, "prices", "--queue", "0", "--to", "3", "--apply", "-").good()
    here("delete-topic", url, "logs", "--apply", "-").good()
    here("rebuild", url, "--index", "--apply", "-").good()
    here("timer", "cancel", url, f"{5:032X}").good()
    found = here("verify", url, "--deep", "--json").good().document
    assert found["is_clean"]
    assert found["recorded"]["unindexed_messages"] == 0


def test_a_lost_journal_is_made_again(copy: Path):
    shutil.rmtree(copy / "tier" / PREFIX / "journal")
    url = f"file://{copy}/tier"
    assert here("ls", url).code == 5
    here("rebuild", url, "--apply", "-").good()
    assert here("cat", url, "prices").good().text.count("\n") == 2


def test_it_is_restored_as_a_store_directory(copy: Path, tmp_path: Path):
    here("restore", f"file://{copy}/tier", "--to", tmp_path / "store").good()
    tiered_again = f"file://{tmp_path}/again"
    again = here("attach", tmp_path / "store", "--to", tiered_again, "--once")
    assert again.code == 1  # the holes of the old tier are holes of the store
    assert here("cat", tiered_again, "orders").good().text.count("\n") >= 4
