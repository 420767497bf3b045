"""What ``tiered cat --follow`` prints of a queue of which the broker truncates something."""

from __future__ import annotations

from io import BytesIO
from typing import TYPE_CHECKING

from support.opened import ORDERS, Made

from tiered.api.tier import opened_by
from tiered.cli.cat import Printer, PrintWish

if TYPE_CHECKING:
    from tiered.api.open_tier import OpenTier

ALL = PrintWish(offset=0, from_ms=None, until_ms=None, filter=None, form="body", raw_body=False)


def look(tier: OpenTier, printer: Printer) -> None:
    """One look at the journal, as ``cat --follow`` does it again and again."""
    tier.refresh()
    printer.print_queue(printer.meet(ORDERS, tier.reader))


def test_what_came_in_place_of_what_was_truncated_is_printed_from_its_beginning():
    made, out = Made(), BytesIO()
    made.add(b"0")
    made.add(b"1")
    made.add(b"2")
    with opened_by(made.open()) as tier:
        printer = Printer(ALL, out, None, tier)
        look(tier, printer)
        made.truncate(1)
        made.add(b"A", b"B", b"C")
        look(tier, printer)
        look(tier, printer)
    assert out.getvalue() == b"012ABC"


def test_what_is_truncated_beyond_what_was_printed_changes_nothing():
    made, out = Made(), BytesIO()
    made.add(b"0")
    made.add(b"1")
    with opened_by(made.open()) as tier:
        printer = Printer(ALL, out, None, tier)
        look(tier, printer)
        made.add(b"2")
        made.truncate(2)
        made.add(b"A")
        look(tier, printer)
    assert out.getvalue() == b"01A"


def test_a_new_incarnation_is_printed_from_its_beginning():
    made, out = Made(), BytesIO()
    made.add(b"0", b"1")
    with opened_by(made.open()) as tier:
        printer = Printer(ALL, out, None, tier)
        look(tier, printer)
        made.begin_again()
        made.add(b"A")
        look(tier, printer)
    assert out.getvalue() == b"01A"


def test_each_gap_is_said_once_also_while_following():
    made, out, said = Made(), BytesIO(), []
    made.add(b"0", b"1")
    made.builder.gap(5, queue=ORDERS)
    made.add(b"7")
    with opened_by(made.open()) as tier:
        printer = Printer(ALL, out, None, tier, said.append)
        look(tier, printer)
        assert out.getvalue() == b"017"
        (one,) = said
        assert "orders/0" in one
        assert "offset 2 to 7" in one
        assert "made so" in one, "the reason"
        look(tier, printer)
        assert len(said) == 1
        made.builder.gap(2, queue=ORDERS)
        made.add(b"A")
        look(tier, printer)
        look(tier, printer)
    assert out.getvalue() == b"017A"
    assert len(said) == 2
    assert "offset 8 to 10" in said[1]


def test_a_gap_at_the_beginning_of_a_queue_is_said_once_and_where_it_is_wanted():
    made, out, said = Made(), BytesIO(), []
    made.builder.gap(5, queue=ORDERS)
    made.add(b"5", b"6")
    with opened_by(made.open()) as tier:
        printer = Printer(ALL, out, None, tier, said.append)
        look(tier, printer)
        look(tier, printer)
        (one,) = said
        assert "offset 0 to 5" in one
        assert "made so" in one, "the reason"
        from_five = PrintWish(
            offset=5, from_ms=None, until_ms=None, filter=None, form="body", raw_body=False
        )
        look(tier, Printer(from_five, out, None, tier, said.append))
    assert out.getvalue() == b"5656"
    assert len(said) == 1


def test_what_expired_before_it_could_be_printed_is_said_while_following():
    made, out, said = Made(), BytesIO(), []
    made.builder.add([b"0"], queue=ORDERS, roll=True)
    with opened_by(made.open()) as tier:
        printer = Printer(ALL, out, None, tier, said.append)
        look(tier, printer)
        made.builder.add([b"1"], queue=ORDERS, roll=True)
        made.builder.add([b"2"], queue=ORDERS, roll=True)
        made.expire(0, 2)
        look(tier, printer)
    assert out.getvalue() == b"02"
    (one,) = said
    assert "offsets 1 to 2 of orders/0 have expired" in one


def test_what_was_truncated_is_said_while_following():
    made, out, said = Made(), BytesIO(), []
    made.add(b"0")
    made.add(b"1")
    with opened_by(made.open()) as tier:
        printer = Printer(ALL, out, None, tier, said.append)
        look(tier, printer)
        made.truncate(1)
        made.add(b"A")
        look(tier, printer)
        look(tier, printer)
    assert out.getvalue() == b"01A"
    (one,) = said
    assert "truncated" in one
    assert "from offset 1 on" in one


def test_the_rest_of_an_incarnation_that_is_over_is_printed_before_the_new_one():
    made, out = Made(), BytesIO()
    made.add(b"0")
    with opened_by(made.open()) as tier:
        printer = Printer(ALL, out, None, tier)
        look(tier, printer)
        made.add(b"1")
        made.begin_again()
        made.add(b"A")
        look(tier, printer)
        look(tier, printer)
    assert out.getvalue() == b"01A"
