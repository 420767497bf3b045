"""Entries that land under a number used and deleted long ago: no reader looks at them, and gc goes on and takes them."""

from __future__ import annotations

import pytest
from support.aged import GRACE_S, Tier
from support.journals import PREFIX

from tiered.journal.entry import Entry, encode_entry
from tiered.keys import entry_key
from tiered.log.verify import verify_tier


@pytest.mark.parametrize("numbers", [(9,), (1,), (3, 4), (1, 2, 8, 9)])
def test_i11_gc_takes_them_after_the_grace(numbers: tuple[int, ...]):
    tier = Tier()
    for _ in range(4):
        for _ in range(3):
            tier.builder.add([b"a"])
        tier.builder.journal.write_checkpoint(force=True)
        tier.clock.advance(GRACE_S)
    tier.apply(tier.plan())
    assert entry_key(PREFIX, 9) not in {i.key for i in tier.store.list("")}  # trimmed to 10
    for number in numbers:
        actions = [{"do": "meta", "store": {}}]
        entry = Entry(number, 1, "00000bad", 7, actions, previous=99)
        tier.store.put_if_absent(entry_key(PREFIX, number), encode_entry(entry))
    assert verify_tier(tier.store, PREFIX, deep=True).recorded.stale_entries == len(numbers)
    assert tier.plan().steps == ()  # young
    tier.clock.advance(GRACE_S + 1)
    plan = tier.plan()
    assert (plan.kinds, plan.refusals) == ({"entry": len(numbers)}, ())
    tier.apply(plan)
    report = verify_tier(tier.store, PREFIX, deep=True)
    assert (report.problems, report.recorded.stale_entries) == ([], 0)
    tier.builder.add([b"b"])
