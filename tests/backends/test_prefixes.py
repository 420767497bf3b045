"""What a server is asked for lists everything that is wanted."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from backends.base import keys_from

TEXT = st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=5)
KEYS = st.lists(TEXT.filter(bool), min_size=1, max_size=3).map("/".join)


@given(st.sampled_from(["", "p/"]), KEYS, KEYS, st.data())
def test_nothing_wanted_is_skipped(root: str, key: str, after: str, data: st.DataObject):
    prefix = key[: data.draw(st.integers(0, len(key)))]
    folder, start = keys_from(root, prefix, after)
    assert folder == "" or folder.endswith("/")
    if key > after:
        assert (root + key).startswith(folder)
        assert root + key > start
    start.encode()


def test_what_sorts_before_the_prefix_is_not_asked_for():
    assert keys_from("p/", "a/b", "") == ("p/a/", "p/a/a\U0010ffff")
    assert keys_from("p/", "a/b", "a/c") == ("p/a/", "p/a/c")
    assert keys_from("p/", "a/", "a/c") == ("p/a/", "p/a/c")
    assert keys_from("", "", "") == ("", "")
    assert keys_from("", "a ", "") == ("", "")
    assert keys_from("", "\ue000", "")[1].encode()
