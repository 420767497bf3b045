"""``tiered timer import`` of what a real broker left behind: everything pending that its own wheel would deliver, once."""

import random
import struct
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from support import captures

from backends.local import LocalFolderStore
from tiered.attach.timer_import import ImportSettings, TimerImport, import_timers
from tiered.attach.timer_place import TimerPlace
from tiered.clock import ManualClock
from tiered.dispatch.settings import DispatchSettings
from tiered.format.record import decode_record
from tiered.local.catalog import SCHEDULE_TOPIC, WHEEL_TOPIC
from tiered.local.layout import DELAY_OFFSETS_FILE, TIMER_CHECK_FILE
from tiered.log.reader import TierReader
from tiered.log.timers import HOUR_MS, TIMER_TOPIC
from tiered.log.verify import verify_tier

PLACE = TimerPlace("cluster-a", "broker-a")
CAPTURED_MS = captures.dump("s02-delay-timer", "capture")[0]["captured_at_ms"]
Timer = tuple[int, str, str]


def pending(after_ms: int = 0) -> Counter[Timer]:
    """By the oracle: what Java's wheel and its delay levels would still deliver (due time, real topic, unique id)."""
    messages = captures.dump("s02-delay-timer", "message")
    wheel = {m["physical_offset"]: m for m in messages if m["topic"] == WHEEL_TOPIC}
    slots: dict[int, list[dict[str, Any]]] = {}
    for unit in captures.dump("s02-delay-timer", "timer_unit"):
        slots.setdefault(unit["slot_time_ms"], []).append(unit)
    delivered = {m["msg_id"] for m in messages if m["topic"] in {"timed", "delayed"}}
    found: Counter[Timer] = Counter()
    for units in slots.values():
        records = [(unit["magic"], wheel[unit["physical_offset"]]["properties"]) for unit in units]
        deleted = {p["TIMER_DEL_UNIQKEY"] for magic, p in records if magic & 4}
        for magic, p in records:
            if not magic & 4 and p["UNIQ_KEY"] not in deleted | delivered:
                found[int(p["TIMER_OUT_MS"]), p["REAL_TOPIC"], p["UNIQ_KEY"]] += 1
    for m in messages:
        if m["topic"] == SCHEDULE_TOPIC and m["msg_id"] not in delivered:
            found[m["tag_hash"], m["properties"]["REAL_TOPIC"], m["msg_id"]] += 1
    return Counter({timer: n for timer, n in found.items() if timer[0] >= after_ms})


def bring(store: Path, near_ms: int, *, now_ms: int = CAPTURED_MS, **more: Any) -> TimerImport:
    url = f"file://{store.parent}/tier"
    rng, clock = random.Random(7), ManualClock(now_ms)
    settings = ImportSettings(near_ms=near_ms, **more)
    return import_timers(str(store), url, settings, clock=clock, rng=rng)


def held(store: Path) -> Counter[Timer]:
    """What lies in the hourly files, each in the file of its hour; the tier is whole."""
    objects = LocalFolderStore(store.parent / "tier")
    reader = TierReader(objects, PLACE.prefix)
    reader.refresh()
    found: Counter[Timer] = Counter()
    for queue in reader.state.queues:
        assert queue.topic == TIMER_TOPIC
        for batch in reader.queue(queue).batches(0):
            records = batch.records
            for at, due in zip(records.positions.tolist(), records.tag_codes.tolist(), strict=True):
                said = decode_record(records.data, at).properties
                assert due // HOUR_MS == queue.queue_id
                found[due, said["REAL_TOPIC"], said["UNIQ_KEY"]] += 1
    report = verify_tier(objects, PLACE.prefix, deep=True)
    assert report.problems == []
    return found


def test_all_that_is_pending_is_taken_and_nothing_else(store: Path):
    result = bring(store, 0)
    assert held(store) == pending()
    assert (result.total.taken, result.total.cancelled) == (166 + 60, 16)
    assert sum(pending().values()) == 226
    assert result.bundles == 1


def test_again_takes_nothing_and_a_smaller_window_the_rest(store: Path):
    far, day = 24 * HOUR_MS, CAPTURED_MS + 24 * HOUR_MS
    first = bring(store, far)
    assert held(store) == pending(day)
    assert (first.total.taken, first.total.near) == (
        sum(pending(day).values()), sum((pending() - pending(day)).values())
    )  # fmt: skip
    again = bring(store, far, now_ms=CAPTURED_MS + 60_000)
    assert (again.total.taken, again.bundles, again.entries) == (0, 0, 0)
    rest = bring(store, 0)
    assert held(store) == pending()
    assert rest.total.taken == first.total.near
    assert bring(store, 0).total.taken == 0


def test_in_small_rounds(store: Path):
    result = bring(store, 0, dispatch=DispatchSettings(bundle_bytes=8_192, compression=None))
    assert result.entries > 1
    assert held(store) == pending()
    assert bring(store, 0).total.taken == 0


def set_back(store: Path, back_ms: int) -> None:
    """As if the broker had been killed: its files are of a time before, those of delay levels of the beginning."""
    check = bytearray((store / TIMER_CHECK_FILE).read_bytes())
    (read_ms,) = struct.unpack_from(">q", check)
    struct.pack_into(">q", check, 0, read_ms - back_ms)
    (store / TIMER_CHECK_FILE).write_bytes(check)
    for name in (DELAY_OFFSETS_FILE, f"{DELAY_OFFSETS_FILE}.bak"):
        (store / name).write_text('{"offsetTable": {}}')


@pytest.mark.parametrize("back_ms", [0, 5_000, 40_000])
def test_what_a_real_broker_delivered_after_its_last_note_is_not_taken(store: Path, back_ms: int):
    set_back(store, back_ms)
    found = bring(store, 0).total
    assert held(store) == pending()
    assert found.taken == 226
