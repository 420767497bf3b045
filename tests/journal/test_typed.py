"""Typed records: what is written is read, and what has another form names the fields on the way to it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence  # noqa: TC003 (read at run time)
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiered.journal.entry import INT_MAX, AnyInt, Key, as_document, as_object, as_row, row_of
from tiered.model import MessageQueue, QueueOffset


@dataclass(frozen=True)
class Inner:
    start: QueueOffset
    pairs: tuple[tuple[int, str], ...] = ()


@dataclass(frozen=True)
class Outer:
    queue: MessageQueue
    key: Key
    inner: Inner | None
    said: Mapping[str, Any] = field(default_factory=dict)
    table: Mapping[MessageQueue, Inner] = field(default_factory=dict)
    names: Sequence[str] = ()
    is_so: bool = False
    free: AnyInt = 0


NUMBERS = st.integers(-1, INT_MAX - 1)
QUEUES = st.builds(MessageQueue, st.text(), NUMBERS)
INNER = st.builds(Inner, NUMBERS, st.lists(st.tuples(NUMBERS, st.text()), max_size=2).map(tuple))
OUTER = st.builds(
    Outer,
    QUEUES,
    st.text(min_size=1),
    st.none() | INNER,
    st.dictionaries(st.text(), st.none() | NUMBERS, max_size=2),
    st.dictionaries(QUEUES, INNER, max_size=2),
    st.lists(st.text(), max_size=2),
    st.booleans(),
    st.integers(),
)


@given(OUTER)
def test_what_is_written_is_read(one: Outer):
    for form in (as_row(Outer), as_object(Outer)):
        found = form.decode(form.encode(one))
        assert (found.queue, found.inner, found.table) == (one.queue, one.inner, one.table)
        assert [*found.names] == [*one.names]
        assert (found.said, found.is_so, found.free) == (one.said, one.is_so, one.free)


def test_a_row_leaves_out_defaults_at_its_end_and_spreads_named_tuples():
    plain = Outer(MessageQueue("t", 3), "k", None)
    assert row_of(plain) == ["t", 3, "k", None]
    assert as_row(Outer).decode(["t", 3, "k", None]) == plain
    assert row_of(Inner(QueueOffset(5))) == [5]
    assert as_document(Inner).encode(Inner(QueueOffset(5))) == {"start": 5, "pairs": []}


@pytest.mark.parametrize(
    ("row", "where"),
    [
        (["t", "3", "k", None], "queue: it is '3'"),
        (["t", 3, "", None], "key: an object's key is ''"),
        (["t", 3, "k", [1, [[1, 2]]]], "inner: pairs: it is 2"),
        (["t", 3, "k", [True]], "inner: start: it is True"),
        (["t", 3, "k", [INT_MAX]], "inner: start: it is"),
        (["t", 3, "k", None, []], "said: it is"),
        (["t", 3, "k"], "3 values"),
        (["t", 3, "k", None, {}, [], [], False, 0, 0], "10 values"),
        ({}, "it is {}"),
    ],
)
def test_what_does_not_fit_is_named(row: Any, where: str):
    with pytest.raises(ValueError, match=r"it|values|key") as caught:
        as_row(Outer).decode(row)
    assert where in str(caught.value)


def test_members_of_an_object_are_these_and_no_others():
    with pytest.raises(ValueError, match="pairs is missing"):
        as_document(Inner).decode({"start": 1})
    with pytest.raises(ValueError, match="'new' is unknown here"):
        as_document(Inner).decode({"start": 1, "pairs": [], "new": 1})
