"""Arrow batches say what messages say, column by column, whether made at once or message by message."""

from __future__ import annotations

import sys
import zlib
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.examples import HOST_V4, HOST_V6, INT32, INT64, PROPERTIES, make
from support.opened import ORDERS, Made, batch_of_records

from tiered.api.arrow import COLUMNS, ArrowMaker, load_pyarrow, schema
from tiered.api.message import messages_of
from tiered.errors import DataError, InvalidError
from tiered.format.properties import join_properties
from tiered.format.sysflag import BORN_HOST_V6, COMPRESSED, STORE_HOST_V6

if TYPE_CHECKING:
    from tiered.format.record import Record
    from tiered.log.decode import TierBatch

pa = load_pyarrow()

RAW = st.one_of(
    PROPERTIES.map(join_properties),
    st.sampled_from([
        b"", b"A\x01x\x02A\x01y\x02", b"A\x01\xff\x02", b"TAGS\x01t", b"\x01\x02TAGS\x02KEYS\x01\x02",
        b"KEYS\x01k\x01l\x02", b"MIN_OFFSET\x013\x02TAGS\x01t\x02", b"A\x01\xed\xa0\x80\x02",
    ]),
)  # fmt: skip


@st.composite
def records(draw: st.DrawFn) -> list[Record]:
    may_be_odd = draw(st.booleans())
    found = []
    for number in range(draw(st.integers(0, 6))):
        body, flag, born, store = draw(st.binary(max_size=40)), 0, HOST_V4, "10.0.0.2:10911"
        if may_be_odd and draw(st.booleans()):
            body, flag = zlib.compress(body), COMPRESSED
        if may_be_odd and draw(st.booleans()):
            born, flag = HOST_V6, flag | BORN_HOST_V6
        if may_be_odd and draw(st.booleans()):
            store, flag = HOST_V6, flag | STORE_HOST_V6
        found.append(
            make(
                version=draw(st.sampled_from([1, 2])), queue_offset=5 + number, sys_flag=flag, body=body,
                born_host=born, store_host=store, properties_raw=draw(RAW), topic="topic-ä",
                flag=draw(INT32), physical_offset=draw(INT64), reconsume_times=draw(INT32),
                prepared_transaction_offset=draw(INT64), born_timestamp_ms=draw(INT64),
                store_timestamp_ms=draw(INT64),
            )
        )  # fmt: skip
    return found


def said(batch: TierBatch) -> list[dict[str, Any]]:
    """The columns, by what the messages say of themselves."""
    return [
        {
            **{name: getattr(m, name) for name in (
                "topic", "queue_id", "queue_offset", "born_host", "tags", "keys", "msg_id", "sys_flag", "flag",
                "reconsume_times", "size", "log_offset", "body",
            )},
            "store_timestamp": m.store_timestamp_ms,
            "born_timestamp": m.born_timestamp_ms,
            "store_host": m.record.store_host,
            "properties": list(m.properties.items()),
            "prepared_transaction_offset": m.record.prepared_transaction_offset,
            "tag_hash": m.tag_code,
            "physical_offset": m.record.physical_offset,
        }
        for m in messages_of(batch)
    ]  # fmt: skip


def rows(batch: Any) -> list[dict[str, Any]]:
    batch.validate(full=True)
    plain = pa.schema([
        pa.field(f.name, pa.int64() if pa.types.is_timestamp(f.type) else f.type) for f in batch.schema
    ])  # fmt: skip
    columns = [
        column.cast(pa.int64()) if pa.types.is_timestamp(column.type) else column
        for column in batch.columns
    ]
    found: list[dict[str, Any]] = pa.RecordBatch.from_arrays(columns, schema=plain).to_pylist()
    return found


@settings(deadline=None, max_examples=150)
@given(records())
def test_every_column_is_what_the_message_says(found: list[Record]):
    batch = batch_of_records(found, base=5)
    assert rows(ArrowMaker().make(batch)) == said(batch)


@settings(deadline=None, max_examples=60)
@given(records(), st.data())
def test_only_some_items_and_columns(found: list[Record], data: st.DataObject):
    batch = batch_of_records(found, base=5)
    chosen = data.draw(st.sets(st.sampled_from(range(len(found))))) if found else set()
    numbers = np.array(sorted(chosen), np.int64)
    columns = data.draw(st.lists(st.sampled_from(COLUMNS), min_size=1, unique=True))
    made = ArrowMaker(columns).make(batch, numbers)
    assert made.schema.names == columns
    every = said(batch)
    assert rows(made) == [{name: every[n][name] for name in columns} for n in numbers.tolist()]


def test_the_common_case_runs_no_code_for_each_message(monkeypatch: pytest.MonkeyPatch):
    from tiered.api import arrow

    def never(*_: object) -> None:
        raise AssertionError("message by message")

    monkeypatch.setattr(arrow, "messages_of", never)
    monkeypatch.setattr(arrow, "bodies", never)
    plain = [make(queue_offset=n, properties_raw=b"TAGS\x01t%d\x02" % n) for n in range(50)]
    assert ArrowMaker().make(batch_of_records(plain)).num_rows == 50
    odd = [make(properties_raw=b"A\x01x\x02A\x01y\x02")]
    with pytest.raises(AssertionError, match="message by message"):
        ArrowMaker().make(batch_of_records(odd))


def test_batches_of_a_tier_make_one_table():
    tier = Made()
    for part in range(3):
        tier.builder.add([b"%d" % part, None, (3, inner(3))], queue=ORDERS)
    with tier.open() as opened:
        table = pa.Table.from_batches(opened.read_arrow("orders", 0, 1), schema=schema())
        assert table["queue_offset"].to_pylist() == [2, 3, 4, 5, 7, 8, 9, 10, 12, 13, 14]
        bodies = table["body"].to_pylist()
        assert bodies[:4] == [b"inner 0", b"inner 1", b"inner 2", b"1"]
        few = list(opened.read_topic_arrow("orders", columns=["body"], tags="a"))
        assert pa.Table.from_batches(few).num_columns == 1


def inner(count: int) -> bytes:
    from tiered.format.message_forms import InnerMessage, encode_inner_messages

    return encode_inner_messages(
        [InnerMessage(0, b"inner %d" % n, b"TAGS\x01a\x02") for n in range(count)]
    )


def test_what_is_no_column_is_refused_at_once():
    made = Made()
    made.add(b"x")
    with made.open() as tier:
        with pytest.raises(InvalidError, match="no column 'bodies'"):
            tier.read_arrow("orders", 0, columns=["bodies"])
        with pytest.raises(InvalidError, match="twice"):
            tier.read_arrow("orders", 0, columns=["body", "body"])
        with pytest.raises(InvalidError, match="no column is named"):
            tier.read_topic_arrow("orders", columns=[])


def test_without_pyarrow_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch):
    load_pyarrow.cache_clear()
    monkeypatch.setitem(sys.modules, "pyarrow.compute", None)
    with pytest.raises(InvalidError, match="pip install"):
        ArrowMaker()


def test_a_damaged_record_is_an_error():
    batch = batch_of_records([make(), make()])
    data = bytearray(batch.records.data)
    data[4] ^= 1
    object.__setattr__(batch.records, "data", memoryview(bytes(data)))
    with pytest.raises(DataError):
        ArrowMaker().make(batch)
