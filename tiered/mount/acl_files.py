"""Reads rules and secrets from files, and keeps up with changes of them.

A file is known by its content: ``accounts`` or ``globalWhiteRemoteAddresses`` are rules of 4.9, ``users`` or ``acls`` those
of 5.x, and a plain map of access keys to secrets completes the rules that a decommissioned broker left in its tier. A
directory is all of its ``*.yml`` and ``*.yaml`` files, and those below, as one.

No value of a file is part of an error: any of them may be a secret. So errors name the file, the line and the field.

A change is taken over when the files have stayed the same for a look (``CHANGE_S``): a writer may not be done yet.
What cannot be read then changes nothing: the rules stay as they were, and the trouble is told once, in the log.
"""

from __future__ import annotations

import ipaddress
import logging
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

from tiered.errors import InvalidError
from tiered.mount.acl import (
    ANY,
    CLUSTER,
    GROUP,
    PERMISSIONS,
    RETRY,
    TOPIC,
    AccessDeniedError,
    AclEntry,
    AddressPattern,
    AuthRules,
    AuthUser,
    PlainAccount,
    PlainRules,
    SigningKey,
    UserEntries,
    ip_of,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from tiered.format.remoting import Command
    from tiered.mount.acl import AccessRules, Network, Reason

_LOG = logging.getLogger("tiered.mount")
CHANGE_S: Final = 1.0
FILE_BYTES_MAX: Final = 16 * 1024 * 1024
_KEY_CHARS_MIN: Final = 7
"""Of access keys and secrets of 4.9, as a broker wants them."""
_DO: Final = "correct the file; docs/mount.md has its forms (Access control)"
_YES: Final = frozenset({"true", "yes", "on"})
_NO: Final = frozenset({"false", "no", "off"})
_ACTIONS: Final = frozenset(
    {"all", "any", "pub", "sub", "create", "update", "delete", "get", "list"}
)
_KINDS: Final = {kind.lower(): kind for kind in (CLUSTER, TOPIC, GROUP)}
_PLAIN_FIELDS: Final = frozenset({"globalWhiteRemoteAddresses", "accounts"})
_AUTH_FIELDS: Final = frozenset({"users", "acls"})
_SIGNING_FIELDS: Final = frozenset({"accessKey", "secretKey"})
_TAG: Final = "tag:yaml.org,2002:"


# -- values with their places -----------------------------------------------------------------------


class Value(NamedTuple):
    """A value of a file."""

    what: str | list[Value] | dict[str, Value] | None
    where: str  # file, line and field
    is_text: bool = True  # what is written is what YAML means: not so ``0x10`` or ``1e3``

    def fields(self) -> dict[str, Value]:
        """Of a map; those that are empty are left out."""
        if not isinstance(self.what, dict):
            raise self.wrong("a map is wanted")
        return {name: value for name, value in self.what.items() if value.what is not None}

    def items(self) -> list[Value]:
        """Of a list."""
        if not isinstance(self.what, list):
            raise self.wrong("a list is wanted")
        return self.what

    def text(self) -> str:
        """Of a text or a number."""
        if not isinstance(self.what, str):
            raise self.wrong("a text is wanted")
        if not self.is_text:
            raise self.wrong("YAML takes this for something other than text; put it in quotes")
        return self.what

    def flag(self) -> bool:
        """Yes or no."""
        word = self.what.lower() if isinstance(self.what, str) else ""
        if word not in _YES | _NO:
            raise self.wrong("true or false is wanted")
        return word in _YES

    def wrong(self, what: str) -> InvalidError:
        """The error that this value is not as it has to be; ``what`` repeats nothing of it."""
        return InvalidError(what, where=self.where, do=_DO)


def read_yaml(path: Path) -> Value:
    """The content of a file. InvalidError: it cannot be read, or is not YAML."""
    yaml = _yaml()
    try:
        if path.stat().st_size > FILE_BYTES_MAX:
            raise InvalidError("the file is too large for rules", where=str(path), do=_DO)
        node = yaml.compose(path.read_text("utf-8"), Loader=yaml.SafeLoader)
        return _valued(node, str(path), "")
    except OSError as error:
        raise InvalidError(
            f"it cannot be read: {error.strerror}", where=str(path), do="check --acl"
        ) from error
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}:{mark.line + 1}" if mark is not None else str(path)
    # Not within the handler: what YAML says quotes the file, and a traceback would show it.
    raise InvalidError("it is not YAML", where=where, do=_DO)


