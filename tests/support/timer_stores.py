"""Brokers' stores with pending timers: captured, or written by ours; what is pending, brought in, and delivered."""

from __future__ import annotations

import json
import random
import struct
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Self

from support import captures

from backends.local import LocalFolderStore
from tiered.api.broker_place import TimerPlace
from tiered.attach.timer_import import ImportSettings, TimerImport, import_timers
from tiered.clock import ManualClock
from tiered.format.record import decode_record
from tiered.local.catalog import SCHEDULE_TOPIC, WHEEL_TOPIC
from tiered.local.layout import DELAY_OFFSETS_FILE, TIMER_CHECK_FILE
from tiered.local.rocketmq import RocketMQStore
from tiered.log.messages import messages_json
from tiered.log.reader import TierReader
from tiered.log.timers import HOUR_MS, TIMER_TOPIC
from tiered.log.verify import verify_tier
from tiered.store.embedded import MessageStore
from tiered.store.new_message import DELAY_LEVELS, NewMessage, delayed
from tiered.store.store_options import StoreOptions

if TYPE_CHECKING:
    from pathlib import Path

SMALL = StoreOptions(1 << 20, 1_000, index_slots=100, index_items=400)


def delivered(folder: Path) -> Counter[tuple[str, int, str]]:
    local = RocketMQStore.open(folder)
    found: Counter[tuple[str, int, str]] = Counter()
    for queue, bounds in local.queues().items():
        at = bounds.min
        while (batch := local.read(queue, at, bytes_max=1 << 20, count_max=1_000)) is not None:
            for message in messages_json(batch, None, raw_body=False):
                found[message["topic"], message["queue_id"], message["msg_id"]] += 1
            at = batch.end_offset
    local.close()
    return found


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


def set_back(store: Path, back_ms: int) -> None:
    """As if the broker had been killed: its files are of a time before, those of delay levels of the beginning."""
    check = bytearray((store / TIMER_CHECK_FILE).read_bytes())
    (read_ms,) = struct.unpack_from(">q", check)
    struct.pack_into(">q", check, 0, read_ms - back_ms)
    (store / TIMER_CHECK_FILE).write_bytes(check)
    for name in (DELAY_OFFSETS_FILE, f"{DELAY_OFFSETS_FILE}.bak"):
        (store / name).write_text('{"offsetTable": {}}')


class Made:
    """A broker's store, written by ours, and what a broker notes beside it. Times are counted from ``CAPTURED_MS``."""

    def __init__(self, folder: Path, levels: str = DELAY_LEVELS) -> None:
        self.folder, self.clock, self.levels = folder / "store", ManualClock(CAPTURED_MS), levels
        options = replace(SMALL, delay_levels=levels)
        self.writer = MessageStore.create(
            str(self.folder), cluster=PLACE.cluster, broker=PLACE.broker, clock=self.clock,
            options=options, rng=random.Random(3),
        )  # fmt: skip

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.writer.close()

    def timed(self, due: int, key: str, *, queue_id: int = 0, flags: int = 0, **said: str) -> None:
        """In the wheel."""
        said = {"TIMER_OUT_MS": str(CAPTURED_MS + due), **said}
        self.put(WHEEL_TOPIC, key, queue_id, flags=flags, **said)

    def put(
        self,
        topic: str,
        key: str,
        queue_id: int = 0,
        *,
        attempts: int = 0,
        flags: int = 0,
        **said: str,
    ) -> None:
        said = {"REAL_TOPIC": "orders", "REAL_QID": "0", "UNIQ_KEY": key, **said}
        message = NewMessage(
            topic, queue_id, b"x", properties=said, reconsume_times=attempts, sys_flag=flags
        )
        self.writer.append(message)

    def level(self, level: int, key: str, topic: str = "orders", attempts: int = 0) -> None:
        """Of a delay level."""
        message = NewMessage(topic, 0, b"x", properties={"UNIQ_KEY": key}, reconsume_times=attempts)
        self.writer.append(delayed(message, level, levels=self.levels))

    def flush(self) -> None:
        """Have all of it on the disk, and listed."""
        self.writer.wait_listed()
        self.writer.flush()

    def note(self, read: int, listed: int, levels: dict[int, int] | None = None) -> None:
        """How far the broker is, by its files."""
        config = self.folder / "config"
        check = struct.pack(">qqqq", CAPTURED_MS + read, 0, listed, listed)
        (config / "timercheck").write_bytes(check.ljust(4096, b"\0"))
        (config / "delayOffset.json").write_text(json.dumps({"offsetTable": levels or {}}))

    def held(self) -> list[str]:
        """Unique ids of what the tier has, with due time."""
        return sorted(
            f"{name}@{due - CAPTURED_MS}" for due, _, name in held(self.folder).elements()
        )
