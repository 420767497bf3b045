"""Checkpoints: fixed bytes, and nothing unpacked beyond its limit."""

from __future__ import annotations

import base64
import json
import zlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiered.errors import DataError, OtherVersionError
from tiered.journal.entry import seal_text
from tiered.journal.replay import CheckpointText, decode_checkpoint, encode_checkpoint

STATE: Any = {"epoch": 3, "said": ["\udcff", [1, 2]]}
CHECKPOINT = CheckpointText(17, 305419896, STATE)
FORMAT_2 = (
    b'{"bytes":35,"format":2,"last":305419896,"number":17,"shards":[],"state":'
    b'"eJyrVkotyE/OULIy1lEqTsxMUbKKVoopTUlOS1PSiTbUMYqNrQUAxbQK1w=="}'
)


def sealed(line: bytes) -> bytes:
    return line + b"\n%08x\n" % zlib.crc32(line)


def decode(data: bytes, **more: int) -> CheckpointText:
    return decode_checkpoint(data, where="k", **more)


def document(**changes: Any) -> bytes:
    return seal_text({**json.loads(FORMAT_2), **changes})


def packed(text: bytes) -> str:
    return base64.b64encode(zlib.compress(text)).decode()


def test_a_checkpoint_has_these_bytes():
    assert decode(sealed(FORMAT_2)) == CHECKPOINT
    written = json.loads(encode_checkpoint(CHECKPOINT).splitlines()[0])
    assert {**written, "state": ""} == {**json.loads(FORMAT_2), "state": ""}
    assert decode(encode_checkpoint(CHECKPOINT, bytes_max=35)) == CHECKPOINT


def test_a_state_that_is_too_large_to_unpack_is_stored_as_it_is():
    large = CheckpointText(17, 1, "x" * 3000)
    plain = encode_checkpoint(large, bytes_max=100)
    assert decode(plain, bytes_max=100) == large
    assert b"x" * 3000 in base64.b64decode(json.loads(plain.splitlines()[0])["state"])


STATES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(st.integers(1, 10**12), st.integers(0, 2**32 - 1), STATES)
def test_what_is_written_is_read(number: int, last: int, state: Any):
    checkpoint = CheckpointText(number, last, state)
    assert decode(encode_checkpoint(checkpoint)) == checkpoint


def test_parts_take_a_fraction_of_their_text():
    row = ["queue/topic/0000000001/0000000000/commitlog/%020d-0000000003-0badcafe-%010d"]
    state = [[row[0] % (n, n), 0, n * 7919, n * 104729] for n in range(1000)]
    text = len(json.dumps(state))
    assert len(encode_checkpoint(CheckpointText(1, 1, state))) < text / 4


@given(st.binary(max_size=8), st.integers(0, 10_000))
def test_no_flipped_bit_and_no_cut_goes_unseen(tail: bytes, bit: int):
    data = bytearray(encode_checkpoint(CHECKPOINT))
    with pytest.raises(DataError):
        decode(bytes(data[: -1 - len(tail)]) + tail + b"?")
    data[bit // 8 % len(data)] ^= 1 << bit % 8
    with pytest.raises(DataError):
        decode(bytes(data))


TEXT = json.dumps(STATE, separators=(",", ":"), sort_keys=True).encode()


@pytest.mark.parametrize(
    "changes",
    [
        {"bytes": 39},
        {"bytes": 41},
        {"bytes": -1},
        {"bytes": "40"},
        {"bytes": None},
        {"state": "not base64!"},
        {"state": packed(TEXT)[:-8]},
        {"state": base64.b64encode(zlib.compress(TEXT) + b"more").decode()},
        {"state": base64.b64encode(TEXT).decode()},
        {"state": packed(b"x" * 40)},
        {"state": packed(b"[" * 100_000), "bytes": 100_000},
        {"state": STATE},
        {"number": "seventeen"},
        {"last": None},
    ],
)
def test_what_is_whole_and_makes_no_sense_is_another_version_s(changes: dict[str, Any]):
    with pytest.raises(OtherVersionError, match="not a checkpoint"):
        decode(document(**changes))


@pytest.mark.parametrize("says", [40, 3000, 3001, 10**6])
def test_a_bomb_is_not_unpacked(says: int, monkeypatch: pytest.MonkeyPatch):
    """A megabyte of blanks in a kilobyte: at most what is said, and what is allowed, and one byte more."""
    unpacked: list[int] = []
    real = zlib.decompressobj

    class Counting:
        def __init__(self) -> None:
            self._inner = real()
            self.unused_data = b""

        @property
        def eof(self) -> bool:
            return self._inner.eof

        def decompress(self, data: bytes, max_length: int) -> bytes:
            text = self._inner.decompress(data, max_length)
            unpacked.append(len(text))
            return text

    monkeypatch.setattr("tiered.journal.replay.zlib.decompressobj", Counting)
    bomb = document(state=packed(b" " * 2_000_000), bytes=says)
    with pytest.raises(OtherVersionError):
        decode(bomb, bytes_max=3000)
    assert all(size <= 3001 for size in unpacked)
    assert bool(unpacked) == (says <= 3000)


@pytest.mark.parametrize("number", [3, 1, 0, -1, "2", None, 1.5, [], True])
def test_another_format_is_said_to_be_one(number: Any):
    with pytest.raises(OtherVersionError, match="format"):
        decode(document(format=number))


def test_a_small_checkpoint_cannot_become_a_large_state(monkeypatch: pytest.MonkeyPatch):
    """85 KiB that claim 80 MiB: refused before a byte is unpacked."""
    text = b'{"epoch":1,"queues":[' + b'"a",' * (20 << 20) + b"1]}"
    bomb = document(state=packed(text), bytes=len(text))
    assert len(bomb) < 120 << 10

    def unpacked(*_: object) -> None:
        raise AssertionError("it was unpacked")

    monkeypatch.setattr("tiered.journal.replay.zlib.decompressobj", unpacked)
    with pytest.raises(OtherVersionError, match="are not within"):
        decode(bomb)


def test_a_state_that_packs_better_than_is_believed_is_written_plain():
    checkpoint = CheckpointText(17, 1, {"said": ["the same"] * 400_000})
    written = encode_checkpoint(checkpoint)
    assert len(written) > len(json.dumps(checkpoint.state, separators=(",", ":")))
    assert decode(written) == checkpoint