def _yaml() -> Any:  # noqa: ANN401 (has no types)
    try:
        import yaml  # noqa: PLC0415 (few mounts have rules)
    except ImportError as error:
        raise InvalidError(
            "rules are read with PyYAML, which is not installed", do="pip install 'tieredmq[acl]'"
        ) from error
    return yaml


def _valued(node: Any, path: str, name: str) -> Value:  # noqa: ANN401 (has no types)
    """A node of YAML and what is in it."""
    if node is None:
        return Value(None, path)
    where = f"{path}:{node.start_mark.line + 1}" + (f", {name}" if name else "")
    if node.id == "scalar":
        kind = node.tag.removeprefix(_TAG)
        if kind == "null":
            return Value(None, where)
        text = str(node.value)
        is_text = kind in {"str", "bool"} or (kind == "int" and _is_decimal(text))
        return Value(text, where, is_text)
    if node.id == "sequence":
        return Value(
            [_valued(one, path, f"{name}[{at}]") for at, one in enumerate(node.value)], where
        )
    found: dict[str, Value] = {}
    for key, one in node.value:
        if key.id != "scalar" or key.tag == f"{_TAG}merge":
            raise Value(None, where).wrong("a name is wanted before each colon")
        value = _valued(one, path, f"{name}.{key.value}".lstrip("."))
        if key.value in found:
            raise value.wrong("the field stands twice")
        found[str(key.value)] = value
    return Value(found, where)


def _is_decimal(text: str) -> bool:
    return text.isascii() and text.isdigit() and (text == "0" or text[0] != "0")


def kept_value(document: object, where: str) -> Value:
    """The same of what a tier holds."""
    if isinstance(document, dict):
        return Value({str(k): kept_value(v, f"{where}, {k}") for k, v in document.items()}, where)
    if isinstance(document, list):
        return Value([kept_value(one, f"{where}[{at}]") for at, one in enumerate(document)], where)
    if isinstance(document, bool):
        return Value(str(document).lower(), where)
    return Value(None if document is None else str(document), where)


# -- rules ------------------------------------------------------------------------------------------


def plain_rules(documents: list[dict[str, Value]], *, has_secrets: bool = True) -> PlainRules:
    """Rules of 4.9, of all files together."""
    accounts: dict[str, PlainAccount] = {}
    white: list[AddressPattern] = []
    for document in documents:
        white += map(_pattern, _items(document, "globalWhiteRemoteAddresses"))
        for one in _items(document, "accounts"):
            account = _account(one.fields(), one, has_secrets=has_secrets)
            if account.access_key in accounts:
                raise one.wrong("another account has this access key, too")
            accounts[account.access_key] = account
    return PlainRules(accounts, tuple(white))


