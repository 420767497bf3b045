"""Access control as RocketMQ's brokers have it: signatures, rules, and whether a request may be answered. Pure.

Two generations of rules stand behind one face (``AccessRules``). ``PlainRules`` are those of 4.9 (``plain_acl.yml``):
accounts with permissions, and addresses that need no account. ``AuthRules`` are those of 5.x: users, and for each a list of
entries, of which the most specific one that matches decides. ``tiered.mount.acl_files`` reads both.

A request is signed over the values of its fields in the order of their names, then its body, with HMAC-SHA1. It contains
neither a time nor a number used once: anyone who can read the connection can replay it.

Where brokers leave a gap, this is stricter; docs/mount.md lists the differences. A secret is never part of an error, nor of
a value's ``repr``.
"""

from __future__ import annotations

import base64
import hmac
import ipaddress
from dataclasses import field, replace
from enum import Enum
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol, TypeAlias

from backends.lazy_dataclass import dataclass
from tiered.mount import protocol
from tiered.mount.protocol import Code, RefusalError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from tiered.format.remoting import Command

ACCESS_KEY: Final = "AccessKey"
SIGNATURE: Final = "Signature"
_BY_UNIQUE_KEY: Final = "_UNIQUE_KEY_QUERY"
_V4_9_3: Final = 399
"""Ordinal of the last version whose clients add the field above after they have signed."""
RETRY: Final = "%RETRY%"
CLUSTER: Final = "Cluster"
TOPIC: Final = "Topic"
GROUP: Final = "Group"
Ip: TypeAlias = "ipaddress.IPv4Address | ipaddress.IPv6Address"
Network: TypeAlias = "ipaddress.IPv4Network | ipaddress.IPv6Network"


class Reason(Enum):
    """Why a request was refused; the value is the metric's label."""

    UNSIGNED = "unsigned"  # it names no access key
    UNKNOWN = "unknown"  # nobody has this access key, or its user is disabled
    SIGNATURE = "signature"  # it is not signed with the secret of its access key
    PERMISSION = "permission"  # who asks may not


class AccessDeniedError(RefusalError):
    """A request that is not answered, because of who asks it."""

    def __init__(self, code: Code, remark: str, reason: Reason) -> None:
        """Say why."""
        super().__init__(code, remark)
        self.reason = reason


class AccessRules(Protocol):
    """Rules of either generation."""

    def judge(self, request: Command, ip: Ip) -> None:
        """Return if the request may be answered.

        Raises:
            AccessDeniedError: It may not; the code and the remark are those of a broker.
            RefusalError: Its body cannot be read.
        """

    def document(self) -> dict[str, Any]:
        """The rules as a file of theirs holds them, without a secret."""

    def keys(self) -> set[str]:
        """Access keys that the rules name."""

    def with_secrets(self, secrets: Mapping[str, str]) -> AccessRules:
        """The same rules, with the secrets of access keys."""


# -- signatures -------------------------------------------------------------------------------------


def sign(fields: Mapping[str, str], body: Iterable[bytes], secret: str) -> str:
    """The signature of a request with these fields, its access key among them."""
    content = "".join(fields[name] for name in sorted(fields) if name != SIGNATURE).encode(
        "utf-8", "surrogateescape"
    )
    digest = hmac.digest(secret.encode(), b"".join((content, *body)), "sha1")
    return base64.b64encode(digest).decode()


@dataclass(frozen=True, slots=True)
class SigningKey:
    """What requests of ours are signed with."""

    access_key: str  # by which the other side knows us
    secret: str = field(repr=False)  # of it

    def signed(self, request: Command) -> Command:
        """The request with our access key and its signature."""
        fields = {**request.fields, ACCESS_KEY: self.access_key}
        fields[SIGNATURE] = sign(fields, map(bytes, request.body), self.secret)
        return replace(request, fields=fields)


