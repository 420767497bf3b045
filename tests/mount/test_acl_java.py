"""Access control beside the real thing: RocketMQ's broker and validator judge the same requests, and real clients ask."""

from __future__ import annotations

import base64
import json
import random
import re
import subprocess
import urllib.request
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import pytest
from support import captures, oracle
from support.mounts import Client, MountProcess, mounted, tier_of
from support.oracle import Consumer
from support.waiting import until

from tiered.format.remoting import Command, Form
from tiered.mount import acl, protocol
from tiered.mount.acl_files import auth_rules, kept_value, read_rules
from tiered.mount.protocol import Code, RefusalError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


pytestmark = [pytest.mark.java, oracle.needs_java, pytest.mark.timeout(900)]
ROOT = {"username": "root-user", "password": "secret-of-root"}
AUTH = "org.apache.rocketmq.auth"
CREATE_USER, CREATE_ACL, LIST_USER, LIST_ACL = 3001, 3006, 3005, 3010


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[oracle.Broker]:
    """A broker of 5.5 that asks who its clients are."""
    folder = tmp_path_factory.mktemp("guarded")
    inner = {"accessKey": ROOT["username"], "secretKey": ROOT["password"]}
    settings = {
        "authenticationEnabled": "true",
        "authorizationEnabled": "true",
        "authConfigPath": str(folder / "auth"),
        "initAuthenticationUser": json.dumps(ROOT),
        "innerClientAuthenticationCredentials": json.dumps(inner),
        "authenticationProvider": f"{AUTH}.authentication.provider.DefaultAuthenticationProvider",
        "authenticationMetadataProvider": f"{AUTH}.authentication.provider.LocalAuthenticationMetadataProvider",
        "authorizationProvider": f"{AUTH}.authorization.provider.DefaultAuthorizationProvider",
        "authorizationMetadataProvider": f"{AUTH}.authorization.provider.LocalAuthorizationMetadataProvider",
    }
    with oracle.Broker(folder, folder / "store", **settings) as broker:
        broker.start()
        yield broker


@pytest.fixture(scope="module")
def guarded_broker(guarded: oracle.Broker) -> str:
    """Its address."""
    return f"127.0.0.1:{guarded._port}"


def root(address: str) -> Client:
    return Client(address, Form.JSON, access_key=ROOT["username"], secret=ROOT["password"])


FIELDS: dict[str, object] = {
    "queueId": 0, "queueOffset": 0, "maxMsgNums": 1, "sysFlag": 0, "commitOffset": 0, "suspendTimeoutMillis": 0,
    "subVersion": 0, "subscription": "*", "timestamp": 0, "clientID": "c", "clientId": "c", "key": "k", "maxNum": 1,
    "beginTimestamp": 0, "endTimestamp": 0, "index": 0, "count": 1, "isForce": "true", "offset": 0,
    "jstackEnable": "false", "extraInfo": "x", "invisibleTime": 1000, "pollTime": 0, "bornTime": 0, "initMode": 0,
    "msgId": "m", "brokerName": "b", "delayLevel": 0, "isOrder": "false", "topics": "x", "cluster": "cluster-a",
    "defaultTopic": "TBW102", "readQueueNums": 1, "writeQueueNums": 1, "perm": 6, "topicFilterType": "SINGLE_TAG",
    "order": "false",
}  # fmt: skip
"""What any of the requests wants besides topics and groups; a broker reads no others."""
NAMES = ("a", "ab", "abc", "b", "order", "order-new")
WRITTEN = ("a", "ab", "a*", "ab*", "order*", "b", "*")
ACTIONS = ("All", "Pub", "Sub", "Get", "Create", "Update", "List")
QUEUE = {"brokerName": "b", "queueId": 0}
IPS = ([], [], ["127.0.0.1"], ["127.0.0.0/8", "1.2.3.4"], ["10.0.0.0/8"], ["192.168.1.1"])
WORLDS, ASKED = 40, 60
STRICTER = {protocol.LITE_PULL_MESSAGE, protocol.SET_MESSAGE_REQUEST_MODE, 200_151}
"""Brokers forget to ask of whom these are."""
SENDS = {protocol.SEND_MESSAGE, protocol.SEND_MESSAGE_V2}
"""A mount takes only what consumers send back, by the rights of a consumer."""


