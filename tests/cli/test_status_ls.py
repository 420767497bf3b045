"""status and ls: numbers against the dump, lag, who writes, and how many requests that takes."""

from __future__ import annotations

import json
import re
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from support.bundles import made_part
from support.command_line import here
from support.golden import PLACE, PREFIX, versions
from support.tiers import TierBuilder

from backends.errors import (
    BackendError,
    PermissionDeniedError,
    RefusedError,
    UnavailableError,
)
from backends.local import LocalFolderStore
from backends.memory import MemoryStore
from backends.registry import open_store
from backends.wrapping import MeteredStore
from tiered.api.broker_place import Place, RetryPlace, retry_places
from tiered.attach.writer import Attachment, AttachSettings
from tiered.clock import ManualClock
from tiered.journal.entry import seal_text
from tiered.journal.replay import JournalReader
from tiered.keys import checkpoint_key, entry_key
from tiered.log.state import Incarnation, Parts, Segment, TierMachine, TierState
from tiered.model import LogOffset, MessageQueue, QueueOffset
from tiered.upkeep.status import (
    DECOMMISSIONED,
    NO_WRITER,
    STOPPED,
    WRITING,
    read_retry_logs,
    read_status,
    status_document,
    worst_first,
)

if TYPE_CHECKING:
    from support.captures import InTopic
    from support.command_line import CommandLine


def test_ls_counts_what_java_counts(tiered: CommandLine, basic_tier: str, dumped: InTopic):
    rows = tiered.good("ls", basic_tier, "--json").document["queues"]
    for topic in {row["topic"] for row in rows}:
        counted = Counter(message["queue_id"] for message in dumped("s01-basic", topic))
        assert {r["queue_id"]: r["messages"] for r in rows if r["topic"] == topic} == counted
        assert all(r["commit_offset"] - r["min_offset"] == r["messages"] for r in rows)
    assert not any("lag" in name or "local" in name for name in rows[0])


def test_ls_of_a_topic_and_its_objects(tiered: CommandLine, basic_tier: str):
    rows = tiered.good("ls", basic_tier, "orders", "-o", "jsonl").rows
    assert [row["queue_id"] for row in rows] == [0, 1, 2, 3]
    objects = tiered.good("ls", basic_tier, "orders", "--objects", "--json").document["objects"]
    folder = basic_tier.removeprefix("file://")
    from pathlib import Path

    for found in objects:
        assert found["level"] == 0
        assert found["sections"] == len(found["parts"])
        assert Path(folder, found["key"]).stat().st_size == found["size_bytes"]
        assert found["named_bytes"] < found["size_bytes"]
    sizes: Counter[int] = Counter()
    for part in (part for found in objects for part in found["parts"]):
        sizes[part["queue_id"]] += part["named_bytes"]
    assert sizes == {row["queue_id"]: row["size_bytes"] for row in rows}


def test_queues_share_objects_which_totals_count_once(tiered: CommandLine, basic_tier: str):
    (broker,) = tiered.good("status", basic_tier, "--json").document["brokers"]
    objects = tiered.good("ls", basic_tier, "--objects", "-o", "jsonl").rows
    assert broker["objects"] == len(objects) < broker["queue_count"] == 25
    for topic in broker["topics"]:
        holding = [o for o in objects if any(p["topic"] == topic["topic"] for p in o["parts"])]
        assert topic["objects"] == len(holding)
    (level,) = broker["levels"]
    assert level == {
        "level": 0,
        "objects": len(objects),
        "object_bytes": broker["object_bytes"],
        "size_bytes": broker["size_bytes"],
    }
    assert broker["object_bytes"] == sum(found["size_bytes"] for found in objects)
    assert 1.0 <= broker["space_amplification"] < 1.01
    assert re.search(
        r"stored +\d+ objects?, .* of level 0\); 1.00 x", tiered.good("status", basic_tier).text
    )


