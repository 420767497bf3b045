"""Keys: whatever the names, every server bears them and they come back as they were."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from backends.base import KEY_SEGMENT_BYTES_MAX, check_key
from tiered import keys
from tiered.model import MessageQueue, QueueOffset

NAMES = st.one_of(
    st.binary(max_size=255),
    st.text(max_size=63).map(lambda text: text.encode()),
    st.sampled_from(
        [b"lease", b"journal", b"..", b".", b"/", b"a//b", b"%RETRY%group", b"~", b"~+", b"~2f"]
    ),
).map(lambda raw: raw.decode("utf-8", "surrogateescape"))
NUMBERS = st.integers(0, 10**10 - 1)
OFFSETS = st.integers(0, 2**63 - 1)
IDS = st.builds(
    keys.ObjectId, NUMBERS, st.integers(0, 2**32 - 1).map(lambda number: f"{number:08x}"), NUMBERS
)
PREFIXES = st.sampled_from(["", keys.broker_prefix("DefaultCluster", "broker-a")])
QUEUES = st.builds(MessageQueue, NAMES, NUMBERS)


@given(NAMES)
@example("x" * 255)
@example("\udcff" * 255)
@example("\n" * 80)
def test_any_name_becomes_segments_that_servers_bear_and_comes_back(name: str):
    text = keys.escape_name(name)
    check_key(text)
    assert all(len(segment) <= KEY_SEGMENT_BYTES_MAX - 9 for segment in text.split("/"))
    assert keys.unescape_name(text) == name


@given(st.text(alphabet="aZ0~+2fF/._-%|é", max_size=40))
def test_what_is_unescaped_was_made_by_escaping(text: str):
    try:
        name = keys.unescape_name(text)
    except ValueError:
        return
    assert text in {keys.escape_name(name), keys.escape_name(name, escapes_case=True)}


@given(NAMES)
@example("Orders")
@example("Ä" * 120 + "A")
def test_where_case_counts_for_nothing_names_stay_apart_and_come_back(name: str):
    text = keys.escape_name(name, escapes_case=True)
    check_key(text)
    assert text == text.lower()
    assert keys.unescape_name(text) == name


@given(NAMES, NAMES)
def test_no_name_is_the_folder_of_another(one: str, other: str):
    if one != other:
        assert not (keys.escape_name(other) + "/").startswith(keys.escape_name(one) + "/")


@given(PREFIXES, QUEUES, NUMBERS, OFFSETS, IDS)
def test_data_keys_pass_the_rules_of_all_servers_and_round_trip(
    prefix: str, queue: MessageQueue, incarnation: int, begins: int, made: keys.ObjectId
):
    plain, topic = keys.escape_name(queue.topic), queue.topic
    level = begins % (keys.LEVEL_MAX + 1)
    at, whose = QueueOffset(begins), (topic, queue.queue_id, incarnation)
    key = keys.bundle_key(prefix, level, begins, made)
    check_key(key)
    said = keys.DataKey("bundle", made, level=level, begins=begins)
    assert keys.parse_data_key(prefix, key) == said
    for escapes in (False, True):
        by = {"escapes_case": escapes}
        more = {"begins": begins, "escapes_case": keys.escape_name(topic, **by) != plain}
        built = {
            keys.queue_bundle_key(prefix, queue, incarnation, at, made, **by): keys.DataKey(
                "queue", made, *whose, **more
            ),
            keys.topic_bundle_key(prefix, topic, level, begins, made, **by): keys.DataKey(
                "topic", made, topic, level=level, **more
            ),
            keys.quarantine_key(prefix, queue, incarnation, at, made, **by): keys.DataKey(
                "quarantine", made, *whose, **more
            ),
        }
        for key, said in built.items():
            check_key(key)
            assert keys.parse_data_key(prefix, key) == said
            if said.kind == "queue":
                assert key.startswith(keys.queue_prefix(prefix, queue, **by))
            assert said.queue == (None if said.kind == "topic" else queue)


@given(st.lists(QUEUES, min_size=1, max_size=4), NUMBERS, OFFSETS, IDS)
def test_no_key_of_a_tier_is_another_key_plus_a_slash(
    queues: list[MessageQueue], incarnation: int, begins: int, made: keys.ObjectId
):
    prefix = keys.broker_prefix("lease", "journal")
    every = {prefix + keys.LEASE, keys.entry_key(prefix, 7), keys.checkpoint_key(prefix, 7)}
    every.add(keys.bundle_key(prefix, 0, begins, made))
    for queue in queues:
        every |= {
            keys.queue_bundle_key(prefix, queue, incarnation, QueueOffset(begins), made),
            keys.topic_bundle_key(prefix, queue.topic, 1, begins, made),
            keys.quarantine_key(prefix, queue, incarnation, QueueOffset(begins), made),
        }
    for key in every:
        folders = {key[:index] for index, letter in enumerate(key) if letter == "/"}
        assert not folders & every


def test_longest_topic_leaves_the_promised_room_for_the_prefix():
    queue = MessageQueue("\udcff" * 255, 0)
    made = keys.ObjectId(0, "0badcafe", 0)
    prefix = "p" * (keys.PREFIX_BYTES_MAX - 1) + "/"
    check_key(keys.quarantine_key(prefix, queue, 0, QueueOffset(0), made))


@given(PREFIXES, st.integers(1, 10**20 - 2))
def test_journal_keys_round_trip_and_sort_by_number(prefix: str, number: int):
    entry, checkpoint = keys.entry_key(prefix, number), keys.checkpoint_key(prefix, number)
    check_key(entry)
    check_key(checkpoint)
    assert keys.parse_journal_key(prefix, entry) == (number, False)
    assert keys.parse_journal_key(prefix, checkpoint) == (number, True)
    assert keys.parse_shard_key(prefix, keys.shard_key(prefix, number, "0" * 16)) == number
    assert keys.parse_shard_key(prefix, entry) is None
    assert (
        keys.entry_key(prefix, number - 1) < entry < checkpoint < keys.entry_key(prefix, number + 1)
    )


@pytest.mark.parametrize(
    "key",
    [
        "journal/1", "journal/" + "1" * 21, "journal/" + "x" * 20, "journal/" + "1" * 20 + ".tmp",
        "lease", "journal/" + "\N{ARABIC-INDIC DIGIT ONE}" * 20,
    ],
)  # fmt: skip
def test_strange_journal_keys_are_not_taken_for_entries(key: str):
    assert keys.parse_journal_key("", key) is None


GOOD = keys.queue_bundle_key(
    "", MessageQueue("t", 1), 2, QueueOffset(3), keys.ObjectId(4, "0badcafe", 5)
)
SHARED = keys.bundle_key("", 1, 3, keys.ObjectId(4, "0badcafe", 5))


@pytest.mark.parametrize(
    "key",
    [
        "", "queue", "queue/t", "lease", "journal/" + "0" * 20,
        GOOD.replace("queue/", "Queue/", 1),
        SHARED.replace("bundle/1/", "bundle/12/"),
        SHARED.replace("bundle/1/", "bundle/01/"),
        SHARED.replace("bundle/1/", "bundle/-1/"),
        SHARED.replace("bundle/1/", "bundle/x/"),
        SHARED.replace("bundle/1/", "bundle/"),
        SHARED.replace("bundle/1/", "topic/t/12/"),
        GOOD.replace("0badcafe", "0BADCAFE"),
        GOOD.replace("0badcafe", "0badcaf"),
        GOOD.replace("/0000000001/", "/1/"),
        GOOD.replace("/0000000001/", "/ 000000001/"),
        GOOD.replace("/00000000000000000003-", "/3-"),
        GOOD + "x", GOOD + "-1", GOOD + "/", "/" + GOOD,
        GOOD.replace("queue/t/", "queue//"),
        GOOD.replace("queue/t/", "queue/~2F/"),
    ],
)  # fmt: skip
def test_strange_data_keys_are_not_taken_for_ours(key: str):
    assert keys.parse_data_key("", GOOD) is not None
    assert keys.parse_data_key("", SHARED) is not None
    assert keys.parse_data_key("", key) is None
    assert keys.parse_data_key("other/", GOOD) is None


def test_layout_of_keys_is_fixed():
    prefix = keys.broker_prefix("DefaultCluster", "broker-a")
    made = keys.ObjectId(3, "0badcafe", 17)
    queue = MessageQueue("%RETRY%a.b", 2)
    assert prefix == "212d6b50_DefaultCluster/broker-a/"
    assert keys.entry_key("p/", 12) == "p/journal/00000000000000000012"
    assert keys.checkpoint_key("p/", 12) == "p/journal/00000000000000000012.checkpoint"
    assert keys.queue_bundle_key("p/", queue, 1, QueueOffset(4096), made) == (
        "p/queue/%RETRY%a~2eb/0000000002/0000000001/00000000000000004096-0000000003-0badcafe-0000000017"
    )
    assert keys.bundle_key("p/", 0, 1_700_000_000_000, made) == (
        "p/bundle/0/00000001700000000000-0000000003-0badcafe-0000000017"
    )
    assert keys.topic_bundle_key("p/", queue.topic, 2, 1_700_000_000_000, made) == (
        "p/topic/%RETRY%a~2eb/2/00000001700000000000-0000000003-0badcafe-0000000017"
    )
    assert keys.quarantine_key("p/", queue, 1, QueueOffset(9), made) == (
        "p/quarantine/%RETRY%a~2eb/0000000002/0000000001/00000000000000000009-0000000003-0badcafe-0000000017"
    )
