"""Deletes what of a journal nobody reads any more, where no grace of a garbage collection has to see it.

Which entries and checkpoints go: ``tiered.journal.checkpoint``. A checkpoint counts as one that is left only if it, and each
shard that it names, is there as it says. A shard goes when no checkpoint that stays names it, and when it was stored before
the oldest of these: younger ones may be of a checkpoint that is about to be stored.

Ordering: entries and checkpoints first, oldest first, so that what a crash leaves is read from a checkpoint; then shards.

Whoever sleeps, and wakes up when the entry behind the last that it knows is gone, is fenced (``tiered.journal.append``); one
that stores a checkpoint of shards that are gone has stored one that nobody believes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from backends.errors import ObjectNotFoundError
from tiered.errors import DataError
from tiered.journal.checkpoint import decode_checkpoint, is_trimmed, trim_bound
from tiered.keys import JOURNAL, SHARD, checkpoint_key, parse_journal_key, parse_shard_key

if TYPE_CHECKING:
    from backends.base import ObjectStore


def trim_journal(store: ObjectStore, prefix: str, base: int) -> int:
    """Delete what is older than the newest checkpoint that is no newer than ``base``, if another is newer.

    Args:
        store: Of the journal.
        prefix: Likewise.
        base: The history behind this entry stays.

    Returns:
        How many objects went.

    Raises:
        InvalidError: A checkpoint that stays is of a newer version. Nothing was deleted.
        BackendError: The store failed. What is left is trimmed another time.
    """
    found = {info.key: info for info in store.list(prefix + JOURNAL)}
    parsed = {key: row for key in found if (row := parse_journal_key(prefix, key))}
    checkpoints = sorted(number for number, is_checkpoint in parsed.values() if is_checkpoint)
    bound = trim_bound(checkpoints, base)
    gone = [key for key, (number, _) in sorted(parsed.items()) if is_trimmed(number, bound)]
    if not gone:
        return 0
    sizes = {info.key: info.size_bytes for info in store.list(prefix + SHARD)}
    named = {
        number: _named(store, prefix, number, sizes) for number in checkpoints if number >= bound
    }
    usable = [number for number, keys in named.items() if keys is not None]
    if trim_bound(usable, base) != bound:
        return 0
    kept = {key for keys in named.values() for key in keys or ()}
    shards = {key: number for key in sizes if (number := parse_shard_key(prefix, key)) is not None}
    gone += [key for key, number in sorted(shards.items()) if number < bound and key not in kept]
    for key in gone:
        store.delete(key)
    return len(gone)


def _named(
    store: ObjectStore, prefix: str, number: int, sizes: dict[str, int]
) -> dict[str, int] | None:
    """The shards of a checkpoint, with their sizes; None when it is of no use."""
    key = checkpoint_key(prefix, number)
    try:
        text = decode_checkpoint(store.get(key), where=key)
    except (DataError, ObjectNotFoundError):
        return None
    found = {name.key(prefix): name.size_bytes for name in text.shards}
    return found if found.items() <= sizes.items() else None
