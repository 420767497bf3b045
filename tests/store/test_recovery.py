"""A crash at any byte: all that was on the disk is there, lists and index are exact, nothing is invented."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st
from support.embedded import SMALL, SYNC, create, reopen
from support.following import unpack
from support.stored import check_same, read_all

from tiered.clock import ManualClock
from tiered.errors import DataError, InvalidError, StoreUnavailableError
from tiered.format.broker_checkpoint import Checkpoint, decode_checkpoint, encode_checkpoint
from tiered.format.items import ITEM
from tiered.local.layout import list_queues
from tiered.local.rocketmq import RocketMQStore
from tiered.model import MessageQueue
from tiered.store import opening as replaying
from tiered.store.keyindex import index_paths
from tiered.store.listing import Listing
from tiered.store.new_message import Appended, NewMessage
from tiered.store.store_options import INDEX_HEADER_BYTES

if TYPE_CHECKING:
    from tiered.store.listing import Facts

RNG = random.Random(1)
MESSAGES = [
    NewMessage(
        f"t{RNG.randrange(3)}",
        RNG.randrange(2),
        RNG.randbytes(RNG.randrange(1500)),
        tags=f"tag{at}",
        keys=f"k{at} s{at % 7}",
    )
    for at in range(260)
]
CHECKPOINT_AT, CRASH_AT = 90, 250


class Crashed:
    """A store as it stood when its process was killed."""

    def __init__(self, root: Path, put: list[tuple[NewMessage, Appended]], covered: int) -> None:
        """``covered``: the physical offset up to which the last checkpoint says that all is on the disk."""
        self.root = root
        self.put = put
        self.covered = covered

    def __repr__(self) -> str:
        return f"Crashed({self.root})"


@pytest.fixture(scope="module")
def crashed(tmp_path_factory: pytest.TempPathFactory) -> Crashed:
    folder = tmp_path_factory.mktemp("crashed")
    store = create(folder / "running")
    put: list[tuple[NewMessage, Appended]] = []
    for start in range(0, CRASH_AT, 10):
        batch = MESSAGES[start : start + 10]
        put += zip(batch, store.append_batch(batch), strict=True)
        if len(put) == CHECKPOINT_AT:
            assert store.wait_listed()
            store._upkeep.write_checkpoint()
            covered = store.log_end
            store._upkeep.write_checkpoint = lambda **_: None
    assert store.wait_listed()
    shutil.copytree(folder / "running", folder / "crashed")
    store.close()
    return Crashed(folder / "crashed", put, covered)


def zero(path: Path, at: int, size: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        file.write(bytes(size))


def zero_or_noise(path: Path, at: int, size: int, rng: random.Random) -> None:
    data = bytes(size) if rng.random() < 0.5 else rng.randbytes(size)
    with path.open("r+b") as file:
        file.seek(at)
        file.write(data)


def damage_lists(root: Path, covered: int, rng: random.Random) -> None:
    """Anything may stand in items of records that the checkpoint does not cover."""
    for path in (root / "consumequeue").glob("*/*/0*"):
        items = np.fromfile(path, ITEM)
        for at in np.flatnonzero(items["physical_offset"] >= covered).tolist():
            if rng.random() < 0.3:
                zero_or_noise(path, at * 20, 20, rng)


def damage_index(root: Path, covered: int, rng: random.Random) -> None:
    """Likewise in the index; and its slots may be older or newer than its items."""
    slots, items = SMALL.index_slots, SMALL.index_items
    for path in map(Path, index_paths(str(root))):
        data = path.read_bytes()
        at = INDEX_HEADER_BYTES + 4 * slots
        found = np.frombuffer(
            data, [("h", ">i4"), ("at", ">i8"), ("s", ">i4"), ("p", ">i4")], items, at
        )
        for slot in range(slots):
            if rng.random() < 0.3:
                zero_or_noise(path, INDEX_HEADER_BYTES + 4 * slot, 4, rng)
        for number in np.flatnonzero(found["at"] >= covered).tolist():
            if rng.random() < 0.3:
                zero_or_noise(path, at + 20 * number, 20, rng)


def check_exact(root: Path, put: list[tuple[NewMessage, Appended]]) -> None:
    """The store (stopped) holds exactly ``put``; lists and index say so, and nothing more."""
    found = read_all(root)
    assert sum(map(len, found.values())) == len(put)
    for message, where in put:
        record = found[MessageQueue(message.topic, message.queue_id)][where.queue_offset]
        check_same(message, where, record)
    listed = sum(
        int((np.fromfile(path, ITEM)["size"] > 0).sum())
        for path in (root / "consumequeue").glob("*/*/0*")
    )
    assert listed == len(put)
    with reopen(root) as store:
        assert store.recovered is None
        assert sum(file.count - 1 for file in store._parts.index._files) == 3 * len(put)
        for message, where in put[::9]:
            topic, (own, _, shared) = message.topic, message.keys.partition(" ")
            for key in (own, where.msg_id):
                (record,) = store.reader.by_key(topic, key)
                assert record.physical_offset == where.physical_offset
            wanted = [
                other.physical_offset
                for one, other in reversed(put)
                if one.topic == topic and shared in (one.keys or "").split()
            ]
            answer = store.reader.by_key(topic, shared)
            assert [record.physical_offset for record in answer] == wanted


@settings(deadline=None, max_examples=5, phases=[Phase.explicit, Phase.generate])
@given(share=st.floats(0, 1), seed=st.integers(0, 2**32))
@example(share=0.7180957237054778, seed=506450498)  # a blank with nothing behind it
@example(share=0.1115845923763348, seed=369649)  # cut within properties, not where a sector ends
def test_cut_or_damaged_at_any_byte(crashed: Crashed, share: float, seed: int):
    rng = random.Random(seed)
    is_lossy, lists, index = (rng.random() < 0.5 for _ in range(3))
    end = crashed.put[-1][1].physical_offset + crashed.put[-1][1].size_bytes
    cut = crashed.covered + round(share * (end - crashed.covered))
    file_bytes = SMALL.commitlog_file_bytes
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder, "s")
        shutil.copytree(crashed.root, root)
        if is_lossy:  # sectors that were not written yet, and others behind them that were
            for log in (root / "commitlog").iterdir():
                for at in range(max(0, -(-(cut - int(log.name)) // 512)), file_bytes // 512):
                    if rng.random() < 0.2:
                        zero(log, at * 512, 512)
        else:
            for log in (root / "commitlog").iterdir():
                keep = min(file_bytes, max(0, cut - int(log.name)))
                os.truncate(log, keep)
                os.truncate(log, file_bytes)
        if lists:
            damage_lists(root, crashed.covered, rng)
        if index:
            damage_index(root, crashed.covered, rng)
        kept = [
            (message, where)
            for message, where in crashed.put
            if where.physical_offset + where.size_bytes <= cut
        ]
        with reopen(root) as store:
            assert store.recovered is not None
            assert store.log_end >= sum(where.size_bytes for _, where in kept)
            survived = sum(end for end in store.queues().values())
        if not is_lossy:
            assert survived == len(kept)
        assert len(kept) <= survived
        check_exact(root, crashed.put[:survived])
        with reopen(root) as store:
            more = [(m, store.append(m)) for m in MESSAGES[CRASH_AT:]]
        check_exact(root, crashed.put[:survived] + more)


# -- zeros: of a message, or of a sector that was never written ------------------------------------


def as_crashed(folder: Path, *messages: NewMessage) -> tuple[Path, list[Appended]]:
    """A store as a machine leaves it that fails; no checkpoint covers anything."""
    with create(folder / "running", SYNC) as store:
        put = [store.append_as_is(message) for message in messages]
        shutil.copytree(folder / "running", folder / "s")
    (folder / "s" / "checkpoint").unlink(missing_ok=True)
    return folder / "s", put


def padded(value: str) -> NewMessage:
    return NewMessage("t", 0, b"x", properties={"pad": value})


@pytest.mark.parametrize("value", ["\0" * 255 + "z", "\0" * 300 + "z", "z\0", "z" + "\0" * 1400])
def test_zeros_of_a_message_do_not_end_the_log(tmp_path: Path, value: str):
    """All were acknowledged with their sync: wherever in its sector such a message lies, it and what follows is there."""
    plain = NewMessage("t", 0, b"x")
    messages = [one for _ in range(30) for one in (padded(value), plain, padded(value + "z"))]
    root, put = as_crashed(tmp_path, *messages, plain)
    with reopen(root) as store:
        assert store.recovered is not None
        assert store.recovered.begin == 0
        assert store.log_end == put[-1].physical_offset + put[-1].size_bytes
        assert store.queues() == {MessageQueue("t", 0): len(put)}


def crashed_behind_zeros(folder: Path, behind: int) -> tuple[Path, list[Appended]]:
    """Of two records; the first ends some bytes behind where a sector begins, in zeros from there on."""
    folder.joinpath("sized").mkdir()
    _, (one,) = as_crashed(folder / "sized", padded("z"))
    value = "z" * (1026 - one.size_bytes) + "\0" * (behind - 1)
    root, put = as_crashed(folder, padded(value), NewMessage("t", 0, b"y"))
    assert put[0].size_bytes == 1024 + behind
    zero(root / "commitlog" / f"{0:020d}", 1024 + behind - 1, 1)  # ours end with a separator
    return root, put


def test_zeros_at_the_end_of_a_record_are_its_own_where_the_sector_goes_on(tmp_path: Path):
    root, _ = crashed_behind_zeros(tmp_path, 10)
    shutil.copytree(root, tmp_path / "torn")
    with reopen(root) as store:
        assert store.queues() == {MessageQueue("t", 0): 2}
    zero(tmp_path / "torn" / "commitlog" / f"{0:020d}", 2 * 512, 512)
    with reopen(tmp_path / "torn") as store:
        assert store.log_end == 0


def test_what_is_known_to_be_synced_is_taken_for_torn_by_no_zeros(tmp_path: Path):
    """Such a message cannot be told from a torn one by itself."""
    root, put = crashed_behind_zeros(tmp_path, 512)
    end = put[-1].physical_offset + put[-1].size_bytes
    shutil.copytree(root, tmp_path / "torn")
    with reopen(tmp_path / "torn", anew=True) as store:
        assert store.log_end == 0
    with reopen(root, anew=True, synced_end=end) as store:
        assert store.log_end == end


def test_damage_below_what_is_known_to_be_synced_cuts_off_nothing(tmp_path: Path):
    root, put = as_crashed(tmp_path, *(padded("z") for _ in range(9)))
    log, at = root / "commitlog" / f"{0:020d}", put[4].physical_offset
    zero(log, at + 4, 4)
    before = log.read_bytes()
    with pytest.raises(DataError, match=f"a record at {at} is damaged"):
        reopen(root, anew=True, synced_end=put[-1].physical_offset)
    assert log.read_bytes() == before


@pytest.mark.parametrize("sector", [1, 2, 3])
def test_a_sector_of_properties_that_was_never_written_ends_the_log(tmp_path: Path, sector: int):
    """The body, which alone has a checksum, is whole; the last is written up to where the record ends."""
    root, put = as_crashed(tmp_path, NewMessage("t", 0, b"y"), padded("z" * 1400))
    assert 3 * 512 < put[1].physical_offset + put[1].size_bytes < 4 * 512
    zero(root / "commitlog" / f"{0:020d}", sector * 512, 512)
    with reopen(root) as store:
        assert store.log_end == put[1].physical_offset


@pytest.mark.parametrize("folder", ["commitlog", "consumequeue", "index"])
def test_killed_before_a_new_file_has_its_length(crashed: Crashed, tmp_path: Path, folder: str):
    """A file is made, then given its length: a process may end between the two, on every roll."""
    root = tmp_path / "s"
    shutil.copytree(crashed.root, root)
    newest = max((path for path in (root / folder).rglob("*") if path.is_file()), key=str)
    if folder == "commitlog":
        newest.with_name(f"{int(newest.name) + SMALL.commitlog_file_bytes:020d}").touch()
    elif folder == "consumequeue":
        items = SMALL.consumequeue_file_items * ITEM.itemsize
        newest.with_name(f"{int(newest.name) + items:020d}").touch()
    else:
        newest.with_name(f"{int(newest.name) + 1:017d}").touch()
    reopen(root).close()
    check_exact(root, crashed.put)


def test_lists_and_index_from_the_log_alone(crashed: Crashed, tmp_path: Path):
    for name, gone in (("a", ["consumequeue", "index", "checkpoint"]), ("b", ["checkpoint"])):
        root = tmp_path / name
        shutil.copytree(crashed.root, root)
        for part in gone:
            path = root / part
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        reopen(root).close()
        check_exact(root, crashed.put)
    queue = next(iter(list_queues(str(root))))
    shutil.rmtree(root / "consumequeue" / queue.topic)
    reopen(root, anew=True).close()
    check_exact(root, crashed.put)


def damaged(crashed: Crashed, root: Path) -> int:
    """A copy in which a record below the checkpoint is damaged; where."""
    shutil.copytree(crashed.root, root)
    at = crashed.put[CHECKPOINT_AT - 2][1].physical_offset
    base = at // 65_536 * 65_536
    with (root / "commitlog" / f"{base:020d}").open("r+b") as file:
        file.seek(at - base + 4)
        file.write(b"oops")
    return at


def distrust(root: Path, **changed: int) -> None:
    """A checkpoint as a broker writes it: it does not cover the index."""
    path = root / "checkpoint"
    checkpoint = replace(decode_checkpoint(path.read_bytes()), index_timestamp_ms=0, **changed)
    path.write_bytes(encode_checkpoint(checkpoint))


def test_what_the_checkpoint_covers_is_not_looked_at(crashed: Crashed, tmp_path: Path):
    at = damaged(crashed, tmp_path / "s")
    with reopen(tmp_path / "s") as store:
        assert store.recovered is not None
        assert store.recovered.begin == crashed.covered
        assert store.recovered.records == CRASH_AT - CHECKPOINT_AT
        assert store.log_end > at
    log = tmp_path / "s" / "commitlog"
    assert b"oops" in (log / f"{at // 65_536 * 65_536:020d}").read_bytes()


def test_damage_below_a_brokers_checkpoint_is_told_and_changes_nothing(
    crashed: Crashed, tmp_path: Path
):
    root = tmp_path / "s"
    at = damaged(crashed, root)
    distrust(root, logics_physical_offset=crashed.covered)
    before = {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}
    with pytest.raises(DataError, match=f"a record at {at} is damaged"):
        reopen(root)
    assert {path: path.read_bytes() for path in root.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("inside", [0, 5])
def test_a_checkpoint_that_may_be_no_boundary(crashed: Crashed, tmp_path: Path, inside: int):
    """It lies inside a record, or the log ends there: all is found, and the index is whole."""
    root = tmp_path / "s"
    shutil.copytree(crashed.root, root)
    if inside:
        distrust(root, logics_physical_offset=crashed.covered + inside)
        put = crashed.put
    else:
        put = crashed.put[:CHECKPOINT_AT]
        for log in (root / "commitlog").iterdir():
            os.truncate(log, min(65_536, max(0, crashed.covered - int(log.name))))
            os.truncate(log, 65_536)
    with reopen(root) as store:
        assert store.recovered is not None
        is_trusted = store.recovered.begin == crashed.covered
    assert is_trusted != bool(inside)
    check_exact(root, put)


@pytest.mark.parametrize("chunks", [1, 15, 30])
@pytest.mark.parametrize("anew", [False, True])
def test_a_crash_during_recovery(
    crashed: Crashed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunks: int, anew: bool
):
    root, taken = tmp_path / "s", []
    shutil.copytree(crashed.root, root)
    real = Listing.take

    def take(self: Listing, facts: Facts) -> None:
        if len(taken) == chunks:
            raise OSError(errno.EIO, "the machine stops here")
        taken.append(facts)
        real(self, facts)

    monkeypatch.setattr(replaying, "CHUNK_BYTES", 4096)
    with monkeypatch.context() as patch:
        patch.setattr(Listing, "take", take)
        with pytest.raises(StoreUnavailableError, match="stops here"):
            reopen(root, anew=anew)
    reopen(root).close()
    check_exact(root, crashed.put)


SCRIPT = """
import json, sys, threading
from pathlib import Path
from support.embedded import SYNC, create
from tiered.store.new_message import NewMessage
store = create(Path(sys.argv[1]), SYNC)
def work(number):
    for at in range(100_000):
        where = store.append(NewMessage("t", number, b"x" * (at * 97 % 900), keys=f"{number}-{at}"))
        line = [number, at, where.queue_offset, where.physical_offset, where.msg_id]
        sys.stdout.write(json.dumps(line) + chr(10)); sys.stdout.flush()