def is_signed(request: Command, secret: str) -> bool:
    """Whether a request bears the signature that this secret gives. An empty secret signs nothing."""
    fields = request.fields
    if request.version <= _V4_9_3 and _BY_UNIQUE_KEY in fields:
        fields = {name: value for name, value in fields.items() if name != _BY_UNIQUE_KEY}
    given = fields.get(SIGNATURE, "").encode("utf-8", "surrogateescape")
    wanted = sign(fields, map(bytes, request.body), secret).encode()
    return bool(secret) and hmac.compare_digest(given, wanted)


# -- what a request needs ---------------------------------------------------------------------------


class Need(NamedTuple):
    """A right that a request needs: one of the actions will do."""

    kind: str  # ``TOPIC``, ``GROUP`` or ``CLUSTER``
    name: str
    actions: frozenset[str]  # in small letters


_SUB: Final = frozenset({"sub"})
_GET: Final = frozenset({"get"})
_READ: Final = frozenset({"sub", "get"})
_MOVE: Final = frozenset({"sub", "update"})
_UPDATE: Final = frozenset({"update"})
_ANY: Final = frozenset({"pub", "sub", "get"})
_SEND: Final = frozenset({"pub", "sub"})
"""Of a retry topic its group's consumers: what is sent to any other is refused from any user."""
_POP: Final = (("topic", TOPIC, _SUB), ("consumerGroup", GROUP, _SUB))

_FIELDS: Final[Mapping[int, tuple[tuple[str, str, frozenset[str]], ...]]] = {
    protocol.SEND_MESSAGE: (("topic", TOPIC, _SEND),),
    protocol.SEND_MESSAGE_V2: (("b", TOPIC, _SEND),),
    protocol.UPDATE_AND_CREATE_TOPIC: (("topic", TOPIC, frozenset({"create"})),),
    protocol.PULL_MESSAGE: _POP,
    protocol.LITE_PULL_MESSAGE: _POP,
    protocol.QUERY_MESSAGE: (("topic", TOPIC, _READ),),
    protocol.QUERY_CONSUMER_OFFSET: (("topic", TOPIC, _READ), ("consumerGroup", GROUP, _READ)),
    protocol.UPDATE_CONSUMER_OFFSET: (("topic", TOPIC, _MOVE), ("consumerGroup", GROUP, _MOVE)),
    protocol.SEARCH_OFFSET_BY_TIMESTAMP: (("topic", TOPIC, _GET),),
    protocol.GET_MAX_OFFSET: (("topic", TOPIC, _GET),),
    protocol.GET_MIN_OFFSET: (("topic", TOPIC, _GET),),
    protocol.GET_EARLIEST_MSG_STORETIME: (("topic", TOPIC, _GET),),
    protocol.VIEW_MESSAGE_BY_ID: (("topic", TOPIC, _GET),),
    protocol.UNREGISTER_CLIENT: (("consumerGroup", GROUP, _SUB),),
    36: (("group", GROUP, _SUB),),  # CONSUMER_SEND_MSG_BACK
    protocol.GET_CONSUMER_LIST_BY_GROUP: (("consumerGroup", GROUP, _READ),),
    protocol.GET_ROUTEINFO_BY_TOPIC: (("topic", TOPIC, _ANY),),
    protocol.GET_TOPIC_STATS_INFO: (("topic", TOPIC, _GET),),
    protocol.GET_CONSUMER_CONNECTION_LIST: (("consumerGroup", GROUP, _GET),),
    protocol.GET_CONSUME_STATS: (("consumerGroup", GROUP, _GET), ("topic", TOPIC, _GET)),
    protocol.RESET_CONSUMER_OFFSET: (("topic", TOPIC, _UPDATE), ("group", GROUP, _UPDATE)),
    protocol.GET_CONSUMER_STATUS: (("topic", TOPIC, _GET), ("group", GROUP, _GET)),
    protocol.QUERY_TOPIC_CONSUME_BY_WHO: (("topic", TOPIC, _GET),),
    protocol.GET_CONSUMER_RUNNING_INFO: (("consumerGroup", GROUP, _GET),),
    protocol.CONSUME_MESSAGE_DIRECTLY: _POP,
    protocol.QUERY_CONSUME_QUEUE: (("topic", TOPIC, _GET), ("consumerGroup", GROUP, _GET)),
    protocol.QUERY_TOPICS_BY_CONSUMER: (("group", GROUP, _GET),),
    protocol.GET_TOPIC_CONFIG: (("topic", TOPIC, _GET),),
    protocol.GET_SUBSCRIPTIONGROUP_CONFIG: (("group", GROUP, _GET),),
    protocol.POP_MESSAGE: _POP,
    200_051: _POP,  # ACK_MESSAGE
    200_053: _POP,  # CHANGE_MESSAGE_INVISIBLETIME
    200_054: _POP,  # NOTIFICATION
    200_055: (("topic", TOPIC, _GET), ("consumerGroup", GROUP, _GET)),  # POLLING_INFO
}
"""By code: fields that name a topic or a group, and what who asks has to be allowed there."""