def random_acl(name: str, rng: random.Random) -> dict[str, Any]:
    """Entries as `mqadmin createAcl` makes them: each resource once in a policy."""
    policies = []
    for policy in rng.sample(["Custom", "Default"], rng.choice([1, 1, 2])):
        kinds = ["Topic", "Topic", "Group", "Cluster", "*"]
        written = {
            kind if kind == "*" else f"{kind}:{rng.choice((*WRITTEN, 'cluster-a'))}"
            for kind in rng.choices(kinds, k=6)
        }
        entries = [
            {
                "resource": resource,
                "actions": rng.sample(ACTIONS, rng.choice([1, 2, 3])),
                "sourceIps": rng.choice(IPS),
                "decision": rng.choice(["Allow", "Allow", "Deny"]),
            }
            for resource in sorted(written)
        ]
        policies.append({"policyType": policy, "entries": entries})
    return {"subject": f"User:{name}", "policies": policies}


def random_request(rng: random.Random) -> tuple[int, object, dict[str, object]]:
    """Code, body and fields of one that both know."""
    topic, group = rng.choice(NAMES), rng.choice(NAMES)
    known = {*acl._FIELDS, *acl._BODIES, *acl._CLUSTER, *acl._SIGNED} - STRICTER - SENDS
    code = rng.choice(sorted(known))
    others = [{"topic": name} for name in (*rng.sample(NAMES, 2), f"%RETRY%{group}")]
    bodies = {
        protocol.HEART_BEAT: {
            "clientID": "c",
            "consumerDataSet": [{"groupName": group, "subscriptionDataSet": others}],
            "producerDataSet": [],
        },
        protocol.LOCK_BATCH_MQ: {"consumerGroup": group, "clientId": "c", "mqSet": [QUEUE | {"topic": topic}]},
        protocol.QUERY_ASSIGNMENT: {"topic": topic, "consumerGroup": group, "clientId": "c"},
        protocol.CHECK_CLIENT_CONFIG: {"clientId": "c", "group": group},
    }  # fmt: skip
    bodies[protocol.UNLOCK_BATCH_MQ] = bodies[protocol.LOCK_BATCH_MQ]
    if code == protocol.GET_ROUTEINFO_BY_TOPIC and rng.random() < 0.3:
        topic = f"%RETRY%{topic}"
    fields = FIELDS | {"topic": topic, "consumerGroup": group, "group": group}
    return code, bodies.get(code), fields


def judged(rules: acl.AccessRules, request: Command) -> str:
    """Why it is refused; empty: it is not."""
    try:
        rules.judge(request, acl.ip_of("127.0.0.1:1"))
    except RefusalError as error:
        return error.remark
    return ""


@pytest.mark.slow
def test_a_broker_of_5_5_refuses_the_same_requests_by_the_same_rules(guarded_broker: str):
    """Rules are those that the broker lists, in its own words."""
    rng = random.Random(34)
    names = [f"user-{number}" for number in range(WORLDS)]
    with root(guarded_broker) as client:
        for name in names:
            kind = rng.choice(["Normal", "Normal", "Normal", "Super"])
            user = {"username": name, "password": f"secret-of-{name}", "userType": kind}
            assert client.ask(CREATE_USER, user, username=name).code == Code.SUCCESS
            if rng.random() < 0.95:
                found = client.ask(CREATE_ACL, random_acl(name, rng), subject=f"User:{name}")
                assert found.code == Code.SUCCESS, found.remark
        users, entries = (json.loads(client.ask(code).text()) for code in (LIST_USER, LIST_ACL))
    told = {"users": users, "acls": entries}
    rules = auth_rules([kept_value(told, "the broker").fields()], oracle.CLUSTER)
    counts = {True: 0, False: 0}
    for name in names:
        secret = f"secret-of-{name}" if rng.random() < 0.95 else "wrong"
        with Client(guarded_broker, Form.JSON, access_key=name, secret=secret) as client:
            for _ in range(ASKED):
                code, body, fields = random_request(rng)
                answer = client.ask(code, body, **fields)
                is_refused = answer.code == Code.NO_PERMISSION
                wanted = judged(rules, client.request(code, body, **fields))
                assert is_refused is bool(wanted), (
                    name,
                    code,
                    fields,
                    answer.remark,
                    wanted,
                    rules.entries.get(name),
                )
                if is_refused:
                    # Which of several resources is named first is no matter.
                    assert (
                        answer.remark.partition(" to access ")[0]
                        == wanted.partition(" to access ")[0]
                    )
                counts[is_refused] += 1
    assert min(counts.values()) > 0.2 * WORLDS * ASKED, counts


