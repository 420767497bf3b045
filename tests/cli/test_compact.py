"""``tiered compact`` from the command line, on a real broker's topic with a compaction policy."""

from __future__ import annotations

import gzip
import json
import os
import time
from typing import TYPE_CHECKING, Any

import pytest
from support.captures import FOLDER
from support.command_line import spawn

from tiered.clock import SystemClock
from tiered.crashpoints import EXIT_CODE, VARIABLE
from tiered.model import MessageQueue
from tiered.store.embedded import MessageStore
from tiered.store.new_message import NewMessage
from tiered.store.store_options import Compacting, StoreOptions

if TYPE_CHECKING:
    from pathlib import Path

    from support.captures import Unpack
    from support.command_line import CommandLine

NOW = ("--dirty-ratio", "0")


@pytest.fixture
def store(unpacked: Unpack) -> Path:
    return unpacked("s07-compaction")


@pytest.fixture
def url(tiered: CommandLine, store: Path, tmp_path: Path) -> str:
    made = f"file://{tmp_path}/tier"
    tiered.good("attach", store, "--to", made, "--once", "--seal")
    return made


def messages(tiered: CommandLine, url: str, *more: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in tiered.good("cat", url, "prices", *more).out.splitlines()]


def dumped(name: str) -> list[dict[str, Any]]:
    data = gzip.decompress((FOLDER / f"s07-compaction.{name}.jsonl.gz").read_bytes())
    return [json.loads(line) for line in data.splitlines()]


def final_state(rows: list[dict[str, Any]]) -> dict[tuple[int, str], tuple[int, str]]:
    found = {}
    for row in sorted(rows, key=lambda one: (one["queue_id"], one["queue_offset"])):
        found[row["queue_id"], row["keys"]] = row["queue_offset"], row["body_base64"]
    return found


def test_what_is_left_is_the_state_that_a_real_client_pulled_from_the_brokers_own_compaction(
    tiered: CommandLine, store: Path, url: str, tmp_path: Path
):
    before = messages(tiered, url)
    file = tmp_path / "plan.json"
    planned = tiered(
        "compact", url, "--store", store, *NOW, "--plan", file, "--exit-code", "--json"
    )
    assert planned.code == 1
    assert planned.document["topics"] == ["prices"]
    assert messages(tiered, url) == before
    done = tiered.good("compact", url, "--apply", file, *NOW, "--json").document["applied"]
    assert (done["steps"], done["entries"]) == (2, 1)
    after = messages(tiered, url)
    assert len(before) - len(after) == planned.document["gone_messages"] == 620
    pulled = final_state(dumped("end"))
    assert final_state(after) == final_state(before) == pulled
    ours = {(row["queue_id"], row["queue_offset"]) for row in after}
    theirs = {(row["queue_id"], row["queue_offset"]) for row in dumped("end")}
    assert ours <= theirs, "the broker leaves its active file as it is"
    kept = {(row["queue_id"], row["queue_offset"]): row for row in before}
    for row in after:
        was = kept[row["queue_id"], row["queue_offset"]]
        assert {**row, "log_offset": 0} == {**was, "log_offset": 0}
    again = tiered.good("compact", url, "--apply", file, *NOW, "--json").document["applied"]
    assert again["was_applied"]
    left = tiered.good("compact", url, "--topic", "prices", *NOW, "--json").document
    assert (left["steps"], {row["due"] for row in left["left"]}) == ([], {"nothing new"})


def test_verify_and_gc_take_it_as_it_is(tiered: CommandLine, store: Path, url: str):
    applied = ("--apply", "-")
    text = tiered.good("compact", url, "--topic", "prices", *NOW, *applied).text
    assert "2 queues (done before: 0)" in text
    found = tiered.good("verify", url, "--deep", "--store", store, "--json").document
    assert found["problems"] == []
    assert found["comparison"]["compacted_messages"] == 620
    on = tiered.good("attach", store, "--to", url, "--once", "--json").document
    assert (on["messages"], on["is_complete"]) == (0, True)
    tiered.good("gc", url, "--grace", "1ms", *applied)
    assert tiered.good("verify", url, "--deep", "--json").document["problems"] == []
    one = messages(tiered, url, "--queue", "0", "--offset", "1", "--count", "1")
    assert one[0]["queue_offset"] > 1


