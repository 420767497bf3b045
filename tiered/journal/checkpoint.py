"""A checkpoint: the state after one entry, compressed; in format 1 as it is, where compressing would break a bound (below).

Layout: the two lines of ``tiered.journal.entry.seal_text``; fields of the JSON object:

======== ======================================================================================
field    content
======== ======================================================================================
format   2
number   of the entry
last     checksum of that entry
shards   names of the objects that hold the rest of the state (``tiered.journal.shards``); none when there is no other
bytes    size of the state's JSON text, ASCII
state    that text compressed with zlib, in base64. In format 1: the state itself; no ``bytes``
======== ======================================================================================

Bounds (I8): no more than ``STATE_BYTES_MAX`` is ever unpacked, no more than ``bytes`` says, and no more than ``RATIO_MAX``
bytes for each that is stored, so that a small object can not become a large state. A state that is larger, or that can be
packed better than that, is written as format 1, which needs no unpacking.
"""

from __future__ import annotations

import base64
import binascii
import json
import zlib
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from zlib_ng import zlib_ng

from tiered.errors import DataError
from tiered.journal.entry import json_text, open_text, require_sparse, seal_text
from tiered.journal.shards import ShardName

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable


FORMAT = 2
STATE_BYTES_MAX = 1024 * 1024 * 1024
"""About three million parts."""
RATIO_MAX = 64
"""Our states are packed to a fifth, and the most regular ones, of empty queues, to a thirtieth."""
_SMALL_BYTES = 1 << 20
_LEVEL = 3
"""100,000 parts are packed in an eighth of a second, to a fifth of their text."""


@dataclass(frozen=True, slots=True)
class CheckpointText:
    """What a checkpoint says.

    Attributes:
        number: Of the entry.
        last: Checksum of that entry.
        state: As ``Machine.dump`` gave it.
        shards: What holds the rest of the state.
    """

    number: int
    last: int
    state: Any
    shards: tuple[ShardName, ...] = ()


def encode_checkpoint(checkpoint: CheckpointText, *, bytes_max: int = STATE_BYTES_MAX) -> bytes:
    """The object's bytes.

    Args:
        checkpoint: What it is to say.
        bytes_max: A state whose text is longer is not compressed.
    """
    pieces = [json_text(checkpoint.state)]
    found = encode_pieces(replace(checkpoint, state=None), pieces, bytes_max=bytes_max)
    return found or seal_text({**_known(checkpoint), "format": 1, "state": checkpoint.state})


def encode_pieces(
    checkpoint: CheckpointText, pieces: Iterable[bytes], *, bytes_max: int = STATE_BYTES_MAX
) -> bytes | None:
    """As ``encode_checkpoint``, of a state that comes as pieces of its JSON text and is never held whole.

    Args:
        checkpoint: All but its state.
        pieces: Of the state's text; see ``json_text``.
        bytes_max: Limit of the text.

    Returns:
        None when the text is longer.
    """
    packer = zlib_ng.compressobj(_LEVEL)
    packed = bytearray()
    size_bytes = 0
    for piece in pieces:
        size_bytes += len(piece)
        if size_bytes > bytes_max:
            return None
        packed += packer.compress(piece)
    packed += packer.flush()
    if size_bytes > _unpacked_max(len(packed)):
        return None
    state = base64.b64encode(packed).decode("ascii")
    known = _known(checkpoint)
    return seal_text({**known, "format": FORMAT, "bytes": size_bytes, "state": state})


def _known(checkpoint: CheckpointText) -> dict[str, Any]:
    shards = [name.row() for name in checkpoint.shards]
    known: dict[str, Any] = {"number": checkpoint.number, "last": checkpoint.last}
    return {**known, "shards": shards} if shards else known


def decode_checkpoint(
    data: bytes, *, where: str, bytes_max: int = STATE_BYTES_MAX
) -> CheckpointText:
    """Parse a checkpoint of any format.

    Args:
        data: The object's bytes.
        where: Its key, for messages.
        bytes_max: No more is unpacked.

    Raises:
        DataError: It is damaged, or says that its state is larger than ``bytes_max``.
        InvalidError: It is of a newer format version.
    """
    document = open_text(data, where=where, version=FORMAT)
    try:
        state = document["state"]
        if document["format"] == FORMAT:
            state = json.loads(require_sparse(_unpack(state, document["bytes"], bytes_max)))
        shards = tuple(map(ShardName.of, document.get("shards", ())))
        return CheckpointText(int(document["number"]), int(document["last"]), state, shards)
    except (
        LookupError,
        TypeError,
        ValueError,
        OverflowError,
        RecursionError,
        zlib.error,
    ) as error:
        raise DataError(f"this is no checkpoint: {error!r}", where=where) from error


def _unpacked_max(packed_bytes: int) -> int:
    return RATIO_MAX * packed_bytes + _SMALL_BYTES


def _unpack(packed: str, size_bytes: int, bytes_max: int) -> bytes:
    """Exactly ``size_bytes``; a ``ValueError`` when it is more or less. Never unpacks more than one byte beyond."""
    bytes_max = min(bytes_max, _unpacked_max(len(packed) * 3 // 4))
    if not 0 <= size_bytes <= bytes_max:
        raise ValueError(f"{size_bytes} bytes of state are not within {bytes_max}")
    unpacker = zlib.decompressobj()
    try:
        text = unpacker.decompress(base64.b64decode(packed, validate=True), size_bytes + 1)
    except binascii.Error as error:
        raise ValueError(str(error)) from error
    if len(text) != size_bytes or not unpacker.eof or unpacker.unused_data:
        raise ValueError("the state's size is not the one that is said")
    return text


# -- trimming -----------------------------------------------------------------------------------------
#
# Which entries and checkpoints of a journal are needed no more. Pure.
#
# A journal is trimmed up to a checkpoint: what is older than it goes, the checkpoint and its own entry stay. Two checkpoints
# at least are left, with all entries behind the older one, so that one damaged checkpoint costs nothing but time; and enough
# history to tell what was named within the grace, which gc needs.

CHECKPOINTS_KEPT = 2


def replay_starts(entries: Collection[int], checkpoints: Collection[int]) -> list[int]:
    """Where replay up to the head can begin, earliest first.

    Args:
        entries: Numbers that are there.
        checkpoints: Likewise.

    Returns:
        Numbers of checkpoints behind which no entry is missing; 0 for the beginning of the journal.
    """
    head = max([*entries, *checkpoints], default=0)
    first, there = head + 1, set(entries)
    while first - 1 in there:
        first -= 1
    return [0] * (first == 1) + sorted(n for n in checkpoints if n >= first - 1)


def trim_bound(checkpoints: Collection[int], base: int) -> int:
    """The checkpoint that becomes the oldest; 0 when nothing is to be trimmed.

    Args:
        checkpoints: Numbers of those that are there.
        base: The history behind this entry is still needed.
    """
    kept = sorted(checkpoints)[-CHECKPOINTS_KEPT:]
    if len(kept) < CHECKPOINTS_KEPT:
        return 0
    return max((n for n in checkpoints if n <= min(kept[0], base)), default=0)


def is_trimmed(number: int, bound: int) -> bool:
    """Whether the entry or checkpoint ``number`` goes; nothing does for a bound of 0."""
    return number < bound
