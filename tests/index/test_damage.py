"""Damaged, lost and late things cost what they are, and never a wrong answer."""

from __future__ import annotations

import contextlib
import random
from typing import IO, TYPE_CHECKING, Any

import numpy as np
import pytest
from support.broken import COUNT as MESSAGES
from support.broken import TOPIC, build, keys_of
from support.command_line import here
from support.journals import PREFIX
from support.keyed import KeyedTier, Mail, places

from backends.errors import UnavailableError, UnknownOutcomeError
from backends.memory import MemoryStore
from backends.testing.faulty import READS, Fault, FaultyStore, Rule
from backends.wrapping import MeteredStore
from tiered.errors import DataError
from tiered.format.object import ITEM
from tiered.index.indexer import IndexBuilder, Indexer, WorkFile
from tiered.index.lookup import IndexReader, Wish
from tiered.log.reader import TierReader
from tiered.log.state import index_action, indexed_to
from tiered.model import MessageQueue, QueueOffset

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tiered.index.lookup import Lookup

A, B = MessageQueue("orders", 0), MessageQueue("orders", 1)


def mails(*keys: str) -> list[Mail | None]:
    return [Mail(keys=(key,)) for key in keys]


@pytest.fixture
def tier() -> Iterator[KeyedTier]:
    made = KeyedTier()
    made.post(A, mails("a", "b"))
    made.index()
    made.post(A, mails("a", "c"))
    made.index()
    made.post(B, mails("a"))
    yield made
    made.builder.reset()


def lookup(tier: KeyedTier, key: str) -> Lookup:
    """By a reader that holds nothing yet."""
    return IndexReader(tier.store, PREFIX).lookup(tier.journal.state, Wish(topic="orders", key=key))


def test_a_changed_byte_is_told_or_costs_nothing(tier: KeyedTier):
    assert isinstance(tier.store, MemoryStore)
    key = PREFIX + tier.journal.state.indexes[0].place.key
    whole, expected = tier.store.get(key), places(lookup(tier, "a"))
    assert len(expected) == 3
    for at in range(len(whole)):
        changed = bytearray(whole)
        changed[at] ^= 1
        tier.store.delete(key)
        tier.store.put_if_absent(key, [changed])
        found = lookup(tier, "a")
        assert found.damaged, at
        assert places(found) == [one for one in expected if one[2] != 0 or one[0] == B]


def test_a_lost_index_object_is_told_and_the_rest_is_found(tier: KeyedTier):
    tier.store.delete(PREFIX + tier.journal.state.indexes[1].place.key)
    found = lookup(tier, "a")
    assert len(found.damaged) == 1
    assert "gone" in str(found.damaged[0])
    assert [(hit.queue, hit.queue_offset) for hit in found.hits] == [(B, 0), (A, 0)]
    assert not lookup(tier, "a").is_complete


def test_a_lost_message_is_told_and_the_rest_is_found(tier: KeyedTier):
    tier.store.delete(PREFIX + tier.journal.state.queues[A][-1].parts()[1].bundle.key)
    found = lookup(tier, "a")
    assert len(found.damaged) == 1
    assert [(hit.queue, hit.queue_offset) for hit in found.hits] == [(B, 0), (A, 0)]


