"""What a dispatcher counts. Plain numbers; docs/metrics.md is generated from the docstring of each field."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class DispatchCounters:
    """Totals since the dispatcher started.

    Attributes:
        messages: Items committed, holes included.
        record_bytes: Bytes of records committed.
        parts: Parts committed.
        bundles: Bundles that they lie in.
        rounds: Journal entries written for them.
        uploads_failed: Uploads that failed or whose outcome is unknown.
        switches: File switches after a failed upload.
        lock_misses: Batches that dispatch left to compensation because a queue was busy.
        compensated: Batches taken by compensation.
        gaps: Gaps recorded.
        taken_back: Times that a queue was ended at an earlier offset, because the broker has other messages from there on.
        begun_anew: Times that a queue began anew, because the broker has nothing of its history any more.
        quarantined: Damaged records put into quarantine.
        missing: Queue offsets of which the local store should have a message, and has nothing.
        sealed_segments: Segments sealed on request.
        merged_bundles: Bundles made by merging.
        merged_parts: Parts that were gathered into these.
        merged_bytes: Bytes of those, records and index, as they are before they are packed.
        merged_stored_bytes: What is stored of them.
        merges_failed: Tries of merging that the store did not carry out; each is tried again.
        unmergeable_bundles: Bundles left as they are, because something in them is damaged or gone.
    """

    messages: int = 0
    record_bytes: int = 0
    parts: int = 0
    bundles: int = 0
    rounds: int = 0
    uploads_failed: int = 0
    switches: int = 0
    lock_misses: int = 0
    compensated: int = 0
    gaps: int = 0
    taken_back: int = 0
    begun_anew: int = 0
    quarantined: int = 0
    missing: int = 0
    sealed_segments: int = 0
    merged_bundles: int = 0
    merged_parts: int = 0
    merged_bytes: int = 0
    merged_stored_bytes: int = 0
    merges_failed: int = 0
    unmergeable_bundles: int = 0