def test_mistakes_are_told(tiered: CommandLine, url: str, tmp_path: Path):
    assert "no topic is to be compacted" in tiered("compact", url).err
    assert "no topic none" in tiered("compact", url, "--topic", "none").err
    assert "cannot be read" in tiered("compact", url, "--store", tmp_path / "x").err
    file = tmp_path / "plan.json"
    tiered.good("compact", url, "--topic", "prices", *NOW, "--plan", file)
    other = tiered("compact", url, "--apply", file, "--policy", "rocketmq")
    assert "policy careful" in other.err
    ran = tiered("attach", tmp_path, "--to", url, "--compact", "--compact-interval", "0s")
    assert (ran.code, "longer than nothing" in ran.error) == (2, True)
    assert "nothing is changed" in tiered.good("compact", url, "--topic", "prices", *NOW).text


def test_a_topic_of_the_store_to_which_nothing_was_sent_keeps_no_other_from_it(
    tiered: CommandLine, tmp_path: Path
):
    store, url, archive = (f"{tmp_path}/store", f"file://{tmp_path}/tier", f"file://{tmp_path}/all")
    sent = [{"topic": "prices", "queue_id": 0, "keys": "k", "body_base64": "YQ=="}] * 3
    (tmp_path / "sent").write_text("".join(json.dumps(one) + "\n" for one in sent))
    tiered.good("store", "create", store)
    for topic in ("empty", "prices"):
        tiered.good("store", "topic", store, topic, "--compacted")
    tiered.good("store", "put", store, tmp_path / "sent")
    tiered.good("attach", store, "--to", url, "--once", "--seal")
    tiered.good("archive", url, "--to", archive, "--engine", "local")
    latest = tiered.good("compact", url, "--store", store, "--archive", archive, "--json").document
    assert [row["topic"] for row in latest["topics"]] == ["prices"]
    done = tiered.good("compact", url, "--store", store, *NOW, "--apply", "-", "--json").document
    assert (done["topics"], done["gone_messages"]) == (["prices"], 2)
    assert "no topic empty" in tiered("compact", url, "--topic", "empty", "--store", store).err


@pytest.mark.parametrize("ratio", ["2", "-1", "nan"])
def test_a_ratio_that_no_queue_reaches_is_refused(tiered: CommandLine, tmp_path: Path, ratio: str):
    ran = tiered("compact", f"file://{tmp_path}", "--topic", "prices", f"--dirty-ratio={ratio}")
    assert (ran.code, "from 0 to 1" in ran.error) == (2, True)


@pytest.mark.parametrize("point", ["compacted-stored", "compacted-named"])
def test_a_process_that_ends_at_a_point_leaves_what_the_next_one_finishes(
    tiered: CommandLine, store: Path, url: str, tmp_path: Path, point: str
):
    file = tmp_path / "plan.json"
    tiered.good("compact", url, "--store", store, *NOW, "--plan", file)
    state = final_state(messages(tiered, url))
    process = spawn("compact", url, "--apply", file, *NOW, environment={VARIABLE: point})
    process.communicate(timeout=100)
    assert process.returncode == EXIT_CODE
    assert final_state(messages(tiered, url)) == state
    tiered.good("compact", url, "--apply", file, *NOW)
    assert final_state(messages(tiered, url)) == state
    assert len(messages(tiered, url)) == len(final_state(dumped("end")))
    tiered.good("verify", url, "--deep", "--store", store)


@pytest.mark.parametrize("is_whole", [False, True])
def test_what_a_commit_log_has_lost_is_tiered_from_the_compaction_log(
    tiered: CommandLine, tmp_path: Path, is_whole: bool
):
    """Of a store whose log has expired, in part or wholly: a consumer from the start gets the final state all the same."""
    root, made = tmp_path / "s", f"file://{tmp_path}/tier"
    options = StoreOptions(
        16_384, 50, index_slots=100, index_items=400, message_bytes_max=4_000,
        compacting=Compacting(8_000, 30, interval_s=1e9),
    )  # fmt: skip
    sent = [f"k{n}" for n in range(30)] + ["busy"] * 150 + [f"k{n}" for n in range(5)]
    with MessageStore.create(
        root, cluster="c", broker="b", clock=SystemClock(), options=options
    ) as store:
        store.create_topic("prices", queues=1, is_compacted=True)
        for key in sent:
            store.append(NewMessage("prices", 0, b"x" * 300, keys=key))
        if is_whole:
            for number in range(150):
                store.append(NewMessage("other", 0, b"%d" % number * 300))
        store.wait_listed()
        for path in sorted((root / "commitlog").iterdir())[:-1]:
            os.utime(path, (1, 1))
        assert store.expire().log_files
        store.compact()
        wanted = {}
        at, end = store.reader.bounds(MessageQueue("prices", 0))
        while at < end:
            got = store.reader.get(MessageQueue("prices", 0), at)
            wanted.update((one.queue_offset, one.properties["KEYS"]) for one in got.records)
            at = got.next_offset
    for _ in range(2):
        ran = tiered.good(
            "attach", root, "--to", made, "--once", "--give-up-seconds", "20", "--json"
        )
        assert "gap" not in ran.err
        assert {row["queue_offset"]: row["keys"] for row in messages(tiered, made)} == wanted
    assert set(wanted.values()) == set(sent)
    assert tiered("verify", made, "--deep").code == 0
    assert tiered("verify", made, "--store", root).code == 0


