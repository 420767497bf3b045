"""Sealing: fewer, larger objects for a segment that is full or old, without needless rewriting.

``plan_merge`` is pure: neighbouring parts are merged only while they are small, into objects of a bounded size, and what
was merged once is large enough never to be merged again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tiered.log.state import Part


@dataclass(frozen=True, slots=True)
class SealPolicy:
    """When merging pays.

    Attributes:
        small_bytes: A part below this is small.
        merged_bytes_max: No merged object is larger (it is held in memory while it is written).
    """

    small_bytes: int = 4 * 1024 * 1024
    merged_bytes_max: int = 32 * 1024 * 1024


def plan_merge(parts: Sequence[Part], policy: SealPolicy) -> list[list[Part]]:
    """Divide a segment's parts into runs; a run of several parts becomes one object.

    Returns:
        The runs in order; their concatenation is ``parts``. A run of one part stays as it is.
    """
    runs: list[list[Part]] = []
    size = 0
    for part in parts:
        part_bytes = part.log.size_bytes
        open_run = bool(runs) and runs[-1][-1].log.size_bytes < policy.small_bytes
        joins = open_run and part_bytes < policy.small_bytes
        if joins and size + part_bytes <= policy.merged_bytes_max:
            runs[-1].append(part)
            size += part_bytes
        else:
            runs.append([part])
            size = part_bytes
    return runs