def test_forms_agree(tiered: CommandLine, basic_tier: str):
    rows = tiered.good("ls", basic_tier, "-o", "jsonl").rows
    csv_rows = tiered.good("ls", basic_tier, "-o", "csv").text.splitlines()
    table = tiered.good("ls", basic_tier).text.splitlines()
    assert len(csv_rows) == len(table) == len(rows) + 1
    assert csv_rows[1].startswith("events,0,0,150,150,1,1,")
    assert table[1].split()[:5] == ["events", "0", "0", "150", "150"]


def test_status_without_and_with_a_store(tiered: CommandLine, basic: Path, tmp_path: Path):
    url = f"file://{tmp_path}"
    tiered.good("attach", basic, "--to", url, "--once", "--topics", "orders,events")
    plain = tiered.good("status", url, "--json").document
    (broker,) = plain["brokers"]
    assert (broker["messages"], broker["lag_messages"], broker["local"]) == (2400, None, None)
    assert broker["lease"]["is_released"]
    assert not broker["lease"]["is_held"]

    held = tiered.good("status", url, "--store", basic, "--json").document["brokers"][0]
    assert held["lag_messages"] == 2613 - 2400
    topics = {topic["topic"]: topic for topic in held["topics"]}
    assert topics["orders"]["lag_messages"] == topics["orders"]["lag_bytes"] == 0
    assert topics["orders"]["queues"][0]["local_max_offset"] == 312
    large = topics["large"]
    assert (large["messages"], large["lag_messages"]) == (0, 18)
    assert large["queues"][0]["commit_offset"] is None
    assert large["lag_bytes"] > 1_500_000
    assert large["lag_seconds"] >= 0
    text = tiered.good("status", url, "--store", basic).text
    assert re.search(r"lag +213 messages, 1\.\d MiB", text)


def test_topics_that_attach_was_told_to_leave_out_do_not_lag(
    tiered: CommandLine, basic: Path, tmp_path: Path
):
    url, status = f"file://{tmp_path}", ("status", f"file://{tmp_path}", "--store", basic)
    tiered.good("attach", basic, "--to", url, "--once", "--topics", "orders")
    (all_of_it,) = tiered.good(*status, "--json").document["brokers"]
    left_out = {topic["topic"] for topic in all_of_it["topics"] if topic["lag_messages"]}
    assert left_out
    words = (*status, "--json", "--exclude", ",".join(sorted(left_out)))
    (broker,) = tiered.good(*words).document["brokers"]
    assert (broker["lag_messages"], broker["lag_bytes"], broker["lag_seconds"]) == (0, 0, 0.0)
    assert not left_out & {topic["topic"] for topic in broker["topics"]}
    (same,) = tiered.good(*status, "--json", "--topics", "orders").document["brokers"]
    assert same["lag_messages"] == 0
    assert [topic["topic"] for topic in same["topics"]] == ["orders"]


def test_lag_bytes_are_those_of_the_records(
    tiered: CommandLine, batches: Path, tmp_path: Path, dumped: InTopic
):
    """An inner batch is one record, whatever it holds."""
    url = f"file://{tmp_path}"
    tiered.good("attach", batches, "--to", url, "--once", "--start", "latest", "--exclude", "*")
    broker = tiered.good("status", url, "--store", batches, "--json").document["brokers"][0]
    for topic in broker["topics"]:
        messages = dumped("s11-lmq-batchcq", topic["topic"])
        assert topic["lag_messages"] == len(messages)
        records = {message["physical_offset"]: message["size"] for message in messages}
        assert topic["lag_bytes"] == sum(records.values())
    assert {left["name"] for left in broker["left_out"]} == {"%LMQ%d1", "%LMQ%d2", "%LMQ%d3"}


def test_status_names_the_living_writer(tiered: CommandLine, basic: Path, tmp_path: Path):
    url = f"file://{tmp_path}"
    writer = Attachment.open(str(basic), url, AttachSettings())
    try:
        broker = tiered.good("status", url, "--json").document["brokers"][0]
        assert broker["lease"]["is_held"]
        assert broker["epoch"] == 1
        assert re.search(r"writer +process \d+ on .*epoch 1", tiered.good("status", url).text)
    finally:
        writer.close()


