"""Files are held against a tier by the bits of their values: NaN is itself, and two noughts are two values."""

from __future__ import annotations

import io
import json
import math
import struct
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
from support.archive_jobs import archive, check, job_context, keys, sealed_tier
from support.bodies import avro, wishes
from zlib_ng import zlib_ng

from tiered.archive.audit import apply_repair, plan_repair, read_log, verify_archive
from tiered.archive.checked_ranges import with_sums
from tiered.archive.job import log_writer
from tiered.archive.machine import archive_action, columns_action
from tiered.archive.merging import merge, plan_merge
from tiered.archive.parquet import have_same_bits
from tiered.upkeep.engine import local_engine

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tiered.archive.job import JobContext

NUMBERS = [b'{"x": NaN}', b'{"x": -0.0}', b'{"x": 0.0}', b'{"x": -Infinity}', b'{"x": null}']
NESTED = b"""{"o": {"x": NaN, "l": [1.5, NaN, null]}, "s": [{"f": NaN}, {}]}"""


def archived(bodies: Sequence[bytes], **how: Any) -> JobContext:
    at = job_context(sealed_tier(*[[body] for body in bodies]).store)
    at = replace(at, wishes=wishes(how.pop("form", "json"), **how))
    assert archive(at).misfits == 0
    return at


def test_nan_is_verified_also_within_others() -> None:
    schema = b"o STRUCT<x: DOUBLE, l: ARRAY<DOUBLE>>, s ARRAY<STRUCT<f: FLOAT>>, x DOUBLE"
    at = archived([*NUMBERS, NESTED], schema=schema)
    assert check(at).compared == len(NUMBERS) + 1


def test_nan_of_avro_is_verified_whatever_its_bits() -> None:
    fields = [{"name": "x", "type": "double"}, {"name": "f", "type": "float"}]
    schema = {"type": "record", "name": "R", "fields": fields}
    odd = struct.unpack("<d", struct.pack("<Q", 0xFFF8_0000_0000_00AB))[0]
    bodies = [avro({"x": x, "f": x}, schema) for x in (1.0, math.nan, odd)]
    text = json.dumps(schema).encode()
    assert check(archived(bodies, form="avro", schema=text)).compared == len(bodies)


def test_merged_and_repaired_files_with_nan_are_verified() -> None:
    at = archived(NUMBERS, schema=b"x DOUBLE")
    log = log_writer(at)
    assert merge(at, log, plan_merge(log.state, takes=lambda _queue: True)).new_files == 1
    assert check(at).compared == len(NUMBERS)
    ((first, *_),) = read_log(at).queues.values()
    (key,) = (file.key for file in first.files)
    at.archive.delete(key)
    engine = local_engine(at.context, 1)
    log = log_writer(at)
    applied = apply_repair(at, log, plan_repair(at, log.state, engine, by_bytes=False), engine)
    assert (applied.made, applied.failed) == (1, [])
    assert check(at).compared == len(NUMBERS)


def test_an_object_that_is_there_already_is_adopted_with_nan_in_it() -> None:
    at = archived(NUMBERS[:1], schema=b"x DOUBLE")
    (key,) = keys(at)
    again = replace(job_context(at.tier), wishes=at.wishes)
    file = pq.ParquetFile(io.BytesIO(at.archive.get(key)))
    ((topic, (body,)),) = read_log(at).bodies.items()
    log_writer(again).append([columns_action(topic, 0, body)])
    again.archive.put_if_absent(key, _written(file.read(), file.metadata.metadata))
    assert archive(again).failed == []
    assert check(again).compared == 1


def test_a_nought_of_another_sign_is_another_value() -> None:
    at = archived([b'{"x": -0.0}'], schema=b"x DOUBLE")
    ((queue, (one,)),) = read_log(at).queues.items()
    file = pq.ParquetFile(io.BytesIO(at.archive.get(one.files[0].key)))
    table = file.read()
    spot = table.schema.get_field_index("value_x")
    table = table.set_column(spot, table.schema.field(spot), [[0.0]])
    data = _written(table, file.metadata.metadata)
    forged = job_context(at.tier)
    log = log_writer(forged)
    log.append([columns_action(queue.topic, 0, read_log(at).bodies[queue.topic][0])])
    forged.archive.put_if_absent(one.files[0].key, data)
    forgery = replace(one.files[0], size_bytes=len(data), crc=zlib_ng.crc32(data))
    log.append([archive_action([(queue, 0, replace(one, files=(forgery,)))])])
    found = verify_archive(forged, local_engine(forged.context, 1)).findings
    assert [one.what for one in found] == ["rows differ from the tier behind offset 0"]


def test_same_bits_whatever_the_batches() -> None:
    whole = pa.table({"x": [1.0, math.nan, None, -0.0], "l": [[math.nan], None, [], [None]]})
    parts = pa.concat_tables([whole.slice(0, 1), whole.slice(1)])
    assert have_same_bits(whole, parts)
    assert not have_same_bits(whole, whole.slice(1))
    assert not have_same_bits(whole, whole.rename_columns(["y", "l"]))
    other = whole.set_column(0, "x", [[1.0, math.nan, None, 0.0]])
    assert not have_same_bits(whole, other)


def _written(table: pa.Table, metadata: dict[bytes, bytes]) -> bytes:
    """Other bytes than ours, with the same rows."""
    sink = io.BytesIO()
    pq.write_table(table.replace_schema_metadata(metadata), sink, compression="gzip")
    return with_sums(sink.getvalue())
