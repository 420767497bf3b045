"""What ``tiered attach`` can be told."""

from __future__ import annotations

from dataclasses import field
from typing import TYPE_CHECKING, Literal

from backends.lazy_dataclass import dataclass
from tiered.dispatch.settings import DispatchSettings

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexSettings:
    """Settings of the key index."""

    items_max: int = 1 << 20
    """An index object is made when so many keys are collected; it takes 34 bytes each, and as much memory once more
    by half while it is made."""
    age_s: float = 3600.0  # or when the first of them was collected so long ago
    directory: str | None = None
    """Of the local work file (at most 32 bytes a key); None: the system's for temporary files."""
    upload_rate_bytes_s: int = 0
    """Bytes uploaded in a second, at most, beside those of dispatch; 0: no limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttachSettings:
    """What ``tiered attach`` can be told."""

    cluster: str | None = None  # cluster name; None: as the store says, else ``DefaultCluster``
    broker: str | None = None  # broker name; None: as the store says, else ``broker``
    lease_s: float = 10.0  # how long the lease lasts without being renewed
    wait: bool = True  # wait for a living holder's lease to end
    waits_for_names: bool = False  # wait until a store that was just made tells its broker's name
    drain_s: float = 10.0  # how long stopping may take to upload what is in hand
    give_up_s: float = 60.0  # with ``once``: end when nothing could be uploaded for so long
    start: str | int = "earliest"
    """Where a queue begins that the tier has never met: ``earliest``, ``latest`` or a time (UTC ms)."""
    selects: Callable[[str], bool] = field(default=lambda _topic: True)  # which topics are tiered
    after_handover: Literal["refuse", "again", "recommission"] = "refuse"
    """Go on with a tier whose broker was decommissioned: ``refuse``, ``again`` (it is about to be once more), or
    ``recommission`` (it is back)."""
    broker_max_offset: Callable[[], int] | None = None
    """Asks the running broker for the end of its log; None: not asked."""
    timers_near_ms: int | None = None
    """Take timers that are due later than so long from now into the tier, too; None: none."""
    rocketmq_only: tuple[str, ...] = ()
    """What was asked for that only stores of RocketMQ have, as its options."""
    dispatch: DispatchSettings = field(default_factory=DispatchSettings)  # limits and periods
    index: IndexSettings | None = None  # of the key index; None: none is made
