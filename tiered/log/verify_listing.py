"""Holds one listing of a broker's prefix against what the journal names."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from backends.base import ObjectInfo, foreign_below
from tiered import keys
from tiered.log.verify_report import Problem, VerifyReport

if TYPE_CHECKING:
    from collections.abc import Mapping
    from collections.abc import Set as AbstractSet

    from backends.base import ObjectStore

_OTHERS = ("timer/", "meta/", "ledger/")
"""Folders of other features; not this module's business."""


@dataclass(slots=True)
class Listing:
    """What a listing shows besides the named objects.

    Attributes:
        missing: Keys that are named and not listed.
        unnamed: Bundles and index objects that are listed and not named, with their sizes.
        quarantine: Damaged records that were put aside, with their sizes.
        entries: Numbers of journal entries.
        checkpoints: Numbers of checkpoints.
        has_lease: There is a lease.
        unknown: Keys that this program does not know, and names that are no keys.
    """

    missing: set[str] = field(default_factory=set)
    unnamed: dict[str, int] = field(default_factory=dict)
    quarantine: dict[str, int] = field(default_factory=dict)
    entries: list[int] = field(default_factory=list)
    checkpoints: list[int] = field(default_factory=list)
    has_lease: bool = False
    unknown: list[str] = field(default_factory=list)


def compare_listing(
    store: ObjectStore, prefix: str, named: Mapping[str, int], report: VerifyReport
) -> Listing:
    """List everything below ``prefix``; wrong sizes go into the report.

    Raises:
        BackendError: It could not be listed.
    """
    found = Listing()
    listed: set[str] = set()
    for info in store.list(prefix):
        key = info.key[len(prefix) :]
        size = named.get(key)
        if size is None:
            _sort(found, prefix, key, info)
            continue
        listed.add(key)
        if info.size_bytes != size:
            detail = f"{info.size_bytes} bytes; the journal says {size}"
            report.add(Problem("size", info.key, detail))
    found.unknown += [name[len(prefix) :] for name in foreign_below(store, prefix)]
    found.missing = named.keys() - listed
    return found


def is_known_key(prefix: str, key: str) -> bool:
    """Whether an object of a tier, or of a feature of ours, may have this whole key."""
    found = Listing()
    _sort(found, prefix, key[len(prefix) :], ObjectInfo(key, 0, -1))
    return not found.unknown


def _sort(found: Listing, prefix: str, key: str, info: ObjectInfo) -> None:
    number = keys.parse_journal_key(prefix, info.key)
    data = keys.parse_data_key("", key)
    if number:
        (found.checkpoints if number[1] else found.entries).append(number[0])
    elif data:
        place = found.quarantine if data.kind == "quarantine" else found.unnamed
        place[key] = info.size_bytes
    elif keys.parse_index_key("", key):
        found.unnamed[key] = info.size_bytes
    elif key == keys.LEASE:
        found.has_lease = True
    elif not key.startswith(_OTHERS):
        found.unknown.append(key)


def record_listing(
    found: Listing, named: AbstractSet[str], generation: int, report: VerifyReport
) -> None:
    """Count what is no failure, and name what the journal has never heard of.

    Args:
        found: The listing.
        named: Keys that are named now, after it.
        generation: The reign; its writer may be about to name what it has made.
        report: Where to.
    """
    recorded = report.recorded
    for key, size in found.unnamed.items():
        made = keys.maker_of(key)
        if key in named or made is None:
            continue
        recorded.orphans += 1
        recorded.orphan_bytes += size
        recorded.orphans_of_present_reign += made.generation == generation
        recorded.note(f"orphan: {key}")
        if made.generation > generation:
            detail = f"of generation {made.generation}, and {generation} reigns: the journal may have lost its end"
            report.add(Problem("journal", key, detail))
    recorded.unknown_keys = len(found.unknown)
    for key in found.unknown:
        recorded.note(f"unknown: {key}")
