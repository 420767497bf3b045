"""Immutable collections that share with their predecessors what did not change, so that replay of a long log stays linear.

Each change gives another collection and copies a few hundred references at most; whoever holds the old one sees no change.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Generic, TypeVar, cast, overload

from tiered.archive.model import Archived

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable

_CHUNK = 256
"""Stretches of a chunk, at most."""
_BITS = 5
_LEAF = 32
_BITS_MAX = 60

K = TypeVar("K", bound="Hashable")
V = TypeVar("V")


class Stretches(Sequence[Archived]):
    """Stretches of a lane, apart from one another, in order of offset. Equal to a tuple of the same."""

    __slots__ = ("_chunks", "_count")

    def __init__(self, found: Iterable[Archived] = ()) -> None:
        rows = tuple(found)
        self._count = len(rows)
        starts = range(0, len(rows), _CHUNK // 2)
        self._chunks = tuple(rows[at : at + _CHUNK // 2] for at in starts)

    def around(self, start: int, end: int) -> list[Archived]:
        """Those that overlap with offsets ``[start, end)``, in order."""
        found: list[Archived] = []
        first = self._chunk(start)
        for number in range(first, len(self._chunks)):
            chunk = self._chunks[number]
            if chunk[0].start >= end:
                break
            at = max(_place(chunk, start) - 1, 0) if number == first else 0
            while at < len(chunk) and chunk[at].start < end:
                found += [chunk[at]] if chunk[at].end > start else []
                at += 1
        return found

    def with_one(self, new: Archived) -> Stretches:
        """With another, which overlaps with none."""
        if not self._chunks:
            return _made(((new,),), 1)
        number = self._chunk(new.start)
        chunk = self._chunks[number]
        at = _place(chunk, new.start)
        whole = (*chunk[:at], new, *chunk[at:])
        half = len(whole) if at == len(chunk) else len(whole) // 2  # mostly they come at the end
        parts = (
            (whole,)
            if len(whole) <= _CHUNK
            else tuple(filter(None, (whole[: half - 1], whole[half - 1 :])))
        )
        return _made((*self._chunks[:number], *parts, *self._chunks[number + 1 :]), self._count + 1)

    def with_changed(self, new: Archived) -> Stretches:
        """With one in the place of that which begins where it does.

        Raises:
            LookupError: None does.
        """
        number = self._chunk(new.start)
        chunk = self._chunks[number]
        at = _place(chunk, new.start) - 1
        if at < 0 or chunk[at].start != new.start:
            raise LookupError(new.start)
        changed = (*chunk[:at], new, *chunk[at + 1 :])
        return _made((*self._chunks[:number], changed, *self._chunks[number + 1 :]), self._count)

    def without(self, starts: Iterable[int]) -> Stretches:
        """Without those that begin there."""
        gone = set(starts)
        touched = {self._chunk(start) for start in gone} if self._chunks else set()
        chunks = tuple(
            kept
            for number, chunk in enumerate(self._chunks)
            if (
                kept := chunk
                if number not in touched
                else tuple(o for o in chunk if o.start not in gone)
            )
        )
        return _made(chunks, sum(map(len, chunks)))

    def _chunk(self, start: int) -> int:
        """The last chunk that begins there or before; the first if none does."""
        return max(bisect_right(self._chunks, start, key=lambda chunk: chunk[0].start) - 1, 0)

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Archived]:
        for chunk in self._chunks:
            yield from chunk

    @overload
    def __getitem__(self, index: int) -> Archived: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Archived]: ...
    def __getitem__(self, index: int | slice) -> Archived | Sequence[Archived]:
        return tuple(self)[index]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Stretches | tuple):
            return NotImplemented
        return tuple(self) == tuple(other)

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return repr(tuple(self))


def _made(chunks: tuple[tuple[Archived, ...], ...], count: int) -> Stretches:
    found = Stretches()
    found._chunks, found._count = chunks, count  # noqa: SLF001 (its own)
    return found


def _place(chunk: tuple[Archived, ...], start: int) -> int:
    """Behind those that begin there or before."""
    return bisect_right(chunk, start, key=lambda one: one.start)


class Shared(Generic[K, V]):
    """A mapping: a tree of small dictionaries by the hashes of their keys. In no order."""

    __slots__ = ("_root", "_size")

    def __init__(self, items: Iterable[tuple[K, V]] = ()) -> None:
        self._root: object = {}
        self._size = 0
        for key, value in items:
            self._size += self.get(key) is None
            self._root = _changed(self._root, hash(key), 0, key, value)

    def get(self, key: K) -> V | None:
        """The value of a key, if it has one."""
        node, bits = self._root, hash(key)
        while isinstance(node, tuple):
            node, bits = node[bits & (_LEAF - 1)], bits >> _BITS
        return cast("dict[K, V]", node).get(key)

    def having(self, key: K, value: V) -> Shared[K, V]:
        """With a value for a key, in the place of that which it had."""
        is_new = self.get(key) is None
        return self._with(_changed(self._root, hash(key), 0, key, value), self._size + is_new)

    def lacking(self, key: K) -> Shared[K, V]:
        """Without a key."""
        if self.get(key) is None:
            return self
        return self._with(_changed(self._root, hash(key), 0, key, None), self._size - 1)

    def _with(self, root: object, size: int) -> Shared[K, V]:
        found: Shared[K, V] = Shared()
        found._root, found._size = root, size
        return found

    def __len__(self) -> int:
        return self._size

    def values(self) -> Iterator[V]:
        """All values."""
        nodes: list[object] = [self._root]
        while nodes:
            node = nodes.pop()
            if isinstance(node, tuple):
                nodes += node
            else:
                yield from cast("dict[K, V]", node).values()


def _changed(node: object, bits: int, depth: int, key: object, value: object) -> object:
    """A node with another value for a key; None takes it away."""
    if isinstance(node, tuple):
        at = bits & (_LEAF - 1)
        return (
            *node[:at],
            _changed(node[at], bits >> _BITS, depth + _BITS, key, value),
            *node[at + 1 :],
        )
    leaf = dict(cast("dict[object, object]", node))
    if value is None:
        leaf.pop(key, None)
    else:
        leaf[key] = value
    if len(leaf) <= _LEAF or depth >= _BITS_MAX:
        return leaf
    children: list[dict[object, object]] = [{} for _ in range(_LEAF)]
    for each, kept in leaf.items():
        children[hash(each) >> depth & (_LEAF - 1)][each] = kept
    return tuple(children)