@pytest.mark.parametrize("first", ["once", "k0"])
def test_what_came_while_nobody_followed_is_taken_though_what_was_taken_last_is_compacted(
    tiered: CommandLine, tmp_path: Path, first: str
):
    """The commit log has nothing of the queue any more, and of what was taken last a newer message took the place."""
    root, made = tmp_path / "s", f"file://{tmp_path}/tier"
    options = StoreOptions(
        16_384, 50, index_slots=100, index_items=400, message_bytes_max=4_000,
        compacting=Compacting(8_000, 30, interval_s=1e9),
    )  # fmt: skip
    sent = [first, *(f"k{n % 9}" for n in range(39))]
    with MessageStore.create(
        root, cluster="c", broker="b", clock=SystemClock(), options=options
    ) as store:
        store.create_topic("prices", queues=1, is_compacted=True)
        for key in sent:
            store.append(NewMessage("prices", 0, b"x" * 300, keys=key))
        store.wait_listed()
    run = ("attach", root, "--to", made, "--once", "--give-up-seconds", "20")
    tiered.good(*run)
    more = [f"k{n % 9}" for n in range(80)]
    with MessageStore.open(
        root, cluster="c", broker="b", clock=SystemClock(), options=options
    ) as store:
        for key in more:
            store.append(NewMessage("prices", 0, b"y" * 300, keys=key))
        for number in range(150):
            store.append(NewMessage("other", 0, b"%d" % number * 300))
        store.wait_listed()
        for path in sorted((root / "commitlog").iterdir())[:-1]:
            os.utime(path, (1, 1))
        assert store.expire().log_files
        store.compact()
        low, _ = store.reader.bounds(MessageQueue("prices", 0))
        assert low == 0 if first == "once" else low > 40
    tiered.good(*run)
    last = {row["keys"]: row["queue_offset"] for row in messages(tiered, made)}
    assert last == {first: 0} | {key: 40 + at for at, key in enumerate(more)}


def test_attach_compacts_by_itself_when_asked(tiered: CommandLine, store: Path, url: str):
    before = len(messages(tiered, url))
    process = spawn("attach", store, "--to", url, "--compact", "--compact-interval", "1s")
    try:
        for _ in range(200):
            time.sleep(0.3)
            rows = messages(tiered, url)
            if len(rows) < before:
                break
        assert len(rows) < before
        assert final_state(rows) == final_state(dumped("end"))
    finally:
        process.terminate()
        _, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    # What a busy machine has it say of its store is no matter here.
    assert b"is not compacted" not in err
    assert b"tried again later" not in err
    assert "stays" in tiered("attach", store, "--to", url, "--once", "--compact").error


@pytest.mark.slow
@pytest.mark.spark
@pytest.mark.filterwarnings("ignore")
def test_spark_leaves_what_this_process_leaves(tiered: CommandLine, store: Path, tmp_path: Path):
    left = []
    for engine in ("local", "spark"):
        url = f"file://{tmp_path}/{engine}"
        tiered.good("attach", store, "--to", url, "--once", "--seal")
        spark = ("--engine", engine, "--master", "local[2]") if engine == "spark" else ()
        done = tiered.good("compact", url, "--store", store, *NOW, *spark, "--apply", "-", "--json")
        assert done.document["gone_messages"] == 620
        assert tiered.good("verify", url)
        left.append([{**row, "log_offset": 0} for row in messages(tiered, url)])
    assert left[0] == left[1]