_CLUSTER: Final = frozenset({protocol.GET_BROKER_CONSUME_STATS, protocol.GET_ALL_PRODUCER_INFO})
"""Need the right to look at the whole cluster."""

_SIGNED: Final = frozenset(
    {
        protocol.GET_ALL_TOPIC_CONFIG,
        protocol.GET_BROKER_CONFIG,
        protocol.GET_BROKER_RUNTIME_INFO,
        protocol.CHECK_CLIENT_CONFIG,
        protocol.GET_BROKER_CLUSTER_INFO,
        protocol.GET_ALL_SUBSCRIPTIONGROUP_CONFIG,
        protocol.GET_ALL_TOPIC_LIST_FROM_NAMESERVER,
        protocol.GET_TOPICS_BY_CLUSTER,
        protocol.GET_SYSTEM_TOPIC_LIST_FROM_NS,
        protocol.GET_SYSTEM_TOPIC_LIST_FROM_BROKER,
        protocol.QUERY_ASSIGNMENT,
    }
)
"""Everybody with an access key may ask these, as with a broker."""

_WHOLE: Final = frozenset({protocol.VIEW_MESSAGE_BY_ID, protocol.CONSUME_MESSAGE_DIRECTLY})
"""Without a topic they find messages of any."""

_PLAIN: Final = frozenset(
    {
        *(protocol.SEND_MESSAGE, protocol.SEND_MESSAGE_V2),
        protocol.PULL_MESSAGE,
        protocol.LITE_PULL_MESSAGE,
        protocol.QUERY_MESSAGE,
        protocol.UPDATE_CONSUMER_OFFSET,
        protocol.VIEW_MESSAGE_BY_ID,
        protocol.HEART_BEAT,
        protocol.UNREGISTER_CLIENT,
        36,
        protocol.GET_CONSUMER_LIST_BY_GROUP,
        protocol.CONSUME_MESSAGE_DIRECTLY,
        *(protocol.POP_MESSAGE, 200_051, 200_053, 200_054, 200_151),
    }
)
"""Whose topics and groups plain rules are about; of others a signature is enough."""

_PLAIN_ADMIN: Final = frozenset({17, 25, 200, 207, 215})
"""Change topics, groups or the broker."""


def needs(request: Command, cluster: str) -> list[Need] | None:
    """What who asks has to be allowed; None: only administrators may ask."""
    code = request.code
    if code in _SIGNED:
        return []
    if code in _CLUSTER:
        return [Need(CLUSTER, cluster, _GET)]
    if code in _WHOLE and not request.fields.get("topic"):
        return None
    if code in _FIELDS:
        found = _of_fields(request)
    elif code in _BODIES:
        found = _BODIES[code](protocol.document(request))
    else:
        known = protocol.BY_CODE.get(code)
        is_served = known is None or known.answer is protocol.Treatment.SERVED
        return None if is_served else []  # what is not served is refused by itself
    return list(dict.fromkeys(found))