for number in range(4):
    threading.Thread(target=work, args=(number,)).start()
"""


@pytest.mark.parametrize("lines", [1, 30, 200])
def test_kill_9(tmp_path: Path, lines: int):
    """Killed while four threads append under sync: every receipt that was printed holds."""
    root = tmp_path / "s"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(
        [sys.executable, "-c", SCRIPT, root], stdout=subprocess.PIPE, env=environment
    ) as process:
        assert process.stdout is not None
        told = [process.stdout.readline() for _ in range(lines)]
        process.send_signal(signal.SIGKILL)
        told += process.stdout.readlines()
    assert (root / "abort").exists()
    with reopen(root) as store:
        assert store.recovered is not None
        for line in told:
            if not line.endswith(b"\n"):
                continue
            number, at, offset, place, msg_id = json.loads(line)
            (record,) = store.reader.get(MessageQueue("t", number), offset, count_max=1).records
            assert record.physical_offset == place
            assert record.properties["KEYS"] == f"{number}-{at}"
            (same,) = store.reader.by_key("t", msg_id)
            assert same.physical_offset == place


@pytest.mark.parametrize("name", ["s11-lmq-batchcq"])
def test_lists_that_only_a_broker_makes_are_left_to_it(name: str, tmp_path: Path):
    root = unpack(name, tmp_path)
    before = {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}
    (root / "abort").touch()
    with pytest.raises(InvalidError, match="only a broker can recover it"):
        reopen(root)
    after = {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}
    after.pop(root / "abort")
    assert {path: data for path, data in after.items() if path.name != "lock"} == {
        path: data for path, data in before.items() if path.name != "lock"
    }


@pytest.mark.parametrize("name", ["s05-crash", "s08-crash-continue"])
def test_a_brokers_crashed_store_is_gone_on_with(name: str, tmp_path: Path):
    """What our reader finds in it as a broker would recover it is what we recover."""
    root = unpack(name, tmp_path)
    store = RocketMQStore.open(root, clock=ManualClock())
    wanted = {queue: found.end for queue, found in store.queues().items()}
    end = store.report().log_end
    store.close()
    with reopen(root) as writer:
        assert writer.log_end == end
        mine = writer.queues()
        assert {queue: mine[queue] for queue in wanted} == wanted


def test_a_log_file_whose_name_was_lost_above_the_checkpoint_ends_the_log(tmp_path: Path):
    """Names come to the disk in any order: what is behind the file was promised to nobody. Below it stays an error."""
    root, message = tmp_path / "s", NewMessage("t", 0, bytes(1000))
    with create(tmp_path / "running", SMALL, ManualClock()) as store:
        for _ in range(30):
            store.append(message)
        store.flush()
        covered = store.log_end
        for _ in range(300):
            store.append(message)
        shutil.copytree(tmp_path / "running", root)  # as a machine leaves it
    now_ms = ManualClock().now_ms()
    reached = Checkpoint(now_ms, now_ms, logics_physical_offset=covered)
    (root / "checkpoint").write_bytes(encode_checkpoint(reached))
    files = sorted((root / "commitlog").iterdir())
    lost = files[2]
    assert int(lost.name) > covered
    lost.unlink()
    with pytest.raises(DataError, match="has a hole"):
        RocketMQStore.open(root)
    with reopen(root, SMALL, ManualClock()) as again:
        assert covered < again.log_end <= int(lost.name)
    assert 30 < sum(map(len, read_all(root).values())) < 300
    with reopen(root, SMALL, ManualClock()) as again:
        for _ in range(300):
            again.append(message)
    (root / "abort").write_text("1")
    files[1].unlink()
    with pytest.raises(DataError, match="has a hole"):
        reopen(root, SMALL, ManualClock())


def test_the_folder_of_a_new_store_is_forced_in_the_one_above_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Each folder that is made is a name in another."""
    synced = []
    sync = os.fsync

    def note(descriptor: int) -> None:
        synced.append(str(Path(f"/proc/self/fd/{descriptor}").readlink()))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", note)
    create(tmp_path / "a" / "b" / "s", SMALL, ManualClock()).close()
    made = [str(tmp_path), str(tmp_path / "a"), str(tmp_path / "a" / "b")]
    assert synced[:3] == made
    assert str(tmp_path / "a" / "b" / "s") in synced