def two_brokers(folder: Path) -> tuple[str, str]:
    """A tier with two brokers, of which the second has an entry more; and that entry's path."""
    url = f"file://{folder}"
    store = open_store(url)
    for name in ("a", "b"):
        TierBuilder(store, prefix=Place("c", name).prefix).add([b"x", b"y"])
    return url, str(max((folder / Place("c", "b").prefix / "journal").iterdir()))


@pytest.mark.parametrize(
    ("data", "code", "state"),
    [(b"damaged", 5, "damaged"), (seal_text({"format": 9}), 2, "another version")],
)
@pytest.mark.parametrize("form", ["table", "json", "csv"])
def test_of_several_brokers_one_that_cannot_be_read_hides_no_other(  # noqa: PLR0917 (a table)
    tiered: CommandLine, tmp_path: Path, data: bytes, code: int, state: str, form: str
):
    url, entry = two_brokers(tmp_path)
    Path(entry).chmod(0o644)
    Path(entry).write_bytes(data)
    ran = tiered("status", url, "-o", form)
    assert ran.code == code
    said = ran.out.decode() + ran.err
    assert "c/b" in said or form != "csv"
    assert state in said
    assert entry.rsplit("/", 1)[1] in said
    if form == "json":
        document = json.loads(ran.out)
        assert [one["broker"] for one in document["brokers"]] == ["a"]
        assert [(one["broker"], one["state"]) for one in document["unread"]] == [("b", state)]
    elif form == "table":
        assert ran.text.splitlines()[1].startswith(state)
        assert ran.text.splitlines()[2].startswith("stopped")
    alone = tiered("status", url, "--broker", "b")
    assert alone.code == code


def test_of_several_brokers_a_line_each_the_worst_first(tiered: CommandLine, tmp_path: Path):
    url, entry = two_brokers(tmp_path)
    TierBuilder(open_store(url), prefix=Place("c", "c").prefix).add([b"x"])
    Path(entry).chmod(0o644)
    Path(entry).write_bytes(b"damaged")
    ran = tiered("status", url)
    assert ran.code == 5
    lines = ran.text.splitlines()
    assert [line.split()[2] for line in lines[1:4]] == ["b", "a", "c"]
    assert lines[1].startswith("damaged")
    assert lines[-1] == "3 brokers; --cluster and --broker show one of them"
    assert tiered.good("status", url, "--brokers", "a,c").text.count("stopped") == 2
    assert "contents" in tiered.good("status", url, "--brokers", "c/c").text
    assert "contents" in tiered.good("status", url, "--broker", "a").text
    ran = tiered("status", url, "--brokers", "nobody")
    assert (ran.code, "there is no tier here" in ran.error) == (2, True)
    ran = tiered("status", url, "--watch", "--json")
    assert (ran.code, "--watch is for people" in ran.error) == (2, True)


