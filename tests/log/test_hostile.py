"""A bucket that somebody else may write to: right checksums around nonsense. Nothing crashes, hangs or fills the memory."""

from __future__ import annotations

import base64
import contextlib
import copy
import json
import resource
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from support.journals import PREFIX
from support.tiers import TierBuilder
from zlib_ng import zlib_ng

from backends.errors import BackendError
from backends.memory import MemoryStore
from backends.wrapping import WrappingStore
from tiered.api.broker_place import Place, find_places
from tiered.clock import ManualClock
from tiered.errors import DataError, OtherVersionError, TieredStoreError
from tiered.format.message_forms import decompress_body
from tiered.format.object import build_object, parse_trailer
from tiered.format.sysflag import COMPRESSED, COMPRESSION_ZSTD
from tiered.journal.entry import seal_text
from tiered.journal.lease import Holder, Lease, read_lease
from tiered.journal.replay import CheckpointText, decode_checkpoint, encode_checkpoint
from tiered.keys import LEASE, checkpoint_key, entry_key
from tiered.log.messages import messages_json
from tiered.log.reader import TierReader
from tiered.log.state import Gap, queue_action
from tiered.log.verify import verify_tier
from tiered.model import QueueOffset
from tiered.upkeep.rebuild import plan_rebuild

if TYPE_CHECKING:
    from collections.abc import Callable

    from backends.base import ObjectStore

DEEP: Any = []
for _ in range(400):
    DEEP = [DEEP]
NONSENSE = [
    None, -1, 0, 1, 2**31, 2**62, 2**63, 2**200, 1.5, float("nan"), True, "", "x", "9" * 5000, "../../etc", "\udc80",
    [], {}, [[]], {"do": "part"}, [{"do": "x"}], DEEP,
]  # fmt: skip
POOL = ThreadPoolExecutor(2)


@cache
def objects() -> dict[str, bytes]:
    builder = TierBuilder()
    builder.add([b"a", (3, b"inner"), b"c" * 200])
    builder.add([b"d", None, b"e"], roll=True)
    builder.gap(4)
    builder.journal.write_checkpoint(force=True)
    builder.add([b"after"])
    incarnation = builder.journal.state.queues[next(iter(builder.journal.state.queues))][0]
    queue = next(iter(builder.journal.state.queues))
    builder.say(queue_action("quarantine", queue, 0, count=1))
    builder.say(queue_action("incarnation", queue, 1, start=5, reason="anew"))
    assert incarnation.commit_offset == 13
    lease = {
        "format": 1, "writer": "0badcafe", "expires_ms": 1, "released": True, "epoch": 0, "number": 0, "history": "",
        "holder": {"host": "h", "boot": "b", "space": "s", "pid": 1, "started": 2},
    }  # fmt: skip
    builder.store.put_if_absent(PREFIX + LEASE, seal_text(lease))
    return {info.key: builder.store.get(info.key) for info in builder.store.list("")}


def store_of(found: dict[str, bytes]) -> MemoryStore:
    store = MemoryStore()
    for key, data in found.items():
        store.put_if_absent(key, data)
    return store


