"""Access control: rules of 4.9 and 5.x, their files, and what a mount refuses by them."""

from __future__ import annotations

import ipaddress
import json
import signal
import traceback
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.captures import unpack
from support.command_line import here
from support.mounts import Client, MountProcess, mounted

from tiered.errors import InvalidError
from tiered.format.remoting import Command
from tiered.mount import acl, protocol
from tiered.mount.acl import AddressPattern, Need, Reason
from tiered.mount.acl_files import AccessGuard, read_rules
from tiered.mount.protocol import BY_CODE, Code, RefusalError, Treatment

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tiered.mount.acl import AccessRules

HERE = ipaddress.ip_address("127.0.0.1")
PLAIN = """
globalWhiteRemoteAddresses:
- 10.10.103.*
accounts:
- accessKey: reader-key
  secretKey: secret-of-reader
  defaultTopicPerm: DENY
  defaultGroupPerm: SUB
  topicPerms:
  - orders=SUB
  - closed=DENY
  - sink=PUB
  groupPerms:
  - shut=DENY
- accessKey: admin-key
  secretKey: secret-of-admin
  whiteRemoteAddress: 192.168.0.7
  admin: true
"""
AUTH = """
users:
- {username: reader, password: secret-of-reader, userType: Normal, userStatus: enable}
- {username: root, password: secret-of-root, userType: Super}
- {username: gone, password: secret-of-gone, userStatus: disable}
acls:
- subject: User:reader
  policies:
  - policyType: Custom
    entries:
    - {resource: "Topic:ord*", actions: [Sub, Get], decision: Allow}
    - {resource: "Topic:order-secret", actions: [All], decision: Deny}
    - {resource: "Group:*", actions: [Sub, Get, Update], sourceIps: [127.0.0.0/8], decision: Allow}
"""
SECRETS = ("secret-of-reader", "secret-of-admin", "secret-of-root", "secret-of-gone")


def rules(text: str, folder: Path) -> AccessRules:
    path = folder / "rules.yml"
    path.write_text(text)
    return read_rules(path, "cluster-a")


def request(
    code: int, key: str = "", secret: str = "", body: bytes = b"", **fields: str
) -> Command:
    if key:
        fields[acl.ACCESS_KEY] = key
        fields[acl.SIGNATURE] = acl.sign(fields, [body], secret)
    return Command(code, fields=fields, body=(body,) if body else ())


def pull(topic: str, group: str, *signed: str) -> Command:
    return request(protocol.PULL_MESSAGE, *signed, topic=topic, consumerGroup=group)


READER = ("reader-key", "secret-of-reader")
ADMIN = ("admin-key", "secret-of-admin")
PLAIN_CASES: list[tuple[Command, str, str]] = [
    (pull("orders", "g", *READER), "127.0.0.1", ""),
    (pull("%RETRY%g", "g", *READER), "127.0.0.1", ""),
    (pull("orders", "shut", *READER), "127.0.0.1", "No default permission for group:shut"),
    (pull("%RETRY%shut", "g", *READER), "127.0.0.1", "No default permission for group:shut"),
    (pull("sink", "g", *READER), "127.0.0.1", "No default permission for topic:sink"),
    (pull("closed", "g", *READER), "127.0.0.1", "No default permission for topic:closed"),
    (pull("other", "g", *READER), "127.0.0.1", "No default permission for topic:other"),
    (pull("orders", "g", "reader-key", "wrong-secret"), "127.0.0.1", "Check signature failed for accessKey=reader-key"),
    (pull("orders", "g", "nobody-key", "wrong-secret"), "127.0.0.1", "No acl config for nobody-key"),
    (pull("orders", "g"), "127.0.0.1", "No accessKey is configured"),
    (pull("other", "g"), "10.10.103.9", ""),
    (pull("other", "g", "admin-key", "wrong-secret"), "192.168.0.7", ""),
    (pull("other", "g", *ADMIN), "127.0.0.1", ""),
    (request(17, *READER), "127.0.0.1", "Need admin permission for request code=17, but accessKey=reader-key is not"),
    (request(9_999, *READER), "127.0.0.1", "Need admin permission for request code=9999, but accessKey=reader-key is not"),
    (request(9_999, *ADMIN), "127.0.0.1", ""),
    (request(protocol.GET_BROKER_CONFIG, *READER), "127.0.0.1", ""),
    (request(protocol.VIEW_MESSAGE_BY_ID, *READER, offset="7"), "127.0.0.1", "Need admin permission for request code=33"),
    (request(protocol.VIEW_MESSAGE_BY_ID, *READER, offset="7", topic="orders"), "127.0.0.1", ""),
]  # fmt: skip


