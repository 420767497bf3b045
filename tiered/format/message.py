"""A message as JSON: what ``tiered cat`` prints, and what captured stores are compared by.

``message_json`` says what the fields are; ``message_line`` writes the same fields at once as text, in less than half the
time of making the object and encoding it. A property test holds the two equal.
"""

from __future__ import annotations

import json
from base64 import b64encode
from binascii import b2a_base64
from json.encoder import encode_basestring as quoted
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


def message_line(
    record: Record,
    *,
    tag_code: int,
    log_offset: int | None,
    raw_body: bool,
    stored_sys_flag: int | None = None,
) -> bytes:
    """``message_json`` as one line of UTF-8 JSON without its end; arguments and errors are the same.

    A message that has text which is no UTF-8 is written in ASCII, with escapes.
    """
    plain = record.body if raw_body else decompress_body(record.body, record.sys_flag)
    body = b2a_base64(plain, newline=False).decode("ascii")
    properties = record.properties
    record_id = offset_msg_id(record.store_host, record.physical_offset)
    tags, keys = properties.get(TAGS), properties.get(KEYS)
    listed = ", ".join(
        f"{quoted(name)}: {quoted(properties[name])}"
        for name in sorted(properties)
        if name not in CLIENT_ONLY
    )
    line = (
        f'{{"topic": {quoted(record.topic)}, "queue_id": {record.queue_id},'
        f' "queue_offset": {record.queue_offset},'
        f' "store_timestamp_ms": {record.store_timestamp_ms},'
        f' "born_timestamp_ms": {record.born_timestamp_ms},'
        f' "born_host": "{record.born_host}", "store_host": "{record.store_host}",'
        f' "tags": {"null" if tags is None else quoted(tags)},'
        f' "keys": {"null" if keys is None else quoted(keys)},'
        f' "properties": {{{listed}}},'
        f' "msg_id": {quoted(properties.get(UNIQ_KEY) or record_id)},'
        f' "sys_flag": {record.sys_flag if raw_body else record.sys_flag & ~COMPRESSED},'
        f' "stored_sys_flag": {record.sys_flag if stored_sys_flag is None else stored_sys_flag},'
        f' "flag": {record.flag}, "body_crc": {record.body_crc},'
        f' "reconsume_times": {record.reconsume_times},'
        f' "prepared_transaction_offset": {record.prepared_transaction_offset},'
        f' "size": {record.size}, "tag_hash": {tag_code},'
        f' "physical_offset": {record.physical_offset},'
        f' "offset_msg_id": {"null" if record.sys_flag & INNER_BATCH else quoted(record_id)},'
        f' "body_base64": "{body}",'
        f' "log_offset": {"null" if log_offset is None else log_offset}}}'
    )
    try:
        return line.encode()
    except UnicodeEncodeError:
        return json.dumps(json.loads(line)).encode()


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