def _of_fields(request: Command) -> Iterator[Need]:
    for name, kind, actions in _FIELDS[request.code]:
        value = request.fields.get(name)
        if value:
            yield _need(kind, value, actions)


def _of_heartbeat(said: Mapping[str, Any]) -> Iterator[Need]:
    for one in protocol.objects(said.get("consumerDataSet")):
        yield _need(GROUP, one.get("groupName"), _SUB)
        for subscription in protocol.objects(one.get("subscriptionDataSet")):
            yield _need(TOPIC, subscription.get("topic"), _SUB)


def _of_locks(said: Mapping[str, Any]) -> Iterator[Need]:
    yield _need(GROUP, said.get("consumerGroup"), _SUB)
    for queue in protocol.objects(said.get("mqSet")):
        yield _need(TOPIC, queue.get("topic"), _SUB)


def _of_mode(said: Mapping[str, Any]) -> Iterator[Need]:
    yield _need(GROUP, said.get("consumerGroup"), _UPDATE)
    yield _need(TOPIC, said.get("topic"), _UPDATE)


def _of_acknowledgements(said: Mapping[str, Any]) -> Iterator[Need]:
    for one in protocol.objects(said.get("acks")):
        yield _need(GROUP, one.get("c", one.get("consumerGroup")), _SUB)
        yield _need(TOPIC, one.get("t", one.get("topic")), _SUB)


_BODIES: Final[Mapping[int, Callable[[Mapping[str, Any]], Iterator[Need]]]] = {
    protocol.HEART_BEAT: _of_heartbeat,
    protocol.LOCK_BATCH_MQ: _of_locks,
    protocol.UNLOCK_BATCH_MQ: _of_locks,
    200_151: _of_acknowledgements,  # BATCH_ACK_MESSAGE
    protocol.SET_MESSAGE_REQUEST_MODE: _of_mode,
}


def _need(kind: str, name: object, actions: frozenset[str]) -> Need:
    """A retry topic is its group's."""
    text = str(name)
    if kind == TOPIC and text.startswith(RETRY):
        return Need(GROUP, text.removeprefix(RETRY), actions - {"pub"})
    return Need(kind, text, actions)


# -- addresses --------------------------------------------------------------------------------------

_Ranges: TypeAlias = "tuple[tuple[int, int], ...]"
_V4_PARTS, _V6_PARTS = 4, 8
_EVERYWHERE: Final = frozenset({"*", "*.*.*.*", "*:*:*:*:*:*:*:*"})
_OF_V4: Final = ((0, 0xFF),) * _V4_PARTS
_OF_V6: Final = ((0, 0xFFFF),) * _V6_PARTS


def ip_of(peer: str) -> Ip:
    """The address of ``host:port``; one of IPv4 that came over a socket of IPv6 as what it is."""
    host = peer.rpartition(":")[0].strip("[]").partition("%")[0]
    found = ipaddress.ip_address(host or "0.0.0.0")  # noqa: S104 (not bound)
    mapped = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None
    return mapped or found


@dataclass(frozen=True, slots=True)
class AddressPattern:
    """Addresses of clients as plain rules write them.

    One address, ``1.2.3.*``, ``1.2.3-9.*``, ``1.2.3.{4,5}``, addresses with commas between them, or ``*``; of IPv6 likewise,
    ``2::ac5:78:1-200:*``. Empty: none.
    """

    text: str
    ranges: tuple[_Ranges, ...]  # of each alternative, part by part

    @classmethod
    def parse(cls, text: str) -> AddressPattern:
        """Read it; ValueError: it is not such a pattern."""
        text = text.strip()
        if text in _EVERYWHERE:
            return cls(text, (_OF_V4, _OF_V6))
        if text.endswith("}"):
            head, _, last = text[:-1].partition("{")
            words = [head + word.strip() for word in last.split(",")]
        else:
            words = text.split(",")
        return cls(text, tuple(_ranges(word.strip()) for word in words if word.strip()))

    def matches(self, ip: Ip) -> bool:
        """Whether an address is one of them."""
        if not self.ranges:
            return False
        packed = ip.packed
        size = 1 if len(packed) == _V4_PARTS else 2
        parts = [int.from_bytes(packed[at : at + size]) for at in range(0, len(packed), size)]
        return any(
            len(row) == len(parts)
            and all(low <= part <= high for part, (low, high) in zip(parts, row, strict=True))
            for row in self.ranges
        )


