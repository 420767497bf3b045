"""What can be set about the key index of a writer."""

from __future__ import annotations

from dataclasses import dataclass


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