# -- 4.9 --------------------------------------------------------------------------------------------

PERMISSIONS = ("SUB", "PUB", "PUB|SUB", "DENY", "SUB|PUB", "NONSENSE")
PATTERNS = ("", "", "", "10.1.2.*", "127.0.0.{1,2}", "10.0-9.*.*", "192.168.1.1,192.168.1.2", "*")
ADDRESSES = ("127.0.0.1", "127.0.0.3", "10.1.2.3", "10.77.2.3", "192.168.1.2")
WHITE = ("10.200.0.*", "10.20.*.*")
PLAIN_CODES = (11, 12, 15, 34, 35, 36, 38, 17, 25, 200, 207, 215, 14, 26, 30, 41, 202)
OLD = 397
"""Ordinal of version 4.9.2, whose clients sign the field of queries by unique id not."""


def random_account(number: int, rng: random.Random) -> dict[str, Any]:
    named = [f"{name}={rng.choice(PERMISSIONS)}" for name in rng.sample(NAMES, 3)]
    account: dict[str, Any] = {
        "accessKey": f"access-key-{number}",
        "secretKey": f"secret-key-{rng.random()}",
        "whiteRemoteAddress": rng.choice(PATTERNS),
        "admin": rng.random() < 0.3,
        "defaultTopicPerm": rng.choice(PERMISSIONS),
        "defaultGroupPerm": rng.choice(PERMISSIONS),
    }
    if rng.random() < 0.6:
        account["topicPerms"] = [*named[:2], f"%RETRY%{rng.choice(NAMES)}=SUB"]
        account["groupPerms"] = named[2:]
    return account


def plain_question(
    home: Path, accounts: list[dict[str, Any]], rng: random.Random
) -> dict[str, Any]:
    """A request that a client of 4.9 may ask, signed or not."""
    code, topic, group = rng.choice(PLAIN_CODES), rng.choice(NAMES), rng.choice(NAMES)
    topic = f"%RETRY%{group}" if rng.random() < 0.1 else topic
    body = b""
    if code == protocol.HEART_BEAT:
        said = {"groupName": group, "subscriptionDataSet": [{"topic": topic}, {"topic": "a"}]}
        body = json.dumps(
            {"clientID": "c", "consumerDataSet": [said], "producerDataSet": []}
        ).encode()
    if code == protocol.LOCK_BATCH_MQ:
        body = json.dumps({"consumerGroup": group, "clientId": "c", "mqSet": []}).encode()
    fields = {
        "topic": topic,
        "consumerGroup": group,
        "group": group,
        "clientID": "c",
        "text": "\u00e4\u4e2d",
    }
    fields |= {"queueId": "0", "commitOffset": "0"}
    if rng.random() < 0.1:
        del fields["topic"]
    account = rng.choice(accounts)
    signs = rng.random()
    credentials = {
        "access_key": account["accessKey"] if signs < 0.9 else "nobody-knows",
        "secret_key": account["secretKey"] if signs < 0.8 else "wrong-secret",
    }
    return {
        "home": str(home),
        "address": f"{rng.choice((*ADDRESSES, '10.200.0.9'))}:1",
        "code": code,
        "version": rng.choice([OLD, 401, 479]),
        "fields": fields,
        "body_base64": base64.b64encode(body).decode(),
        **(credentials if signs < 0.95 else {}),
    }


