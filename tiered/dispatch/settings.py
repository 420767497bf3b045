"""What can be set about dispatch."""

from __future__ import annotations

from dataclasses import dataclass, field

from tiered.dispatch.packing import Compression
from tiered.errors import InvalidError
from tiered.log.composite import CommitPolicy
from tiered.log.merge import BUNDLE_BYTES_MAX, FAN_IN, OWN_BYTES, MergePolicy

MIB = 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class DispatchSettings:
    """Settings of a dispatcher.

    Attributes:
        freshness_s: A committed message is durable in the tier at most so long after it is seen, while the store answers.
        bundle_bytes: A round is due at so many bytes; its bundles are of about so many.
        buffer_bytes_max: Limit of the records held in memory; see ``tiered.dispatch.budget`` for the formula.
        window_bytes: Bytes of the local log looked at in one step: two bundles of default size, with room to spare, so
            that they are not three. What a step costs goes by its queues as well as by its bytes.
        uploads_max: Bundles on their way at once.
        segment_bytes_max: A segment of the commit log is rolled at this size.
        segment_age_hours_max: And at this age.
        poll_s: Pause between two looks at a store that grows slowly or not at all, at most; see ``pause_s``.
        backoff_s_min: First pause after a failed upload of a queue; doubled each time, with jitter.
        backoff_s_max: Greatest such pause.
        fan_in: Bundles of a level that are merged into the next.
        merged_bytes_max: Of a bundle that merging makes.
        own_bytes: A queue (a topic) with so many bytes in a merge gets bundles of its own.
        read_rate_bytes_s: Bytes of the local store read in a second, at most; 0: no limit.
        upload_rate_bytes_s: Bytes uploaded in a second, at most; 0: no limit. Merging has the same limit once more.
        compression: How merging compresses records at the last level; None: not at all.
    """

    freshness_s: float = 2.0
    bundle_bytes: int = 16 * MIB
    buffer_bytes_max: int = 128 * MIB
    window_bytes: int = 30 * MIB
    uploads_max: int = 8
    segment_bytes_max: int = 1024 * MIB
    segment_age_hours_max: float = 24.0
    poll_s: float = 0.5
    backoff_s_min: float = 0.1
    backoff_s_max: float = 30.0
    fan_in: int = FAN_IN
    merged_bytes_max: int = BUNDLE_BYTES_MAX
    own_bytes: int = OWN_BYTES
    read_rate_bytes_s: int = 0
    upload_rate_bytes_s: int = 0
    compression: Compression | None = field(default_factory=Compression)

    def __post_init__(self) -> None:
        for name in ("freshness_s", "bundle_bytes", "window_bytes", "uploads_max", "poll_s"):
            if getattr(self, name) <= 0:
                raise InvalidError(f"{name} must be above 0, not {getattr(self, name)}")
        if self.buffer_bytes_max < self.bundle_bytes:
            raise InvalidError(
                f"buffer_bytes_max ({self.buffer_bytes_max}) must not be below bundle_bytes"
                f" ({self.bundle_bytes})"
            )

    @property
    def step_bytes(self) -> int:
        """Bytes of the local log looked at in one step, within a quarter of the buffer.

        So a step that does not fit any more means that memory is under pressure, and buffers are committed early.
        """
        return min(self.window_bytes, max(1, self.buffer_bytes_max // 4))

    @property
    def round_bytes(self) -> int:
        """A round is taken when so much waits: larger ones have fewer and larger sections."""
        return self.bundle_bytes + self.bundle_bytes // 2

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
            self.bundle_bytes,
            self.freshness_s,
            self.segment_bytes_max,
            round(self.segment_age_hours_max * 3_600_000),
        )

    @property
    def merge_policy(self) -> MergePolicy:
        """For ``tiered.log.merge``: bundles no larger than the buffer; segments as rolled."""
        return MergePolicy(
            fan_in=self.fan_in,
            bundle_bytes_max=min(self.merged_bytes_max, self.buffer_bytes_max),
            own_bytes=min(self.own_bytes, self.buffer_bytes_max),
            segment_bytes_max=self.segment_bytes_max,
            segment_age_ms_max=self.commit_policy.segment_age_ms_max,
            compresses=self.compression is not None,
        )