@pytest.mark.parametrize(("asked", "ip", "refused"), PLAIN_CASES)
def test_plain_rules_say_what_a_broker_of_4_9_says(
    asked: Command, ip: str, refused: str, tmp_path: Path
):
    judged(rules(PLAIN, tmp_path), asked, ip, Code.SYSTEM_ERROR, refused)


def judged(
    known: AccessRules, asked: Command, ip: str, code: Code, refused: str
) -> RefusalError | None:
    if not refused:
        known.judge(asked, ipaddress.ip_address(ip))
        return None
    with pytest.raises(RefusalError) as found:
        known.judge(asked, ipaddress.ip_address(ip))
    assert found.value.code == code
    assert refused in found.value.remark
    return found.value


USER = ("reader", "secret-of-reader")
AUTH_CASES: list[tuple[Command, str, str]] = [
    (pull("orders", "g", *USER), "127.0.0.1", ""),
    (pull("%RETRY%g", "g", *USER), "127.0.0.1", ""),
    (pull("orders", "g", *USER), "10.0.0.1",
     "User:reader has no permission to access Group:g from 10.0.0.1, no matched policies."),
    (pull("order-secret", "g", *USER), "127.0.0.1",
     "User:reader has no permission to access Topic:order-secret from 127.0.0.1, the decision is deny."),
    (pull("other", "g", *USER), "127.0.0.1", "has no permission to access Topic:other from 127.0.0.1, no matched policies."),
    (pull("orders", "g", "reader", "wrong"), "127.0.0.1", "check signature failed."),
    (pull("orders", "g", "nobody", "wrong"), "127.0.0.1", "User:nobody is not found."),
    (pull("orders", "g", "gone", "secret-of-gone"), "127.0.0.1", "User:gone is disabled."),
    (pull("orders", "g"), "127.0.0.1", "username cannot be null."),
    (pull("other", "g", "root", "secret-of-root"), "127.0.0.1", ""),
    (request(protocol.GET_MAX_OFFSET, *USER, topic="orders"), "127.0.0.1", ""),
    (request(protocol.RESET_CONSUMER_OFFSET, *USER, topic="orders", group="g"), "127.0.0.1", "access Topic:orders"),
    (request(9_999, *USER), "127.0.0.1", "User:reader has no permission for request code=9999"),
    (request(9_999, "root", "secret-of-root"), "127.0.0.1", ""),
    (request(protocol.GET_ALL_PRODUCER_INFO, *USER), "127.0.0.1", "access Cluster:cluster-a"),
]  # fmt: skip


@pytest.mark.parametrize(("asked", "ip", "refused"), AUTH_CASES)
def test_rules_of_5_say_what_a_broker_of_5_says(
    asked: Command, ip: str, refused: str, tmp_path: Path
):
    judged(rules(AUTH, tmp_path), asked, ip, Code.NO_PERMISSION, refused)


def test_each_request_that_is_served_has_a_rule():
    """A code without one is for administrators: none is left open by being forgotten."""
    known = {*acl._FIELDS, *acl._BODIES, *acl._CLUSTER, *acl._SIGNED}
    served = {one.code for one in BY_CODE.values() if one.answer is Treatment.SERVED}
    assert served <= known


def test_what_a_consumer_sends_to_its_retry_topic_needs_the_right_to_its_group():
    for code, field in ((protocol.SEND_MESSAGE, "topic"), (protocol.SEND_MESSAGE_V2, "b")):
        asked = Command(code, fields={field: "%RETRY%payers"})
        assert acl.needs(asked, "c") == [acl.Need(acl.GROUP, "payers", frozenset({"sub"}))]


