"""Properties as they are read."""

from __future__ import annotations

from tiered.format.properties import parse_properties


def test_the_utf8_form_of_a_surrogate_is_one_replacement_as_in_java():
    found = parse_properties(b"a\x01x\xed\xa0\x80y\x02b\x01\xff\x02")
    assert found == {"a": "x\ufffdy", "b": "\ufffd"}
