"""``tiered store refill``: a replica that lost its disk gets the final state of its compacted topics again (C7)."""

from __future__ import annotations

import os
import shutil
from typing import TYPE_CHECKING

import pytest

from tiered.clock import SystemClock
from tiered.errors import DataError, StoreUnavailableError
from tiered.local.compaction_log import ASIDE
from tiered.local.rocketmq import RocketMQOptions, RocketMQStore
from tiered.model import MessageQueue, QueueOffset
from tiered.store import compacting
from tiered.store.embedded import MessageStore
from tiered.store.new_message import NewMessage
from tiered.store.store_options import Compacting, StoreOptions

if TYPE_CHECKING:
    from pathlib import Path

    from support.command_line import CommandLine

    from tiered.local.interface import RecordBatch

OPTIONS = StoreOptions(
    16_384, 50, index_slots=100, index_items=400, message_bytes_max=4_000,
    compacting=Compacting(8_000, 30, interval_s=1e9),
)  # fmt: skip
BUSY, QUIET = MessageQueue("prices", 0), MessageQueue("prices", 1)
SENT = {
    BUSY: [f"k{n % 50}" if n < 150 else f"k{n % 7}" for n in range(300)],
    QUIET: [f"q{n % 9}" for n in range(40)],
}
Rows = list[tuple[int, str]]


def send(store: MessageStore, queue: MessageQueue, keys: list[str]) -> None:
    for key in keys:
        store.append(NewMessage(queue.topic, queue.queue_id, b"x" * 300, keys=key))
    store.wait_listed()


def opened(root: Path) -> MessageStore:
    return MessageStore.open(root, cluster="c", broker="b", clock=SystemClock(), options=OPTIONS)


def made(root: Path) -> MessageStore:
    store = MessageStore.create(root, cluster="c", broker="b", clock=SystemClock(), options=OPTIONS)
    store.create_topic("prices", queues=1, is_compacted=True)
    return store


def read(store: MessageStore, queue: MessageQueue) -> Rows:
    found: Rows = []
    at, end = store.reader.bounds(queue)
    while at < end:
        got = store.reader.get(queue, at)
        assert got.records
        found += [(one.queue_offset, one.properties["KEYS"]) for one in got.records]
        at = got.next_offset
    return found


@pytest.fixture
def other(tmp_path: Path) -> Path:
    """A store that has everything."""
    with made(tmp_path / "other") as store:
        for queue, keys in SENT.items():
            send(store, queue, keys)
        store.compact()
    return tmp_path / "other"


@pytest.fixture
def replica(tmp_path: Path) -> Path:
    """Its log begins where the other one's begins now: of the quiet queue there is nothing in it."""
    with made(tmp_path / "replica") as store:
        store.begin_queue(BUSY, QueueOffset(200))
        send(store, BUSY, SENT[BUSY][200:])
    return tmp_path / "replica"


@pytest.fixture(params=["store", "tier", "compacted tier"])
def where(request: pytest.FixtureRequest, other: Path, tiered: CommandLine, tmp_path: Path) -> str:
    if request.param == "store":
        return str(other)
    url = f"file://{tmp_path}/tier"
    tiered.good("attach", other, "--to", url, "--once", "--seal")
    if request.param == "compacted tier":
        tiered.good("compact", url, "--topic", "prices", "--dirty-ratio", "0", "--apply", "-")
    return url


def newest(queue: MessageQueue) -> dict[str, int]:
    return {key: at for at, key in enumerate(SENT[queue])}


