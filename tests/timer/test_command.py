"""The commands of ``tiered timer``, as people and scripts call them."""

from __future__ import annotations

import base64
import re
import shutil
from typing import TYPE_CHECKING, Any

import pytest
from support import captures
from support.clocks import Shifted
from support.timer_stores import CAPTURED_MS, Made, delivered, pending

from tiered.clock import ManualClock
from tiered.errors import DataError, InvalidError
from tiered.format.sysflag import COMPRESSED
from tiered.local.catalog import WHEEL_TOPIC
from tiered.log.timers import HOUR_MS
from timer.dequeue import TimerReader
from timer.local_target import LocalTarget

if TYPE_CHECKING:
    from pathlib import Path

    from support.command_line import CommandLine

    from tiered.log.state import TierState


def test_a_store_is_imported_listed_and_shown(tiered: CommandLine, store: Path):
    url = f"file://{store.parent}/tier"
    made = tiered("timer", "import", store, "--to", url, "--near", "0s", "--json")
    assert (made.code, made.document["taken"], made.document["near"]) == (0, 226, 0)
    assert made.document["cancelled"] == 16
    hours = tiered("timer", "ls", url, "--json").document["hours"]
    assert sum(row["messages"] for row in hours) == 226
    assert all(row["hour_ms"] <= row["due_min_ms"] <= row["due_max_ms"] for row in hours)
    listed = tiered("timer", "ls", url, "--messages", "-o", "jsonl").rows
    found = [(row["due_timestamp_ms"], row["topic"], row["msg_id"]) for row in listed]
    assert found == sorted(found, key=lambda row: row[0])
    assert {*found} == {*pending()}
    expected = {m["msg_id"]: m for m in captures.dump("s02-delay-timer", "message")}
    for row in listed:
        was = expected[row["msg_id"]]
        assert (row["body_base64"], row["tags"], row["keys"], row["properties"]) == (
            was["body_base64"], was["tags"], was["keys"], was["properties"]
        )  # fmt: skip
    shown = tiered("timer", "show", url, hours[0]["hour_ms"] + 1, "--json").document
    assert len(shown["messages"]) == hours[0]["messages"]
    assert base64.b64decode(shown["messages"][0]["body_base64"])
    assert "226 messages" in tiered("timer", "ls", url).text


def test_what_stays_is_said_and_nothing_comes_twice(tiered: CommandLine, store: Path):
    url = f"file://{store.parent}/tier"
    tiered.clock = ManualClock(CAPTURED_MS)
    first = tiered("timer", "import", store, "--to", url, "--near", "4h", "--json")
    late = sum(pending(CAPTURED_MS + 4 * HOUR_MS).values())
    assert (first.document["taken"], first.document["near"]) == (late, 226 - late)
    again = tiered("timer", "import", store, "--to", url, "--near", "4h", "--json")
    assert (again.document["taken"], again.document["known"]) == (0, late)
    shown = tiered("timer", "import", store, "--to", url, "--near", "4h")
    assert f"{226 - late} messages due within the near window" in shown.text


def test_cancel(tiered: CommandLine, store: Path):
    url = f"file://{store.parent}/tier"
    tiered("timer", "import", store, "--to", url, "--near", "0s")
    rows = tiered("timer", "ls", url, "--messages", "-o", "jsonl").rows
    done = tiered("timer", "cancel", url, rows[7]["msg_id"], "--json").document
    assert [one["due_timestamp_ms"] for one in done["cancelled"]] == [rows[7]["due_timestamp_ms"]]
    left = tiered("timer", "ls", url, "--messages", "-o", "jsonl").rows
    assert left == rows[:7] + rows[8:]
    assert sum(r["messages"] for r in tiered("timer", "ls", url, "--json").document["hours"]) == 225
    again = tiered("timer", "cancel", url, rows[7]["msg_id"])
    assert (again.code, "no pending message" in again.error) == (2, True)


