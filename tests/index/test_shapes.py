"""The work of indexing and listing follows the bytes, whatever lengths keys and properties have: counted, not timed."""

from __future__ import annotations

import random
import sys
from typing import TYPE_CHECKING

import numpy as np
import pytest

from tiered.compaction.newest import digest_many
from tiered.format.properties import java_hash, tag_hash
from tiered.format.property_columns import hash_texts
from tiered.index.extract import hash_bytes, hash_many

if TYPE_CHECKING:
    from collections.abc import Callable

COUNT = 128


def texts(sizes: list[int]) -> tuple[bytes, np.ndarray, np.ndarray]:
    rng = random.Random(1)
    made = [bytes(rng.randrange(33, 127) for _ in range(size)) for size in sizes]
    lengths = np.array(sizes, np.int64)
    return b"".join(made) + bytes(16), lengths.cumsum() - lengths, lengths


def unlike(count: int, low: int = 2000, high: int = 8000) -> list[int]:
    """Lengths of which no two are equal, as far as there are so many."""
    return random.Random(2).sample(range(low, high), count)


def steps(call: Callable[[], object]) -> int:
    """Lines of Python that a call takes."""
    taken = 0

    def trace(*_: object) -> object:
        nonlocal taken
        taken += 1
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return taken


SHAPES = {
    "none": [],
    "short": [20] * COUNT,
    "empty ones too": [0, 5, 0, 0, 7, 0],
    "all unlike": unlike(COUNT),
    "one very long": [20] * COUNT + [32_000],
    "two lengths": [20, 3000] * COUNT,
    "long and alike": [5000] * COUNT,
    "more than a chunk": [5000] * 70 + unlike(COUNT),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_hashes_are_the_same_whatever_the_shapes(shape: str):
    data, at, sizes = texts(SHAPES[shape])
    each = [
        data[start : start + size] for start, size in zip(at.tolist(), sizes.tolist(), strict=True)
    ]
    leads = np.arange(len(sizes), dtype=np.uint32) * np.uint32(77)
    view = np.frombuffer(data, np.uint8)
    signed = [
        (int(lead) * pow(31, len(text), 1 << 32) + java_hash(text.decode())) & 0xFFFF_FFFF
        for lead, text in zip(leads, each, strict=True)
    ]
    found = hash_texts(view, at, sizes, np.where(sizes > 0, leads, 0).astype(np.uint32))
    wanted = [
        value - (value >> 31 << 32) if text else 0 for value, text in zip(signed, each, strict=True)
    ]
    assert found.tolist() == wanted
    assert hash_many(data, at, sizes, 5).tolist() == [hash_bytes(text, 5) for text in each]
    digests = digest_many(data, at, sizes)
    alone = [
        digest_many(text + b" ", np.array([0]), np.array([len(text)]))[0].tolist() for text in each
    ]
    assert digests.tolist() == alone


def plain_java_hash(text: str) -> int:
    value = 0
    for at in range(0, len(raw := text.encode("utf-16-le", "surrogatepass")), 2):
        value = (31 * value + int.from_bytes(raw[at : at + 2], "little")) & 0xFFFF_FFFF
    return value - (value >> 31 << 32)


@pytest.mark.parametrize(
    "text", ["", "a", "ä" * 127, "𝄞" * 64, "x" * 128, "x" * 129, "€" * 9000, "\ud800" * 200]
)
def test_long_texts_have_javas_hash(text: str):
    assert java_hash(text) == plain_java_hash(text)
    assert tag_hash(text) == plain_java_hash(text)


def test_the_steps_do_not_grow_with_the_number_of_lengths():
    """Of 128 texts of 2,000 to 8,000 bytes, 128 lengths: each once took a row of Python steps by its own length."""
    data, at, sizes = texts(SHAPES["all unlike"])
    view = np.frombuffer(data, np.uint8)
    for name, call in (
        ("hashes", lambda: hash_texts(view, at, sizes, np.zeros(len(at), np.uint32))),
        ("digests", lambda: digest_many(data, at, sizes)),
    ):
        hash_texts(
            view, at, sizes, np.zeros(len(at), np.uint32)
        )  # the table of powers is made once
        assert steps(call) < 10 * COUNT, name
