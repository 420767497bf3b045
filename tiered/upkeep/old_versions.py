"""Old versions in a bucket that keeps them: whether what is deleted stays so, and erasing it for good.

Overview: ``gc`` deletes objects, of which a bucket with versioning keeps every byte behind a marker. ``gc --erase`` deletes
what is left of keys that were deleted and that the journal does not name. What it names and somebody has deleted is not
touched: its old version is how it comes back.

Ordering: behind ``gc``'s own deletions, with its grace and its looks at the journal. Keys are never used twice, so what no
entry names and was deleted is named by nobody ever again; the journal is read before the listing.

After a crash: some versions are gone; the next run goes on.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from backends.lazy_dataclass import dataclass
from tiered.keys import DATA_ROOTS, maker_of
from tiered.log.history import named_objects

if TYPE_CHECKING:
    from collections.abc import Iterator

    from backends.base import StoredVersion
    from backends.s3_control import Bucket
    from tiered.upkeep.workplace import Workplace


@dataclass(slots=True)
class OldVersions:
    """What there is of old versions."""

    versioning: str | None  # ``Enabled``, ``Suspended``, "" for none; None: nobody may tell
    versions: int | None = None
    """Old versions of deleted objects, markers not counted; None: it was not looked."""
    version_bytes: int | None = None  # their bytes; likewise
    was_deleted: bool = False  # they are gone for good

    def document(self) -> dict[str, Any]:
        """As it stands in the documents of commands."""
        return asdict(self)


def erasable(at: Workplace, bucket: Bucket) -> Iterator[StoredVersion]:
    """What is left of deleted objects that held messages or keys and are named by nobody."""
    named = named_objects(at.reader().state)
    for root in DATA_ROOTS:
        for one in bucket.of_deleted(at.prefix + root):
            key = one.key.removeprefix(at.prefix)
            if key not in named and maker_of(key) is not None:
                yield one


def look_for_versions(at: Workplace, bucket: Bucket, *, deletes: bool) -> OldVersions:
    """Count what can be erased, and delete it if told to."""
    found = OldVersions(bucket.status(), 0, 0, was_deleted=deletes)
    if not found.versioning:
        return found
    count = size = 0
    for one in erasable(at, bucket):
        if deletes:
            bucket.delete(one)
        count += not one.is_marker
        size += one.size_bytes
    found.versions, found.version_bytes = count, size
    return found
