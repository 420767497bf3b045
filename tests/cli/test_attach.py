"""attach: what is tiered, how it ends, and what it says."""

from __future__ import annotations

import fcntl
import json
import os
import platform
import re
import shutil
import signal
import time
import urllib.error
import urllib.request
from importlib.metadata import version
from typing import TYPE_CHECKING

import pytest
from support.waiting import until

from tiered.addresses import Address
from tiered.attach.observe import is_well
from tiered.attach.settings import IndexSettings
from tiered.attach.writer import Attachment, AttachSettings
from tiered.cli.serve import MetricsServer
from tiered.cli.values import topic_filter
from tiered.index.indexer import Indexer

if TYPE_CHECKING:
    import subprocess
    from pathlib import Path

    from support.captures import InTopic, Unpack
    from support.command_line import CommandLine, Start


def topics(tiered: CommandLine, url: str) -> dict[str, int]:
    found: dict[str, int] = {}
    for row in tiered.good("ls", url, "-o", "jsonl").rows:
        found[row["topic"]] = found.get(row["topic"], 0) + row["messages"]
    return found


def test_once_tiers_everything_and_the_second_time_nothing(
    tiered: CommandLine, basic: Path, tmp_path: Path
):
    url = f"file://{tmp_path}"
    first = tiered.good("attach", basic, "--to", url, "--once", "--json")
    assert first.document["messages"] == 2613
    assert first.document["is_complete"]
    assert first.document["cluster"] == "cluster-a"
    assert re.match(r"tiered: 2,613 messages, 2.6 MiB in \d+ objects?, \d+ requests, ", first.err)
    second = tiered.good("attach", basic, "--to", url, "--once", "--json").document
    assert (second["messages"], second["epoch"]) == (0, 2)
    assert sum(topics(tiered, url).values()) == 2613


def test_quiet_says_nothing(tiered: CommandLine, basic: Path, tmp_path: Path):
    ran = tiered.good("attach", basic, "--to", f"file://{tmp_path}", "--once", "--quiet")
    assert (ran.out, ran.err) == (b"", "")


def test_topics_and_exclude_are_globs_on_the_topic(
    tiered: CommandLine, basic: Path, tmp_path: Path
):
    url = f"file://{tmp_path}"
    more = ["--topics", "orders,*e*", "--exclude", "large", "--exclude", "name-*"]
    assert tiered.good("attach", basic, "--to", url, "--once", *more, "--json").document[
        "is_complete"
    ]
    assert set(topics(tiered, url)) == {"orders", "events", "unicode"} | {
        "many-properties",
        "sparse",
        "with-empty-bodies",
    }


def test_selector():
    assert topic_filter([], [])("any")
    assert topic_filter(["a*"], ["ab"])("abc")
    assert not topic_filter(["a*"], ["ab"])("ab")
    assert not topic_filter(["A"], [])("a")


