"""One buffer or several."""

from __future__ import annotations

import array

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.base import as_chunks, size_bytes


@given(st.lists(st.binary(max_size=9)))
def test_chunks_are_the_bytes_in_order(chunks: list[bytes]):
    assert b"".join(as_chunks(chunks)) == b"".join(chunks)
    assert all(len(chunk) for chunk in as_chunks(tuple(chunks)))
    assert size_bytes(chunks) == len(b"".join(chunks))


def test_every_kind_of_buffer_is_flat_bytes():
    wide = np.arange(6, dtype="<u4").reshape(2, 3)
    for buffer in (wide, array.array("I", range(6)), bytearray(wide.tobytes())):
        (view,) = as_chunks(buffer)
        assert (view.format, view.ndim, bytes(view)) == ("B", 1, wide.tobytes())
    assert as_chunks([np.zeros((0, 4), "u4")]) == []


def test_chunks_are_not_copied():
    data = bytearray(b"abc")
    (view,) = as_chunks(data)
    data[0] = ord("x")
    assert bytes(view) == b"xbc"
    whole = b"abc"
    assert as_chunks(whole)[0] is whole


def test_what_is_no_buffer_is_refused():
    for wrong in ("text", [b"a", "b"], 3):
        with pytest.raises(TypeError):
            as_chunks(wrong)  # type: ignore[arg-type]  # (that is the point)
