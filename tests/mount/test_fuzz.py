"""Any header and body to each kind of request: an answer with a code, soon, and no defect of the mount's."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.mount.harness import Mounted, mounted
from tiered.format.remoting import Form
from tiered.mount import codes
from tiered.mount.codes import Code

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

FIELDS = (
    *("topic", "queueId", "queueOffset", "consumerGroup", "group", "clientID", "maxMsgNums"),
    *("sysFlag", "commitOffset", "subscription", "subVersion", "expressionType", "maxMsgBytes"),
    *("timestamp", "boundaryType", "key", "maxNum", "beginTimestamp", "endTimestamp", "offset"),
    *("producerGroup", "setZeroIfNotFound", "_UNIQUE_KEY_QUERY"),
)
NUMBERS = st.sampled_from(
    [-(1 << 63), -(1 << 31), -2, -1, 0, 1, 3, 31, 4096, 1 << 31, (1 << 63) - 1, 1 << 63, 1 << 90]
)
TEXTS = st.one_of(
    st.sampled_from(["orders", "%RETRY%g", "g", "*", "a||b", "TAG", "SQL92", "x IN (", "", "true"]),
    NUMBERS.map(str),
    st.text(max_size=20).map(lambda text: text.encode("utf-8", "replace").decode()),
)
HEADERS = st.dictionaries(st.sampled_from(FIELDS), TEXTS, max_size=len(FIELDS))
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=8,
)
MEMBERS = (
    *("clientID", "consumerDataSet", "groupName", "subscriptionDataSet", "subscriptionData"),
    *("consumerGroup", "clientId", "mqSet", "topic", "queueId", "subString", "expressionType"),
)
BODIES = st.one_of(
    st.binary(max_size=64),
    st.dictionaries(st.sampled_from(MEMBERS), VALUES, max_size=6).map(
        lambda document: json.dumps(document).encode()
    ),
    st.just(b"[" * 5000),
)
ASKED = sorted({*codes.BY_CODE, 0, 99, 32_767, 200_051})


@pytest.fixture(scope="module")
def served(captured_tier: Callable[[str], tuple[Path, str]]) -> Iterator[Mounted]:
    with mounted(captured_tier("s10-consumers")[1], keeps_offsets=False) as found:
        yield found


def try_one(served: Mounted, code: int, fields: dict[str, str], body: bytes) -> None:
    held: dict[str, Any] = {"suspendTimeoutMillis": 5}
    with served.client(Form.JSON) as client:
        answer = client.ask(code, body, **fields, **held)
        assert answer.code in set(Code)
        assert "a defect of the mount" not in answer.remark, (code, fields, body, answer.remark)
        assert client.ask(codes.GET_MAX_OFFSET, topic="work", queueId=0).fields["offset"] == "33"


@settings(deadline=None, max_examples=400, suppress_health_check=list(HealthCheck))
@given(st.sampled_from(ASKED), HEADERS, BODIES)
def test_anything_is_answered(served: Mounted, code: int, fields: dict[str, str], body: bytes):
    try_one(served, code, fields, body)


@pytest.mark.slow
@settings(deadline=None, max_examples=3_000, suppress_health_check=list(HealthCheck))
@given(st.sampled_from(ASKED), HEADERS, BODIES)
def test_anything_is_answered_for_long(
    served: Mounted, code: int, fields: dict[str, str], body: bytes
):
    try_one(served, code, fields, body)
