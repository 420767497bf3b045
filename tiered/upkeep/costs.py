"""What a writer's present rate comes to: requests and dollars a month, and how often a byte is written.

Overview: ``read_rate`` reads the newest journal entries (``ENTRIES_MAX`` of the last hour at most), ``rate_of`` counts what
they stand for, ``cost_of`` goes on like that for a month. An entry says which objects were put; what it does not say is
reckoned: two requests for the entry itself, one in ``CHECKPOINT_ENTRIES`` for a checkpoint, each bundle read once when it is
gathered. Reads by others, storage and transfer are not in it. Dollars are the list prices in ``backends.wrapping.Prices``,
whatever store it is.

All but ``read_rate`` is pure.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from backends.wrapping import Prices
from tiered.journal.reader import JournalReader
from tiered.journal.writer import CHECKPOINT_ENTRIES
from tiered.log.merge import FAN_IN, LAST_LEVEL
from tiered.log.state import TierMachine

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from backends.base import ObjectStore
    from tiered.journal.entry import Entry

LEASE_S: Final = 10.0
"""Unless told otherwise: a status does not know what a writer was told."""
MONTH_S: Final = 30 * 86_400
WINDOW_S: Final = 3600
ENTRIES_MAX: Final = 64
_WINDOW_S_MIN: Final = 10
_THREADS: Final = 16
_READ_BYTES: Final = 8 << 20
"""Of one request of the merger."""
_BUNDLE_BYTES: Final = 16 << 20
"""What a round is about when it is not for freshness that it is taken."""
_ROUND_WRITES: Final = 3 + 1 / CHECKPOINT_ENTRIES
"""Of a round of one bundle: the bundle, the entry, the listing behind it; and its share of a checkpoint."""


@dataclass(frozen=True, slots=True)
class Rate:
    """What a writer has done in so many seconds.

    Attributes:
        seconds: Until now.
        entries: Journal entries.
        rounds: Those that made parts durable.
        puts: Objects put: bundles and index objects.
        reads: Requests of the merger, about.
        round_bytes: Bytes of the bundles of rounds.
        merged_bytes: Of those that merging has made.
    """

    seconds: float
    entries: int = 0
    rounds: int = 0
    puts: int = 0
    reads: int = 0
    round_bytes: int = 0
    merged_bytes: int = 0

    @property
    def writes(self) -> float:
        """Requests that are billed as writing, but for those of the lease."""
        return self.puts + self.entries * (2 + 1 / CHECKPOINT_ENTRIES)

    @property
    def write_amplification(self) -> float | None:
        """How often a byte was written, the first time included; None when nothing was."""
        if not self.round_bytes:
            return None
        return (self.round_bytes + self.merged_bytes) / self.round_bytes


@dataclass(frozen=True, slots=True)
class Cost:
    """Of a month.

    Attributes:
        requests: To the store.
        dollars: For these.
        freshness_dollars: What of it goes to rounds that did not fill a bundle; twice the freshness saves half of that.
        lease_dollars: What of it goes to renewing the lease.
    """

    requests: int
    dollars: float
    freshness_dollars: float
    lease_dollars: float


def bills_requests(url: str) -> bool:
    """Whether a store is of a kind that bills requests."""
    return url.startswith(("s3://", "s3a://"))


def read_rate(store: ObjectStore, prefix: str, number: int, now_ms: int) -> Rate | None:
    """The rate of the writer at work.

    Args:
        store: Of the tier.
        prefix: The broker's.
        number: Of the last journal entry.
        now_ms: UTC.

    Returns:
        None when its journal is too young to tell.

    Raises:
        DataError: An entry is damaged.
        BackendError: The store could not be read.
    """
    journal = JournalReader(store, prefix, TierMachine())
    numbers = range(max(1, number - ENTRIES_MAX + 1), number + 1)
    with ThreadPoolExecutor(_THREADS, "tiered-rate") as pool:
        found = list(pool.map(journal.read_entry, numbers))
    return rate_of([one[0] for one in found if one is not None], now_ms)


def rate_of(entries: Sequence[Entry], now_ms: int) -> Rate | None:
    """Count what the newest entries, in order, stand for; those of the last hour, the first of all being where it begins."""
    since_ms = now_ms - WINDOW_S * 1000
    recent = [entry for entry in entries if entry.time_ms >= since_ms]
    if len(recent) == len(entries) and recent:
        since_ms = recent.pop(0).time_ms
    seconds = (now_ms - since_ms) / 1000
    if not entries or seconds < _WINDOW_S_MIN:
        return None
    rounds = [_bundles(entry, "part") for entry in recent]
    merges = [_bundles(entry, "merge") for entry in recent]
    made = [size for sizes in rounds for size in sizes]
    merged = [size for sizes in merges for size in sizes]
    indexes = sum(
        len(action.get("objects", ()))
        for entry in recent
        for action in entry.actions
        if action["do"] == "index"
    )
    return Rate(
        seconds,
        len(recent),
        sum(map(bool, rounds)),
        len(made) + len(merged) + indexes,
        sum(-(-size // _READ_BYTES) for size in (*made, *merged)),
        sum(made),
        sum(merged),
    )


def _bundles(entry: Entry, do: str) -> list[int]:
    """Sizes of the bundles that an entry's actions of a kind name."""
    actions: Iterable[Any] = (action for action in entry.actions if action["do"] == do)
    return [row[1] for action in actions for row in action["bundles"]]


