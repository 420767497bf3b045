"""Times and sizes as people write them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiered.cli.frame import all_settings
from tiered.cli.values import (
    TIME_MS_MAX,
    counted,
    format_size,
    format_time,
    parse_duration,
    parse_size,
    parse_time,
    printable,
    seconds_above_zero,
    seconds_not_below_zero,
)

NOW = 1_784_000_000_123


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0", 0),
        ("1784000000123", NOW),
        ("now", NOW),
        ("now-2h", NOW - 7_200_000),
        ("now-1h30m", NOW - 5_400_000),
        ("now+250ms", NOW + 250),
        ("now-1d", NOW - 86_400_000),
        ("1970-01-01T00:00:00Z", 0),
        ("1970-01-01T01:00:00+01:00", 0),
        ("1970-01-01t00:00:01.5z", 1500),
        ("2026-07-14 03:33:20.123Z", NOW),
        ("2026-07-14", NOW - 12_800_123),
        ("1970-01-01", 0),
    ],
)
def test_times(text: str, expected: int):
    assert parse_time(text, NOW) == expected


@pytest.mark.parametrize(
    "text",
    [
        "",
        "yesterday",
        "2026-07",
        "2026-02-31",
        "2026-07-14T03:33:20",
        "2026-02-31T00:00:00Z",
        "now-2",
        "-1",
        "now-2y",
        "1e3",
        "9" * 30,
        "١٢٣",
    ],
)
def test_what_is_no_time_is_refused(text: str):
    with pytest.raises(ValueError, match="is not a time"):
        parse_time(text, NOW)


@given(st.integers(0, TIME_MS_MAX))
def test_a_formatted_time_is_read_back(timestamp_ms: int):
    assert parse_time(format_time(timestamp_ms), NOW) == timestamp_ms


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0", 0),
        ("1024", 1024),
        ("50MiB", 50 << 20),
        ("1.5GB", 1500000000),
        ("2k", 2048),
        ("1 KiB", 1024),
        ("1kb", 1000),
        ("3B", 3),
        ("1T", 1 << 40),
    ],
)
def test_sizes(text: str, expected: int):
    assert parse_size(text) == expected


@pytest.mark.parametrize("text", ["", "-1", "1iB", "MiB", "1 PiB", "ten", "1e3", "9999999999TiB"])
def test_what_is_no_size_is_refused(text: str):
    with pytest.raises(ValueError, match=r"not a size|more bytes"):
        parse_size(text)


@given(st.integers(0, 1 << 62))
def test_a_formatted_size_is_near_and_short(size: int):
    number, unit = format_size(size).split()
    assert len(number) <= 4
    if unit != "PiB":
        assert parse_size(f"{number}{unit}") == pytest.approx(size, rel=0.06, abs=1)


@given(st.text())
def test_a_cell_holds_nothing_that_a_terminal_obeys(text: str):
    assert printable(text).isprintable()


def test_one_thing_is_not_said_in_the_plural():
    assert [counted(n, "part") for n in (0, 1, 2, 1234)] == [
        "0 parts",
        "1 part",
        "2 parts",
        "1,234 parts",
    ]
    assert counted(1, "entry was", "entries were") == "1 entry was"
    assert counted(0, "entry was", "entries were") == "0 entries were"


@pytest.mark.parametrize(
    ("text", "in_ms"),
    [("2s", 2000), ("5m", 300_000), ("4h", 14_400_000), ("30d", 2_592_000_000), ("1d12h", 129_600_000),
     ("2", 2000), ("0", 0), ("0s", 0), ("0.25", 250), ("500ms", 500), ("2S", 2000)],
)  # fmt: skip
def test_durations_have_units_or_are_seconds(text: str, in_ms: int):
    assert parse_duration(text) == in_ms
    assert seconds_not_below_zero(text) == in_ms / 1000


@pytest.mark.parametrize(
    "text", ["", "soon", "2 s", "-1s", "1.5h", "s", "2x", "nan", "inf", "\u0662"]
)
def test_what_is_no_duration(text: str):
    for parse in (parse_duration, seconds_above_zero, seconds_not_below_zero):
        with pytest.raises(ValueError, match=r"must|not a duration"):
            parse(text)


@pytest.mark.parametrize("text", ["0", "0s", "-1", "-0.5"])
def test_what_must_be_above_zero(text: str):
    with pytest.raises(ValueError, match="must be above 0"):
        seconds_above_zero(text)


def test_every_option_of_a_length_of_time_takes_both_forms():
    settings = [one for one in all_settings() if one.kind.metavar == "DURATION"]
    assert {"attach.freshness", "mount.refresh", "gc.grace", "timer.run.near"} <= {
        one.key for one in settings
    }
    for one in settings:
        values = {one.convert(text, "here") for text in ("3600", "60m", "1h", 3600)}
        assert len(values) == 1, one.key
    assert not [one.key for one in all_settings() if one.kind.metavar == "SECONDS"]
