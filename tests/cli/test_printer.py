"""What ``tiered cat --follow`` prints of a queue of which the broker takes something back."""

from __future__ import annotations

from io import BytesIO
from typing import TYPE_CHECKING

from api.opened import ORDERS, Made

from tiered.cli.printer import Printer, Wish

if TYPE_CHECKING:
    from tiered.plugin.tier import Tier

ALL = Wish(offset=0, from_ms=None, until_ms=None, filter=None, form="body", raw_body=False)


def look(tier: Tier, printer: Printer) -> None:
    """One look at the journal, as ``cat --follow`` does it again and again."""
    tier.refresh()
    printer.print_queue(printer.meet(ORDERS, tier.reader))


def test_what_came_in_place_of_what_was_taken_back_is_printed_from_its_beginning():
    made, out = Made(), BytesIO()
    made.add(b"0")
    made.add(b"1")
    made.add(b"2")
    with made.open() as tier:
        printer = Printer(ALL, out, None, tier.engine)
        look(tier, printer)
        made.take_back(1)
        made.add(b"A", b"B", b"C")
        look(tier, printer)
        look(tier, printer)
    assert out.getvalue() == b"012ABC"


def test_what_is_taken_back_beyond_what_was_printed_changes_nothing():
    made, out = Made(), BytesIO()
    made.add(b"0")
    made.add(b"1")
    with made.open() as tier:
        printer = Printer(ALL, out, None, tier.engine)
        look(tier, printer)
        made.add(b"2")
        made.take_back(2)
        made.add(b"A")
        look(tier, printer)
    assert out.getvalue() == b"01A"


def test_a_new_life_is_printed_from_its_beginning():
    made, out = Made(), BytesIO()
    made.add(b"0", b"1")
    with made.open() as tier:
        printer = Printer(ALL, out, None, tier.engine)
        look(tier, printer)
        made.begin_again()
        made.add(b"A")
        look(tier, printer)
    assert out.getvalue() == b"01A"