def _ranges(word: str) -> _Ranges:
    if ":" not in word:
        parts, base, highest, wanted = word.split("."), 10, 0xFF, _V4_PARTS
    else:
        head, gap, tail = word.partition("::")
        parts = [part for part in head.split(":") if part]
        after = [part for part in tail.split(":") if part]
        parts += ["0"] * (_V6_PARTS - len(parts) - len(after)) * bool(gap) + after
        base, highest, wanted = 16, 0xFFFF, _V6_PARTS
    if len(parts) != wanted:
        raise ValueError(f"{word!r} does not have {wanted} parts")
    return tuple(_range(part.strip(), base, highest) for part in parts)


def _range(part: str, base: int, highest: int) -> tuple[int, int]:
    low, dash, high = ("0", "-", f"{highest:x}" if base > 10 else str(highest)) if part == "*" else part.partition("-")  # noqa: PLR2004  # fmt: skip
    first = int(low, base)
    last = int(high, base) if dash else first
    if not 0 <= first <= last <= highest:
        raise ValueError(f"{part!r} is not within 0 and {highest}")
    return first, last


# -- rules of 4.9 -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PlainAccount:
    """What one access key may do."""

    access_key: str
    secret: str = field(default="", repr=False)  # empty: not known, and nobody can sign with it
    is_admin: bool = False
    white: AddressPattern = field(default_factory=lambda: AddressPattern("", ()))
    """From these addresses it needs no signature, and may do everything."""
    topic_default: str = "DENY"  # of topics that are not named; a word of ``PERMISSIONS``
    group_default: str = "DENY"
    topics: Mapping[str, str] = field(default_factory=dict)
    groups: Mapping[str, str] = field(default_factory=dict)

    def may_subscribe(self, need: Need) -> bool:
        """Whether it may read from a topic, or as a group."""
        if self.is_admin and not (self.topics or self.groups):
            return True
        named, otherwise = (
            (self.groups, self.group_default)
            if need.kind == GROUP
            else (self.topics, self.topic_default)
        )
        return "SUB" in PERMISSIONS[named.get(need.name, otherwise)]

    def document(self) -> dict[str, Any]:
        """As a file has it, without the secret."""
        return {
            "accessKey": self.access_key,
            "whiteRemoteAddress": self.white.text,
            "admin": self.is_admin,
            "defaultTopicPerm": self.topic_default,
            "defaultGroupPerm": self.group_default,
            "topicPerms": [f"{name}={word}" for name, word in self.topics.items()],
            "groupPerms": [f"{name}={word}" for name, word in self.groups.items()],
        }


PERMISSIONS: Final[Mapping[str, frozenset[str]]] = {
    "DENY": frozenset(),
    "PUB": frozenset({"PUB"}),
    "SUB": frozenset({"SUB"}),
    "PUB|SUB": frozenset({"PUB", "SUB"}),
    "SUB|PUB": frozenset({"PUB", "SUB"}),
}
"""Words of plain rules; any other is ``DENY``."""


