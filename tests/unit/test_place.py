"""A tier's place leaves every key the room that object stores give."""

from __future__ import annotations

import pytest

from tiered.api.broker_place import Place, require_fitting
from tiered.errors import InvalidError
from tiered.keys import PREFIX_BYTES_MAX


def long_place(size: int) -> Place:
    """A place whose prefix has ``size`` bytes."""
    place = Place("c", "b")
    return Place("c", "b" * (size - len(place.prefix) + 1))


@pytest.mark.parametrize("url", ["s3://bucket", "file:///" + "folder/" * 40, "memory://name/x"])
def test_the_longest_prefix_of_the_place_itself(url: str):
    place = long_place(PREFIX_BYTES_MAX)
    assert len(place.prefix) == PREFIX_BYTES_MAX
    require_fitting(url, place)
    with pytest.raises(InvalidError, match=f"begin with {PREFIX_BYTES_MAX + 1} bytes"):
        require_fitting(url, long_place(PREFIX_BYTES_MAX + 1))


@pytest.mark.parametrize("path", ["a", "a/bc", "ü?x"])
def test_the_path_in_a_bucket_counts(path: str):
    size = len(path.encode()) + 1
    require_fitting(f"s3://bucket/{path}", long_place(PREFIX_BYTES_MAX - size))
    with pytest.raises(InvalidError, match="shorten the path of the URL"):
        require_fitting(f"s3://bucket/{path}", long_place(PREFIX_BYTES_MAX - size + 1))


def test_names_count_as_they_are_escaped():
    require_fitting("s3://bucket", Place("c", "x" * 100))
    with pytest.raises(InvalidError, match="--cluster and --broker"):
        require_fitting("s3://bucket", Place("c", "." * 100))