def test_watch_shows_it_again_until_it_is_told_to_stop(
    tiered: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """What comes meanwhile is seen; a signal ends it as it ends any command."""
    url, _ = two_brokers(tmp_path)
    looks: list[float] = []

    def wait(_stop: object, seconds: float) -> bool:
        looks.append(seconds)
        if len(looks) == 1:
            TierBuilder(open_store(url), prefix=Place("c", "late").prefix).add([b"x"])
        return len(looks) == 2

    monkeypatch.setattr(tiered.clock, "wait", wait)
    text = tiered.good("status", url, "--watch", "--quiet").text
    assert looks == [5.0, 5.0]
    assert ("2 brokers;" in text, "3 brokers;" in text, "\x1b" in text) == (True, True, False)


def test_the_order_of_brokers():
    def broker(name: str, state: str, **more: int) -> dict[str, Any]:
        plain = {
            "queue_count": 1,
            "messages": 1,
            "size_bytes": 1,
            "gaps": 0,
            "quarantined": 0,
            "updated_ms": 5,
        }
        return {
            "cluster": "c",
            "broker": name,
            "state": state,
            "lease": {"host": "h"},
            "paused": [],
            "retry_logs": [],
            **plain,
            **more,
        }

    brokers = [
        broker("gone", DECOMMISSIONED), broker("fine", WRITING), broker("older", WRITING, updated_ms=4),
        broker("gap", WRITING, gaps=1), broker("stopped", STOPPED), broker("dead", NO_WRITER),
        broker("lost", WRITING, quarantined=1),
    ]  # fmt: skip
    unread = [
        {"cluster": "c", "broker": name, "state": "x", "reason": "", "exit_code": code}
        for name, code in (("other version", 2), ("damaged", 5))
    ]
    assert [row["broker"] for row in worst_first(brokers, unread)] == [
        "damaged", "other version", "lost", "dead", "stopped", "gap", "older", "fine", "gone",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("error", "is_row"),
    [
        (RefusedError("it lies in an archive class"), True),
        (PermissionDeniedError("not yours"), True),
        (UnavailableError("it does not answer"), False),
    ],
)
def test_of_several_brokers_one_whose_objects_are_refused_hides_no_other(
    tiered: CommandLine,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    error: BackendError,
    is_row: bool,
):
    """What passes by itself, as a store that does not answer, ends the command as ever."""
    url, entry = two_brokers(tmp_path)
    allowed = LocalFolderStore.get

    def get(self: LocalFolderStore, key: str, *some: Any) -> bytes:
        if entry.endswith(key):
            raise error
        return allowed(self, key, *some)

    monkeypatch.setattr(LocalFolderStore, "get", get)
    ran = tiered("--request-timeout", "1s", "status", url, "--json")
    assert ran.code == 3
    if is_row:
        document = json.loads(ran.out)
        assert [one["broker"] for one in document["brokers"]] == ["a"]
        assert [(one["broker"], one["state"]) for one in document["unread"]] == [("b", "refused")]
    else:
        assert str(error) in ran.out.decode() + ran.err


def big_state(queues: int, parts: int) -> TierState:
    incarnations = {}
    for queue in range(queues):
        row = Parts.of(
            made_part(number, 100 * number, 1, 100, key=f"bundle-{queue}-{number}")
            for number in range(parts)
        )
        segment = Segment(LogOffset(0), QueueOffset(0), 0, parts=row)
        incarnation = Incarnation(
            0, QueueOffset(0), QueueOffset(parts), LogOffset(100 * parts), segments=(segment,)
        )
        incarnations[MessageQueue(f"t{queue % 10}", queue // 10)] = (incarnation,)
    return TierState(epoch=1, writer="0badcafe", queues=incarnations)


def status_of(state: TierState) -> tuple[dict[str, Any], int]:
    """The document of a broker, and the requests that it took."""
    place = Place("c", "b")
    memory = MemoryStore("memory://status")
    reader: JournalReader[TierState] = JournalReader(memory, place.prefix, TierMachine())
    reader.state = state
    reader.number = 7
    memory.put_if_absent(checkpoint_key(place.prefix, 7), reader.checkpoint_bytes())
    store = MeteredStore(memory)
    clock = ManualClock()
    found = read_status(store, cluster=None, broker=None, local=None, now_ms=clock.now_ms())
    (broker,) = status_document(store.url, *found, clock.now_ms())["brokers"]
    return broker, store.snapshot().requests


def test_status_of_a_thousand_queues_and_ten_thousand_objects_takes_few_requests():
    broker, requests = status_of(big_state(1000, 10))
    assert (broker["queue_count"], broker["objects"], broker["messages"]) == (1000, 10_000, 10_000)
    assert requests <= 20


def test_status_shows_what_was_sent_back_to_mounts(tmp_path: Path):
    *_, newest = versions()
    shutil.copytree(newest / "tier", tmp_path / "tier")
    url = f"file://{tmp_path}/tier"
    (broker,) = here("status", url, "--json").good().document["brokers"]
    assert broker["retry_logs"] == [
        {
            "mount": "broker-a", "waiting": 2, "retries": 1, "dead": 1,
            "objects": 3, "object_bytes": 1041 + 389 + 417,
            "updated_ms": 1_700_000_001_000, "reason": "",
        }
    ]  # fmt: skip
    said = "mount broker-a: 2 messages wait, 1 given out again, 1 dead letter; 3 objects, 1.8 KiB"
    assert f"  retries   {said}\n" in here("status", url).good().text
    (entry,) = (tmp_path / "tier" / PREFIX / "meta/mount/broker-a/retry/journal").glob("*5")
    entry.write_bytes(b"damaged")
    assert "  retries   mount broker-a: cannot be read: " in here("status", url).good().text


def test_of_several_brokers_the_one_whose_mounts_have_letters_is_named(tmp_path: Path):
    *_, newest = versions()
    shutil.copytree(newest / "tier", tmp_path / "tier")
    url, _ = two_brokers(tmp_path / "tier")
    said = "retry log of mount broker-a: 2 waiting, 1 in the dead letter queue"
    (line,) = [line for line in here("status", url).good().text.splitlines() if said in line]
    assert f" {PLACE.broker} " in line
    (entry,) = (tmp_path / "tier" / PREFIX / "meta/mount/broker-a/retry/journal").glob("*5")
    entry.write_bytes(b"damaged")
    assert "retry log of mount broker-a: cannot be read" in here("status", url).good().text


def test_looking_for_retry_logs_takes_a_listing_where_there_are_none_and_passes_over_their_bundles():
    place, memory = Place("c", "b"), MemoryStore("memory://status")
    store = MeteredStore(memory)
    assert read_retry_logs(store, place) == []
    assert store.snapshot().requests == 1
    logs = [RetryPlace("c", "b", mount) for mount in ("a", "b", "b/10.0.0.1:9")]
    for log in logs:
        for number in range(3000):
            memory.put_if_absent(f"{log.prefix}bundle/0/{number:04}", b"")
        memory.put_if_absent(entry_key(log.prefix, 1), b"")
    assert retry_places(store, place) == logs
    assert store.snapshot().requests <= 1 + 2 * len(logs)


def test_status_tells_what_is_stored_and_not_named():
    """Of two bundles one has a section that nothing names any more."""
    half = made_part(0, 0, 100, 100_000, key="half", level=1)
    behind = made_part(100, 100_000, 100, 100_000, key="whole")
    doubled = replace(half, bundle=replace(half.bundle, size_bytes=2 * half.bundle.size_bytes))
    parts = Parts.of([doubled, behind])
    segment = Segment(LogOffset(0), QueueOffset(0), 0, parts=parts)
    incarnation = Incarnation(
        0, QueueOffset(0), QueueOffset(200), LogOffset(200_000), segments=(segment,)
    )
    broker, _ = status_of(TierState(epoch=1, queues={MessageQueue("t", 0): (incarnation,)}))
    assert [(row["level"], row["objects"]) for row in broker["levels"]] == [(0, 1), (1, 1)]
    assert broker["space_amplification"] == pytest.approx(1.5, abs=0.01)
    assert broker["size_bytes"] == sum(row["size_bytes"] for row in broker["levels"])


@pytest.mark.parametrize("command", ["status", "ls"])
def test_names_that_a_terminal_would_obey_are_shown_as_text(
    command: str, tiered: CommandLine, monkeypatch: pytest.MonkeyPatch, basic_tier: str
):
    from tiered.log.reader import TierReader

    state = big_state(1, 1)
    incarnation = next(iter(state.queues.values()))
    evil = TierState(epoch=1, queues={MessageQueue("evil\x1b[2J\udcff", 0): incarnation})
    monkeypatch.setattr(TierReader, "state", property(lambda _self: evil))
    table = tiered.good(command, basic_tier)
    assert b"\x1b" not in table.out
    assert rb"evil\x1b[2J\udcff" in table.out
    document = tiered.good(command, basic_tier, "--json").text
    assert "\\u001b" in document
    assert "\\udcff" in document
