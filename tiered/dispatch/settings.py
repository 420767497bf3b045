"""What can be set about dispatch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tiered.errors import InvalidError
from tiered.log.composite import CommitPolicy
from tiered.log.seal import MERGED_BYTES_MAX, SealPolicy

if TYPE_CHECKING:
    from tiered.dispatch.packing import Compression

MIB = 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class DispatchSettings:
    """Settings of a dispatcher.

    Attributes:
        freshness_s: A committed message is durable in the tier at most so long after it is seen, while the store answers.
        part_bytes: A group commit is due at so many bytes of one queue.
        buffer_bytes_max: Limit of the records held in memory; see ``tiered.dispatch.budget`` for the formula.
        window_bytes: Bytes of the local log looked at in one step.
        uploads_max: Uploads at once.
        segment_bytes_max: A segment of the commit log is rolled at this size.
        segment_age_hours_max: And at this age.
        poll_s: Pause between two looks at a store that grows slowly or not at all, at most; see ``pause_s``.
        backoff_s_min: First pause after a failed upload of a queue; doubled each time, with jitter.
        backoff_s_max: Greatest such pause.
        small_part_bytes: Neighbouring parts below this are merged when their segment has rolled; 0: none.
        read_rate_bytes_s: Bytes of the local store read in a second, at most; 0: no limit.
        upload_rate_bytes_s: Bytes uploaded in a second, at most; 0: no limit. Merging has the same limit once more.
        compression: How sealing compresses records; None: not at all.
    """

    freshness_s: float = 2.0
    part_bytes: int = 8 * MIB
    buffer_bytes_max: int = 128 * MIB
    window_bytes: int = 16 * MIB
    uploads_max: int = 8
    segment_bytes_max: int = 1024 * MIB
    segment_age_hours_max: float = 24.0
    poll_s: float = 0.5
    backoff_s_min: float = 0.1
    backoff_s_max: float = 30.0
    small_part_bytes: int = 4 * MIB
    read_rate_bytes_s: int = 0
    upload_rate_bytes_s: int = 0
    compression: Compression | None = None

    def __post_init__(self) -> None:
        for name in ("freshness_s", "part_bytes", "window_bytes", "uploads_max", "poll_s"):
            if getattr(self, name) <= 0:
                raise InvalidError(f"{name} must be above 0, not {getattr(self, name)}")
        if self.buffer_bytes_max < self.part_bytes:
            raise InvalidError(
                f"buffer_bytes_max ({self.buffer_bytes_max}) must not be below part_bytes"
                f" ({self.part_bytes})"
            )

    @property
    def step_bytes(self) -> int:
        """Bytes of the local log looked at in one step, within a quarter of the buffer.

        So a step that does not fit any more means that memory is under pressure, and buffers are committed early.
        """
        return min(self.window_bytes, max(1, self.buffer_bytes_max // 4))

    @property
    def pause_s(self) -> float:
        """Pause between two looks at the local store: a quarter of the freshness, and ``poll_s`` at most.

        Each look costs about the same, however little is new; a broker beside us has a better use for the processor.
        """
        return min(self.poll_s, max(0.02, self.freshness_s / 4))

    @property
    def commit_policy(self) -> CommitPolicy:
        """For ``CompositeFlatFile``."""
        return CommitPolicy(
            self.part_bytes,
            self.freshness_s,
            self.segment_bytes_max,
            round(self.segment_age_hours_max * 3_600_000),
        )

    @property
    def seal_policy(self) -> SealPolicy:
        """For ``tiered.log.seal``: merged parts of at most 32 MiB, and no larger than the buffer; segments as rolled."""
        merged_bytes_max = min(MERGED_BYTES_MAX, self.buffer_bytes_max)
        small_bytes = min(self.small_part_bytes, merged_bytes_max // 2)
        age_ms = self.commit_policy.segment_age_ms_max
        packs = self.compression is not None
        return SealPolicy(small_bytes, merged_bytes_max, self.segment_bytes_max, age_ms, packs)
