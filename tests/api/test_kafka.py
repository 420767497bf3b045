"""Kafka's records in the Python API: what Kafka's own consumers were given, in either isolation, as messages and Arrow."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import kafka_batches as plain
from support.kafka_tiers import add_capture, as_dumped, base64
from support.opened import ORDERS, Made

from fetcher.filters import FilterError
from tiered.api.arrow import KAFKA_COLUMNS, kafka_columns, kafka_schema, load_pyarrow
from tiered.api.message import KafkaMessage
from tiered.errors import InvalidError
from tiered.format.kafka_batch import records_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tiered.api.tier import Tier

pa = load_pyarrow()


@pytest.fixture(scope="module")
def made() -> Callable[[str], Made]:
    known: dict[str, Made] = {}

    def make(name: str) -> Made:
        if name not in known:
            known[name] = Made()
            add_capture(known[name].builder, name)
        return known[name]

    return make


@pytest.fixture
def opened(made: Callable[[str], Made]) -> Iterator[Callable[..., Tier]]:
    tiers: list[Tier] = []

    def open_it(name: str, isolation: str = "read_uncommitted") -> Tier:
        tiers.append(made(name).open(isolation=isolation))
        return tiers[-1]

    yield open_it
    for tier in tiers:
        tier.close()


def by_queue(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(lines, key=lambda line: (line["topic"], line["partition"], line["offset"]))


# Of k06-retention the files alone do not say where its logs begin.
NAMES = [name for name in plain.NAMES if name != "k06-retention"]
CASES = [(name, "read_uncommitted") for name in NAMES] + [("k02-transactions", "read_committed")]


def wanted(name: str, isolation: str) -> list[dict[str, Any]]:
    return by_queue(plain.dump(f"{name}.committed" if isolation == "read_committed" else name))


@pytest.mark.parametrize(("name", "isolation"), CASES)
def test_messages_are_what_consumers_were_given(
    name: str, isolation: str, opened: Callable[..., Tier]
):
    tier = opened(name, isolation)
    found = [message for topic in tier.topics() for message in tier.read_topic(topic)]
    assert by_queue([message.to_json() for message in found]) == wanted(name, isolation)
    for message in found:
        assert isinstance(message, KafkaMessage)
        line = message.to_json()
        assert base64(message.key) == line["key_base64"]
        assert base64(message.value) == line["value_base64"]
        assert message.body == (message.value or b"")
        assert message.queue_offset == line["offset"]
        assert message.store_timestamp_ms == message.timestamp_ms == line["timestamp_ms"]
        assert [[name, base64(value)] for name, value in message.headers] == line["headers"]


@pytest.mark.parametrize(("name", "isolation"), CASES)
def test_columns_are_what_consumers_were_given(
    name: str, isolation: str, opened: Callable[..., Tier]
):
    tier, rows = opened(name, isolation), []
    for topic in tier.topics():
        for batch in tier.read_topic_arrow(topic, batch_bytes=20_000):
            batch.validate(full=True)
            assert batch.schema == kafka_schema()
            rows += [as_dumped(row) for row in batch.to_pylist()]
    assert by_queue(rows) == wanted(name, isolation)


def test_a_message_apart_from_its_chunk_is_the_same(opened: Callable[..., Tier]):
    message = next(opened("k05-epochs").read("epochs", 0))
    apart = message.detached()
    assert apart.to_json() == message.to_json()
    assert bytes(apart.raw) == bytes(message.raw)
    with pytest.raises(InvalidError, match="is not RocketMQ"):
        _ = message.born_host


def test_some_columns_in_the_order_asked_for(opened: Callable[..., Tier]):
    tier = opened("k05-epochs")
    (batch,) = tier.read_arrow("epochs", 0, 10, 12, columns=["value", "offset"])
    assert batch.schema.names == ["value", "offset"]
    assert batch["offset"].to_pylist() == [10, 11]
    with pytest.raises(InvalidError, match="no column 'body'"):
        list(tier.read_arrow("epochs", 0, columns=["topic", "body"]))
    with pytest.raises(InvalidError, match="no column 'what'"):
        tier.read_arrow("epochs", 0, columns=["what"])


def test_columns_of_kafka_s_are_no_columns_of_rocketmq_s():
    rocketmq = Made()
    rocketmq.add(b"one")
    with rocketmq.open() as tier, pytest.raises(InvalidError, match="no column 'partition'"):
        list(tier.read_arrow(ORDERS.topic, ORDERS.queue_id, columns=["partition"]))


# -- filters ---------------------------------------------------------------------------------------


def test_an_expression_is_asked_of_headers(opened: Callable[..., Tier]):
    tier = opened("k05-epochs")
    every = list(tier.read_topic("epochs"))
    names = Counter(name for message in every for name in message.properties)
    assert len(names) > 1
    for name in filter(str.isidentifier, filter(str.isascii, names)):
        values = {message.properties[name] for message in every if name in message.properties}
        for value in sorted(values)[:3]:
            found = tier.read_topic("epochs", sql=f"{name} = '{value}'")
            right = [m.to_json() for m in every if m.properties.get(name) == value]
            assert [message.to_json() for message in found] == right
        none = [m.to_json() for m in every if name not in m.properties]
        assert [m.to_json() for m in tier.read_topic("epochs", sql=f"{name} IS NULL")] == none


def test_kafka_has_no_tags(opened: Callable[..., Tier]):
    tier = opened("k05-epochs")
    with pytest.raises(InvalidError, match="have no tags"):
        list(tier.read_topic("epochs", tags="a"))
    assert len(list(tier.read_topic("epochs", tags="*"))) == 1500
    with pytest.raises(FilterError):
        tier.read_topic("epochs", sql="a =")


# -- columns of any records ------------------------------------------------------------------------

BYTES = st.none() | st.binary(max_size=5)
RECORD = st.tuples(BYTES, BYTES, st.lists(st.tuples(st.text(max_size=3), BYTES), max_size=3))


@settings(deadline=None, max_examples=100)
@given(st.lists(RECORD, max_size=6), st.data())
def test_columns_have_what_the_records_have(
    records: list[tuple[bytes | None, bytes | None, list[tuple[str, bytes | None]]]],
    data: st.DataObject,
):
    section = plain.section(
        [(n, n, key, value, tuple(headers)) for n, (key, value, headers) in enumerate(records)]
    )
    raw = plain.batch(section, len(records), base_offset=7, leader_epoch=3)
    wanted = sorted(data.draw(st.sets(st.integers(7, 7 + len(records)))))
    found = records_of(raw, np.array([0]), np.array([len(raw)]), np.array(wanted, np.int64))
    made = pa.record_batch(list(kafka_columns(found, "t", 2).values()), schema=kafka_schema())
    made.validate(full=True)
    assert made.schema.names == list(KAFKA_COLUMNS)
    assert made.to_pylist() == [
        {
            "topic": "t", "partition": 2, "offset": 7 + n, "timestamp_ms": n, "timestamp_type": "CREATE_TIME",
            "key": key, "value": value, "leader_epoch": 3,
            "headers": [{"name": name, "value": data} for name, data in headers],
        }
        for n, (key, value, headers) in enumerate(records) if 7 + n in wanted
    ]  # fmt: skip
