"""What the present rate costs: counted from journal entries, and never told where nobody can know it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from support.journals import PREFIX
from support.tiers import TierBuilder

from tiered.journal.entry import Entry
from tiered.upkeep.status import (
    ENTRIES_MAX,
    MONTH_S,
    Rate,
    cost_of,
    dearest,
    rate_document,
    rate_of,
    rate_text,
    read_rate,
)

if TYPE_CHECKING:
    from support.command_line import CommandLine

NOW_MS = 1_700_000_000_000
MIB = 1 << 20


def entry(age_s: float, *actions: dict[str, Any]) -> Entry:
    return Entry(1, 1, "0badcafe", NOW_MS - round(age_s * 1000), actions)


def bundles(do: str, *sizes: int) -> dict[str, Any]:
    return {"do": do, "bundles": [["key", size, 0, "table"] for size in sizes]}


def test_rounds_and_merges_are_counted_from_the_oldest_entry_on() -> None:
    entries = [
        entry(100, bundles("part", 5 * MIB)),  # where the time begins
        entry(60, bundles("part", MIB, 2 * MIB), {"do": "gap"}),
        entry(30, bundles("merge", 9 * MIB)),
        entry(10, bundles("part", 3 * MIB), {"do": "index", "objects": [["a"], ["b"]]}),
    ]
    rate = rate_of(entries, NOW_MS)
    assert rate == Rate(100.0, 3, 2, 3 + 1 + 2, 3 + 2, 6 * MIB, 9 * MIB)
    assert rate.write_amplification == 2.5


def test_what_is_older_than_an_hour_is_not_the_present_rate() -> None:
    old, young = entry(5000, bundles("part", MIB)), entry(1800, bundles("part", MIB))
    rate = rate_of([old, young], NOW_MS)
    assert rate is not None
    assert (rate.seconds, rate.rounds) == (3600.0, 1)
    idle = rate_of([old], NOW_MS)
    assert idle is not None
    assert (idle.rounds, idle.writes, idle.write_amplification) == (0, 0, None)
    assert cost_of(idle).dollars == pytest.approx(cost_of(idle).lease_dollars)


@pytest.mark.parametrize("ages", [[], [3], [9, 1]])
def test_of_a_journal_that_has_just_begun_nothing_is_told(ages: list[float]) -> None:
    assert rate_of([entry(age, bundles("part", MIB)) for age in ages], NOW_MS) is None
    assert rate_document(None) is None


def test_a_month_of_rounds_at_list_prices() -> None:
    rounds = 100
    rate = Rate(2.0 * rounds, rounds, rounds, rounds, rounds, rounds * 1000, 0)
    cost = cost_of(rate, lease_s=10)
    every = MONTH_S / 2
    assert cost.lease_dollars == pytest.approx(MONTH_S / (10 / 3) * 0.005 / 1000)
    written = every * (3 + 2 / 12) * 0.005 / 1000  # each checkpoint is put twice
    assert cost.dollars == pytest.approx(written + every * 0.0004 / 1000 + cost.lease_dollars)
    assert cost.freshness_dollars == pytest.approx(written, rel=0.02)
    full = Rate(2.0 * rounds, rounds, rounds, rounds, 2 * rounds, rounds * 16 * MIB, 0)
    assert cost_of(full).freshness_dollars == 0


def test_only_a_store_that_bills_has_dollars_for_people() -> None:
    document = rate_document(Rate(100.0, 50, 50, 50, 50, 1000, 500))
    assert document is not None
    billed, folder = (rate_text(document, is_billed=billed) for billed in (True, False))
    assert re.fullmatch(
        r"[\d,]+ requests a month at the present rate, \$\d+\.\d\d at list prices; a round every 2\.0 s"
        r" \(\$\d+\.\d\d of it, for freshness\); each byte written 1\.5 times",
        billed,
    )
    assert "$" not in folder
    assert "a round every 2.0 s; each byte written 1.5 times" in folder


def test_the_rate_is_read_from_the_newest_entries_of_a_journal() -> None:
    tier = TierBuilder()
    for _ in range(ENTRIES_MAX + 10):
        tier.add([b"body"])
    number = tier.journal.number
    now_ms = tier.journal.state.updated_ms + 60_000
    rate = read_rate(tier.store, PREFIX, number, now_ms)
    assert rate is not None
    assert rate.rounds == rate.entries == ENTRIES_MAX - 1
    assert rate.round_bytes > 0


def test_the_guide_has_the_costs_of_a_freshness() -> None:
    text = Path("docs/operating.md").read_text("utf-8")
    rows = re.findall(r"^\| (\d+) s \| \$([\d.]+) \| \$([\d.]+) \|$", text, re.MULTILINE)
    assert len(rows) == 4
    for seconds, rounds, whole in rows:
        cost = dearest(float(seconds))
        assert f"{cost.dollars - cost.lease_dollars:.2f}" == rounds
        assert f"{cost.dollars:.2f}" == whole
    assert f"from ${dearest(2).lease_dollars:.2f} to ${dearest(2, lease_s=30).lease_dollars:.2f}" in re.sub(
        r"\s+", " ", text
    )  # fmt: skip


def test_without_a_writer_at_work_status_tells_no_rate(
    tiered: CommandLine, basic_tier: str
) -> None:
    (broker,) = tiered.good("status", basic_tier, "--json").document["brokers"]
    assert broker["rate"] is None
    checks = tiered.good("doctor", basic_tier, "--json").document["checks"]
    assert not {"requests", "freshness"} & {check["name"] for check in checks}
