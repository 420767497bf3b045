"""Each page shows the figures that the command line tells."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING, Any

import pytest
from support.command_line import attach, here
from support.golden import PLACE, versions
from support.pages import every_page, served
from support.untouched import entries
from support.waiting import until

from tiered.cli.values import format_size, format_time

if TYPE_CHECKING:
    from pathlib import Path

    from support.pages import Pages

Place = dict[str, str]


@pytest.fixture(scope="module")
def status(basic: Path, shown_tier: str) -> dict[str, Any]:
    (broker,) = here("status", shown_tier, "--store", basic, "--json").document["brokers"]
    return broker


def count(number: int) -> str:
    return f"{number:,}"


def test_the_first_page_has_a_row_a_broker(pages: Pages, status: dict[str, Any]):
    got = pages.good("/")
    (row,) = got.table("Brokers")
    assert row["Broker"] == "shop/north"
    assert row["Messages"] == count(status["messages"]) == "2,613"
    assert row["Queues"] == count(status["queue_count"])
    assert row["Stored"] == format_size(status["object_bytes"])
    assert row["Lag, messages"] == count(status["lag_messages"])
    assert row["Last entry"].endswith(" ago")
    assert got.page.first("time").attributes["datetime"] == format_time(status["updated_ms"])
    assert row["Health"] == "attention no writer"


def test_a_broker_has_its_topics(pages: Pages, status: dict[str, Any], place: Place):
    got = pages.good("/broker", **place)
    rows = {row["Topic"]: row for row in got.table("Topics")}
    assert rows.keys() == {topic["topic"] for topic in status["topics"]}
    for topic in status["topics"]:
        row = rows[topic["topic"]]
        assert row["Queues"] == count(topic["queue_count"])
        assert row["Messages"] == count(topic["messages"])
        assert row["Stored"] == format_size(topic["size_bytes"])
        assert row["Segments"] == count(topic["segments"])
        assert row["Lag, messages"] == count(topic["lag_messages"])
    levels = got.table("Objects by level")
    assert [(row["Level"], row["Objects"]) for row in levels] == [
        (count(row["level"]), count(row["objects"])) for row in status["levels"]
    ]
    assert "Lag over time" in {title.text for title in got.page.each("title")}


def test_topics_are_found_by_a_part_of_their_names(pages: Pages, place: Place):
    rows = pages.good("/broker", find="ORD", **place).table("Topics")
    assert rows
    assert all("ord" in row["Topic"] for row in rows)


def test_a_topic_has_its_queues(pages: Pages, status: dict[str, Any], place: Place):
    (orders,) = [topic for topic in status["topics"] if topic["topic"] == "orders"]
    got = pages.good("/topic", topic="orders", **place)
    rows = got.table("Queues of orders")
    for row, queue in zip(rows, orders["queues"], strict=True):
        assert row["Queue"] == f"queue {queue['queue_id']}"
        assert row["From"] == count(queue["min_offset"])
        assert row["To"] == count(queue["commit_offset"])
        assert row["Messages"] == count(queue["messages"])
        assert row["Segments"] == f"{queue['segments']} ({queue['sealed_segments']} sealed)"
    assert len([*got.page.each("svg")]) >= len(rows)


def test_a_queue_has_its_segments_in_a_map_and_a_table(
    pages: Pages, status: dict[str, Any], place: Place
):
    (orders,) = [topic for topic in status["topics"] if topic["topic"] == "orders"]
    queue = orders["queues"][1]
    got = pages.good("/queue", topic="orders", queue=1, **place)
    rows = got.table("Segments, newest first")
    assert len(rows) == queue["segments"] > 1
    assert sum(int(row["Messages"].replace(",", "")) for row in rows) == queue["messages"]
    assert {row["State"] for row in rows} == {"sealed"}
    ends = [
        (int(row["From offset"].replace(",", "")), int(row["To"].replace(",", ""))) for row in rows
    ]
    assert ends[0][1] == queue["commit_offset"]
    assert all(high == low for (_, high), (low, _) in zip(ends[1:], ends, strict=False))
    assert got.text.count(format_size(queue["size_bytes"])) >= 1
    drawn = [bar for bar in got.page.each("rect") if bar.attributes["class"] == "sealed"]
    assert len(drawn) == len(rows) + 1  # and one in the legend
    packed = [bar for bar in got.page.each("rect") if bar.attributes["class"] == "packed"]
    assert (queue["size_bytes"] < queue["plain_bytes"]) == (len(packed) > 1)


def test_a_message_is_shown_as_cat_prints_it(pages: Pages, shown_tier: str, place: Place):
    ran = here("cat", shown_tier, "orders", "--queue", "1", "--offset", "17", "--count", "1")
    (message,) = ran.rows
    got = pages.good("/message", topic="orders", queue=1, offset=17, **place)
    fields = {row["Field"]: row["Value"] for row in got.table("Fields")}
    for name, value in message.items():
        if name in {"properties", "body_base64"}:
            continue
        said = fields[name]
        if name.endswith("_ms"):
            assert said == f"{format_time(value)} ({value})"
        else:
            assert said == ("-" if value is None else str(value))
    properties = {row["Name"]: row["Value"] for row in got.table("Properties")}
    assert properties == message["properties"]


def offsets(got: Any) -> list[int]:
    return [int(row["Offset"].replace(",", "")) for row in got.table("Messages")]


def follow(pages: Pages, got: Any, which: str) -> Any:
    found = [a for a in got.page.each("a") if a.attributes.get("rel") == which]
    return pages.good(found[0].attributes["href"]) if found else None


@pytest.mark.parametrize(
    ("said", "options"),
    [
        ({}, ()),
        ({"tag": "paid"}, ("--tag", "paid")),
        (
            {"sql": "TAGS IS NOT NULL AND TAGS <> 'paid'"},
            ("--sql", "TAGS IS NOT NULL AND TAGS <> 'paid'"),
        ),
    ],
)
def test_going_forwards_and_back_shows_each_message_once(
    pages: Pages, shown_tier: str, place: Place, said: dict[str, str], options: tuple[str, ...]
):
    rows = here("cat", shown_tier, "orders", "--queue", "1", *options).rows
    wanted = [row["queue_offset"] for row in rows]
    assert len(wanted) > 50
    got = pages.good("/messages", topic="orders", queue=1, offset=0, **said, **place)
    forwards: list[int] = []
    while got is not None:
        forwards += offsets(got)
        last, got = got, follow(pages, got, "next")
    assert forwards == wanted
    backwards: list[int] = []
    got = pages.good("/messages", topic="orders", queue=1, **said, **place)
    assert offsets(got)[-1] == wanted[-1]  # the newest is what one sees first
    while got is not None:
        backwards = offsets(got) + backwards
        got = follow(pages, got, "prev")
    assert backwards == wanted
    assert follow(pages, last, "prev") is not None


def test_messages_from_a_time_on(pages: Pages, shown_tier: str, place: Place):
    rows = here("cat", shown_tier, "orders", "--queue", "1").rows
    middle = rows[len(rows) // 2]["store_timestamp_ms"]
    wanted = here("cat", shown_tier, "orders", "--queue", "1", "--from", str(middle)).rows
    for text in (str(middle), format_time(middle)):
        got = pages.good("/messages", topic="orders", queue=1, time=text, **place)
        assert offsets(got)[0] == wanted[0]["queue_offset"]


def test_messages_with_a_key_in_all_queues(pages: Pages, shown_tier: str, place: Place):
    wanted = here("query", shown_tier, "orders", "--key", "key-47", "--count", "50").rows
    assert len({row["queue_id"] for row in wanted}) > 1
    got = pages.good("/messages", topic="orders", key="key-47", **place)
    found = [row["Offset"] for row in got.table("Messages")]
    assert found == [f"queue {row['queue_id']}, {row['queue_offset']:,}" for row in wanted]


def test_what_is_asked_wrongly_is_told(pages: Pages, place: Place):
    for said, words in (
        ({"offset": "x"}, "not a number"),
        ({"offset": "1", "time": "now"}, "two places to begin"),
        ({"time": "yesterday"}, "yesterday"),
        ({"tag": "a", "sql": "b = 1"}, "two filters"),
        ({"sql": "a ="}, "filter"),
        ({"key": "k", "tag": "a"}, "all queues"),
        ({"queue": "99"}, "no queue"),
        ({"queue": "-1"}, "not a number"),
        ({"incarnation": "7"}, "no incarnation"),
        ({"topic": "nothing"}, "no queue"),
        ({"broker": "nobody"}, "no broker"),
    ):
        fields = {"topic": "orders", "queue": "1", **place, **said}
        got = pages.get("/messages", **fields)
        assert got.status == 400, said
        assert words in got.text
        assert "What to do" in got.text


def test_bodies_are_shown_only_when_asked_for(pages: Pages, bare_pages: Pages, place: Place):
    for path in ("/messages", "/message"):
        asked = {"topic": "orders", "queue": 1, "offset": 3, **place}
        with_body, without = pages.good(path, **asked).text, bare_pages.good(path, **asked).text
        assert "--bodies" in without
        assert "--bodies" not in with_body
    shown = [*pages.good("/message", **asked).page.each("pre")]
    assert shown
    assert not [*bare_pages.good("/message", **asked).page.each("pre")]


def test_timers_by_hour(stores: Any, tmp_path: Path):
    url = f"file://{tmp_path}/tier"
    store = stores("s02-delay-timer")
    attach(store, tmp_path / "tier", "--cluster", "c", "--broker", "b")
    here(
        "timer", "import", store, "--to", url, "--near", "0s", "--cluster", "c", "--broker", "b"
    ).good()
    document = here("timer", "ls", url, "--cost", "--json").document
    with served(url) as pages:
        got = pages.good("/timers", cluster="c", broker="b")
    rows = got.table("Hours")
    assert [(row["Hour"], row["Messages"]) for row in rows] == [
        (format_time(row["hour_ms"]), count(row["messages"])) for row in document["hours"]
    ]
    assert f"Waiting: {sum(row['messages'] for row in document['hours']):,} messages" in got.text
    assert f"takes {document['cost']['writes']:,} requests" in got.text
    titles = [title.text for title in got.page.each("title")]
    assert any(count(document["hours"][0]["messages"]) in title for title in titles)


def test_what_was_sent_back_to_mounts(tmp_path: Path):
    *_, newest = versions()
    shutil.copytree(newest / "tier", tmp_path / "tier")
    url, place = f"file://{tmp_path}/tier", {"cluster": PLACE.cluster, "broker": PLACE.broker}
    (log,) = here("status", url, "--json").document["brokers"][0]["retry_logs"]
    with served(url) as pages:
        (row,) = pages.good("/broker", **place).table("Retry logs")
        fleet = pages.good("/").text
    assert row.pop("Last entry") == format_time(log["updated_ms"])
    assert list(row.values()) == [
        log["mount"],
        *(count(log[name]) for name in ("waiting", "retries", "dead", "objects")),
        format_size(log["object_bytes"]),
    ]
    assert f"retry log of mount {log['mount']}: {log['waiting']} waiting, {log['dead']} in" in fleet


def test_an_archive_and_its_files(shown_tier: str, tmp_path: Path, place: Place):
    parquet = f"file://{tmp_path}/parquet"
    here("archive", shown_tier, "--to", parquet, "--topics", "orders", "--jobs", "1").good()
    plan = here("archive", shown_tier, "--to", parquet, "--dry-run", "--json").document
    with served(shown_tier, "--archive", parquet) as pages:
        got = pages.good("/archive", **place)
        (row,) = got.table("What is archived")
        files = pages.good("/archive", topic="orders", **place).table("Files")
        queue = pages.good("/queue", topic="orders", queue=1, **place)
    assert got.facts["Archived segments"] == count(plan["archived_before"])
    assert got.facts["To be archived"].startswith(f"{plan['planned']:,} segments, ")
    messages = here("cat", shown_tier, "orders").rows
    assert row["Topic"] == "orders"
    assert row["Messages"] == count(len(messages))
    found = sorted(
        str(p.relative_to(tmp_path / "parquet"))
        for p in (tmp_path / "parquet").rglob("data/**/*.parquet")
    )
    assert sorted(row["File"] for row in files) == found
    assert sum(int(row["Messages"].replace(",", "")) for row in files) == len(messages)
    bars = [bar for bar in queue.page.each("rect") if bar.attributes["class"] == "archived"]
    assert len(bars) > 1


def test_doctor_without_writing(pages: Pages, basic: Path, shown_tier: str):
    wanted = here("doctor", shown_tier, "--store", basic, "--json").document["checks"]
    rows = pages.good("/doctor").table("Checks")
    writing = {"may_put", "may_get", "may_delete", "conditional_writes", "clock"}
    assert [row["Check"] for row in rows] == [c["name"] for c in wanted if c["name"] not in writing]
    assert {row["Check"]: row["Result"] for row in rows}["journal"] == "ok"


def test_no_page_writes_and_none_is_broken(pages: Pages, shown_tier: str, tmp_path: Path):
    from pathlib import Path as Folder

    folder = Folder(shown_tier.removeprefix("file://"))
    before = entries(folder)
    found = every_page(pages, most=120)
    assert {got.status for got in found.values()} == {200}
    for target, got in found.items():
        if not target.startswith("/static"):
            assert [*got.page.each("h1")], target
    assert {target.partition("?")[0] for target in found} >= {
        *("/", "/broker", "/topic", "/queue", "/messages", "/message"),
        *("/timers", "/archive", "/costs", "/doctor"),
    }
    assert entries(folder) == before


def test_the_address_is_a_document_too(shown_tier: str):
    from support.command_line import spawn

    process = spawn("web", shown_tier, "--listen", "127.0.0.1:0", "--json", "--quiet")
    try:
        text = ""
        while not text.rstrip().endswith("}"):
            text += process.stdout.readline().decode()
        document = json.loads(text)
        assert document["url"] == shown_tier
        assert document["address"].startswith("http://127.0.0.1:")
    finally:
        process.terminate()
        assert process.communicate(timeout=60)[1] == b""
    assert process.returncode == 0


def test_of_several_brokers_the_one_that_remembers_the_store_has_a_lag(
    basic: Path, stores: Any, tmp_path: Path
):
    url = attach(
        basic, tmp_path / "tier", "--cluster", "c", "--broker", "mine", "--topics", "orders"
    )
    attach(stores("s04-batch-compress"), tmp_path / "tier", "--cluster", "c", "--broker", "other")
    wanted = here("status", url, "--store", basic, "--cluster", "c", "--broker", "mine", "--json")
    (broker,) = wanted.document["brokers"]
    with served(url, "--store", basic, "--refresh", "0.1") as found:
        until(lambda: "Lag, messages" in found.good("/").text)
        rows = {row["Broker"]: row for row in found.good("/").table("Brokers")}
        until(lambda: [*found.good("/broker", cluster="c", broker="mine").page.each("polyline")])
    assert broker["lag_messages"] > 0
    assert rows["c/mine"]["Lag, messages"] == count(broker["lag_messages"])
    assert rows["c/other"]["Lag, messages"] == "-"