def _account(said: dict[str, Value], whole: Value, *, has_secrets: bool) -> PlainAccount:
    for name in ("accessKey", "secretKey") if has_secrets else ("accessKey",):
        if name not in said:
            raise whole.wrong(f"the account has no {name}")
        if len(said[name].text()) < _KEY_CHARS_MIN:
            raise said[name].wrong(f"{_KEY_CHARS_MIN} characters at least are wanted")
    named: dict[str, dict[str, str]] = {"groupPerms": {}, "topicPerms": {}}
    for field_name, found in named.items():
        for one in _items(said, field_name):
            parts = [part for part in one.text().split("=") if part]
            if len(parts) != len(("name", "permission")):
                raise one.wrong("NAME=PERMISSION is wanted")
            found[parts[0].strip()] = _permission(parts[1])
    # A retry topic is its group's, wherever it is named.
    topics = {k: v for k, v in named["topicPerms"].items() if not k.startswith(RETRY)}
    retries = {k.removeprefix(RETRY): v for k, v in named["topicPerms"].items() if k not in topics}
    return PlainAccount(
        said["accessKey"].text(),
        said["secretKey"].text() if has_secrets else "",
        "admin" in said and said["admin"].flag(),
        _pattern(said["whiteRemoteAddress"]) if "whiteRemoteAddress" in said else _NOWHERE,
        _permission(said["defaultTopicPerm"].text() if "defaultTopicPerm" in said else ""),
        _permission(said["defaultGroupPerm"].text() if "defaultGroupPerm" in said else ""),
        topics,
        named["groupPerms"] | retries,
    )


_NOWHERE: Final = AddressPattern("", ())


def _permission(word: str) -> str:
    """As a broker: what it does not know is ``DENY``."""
    return word.strip() if word.strip() in PERMISSIONS else "DENY"


def _pattern(value: Value) -> AddressPattern:
    text = value.text()
    try:
        return AddressPattern.parse(text)
    except ValueError:
        raise value.wrong("a pattern of addresses is wanted, as 10.0.0.* or 10.0.0.{1,2}") from None


def auth_rules(
    documents: list[dict[str, Value]], cluster: str, *, has_secrets: bool = True
) -> AuthRules:
    """Rules of 5.x, of all files together."""
    rules = AuthRules({}, {}, cluster)
    users: dict[str, AuthUser] = {}
    entries: dict[str, UserEntries] = {}
    for document in documents:
        for one in _items(document, "users"):
            user = _user(one.fields(), one, has_secrets=has_secrets)
            if user.username in users:
                raise one.wrong("another user has this name, too")
            users[user.username] = user
        for one in _items(document, "acls"):
            name, found = _entries(one.fields(), one)
            if name in entries:
                raise one.wrong("the rules of this user stand twice")
            entries[name] = found
        if "authorizationEnabled" in document:
            rules = replace(rules, authorizes=document["authorizationEnabled"].flag())
        rules = replace(
            rules,
            unsigned_codes=rules.unsigned_codes | _codes(document, "authenticationWhitelist"),
            free_codes=rules.free_codes | _codes(document, "authorizationWhitelist"),
        )
    return replace(rules, users=users, entries=entries)


def _user(said: dict[str, Value], whole: Value, *, has_secrets: bool) -> AuthUser:
    for name in ("username", "password") if has_secrets else ("username",):
        if name not in said or not said[name].text():
            raise whole.wrong(f"the user has no {name}")
    kind = said["userType"].text().lower() if "userType" in said else "normal"
    status = said["userStatus"].text().lower() if "userStatus" in said else "enable"
    if kind not in {"normal", "super"}:
        raise said["userType"].wrong("Normal or Super is wanted")
    if status not in {"enable", "disable"}:
        raise said["userStatus"].wrong("enable or disable is wanted")
    secret = said["password"].text() if has_secrets else ""
    return AuthUser(said["username"].text(), secret, kind == "super", status == "enable")


def _entries(said: dict[str, Value], whole: Value) -> tuple[str, UserEntries]:
    if "subject" not in said:
        raise whole.wrong("the rules have no subject")
    kind, _, name = said["subject"].text().partition(":")
    if kind.lower() != "user" or not name:
        raise said["subject"].wrong("User:NAME is wanted")
    found: dict[str, list[AclEntry]] = {"custom": [], "default": []}
    for policy in _items(said, "policies"):
        fields = policy.fields()
        word = fields["policyType"].text().lower() if "policyType" in fields else "custom"
        if word not in found:
            raise fields["policyType"].wrong("Custom or Default is wanted")
        for one in _items(fields, "entries"):
            entry = _entry(one.fields(), one)
            if any((entry.kind, entry.name) == (known.kind, known.name) for known in found[word]):
                raise one.wrong("another entry is about this resource, too")
            found[word].append(entry)
    return name, UserEntries(tuple(found["custom"]), tuple(found["default"]))


