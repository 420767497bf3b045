"""The table of newest rows beside an archive's history: what is in it, and what is left by who is killed or comes second."""

from __future__ import annotations

import base64
import gzip
import io
import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pyarrow.parquet as pq
import pytest
from support import archive_jobs as jobs
from support.captures import FOLDER, unpack
from support.command_line import here
from support.keyed import Mail
from support.newest_rows import QUEUES, History

from tiered.archive import latest
from tiered.archive.audit import Repaired, _take_away, harmed_derived
from tiered.archive.duck import ask
from tiered.archive.latest import (
    GRACE_MS,
    ROOT,
    delete_leftovers,
    folder_of,
    latest_version,
    update_latest,
)
from tiered.clock import ManualClock
from tiered.errors import DataError, InvalidError, OtherVersionError
from tiered.journal.entry import seal_text
from tiered.log.state import queue_action
from tiered.model import MessageQueue

if TYPE_CHECKING:
    from pathlib import Path

    from backends.base import ObjectStore


@pytest.mark.parametrize("across", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_it_has_the_newest_row_of_each_key_and_follows_the_history(across: bool, seed: int):
    history = History(seed)
    for number in range(3):
        history.grow()
        made = history.update(f"run{number}", across=across)
        assert history.rows() == history.expected(across=across)
        assert (made.number, made.rows) == (number + 1, len(history.rows()))
        again = history.plan(across=across)
        assert not again.has_work
        assert update_latest(history.at.archive, again, ManualClock(), "none") == made


def test_readers_of_directories_do_not_meet_it_and_any_reader_can_read_it():
    history = History()
    history.grow()
    made = history.update("run")
    assert len(jobs.rows(history.at)) == 150
    for key in history.files():
        assert key.startswith("_")
        assert not key.endswith(".parquet")
    ((key, rows, size, _),) = made.files
    data = history.at.archive.get(key)
    assert (pq.read_table(io.BytesIO(data)).num_rows, len(data)) == (rows, size)


def test_what_is_read_of_the_history_is_keys_and_rows_that_stay(monkeypatch: pytest.MonkeyPatch):
    history = History()
    history.grow()
    read: list[Any] = []
    real = latest._groups

    def noted(archive: Any, file: Any, columns: Any) -> Any:
        read.append(columns)
        return real(archive, file, columns)

    monkeypatch.setattr(latest, "_groups", noted)
    history.update("run")
    assert read
    assert all(columns and "body" not in columns for columns in read)


@pytest.mark.parametrize("point", ["latest-written", "latest-named"])
def test_who_is_killed_leaves_the_last_version_or_the_new_one_and_files_that_go_later(
    point: str, monkeypatch: pytest.MonkeyPatch
):
    class KilledError(Exception):
        pass

    def killed(name: str) -> None:
        if name == point:
            raise KilledError

    history, clock = History(), ManualClock()
    history.grow()
    history.update("first", clock)
    before = history.rows()
    history.grow()
    monkeypatch.setattr(latest, "reached", killed)
    with pytest.raises(KilledError):
        history.update("second", clock)
    monkeypatch.undo()
    is_named = point == "latest-named"
    assert history.rows() == (history.expected() if is_named else before)
    history.grow()
    assert history.update("third", clock).number == (3 if is_named else 2)
    assert history.rows() == history.expected()
    assert any("second" in key for key in history.files())  # for who may be reading it
    late = ManualClock(4_000_000_000_000)
    history.grow()
    history.update("fourth", late)
    assert not any("second" in key for key in history.files())
    assert history.rows() == history.expected()


def test_of_two_at_once_the_one_that_knows_more_counts():
    history = History()
    history.grow()
    early = history.plan()
    history.grow()
    late = history.plan()
    store, clock = history.at.archive, ManualClock()
    assert update_latest(store, late, clock, "late").number == 1
    found = update_latest(store, early, clock, "early")
    assert found == latest_version(store, history.at.place, "t")
    assert history.rows() == history.expected()
    assert not any("early" in key for key in history.files())


def test_the_one_that_knows_less_is_overtaken_by_who_comes_second():
    history = History()
    history.grow()
    early = history.plan()
    history.grow()
    late = history.plan()
    store, clock = history.at.archive, ManualClock()
    assert update_latest(store, early, clock, "early").number == 1
    assert update_latest(store, late, clock, "late").number == 2
    assert history.rows() == history.expected()


def test_brokers_that_share_an_archive_have_a_table_each():
    one, two = History(1), History(2)
    place = type(one.at.place)("c", "b2")
    two.at = replace(two.at, place=place, archive=one.at.archive, bare=one.at.bare)
    for number in range(2):
        for name, history in (("one", one), ("two", two)):
            history.grow()
            history.update(f"{name}{number}")
        for history in (one, two):
            assert history.rows() == history.expected()
    assert not one.plan().has_work, "another broker's table is none of its business"


def test_a_broker_of_the_same_name_in_another_cluster_has_incarnations_of_its_own():
    """A topic that was made again there emptied the table here."""
    one, two = History(1), History(2)
    queue = QUEUES[0]
    two.tier.post(queue, [Mail(("old",), body=b"old", time_ms=1_600_000_000_000)])
    two.tier.say(queue_action("incarnation", queue, 1, start=0, reason="made again"))
    two.tier.forget(queue)
    two.at = replace(
        two.at, place=type(one.at.place)("c2", "b"), archive=one.at.archive, bare=one.at.bare
    )
    for number in range(2):
        for name, history in (("one", one), ("two", two)):
            history.grow()
            history.update(f"{name}{number}")
        assert one.rows() == one.expected()
        assert one.rows()


def test_sql_has_a_table_of_it_of_all_brokers_that_share_an_archive():
    one, two = History(1), History(2)
    two.at = replace(
        two.at, place=type(one.at.place)("c", "b2"), archive=one.at.archive, bare=one.at.bare
    )
    one.grow()
    store = one.at.archive
    with pytest.raises(InvalidError, match="does not exist"):
        ask(store, 'FROM "t$latest"')
    for number, history in enumerate((one, two, one)):
        history.grow()
        history.update(f"run{number}")
    question = 'SELECT broker, queue_id, queue_offset, msg_key, body FROM "t$latest"'
    found = [tuple(row.values()) for row in ask(store, question).rows.to_pylist()]
    for broker, history in (("b", one), ("b2", two)):
        assert sorted(row[1:] for row in found if row[0] == broker) == history.expected()
    assert len(found) == len(one.expected()) + len(two.expected())
    few = """SELECT count(*) FROM "t$latest" l JOIN t USING (broker, queue_id, queue_offset)"""
    assert ask(store, few).rows.to_pylist() == [{"count_star()": len(found)}]
    assert ask(store, "SHOW TABLES").rows.to_pylist() == [{"name": "t"}, {"name": "t$latest"}]


def _replace(store: ObjectStore, key: str, data: bytes) -> None:
    store.delete(key)
    if data:
        store.put_if_absent(key, data)


def _flipped(data: bytes) -> bytes:
    at = len(data) // 3
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


@pytest.mark.parametrize("what", ["version", "file"])
@pytest.mark.parametrize("how", ["flipped", "cut", "gone"])
def test_a_damaged_table_is_made_again_and_stops_nothing_else(what: str, how: str):
    """It is derived. A flipped digit of a version passed for sound; damage stopped `SHOW TABLES`, and no run mended it."""
    history = History()
    history.grow()
    history.update("first")
    store = history.at.archive
    keys = sorted(info.key for info in store.list(ROOT))
    key = next(key for key in keys if ("/versions/" in key) == (what == "version"))
    data = store.get(key)
    _replace(store, key, {"flipped": _flipped(data), "cut": data[:-9], "gone": b""}[how])
    table = [] if (what, how) == ("version", "gone") else [{"name": "t$latest"}]
    assert ask(store, "SHOW TABLES").rows.to_pylist() == [{"name": "t"}, *table]
    assert len(ask(store, "FROM t").rows)
    with pytest.raises((DataError, InvalidError)):
        ask(store, 'FROM "t$latest"')
    if table:
        assert key in harmed_derived(store)
    if (what, how) == ("file", "flipped"):  # no listing tells
        assert not history.plan().has_work
        _take_away(history.at, [key], result := Repaired())
        assert result.taken_away == 1
        assert ask(store, "SHOW TABLES").rows.to_pylist() == [{"name": "t"}]
    assert history.plan().has_work
    history.update("second")
    assert history.rows() == history.expected()
    assert harmed_derived(store) == {}
    assert len(ask(store, 'FROM "t$latest"').rows) == len(history.expected())
    delete_leftovers(
        store, folder_of(key) or "", 1_700_000_000_000 + 2 * GRACE_MS, 1_800_000_000_000
    )
    assert history.rows() == history.expected()
    assert not [one for one in store.list(ROOT) if "first" in one.key], "it left nothing for ever"


def test_a_table_of_another_version_is_told_and_left_alone():
    history = History()
    history.grow()
    history.update("first")
    store = history.at.archive
    key = next(info.key for info in store.list(ROOT) if "/versions/" in info.key)
    _replace(store, key, other := seal_text({"format": 7, "rows": "many"}))
    for read in (history.plan, lambda: ask(store, 'FROM "t$latest"')):
        with pytest.raises(OtherVersionError, match="another version of tiered"):
            read()
    assert [type(error) for error in harmed_derived(store).values()] == [OtherVersionError]
    _take_away(history.at, [key], result := Repaired())
    assert (result.taken_away, store.get(key)) == (0, other)


def test_the_command_names_what_is_damaged_and_takes_it_away(tmp_path: Path):
    """`sql` sent people to `archive --verify`, which looked at neither tables of newest rows nor the index of keys."""
    store, tier, made = tmp_path / "s", f"file://{tmp_path}/t", f"file://{tmp_path}/a"
    here("store", "create", store).good()
    here("store", "topic", store, "prices").good()
    messages = "".join(
        json.dumps({"topic": "prices", "queue_id": 0, "keys": f"k{n % 5}", "body": str(n)}) + "\n"
        for n in range(20)
    )
    (tmp_path / "messages").write_text(messages)
    here("store", "put", store, tmp_path / "messages").good()
    here("attach", store, "--to", tier, "--once", "--seal").good()
    here("archive", tier, "--to", made).good()
    here("archive", tier, "--to", made, "--key-index").good()
    compact = ("compact", tier, "--topic", "prices", "--archive", made)
    here(*compact, "--apply", "-").good()
    ask_it = ("sql", made, 'SELECT count(*) AS n FROM "prices$latest"', "--json")
    before = here(*ask_it).good().document["rows"]
    for path in (tmp_path / "a").rglob("*"):
        if path.is_file() and ("_latest" in str(path) or "_keys" in str(path)):
            path.write_bytes(_flipped(path.read_bytes()))
    assert here(*ask_it).code == 5
    found = here("archive", tier, "--to", made, "--verify", "--json")
    assert (found.code, len(found.document["findings"])) == (1, 2)
    repair = ("archive", tier, "--to", made, "--verify", "--repair")
    planned = here(*repair, "--json").good().document
    assert [key for key, _ in planned["derived"]] == [
        one["key"] for one in found.document["findings"]
    ]
    assert here(*repair, "--apply", "-", "--json").good().document["applied"]["taken_away"] == 2
    here("archive", tier, "--to", made, "--key-index").good()
    here(*compact, "--apply", "-").good()
    assert here(*ask_it).good().document["rows"] == before
    here("archive", tier, "--to", made, "--verify").good()


def test_of_a_topic_whose_keys_are_all_deleted_the_table_is_empty():
    history = History()
    history.tier.post(QUEUES[0], [Mail(("k",), body=b"", time_ms=1_600_000_000_000)])
    incarnation = history.tier.journal.state.incarnation(QUEUES[0])
    assert incarnation
    base = incarnation.segments[-1].base_offset
    history.tier.say(queue_action("seal", QUEUES[0], incarnation.number, segment=base))
    jobs.archive(history.at)
    history.update("run")
    assert ask(history.at.archive, 'FROM "t$latest"').rows.num_rows == 0


def test_versions_that_were_replaced_long_ago_go_with_their_files():
    history, clock = History(), ManualClock()
    for number in range(3):
        history.grow()
        history.update(f"run{number}", clock)
        clock.advance(2 * GRACE_MS / 1000)
    versions = [key for key in history.files() if "/versions/" in key]
    assert (
        len(versions) == 2
    )  # the one before was replaced a moment ago: somebody may be reading it
    assert history.rows() == history.expected()


def test_a_run_that_takes_longer_than_the_grace_keeps_what_it_made_first():
    history, clock = History(), ManualClock()
    history.grow()
    made = history.update("first", clock)
    store, folder = history.at.archive, made.files[0][0].rpartition("first")[0]
    for run, ages_ms in (("long", (2 * GRACE_MS, 0)), ("dead", (2 * GRACE_MS, 2 * GRACE_MS))):
        for number, age_ms in enumerate(ages_ms):
            key = f"{folder}{run}/{number}"
            store.put_if_absent(key, b"x")
            objects = history.at.bare._objects
            found = objects[key]
            objects[key] = found._replace(modified_ms=clock.now_ms() - age_ms)
    history.grow()
    history.update("second", clock)
    left = {key.removeprefix(folder) for key in history.files()}
    assert {"long/0", "long/1"} <= left
    assert not any(key.startswith("dead/") for key in left)


def test_from_the_command_line(tmp_path: Path):
    """A real broker's compacted topic, from its store to the table."""
    store, url, archive = (
        unpack("s07-compaction", tmp_path),
        f"file://{tmp_path}/t",
        f"file://{tmp_path}/p",
    )
    assert here("attach", store, "--to", url, "--once", "--seal").code in {0, 1}
    here("archive", url, "--to", archive).good()
    told = ("compact", url, "--topic", "prices", "--archive", archive, "--json")
    planned = here(*told, "--exit-code")
    assert (planned.code, planned.document["topics"][0]["has_work"]) == (1, True)
    (row,) = here(*told, "--apply", "-").good().document["topics"]
    dumped = gzip.decompress((FOLDER / "s07-compaction.end.jsonl.gz").read_bytes()).splitlines()
    pulled = {(one["queue_id"], one["keys"]): one for one in map(json.loads, dumped)}
    table = pq.read_table(tmp_path / "p" / row["latest_files"][0])
    found = {(one["queue_id"], one["msg_key"]): one["body"] for one in table.to_pylist()}
    assert found == {
        key: base64.b64decode(one["body_base64"])
        for key, one in pulled.items()
        if one["body_base64"]
    }
    assert here(*told, "--exit-code").good().document["topics"][0]["has_work"] is False


def test_a_version_that_is_none_is_named_and_made_again():
    history = History()
    history.grow()
    store = history.at.archive
    store.put_if_absent(f"{ROOT}c/b/topic_dir=t/versions/{9:020d}.json", b"{}")
    with pytest.raises(DataError, match="a version of a table of newest rows is damaged"):
        ask(store, 'FROM "t$latest"')
    history.update("again")
    assert history.rows() == history.expected()


@pytest.mark.parametrize("name", ["notes.txt", f"{9:020d}.json.bak", f"{9:020d}.json (copy)"])
def test_a_strange_name_beside_versions_is_none(name: str):
    history = History()
    history.grow()
    history.update("run")
    history.at.archive.put_if_absent(f"{ROOT}c/b/topic_dir=t/versions/{name}", b"x")
    assert history.rows() == history.expected()
    rows = ask(history.at.archive, 'SELECT count(*) n FROM "t$latest"').rows.to_pylist()
    assert rows == [{"n": len(history.expected())}]
    assert not history.plan().has_work


def test_a_version_that_is_damaged_refuses_no_question_about_another_topic():
    history = History()
    history.grow()
    history.update("run")
    history.tier.post(MessageQueue("u", 0), [Mail(("k",), time_ms=1_600_000_000_000)])
    history.tier.say(queue_action("seal", MessageQueue("u", 0), 0, segment=0))
    jobs.archive(history.at)
    history.at.archive.put_if_absent(f"{ROOT}c/b/topic_dir=u/versions/{9:020d}.json", b"{}")
    assert ask(history.at.archive, 'FROM "t$latest"').rows.num_rows
    with pytest.raises(DataError, match="a version of a table of newest rows is damaged"):
        ask(history.at.archive, 'FROM "u$latest"')