@dataclass(frozen=True, slots=True)
class PlainRules:
    """Rules of 4.9. A client at a white-listed address is not checked."""

    accounts: Mapping[str, PlainAccount]  # by access key
    white: Sequence[AddressPattern] = ()

    def judge(self, request: Command, ip: Ip) -> None:
        """See ``AccessRules``."""
        if any(pattern.matches(ip) for pattern in self.white):
            return
        key = request.fields.get(ACCESS_KEY)
        if key is None:
            raise _plain("No accessKey is configured", Reason.UNSIGNED)
        account = self.accounts.get(key)
        if account is None:
            raise _plain(f"No acl config for {key}", Reason.UNKNOWN)
        if account.white.matches(ip):
            return
        if not is_signed(request, account.secret):
            raise _plain(f"Check signature failed for accessKey={key}", Reason.SIGNATURE)
        self._permit(request, account)

    @staticmethod
    def _permit(request: Command, account: PlainAccount) -> None:
        code = request.code
        wanted = needs(request, "") if code not in _PLAIN_ADMIN else None
        if wanted is None:
            if not account.is_admin:
                raise _plain(
                    f"Need admin permission for request code={code}, but accessKey={account.access_key} is not",
                    Reason.PERMISSION,
                )
        elif code in _PLAIN:
            for need in wanted:
                if not account.may_subscribe(need):
                    raise _plain(
                        f"No default permission for {need.kind.lower()}:{need.name}",
                        Reason.PERMISSION,
                    )

    def document(self) -> dict[str, Any]:
        """See ``AccessRules``."""
        return {
            "globalWhiteRemoteAddresses": [pattern.text for pattern in self.white],
            "accounts": [account.document() for account in self.accounts.values()],
        }

    def keys(self) -> set[str]:
        """See ``AccessRules``."""
        return set(self.accounts)

    def with_secrets(self, secrets: Mapping[str, str]) -> PlainRules:
        """See ``AccessRules``."""
        return PlainRules(_with_secrets(self.accounts, secrets), self.white)


def _plain(remark: str, reason: Reason) -> AccessDeniedError:
    """As a broker of 4.9 answers what its validator throws."""
    return AccessDeniedError(
        Code.SYSTEM_ERROR, f"org.apache.rocketmq.acl.common.AclException: {remark}", reason
    )


def _with_secrets(known: Mapping[str, Any], secrets: Mapping[str, str]) -> dict[str, Any]:

    return {key: replace(one, secret=secrets.get(key, "")) for key, one in known.items()}


# -- rules of 5.x -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AuthUser:
    """A user."""

    username: str
    secret: str = field(default="", repr=False)  # empty: not known, and nobody can sign with it
    is_super: bool = False  # no entry is asked
    is_enabled: bool = True

    def document(self) -> dict[str, Any]:
        """As a file has it, without the secret."""
        return {
            "username": self.username,
            "userType": "Super" if self.is_super else "Normal",
            "userStatus": "enable" if self.is_enabled else "disable",
        }


ANY: Final = "*"


@dataclass(frozen=True, slots=True)
class AclEntry:
    """What a user may do with some resources, or may not."""

    kind: str  # ``TOPIC``, ``GROUP``, ``CLUSTER``, or ``ANY``
    name: str  # as it is written: a name, the beginning of one with a star, or a star
    actions: frozenset[str]  # in small letters; ``all`` is each
    is_allowed: bool
    networks: tuple[Network, ...] = ()  # from where; empty: from anywhere

    def matches(self, need: Need, ip: Ip) -> bool:
        """Whether it says anything of this."""
        return (
            self._names(need)
            and ("all" in self.actions or bool(self.actions & need.actions))
            and (not self.networks or any(ip in network for network in self.networks))
        )

    def _names(self, need: Need) -> bool:
        if self.kind == ANY:
            return True
        if self.kind != need.kind:
            return False
        if self.name.endswith(ANY):
            return need.name.startswith(self.name[:-1])
        return need.name == self.name

    @property
    def rank(self) -> tuple[bool, int, int, bool]:
        """The lowest counts: a name before beginnings, the longer one first, before a star, before everything."""
        is_star, is_prefix = self.name == ANY, self.name.endswith(ANY)
        return self.kind == ANY, 2 * is_star or int(is_prefix), -len(self.name), self.is_allowed

    def document(self) -> dict[str, Any]:
        """As a file has it."""
        return {
            "resource": ANY if self.kind == ANY else f"{self.kind}:{self.name}",
            "actions": sorted(action.capitalize() for action in self.actions),
            "sourceIps": [str(network) for network in self.networks],
            "decision": "Allow" if self.is_allowed else "Deny",
        }


