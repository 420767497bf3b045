"""Tables fit the terminal, and lose no digit for it."""

from __future__ import annotations

import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from tiered.cli.output import fit
from tiered.cli.status import COLUMNS as STATUS

if TYPE_CHECKING:
    from pathlib import Path

    from support.command_line import CommandLine

LONG = "a-topic-with-a-name-that-is-as-long-as-names-of-topics-become-in-large-companies-orders"


def on_terminal(width: int, *arguments: str) -> list[str]:
    """The lines that the program prints on a terminal of so many columns."""
    ours, its = pty.openpty()
    fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", 40, width, 0, 0))
    environment = {k: v for k, v in os.environ.items() if k not in {"COLUMNS", "LINES"}}
    with subprocess.Popen(
        [sys.executable, "-m", "tiered", *arguments],
        stdin=its, stdout=its, stderr=subprocess.PIPE, env=environment,
    ) as ran:  # fmt: skip
        os.close(its)
        found = b""
        while True:
            try:
                data = os.read(ours, 1 << 16)
            except OSError:  # nobody is at the other end any more
                break
            if not data:
                break
            found += data
        assert ran.stderr is not None
        err = ran.stderr.read()
    os.close(ours)
    assert ran.returncode == 0, err
    return found.decode().replace("\r\n", "\n").splitlines()


def table_of(lines: list[str]) -> list[str]:
    """From the line above the rule on."""
    rule = next(n for n, line in enumerate(lines) if line.startswith("──"))
    return lines[rule - 1 :]


@pytest.fixture(scope="module")
def long_named(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """URL and store of a tier whose topics have long names that differ at their ends."""
    from support.command_line import attach

    from tiered.clock import SystemClock
    from tiered.store.embedded import MessageStore
    from tiered.store.new_message import NewMessage
    from tiered.store.store_options import StoreOptions

    folder: Path = tmp_path_factory.mktemp("long")
    options = StoreOptions(1 << 20, 100, index_slots=100, index_items=400)
    with MessageStore.create(
        folder / "s", cluster="c", broker="b", clock=SystemClock(), options=options
    ) as store:
        messages = [NewMessage(f"{LONG}-{n}", 0, b"x" * 1000) for n in range(2) for _ in range(12)]
        store.append_batch(messages)
    return attach(folder / "s", folder / "t"), str(folder / "s")


@pytest.mark.parametrize("width", [60, 100])
def test_tables_of_commands_fit_the_terminal(width: int, long_named: tuple[str, str]):
    url, store = long_named
    for arguments in (
        ("ls", url),
        ("ls", url, "--objects"),
        ("status", url, "--store", store),
        ("config", "show"),
    ):
        table = table_of(on_terminal(width, *arguments))
        assert max(map(len, table)) <= width, arguments
    listed = table_of(on_terminal(width, "ls", url))
    assert [line.split()[0][-3:] for line in listed[2:4]] == ["s-0", "s-1"]  # told apart
    assert all("…" in line and " 12 " in line for line in listed[2:4])
    wide = on_terminal(width, "ls", url, "-o", "wide")
    assert [line.split()[0] for line in wide[1:]] == [f"{LONG}-0", f"{LONG}-1"]
    assert "…" not in "".join(wide)


def test_wide_is_a_table_everywhere(tiered: CommandLine, basic_tier: str):
    for command in ("ls", "status"):
        assert (
            tiered.good(command, basic_tier, "-o", "wide").out
            == tiered.good(command, basic_tier).out
        )


def test_what_has_no_room_is_named_and_is_empty_first():
    columns = ["topic", "holes", "min_offset", "commit_offset", "size_bytes"]
    row = [LONG, "0", "1,000,000", "12,345,678,901", "987,654,321"]
    lines = fit(columns, [row], [False, True, True, True, True], 58)
    assert lines[-1] == "(no room for holes: -o wide shows all)"
    assert all(number in lines[3] for number in row[2:])
    assert lines[0].split() == ["min_"]
    assert lines[1].split() == ["topic", "offset", "commit_offset", "size_bytes"]


@pytest.mark.parametrize("width", [60, 80, 100])
@pytest.mark.parametrize("sick", ["gaps", "quarantined", "missing"])
def test_what_a_person_must_see_is_never_left_out(sick: str, width: int):
    columns = [*STATUS, "missing"]
    healthy = {"topic": LONG, "gaps": "0", "quarantined": "0", "missing": "0"}
    row = [healthy.get(column, "123,456,789") for column in columns]
    told = [("17" if column == sick else cell) for column, cell in zip(columns, row, strict=True)]
    is_number = [column != "topic" for column in columns]
    lines = fit(columns, [row, told], is_number, width)
    missing = " ".join(lines).partition("(no room for ")[2]
    assert missing, "there is not room for all"
    assert sick not in missing
    assert any("17" in line.split() for line in lines)


def test_sentences_are_wrapped_in_their_own_column():
    detail = "an entry of the journal names an object that is not there; run the repair"
    lines = fit(["kind", "where", "detail"], [["missing", LONG, detail]], [False] * 3, 60)
    start = lines[0].index("detail")
    assert " ".join(line[start:].strip() for line in lines[2:]) == detail
    assert all(not line[:start].strip() for line in lines[3:])


NUMBERS = st.integers(0, 10**18).map("{:,}".format)
TEXTS = st.text("abc-/é漢 ", min_size=1, max_size=90).map(lambda text: text.strip() or "-")


@given(st.data(), st.integers(60, 140))
def test_no_table_is_wider_than_its_terminal_or_breaks_a_number(data: st.DataObject, width: int):
    kinds = [False, *data.draw(st.lists(st.booleans(), max_size=9))]
    columns = [f"name_of_{n}" if n % 2 else f"n{n}" for n in range(len(kinds))]
    row = st.tuples(*(NUMBERS if is_number else TEXTS for is_number in kinds)).map(list)
    cells = data.draw(st.lists(row, max_size=3))
    lines = fit(columns, cells, kinds, width)
    assert max(map(cell_len, lines)) <= width
    note = " ".join(lines).partition("(no room for ")[2]
    for number, is_number in enumerate(kinds):
        if is_number and columns[number] not in note:
            assert all(any(row[number] in line for line in lines) for row in cells)