def test_a_replica_gets_the_final_state_and_is_compacted_once(
    tiered: CommandLine, replica: Path, where: str, tmp_path: Path
):
    rows = tiered.good("store", "refill", replica, "--from", where, "--json").document["queues"]
    assert [(row["queue_id"], row["had_from"], row["unknown"]) for row in rows] == [
        *((0, 200, 0), (1, 40, 0))
    ]
    assert all(row["messages"] for row in rows)
    for _ in range(2):
        with opened(replica) as store:
            assert store.queues() == {queue: len(keys) for queue, keys in SENT.items()}
            for queue, keys in SENT.items():
                found = read(store, queue)
                assert all(keys[at] == key for at, key in found)
                assert set(newest(queue).items()) <= {(key, at) for at, key in found}
            before = [at for at, _ in read(store, BUSY) if at < 200]
            assert before == sorted(at for at in newest(BUSY).values() if at < 200)
            assert len(read(store, QUIET)) == 9
        again = tiered.good("store", "refill", replica, "--from", where, "--json")
        assert {row["unknown"] for row in again.document["queues"]} == {0}
    url = f"file://{tmp_path}/of-the-replica"
    tiered.good("attach", replica, "--to", url, "--once")
    assert len(tiered.good("cat", url, "prices", "--queue", "1").rows) == 9


@pytest.mark.parametrize("anew", [False, True])
def test_a_queue_of_which_only_the_compaction_log_has_anything_goes_on_after_a_crash(
    tiered: CommandLine, replica: Path, other: Path, tmp_path: Path, anew: bool
):
    tiered.good("store", "refill", replica, "--from", other)
    with opened(replica) as store:
        before = read(store, QUIET)
        shutil.copytree(replica, tmp_path / "left", ignore=shutil.ignore_patterns("*.new"))
    assert (tmp_path / "left" / "abort").exists()
    tiered.good("store", "recover", tmp_path / "left", *["--anew"] * anew)
    with opened(tmp_path / "left") as store:
        assert read(store, QUIET) == before
        send(store, QUIET, ["q1"])
        assert read(store, QUIET) == [*before, (40, "q1")]


def test_a_compaction_log_that_is_damaged_comes_back_from_the_tier(
    tiered: CommandLine, other: Path, tmp_path: Path
):
    """As the error says that opening such a store ends with: both folders deleted, and refilled."""
    url = f"file://{tmp_path}/tier"
    tiered.good("attach", other, "--to", url, "--once")
    with opened(other) as store:
        for number in range(100):
            store.append(NewMessage("else", 0, b"%d" % number * 300))
        store.wait_listed()
        for path in sorted((other / "commitlog").iterdir())[:-1]:
            os.utime(path, (1, 1))
        assert store.expire().log_files > 5
        before = {queue: read(store, queue) for queue in SENT}
    folders = [other / f"compaction/compaction{name}/prices/0" for name in ("Log", "Cq")]
    path = min(folders[0].glob("0*"))
    path.write_bytes(bytes(path.stat().st_size))
    ran = tiered("store", "recover", other)
    assert (ran.code, "tiered store refill" in ran.error) == (5, True)
    for folder in folders:
        shutil.rmtree(folder)
    tiered.good("store", "refill", other, "--from", url)
    with opened(other) as store:
        for queue, rows in before.items():
            found = read(store, queue)
            assert set(newest(queue).items()) <= {(key, at) for at, key in found}
            assert found[-1] == rows[-1]


def die(_queue: object) -> None:
    raise OSError("the machine ends here")