def heartbeat(*topics: str) -> bytes:
    subscriptions = [{"topic": topic, "subString": "*"} for topic in topics]
    return json.dumps(
        {
            "clientID": "c",
            "consumerDataSet": [{"groupName": "g", "subscriptionDataSet": subscriptions}],
        }
    ).encode()


@pytest.mark.parametrize("text", [PLAIN, AUTH])
def test_what_a_body_names_counts(text: str, tmp_path: Path):
    known, signed = rules(text, tmp_path), READER if text is PLAIN else USER
    code = Code.SYSTEM_ERROR if text is PLAIN else Code.NO_PERMISSION
    asked = request(protocol.HEART_BEAT, *signed, body=heartbeat("orders", "%RETRY%g"))
    judged(known, asked, "127.0.0.1", code, "")
    asked = request(protocol.HEART_BEAT, *signed, body=heartbeat("orders", "other"))
    judged(known, asked, "127.0.0.1", code, ":other")


# -- signatures -------------------------------------------------------------------------------------


@given(
    st.dictionaries(st.text(max_size=8), st.text(max_size=8), max_size=4),
    st.binary(max_size=40),
    st.integers(0, 1 << 16),
)
def test_a_change_of_any_value_or_of_the_body_is_found(
    fields: dict[str, str], body: bytes, at: int
):
    fields = {name: value for name, value in fields.items() if name != acl.SIGNATURE}
    asked = request(11, "key", "secret", body, **fields)
    assert acl.is_signed(asked, "secret")
    assert not acl.is_signed(asked, "Secret")
    assert not acl.is_signed(asked, "")
    changed = dict(asked.fields)
    name = sorted(changed)[at % len(changed)]
    changed[name] += "x"
    assert not acl.is_signed(Command(11, fields=changed, body=asked.body), "secret")
    assert not acl.is_signed(Command(11, fields=asked.fields, body=(body + b"x",)), "secret")


# -- addresses --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "inside", "outside"),
    [
        ("192.168.1.7", "192.168.1.7", "192.168.1.8"),
        ("192.168.*.*", "192.168.77.1", "192.169.0.1"),
        ("192.168.3-9.*", "192.168.9.1", "192.168.10.1"),
        ("192.168.1.{2,3}", "192.168.1.3", "192.168.1.4"),
        ("1.2.3.4,1.2.3.5", "1.2.3.5", "1.2.3.6"),
        ("2::ac5:78:1-200:*", "2::ac5:78:1ff:9", "2::ac5:78:201:9"),
        ("1050::0005:0600:300c:{3261,3262}", "1050::5:600:300c:3262", "1050::5:600:300c:3263"),
        ("fe80::1", "fe80::1", "fe80::2"),
        ("*.*.*.*", "1.2.3.4", None),
        ("*", "fe80::2", None),
        ("", None, "1.2.3.4"),
    ],
)
def test_a_pattern_of_addresses(text: str, inside: str | None, outside: str | None):
    pattern = AddressPattern.parse(text)
    for word, wanted in ((inside, True), (outside, False)):
        if word is not None:
            assert pattern.matches(ipaddress.ip_address(word)) is wanted


@pytest.mark.parametrize(
    "text", ["1.2.3", "1.2.3.256", "1.2.3.9-4", "x", "1.2.*", "1:2", "1.2.3.{"]
)
def test_what_is_no_pattern_of_addresses(text: str):
    with pytest.raises(ValueError):
        AddressPattern.parse(text)


@pytest.mark.parametrize("peer", ["1.2.3.4:5", "[::ffff:1.2.3.4]:5"])
def test_the_address_of_a_client(peer: str):
    assert acl.ip_of(peer) == ipaddress.ip_address("1.2.3.4")


# -- which entry counts -----------------------------------------------------------------------------

NAMES = st.sampled_from(["a", "ab", "abc", "b"])
WRITTEN = st.sampled_from(["a", "ab", "abc", "a*", "ab*", "*"])


