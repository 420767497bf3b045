"""A row of an archive as the JSON that ``tiered cat`` and ``tiered query`` print of a message.

Of what only the stored record knows an archive has nothing: ``stored_sys_flag``, ``size`` and ``log_offset`` are null.
"""

from __future__ import annotations

import json
from base64 import b64encode
from typing import TYPE_CHECKING, Any

from tiered.archive.selection import micros
from tiered.format.hosts import offset_msg_id
from tiered.format.properties import tag_hash
from tiered.format.sysflag import INNER_BATCH

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pyarrow as pa


def lines(rows: pa.Table) -> Iterator[bytes]:
    """A line of JSON for each row, without its end."""
    for row in rows.to_pylist():
        yield json.dumps(document(row), ensure_ascii=False).encode()


def document(row: dict[str, Any]) -> dict[str, Any]:
    """The fields of a message, in the order of ``tiered.format.message.message_json``.

    Args:
        row: All columns of docs/formats/archive.md, maps as lists of pairs.
    """
    properties = dict(row["properties"] or ())
    record_id = offset_msg_id(row["store_host"], row["physical_offset"])
    return {
        "topic": row["topic"],
        "queue_id": row["queue_id"],
        "queue_offset": row["queue_offset"],
        "store_timestamp_ms": micros(row["store_ts"]) // 1000,
        "born_timestamp_ms": micros(row["born_ts"]) // 1000,
        "born_host": row["born_host"],
        "store_host": row["store_host"],
        "tags": row["tag"],
        "keys": row["msg_key"],
        "properties": dict(sorted(properties.items())),
        "msg_id": row["uniq_key"] or record_id,
        "sys_flag": row["sys_flag"],
        "stored_sys_flag": None,
        "flag": row["flag"],
        "body_crc": row["body_crc"],
        "reconsume_times": row["reconsume_times"],
        "prepared_transaction_offset": row["prepared_tx_offset"],
        "size": None,
        "tag_hash": tag_hash(row["tag"]),
        "physical_offset": row["physical_offset"],
        "offset_msg_id": None if row["sys_flag"] & INNER_BATCH else record_id,
        "body_base64": b64encode(row["body"]).decode("ascii"),
        "log_offset": None,
    }
