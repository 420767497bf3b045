"""A day of a small shop in a store, tiered, sealed and archived; and the same day as plain Python values to count with."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from support.command_line import here

from tiered.clock import SystemClock
from tiered.model import TimestampMs
from tiered.store.embedded import MessageStore
from tiered.store.new_message import NewMessage
from tiered.store.store_options import StoreOptions

if TYPE_CHECKING:
    from pathlib import Path

DAY_MS = 1_772_841_600_000
"""2026-03-07T00:00Z."""
HOUR_MS = 3_600_000
ORDERS = 400
RETRIES = ("%RETRY%billing", "%RETRY%shipping")
_QUEUES = 2
_STATES = ("created", "packed", "sent")
_BUSY = (1, 1, 1, 1, 1, 2, 4, 7, 9, 10, 11, 12, 12, 11, 10, 10, 11, 13, 15, 16, 13, 9, 5, 2)


@dataclass(frozen=True)
class Sent:
    """A message, and the time at which it is stored."""

    message: NewMessage
    store_ms: int

    @property
    def latency_ms(self) -> int:
        assert self.message.born_timestamp_ms is not None
        return self.store_ms - self.message.born_timestamp_ms

    @property
    def hour(self) -> int:
        return (self.store_ms - DAY_MS) // HOUR_MS

    @property
    def keys(self) -> list[str]:
        return (self.message.keys or "").split()


@dataclass(frozen=True)
class Shop:
    """Where it is, and what was sent, in order of store time."""

    tier: str
    archive: str
    sent: list[Sent]

    def of(self, *topics: str) -> list[Sent]:
        return [one for one in self.sent if one.message.topic in topics]


class _DayClock(SystemClock):
    """Its day is told; waiting takes real time."""

    def __init__(self) -> None:
        self.ms = DAY_MS

    def now_ms(self) -> TimestampMs:
        return TimestampMs(self.ms)


def day(seed: int = 7) -> list[Sent]:
    """Orders through the day; most are paid, some payments and parcels need several tries."""
    rng = random.Random(seed)
    sent: list[Sent] = []
    for number in range(ORDERS):
        hour = rng.choices(range(24), _BUSY)[0]
        sent += _order(rng, number, DAY_MS + hour * HOUR_MS + rng.randrange(HOUR_MS))
    return sorted((one for one in sent if one.hour < 24), key=lambda one: one.store_ms)


def _order(rng: random.Random, number: int, at_ms: int) -> list[Sent]:
    customer = f"customer-{min(int(rng.expovariate(0.08)), 60)}"
    keys, amount = f"order-{number} {customer}", rng.randrange(500, 50_000)
    found = []
    for state in _STATES:
        body = {"order": number, "state": state, "amount": amount, "lines": rng.randrange(1, 30)}
        body["note"] = "x" * rng.randrange(20, 600)
        found.append(_sent(rng, "orders", body, at_ms, keys=keys, tag=state))
        at_ms += rng.randrange(60_000, 3_600_000)
    if rng.random() < 0.9:
        at_ms = found[0].store_ms + rng.randrange(1_000, 1_800_000)
        body = {"order": number, "amount": amount}
        paid = _sent(rng, "payments", body, at_ms, keys=f"order-{number}", tag="paid")
        found += [paid, *_retries(rng, "%RETRY%billing", paid, 0.12)]
    return found + _retries(rng, "%RETRY%shipping", found[2], 0.08)


def _retries(rng: random.Random, topic: str, of: Sent, chance: float) -> list[Sent]:
    found: list[Sent] = []
    properties = {"RETRY_TOPIC": of.message.topic}
    at_ms = of.store_ms
    while rng.random() < (chance if not found else 0.5) and len(found) < 4:
        at_ms += 10_000 * 2 ** len(found)
        tries = len(found) + 1
        again = replace(
            of.message, topic=topic, queue_id=0, properties=properties, reconsume_times=tries
        )
        found.append(Sent(again, at_ms))
    return found


def _sent(
    rng: random.Random, topic: str, body: dict[str, object], at_ms: int, *, keys: str, tag: str
) -> Sent:
    number = body["order"]
    assert isinstance(number, int)
    latency_ms = min(int(rng.lognormvariate(1.5, 1.2)), 5_000)
    message = NewMessage(
        topic=topic,
        queue_id=number % _QUEUES,
        body=json.dumps(body).encode(),
        tags=tag,
        keys=keys,
        born_timestamp_ms=at_ms - latency_ms,
    )
    return Sent(message, at_ms)


def write(store: Path, sent: list[Sent]) -> None:
    """A store that holds them."""
    clock = _DayClock()
    options = StoreOptions(4 << 20, 1000, index_slots=100, index_items=400, topic_queues=_QUEUES)
    names = {"cluster": "shop-cluster", "broker": "shop-broker"}
    with MessageStore.create(
        store, **names, clock=clock, options=options, rng=random.Random(1)
    ) as made:
        for one in sent:
            clock.ms = one.store_ms
            made.append(one.message)


def make(folder: Path) -> Shop:
    """The day, archived."""
    sent = day()
    write(folder / "store", sent)
    tier, archive = f"file://{folder}/tier", f"file://{folder}/parquet"
    here("attach", folder / "store", "--to", tier, "--once", "--seal").good()
    here("archive", tier, "--to", archive).good()
    return Shop(tier, archive, sent)