def test_start_latest_and_start_at_a_time(
    tiered: CommandLine, basic: Path, tmp_path: Path, dumped: InTopic
):
    latest = tiered.good(
        "attach", basic, "--to", f"file://{tmp_path}/a", "--once", "--start", "latest", "--json"
    )
    assert latest.document["messages"] == 0
    orders = dumped("s01-basic", "orders")
    times = sorted(message["store_timestamp_ms"] for message in orders)
    middle = times[len(times) // 2]
    later = tiered.good(
        *("attach", basic, "--to", f"file://{tmp_path}/b", "--once", "--json"),
        *("--topics", "orders", "--start", str(middle)),
    )
    assert later.document["messages"] == sum(time_ms >= middle for time_ms in times)


def test_seal_seals_every_segment(tiered: CommandLine, basic: Path, tmp_path: Path):
    url = f"file://{tmp_path}"
    tiered.good("attach", basic, "--to", url, "--once", "--seal", "--bundle-size", "64KiB")
    rows = tiered.good("ls", url, "--objects", "-o", "jsonl").rows
    assert {part["state"] for row in rows for part in row["parts"]} == {"sealed"}
    assert tiered("attach", basic, "--to", url, "--seal").code == 2


def test_strict_counts_what_is_recorded(
    tiered: CommandLine, batches: Path, basic: Path, tmp_path: Path
):
    left_out = ("attach", batches, "--to", f"file://{tmp_path}/a", "--once")
    relaxed = tiered.good(*left_out)
    assert "tiered: left out (light queue" in relaxed.err
    assert tiered(*left_out, "--strict").code == 1
    assert tiered("attach", basic, "--to", f"file://{tmp_path}/b", "--once", "--strict").code == 0


def test_a_torn_tail_is_told_and_is_no_failure(
    tiered: CommandLine, unpacked: Unpack, tmp_path: Path
):

    store = unpacked("s05b-torn")
    ran = tiered.good("attach", store, "--to", f"file://{tmp_path}/t", "--once", "--json")
    assert ran.document["torn_bytes"] > 0
    assert "torn tail" in ran.err


def test_a_flipped_tag_code_hides_no_message(
    tiered: CommandLine, basic: Path, tmp_path: Path, dumped: InTopic
):
    """Who filters by the tag has it, and the summary says that an entry was wrong; with --strict that is code 1."""
    store, url = tmp_path / "store", f"file://{tmp_path}/t"
    shutil.copytree(basic, store)
    wanted = [row for row in dumped("s01-basic", "orders") if row["tag_hash"]]
    hit = next(row for row in wanted if row["queue_id"] == 1 and row["queue_offset"] > 5)
    same = [row for row in wanted if row["tag_hash"] == hit["tag_hash"]]
    at = hit["queue_offset"] * 20 + 18
    folder = store / "consumequeue" / "orders" / "1"
    file = max(path for path in folder.iterdir() if int(path.name) <= at)
    data = bytearray(file.read_bytes())
    data[at - int(file.name)] ^= 0x04
    file.write_bytes(data)
    ran = tiered("attach", store, "--to", url, "--once", "--strict", "--json")
    assert ran.code == 1
    assert ran.document["wrong_tag_codes"] == 1
    assert "1 entry with a wrong tag code" in ran.err
    found = tiered.good(
        "cat", url, "orders", "--tag", hit["properties"]["TAGS"], "-o", "jsonl"
    ).rows
    assert len(found) == len(same)


def test_a_damaged_record_is_quarantined_and_told(
    tiered: CommandLine, basic: Path, tmp_path: Path, dumped: InTopic
):
    store = tmp_path / "store"
    shutil.copytree(basic, store)
    damaged = dumped("s01-basic", "orders")[200]
    file = store / "commitlog" / f"{damaged['physical_offset'] // 262144 * 262144:020d}"
    data = bytearray(file.read_bytes())
    data[damaged["physical_offset"] % 262144 + 120] ^= 0xFF
    file.write_bytes(data)
    url = f"file://{tmp_path}/tier"
    ran = tiered("attach", store, "--to", url, "--once", "--json")
    assert (ran.code, ran.document["quarantined"]) == (1, 1)
    assert tiered.good("attach", store, "--to", url, "--once").code == 0
    queue = next(
        row
        for row in tiered.good("status", url, "-o", "jsonl").rows
        if (row["topic"], row["queue_id"]) == ("orders", damaged["queue_id"])
    )
    assert (queue["quarantined"], queue["holes"]) == (1, 1)
    offsets = [m["queue_offset"] for m in tiered.good("cat", url, "orders").rows]
    assert len(offsets) == 1199


def test_what_stands_behind_damage_of_a_stopped_store_waits_for_a_person(
    tiered: CommandLine, unpacked: Unpack, tmp_path: Path, dumped: InTopic
):
    """A broker's start would give it up; with the file put right it is tiered."""
    store, url = unpacked("s09-big-offsets"), f"file://{tmp_path}/tier"
    messages = sorted(dumped("s09-big-offsets", "far"), key=lambda one: one["physical_offset"])
    place = messages[-20]["physical_offset"]
    file = max(path for path in (store / "commitlog").iterdir() if int(path.name) <= place)
    sound = file.read_bytes()
    damaged, at = bytearray(sound), place - int(file.name)
    damaged[at + 8] ^= 1  # of the CRC
    file.write_bytes(damaged)
    ran = tiered("attach", store, "--to", url, "--once", "--json")
    assert (ran.code, ran.document["is_complete"]) == (1, False)
    assert ran.document["waiting_records"] >= 20
    assert f"{file}, byte {at}, where a record is damaged" in ran.err
    assert f"{file}, byte {at}" in tiered("status", url, "--store", store).text
    checked = tiered("verify", url, "--store", store, "--json")
    assert checked.code == 1  # they are not in the tier, and the disks may not go
    assert checked.document["comparison"]["waiting_records"] == ran.document["waiting_records"]
    assert f"{file}, byte {at}" in checked.document["problems"][0]["detail"]
    file.write_bytes(sound)
    assert tiered.good("attach", store, "--to", url, "--once", "--json").document["is_complete"]
    assert len(tiered.good("cat", url, "far").rows) == len(messages)


def test_a_record_of_which_nothing_is_left_is_missing_and_needs_a_person(
    tiered: CommandLine, basic: Path, tmp_path: Path, dumped: InTopic
):
    """Its consume queue lists it, and there are zeros: a hole, and no failure that nobody hears of."""
    store = tmp_path / "store"
    shutil.copytree(basic, store)
    lost = dumped("s01-basic", "orders")[200]
    file = store / "commitlog" / f"{lost['physical_offset'] // 262144 * 262144:020d}"
    data, at = bytearray(file.read_bytes()), lost["physical_offset"] % 262144
    data[at : at + lost["size"]] = bytes(lost["size"])
    file.write_bytes(data)
    url = f"file://{tmp_path}/tier"
    ran = tiered("attach", store, "--to", url, "--once", "--json")
    assert (ran.code, ran.document["missing"], ran.document["quarantined"]) == (1, 1, 0)
    assert "tiered: 1 message is not in the store" in ran.err
    assert tiered.good("attach", store, "--to", url, "--once", "--json").document["missing"] == 0
    assert len(tiered.good("cat", url, "orders").rows) == 1199


def test_another_holder_is_told_of_or_waited_for(
    start: Start, tiered: CommandLine, basic: Path, tmp_path: Path
):
    url = f"file://{tmp_path}"
    holder = Attachment.open(str(basic), url, AttachSettings(lease_s=3600))
    try:
        refused = tiered("attach", basic, "--to", url, "--once", "--no-wait")
        assert refused.code == 4
        assert "holds the lease" in refused.error
        waiting = start("attach", basic, "--to", url, "--once")
        assert b"tiered: waiting for the lease of process" in waiting.stderr.readline()
        assert waiting.poll() is None
    finally:
        holder.close()
    _, err = waiting.communicate(timeout=60)
    assert waiting.returncode == 0, err


def fetch(url: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(url, timeout=10) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def metrics_of(process: subprocess.Popen[bytes]) -> str:
    """Where an attach that has just been started with ``--metrics-listen`` serves, once it does."""
    said = process.stderr.readline().decode() + process.stderr.readline().decode()
    assert "tiered: tiering " in said
    base, deadline = re.search(r"http://127.0.0.1:\d+", said)[0], time.monotonic() + 60
    while fetch(f"{base}/healthz") == (503, "it is being opened"):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return base


def values_of(base: str) -> dict[str, float]:
    status, text = fetch(f"{base}/metrics")
    assert status == 200
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_drains_and_ends_well(
    number: signal.Signals, start: Start, tiered: CommandLine, basic: Path, tmp_path: Path
):
    url = f"file://{tmp_path}/tier"
    more = ("--freshness", "600", "--metrics-listen", "127.0.0.1:0")
    process = start("attach", basic, "--to", url, "--json", *more)
    try:
        base = metrics_of(process)
        deadline = time.monotonic() + 60
        while not values_of(base).get("tiered_buffer_bytes"):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        process.send_signal(number)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 0, err
    document = json.loads(out)
    taken = document["messages"]
    assert sum(topics(tiered, url).values()) == taken > 0  # though nothing was due yet
    assert taken + document["behind_messages"] == 2613  # a busy machine may have read a part only
    assert document["is_drained"]
    assert b'"released":true' in next(tmp_path.glob("tier/*/*/lease")).read_bytes()


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
def test_what_cannot_drain_is_cut_short(
    number: signal.Signals, code: int, start: Start, basic: Path, tmp_path: Path
):
    """An upload rate so low that nothing gets through: draining ends after its time."""
    url = f"file://{tmp_path}/tier"
    slow = ("--max-upload-rate", "1KiB", "--drain-seconds", "0.5", "--bundle-size", "16KiB")
    process = start("attach", basic, "--to", url, *slow)
    try:
        deadline = time.monotonic() + 60
        while not [*tmp_path.glob("tier/*/*/queue"), *tmp_path.glob("tier/*/*/bundle")]:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        process.send_signal(number)
        _, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == code, err
    assert b"Traceback" not in err
    assert b'"released":true' in next(tmp_path.glob("tier/*/*/lease")).read_bytes()


def test_metrics_and_health_are_served(start: Start, basic: Path, tmp_path: Path):
    to = ("--to", f"file://{tmp_path}/tier", "--freshness", "0.2")
    process = start("attach", basic, *to, "--metrics-listen", "127.0.0.1:0")
    try:
        base = metrics_of(process)
        deadline = time.monotonic() + 60
        while True:
            values = values_of(base)
            lag = values.get('tiered_lag_messages{topic="orders"}')  # told a moment after the total
            if (values.get("tiered_committed_messages_total"), lag) == (2613, 0):
                break
            assert time.monotonic() < deadline, values
            time.sleep(0.1)
        assert values["tiered_up"] == 1
        assert (puts := values['tiered_requests_total{kind="put"}']) > 3
        assert 0 < values['tiered_request_seconds_count{kind="put"}'] <= puts
        assert values["tiered_commit_seconds_count"] == values["tiered_rounds_total"] > 0
        assert 0 < values["tiered_commit_seconds_sum"] < 60 * values["tiered_rounds_total"]
        assert values["tiered_parts_total"] >= 25 > values["tiered_bundles_total"] > 0
        assert values["tiered_merge_retries_total"] == 0
        assert values["tiered_unmergeable_bundles_total"] == 0
        assert values["process_resident_memory_bytes"] > 1 << 20
        said = f'{{python="{platform.python_version()}",version="{version("tieredmq")}"}}'
        assert values[f"tiered_build_info{said}"] == 1
        # Looking whether a lease or an entry is there already is no error.
        assert not [name for name in values if name.startswith("tiered_request_errors_total")]
        assert fetch(f"{base}/livez") == fetch(f"{base}/readyz") == (200, "ok")
        assert fetch(f"{base}/healthz") == (200, "ok")
        assert fetch(f"{base}/other")[0] == 404
    finally:
        process.terminate()
        process.communicate(timeout=60)
    assert process.returncode == 0


def until_unhealthy(base: str) -> str:
    deadline = time.monotonic() + 60
    while (found := fetch(f"{base}/healthz"))[0] == 200:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert found[0] == 503
    return found[1]


def test_it_is_unhealthy_while_nothing_can_be_committed(start: Start, basic: Path, tmp_path: Path):
    to = ("--to", f"file://{tmp_path}/tier", "--freshness", "0.2", "--drain-seconds", "0.1")
    slow = ("--max-upload-rate", "1KiB", "--bundle-size", "16KiB")
    process = start("attach", basic, *to, *slow, "--metrics-listen", "127.0.0.1:0")
    try:
        base = metrics_of(process)
        assert fetch(f"{base}/healthz") == (200, "ok")
        assert re.match(r"nothing could be committed for \d+ s", until_unhealthy(base))
        assert values_of(base)["tiered_up"] == 0
        status, said = fetch(
            f"{base}/livez"
        )  # slow because it was told to be: no reason for a new start
        assert (status, said.partition(" for ")[0]) == (200, "nothing could be committed")
    finally:
        process.terminate()
        process.communicate(timeout=60)


def test_it_is_unhealthy_when_its_index_has_ended(
    monkeypatch: pytest.MonkeyPatch, basic: Path, tmp_path: Path
):
    def ends(*_: object, **__: object) -> int:
        raise ZeroDivisionError

    monkeypatch.setattr(Indexer, "step", ends)
    settings = AttachSettings(index=IndexSettings())
    attachment = Attachment.open(str(basic), f"file://{tmp_path}/tier", settings)
    pages = {"/healthz": lambda: (not is_well(attachment), is_well(attachment))}
    server = MetricsServer(Address("127.0.0.1", 0), str, pages)
    try:
        said = until_unhealthy(f"http://127.0.0.1:{server.port}")
        assert said == "the key index ended by a defect: ZeroDivisionError: "
        attachment.run(once=True)  # the messages are tiered all the same
    finally:
        server.close()
        attachment.close()


def test_an_address_in_use_is_wrong_usage(tiered: CommandLine, basic: Path, tmp_path: Path):
    import socket

    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        to = ("--to", f"file://{tmp_path}", "--once")
        ran = tiered("attach", basic, *to, "--metrics-listen", address)
    assert ran.code == 2
    assert "cannot listen" in ran.error


def wait_for_lease(folder: Path) -> Path:
    deadline = time.monotonic() + 60
    while not (found := list(folder.glob("*/*/lease"))):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return found[0]


def test_a_scheduled_archive_has_something_new_of_quiet_topics(
    tiered: CommandLine, start: Start, basic: Path, tmp_path: Path
):
    """Nothing comes any more, and attach goes on running."""
    url = f"file://{tmp_path}/tier"
    process = start("attach", basic, "--to", url, "--segment-age", "1s", "--freshness", "0.2")
    try:
        wait_for_lease(tmp_path / "tier")

        def is_sealed() -> bool:
            ran = tiered("ls", url, "--json")
            rows = ran.document["queues"] if ran.code == 0 else []
            held = [row for row in rows if row["messages"]]
            return sum(row["messages"] for row in held) == 2613 and all(
                row["sealed_segments"] == row["segments"] for row in held
            )

        until(is_sealed)
        plan = tiered.good(
            "archive", url, "--to", f"file://{tmp_path}/parquet", "--dry-run", "--json"
        ).document
        assert sum(task["end"] - task["start"] for task in plan["tasks"]) == 2613
    finally:
        process.terminate()
        process.communicate(timeout=60)
    assert process.returncode == 0


def test_who_is_fenced_ends_with_4(start: Start, basic: Path, tmp_path: Path):
    """A writer is paused for longer than its lease; who took over meanwhile is found when it wakes up."""
    folder = tmp_path / "tier"
    process = start("attach", basic, "--to", f"file://{folder}", "--lease-seconds", "2")
    try:
        lease = wait_for_lease(folder)
        before, deadline = lease.read_bytes(), time.monotonic() + 60
        while lease.read_bytes() == before:
            assert time.monotonic() < deadline
        with (folder / ".tiered-tmp" / "lock").open("rb") as held:
            fcntl.flock(held, fcntl.LOCK_EX)  # asleep it must not hold the folder's lock: we do
            process.send_signal(signal.SIGSTOP)
        settings = AttachSettings(lease_s=30)
        second = Attachment.open(str(basic), f"file://{folder}", settings)
        try:
            process.send_signal(signal.SIGCONT)
            _, err = process.communicate(timeout=60)
        finally:
            second.close()
    finally:
        process.kill()
    assert process.returncode == 4, err
    assert err.count(b"tiered: error: ") == 1
    assert b"Traceback" not in err


@pytest.mark.parametrize(("once", "code"), [(False, 0), (True, 143)])
def test_a_signal_while_waiting_for_the_lease(
    once: bool, code: int, start: Start, basic: Path, tmp_path: Path
):
    """Nothing is in hand; but with --once the work was not done."""
    url = f"file://{tmp_path}/tier"
    holder = Attachment.open(str(basic), url, AttachSettings(lease_s=60))
    try:
        process = start("attach", basic, "--to", url, *(["--once"] if once else []))
        assert b"waiting for the lease" in process.stderr.readline()
        process.terminate()
        _, err = process.communicate(timeout=60)
        assert (process.returncode, err) == (code, b"")
    finally:
        holder.close()


def test_a_tier_that_cannot_be_written_is_3(tiered: CommandLine, basic: Path, tmp_path: Path):
    (tmp_path / "file").write_text("x")
    ran = tiered("attach", basic, "--to", f"file://{tmp_path}/file/tier", "--once")
    assert ran.code in {2, 3}
    assert "file/tier" in ran.error


def test_attach_steps_back_behind_the_broker(
    start: Start, tiered: CommandLine, basic: Path, tmp_path: Path
):
    assert tiered("attach", basic, "--to", f"file://{tmp_path}", "--nice", "20").code == 2
    process = start("attach", basic, "--to", f"file://{tmp_path}/tier", "--nice", "19")
    try:
        deadline = time.monotonic() + 60
        while os.getpriority(os.PRIO_PROCESS, process.pid) != 19:
            assert time.monotonic() < deadline
            time.sleep(0.05)
    finally:
        process.terminate()
        process.communicate(timeout=60)
