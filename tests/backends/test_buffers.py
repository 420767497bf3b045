"""One buffer or several."""

from __future__ import annotations

import array

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.base import as_pieces, size_bytes


@given(st.lists(st.binary(max_size=9)))
def test_pieces_are_the_bytes_in_order(pieces: list[bytes]):
    assert b"".join(as_pieces(pieces)) == b"".join(pieces)
    assert all(len(piece) for piece in as_pieces(tuple(pieces)))
    assert size_bytes(pieces) == len(b"".join(pieces))


def test_every_kind_of_buffer_is_flat_bytes():
    wide = np.arange(6, dtype="<u4").reshape(2, 3)
    for buffer in (wide, array.array("I", range(6)), bytearray(wide.tobytes())):
        (view,) = as_pieces(buffer)
        assert (view.format, view.ndim, bytes(view)) == ("B", 1, wide.tobytes())
    assert as_pieces([np.zeros((0, 4), "u4")]) == []


def test_pieces_are_not_copied():
    data = bytearray(b"abc")
    (view,) = as_pieces(data)
    data[0] = ord("x")
    assert bytes(view) == b"xbc"
    whole = b"abc"
    assert as_pieces(whole)[0] is whole


def test_what_is_no_buffer_is_refused():
    for wrong in ("text", [b"a", "b"], 3):
        with pytest.raises(TypeError):
            as_pieces(wrong)  # type: ignore[arg-type]  # (that is the point)