def test_a_damaged_block_of_what_is_not_indexed_costs_only_itself(tier: KeyedTier):
    part = tier.post(B, [Mail(keys=("many", f"n{at}"), body=b"x" * 900) for at in range(1000)])
    start, end = part.queue_offset, part.queue_end
    key = PREFIX + part.bundle.key
    whole = bytearray(tier.store.get(key))
    whole[len(whole) // 2] ^= 1
    tier.store.delete(key)
    tier.store.put_if_absent(key, [whole])
    store = MeteredStore(tier.store)
    wish = Wish(topic="orders", key="many", count=10_000)
    found = IndexReader(store, PREFIX).lookup(tier.journal.state, wish)
    offsets = {hit.queue_offset for hit in found.hits}
    lost = sorted(set(range(start, end)) - offsets)
    assert 0 < len(lost) < 100
    assert lost == list(range(lost[0], lost[-1] + 1))
    assert len(found.damaged) == 1
    assert not found.unscanned
    assert store.snapshot().requests < 150
    (hit,) = lookup(tier, "n999").hits
    assert hit.queue_offset == end - 1


def test_a_reader_with_an_old_state_sees_what_has_come(tier: KeyedTier):
    old = tier.journal.state
    gone = old.indexes[0].place.key
    tier.index()
    tier.say(index_action([], [gone]))
    tier.index()
    tier.store.delete(PREFIX + gone)
    found = IndexReader(tier.store, PREFIX).lookup(old, Wish(topic="orders", key="a"))
    assert found.is_complete
    assert places(found) == tier.expected("orders", "a")


def test_a_store_that_does_not_answer_is_an_error_and_no_answer(tier: KeyedTier):
    store = FaultyStore(tier.store, random.Random(1), Rule(Fault.UNAVAILABLE, READS))
    with pytest.raises(UnavailableError):
        IndexReader(store, PREFIX).lookup(tier.journal.state, Wish(topic="orders", key="a"))


def test_a_damaged_part_stops_its_queue_only(tier: KeyedTier):
    tier.post(A, mails("d"))
    tier.post(A, mails("e"))
    tier.store.delete(PREFIX + tier.journal.state.queues[A][-1].parts()[2].bundle.key)
    tier.store.put_if_absent(
        PREFIX + tier.journal.state.queues[A][-1].parts()[2].bundle.key, [b"junk"]
    )
    tier.index()
    incarnations = tier.journal.state.queues
    assert (indexed_to(incarnations[A][-1]), indexed_to(incarnations[B][-1])) == (4, 1)
    assert list(tier.indexer.damaged) == [(A, 0)]
    assert tier.indexer.waits(tier.journal.state) == 0
    assert places(lookup(tier, "a")) == tier.expected("orders", "a")


# -- the work file --------------------------------------------------------------------------------


def test_a_work_file_that_has_changed_is_told(tmp_path: Path):
    work = WorkFile(str(tmp_path))
    assert not list(tmp_path.iterdir()), "it has no name"
    work.append(np.arange(3, dtype=np.uint64), np.zeros(3, ITEM))
    work.append(np.arange(2, dtype=np.uint64), np.ones(2, ITEM))
    assert [(start, len(items)) for start, items in work.blocks()] == [(0, 3), (3, 2)]
    file: IO[bytes] = work._file
    file.seek(50)
    file.write(b"x")
    with pytest.raises(DataError, match="has changed"):
        list(work.blocks())
    file.truncate(10)
    with pytest.raises(DataError, match="has changed"):
        list(work.blocks())
    work.close()


def test_a_full_disk_loses_nothing_but_the_work(tier: KeyedTier, monkeypatch: pytest.MonkeyPatch):
    tier.post(A, mails("f"))

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(WorkFile, "append", full)
        with pytest.raises(OSError, match="No space"):
            tier.collect()
        assert tier.builder.is_empty
    tier.index()
    assert places(tier.ask("orders", "f")) == tier.expected("orders", "f")
    assert indexed_to(tier.journal.state.queues[A][-1]) == 5


def test_an_upload_that_failed_is_made_again_under_another_key(tier: KeyedTier):
    store = FaultyStore(tier.store, random.Random(1), Rule(Fault.LOST_ANSWER))
    builder = IndexBuilder(store, PREFIX, tier.uploader.next_id)
    indexer = Indexer(builder, tier.store, PREFIX)
    while indexer.step(tier.journal.state):
        pass
    with pytest.raises(UnknownOutcomeError):
        builder.finish()
    made = builder.finish()
    assert made.count == 1
    assert len(list(tier.store.list(PREFIX + "index/"))) == 4
    builder.reset()


def test_what_lies_between_damaged_blocks_is_found_and_what_is_lost_is_counted() -> None:
    """Large messages between two runs of small ones: who looks for the end of the damage by leaps passes over them."""
    made = KeyedTier()
    small = [Mail(keys=("a",), body=b"s" * 1400)] * 100
    large = [Mail(keys=("a",), body=b"l" * 100_000)] * 3
    part = made.post(A, [*small, *large, *small])
    key, at = PREFIX + part.bundle.key, part.section.start
    data = bytearray(made.store.get(key))
    damaged = [range(2), range(7, 9)]
    for block in (block for some in damaged for block in some):
        data[at + (block << 16) + 9] ^= 1
    made.store.delete(key)
    made.store.put_if_absent(key, bytes(data))
    reader = TierReader(made.store, PREFIX)
    reader.refresh()
    sound = set()
    for offset in range(len(small) * 2 + len(large)):
        with contextlib.suppress(DataError):
            reader.queue(A).read(QueueOffset(offset), bytes_max=1, count_max=1)
            sound.add(offset)
    assert {100, 101, 102} & sound
    wish = Wish(topic="orders", key="a", count=1000)
    found = IndexReader(made.store, PREFIX).lookup(made.journal.state, wish)
    assert {hit.queue_offset for hit in found.hits} == sound
    assert found.lost == len(small) * 2 + len(large) - len(sound)
    assert found.damaged
    made.builder.reset()


def test_the_command_gives_the_rest_and_names_and_counts_all_damage(tmp_path: Path) -> None:
    tier = build(tmp_path)
    tier.flip(0, 1)
    tier.flip(1, MESSAGES // 2 + 1)
    words = ("query", tier.url, TOPIC, "--key", keys_of(1))
    ran = here(*words, "--json")
    assert ran.code == 5
    found = {(row["queue_id"], row["queue_offset"]) for row in ran.document["messages"]}
    assert found == {(0, MESSAGES // 2 + 1), (1, 1)}
    assert ran.document["damaged_messages"] >= 2
    assert ran.error.count("fail their checksum") == 2
    here("verify", tier.url, "--deep", "--store", tier.store, "--repair").good()
    document = here(*words, "--json").good().document
    assert (len(document["messages"]), document["damaged_messages"]) == (4, 0)