@dataclass(frozen=True, slots=True)
class UserEntries:
    """The entries of a user. The second ones are asked where none of the first matches."""

    custom: Sequence[AclEntry] = ()
    default: Sequence[AclEntry] = ()

    def decide(self, need: Need, ip: Ip) -> AclEntry | None:
        """The entry that counts; None: none matches."""
        for entries in (self.custom, self.default):
            found = [entry for entry in entries if entry.matches(need, ip)]
            if found:
                return min(found, key=lambda entry: entry.rank)
        return None

    def document(self, username: str) -> dict[str, Any]:
        """As a file has them."""
        rows = (("Custom", self.custom), ("Default", self.default))
        return {
            "subject": f"User:{username}",
            "policies": [
                {"policyType": name, "entries": [entry.document() for entry in entries]}
                for name, entries in rows
                if entries
            ],
        }


@dataclass(frozen=True, slots=True)
class AuthRules:
    """Rules of 5.x."""

    users: Mapping[str, AuthUser]  # by name, which is their access key
    entries: Mapping[str, UserEntries] = field(default_factory=dict)  # by the same
    cluster: str = ""
    authorizes: bool = True  # else a signature is enough
    unsigned_codes: frozenset[int] = frozenset()
    """Codes whose signature is not looked at (a broker's ``authenticationWhitelist``)."""
    free_codes: frozenset[int] = frozenset()
    """Codes that each user may ask (a broker's ``authorizationWhitelist``)."""

    def judge(self, request: Command, ip: Ip) -> None:
        """See ``AccessRules``."""
        if request.code not in self.unsigned_codes:
            self._authenticate(request)
        if not self.authorizes or request.code in self.free_codes:
            return
        name = request.fields.get(ACCESS_KEY, "")
        user = self.users.get(name)
        if user is None:
            raise _auth(f"User:{name} not found.", Reason.UNKNOWN)
        if user.is_super:
            return
        wanted = needs(request, self.cluster)
        if wanted is None:
            raise _auth(
                f"User:{name} has no permission for request code={request.code}, only super users have",
                Reason.PERMISSION,
            )
        known = self.entries.get(name, UserEntries())
        for need in wanted:
            entry = known.decide(need, ip)
            if entry is None or not entry.is_allowed:
                why = "no matched policies." if entry is None else "the decision is deny."
                raise _auth(
                    f"User:{name} has no permission to access {need.kind}:{need.name} from {ip}, {why}",
                    Reason.PERMISSION,
                )

    def _authenticate(self, request: Command) -> None:
        name = request.fields.get(ACCESS_KEY)
        if not name:
            raise _auth("username cannot be null.", Reason.UNSIGNED)
        user = self.users.get(name)
        if user is None:
            raise _auth(f"User:{name} is not found.", Reason.UNKNOWN)
        if not user.is_enabled:
            raise _auth(f"User:{name} is disabled.", Reason.UNKNOWN)
        if not is_signed(request, user.secret):
            raise _auth("check signature failed.", Reason.SIGNATURE)

    def document(self) -> dict[str, Any]:
        """See ``AccessRules``."""
        return {
            "users": [user.document() for user in self.users.values()],
            "acls": [entries.document(name) for name, entries in self.entries.items()],
            "authorizationEnabled": self.authorizes,
            "authenticationWhitelist": sorted(self.unsigned_codes),
            "authorizationWhitelist": sorted(self.free_codes),
        }

    def keys(self) -> set[str]:
        """See ``AccessRules``."""
        return set(self.users)

    def with_secrets(self, secrets: Mapping[str, str]) -> AuthRules:
        """See ``AccessRules``."""
        return replace(self, users=_with_secrets(self.users, secrets))


def _auth(remark: str, reason: Reason) -> AccessDeniedError:
    return AccessDeniedError(Code.NO_PERMISSION, remark, reason)