def cost_of(rate: Rate, *, lease_s: float = LEASE_S, prices: Prices | None = None) -> Cost:
    """What a month at this rate costs.

    Args:
        rate: Of the writer.
        lease_s: How long its lease lasts; it is renewed thrice as often.
        prices: Of the store.
    """
    prices = prices or Prices()
    months = MONTH_S / rate.seconds  # how often it would be done in one
    write, read = prices.write_per_1000 / 1000, prices.read_per_1000 / 1000
    renewals = MONTH_S / (lease_s / 3)
    full = -(-rate.round_bytes // _BUNDLE_BYTES)
    early = max(0, rate.rounds - full) * _ROUND_WRITES
    dollars = (rate.writes * write + rate.reads * read) * months + renewals * write
    return Cost(
        round((rate.writes + rate.reads) * months + renewals),
        dollars,
        early * months * write,
        renewals * write,
    )


def rate_document(rate: Rate | None) -> dict[str, Any] | None:
    """For ``tiered status --json``."""
    if rate is None:
        return None
    cost, amplification = cost_of(rate), rate.write_amplification
    return {
        "seconds": round(rate.seconds, 3),
        "rounds": rate.rounds,
        "round_bytes": rate.round_bytes,
        "merged_bytes": rate.merged_bytes,
        "write_amplification": None if amplification is None else round(amplification, 3),
        "requests_per_month": cost.requests,
        "dollars_per_month": round(cost.dollars, 2),
        "freshness_dollars_per_month": round(cost.freshness_dollars, 2),
        "lease_dollars_per_month": round(cost.lease_dollars, 2),
    }


def rate_text(document: dict[str, Any], *, is_billed: bool) -> str:
    """The same for people.

    Args:
        document: From ``rate_document``.
        is_billed: The store is one that bills requests.
    """
    rounds = document["rounds"]
    found = f"{document['requests_per_month']:,} requests a month at the present rate"
    if is_billed:
        found += f", ${document['dollars_per_month']:.2f} at list prices"
    if rounds:
        found += f"; a round every {document['seconds'] / rounds:.1f} s"
        if is_billed:
            found += f" (${document['freshness_dollars_per_month']:.2f} of it, for freshness)"
    if document["write_amplification"] is not None:
        found += f"; each byte written {document['write_amplification']:.1f} times"
    return found


def dearest(freshness_s: float, *, lease_s: float = LEASE_S) -> Cost:
    """What a writer costs at most that has something for every round, and never enough to fill a bundle."""
    merges = round(sum(1000 / FAN_IN**level for level in range(1, LAST_LEVEL + 1)))
    rounds = 1000
    puts, entries = rounds + merges, rounds + merges
    rate = Rate(rounds * freshness_s, entries, rounds, puts, puts)
    return cost_of(rate, lease_s=lease_s)
