"""A message as JSON: what ``tiered cat`` prints, and what captured stores are compared by."""

from __future__ import annotations

from base64 import b64encode
from typing import TYPE_CHECKING, Any

from tiered.format.batch import split_batch
from tiered.format.compression import decompress_body
from tiered.format.ids import offset_msg_id
from tiered.format.properties import CLIENT_ONLY, KEYS, TAGS, UNIQ_KEY
from tiered.format.sysflag import COMPRESSED, INNER_BATCH

if TYPE_CHECKING:
    from tiered.format.record import Record


def message_json(
    record: Record,
    *,
    tag_code: int,
    log_offset: int | None,
    raw_body: bool,
    stored_sys_flag: int | None = None,
) -> dict[str, Any]:
    """The fields of one message, in the order of the command line's contract.

    Args:
        record: The message; an inner message as ``split_batch`` gives it.
        tag_code: Of its consume-queue item.
        log_offset: Where its record begins in the tiered commit log; None when it is not from a
            tier.
        raw_body: Leave the body as stored (and the compressed bit set).
        stored_sys_flag: Of the record that holds an inner message; default: the record's own.

    Raises:
        DataError: The body cannot be unpacked.
    """
    plain = record.body if raw_body else decompress_body(record.body, record.sys_flag)
    properties = record.properties
    record_id = offset_msg_id(record.store_host, record.physical_offset)
    return {
        "topic": record.topic,
        "queue_id": record.queue_id,
        "queue_offset": record.queue_offset,
        "store_timestamp_ms": record.store_timestamp_ms,
        "born_timestamp_ms": record.born_timestamp_ms,
        "born_host": record.born_host,
        "store_host": record.store_host,
        "tags": properties.get(TAGS),
        "keys": properties.get(KEYS),
        "properties": {
            name: value for name, value in sorted(properties.items()) if name not in CLIENT_ONLY
        },
        "msg_id": properties.get(UNIQ_KEY) or record_id,
        "sys_flag": record.sys_flag if raw_body else record.sys_flag & ~COMPRESSED,
        "stored_sys_flag": record.sys_flag if stored_sys_flag is None else stored_sys_flag,
        "flag": record.flag,
        "body_crc": record.body_crc,
        "reconsume_times": record.reconsume_times,
        "prepared_transaction_offset": record.prepared_transaction_offset,
        "size": record.size,
        "tag_hash": tag_code,
        "physical_offset": record.physical_offset,
        # Java gives the messages of an inner batch no id of their own place: they share one.
        "offset_msg_id": None if record.sys_flag & INNER_BATCH else record_id,
        "body_base64": b64encode(plain).decode("ascii"),
        "log_offset": log_offset,
    }


def messages_json(
    record: Record, *, tag_code: int, log_offset: int | None, raw_body: bool
) -> list[dict[str, Any]]:
    """The messages of a record: one, or those of an inner batch in order. See ``message_json``.

    Raises:
        DataError: The body cannot be unpacked or split.
    """
    return [
        message_json(
            message,
            tag_code=tag_code,
            log_offset=log_offset,
            raw_body=raw_body,
            stored_sys_flag=record.sys_flag,
        )
        for message in split_batch(record)
    ]
