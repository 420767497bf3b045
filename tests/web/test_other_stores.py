"""Pages of tiers that are not RocketMQ's: of captured Kafka nodes and JoyQueue brokers, and of hostile records of both."""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections import Counter
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

import pytest
from support import jmq_stores, kafka_stores
from support import kafka_batches as plain
from support.chromium import NAMELESS
from support.command_line import here
from support.kafka_stores import FakeNode
from support.pages import BODY, EVIL, assert_harmless, every_page, served

from tiered.model import MessageQueue

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from support.chromium import Browser
    from support.pages import PageAnswer, Pages

TOPICS = {"k01": "plain", "k02": "txn", "j01": "orders"}
HEADS = {
    "k01": ["Offset", "Time", "Key", "Headers", "Value", "Begins"],
    "j01": ["Offset", "Stored", "Business id", "Attributes", "Body", "Begins"],
}
PATHS = {
    *("/", "/broker", "/topic", "/queue", "/messages", "/message"),
    *("/timers", "/archive", "/costs", "/doctor"),
}


def kafka_with_markup(folder: Path) -> Path:
    """A partition whose keys, headers and values are markup, bytes that are no text, or null."""
    node, queue = FakeNode(folder, node=9), MessageQueue("marked", 0)
    node.make(queue)
    evil = EVIL.encode()
    records: list[plain.Plain] = [
        (0, 0, evil, BODY, ((EVIL, evil), ("none", None))),
        (1, 0, b"\xff\x00\x1b[2J", b"\x1b[31m\xfe", (("\u202e", b"\xff<i>\x1b"),)),
        (2, 0, None, None, ()),
        (3, 0, b"", b"", (("empty", b""), ("long", b"x" * 300))),
    ]
    node.segments(queue)[0].write_bytes(plain.batch(plain.section(records), len(records)))
    node.ends[queue] = len(records)
    node.stop()
    return folder


def joyqueue_with_markup(folder: Path) -> Path:
    writer = jmq_stores.Writer(folder, "marked")
    fields = {"key": EVIL.encode()[:100], "attributes": b"<i>n</i>=</td><script>x</script>"}
    writer.append(0, BODY, **fields)
    writer.append(0, b"\xff\x1b", key=b"\xff\xfe\x1b[2J", attributes=b"")
    writer.commit()
    return folder


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tier of five such brokers, and an archive of it beside. Not to be changed."""
    folder = tmp_path_factory.mktemp("others")
    stores = {
        "k01": kafka_stores.unpack("k01-basic", folder),
        "k02": kafka_stores.unpack("k02-transactions", folder),
        "j01": jmq_stores.pristine("j01-basic"),
        "kx": kafka_with_markup(folder / "kx"),
        "jx": joyqueue_with_markup(folder / "jx"),
    }
    to = f"file://{folder}/tier"
    for broker, store in stores.items():
        names = ("--cluster", "c", "--broker", broker)
        only = ("--topics", TOPICS[broker]) if broker in TOPICS else ()
        only += () if broker in {"k01", "j01"} else ("--no-index",)
        taken = here("attach", store, "--to", to, "--once", "--seal", *names, *only)
        assert taken.code in {0, 1}, taken.err  # of j01 a few messages are not committed
    return to


@pytest.fixture(scope="module")
def archived(url: str) -> str:
    to = url.replace("/tier", "/parquet")
    here("archive", url, "--to", to, "--jobs", "1", "--cluster", "c", "--broker", "k02").good()
    return to


@pytest.fixture(scope="module")
def pages(url: str, archived: str) -> Iterator[Pages]:
    with served(url, "--bodies", "--archive", archived) as found:
        yield found


@pytest.fixture(scope="module")
def found(pages: Pages) -> dict[str, PageAnswer]:
    """What links lead to."""
    return every_page(pages, most=60)


def place(broker: str, **more: Any) -> dict[str, Any]:
    return {"cluster": "c", "broker": broker, **more}


def offsets(got: PageAnswer) -> list[int]:
    return [int(row["Offset"].replace(",", "")) for row in got.table("Messages")]


def test_every_link_leads_to_a_page(found: dict[str, PageAnswer]):
    assert {target: got.text for target, got in found.items() if got.status != 200} == {}
    assert {target.partition("?")[0] for target in found} >= PATHS
    for target, got in found.items():
        if not target.startswith("/static"):
            assert_harmless(got)


@pytest.mark.parametrize("broker", TOPICS)
def test_every_page_of_a_broker(pages: Pages, url: str, broker: str):
    topic, names = TOPICS[broker], ("--cluster", "c", "--broker", broker)
    (row,) = [r for r in pages.good("/").table("Brokers") if r["Broker"] == f"c/{broker}"]
    lines = here("cat", url, topic, "--queue", "1", *names).rows
    assert row["Queues"] == str(len(pages.good("/topic", **place(broker, topic=topic)).table("Q")))
    queue = place(broker, topic=topic, queue=1)
    facts = pages.good("/queue", **queue).facts
    assert ("Terms" if broker == "j01" else "Transactions") in facts
    assert pages.good("/broker", **place(broker)).facts["Source"].endswith("is a partition")
    assert "Only brokers of RocketMQ" in pages.good("/timers", **place(broker)).text
    for path in ("/archive", "/costs", "/doctor"):
        pages.good(path, **(place(broker) if path == "/archive" else {}))
    got = pages.good("/messages", offset=0, **queue)
    name = "index" if broker == "j01" else "offset"
    assert offsets(got) == [line[name] for line in lines[:50]]
    assert list(got.table("Messages")[0]) == HEADS.get(broker, HEADS["k01"])
    middle = lines[len(lines) // 2]
    time_ms = middle["store_time_ms" if broker == "j01" else "timestamp_ms"]
    asked = here("cat", url, topic, "--queue", "1", "--from", str(time_ms), *names).rows
    assert offsets(pages.good("/messages", time=time_ms, **queue))[0] == asked[0][name]
    assert "have no tags" in pages.get("/messages", tag="a", **queue).text


def test_kafka_s_headers_and_keys(pages: Pages, url: str):
    queue = place("k01", topic="plain", queue=1)
    lines = plain.dump("k01-basic")
    mine = [one for one in lines if (one["topic"], one["partition"]) == ("plain", 1)]
    line = next(one for one in mine if one["key_base64"] and len(one["headers"]) > 1)
    got = pages.good("/message", offset=line["offset"], **queue)
    rows = [(row["Name"], row["Value"]) for row in got.table("Headers")]
    assert [name for name, _ in rows] == [name for name, _ in line["headers"]]
    key = b64decode(line["key_base64"]).decode()
    assert [pre.text for pre in got.page.each("pre")][1] == key
    fields = {row["Field"]: row["Value"] for row in got.table("Fields")}
    assert fields["partition"] == "1"
    assert {"timestamp_type", "leader_epoch"} <= fields.keys()
    with_key = pages.good("/messages", topic="plain", key=key, **place("k01")).table("Messages")
    of_key = [o for o in lines if o["topic"] == "plain" and o["key_base64"] == line["key_base64"]]
    wanted = {f"queue {one['partition']}, {one['offset']:,}" for one in of_key}
    assert {row["Offset"] for row in with_key} <= wanted
    assert len(with_key) == min(50, len(wanted))
    assert {row["Key"] for row in with_key} == {key}
    sql = "tenant IS NOT NULL"
    asked = here("cat", url, "plain", "--queue", "1", "--sql", sql, *names("k01")).rows
    got = pages.good("/messages", offset=0, sql=sql, **queue)
    assert offsets(got) == [one["offset"] for one in asked[:50]] != []


LONG = (10).to_bytes(8, "big")
"""A key as a LongSerializer writes it: it begins with zeros, and ends in a line's end."""


