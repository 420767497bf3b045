"""Whatever the names of cluster, broker and topic: every key that can be built lies below its tier and nowhere else."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING

from hypothesis import assume, example, given
from hypothesis import strategies as st
from support.synthetic import SyntheticStore

from backends.base import check_key
from backends.memory import MemoryStore
from backends.registry import PREFIX, probe
from tiered import keys
from tiered.api.broker_place import Place, find_places
from tiered.clock import SystemClock
from tiered.dispatch.group_commit import Uploader
from tiered.journal.entry import KEY_CHARS_MAX, seal_text
from tiered.log.composite import CommitPolicy, CompositeFlatFile
from tiered.log.parts import Incarnation
from tiered.model import MessageQueue, QueueOffset

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

HOSTILE = st.sampled_from(
    [
        "..", ".", "../..", "/", "//", "a/../../b", "/etc/passwd", "..\\..", "%2e%2e%2f", "%2F", "~2e", "~+", "a~+", "\0",
        "\n", " ", "lease", "journal", "probe-x",
        "ledger/x", "?versionId=x", "#", "*", "${aws}", "\u202e", "\uff0e\uff0e\uff0f",
        "x" * 255, "\udcff" * 255, "~" * 120, "",
    ]
)  # fmt: skip
NAMES = st.one_of(
    HOSTILE,
    st.lists(HOSTILE, max_size=3).map("".join),
    st.text(max_size=80),
    st.binary(max_size=255).map(lambda raw: raw.decode("utf-8", "surrogateescape")),
).map(lambda name: name.encode("utf-8", "replace").decode() if _is_odd(name) else name)
POLICY = CommitPolicy(1024, 1.0, 1 << 30, 3_600_000)
NUMBERS = st.integers(0, 10**10 - 1)
IDS = st.builds(keys.ObjectId, NUMBERS, st.just("0badcafe"), NUMBERS)


def _is_odd(name: str) -> bool:
    """Surrogates that no bytes of a store can give."""
    return any("\ud800" <= letter < "\udc80" or "\udcff" < letter <= "\udfff" for letter in name)


BUILDERS: Mapping[str, Callable[[str, MessageQueue, int, keys.ObjectId], str]] = {
    "entry_key": lambda at, _queue, number, _made: keys.entry_key(at, number),
    "checkpoint_key": lambda at, _queue, number, _made: keys.checkpoint_key(at, number),
    "shard_key": lambda at, _queue, number, _made: keys.shard_key(at, number, "0123456789abcdef"),
    "index_key": lambda at, _queue, number, made: keys.index_key(at, number, made),
    "ledger_key": lambda at, _queue, number, made: keys.ledger_key(at, number, made.writer, 1),
    "queue_prefix": lambda at, queue, _number, _made: keys.queue_prefix(at, queue) + "x",
    "mount_prefix": lambda at, queue, _number, _made: keys.mount_prefix(at, queue.topic) + "x",
    "handover_key": lambda at, _queue, number, made: keys.handover_key(at, number, made),
    "recall_key": lambda at, _queue, number, made: keys.recall_key(at, number, made),
    "bundle_key": lambda at, _queue, number, made: keys.bundle_key(at, number % 10, number, made),
    "topic_bundle_key": lambda at, queue, n, made: keys.topic_bundle_key(at, queue.topic, n % 10, n, made),
    "queue_bundle_key": lambda at, queue, n, made: keys.queue_bundle_key(at, queue, n, QueueOffset(1), made),
    "quarantine_key": lambda at, queue, n, made: keys.quarantine_key(at, queue, n, QueueOffset(1), made),
}  # fmt: skip


def test_every_builder_is_in_the_table():
    """A new one has to be put there, and so be held against the properties."""
    found = {
        name
        for name, _ in inspect.getmembers(keys, inspect.isfunction)
        if name.endswith(("_key", "_prefix")) and not name.startswith(("_", "parse"))
    }
    assert found == {*BUILDERS, "broker_prefix", "member_prefix"}


@given(NAMES, NAMES, st.builds(MessageQueue, NAMES, NUMBERS), NUMBERS, IDS)
@example("..", "..", MessageQueue("..", 0), 0, keys.ObjectId(0, "0badcafe", 0))
@example("a/../..", "/", MessageQueue("../../../../x", 0), 0, keys.ObjectId(0, "0badcafe", 0))
def test_no_key_leaves_its_tier(
    cluster: str, broker: str, queue: MessageQueue, number: int, made: keys.ObjectId
):
    prefix = keys.broker_prefix(cluster, broker)
    assume(len(prefix) <= KEY_CHARS_MAX)  # attach refuses longer names
    check_key(prefix.removesuffix("/"))
    for build in BUILDERS.values():
        key = build(prefix, queue, number, made)
        assert key.startswith(prefix)
        below = key.removeprefix(prefix).split("/")
        assert not {"", ".", ".."}.intersection(below)
        assert below[0] in {
            *(
                "journal",
                "shard",
                "ledger",
                "bundle",
                "topic",
                "queue",
                "quarantine",
                "index",
                "meta",
            )
        }
        assert key.isascii()
        assert not set(key).intersection("\\*?$#\0\n\r ")


@given(NAMES, NAMES, NAMES, NAMES)
def test_no_broker_lies_in_another_s(one: str, broker: str, other: str, second: str):
    mine, theirs = keys.broker_prefix(one, broker), keys.broker_prefix(other, second)
    if (one, broker) != (other, second):
        assert not mine.startswith(theirs)
        assert not theirs.startswith(mine)
    assert not mine.startswith(PREFIX)


@given(NAMES, NAMES, NAMES)
def test_members_of_a_fleet_lie_beside_the_brokers_and_come_back(
    member: str, cluster: str, broker: str
):
    key = keys.member_prefix(member) + keys.LEASE
    assert keys.parse_member_key(key) == member
    assert not key.startswith(keys.broker_prefix(cluster, broker))
    assert not keys.broker_prefix(cluster, broker).startswith(keys.MEMBERS)
    assert not {"", ".", ".."}.intersection(key.split("/"))
    assert key.isascii()


@given(NAMES, NAMES)
def test_names_come_back_from_a_listing(cluster: str, broker: str):
    store = MemoryStore()
    place = Place(cluster, broker)
    key = keys.entry_key(place.prefix, 1)
    if len(key.encode()) <= 1024:
        store.put_if_absent(key, seal_text({}))
        assert find_places(store) == [place]


@given(NAMES)
def test_what_an_uploader_makes_lies_below_its_prefix(topic: str):
    assume(
        len(topic.encode("utf-8", "surrogateescape")) <= 255
    )  # it has a directory in the broker's store
    clock = SystemClock()
    store = MemoryStore()
    uploader = Uploader(store, "tier/", epoch=1, writer="0badcafe", clock=clock)
    queue = MessageQueue(topic, 1)
    local = SyntheticStore()
    local.append("t", 1, b"body")
    batch = local.read(MessageQueue("t", 1), QueueOffset(0), bytes_max=1, count_max=1)
    assert batch is not None
    for alone in (True, False):
        file = CompositeFlatFile(queue, Incarnation(0, QueueOffset(0), QueueOffset(0)), POLICY)
        file.append(batch, 0.0)
        commit = file.take(0)
        assert commit is not None
        stored = uploader.put_commits([commit], alone=alone)
        assert stored.bundle.key.startswith("queue/" if alone else "bundle/0/")
    assert all(info.key.startswith("tier/") for info in store.list(""))


def test_probes_lie_where_policies_allow_them():
    store, seen = MemoryStore(), set[str]()
    put, replace = store.put_if_absent, store.compare_and_set
    store.put_if_absent = lambda key, data: (seen.add(key), put(key, data))[1]  # type: ignore[method-assign]
    store.compare_and_set = lambda key, data, old: (seen.add(key), replace(key, data, old))[1]  # type: ignore[method-assign]
    probe(store, "0badcafe")
    assert seen
    assert all(key.startswith(PREFIX) and "/" not in key for key in seen)
    assert [*store.list("")] == []
