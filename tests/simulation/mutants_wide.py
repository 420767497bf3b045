"""More deliberate defects: of kinds to which the simulation was blind until its world was widened for them."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any
from unittest import mock

from backends.errors import BackendError
from tiered.dispatch.group_commit import Uploader
from tiered.errors import FencedError
from tiered.format import bundle
from tiered.index import indexer
from tiered.journal.lease import NOTHING_KNOWN, Lease, LeaseState
from tiered.log import expiry, state
from tiered.upkeep import expire, gc, rebuild, repair, workplace

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tiered.index.extract import Keys

Patches = list[Any]


# -- what a person does -----------------------------------------------------------------------------


def _ended_elsewhere() -> Patches:
    """A person's end of a queue is taken one message too early."""
    step = expire._step

    def early(at: Any, queue: Any, incarnation: Any, end: Any, place: int) -> Any:
        return step(at, queue, incarnation, type(end)(max(incarnation.min_offset, end - 1)), place)

    return [mock.patch.object(expire, "_step", early)]


def _broken_lease_forgets() -> Patches:
    """Who breaks a lease forgets how far the journal reached."""

    def forgets(*arguments: Any, **more: Any) -> LeaseState:
        return LeaseState(*arguments, **{**more, "end": NOTHING_KNOWN})

    return [mock.patch.object(workplace, "LeaseState", forgets)]


def _called_erased() -> Patches:
    """What was to be erased counts as erased, whatever became of it."""
    count = gc._ErasureRun._count

    def all_gone(self: Any, total: int) -> None:
        with mock.patch.object(gc, "named_bundles", return_value={}):
            count(self, total)

    leave = gc._ErasureRun._leave

    def silent(self: Any, reasons: dict[str, str]) -> None:
        leave(self, reasons)
        self.stays.clear()

    return [
        mock.patch.object(gc._ErasureRun, "_count", all_gone),
        mock.patch.object(gc._ErasureRun, "_leave", silent),
    ]


# -- the key index ----------------------------------------------------------------------------------


def _keys_left_out() -> Patches:
    """The last key of each batch is not in the index."""
    some, many = indexer.extract_keys, indexer.extract_all

    def all_but_one(keys: Keys) -> Keys:
        return replace(keys, hashes=keys.hashes[:-1], items=keys.items[:-1])

    def of_one(*arguments: Any) -> Iterator[Keys]:
        return (all_but_one(keys) for keys in some(*arguments) if len(keys))

    def of_many(*arguments: Any) -> list[list[Keys]]:
        return [[all_but_one(keys) for keys in found] for found in many(*arguments)]

    return [
        mock.patch.object(indexer, "extract_keys", of_one),
        mock.patch.object(indexer, "extract_all", of_many),
    ]


def _index_of_what_is_gone() -> Patches:
    """What was truncated counts as indexed, also when other messages stand there."""
    cut = state.cut

    def keeps(incarnation: Any, *more: Any) -> Any:
        found = cut(incarnation, *more)
        return found and (found[0], replace(found[1], indexed=incarnation.indexed))

    return [mock.patch.object(state, "cut", keeps)]


# -- what befalls one kind of keys ------------------------------------------------------------------


def _aside_in_name_only() -> Patches:
    """A damaged record counts as put aside though its copy could not be stored."""
    put = Uploader.put_quarantine

    def hopeful(self: Uploader, commit: Any) -> int:
        try:
            return put(self, commit)
        except BackendError:
            return len(commit.quarantined)

    return [mock.patch.object(Uploader, "put_quarantine", hopeful)]


def _own_lease_taken_for_anothers() -> Patches:
    """Who meets its own lease, since its write arrived twice, takes it for a stranger's."""
    renew = Lease.renew

    def once(self: Lease) -> None:
        with mock.patch.object(Lease, "_version_of_ours", _refused):
            renew(self)

    return [mock.patch.object(Lease, "renew", once)]


def _refused(_self: Lease) -> None:
    raise FencedError("another writer has taken the lease")


def _listing_believed() -> Patches:
    """What a listing does not show counts as gone; nobody asks for it by its name."""

    def unasked(_store: Any, prefix: str, missing: set[str]) -> Iterator[str]:
        for key in sorted(missing):
            yield f"{prefix}{key} is named by the journal and is gone"

    return [mock.patch.object(gc, "_not_shown", unasked)]


# -- what ends at an edge ---------------------------------------------------------------------------


def _full_block_counts_twice() -> Patches:
    """What ends exactly where a block does is taken to have another block, an empty one."""
    return [mock.patch.object(bundle, "_blocks", lambda size, block=1 << 16: size // block + 1)]


# -- what a person repairs --------------------------------------------------------------------------


def _repaired_without_tags() -> Patches:
    """The items of a part that is repaired from the broker have no tag codes."""
    real = repair.encode_items

    def untagged(offsets: Any, sizes: Any, tags: Any) -> Any:
        return real(offsets, sizes, tags * 0)

    return [mock.patch.object(repair, "encode_items", untagged)]


def _rebuilt_without_one() -> Patches:
    """A rebuild overlooks a bundle."""
    real = rebuild._tables

    def fewer(*arguments: Any) -> Any:
        tabled, refused = real(*arguments)
        return tabled[:-1], refused

    return [mock.patch.object(rebuild, "_tables", fewer)]


# -- whose age rules --------------------------------------------------------------------------------


def _as_old_as_its_last_part() -> Patches:
    """A segment is as old as the newest message of its last part: later parts are taken to be newer."""
    return [mock.patch.object(expiry, "newest_ms", lambda one: one.parts[-1].store_max_ms)]


def _as_old_as_when_it_began() -> Patches:
    """A segment is as old as the entry that named its first part."""
    return [mock.patch.object(expiry, "newest_ms", lambda one: one.created_ms)]


WIDE: dict[str, Callable[[], Patches]] = {
    "a queue ended where nobody has asked for it": _ended_elsewhere,
    "a broken lease forgets the journal's end": _broken_lease_forgets,
    "called erased, and named": _called_erased,
    "keys left out of the index": _keys_left_out,
    "an index of what was truncated": _index_of_what_is_gone,
    "put aside in name only": _aside_in_name_only,
    "the own lease taken for another's": _own_lease_taken_for_anothers,
    "a listing believed": _listing_believed,
    "repaired without tags": _repaired_without_tags,
    "rebuilt without a bundle": _rebuilt_without_one,
    "a segment is as old as its last part": _as_old_as_its_last_part,
    "a segment is as old as when it was begun": _as_old_as_when_it_began,
    "a full block counts twice": _full_block_counts_twice,
}