@pytest.mark.parametrize("is_indexed", [True, False])
def test_kafka_s_keys_that_are_no_text_are_found(is_indexed: bool, tmp_path: Path):
    """By the link on the page of a message, and by what an address says."""
    node, queue = FakeNode(tmp_path / "store", node=9), MessageQueue("numbers", 0)
    node.make(queue)
    keys = [LONG, b"\xff\x00\x1b[2J", b"plain", LONG, b" \x00 ", None, b"\xff\x00\x1b[2J", b""]
    records: list[plain.Plain] = [(at, 0, key, b"x", ()) for at, key in enumerate(keys)]
    node.segments(queue)[0].write_bytes(plain.batch(plain.section(records), len(records)))
    node.ends[queue] = len(records)
    node.stop()
    url, only = f"file://{tmp_path}/tier", () if is_indexed else ("--no-index",)
    names = ("--cluster", "c", "--broker", "b", *only)
    here("attach", tmp_path / "store", "--to", url, "--once", "--seal", *names).good()
    with served(url) as pages:
        for at, key in enumerate(keys):
            got = pages.good("/message", offset=at, **place("b", topic="numbers", queue=0))
            links = [link for link in got.links if "key=" in link]
            assert len(links) == bool(key), key
            for link in links:
                same = pages.good(link)
                assert_harmless(same)
                assert [row["Offset"] for row in same.table("Messages")] == [
                    f"queue 0, {other}" for other in reversed(range(8)) if keys[other] == key
                ], key


def names(broker: str) -> tuple[str, ...]:
    return "--cluster", "c", "--broker", broker


