"""What is handed to the listing thread says the same as the log does."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.embedded import create
from support.stored import KINDS, read_all

from tiered.clock import ManualClock
from tiered.format.block import parse_records, walk_records
from tiered.store import listing as facts
from tiered.store.listing import Facts, StoredHandover, of_block, of_handed
from tiered.store.new_message import KeyMaker, NewMessage, counter_digits
from tiered.store.store_options import StoreOptions

if TYPE_CHECKING:
    from pathlib import Path

    from tiered.store.encoding import Prepared, RecordPlaces

TEXT = st.text(st.characters(exclude_characters="\x01\x02", codec="utf-8"), min_size=1, max_size=9)
PLAIN = st.builds(
    NewMessage,
    topic=st.sampled_from(["t", "u", "%RETRY%g"]),
    queue_id=st.integers(0, 2),
    body=st.binary(max_size=30),
    tags=st.none() | st.sampled_from(["A", "tag", "täg"]),
    keys=st.none() | st.from_regex(r"[a-z ]{1,9}", fullmatch=True) | TEXT,
)
OTHER = st.builds(
    NewMessage,
    topic=st.just("t"),
    queue_id=st.integers(0, 2),
    body=st.just(b""),
    properties=st.sampled_from(
        [{"a": "b"}, {"KEYS": "x  y"}, {"TAGS": "T", "UNIQ_KEY": "own", "KEYS": "ä"}]
    ),
    sys_flag=st.sampled_from([0, 0x8]),
)


def alike(topic: str, keys: st.SearchStrategy[str | None]) -> st.SearchStrategy[list[NewMessage]]:
    """Messages as most are: of one topic, all with keys or all without, nothing else about them."""
    one = st.builds(
        NewMessage,
        topic=st.just(topic),
        queue_id=st.integers(0, 2),
        body=st.binary(max_size=30),
        tags=st.none() | st.sampled_from(["A", "tag", "t\u00e4g"]),
        keys=keys,
    )
    return st.lists(one, max_size=9)


ALIKE = st.one_of(
    alike("t", st.from_regex(r"[a-z ]{1,9}", fullmatch=True)),
    alike("u", st.from_regex(r"[a-z ]{1,9}", fullmatch=True)),
    alike("t", st.none()),
)


class Kept(StoredHandover):
    """Remembers what was given."""

    def __init__(self) -> None:
        super().__init__()
        self.given: list[tuple[Prepared, RecordPlaces]] = []

    def give(self, begin: int, messages: Prepared, places: RecordPlaces) -> None:
        self.given.append((messages, places))
        super().give(begin, messages, places)


def check_equal(one: Facts, other: Facts) -> None:
    for name in ("physical_offsets", "queue_offsets", "store_timestamps_ms", "sizes", "sys_flags"):
        assert (getattr(one, name) == getattr(other, name)).all(), name
    for name in ("tag_codes", "hashes", "owners"):
        assert getattr(one.described, name).tolist() == getattr(other.described, name).tolist()
    groups = [
        {queue: indices.tolist() for queue, indices in facts.groups} for facts in (one, other)
    ]
    assert groups[0] == groups[1]


@settings(deadline=None, max_examples=15)
@given(st.lists(st.lists(PLAIN | OTHER, max_size=5) | ALIKE, min_size=1, max_size=6))
def test_what_is_handed_over_is_what_the_log_says(
    tmp_path_factory: pytest.TempPathFactory, batches: list[list[NewMessage]]
):
    root = tmp_path_factory.mktemp("handover") / "s"
    handed = Kept()
    with create(root, StoreOptions(4096, 50, 100, 400), ManualClock()) as store:
        store._log.handover = handed  # the listing thread keeps the first, and reads the log
        for batch in batches:
            store.append_batch(batch)
        end = store.log_end
    log = b"".join(path.read_bytes() for path in sorted((root / "commitlog").iterdir()))
    position = 0
    while position < end:
        taken = handed.take(position, end, 3)
        if not taken:
            break
        if sum(len(one.sizes) for one in taken):
            places = np.concatenate([np.array(one.positions, np.int64) for one in taken])
            sizes = np.concatenate([np.array(one.sizes, np.int32) for one in taken])
            check_equal(of_handed(taken), of_block(parse_records(log, places, sizes)))
        position = taken[-1].end
    assert position == end
    assert walk_records(log, 0, len(log), size_max=4096).end <= end


def test_what_is_alike_is_taken_as_it_was_given(tmp_path: Path):
    """Of several topics, with keys and without: no properties are looked into, and the log says the same."""
    handed, options = Kept(), StoreOptions(1 << 20, 50, 100, 400)
    batches = [
        [
            NewMessage("t", at % 3, b"x", tags="ABC"[at % 3], keys=f"k{at} of-{at}")
            for at in range(40)
        ],
        [NewMessage("t", 1, b"x" * at, tags="A") for at in range(9)],
        [NewMessage("u", at % 2, b"y", tags="B", keys=f"k{at}") for at in range(100)],
    ]
    with create(tmp_path / "s", options, ManualClock()) as store:
        for batch in batches:  # what is new is learnt from the first of its kind
            store.append_batch(batch)
        begin = store.log_end
        store._log.handover = handed
        for batch in batches:
            store.append_batch(batch)
            store.append(batch[0])
        end = store.log_end
    assert all(messages.ids is not None for messages, _ in handed.given)
    taken = handed.take(begin, end, 1 << 20)
    assert taken[-1].end == end
    log = (tmp_path / "s" / "commitlog" / f"{0:020d}").read_bytes()
    places = np.concatenate([np.array(one.positions, np.int64) for one in taken])
    sizes = np.concatenate([np.array(one.sizes, np.int32) for one in taken])
    check_equal(of_handed(taken), of_block(parse_records(log, places, sizes)))


def test_unique_ids_go_on_behind_the_last_counter():
    """Those of a run differ in the counter only; where it would wrap there is none, and single ones are drawn."""
    keys = KeyMaker(random.Random(1))
    found = [*keys.take(1, 0)]
    while (run := keys.run(700, 0)) is not None:
        found += [run.prefix + counter_digits()[run.first + at] for at in range(run.length)]
    found += keys.take(70_000, 0)
    assert len(set(found)) == len(found) > 70_001
    assert {len(one) for one in found} == {32}


def test_who_falls_behind_reads_the_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """With room for few messages most of them are dropped from the handover; all are listed."""
    monkeypatch.setattr(facts, "BYTES_MAX", 600)
    messages = [message for message in KINDS if "UNIQ_KEY" not in message.properties]
    with create(tmp_path / "s") as store:
        for _ in range(60):
            store.append_batch(messages)
            store.append_batch(messages[:1] * 2)
            assert len(store._log.handover._waiting) <= 1
    assert sum(map(len, read_all(tmp_path / "s").values())) == 60 * (len(messages) + 2)


def test_what_cannot_be_handed_over_is_read_from_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """What it says is that it may be stored; it is, and what comes behind it stands behind it."""
    with create(tmp_path / "s") as store:
        store.append(NewMessage("t", 0, b"0"))
        with monkeypatch.context() as patch:
            patch.setattr(StoredHandover, "give", lambda *_: 1 // 0)
            with pytest.raises(ZeroDivisionError):
                store.append(NewMessage("t", 0, b"1"))
        store.append(NewMessage("t", 0, b"2"))
    (records,) = read_all(tmp_path / "s").values()
    assert [(offset, record.body) for offset, record in records.items()] == [
        (0, b"0"),
        (1, b"1"),
        (2, b"2"),
    ]


def test_an_empty_batch(tmp_path: Path):
    with create(tmp_path / "s") as store:
        assert len(store.append_batch([])) == 0
        store.append(NewMessage("t", 0, b""))
    assert sum(map(len, read_all(tmp_path / "s").values())) == 1