def _entry(said: dict[str, Value], whole: Value) -> AclEntry:
    for name in ("resource", "actions", "decision"):
        if name not in said:
            raise whole.wrong(f"the entry has no {name}")
    kind, name = _resource(said["resource"])
    actions = frozenset(one.text().lower() for one in said["actions"].items())
    if not actions or actions - _ACTIONS:
        raise said["actions"].wrong("actions are wanted: " + ", ".join(sorted(_ACTIONS)))
    decision = said["decision"].text().lower()
    if decision not in {"allow", "deny"}:
        raise said["decision"].wrong("Allow or Deny is wanted")
    networks = tuple(_network(one) for one in _items(said, "sourceIps"))
    return AclEntry(kind, name, actions, decision == "allow", networks)


def _resource(value: Value) -> tuple[str, str]:
    text = value.text()
    if text == ANY:
        return ANY, ANY
    kind, _, name = text.partition(":")
    if kind.lower() not in _KINDS or not name or ANY in name[:-1]:
        raise value.wrong("Topic:NAME, Group:NAME or Cluster:NAME is wanted, or NAME* or *")
    return _KINDS[kind.lower()], name


def _network(value: Value) -> Network:
    text = value.text()
    try:
        return ipaddress.ip_network(text, strict=False)
    except ValueError:
        raise value.wrong("an address is wanted, or a network as 10.0.0.0/8") from None


def _codes(document: dict[str, Value], name: str) -> frozenset[int]:
    """Numbers in a list, or with commas between them as a broker's configuration has them."""
    if name not in document:
        return frozenset()
    value = document[name]
    words = (
        [one.text() for one in value.items()]
        if isinstance(value.what, list)
        else value.text().split(",")
    )
    try:
        return frozenset(int(word) for word in words if word.strip())
    except ValueError:
        raise value.wrong("numbers of requests are wanted") from None


def _items(said: dict[str, Value], name: str) -> list[Value]:
    return said[name].items() if name in said else []


# -- files ------------------------------------------------------------------------------------------

_Stamp: TypeAlias = "tuple[tuple[str, int, int, int], ...]"


def files_of(path: Path) -> list[Path]:
    """The file, or those of a directory; ``tools.yml``, which is for clients, is left out."""
    if not path.is_dir():
        return [path]
    return sorted(
        one
        for one in path.rglob("*")
        if one.suffix in {".yml", ".yaml"} and one.name != "tools.yml" and one.is_file()
    )


def read_rules(path: Path, cluster: str, kept: Mapping[str, Any] | None = None) -> AccessRules:
    """The rules of a file or a directory.

    Args:
        cluster: In which the rules hold.
        kept: What a decommissioned broker left; with secrets alone in the file it gives the rules.

    Raises:
        InvalidError: It cannot be read, is empty, or is not of one of the forms.
    """
    documents = []
    for file in files_of(path):
        value = read_yaml(file)
        if value.what is not None:
            documents.append((value, value.fields()))
    if not documents:
        raise InvalidError("no rules are in it", where=str(path), do=_DO)
    plain = [fields for _, fields in documents if _PLAIN_FIELDS & set(fields)]
    auth = [fields for _, fields in documents if _AUTH_FIELDS & set(fields)]
    others = [value for value, fields in documents if fields not in plain and fields not in auth]
    if plain and not auth and not others:
        return plain_rules(plain)
    if auth and not plain and not others:
        return auth_rules(auth, cluster)
    if plain or auth:
        raise InvalidError("rules of different forms are in it", where=str(path), do=_DO)
    return _completed(others, cluster, kept)


