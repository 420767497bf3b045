"""Whatever is done to a folder and to the model in memory, both answer the same."""

from __future__ import annotations

import shutil
import tempfile
from typing import TYPE_CHECKING

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from backends.base import ByteRange, Version
from backends.errors import BackendError
from backends.local import LocalFolderStore
from backends.memory import MemoryStore

if TYPE_CHECKING:
    from collections.abc import Callable

    from backends.base import ObjectStore

SEGMENTS = st.sampled_from(["a", "b", "a-", "a.b", "a0", "ß", "%41"])
KEYS = st.lists(SEGMENTS, min_size=1, max_size=3).map("/".join)
PLACES = st.one_of(st.just(""), KEYS, KEYS.map(lambda key: key + "/"), KEYS.map(lambda k: k[:-1]))
BODIES = st.binary(max_size=20)


def answer(call: Callable[[], object]) -> object:
    """What a call gives, or the class of the error that it raises."""
    try:
        return call()
    except BackendError as error:
        return type(error)


class FolderAgainstMemory(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.mkdtemp()
        self.local = LocalFolderStore(self.folder)
        self.model = MemoryStore()
        self.versions: dict[str, Version] = {}

    def both(self, call: Callable[[ObjectStore], object]) -> object:
        expected = answer(lambda: call(self.model))
        assert answer(lambda: call(self.local)) == expected
        return expected

    @rule(key=KEYS, chunks=st.lists(BODIES, max_size=3))
    def put(self, key: str, chunks: list[bytes]) -> None:
        self.both(lambda store: store.put_if_absent(key, chunks))

    @rule(key=KEYS)
    def delete(self, key: str) -> None:
        self.both(lambda store: store.delete(key))

    @rule(key=KEYS, start=st.integers(0, 25), size=st.integers(1, 25))
    def get(self, key: str, start: int, size: int) -> None:
        self.both(lambda store: store.get(key))
        self.both(lambda store: store.get(key, ByteRange(start, start + size)))
        self.both(lambda store: store.head(key).size_bytes)
        self.both(lambda store: store.get_versioned(key))

    @rule(key=KEYS, body=BODIES, known=st.booleans())
    def compare_and_set(self, key: str, body: bytes, known: bool) -> None:
        expected = self.versions.get(key) if known else None
        version = self.both(lambda store: store.compare_and_set(key, body, expected))
        if isinstance(version, str):
            self.versions[key] = Version(version)

    @rule(prefix=PLACES, after=PLACES)
    def list_some(self, prefix: str, after: str) -> None:
        self.both(lambda store: [i.key for i in store.list(prefix, start_after=after)])

    @rule()
    def reopen(self) -> None:
        self.local.close()
        self.local = LocalFolderStore(self.folder)

    @invariant()
    def lists_are_equal(self) -> None:
        self.both(lambda store: [(i.key, i.size_bytes) for i in store.list("")])

    def teardown(self) -> None:
        self.local.close()
        shutil.rmtree(self.folder)


TestFolderAgainstMemory = FolderAgainstMemory.TestCase
TestFolderAgainstMemory.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
