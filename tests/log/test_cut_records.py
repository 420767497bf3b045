"""Where a queue is to end amid a record of several items, all of that record goes."""

from __future__ import annotations

from functools import partial

import pytest
from support.tiers import QUEUE, TierBuilder

from tiered.log.divergence import fingerprint_in_tier, measure, plan_end
from tiered.log.reader import QueueReader
from tiered.model import QueueOffset


@pytest.mark.parametrize(("wanted", "end"), [(1, 1), (2, 1), (3, 1), (4, 4)])
def test_a_record_is_never_cut_in_two(wanted: int, end: int):
    builder = TierBuilder()
    builder.add([b"a", (3, b"inner"), b"c", b"d"])
    incarnation = builder.journal.state.incarnation(QUEUE)
    assert incarnation is not None
    reader = QueueReader.of_incarnation(builder.store, builder.prefix, QUEUE, incarnation)
    change = plan_end(
        QUEUE,
        incarnation,
        QueueOffset(wanted),
        tier_fingerprint=partial(fingerprint_in_tier, reader),
        read_items=partial(measure, builder.store, builder.prefix),
    )
    assert change.start == end