@st.composite
def entry_lists(draw: st.DrawFn) -> list[acl.AclEntry]:
    """Each resource once, as in a policy."""
    kinds = st.sampled_from([acl.TOPIC, acl.GROUP, acl.ANY])
    resources = draw(
        st.lists(st.tuples(kinds, WRITTEN), max_size=6, unique_by=lambda one: one[:1] if one[0] == "*" else one)
    )  # fmt: skip
    return [
        acl.AclEntry(
            kind,
            "*" if kind == acl.ANY else name,
            draw(st.sets(st.sampled_from(["sub", "get", "all"]), min_size=1).map(frozenset)),
            draw(st.booleans()),
        )
        for kind, name in resources
    ]


@given(entry_lists(), NAMES, st.randoms())
def test_the_most_specific_entry_that_matches_decides_whatever_their_order(
    entries: list[acl.AclEntry], name: str, rng: Any
):
    need = Need(acl.TOPIC, name, frozenset({"sub"}))
    of_topics = {
        one.name: one for one in entries if one.kind == acl.TOPIC and one.actions & {"sub", "all"}
    }
    everything = [one for one in entries if one.kind == acl.ANY and one.actions & {"sub", "all"}]
    steps = [name, *(name[:end] + "*" for end in range(len(name), -1, -1))]
    found = [of_topics[step] for step in steps if step in of_topics]
    wanted = next(iter([*found, *everything]), None)
    shuffled = list(entries)
    rng.shuffle(shuffled)
    assert acl.UserEntries(shuffled).decide(need, HERE) == wanted


def test_the_second_list_is_asked_where_the_first_has_nothing():
    allow = acl.AclEntry(acl.TOPIC, "a", frozenset({"sub"}), is_allowed=True)
    deny = acl.AclEntry(acl.ANY, "*", frozenset({"all"}), is_allowed=False)
    need = Need(acl.TOPIC, "a", frozenset({"sub"}))
    assert acl.UserEntries((deny,), (allow,)).decide(need, HERE) == deny
    assert acl.UserEntries((), (allow,)).decide(need, HERE) == allow
    assert acl.UserEntries().decide(need, HERE) is None