@pytest.mark.slow
def test_the_validator_of_4_9_refuses_the_same_requests_with_the_same_words(tmp_path: Path):
    """It signs them as its clients do; so each signature is held to ours as well."""
    rng = random.Random(34)
    known: dict[str, acl.AccessRules] = {}
    asked: list[dict[str, Any]] = []
    for number in range(12):
        home = tmp_path / str(number)
        (home / "conf").mkdir(parents=True)
        accounts = [random_account(one, rng) for one in range(4)]
        text = json.dumps({"accounts": accounts, "globalWhiteRemoteAddresses": [WHITE[number % 2]]})
        (home / "conf" / "plain_acl.yml").write_text(text)
        known[str(home)] = read_rules(home / "conf", oracle.CLUSTER)
        asked += [plain_question(home, accounts, rng) for _ in range(150)]
    done = subprocess.run(
        [oracle.ORACLE, "client-4.9", "judge"],
        input="".join(json.dumps(one) + "\n" for one in asked),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(answers) == len(asked), done.stderr[-2000:]
    for one, answer in zip(asked, answers, strict=True):
        body = base64.b64decode(one["body_base64"])
        request = Command(
            one["code"],
            fields=answer["fields"],
            body=(body,) if body else (),
            version=one["version"],
        )
        try:
            known[one["home"]].judge(request, acl.ip_of(one["address"]))
            found = ""
        except RefusalError as error:
            found = error.remark
        if found.partition(":")[2].startswith(" No default permission"):
            # Java goes through a hash table: which of several resources it names is by chance.
            assert answer["refused"].startswith(found[: found.index("for ")]), one
        else:
            assert answer["refused"] == found, one
    assert sum(not one["refused"] for one in answers) > 400
    assert len({one["refused"] for one in answers}) > 15


# -- clients ----------------------------------------------------------------------------------------

PLAIN = """
accounts:
- {accessKey: reader-key, secretKey: secret-of-reader, defaultGroupPerm: SUB, topicPerms: [orders=SUB]}
- {accessKey: other-key, secretKey: secret-of-other, defaultGroupPerm: SUB, topicPerms: [payments=SUB]}
- {accessKey: strict-key, secretKey: secret-of-strict, defaultTopicPerm: SUB, groupPerms: [h=SUB]}
- {accessKey: admin-key, secretKey: secret-of-admin, admin: true}
"""
AUTH_FILE = """
users:
- {username: reader-key, password: secret-of-reader}
- {username: other-key, password: secret-of-other}
- {username: strict-key, password: secret-of-strict}
- {username: admin-key, password: secret-of-admin, userType: Super}
acls:
- subject: User:reader-key
  policies:
  - entries:
    - {resource: "Topic:orders", actions: [Sub, Get], decision: Allow}
    - {resource: "Group:*", actions: [Sub, Get, Update], decision: Allow}
- subject: User:other-key
  policies:
  - entries:
    - {resource: "Topic:payments", actions: [All], decision: Allow}
    - {resource: "Group:*", actions: [All], decision: Allow}
- subject: User:strict-key
  policies:
  - entries:
    - {resource: "Topic:*", actions: [All], decision: Allow}
    - {resource: "Group:h", actions: [All], decision: Allow}
"""
REFUSED = {
    "not signed": (),
    "signed wrongly": ("--access-key", "reader-key", "--secret-key", "secret-of-other"),
    "without the topic": ("--access-key", "other-key", "--secret-key", "secret-of-other"),
    "without the group": ("--access-key", "strict-key", "--secret-key", "secret-of-strict"),
}


@pytest.mark.slow
@pytest.mark.parametrize("text", [PLAIN, AUTH_FILE], ids=["rules of 4.9", "rules of 5.x"])
@pytest.mark.parametrize("version", ["4.9", "5.5"])
def test_real_clients_that_sign_get_each_message_and_others_none(
    version: str, text: str, tmp_path: Path
):
    """The mount is their name server as well. Those without a right are watched until they have been refused."""
    _, url = tier_of("s01-basic", tmp_path)
    path = tmp_path / "rules.yml"
    path.write_text(text)
    options = ("--listen", "127.0.0.1:0", "--acl", path, "--metrics-listen", "127.0.0.1:0")
    with MountProcess(url, tmp_path / "log", *options) as mount, ExitStack() as held:
        metrics = re.findall(r"metrics at (\S+)", mount.text)[0]
        words = ("push", "--namesrv", mount.address, "--topic", "orders", "--group", "g")

        def denied() -> int:
            with urllib.request.urlopen(metrics, timeout=30) as answer:
                rows = answer.read().decode().splitlines()
            name = "tiered_mount_denied_requests_total"
            return sum(int(float(row.rpartition(" ")[2])) for row in rows if row.startswith(name))

        signed = ("--access-key", "reader-key", "--secret-key", "secret-of-reader")
        more = ("--max", "1200", "--seconds", "200")
        one = Consumer(version, tmp_path / "one", *words, *more, *signed)
        assert len(held.enter_context(one).end()) == 1200
        for number, (name, keys) in enumerate(REFUSED.items()):
            before = denied()
            out = tmp_path / f"refused-{number}"
            other = held.enter_context(Consumer(version, out, *words, "--seconds", "100", *keys))
            until(lambda before=before: denied() > before + 1, f"{name}: refused", 90)
            assert other.messages == [], name
            other.process.kill()
        assert "secret-of" not in mount.text


@pytest.mark.slow
@pytest.mark.parametrize("text", [PLAIN, AUTH_FILE], ids=["rules of 4.9", "rules of 5.x"])
@pytest.mark.parametrize("version", ["4.9", "5.5"])
def test_mqadmin_signs_by_its_tools_yml(
    version: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    _, url = tier_of("s01-basic", tmp_path)
    path, conf = tmp_path / "rules.yml", tmp_path / "home" / "conf"
    path.write_text(text)
    conf.mkdir(parents=True)
    (conf / "logback_tools.xml").write_text("<configuration/>")
    monkeypatch.setenv("ORACLE_JAVA_OPTS", f"-Drocketmq.home.dir={conf.parent}")
    one = captures.captured("s01-basic").messages["orders"][7]
    with MountProcess(url, tmp_path / "log", "--listen", "127.0.0.1:0", "--acl", path) as mount:
        at = ("-n", mount.address)
        asked = ("topicStatus", "-t", "orders", *at)
        assert "broker-a" not in oracle.admin(*asked, version=version)
        (conf / "tools.yml").write_text("accessKey: admin-key\nsecretKey: secret-of-admin\n")
        assert "broker-a" in oracle.admin(*asked, version=version)
        unique = ("queryMsgByUniqueKey", "-t", "orders", "-i", one["msg_id"], *at)
        if version == "5.5":
            unique += ("-s", "0", "-e", "9999999999999")
        assert "Queue Offset" in oracle.admin(*unique, version=version)
        (conf / "tools.yml").write_text("accessKey: other-key\nsecretKey: secret-of-other\n")
        text = oracle.admin(*unique, version=version)
        assert "Queue Offset" not in text
        (conf / "tools.yml").write_text("accessKey: admin-key\nsecretKey: secret-of-other\n")
        assert "broker-a" not in oracle.admin(*asked, version=version)


@pytest.mark.slow
def test_a_real_master_answers_a_replica_that_signs(guarded: oracle.Broker, tmp_path: Path):
    """It has less than the tier; who does not sign, or wrongly, is not told so and serves what the tier has."""
    user = {"username": "replica", "password": "secret-of-replica", "userType": "Normal"}
    entry = {"resource": "Topic:*", "actions": ["Get"], "sourceIps": [], "decision": "Allow"}
    may = {"subject": "User:replica", "policies": [{"policyType": "Custom", "entries": [entry]}]}
    with root(f"127.0.0.1:{guarded._port}") as client:
        assert client.ask(CREATE_USER, user, username="replica").code == Code.SUCCESS
        assert client.ask(CREATE_ACL, may, subject="User:replica").code == Code.SUCCESS
    place = ("--cluster", oracle.CLUSTER, "--broker", oracle.BROKER)
    _, url = tier_of("s01-basic", tmp_path, *place)
    host, _, port = guarded.address.rpartition(":")
    told = {"namesrv": [(host, int(port))], "replica_id": 1, "keeps_offsets": False}
    right, wrong = (acl.SigningKey("replica", f"secret-of-{name}") for name in ("replica", "x"))
    for key, code in (
        (right, Code.PULL_RETRY_IMMEDIATELY),
        (wrong, Code.SUCCESS),
        (None, Code.SUCCESS),
    ):
        with mounted(url, master_key=key, **told) as served, served.client() as client:
            assert client.pull("orders", 0, 0).code == code