@pytest.mark.parametrize("is_begun", [False, True])
def test_what_came_after_a_refill_was_cut_short_is_not_replaced_by_what_that_had_made(
    replica: Path, other: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_begun: bool
):
    """Another writer has gone on meanwhile, as a broker does, which lets the files aside lie; its log has expired since."""
    left = tmp_path / "left"
    batches = batches_of(other, BUSY)
    with opened(replica) as store:
        with monkeypatch.context() as patch:
            patch.setattr(compacting._Queue, "put_in_place", die)
            with pytest.raises(StoreUnavailableError, match="the machine ends here"):
                store.refill(BUSY, batches)
        shutil.copytree(replica, left)
    shutil.rmtree(replica)
    shutil.copytree(left, replica)
    for folder in replica.rglob(ASIDE):
        shutil.rmtree(folder)
    with opened(replica) as store:
        send(store, BUSY, ["later1", "later2"])
        for number in range(100):
            store.append(NewMessage("else", 0, b"%d" % number * 300))
        store.wait_listed()
        for path in sorted((replica / "commitlog").iterdir())[:-1]:
            os.utime(path, (1, 1))
        assert store.expire().log_files > 5
        before = read(store, BUSY)
    assert {"later1", "later2"} <= {key for _, key in before}
    for folder in list(left.rglob(ASIDE)):
        shutil.copytree(folder, replica / folder.relative_to(left))
    if is_begun:  # it had put its records in place, and not yet their lists
        aside = replica / f"compaction/compactionLog/prices/0/{ASIDE}"
        for path in aside.glob("0*"):
            path.replace(aside.parent / path.name)
        with pytest.raises(DataError, match="has changed since"):
            opened(replica)
        return
    with opened(replica) as store:
        assert read(store, BUSY) == before


def batches_of(root: Path, queue: MessageQueue) -> list[RecordBatch]:
    store = RocketMQStore.open(str(root), clock=SystemClock(), options=RocketMQOptions())
    try:
        store.refresh()
        found, at = [], QueueOffset(0)
        while batch := store.read(queue, at, bytes_max=1 << 20, count_max=1000):
            found.append(batch)
            at = batch.end_offset
        return found
    finally:
        store.close()


def test_what_neither_has_is_told(tiered: CommandLine, tmp_path: Path, other: Path):
    with made(tmp_path / "late") as store:
        store.begin_queue(BUSY, QueueOffset(320))
        send(store, BUSY, ["k1"] * 9)
    tiered.good("store", "topic", tmp_path / "late", "new", "--compacted")
    ran = tiered("store", "refill", tmp_path / "late", "--from", other, "--json")
    assert ran.code == 1
    assert [row["unknown"] for row in ran.document["queues"]] == [20, 0]
    with opened(tmp_path / "late") as store:
        keys = {key for _, key in read(store, BUSY)}
        assert keys == set(SENT[BUSY])


def test_mistakes_are_told(tiered: CommandLine, tmp_path: Path, replica: Path, other: Path):
    refill = ("store", "refill", replica, "--from")
    assert "no compacted topic of this store: x" in tiered(*refill, other, "--topic", "x").err
    with MessageStore.create(
        tmp_path / "plain", cluster="c", broker="b", clock=SystemClock()
    ) as store:
        store.append(NewMessage("plain", 0, b"x"))
    assert "nothing of prices" in tiered(*refill, tmp_path / "plain").err
    assert tiered(*refill, tmp_path / "none").code == 2
    tiered.good("store", "topic", replica, "new", "--compacted")
    ran = tiered(*refill, other, "--topic", "prices,new")
    assert (ran.code, "nothing of new" in ran.err) == (2, True)
    with opened(replica):
        ran = tiered(*refill, other)
    assert (ran.code, "another writer" in ran.err) == (2, True)


def test_messages_of_an_expired_log_come_from_the_other_stores_compaction_log(
    tiered: CommandLine, tmp_path: Path, replica: Path, other: Path
):
    with opened(other) as store:
        store.append(NewMessage("prices", 0, b"x" * 3_000, keys="k0"))
        for number in range(100):
            store.append(NewMessage("else", 0, b"%d" % number * 300))
        store.wait_listed()
        for path in sorted((other / "commitlog").iterdir())[:-1]:
            os.utime(path, (1, 1))
        assert store.expire().log_files > 5
    rows = tiered.good("store", "refill", replica, "--from", other, "--json").document["queues"]
    assert {row["unknown"] for row in rows} == {0}
    with opened(replica) as store:
        assert {key for _, key in read(store, QUIET)} == set(SENT[QUIET])
        assert {key for _, key in read(store, BUSY)} == set(SENT[BUSY])
