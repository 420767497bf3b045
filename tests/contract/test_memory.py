"""The contract over MemoryStore, and what only it does."""

from __future__ import annotations

import pytest

from backends.errors import InvalidKeyError
from backends.memory import MemoryStore
from backends.testing.contract import ObjectStoreContract


class TestMemoryStore(ObjectStoreContract):
    @pytest.fixture
    def store(self) -> MemoryStore:
        return MemoryStore("test")


def test_modified_time_is_that_of_the_clock_given():
    store = MemoryStore(now_ms=lambda: 1_700_000_000_123)
    store.put_if_absent("a", b"")
    assert store.head("a").modified_ms == 1_700_000_000_123
    assert [found.modified_ms for found in store.list("")] == [1_700_000_000_123]


@pytest.mark.parametrize(("first", "second"), [("x", "x/y"), ("x/y", "x"), ("x", "x/y/z")])
def test_no_key_is_the_folder_of_another(first: str, second: str):
    store = MemoryStore()
    store.put_if_absent(first, b"")
    with pytest.raises(InvalidKeyError):
        store.put_if_absent(second, b"")
    with pytest.raises(InvalidKeyError):
        store.compare_and_set(second, b"", None)
    store.put_if_absent(first + "-y", b"")


def test_shared_by_name():
    assert MemoryStore.shared("one") is MemoryStore.shared("one")
    assert MemoryStore.shared("one") is not MemoryStore.shared("two")