def test_what_was_aborted_is_shown_on_request(pages: Pages, archived: str):
    every = {o["offset"] for o in plain.dump("k02-transactions") if is_txn_0(o)}
    committed = {o["offset"] for o in plain.dump("k02-transactions.committed") if is_txn_0(o)}
    aborted = sorted(every - committed)
    assert aborted
    queue = place("k02", topic="txn", queue=0)
    start = aborted[0]
    shown = offsets(pages.good("/messages", offset=start, **queue))
    assert shown == sorted(offset for offset in committed if offset >= start)[:50]
    all_of_it = pages.good("/messages", offset=start, isolation="read_uncommitted", **queue)
    assert offsets(all_of_it) == sorted(offset for offset in every if offset >= start)[:50]
    kept = [link for link in all_of_it.links if link.startswith("/message")]
    assert kept
    assert all("isolation=read_uncommitted" in link for link in kept)
    one = pages.good("/message", offset=start, **queue)
    assert "an aborted message" in one.text
    assert not [*one.page.each("pre")]
    one = pages.good("/message", offset=start, isolation="read_uncommitted", **queue)
    assert [*one.page.each("pre")]
    got = pages.get("/messages", isolation="<b>", **queue)
    assert (got.status, "no isolation level" in got.text) == (400, True)
    (row,) = pages.good("/archive", **place("k02")).table("What is archived")
    rows = [o for o in plain.dump("k02-transactions.committed") if o["topic"] == "txn"]
    assert row["Messages"] == f"{len(rows):,}"


def is_txn_0(line: dict[str, Any]) -> bool:
    return (line["topic"], line["partition"]) == ("txn", 0)


def test_joyqueue_s_business_ids_and_attributes(pages: Pages, url: str):
    lines = here("cat", url, "orders", *names("j01")).rows
    line = next(one for one in lines if one["business_id"] and one["attributes"])
    queue = place("j01", topic="orders", queue=line["partition"])
    got = pages.good("/message", offset=line["index"], **queue)
    assert {row["Name"]: row["Value"] for row in got.table("Attributes")} == line["attributes"]
    fields = {row["Field"]: row["Value"] for row in got.table("Fields")}
    assert fields["business_id"] == line["business_id"]
    assert {"term", "app", "batch_count", "client_ip_hex"} <= fields.keys()
    many = Counter(one["business_id"] for one in lines)[line["business_id"]]
    key = {"topic": "orders", "key": line["business_id"]}
    assert len(pages.good("/messages", **key, **place("j01")).table("Messages")) == min(50, many)
    right = [
        one["index"]
        for one in lines
        if one["partition"] == 1 and (one["attributes"] or {}).get("TAGS") == "tag2"
    ]
    said = {"topic": "orders", "queue": 1, "offset": 0, "sql": "TAGS = 'tag2'"}
    assert offsets(pages.good("/messages", **said, **place("j01"))) == right[:50]


def test_markup_and_bytes_of_others_stay_text(pages: Pages):
    for broker in ("kx", "jx"):
        queue = place(broker, topic="marked", queue=0)
        asked = [pages.good("/messages", offset=0, **queue)]
        count = 4 if broker == "kx" else 2
        assert len(offsets(asked[0])) == count
        asked += [pages.good("/message", offset=offset, **queue) for offset in range(count)]
        for key in (EVIL, "\udcff\udcfe", "\x1b[2J"):
            asked.append(pages.good("/messages", topic="marked", key=key, **place(broker)))
        for got in asked:
            assert_harmless(got)
            assert not {"\x1b", "\u202e"} & set(got.body.decode())
        assert EVIL in asked[0].text
        assert "alert(2)" in asked[1].text
    row = pages.good("/messages", offset=3, **place("kx", topic="marked", queue=0)).table(
        "Messages"
    )[0]
    assert row["Headers"] == f"empty=, long={'x' * 80}…"
    kafka = [
        pages.good("/message", offset=at, **place("kx", topic="marked", queue=0)).text
        for at in range(4)
    ]
    assert "000000 ff 00 1b 5b 32 4a" in kafka[1]  # a key that is no text
    assert r"\xff<i>\x1b" in kafka[1]
    assert "It has no value." in kafka[2]
    assert "It has no key." in kafka[2]
    assert "Value: text, 0 B" in kafka[3]
    assert b64encode(EVIL.encode()).decode() not in kafka[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("broker", "topic", "offset"),
    [("k01", "plain", 3), ("j01", "orders", 3), ("kx", "marked", 1), ("jx", "marked", 0)],
)
def test_in_a_browser_as_narrow_as_a_phone(
    pages: Pages, tab: Browser, broker: str, topic: str, offset: int
):
    """By keyboard from the topic to its messages; all has a name, and nothing is wider than the page."""
    queue_id = 0 if topic == "marked" else 1
    base, queue = pages.address.rstrip("/"), place(broker, topic=topic, queue=queue_id)
    tab.show(f"{base}/topic?{urlencode(place(broker, topic=topic))}", width=390)
    for wanted in (f"queue {queue_id}", "Newest messages"):
        tab.check_fit(390)
        assert tab.ask(NAMELESS) == []
        tab.tab_to(wanted)
        tab.enter()
    assert tab.ask("location.pathname") == "/messages"
    tab.show(f"{base}/message?{urlencode(queue | {'offset': offset})}", width=390)
    tab.check_fit(390)
    assert tab.ask(NAMELESS) == []
    assert tab.complaints() == []