def _completed(others: list[Value], cluster: str, kept: Mapping[str, Any] | None) -> AccessRules:
    secrets: dict[str, str] = {}
    for value in others:
        fields = value.fields()
        if set(fields) == _SIGNING_FIELDS:
            raise value.wrong("this is what a client signs with, and not the rules of a broker")
        secrets |= {key: one.text() for key, one in fields.items()}
    if kept is None:
        raise others[0].wrong(
            "there are secrets alone in it, and no rules that a broker left in the tier"
        )
    rules = kept_rules(kept, cluster)
    for key in sorted(rules.keys() ^ set(secrets)):
        has = "no secret" if key not in secrets else "a secret, and no rules"
        _LOG.warning("access key %s has %s", key, has)
    return rules.with_secrets(secrets)


def read_signing_key(path: Path) -> SigningKey:
    """What a client signs with, of a file like a broker's ``conf/tools.yml``.

    Raises:
        InvalidError: It cannot be read, or has other fields.
    """
    try:
        value = read_yaml(path)
        fields = value.fields()
        if set(fields) != _SIGNING_FIELDS:
            raise value.wrong("accessKey and secretKey are wanted, and nothing else")
        return SigningKey(fields["accessKey"].text(), fields["secretKey"].text())
    except InvalidError as error:
        raise InvalidError(
            error.what, where=error.where, do="give a file like a broker's conf/tools.yml"
        ) from None


def kept_rules(kept: Mapping[str, Any], cluster: str) -> AccessRules:
    """The rules that a decommissioned broker left, without secrets."""
    value = kept_value(dict(kept), "what the broker left in the tier")
    fields = value.fields()
    if _PLAIN_FIELDS & set(fields):
        return plain_rules([fields], has_secrets=False)
    return auth_rules([fields], cluster, has_secrets=False)


class AccessGuard:
    """Lets requests through to a mount, or refuses them.

    ``check`` is for the server's loop, ``look`` for one thread at a time.
    """

    def __init__(self, path: Path, cluster: str, kept: Mapping[str, Any] | None) -> None:
        """Read the rules. InvalidError: there are none in it."""
        self.refused: Counter[Reason] = Counter()  # requests
        self.reloads = 0  # how often the files had changed, and were taken over
        self.trouble = ""  # why what the files say now is not in force; empty: it is
        self._path = path
        self._cluster = cluster
        self._kept = kept
        self._seen = self._stamp()
        self._taken: _Stamp | None = self._seen
        self._rules = read_rules(path, cluster, kept)

    @property
    def keys(self) -> set[str]:
        """Access keys that there are rules for."""
        return self._rules.keys()

    def check(self, request: Command, peer: str) -> None:
        """Return if a request may be answered. RefusalError: it may not."""
        try:
            self._rules.judge(request, ip_of(peer))
        except AccessDeniedError as error:
            self.refused[error.reason] += 1
            raise

    def look(self) -> None:
        """Take over what has changed, as soon as it is the same in two looks."""
        stamp, self._seen = self._seen, self._stamp()
        if self._seen != stamp or stamp == self._taken:
            return
        self._taken = stamp
        try:
            rules = read_rules(self._path, self._cluster, self._kept)
        except InvalidError as error:
            self.trouble = str(error)
            _LOG.error("the rules stay as they were: %s", error)
            return
        self._rules, self.trouble = rules, ""
        self.reloads += 1
        _LOG.info("rules taken over from %s", self._path)

    def _stamp(self) -> _Stamp:
        return tuple(_stamps(files_of(self._path)))


def _stamps(files: list[Path]) -> Iterator[tuple[str, int, int, int]]:
    for file in files:
        try:
            found = file.stat()
            yield str(file), found.st_mtime_ns, found.st_size, found.st_ino
        except OSError:
            yield str(file), -1, -1, -1