# -- files ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "no rules are in it (F)"),
        ("accounts:\n- accessKey: [hush-hush\n", "it is not YAML (F:3)"),
        ("accounts:\n- secretKey: *hush-hush\n", "it is not YAML (F:2)"),
        ("accounts:\n- accessKey: some-key\n", "the account has no secretKey (F:2, accounts[0])"),
        ("accounts:\n- {accessKey: some-key, secretKey: hush}\n",
         "7 characters at least are wanted (F:2, accounts[0].secretKey)"),
        ("accounts:\n- {accessKey: some-key, secretKey: 0x12345678}\n", "put it in quotes (F:2, accounts[0].secretKey)"),
        ("accounts:\n- {accessKey: k1234567, secretKey: hush-hush}\n- {accessKey: k1234567, secretKey: hush-hush}\n",
         "another account has this access key, too (F:3, accounts[1])"),
        ("accounts:\n- accessKey: some-key\n  secretKey: hush-hush\n  admin: hush\n",
         "true or false is wanted (F:4, accounts[0].admin)"),
        ("accounts:\n- accessKey: some-key\n  secretKey: hush-hush\n  topicPerms: [a]\n",
         "NAME=PERMISSION is wanted (F:4, accounts[0].topicPerms[0])"),
        ("accounts: 7\n", "a list is wanted (F:1, accounts)"),
        ("accounts: []\naccounts: []\n", "the field stands twice (F:2, accounts)"),
        ("globalWhiteRemoteAddresses: [hush]\n",
         "a pattern of addresses is wanted, as 10.0.0.* or 10.0.0.{1,2} (F:1, globalWhiteRemoteAddresses[0])"),
        ("users:\n- username: u\n", "the user has no password (F:2, users[0])"),
        ("users:\n- {username: u, password: hush, userType: hush}\n", "Normal or Super is wanted (F:2, users[0].userType)"),
        ("acls:\n- subject: Role:u\n", "User:NAME is wanted (F:2, acls[0].subject)"),
        ("acls:\n- subject: User:u\n  policies:\n  - entries:\n    - {resource: 'Topic:a*b', actions: [Sub], decision: x}\n",
         "is wanted, or NAME* or * (F:5, acls[0].policies[0].entries[0].resource)"),
        ("acls:\n- subject: User:u\n  policies:\n  - entries:\n    - {resource: '*', actions: [Hush], decision: Allow}\n",
         "actions are wanted: all, any"),
        ("users: []\naccounts: []\n", "rules of different forms are in it"),
        ("accessKey: some-key\nsecretKey: hush-hush\n",
         "this is what a client signs with, and not the rules of a broker (F:1)"),
        ("some-key: hush-hush\n", "there are secrets alone in it, and no rules that a broker left in the tier (F:1)"),
        ("? [hush]\n: hush\n", "a name is wanted before each colon (F:1)"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_file_is_told_by_line_and_field_and_never_by_value(
    text: str, said: str, tmp_path: Path
):
    path = tmp_path / "plain_acl.yml"
    path.write_text(text)
    if "different" in said:
        (tmp_path / "other.yml").write_text("accounts: []\n")
        path = tmp_path
        (tmp_path / "plain_acl.yml").write_text("users: []\n")
    with pytest.raises(InvalidError) as found:
        read_rules(path, "c")
    assert said.replace("(F", f"({path}") in str(found.value)
    shown = "".join(traceback.format_exception(found.value))  # as --debug shows it
    assert "hush" not in shown.lower()


def test_a_directory_is_all_of_its_files_but_for_that_of_the_tools(tmp_path: Path):
    (tmp_path / "acl").mkdir()
    (tmp_path / "acl" / "more.yaml").write_text(
        "accounts: [{accessKey: key-two, secretKey: hush-hush}]"
    )
    (tmp_path / "plain_acl.yml").write_text(
        "accounts: [{accessKey: key-one, secretKey: hush-hush}]"
    )
    (tmp_path / "tools.yml").write_text("accessKey: tool-key\nsecretKey: hush-hush\n")
    assert read_rules(tmp_path, "c").keys() == {"key-one", "key-two"}


@pytest.mark.parametrize("text", [PLAIN, AUTH])
def test_rules_without_secrets_and_secrets_without_rules_make_the_same_rules(
    text: str, tmp_path: Path
):
    whole = rules(text, tmp_path)
    kept = whole.document()
    assert not [one for one in SECRETS if one in json.dumps(kept)]
    accounts = getattr(whole, "accounts", None) or whole.users  # type: ignore[attr-defined]
    secrets = tmp_path / "secrets.yml"
    secrets.write_text("".join(f"{key}: {one.secret}\n" for key, one in accounts.items()))
    assert read_rules(secrets, "cluster-a", json.loads(json.dumps(kept))) == whole
    assert not [one for one in SECRETS if one in repr(whole)]


def test_who_has_no_secret_is_refused_though_it_has_rules(tmp_path: Path):
    kept = rules(PLAIN, tmp_path).document()
    (tmp_path / "secrets.yml").write_text("admin-key: secret-of-admin\n")
    known = read_rules(tmp_path / "secrets.yml", "c", kept)
    judged(known, pull("orders", "g", *READER), "127.0.0.1", Code.SYSTEM_ERROR, "signature")
    judged(known, pull("orders", "g", "reader-key", ""), "127.0.0.1", Code.SYSTEM_ERROR, "signature")  # fmt: skip


def test_a_change_is_taken_over_when_it_stays_and_a_bad_one_never(tmp_path: Path):
    path = tmp_path / "plain_acl.yml"
    path.write_text(PLAIN)
    guard = AccessGuard(path, "c", None)
    asked = pull("other", "g", *READER)
    with pytest.raises(RefusalError):
        guard.check(asked, "127.0.0.1:1")
    assert guard.refused == {Reason.PERMISSION: 1}
    path.write_text(PLAIN.replace("defaultTopicPerm: DENY", "defaultTopicPerm: SUB"))
    guard.look()
    with pytest.raises(RefusalError):
        guard.check(asked, "127.0.0.1:1")
    guard.look()
    guard.check(asked, "127.0.0.1:1")
    for bad in ("", "accounts: [{"):
        path.write_text(bad)
        guard.look()
        guard.look()
        assert str(path) in guard.trouble
        guard.check(asked, "127.0.0.1:1")
    path.unlink()
    guard.look()
    guard.look()
    assert "cannot be read" in guard.trouble
    guard.check(asked, "127.0.0.1:1")
    path.write_text(PLAIN)
    guard.look()
    guard.look()
    assert not guard.trouble
    with pytest.raises(RefusalError):
        guard.check(asked, "127.0.0.1:1")


@pytest.mark.parametrize(
    "text", [PLAIN, pytest.param(AUTH, marks=pytest.mark.slow)], ids=["4.9", "5.x"]
)
def test_no_secret_is_in_the_tier_a_log_a_metric_or_an_error(text: str, tmp_path: Path):
    """Rules go with the tier, secrets are given to the mount, and both together are the broker's."""
    path, secrets = tmp_path / "rules.yml", tmp_path / "secrets.yml"
    path.write_text(text)
    store, url = unpack("s01-basic", tmp_path), f"file://{tmp_path}/tier"
    command = ("attach", store, "--to", url, "--decommission", "--acl-from", path)
    told = [here(*command).good(), here(*command).good()]  # again, which changes nothing
    keys = [USER, ("root", "secret-of-root")] if text is AUTH else [READER, ADMIN]
    secrets.write_text("".join(f"{key}: {secret}\n" for key, secret in keys))
    refused = here("mount", url, "--listen", "127.0.0.1:0")
    assert (refused.code, "--no-acl" in refused.err) == (2, True), refused
    path.write_text(text.replace("secret-of-reader", "secret-of-reader: ["))
    broken = here("mount", url, "--listen", "127.0.0.1:0", "--acl", path, "--debug")
    assert broken.code == 2
    options = ("--listen", "127.0.0.1:0", "--acl", secrets, "--debug")
    with MountProcess(url, tmp_path / "log", *options) as mount:
        for key, secret in ((keys[0]), (keys[0][0], "wrong-secret"), ("", "")):
            with Client(mount.address, access_key=key, secret=secret) as client:
                answer = client.pull("orders", 0, 0)
                assert (answer.code == Code.SUCCESS) is (secret == keys[0][1]), answer.remark
        _, document = mount.end(signal.SIGTERM)
        said = [mount.text, json.dumps(document)]
    said += [str(one) for ran in (*told, refused, broken) for one in (ran.out, ran.err)]
    objects = [one.read_bytes() for one in (tmp_path / "tier").rglob("*") if one.is_file()]
    kept = [one for one in objects if keys[0][0].encode() in one]
    assert len(kept) == 1  # the rules
    for one in (*objects, *(line.encode() for line in said)):
        assert b"secret-of" not in one


# -- a mount ----------------------------------------------------------------------------------------


def test_a_mount_asks_who_its_clients_are(
    captured_tier: Callable[[str], tuple[Path, str]], tmp_path: Path
):
    _, url = captured_tier("s01-basic")
    path = tmp_path / "plain_acl.yml"
    path.write_text(PLAIN)
    with mounted(url, acl=path, keeps_offsets=False) as served:
        key, secret = READER
        with served.client(access_key=key, secret=secret) as client:
            assert client.pull("orders", 0, 0).code == Code.SUCCESS
            assert client.heartbeat("c", "g", "orders").code == Code.SUCCESS
            assert "topic:payments" in client.heartbeat("c", "g", "payments").remark
            assert client.ask(17).code == Code.SYSTEM_ERROR
        with served.client() as client:
            found = client.pull("orders", 0, 0)
            assert found.code == Code.SYSTEM_ERROR
            assert found.remark.endswith("AclException: No accessKey is configured")
        samples = {(one.name, *one.labels.values()): one.value for one in served.mount.samples()}
    name = "tiered_mount_denied_requests_total"
    assert (samples[name, "unsigned"], samples[name, "permission"]) == (1, 2)


def test_a_message_by_its_id_is_searched_in_the_topic_that_was_asked_for_alone(
    captured_tier: Callable[[str], tuple[Path, str]], tmp_path: Path
):
    """Else naming a topic that one may read, and that is not there, would open all others."""
    _, url = captured_tier("s01-basic")
    with mounted(url, keeps_offsets=False) as served, served.client() as client:
        found = client.ask(protocol.VIEW_MESSAGE_BY_ID, offset=0, topic="nowhere")
        assert found.code != Code.SUCCESS
