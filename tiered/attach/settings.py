"""What ``tiered attach`` can be told."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from tiered.dispatch.settings import DispatchSettings

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexSettings:
    """Settings of the key index.

    Attributes:
        items_max: An index object is made when so many keys are collected; it takes 34 bytes each, and as much memory
            once more by half while it is made.
        age_s: Or when the first of them was collected so long ago.
        directory: Of the local work file (at most 40 bytes a key); None: the system's for temporary files.
        upload_rate_bytes_s: Bytes uploaded in a second, at most, beside those of dispatch; 0: no limit.
    """

    items_max: int = 1 << 20
    age_s: float = 3600.0
    directory: str | None = None
    upload_rate_bytes_s: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class AttachSettings:
    """What ``tiered attach`` can be told.

    Attributes:
        cluster: Cluster name; None: as the store says, else ``DefaultCluster``.
        broker: Broker name; None: as the store says, else ``broker``.
        lease_s: How long the lease lasts without being renewed.
        wait: Wait for a living holder's lease to end.
        waits_for_names: Wait until a store that was just made tells its broker's name.
        drain_s: How long stopping may take to upload what is in hand.
        give_up_s: With ``once``: end when nothing could be uploaded for so long.
        start: Where a queue begins that the tier has never met: ``earliest``, ``latest`` or a time (UTC ms).
        selects: Which topics are tiered.
        after_handover: Go on with a tier whose broker was decommissioned: ``refuse``, ``again`` (it is about to be once
            more), or ``recommission`` (it is back).
        broker_max_offset: Asks the running broker for the end of its log; None: not asked.
        timers_near_ms: Take timers that are due later than so long from now into the tier, too; None: none.
        dispatch: Limits and periods.
        index: Of the key index; None: none is made.
    """

    cluster: str | None = None
    broker: str | None = None
    lease_s: float = 10.0
    wait: bool = True
    waits_for_names: bool = False
    drain_s: float = 10.0
    give_up_s: float = 60.0
    start: str | int = "earliest"
    selects: Callable[[str], bool] = field(default=lambda _topic: True)
    after_handover: Literal["refuse", "again", "recommission"] = "refuse"
    broker_max_offset: Callable[[], int] | None = None
    timers_near_ms: int | None = None
    dispatch: DispatchSettings = field(default_factory=DispatchSettings)
    index: IndexSettings | None = None
