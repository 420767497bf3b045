"""Which store a directory is: names and a mark of its own.

The mark (``store_id``) is, in this order:

1. ``identity:<cluster>#<broker>#<id>`` from ``brokerIdentity``, which controller brokers write. It tells the replicas
   of a broker apart.
2. ``rocksdb:<uuid>`` from ``rocksdbstore/IDENTITY``, which every broker since 5.4 makes once, whether or not it uses
   RocksDB. It survives restarts and goes with a copy of the directory. A directory that was wiped and begun anew has
   another one; so has a slave.
3. ``host:<address of the first record's broker>/<cluster>/<broker>`` for older stores. It does not tell a wiped
   directory from the one before, and changes when the broker moves to another address.
4. Empty when there is nothing to go by: a store without messages of an older broker.

A store that is upgraded to 5.4 or later changes from 3 to 2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tiered.format import properties
from tiered.format.record import Record, RecordError, decode_record
from tiered.local.layout import Topics, read_text

if TYPE_CHECKING:
    from tiered.local.files import FileRow
    from tiered.local.pieces import LogPieces

_BROKER_IDENTITY = "brokerIdentity"
_ROCKSDB_IDENTITY = "rocksdbstore/IDENTITY"
_LOOKED_AT_BYTES = 1 << 18
_LOOKED_AT_RECORDS = 64
_IDENTITY_PARTS = 3


@dataclass(frozen=True, slots=True)
class Names:
    """What a directory says of itself.

    Attributes:
        cluster: Or None.
        broker: Or None.
        store_id: See the module.
    """

    cluster: str | None
    broker: str | None
    store_id: str


def read_names(root: str, log: FileRow, pieces: LogPieces, topics: Topics) -> Names:
    """Find names and mark of the store at ``root``."""
    identity = _broker_identity(root)
    if identity is not None:
        return Names(identity[0], identity[1], "identity:" + "#".join(identity))
    records = _first_records(log, pieces)
    cluster = next(
        (name for record in records if (name := record.properties.get(properties.CLUSTER))),
        topics.cluster,
    )
    return Names(cluster, topics.broker, _store_id(root, records, cluster, topics.broker))


def _store_id(root: str, records: list[Record], cluster: str | None, broker: str | None) -> str:
    raw = read_text(f"{root}/{_ROCKSDB_IDENTITY}", 256)
    uuid = (raw or b"").decode("ascii", "replace").strip()
    if uuid:
        return f"rocksdb:{uuid}"
    if not records:
        return ""
    return f"host:{records[0].store_host}/{cluster or ''}/{broker or ''}"


def _broker_identity(root: str) -> tuple[str, str, str] | None:
    raw = read_text(f"{root}/{_BROKER_IDENTITY}", 4096)
    parts = (raw or b"").decode("utf-8", "replace").strip().split("#")
    if len(parts) < _IDENTITY_PARTS or not all(parts[:_IDENTITY_PARTS]):
        return None
    return parts[0], parts[1], parts[2]


def _first_records(log: FileRow, pieces: LogPieces) -> list[Record]:
    """Sound records from the beginning of the first and the last file."""
    found: list[Record] = []
    for base in dict.fromkeys((*log.bases[:1], *log.bases[-2:])):
        piece = pieces.read(base, base + _LOOKED_AT_BYTES, _LOOKED_AT_BYTES, check_crc=False)
        for position in piece.block.positions[:_LOOKED_AT_RECORDS].tolist():
            try:
                found.append(decode_record(piece.block.buffer, position))
            except RecordError:
                continue
    return found