def paths(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place in a JSON value."""
    found = [path]
    rows = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    for key, inner in rows:
        found += paths(inner, (*path, key))
    return found


def put_at(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    if not path:
        return new
    changed = copy.copy(value)
    changed[path[0]] = put_at(value[path[0]], path[1:], new)
    return changed


def document_of(key: str, data: bytes) -> tuple[Any, Callable[[Any], bytes]]:
    """The JSON in an object, and how to put another into it."""
    if key.endswith(".checkpoint"):
        found = decode_checkpoint(data, where=key)
        return found.state, lambda state: encode_checkpoint(
            CheckpointText(found.number, found.last, state)
        )
    if "/queue/" in key or "/quarantine/" in key:
        trailer = parse_trailer(data, where=key)
        payload = data[: trailer.payload_bytes]
        return dict(trailer.description), lambda said: _object(payload, said)
    return json.loads(data.partition(b"\n")[0]), seal_text


def _object(payload: bytes, said: Any) -> bytes:
    return b"".join(bytes(memoryview(b)) for b in build_object([payload], said).buffers)


def read_everything(store: ObjectStore) -> None:
    """What readers do; only what they promise may be raised."""
    for job in (_read, _verify, _rebuild, lambda s: read_lease(s, PREFIX + LEASE), find_places):
        with contextlib.suppress(TieredStoreError, BackendError):
            job(store)


def _read(store: ObjectStore) -> None:
    reader = TierReader(store, PREFIX)
    reader.refresh()
    for queue, incarnations in reader.state.queues.items():
        for incarnation in incarnations:
            batches = reader.queue(queue, incarnation.number).batches(QueueOffset(0))
            for steps, found in enumerate(batches):
                if not isinstance(found, Gap):
                    list(messages_json(found.records, found.log_offset, raw_body=False))
                assert steps < 1000


def _verify(store: ObjectStore) -> None:
    verify_tier(store, PREFIX, deep=True)


def _rebuild(store: ObjectStore) -> None:
    plan_rebuild(store, PREFIX, POOL)


@settings(deadline=None, max_examples=200)
@given(st.data())
def test_nonsense_with_right_checksums(draw: st.DataObject):
    found = dict(objects())
    for _ in range(draw.draw(st.integers(1, 2))):
        key = draw.draw(st.sampled_from(sorted(found)))
        try:
            document, put = document_of(key, found[key])
            path = draw.draw(st.sampled_from(paths(document)))
        except (TieredStoreError, ValueError, RecursionError, TypeError):
            continue  # the first change has made nonsense of it already
        found[key] = put(put_at(document, path, draw.draw(st.sampled_from(NONSENSE))))
    if draw.draw(st.booleans()):
        for key in [key for key in found if key.endswith(".checkpoint")]:
            del found[key]
    read_everything(store_of(found))


def test_deep_json():
    text = b"[" * 200_000
    for key in (entry_key(PREFIX, 9), checkpoint_key(PREFIX, 9), PREFIX + LEASE):
        found = dict(objects())
        line = b'{"a":' + text
        found[key] = b"%s\n%08x\n" % (line, zlib_ng.crc32(line))
        read_everything(store_of(found))


@pytest.mark.parametrize("text", [b"[" + b"[]," * 60_000_000 + b"[]]", b"[" * 100_000])
def test_a_checkpoint_that_is_a_bomb(text: bytes):
    state = base64.b64encode(zlib_ng.compress(text, 1)).decode()
    data = seal_text({"number": 9, "last": 0, "format": 2, "bytes": len(text), "state": state})
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(OtherVersionError):
        decode_checkpoint(data, where="journal/9.checkpoint")
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 600 * 1024  # KiB: the text itself, not what it would become


def test_garbage_keys_cost_little():
    store = MemoryStore()
    for number in range(3000):
        store.put_if_absent(f"garbage-{number}", b"")
    place = Place("c", "b")
    store.put_if_absent(place.prefix + "journal/" + "0" * 19 + "1", b"")
    calls = 0
    list_of = store.list

    def counted(prefix: str, *, start_after: str = "") -> Any:
        nonlocal calls
        calls += 1
        return list_of(prefix, start_after=start_after)

    store.list = counted  # type: ignore[method-assign]
    assert find_places(store) == [place]
    assert calls < 50


@pytest.mark.parametrize(
    "name", [".DS_Store", "$folder", "a", "b", "b/x", "b~+/x", "!/%/x", "~+/~+/x"]
)
@pytest.mark.parametrize("cluster", ["c", "c" * 250])
def test_a_strange_name_in_a_cluster_s_folder_hides_no_broker(cluster: str, name: str):
    store = MemoryStore()
    places = [Place(cluster, broker) for broker in ("B", "b" * 300, "c")]
    for place in places:
        store.put_if_absent(place.prefix + "journal/" + "0" * 19 + "1", b"")
    folders = {place.prefix.split("/")[0] for place in places}
    for folder in folders:
        store.put_if_absent(f"{folder}/{name}", b"")
    assert find_places(store) == places


@pytest.mark.parametrize(
    "holder", [{}, {"host": 1}, "x", {"host": [], "boot": 1, "space": 2, "pid": "3", "started": {}}]
)
def test_a_lease_of_another_form_is_left_alone(holder: Any):
    store = MemoryStore()
    said = {"format": 1, "writer": "x", "expires_ms": "soon", "released": 0, "holder": holder}
    store.put_if_absent(PREFIX + LEASE, seal_text(said))
    clock = ManualClock()
    mine = Holder.present()
    lease = Lease(store, PREFIX, writer="0badcafe", holder=mine, seconds=9, clock=clock)
    before = store.get(PREFIX + LEASE)
    with pytest.raises(OtherVersionError):
        lease.try_acquire()
    assert store.get(PREFIX + LEASE) == before


def test_a_body_of_a_million_empty_frames():
    one = zstandard.ZstdCompressor().compress(b"")
    with pytest.raises(DataError, match="frames"):
        decompress_body(one * 1_000_000, COMPRESSED | COMPRESSION_ZSTD)


class Enormous(WrappingStore):
    """Says that some objects are enormous, and does not give them."""

    def list(self, prefix: str, *, start_after: str = "") -> Any:
        for info in self._inner.list(prefix, start_after=start_after):
            yield replace(info, size_bytes=2**40) if "journal/" in info.key else info

    def get(self, key: str, byte_range: Any = None) -> bytes:
        assert "journal/" not in key
        return self._inner.get(key, byte_range)


def test_an_enormous_journal_is_not_read():
    store = Enormous(store_of(objects()))
    with pytest.raises(DataError, match="larger than"):
        _read(store)
    assert plan_rebuild(store, PREFIX, POOL).damage