def test_a_damaged_hour_holds_up_no_other(
    tiered: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """What lies in sound hours is listed and cancelled; what cannot be read is named."""
    url, tiered.clock = f"file://{tmp_path}/tier", ManualClock(CAPTURED_MS)
    with Made(tmp_path) as made:
        for hour, key in ((2, "A"), (6, "B"), (6, "C")):
            made.timed(hour * HOUR_MS, key)
        made.flush()
        tiered.good("timer", "import", made.folder, "--to", url, "--near", "0s")
        made.timed(2 * HOUR_MS, "M", TIMER_DEL_UNIQKEY="D")  # so that `ls` has to read
    tiered.good("timer", "import", made.folder, "--to", url, "--near", "0s")
    first, batches = CAPTURED_MS // HOUR_MS + 2, TimerReader._batches

    def damaged(self: TimerReader, state: TierState, hour: int, *rest: Any) -> Any:
        if hour == first:
            raise DataError("its checksum is wrong", where="an object")
        return batches(self, state, hour, *rest)

    monkeypatch.setattr(TimerReader, "_batches", damaged)
    named = [{"hour_ms": first * HOUR_MS, "reason": "its checksum is wrong (an object)"}]
    for more in ((), ("--messages",), ("-o", "jsonl"), ("--messages", "-o", "jsonl")):
        ran = tiered("timer", "ls", url, *more)
        assert (ran.code, "1 hour cannot be read whole: 20" in ran.error) == (5, True)
    assert [row["msg_id"] for row in ran.rows] == ["B", "C"]
    ran = tiered("timer", "ls", url, "--json")
    assert (ran.code, ran.document["damaged"]) == (5, named)
    assert [row["messages"] for row in ran.document["hours"]] == [2]
    ran = tiered("timer", "ls", url, "--messages", "--json")
    assert (ran.code, ran.document["damaged"]) == (5, named)
    assert [row["msg_id"] for row in ran.document["messages"]] == ["B", "C"]
    assert tiered("timer", "show", url, first * HOUR_MS).code == 5
    assert tiered.good("timer", "show", url, (first + 4) * HOUR_MS, "--json").document["damaged"] == []  # fmt: skip
    ran = tiered("timer", "cancel", url, "B")
    assert (ran.code, "was not looked through" in ran.err) == (0, True)
    for key in ("A", "B"):
        ran = tiered("timer", "cancel", url, key)
        assert (ran.code, "its checksum is wrong" in ran.error) == (5, True)
    monkeypatch.undo()
    left = tiered.good("timer", "ls", url, "--messages", "--json").document
    assert ([row["msg_id"] for row in left["messages"]], left["damaged"]) == (["A", "C"], [])


DAMAGE = {
    "in records": lambda data: flipped(data, 70_000),
    "in items and records": lambda data: flipped(data, 70_000, len(data) - 4_000),
    "cut short": lambda data: data[:50_000],
    "gone": lambda _: None,
}


@pytest.mark.parametrize("what", DAMAGE)
def test_damaged_timers_are_repaired_from_the_brokers_store_and_then_given(
    tiered: CommandLine, tmp_path: Path, what: str
):
    url, target = f"file://{tmp_path}/tier", tmp_path / "target"
    tiered.clock = ManualClock(CAPTURED_MS)
    with Made(tmp_path) as made:
        for number in range(600):  # of two hours, in any order; some are alike but for their ids
            made.timed((number * 7919) % 97 * 60_000 // 1000 * 1000, f"K{number:03}")
        made.flush()
    tiered.good("timer", "import", made.folder, "--to", url, "--near", "0s")
    (bundle,) = (one for one in (tmp_path / "tier").rglob("timer/bundle/**/*") if one.is_file())
    changed = DAMAGE[what](bundle.read_bytes())
    bundle.unlink()
    if changed is not None:
        bundle.write_bytes(changed)
    clock = tiered.clock = Shifted()
    clock.shift_ms = CAPTURED_MS + 4 * HOUR_MS - clock.now_ms()
    ran = tiered("timer", "run", url, "--to", target, "--once", "--json")
    assert ran.code == 1, ran.err
    held = ran.document["held"]
    assert (ran.code, held + ran.document["delivered"]) == (1, 600)
    assert 0 < held <= 600
    assert tiered("verify", url, "--timers", "--deep").code == 1
    mended = ("verify", url, "--timers", "--deep", "--repair", "--json")
    assert tiered(*mended).code == 1  # without the store there is nothing to take them from
    done = tiered.good(*mended, "--store", made.folder).document
    assert (done["repair"]["unrepaired"], done["problems"]) == ([], [])
    ran = tiered.good("timer", "run", url, "--to", target, "--once", "--json")
    assert (ran.document["delivered"], ran.document["held"]) == (held, 0)
    assert sorted(key for _, _, key in delivered(target).elements()) == [
        f"K{number:03}" for number in range(600)
    ]


def flipped(data: bytes, *at: int) -> bytes:
    changed = bytearray(data)
    for position in at:
        changed[position] ^= 1
    return bytes(changed)


def test_a_body_that_cannot_be_unpacked_holds_up_no_other_message(
    tiered: CommandLine, tmp_path: Path
):
    url, tiered.clock = f"file://{tmp_path}/tier", ManualClock(CAPTURED_MS)
    with Made(tmp_path) as made:
        made.timed(HOUR_MS, "A", flags=COMPRESSED)
        made.timed(HOUR_MS, "B")
    tiered.good("timer", "import", made.folder, "--to", url, "--near", "0s")
    ran = tiered("timer", "ls", url, "--messages", "-o", "jsonl")
    assert ([row["msg_id"] for row in ran.rows], ran.code) == (["B"], 5)


def test_a_queue_that_is_no_number_holds_up_no_listing(tiered: CommandLine, tmp_path: Path):
    url, tiered.clock = f"file://{tmp_path}/tier", ManualClock(CAPTURED_MS)
    with Made(tmp_path) as made:
        made.timed(HOUR_MS, "A", REAL_QID="x")
        made.timed(HOUR_MS, "B", REAL_QID="3")
    tiered.good("timer", "import", made.folder, "--to", url, "--near", "0s")
    ran = tiered.good("timer", "ls", url, "--messages", "-o", "jsonl")
    assert [(row["msg_id"], row["queue_id"]) for row in ran.rows] == [("A", 0), ("B", 3)]


def test_a_timer_that_cannot_be_understood_needs_a_person_whoever_takes_timers(
    tiered: CommandLine, tmp_path: Path
):
    url, tiered.clock = f"file://{tmp_path}/", ManualClock(CAPTURED_MS)
    with Made(tmp_path) as made:
        made.timed(HOUR_MS, "A")
        made.timed(HOUR_MS, "B", TIMER_OUT_MS="x")
    near = ("--near", "0s")
    ran = tiered("timer", "import", made.folder, "--to", f"{url}1", *near, "--json")
    assert (ran.code, ran.document["taken"], ran.document["odd"]) == (1, 1, 1)
    tiered.clock = Shifted()
    ran = tiered("attach", made.folder, "--to", f"{url}2", "--once", "--timers", *near)
    assert (ran.code, "1 timer with a due time that cannot be understood" in ran.err) == (1, True)


def test_timers_behind_damage_of_a_stopped_store_need_a_person(tiered: CommandLine, tmp_path: Path):
    """They are pending, and not taken: a broker's start would give them up."""
    url, tiered.clock = f"file://{tmp_path}/tier", ManualClock(CAPTURED_MS)
    with Made(tmp_path) as made:
        for key in "ABC":
            made.timed(HOUR_MS, key)
        made.flush()
    (log,) = (made.folder / "commitlog").iterdir()
    _, *behind = (one.start() for one in re.finditer(b"x\x13" + WHEEL_TOPIC.encode(), log.read_bytes()))  # fmt: skip
    with log.open("r+b") as file:
        file.seek(behind[0])
        file.write(b"y")
    ran = tiered("timer", "import", made.folder, "--to", url, "--near", "0s", "--json")
    found = ran.document
    assert (ran.code, found["taken"], found["waiting_records"]) == (1, 1, 2)
    assert "damaged" in found["waiting_reason"]


def test_where_there_are_none(tiered: CommandLine, tmp_path: Path):
    (tmp_path / "tier").mkdir()
    ran = tiered("timer", "ls", f"file://{tmp_path}/tier")
    assert (ran.code, "there are no timers here" in ran.error) == (2, True)


def test_nothing_is_handed_over_to_the_store_that_it_was_taken_from(
    tiered: CommandLine, store: Path, tmp_path: Path
):
    """The broker's files still have what was taken: both copies would be delivered."""
    url = f"file://{store.parent}/tier"
    tiered("timer", "import", store, "--to", url, "--near", "0s")
    before, clock = delivered(store), Shifted()
    clock.shift_ms = CAPTURED_MS + 4 * 24 * HOUR_MS - clock.now_ms()
    tiered.clock = clock
    ran = tiered("timer", "run", url, "--to", store, "--once")
    assert (ran.code, "taken from this store" in ran.error) == (2, True)
    assert delivered(store) == before
    assert not (store / "config/tieredWheel.json").exists()
    for _ in range(2):  # one of ours is known again
        ran = tiered("timer", "run", url, "--to", tmp_path / "other", "--once", "--json")
        assert ran.code == 0
    assert sum(delivered(tmp_path / "other").values()) == 226


def test_nor_to_a_store_of_ours_that_it_was_taken_from(
    tiered: CommandLine, store: Path, tmp_path: Path
):
    first, second, folder = f"file://{tmp_path}/1", f"file://{tmp_path}/2", tmp_path / "ours"
    clock = tiered.clock = Shifted()
    clock.shift_ms = CAPTURED_MS + 4 * 24 * HOUR_MS - clock.now_ms()
    tiered.good("timer", "import", store, "--to", first, "--near", "0s")
    for _ in range(2):  # it may be given more
        tiered.good("timer", "run", first, "--to", folder, "--once")
    tiered.good("timer", "import", folder, "--to", second, "--near", "0s")
    run = tiered("timer", "run", second, "--to", folder, "--once")
    assert (run.code, "taken from this store" in run.error) == (2, True)


def test_a_target_that_was_made_here_is_known_again_by_what_it_was_given(
    tiered: CommandLine, tmp_path: Path
):
    """Of our stores, as of those of brokers before 5.4, two of one host and name say the same of themselves."""
    url, target, clock = f"file://{tmp_path}/tier", tmp_path / "target", Shifted()
    clock.shift_ms = CAPTURED_MS + 2 * HOUR_MS - clock.now_ms()
    tiered.clock = clock
    with Made(tmp_path) as made:
        made.timed(HOUR_MS, "A")
        made.flush()
        tiered.good("timer", "import", made.folder, "--to", url, "--near", "0s")
        made.timed(HOUR_MS, "B")
    tiered.good("timer", "run", url, "--to", target, "--once")
    tiered.good("timer", "import", made.folder, "--to", url, "--near", "0s")
    tiered.good("timer", "run", url, "--to", target, "--once")
    assert sum(delivered(target).values()) == 2
    ran = tiered("timer", "run", url, "--to", made.folder, "--once")
    assert (ran.code, "taken from this store" in ran.error) == (2, True)


def test_topics_are_read_as_if_there_were_no_timers(tiered: CommandLine, store: Path):
    url = f"file://{store.parent}/tier"
    tiered("attach", store, "--to", url, "--once")
    before = [tiered(*line).out for line in (("ls", url, "--json"), ("verify", url, "--deep"))]
    tiered("timer", "import", store, "--to", url, "--near", "0s")
    after = [tiered(*line).out for line in (("ls", url, "--json"), ("verify", url, "--deep"))]
    assert before == after
    assert tiered("cat", url, "rmq_sys_timer_hours").code == 2


def test_run_delivers_everything_to_its_topic_once(tiered: CommandLine, store: Path):
    """A broker's timers, from its store into the tier and from there, days later, into a store of ours."""
    url, folder = f"file://{store.parent}/tier", store.parent / "timers"
    tiered("timer", "import", store, "--to", url, "--near", "0s")
    clock = tiered.clock = Shifted()
    clock.shift_ms = CAPTURED_MS + 24 * HOUR_MS - clock.now_ms()
    first = tiered("timer", "run", url, "--to", folder, "--once", "--json").document
    due = sum((pending() - pending(clock.now_ms() + 2_000)).values())
    assert 226 > first["delivered"] >= due - 2
    assert first["handed"] == first["delivered"]
    clock.shift_ms += 10 * 24 * HOUR_MS
    second = tiered("timer", "run", url, "--to", folder, "--once", "--json").document
    assert (first["handed"] + second["handed"], second["run"]) == (226, 2)
    assert (second["waiting"], second["next_hand_over_ms"]) == (0, None)
    came = delivered(folder)
    assert {(topic, key): n for (topic, _, key), n in came.items()} == {
        (topic, key): n for (_, topic, key), n in pending().items()
    }
    assert tiered("timer", "ls", url, "--json").document["hours"] == []
    bodies = {m["msg_id"]: m for m in captures.dump("s02-delay-timer", "message")}
    rows = tiered("store", "tail", folder, "timed", "--count", "1000").rows
    assert len(rows) == 166
    for row in rows:
        was = bodies[row["msg_id"]]
        assert (row["body_base64"], row["tags"], row["keys"]) == (
            was["body_base64"], was["tags"], was["keys"]
        )  # fmt: skip
        assert row["queue_id"] == int(was["properties"]["REAL_QID"])


def test_run_says_where_it_cannot_go(tiered: CommandLine, store: Path):
    url = f"file://{store.parent}/tier"
    tiered("timer", "import", store, "--to", url, "--near", "0s")
    for to, near, code, word in (
        ("kafka://127.0.0.1:9876", "1h", 2, "or to brokers"),
        ("namesrv://127.0.0.1", "1h", 2, "namesrv://HOST:PORT"),
        ("namesrv://127.0.0.1:9876", "41h", 2, "choose 1d16h or less"),
        ("namesrv://127.0.0.1:1,127.0.0.1:2", "1h", 3, "no name server answers"),
    ):
        ran = tiered("timer", "run", url, "--to", to, "--near", near)
        assert (ran.code, word in ran.error) == (code, True), ran.error


def test_files_go_when_they_are_handed_over(tiered: CommandLine, store: Path, tmp_path: Path):
    url = f"file://{store.parent}/tier"
    tiered("timer", "import", store, "--to", url, "--near", "0s")
    clock = tiered.clock = Shifted()
    clock.shift_ms = CAPTURED_MS + 24 * HOUR_MS - clock.now_ms()
    tiered("timer", "run", url, "--to", tmp_path / "t", "--once")
    left = tiered("timer", "ls", url, "--messages", "-o", "jsonl").rows
    assert 0 < len(left) < 226
    clock.shift_ms = 0  # the store dates its objects by the machine's clock
    done = tiered("expire", url, "--timers", "--ttl", "1h", "--apply", "-", "--json").document
    assert done["applied"]["steps"] == len(done["steps"]) > 0
    assert tiered("timer", "ls", url, "--messages", "-o", "jsonl").rows == left
    assert tiered("verify", url, "--timers").code == 0
    plan = tmp_path / "plan"
    assert tiered("gc", url, "--timers", "--grace", "0s", "--plan", plan).code == 0
    assert tiered("gc", url, "--timers", "--grace", "0s", "--apply", plan).code == 0
    assert tiered("timer", "ls", url, "--messages", "-o", "jsonl").rows == left
    shown = tiered("gc", url, "--timers", "--grace", "0s")
    assert "`tiered gc --timers --erase` rewrites these" in shown.text
    erase = ("gc", url, "--timers", "--grace", "0s", "--erase", "--apply", "-", "--json")
    erased = tiered(*erase).document
    assert erased["erased"]["bundles"] == erased["given_up_bundles"] > 0
    assert tiered(*erase).document["given_up_bundles"] == 0
    assert tiered("timer", "ls", url, "--messages", "-o", "jsonl").rows == left
    assert tiered("verify", url, "--timers", "--deep").code == 0


def test_a_refused_message_needs_a_person(tiered: CommandLine, tmp_path: Path):
    with Made(tmp_path) as made:
        made.timed(-3_000, "A")
        made.timed(-3_000, "B", REAL_TOPIC="no such name!")
    url, clock = f"file://{tmp_path}/tier", Shifted()
    clock.shift_ms = CAPTURED_MS + 5_000 - clock.now_ms()
    tiered.clock = clock
    tiered("timer", "import", made.folder, "--to", url, "--near", "0s")
    ran = tiered("timer", "run", url, "--to", tmp_path / "t", "--once", "--json")
    counts = [ran.document[name] for name in ("handed", "refused", "delivered", "waiting")]
    assert (ran.code, counts) == (1, [1, 1, 1, 0])
    assert [row["msg_id"] for row in tiered("timer", "ls", url, "--refused", "-o", "jsonl").rows] == ["B"]  # fmt: skip
    clock.shift_ms = 0  # the store dates its objects by the machine's clock
    plan = tiered("expire", url, "--timers", "--ttl", "1h", "--json").document
    assert (plan["steps"], plan["kept_for_refused"]) == ([], 1)


def test_so_does_one_that_is_refused_when_it_is_due(
    tiered: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """It should have been refused before; it is not passed over in silence where it was not."""
    with Made(tmp_path) as made:
        made.timed(-3_000, "A")
    url, clock = f"file://{tmp_path}/tier", Shifted()
    clock.shift_ms = CAPTURED_MS + 5_000 - clock.now_ms()
    tiered.clock = clock

    def refuse(*_: object) -> None:
        raise InvalidError("not here")

    monkeypatch.setattr(LocalTarget, "_put_real", refuse)
    tiered("timer", "import", made.folder, "--to", url, "--near", "0s")
    ran = tiered("timer", "run", url, "--to", tmp_path / "t", "--once", "--json")
    assert (ran.code, ran.document["refused"], ran.document["delivered"]) == (1, 1, 0)


def test_a_lost_journal_of_timers_comes_back_with_what_was_taken_and_handed_over(
    tiered: CommandLine, store: Path, tmp_path: Path
):
    url = f"file://{store.parent}/tier"
    tiered("timer", "import", store, "--to", url, "--near", "0s")
    rows = tiered("timer", "ls", url, "--messages", "-o", "jsonl").rows
    tiered("timer", "cancel", url, rows[-1]["msg_id"])
    clock = tiered.clock = Shifted()
    clock.shift_ms = CAPTURED_MS + 24 * HOUR_MS - clock.now_ms()
    tiered("timer", "run", url, "--to", tmp_path / "t", "--once")
    (journal,) = store.parent.glob("tier/*/*/timer/journal")
    shutil.rmtree(journal)
    assert tiered("timer", "ls", url).code == 5
    assert tiered("rebuild", url, "--timers", "--apply", "-").code == 0
    again = tiered("timer", "import", store, "--to", url, "--near", "0s", "--json").document
    assert again["taken"] == 0
    clock.shift_ms += 10 * 24 * HOUR_MS
    tiered("timer", "run", url, "--to", tmp_path / "t", "--once")
    came = delivered(tmp_path / "t")
    assert (sum(came.values()), set(came.values())) == (225, {1})


@pytest.mark.parametrize("how", ["flipped", "gone"])
def test_a_copy_of_what_is_known_that_is_lost_is_told_before_it_is_needed(
    how: str, tiered: CommandLine, store: Path, tmp_path: Path
):
    """`verify` called it whole, and a rebuild whose journal has lost its end would have timers come twice silently."""
    url = f"file://{store.parent}/tier"
    tiered("timer", "import", store, "--to", url, "--near", "0s")
    clock = tiered.clock = Shifted()
    clock.shift_ms = CAPTURED_MS + 24 * HOUR_MS - clock.now_ms()
    tiered("timer", "run", url, "--to", tmp_path / "t", "--once")
    assert tiered("verify", url, "--timers").code == 0
    (facts,) = store.parent.glob("tier/*/*/timer/meta/facts")
    data = facts.read_bytes()
    if how == "gone":
        facts.unlink()
    else:
        facts.write_bytes(data[:40] + bytes([data[40] ^ 1]) + data[41:])
    ran = tiered("verify", url, "--timers", "--json")
    assert ran.code == 1
    assert [one["where"].rpartition("/timer/")[2] for one in ran.document["problems"]] == [
        "meta/facts"
    ]
    last = max(facts.parent.parent.glob("journal/*[0-9]"))
    last.write_bytes(last.read_bytes()[:-5])
    plan = tiered("rebuild", url, "--timers", "--json").document
    assert "timers may come twice" in " ".join(plan["notes"])
    facts.write_bytes(data)
    plan = tiered("rebuild", url, "--timers", "--json").document
    assert "timers may come twice" not in " ".join(plan["notes"])


def test_timers_alone_are_told(tiered: CommandLine, store: Path):
    url = f"file://{store.parent}/tier"
    tiered("timer", "import", store, "--to", url, "--near", "0s")
    for command in ("status", "ls", "gc"):
        ran = tiered(command, url)
        assert (ran.code, "timers here, and no topics" in ran.error) == (2, True)


def test_options_of_topics_are_refused_where_timers_are_meant(tiered: CommandLine, store: Path):
    """They were passed over: the index of the topics was called whole, hours were held against queues."""
    url = f"file://{store.parent}/tier"
    tiered("timer", "import", store, "--to", url, "--near", "0s")
    tiered("attach", store, "--to", url, "--once")
    for words in (("rebuild", url, "--index"), ("verify", url, "--store", store)):
        assert tiered(*words).code == 0
        ran = tiered(*words, "--timers")
        assert (ran.code, "--timers" in ran.error) == (2, True)


def test_topics_are_rebuilt_beside_timers_that_are_at_work(
    tiered: CommandLine, store: Path, tmp_path: Path
):
    """They have a journal of their own, which grows between a plan and its end."""
    url, plan = f"file://{store.parent}/tier", tmp_path / "plan"
    tiered("timer", "import", store, "--to", url, "--near", "0s")
    tiered("attach", store, "--to", url, "--once")
    (journal,) = store.parent.glob("tier/*/broker-a/journal")
    shutil.rmtree(journal)
    assert tiered("rebuild", url, "--plan", plan).code == 0
    rows = tiered("timer", "ls", url, "--messages", "-o", "jsonl").rows
    assert tiered("timer", "cancel", url, rows[0]["msg_id"]).code == 0
    assert tiered("rebuild", url, "--apply", plan).code == 0
    assert tiered("verify", url, "--deep").code == 0
    assert tiered("verify", url, "--timers", "--deep").code == 0
