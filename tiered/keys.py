"""Builds and parses every object key of a tier (the only module that does).

Layout, relative to the URL of the tier::

    <hash8>_<cluster>/<broker>/
        journal/<n>                                   entry
        journal/<n>.checkpoint                        state after entry n
        shard/<n>-<digest>                            part of states, stored at entry n; checkpoints name it
        lease                                         the one mutable object
        bundle/<level>/<time_ms>-<epoch>-<writer>-<sequence>           sections of many queues
        topic/<topic>/<level>/<time_ms>-<epoch>-<writer>-<sequence>    of the queues of one topic
        queue/<topic>/<queue_id>/<incarnation>/<queue_offset>-<epoch>-<writer>-<sequence>   of one queue
        ledger/<time_ms>-<run>-<step>                 what a run that deletes was about to do, and did
        timer/                                        of timers: a journal, a lease and bundles of their own (docs/timers.md)
        meta/journal/<n>.checkpoint                   a second copy of that state, for who rebuilds a lost journal
        meta/mount/<name>/                            of mounts: a journal and a lease of their own (docs/formats/mount.md)
        meta/handover/<time_ms>-<epoch>-<writer>-<sequence>   what a broker knew that is gone (docs/formats/metadata.md)
        meta/handover/….recalled                                   it is back
        quarantine/<topic>/<queue_id>/<incarnation>/<queue_offset>-<epoch>-<writer>-<sequence>
        index/<begin>-<epoch>-<writer>-<sequence>   key index; ``begin``: its smallest store time, ms

Beside the brokers, ``mounts/<member>/lease`` is the sign of life of a member of a fleet of mounts (``tiered mount --auto``).

Offsets and times have 20 decimal digits, a level one, other numbers 10. Keys of bundles begin with the time at which they
were begun, so that one listing shows what is new; those of one queue with their first queue offset.
``writer`` is a random 8-hex-digit id of the process and ``sequence``
counts the objects that it has begun, so no two tries ever share a key; of a guest beside a writer it has up to 20 digits.

Names (cluster, broker, topic) are escaped: letters, digits, ``_ - % |`` stand for themselves, any other byte of the
UTF-8 form is ``~`` and two hex digits. Where the store takes names for one that differ only in case (a folder of macOS or
SMB, found by the probe), topics' capital letters are escaped as well, so that ``Orders`` and ``orders`` have each their own
folder; either spelling is understood everywhere, so that a tier can be copied from one kind of store to the other. An
escaped name of over 240 bytes is cut into several key segments, each but the last ending in ``~+``. No key is another key
plus ``/…``, which one server would store and never list: every leaf lies in a folder in which only leaves lie, and
``lease`` cannot be a folder.

Limits: with a topic of 255 bytes that must all be escaped a key has up to 877 bytes behind the broker's prefix, so a prefix
of up to ``PREFIX_BYTES_MAX`` bytes (with the path of the tier's URL) keeps every key within the 1,024 that all servers bear.
"""

from __future__ import annotations

import hashlib
from itertools import count
from typing import TYPE_CHECKING

from backends.lazy_dataclass import dataclass
from tiered.model import MessageQueue, QueueOffset

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

OFFSET_DIGITS = 20
NUMBER_DIGITS = 10
GUEST_TURN = 10**NUMBER_DIGITS
"""A writer counts its objects below it; from it on count those who write beside the tier's writer."""
PREFIX_BYTES_MAX = 145
LEVEL_MAX = 9
LEASE = "lease"
JOURNAL = "journal/"
SHARD = "shard/"
BUNDLE = "bundle/"
TOPIC = "topic/"
QUEUE = "queue/"
QUARANTINE = "quarantine/"
LEDGER = "ledger/"
INDEX = "index/"
MIRROR = "meta/"
"""In front of a checkpoint's own key: where its second copy lies."""
MOUNT = "meta/mount/"
RETRIES = "retry/"
"""Below a mount's place."""
TIMER = "timer/"
HANDOVER = "meta/handover/"
MEMBERS = "mounts/"
"""At the tier's URL, not below a broker."""
DATA_ROOTS = (BUNDLE, TOPIC, QUEUE, INDEX, QUARANTINE)
"""Where the objects lie that a writer makes; it makes none before its journal has an entry."""
_CHECKPOINT = ".checkpoint"
_RECALLED = ".recalled"
_SAFE = frozenset(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_-%|")
_CAPITALS = frozenset(b"ABCDEFGHIJKLMNOPQRSTUVWXYZ")
_SEGMENT_BYTES_MAX = 240
_CONTINUED = "~+"
_HEX = frozenset("0123456789abcdef")


@dataclass(frozen=True, slots=True)
class ObjectId:
    """The part of a key that makes it unique among all tries of all writers."""

    epoch: int
    writer: str
    sequence: int

    @property
    def age(self) -> tuple[int, int, int]:
        """Of two objects with the same messages the later one has the greater: a lost journal is rebuilt by it.

        Epoch; how many objects the writer had begun; and the turn of a guest (``maintenance_sequences``) behind these.
        """
        turn, begun = divmod(self.sequence, GUEST_TURN)
        return self.epoch, begun if turn else begun + 1, turn

    def __str__(self) -> str:
        return f"{self.epoch:0{NUMBER_DIGITS}d}-{self.writer}-{self.sequence:0{NUMBER_DIGITS}d}"


def maintenance_sequences(named: Iterable[ObjectId], epoch: int) -> Iterator[int]:
    """Sequence numbers for who rewrites objects of a tier without being its writer.

    What it makes is later than all that it takes the place of, by whomever; and earlier than whatever the present writer
    begins from now on, since a writer that truncates messages writes others in their place.

    Args:
        named: What the journal names of the queues.
    """
    ages = [one.age for one in named if one.epoch == epoch]
    begun = max((begun for _, begun, _ in ages), default=0)
    turn = max((turn for _, _, turn in ages), default=0)
    return count((turn + 1) * GUEST_TURN + begun, GUEST_TURN)


@dataclass(frozen=True, slots=True)
class DataKey:
    """What the key of a data object says."""

    kind: str
    """``bundle``, ``topic`` or ``queue``: a bundle of many queues, of one topic, of one queue; ``quarantine``."""
    object_id: ObjectId  # who made it
    topic: str = ""  # whose data; empty for ``bundle``
    queue_id: int = -1  # likewise; -1 for ``bundle`` and ``topic``
    incarnation: int = -1  # which incarnation of the queue; -1 likewise
    level: int = -1  # of a ``bundle`` or ``topic``; else -1
    begins: int = 0  # queue offset of the first item, or the time at which the bundle was begun, ms
    escapes_case: bool = False  # capital letters of the topic are escaped

    @property
    def queue(self) -> MessageQueue | None:
        """Whose data, if the key says so."""
        return MessageQueue(self.topic, self.queue_id) if self.queue_id >= 0 else None


def escape_name(name: str, *, escapes_case: bool = False) -> str:
    """Turn any name into key segments, reversibly.

    Args:
        escapes_case: Capital letters do not stand for themselves.
    """
    safe = _SAFE - _CAPITALS if escapes_case else _SAFE
    chunks = [
        chr(byte) if byte in safe else f"~{byte:02x}"
        for byte in name.encode("utf-8", "surrogateescape")
    ]
    segments, size = [""], 0
    for chunk in chunks:
        if size + len(chunk) > _SEGMENT_BYTES_MAX:
            segments[-1] += _CONTINUED
            segments.append("")
            size = 0
        segments[-1] += chunk
        size += len(chunk)
    return "/".join(segments) if name else "~"


def unescape_name(text: str) -> str:
    """Undo ``escape_name``.

    Raises:
        ValueError: ``text`` was not made by ``escape_name``.
    """
    if text == "~":
        return ""
    raw, index = bytearray(), 0
    joined = text.replace(f"{_CONTINUED}/", "")
    while index < len(joined):
        if joined[index] == "~":
            raw.append(int(joined[index + 1 : index + 3], 16))
            index += 3
        else:
            raw += joined[index].encode()
            index += 1
    name = raw.decode("utf-8", "surrogateescape")
    if text not in {escape_name(name), escape_name(name, escapes_case=True)}:
        raise ValueError(f"not an escaped name: {text!r}")
    return name


def cluster_segment(cluster: str) -> str:
    """``<hash8>_<cluster>``: the hash spreads clusters over an object store's key space."""
    digest = hashlib.md5(cluster.encode("utf-8", "surrogateescape"), usedforsecurity=False)
    return f"{digest.hexdigest()[:8]}_{escape_name(cluster)}"


def broker_prefix(cluster: str, broker: str) -> str:
    """Prefix of one broker's tier, ending in a slash."""
    return f"{cluster_segment(cluster)}/{escape_name(broker)}/"


def entry_key(prefix: str, number: int) -> str:
    """Key of journal entry ``number``."""
    return f"{prefix}{JOURNAL}{number:0{OFFSET_DIGITS}d}"


def checkpoint_key(prefix: str, number: int) -> str:
    """Key of the state after journal entry ``number``."""
    return entry_key(prefix, number) + _CHECKPOINT


def parse_journal_key(prefix: str, key: str) -> tuple[int, bool] | None:
    """Number of a journal key and whether it is a checkpoint; None when it is neither."""
    name = key.removeprefix(prefix + JOURNAL)
    digits = name.removesuffix(_CHECKPOINT)
    if name == key or len(digits) != OFFSET_DIGITS or not (digits.isascii() and digits.isdigit()):
        return None
    return int(digits), digits != name


def shard_key(prefix: str, number: int, digest: str) -> str:
    """Key of a shard that was stored at journal entry ``number``; ``digest`` is 16 hex digits."""
    return f"{prefix}{SHARD}{number:0{OFFSET_DIGITS}d}-{digest}"


def parse_shard_key(prefix: str, key: str) -> int | None:
    """Number of the entry at which a shard was stored; None when the key is none of a shard."""
    digits, separator, _ = key.removeprefix(prefix + SHARD).partition("-")
    is_number = separator and len(digits) == OFFSET_DIGITS and digits.isascii() and digits.isdigit()
    return int(digits) if is_number else None


def ledger_key(prefix: str, time_ms: int, run: str, step: int) -> str:
    """Key of a record of what a run did; ``run`` is a random id of 8 hex digits, ``step`` counts its records."""
    return f"{prefix}{LEDGER}{time_ms:0{OFFSET_DIGITS}d}-{run}-{step:0{NUMBER_DIGITS}d}"


def mount_prefix(prefix: str, name: str, member: str = "") -> str:
    """Prefix of what the mount that serves a broker's tier as ``name`` writes, ending in a slash.

    ``member`` tells apart those that share a name, each for other clients.
    """
    shared = f"shared/{escape_name(member)}/" if member else ""
    return f"{prefix}{MOUNT}{escape_name(name)}/{shared}"


def member_prefix(member: str) -> str:
    """Prefix of the sign of life of a member of a fleet, ending in a slash."""
    return f"{MEMBERS}{escape_name(member)}/"


def parse_member_key(key: str) -> str | None:
    """The member whose sign of life has this key; None: it is none."""
    name = key.removeprefix(MEMBERS).removesuffix(f"/{LEASE}")
    try:
        member = unescape_name(name)
    except ValueError:
        return None
    return member if member_prefix(member) + LEASE == key else None


def handover_key(prefix: str, time_ms: int, made: ObjectId) -> str:
    """Key of what a broker knew when it was decommissioned at ``time_ms``."""
    return f"{prefix}{HANDOVER}{_time(time_ms)}-{made}"


def recall_key(prefix: str, time_ms: int, made: ObjectId) -> str:
    """Key of the note that the broker is back, so that nothing older below ``HANDOVER`` counts any more."""
    return handover_key(prefix, time_ms, made) + _RECALLED


def parse_handover_key(prefix: str, key: str) -> tuple[int, ObjectId, bool] | None:
    """Time, maker, and whether the broker is back; None when the key is of another kind or another prefix. Strict."""
    said = key.removesuffix(_RECALLED)
    try:
        time_ms, epoch, writer, sequence = said.removeprefix(prefix + HANDOVER).split("-")
        made = ObjectId(int(epoch), writer, int(sequence))
        is_whole = handover_key(prefix, int(time_ms), made) == said
    except ValueError:
        return None
    if not is_whole or len(writer) != 8 or not _HEX.issuperset(writer):  # noqa: PLR2004 (the id's fixed width)
        return None
    return int(time_ms), made, said != key


def queue_prefix(prefix: str, queue: MessageQueue, *, escapes_case: bool = False) -> str:
    """Prefix of the bundles of one queue, all incarnations, in one of the two spellings."""
    return f"{prefix}{QUEUE}{_queue_path(queue, escapes_case=escapes_case)}/"


def bundle_key(prefix: str, level: int, time_ms: int, made: ObjectId) -> str:
    """Key of a bundle of many queues that is begun at ``time_ms``."""
    return f"{prefix}{BUNDLE}{_level(level)}/{_time(time_ms)}-{made}"


def topic_bundle_key(
    prefix: str, topic: str, level: int, time_ms: int, made: ObjectId, *, escapes_case: bool = False
) -> str:
    """Key of a bundle of one topic's queues that is begun at ``time_ms``."""
    name = escape_name(topic, escapes_case=escapes_case)
    return f"{prefix}{TOPIC}{name}/{_level(level)}/{_time(time_ms)}-{made}"


def queue_bundle_key(
    prefix: str,
    queue: MessageQueue,
    incarnation: int,
    queue_offset: QueueOffset,
    made: ObjectId,
    *,
    escapes_case: bool = False,
) -> str:
    """Key of a bundle of one queue that begins at ``queue_offset``."""
    root = queue_prefix(prefix, queue, escapes_case=escapes_case)
    return _data_key(root, incarnation, queue_offset, made)


def _level(level: int) -> int:
    if not 0 <= level <= LEVEL_MAX:
        raise ValueError(f"there is no level {level}")
    return level


def _time(time_ms: int) -> str:
    return f"{max(0, time_ms):0{OFFSET_DIGITS}d}"


def quarantine_key(
    prefix: str,
    queue: MessageQueue,
    incarnation: int,
    queue_offset: QueueOffset,
    made: ObjectId,
    *,
    escapes_case: bool = False,
) -> str:
    """Key of the raw bytes of a damaged record."""
    root = f"{prefix}{QUARANTINE}{_queue_path(queue, escapes_case=escapes_case)}/"
    return _data_key(root, incarnation, queue_offset, made)


def index_key(prefix: str, begin_ms: int, made: ObjectId) -> str:
    """Key of an object of the key index whose smallest store time is ``begin_ms`` (0: none, or before 1970)."""
    return f"{prefix}{INDEX}{begin_ms:0{OFFSET_DIGITS}d}-{made}"


def parse_index_key(prefix: str, key: str) -> ObjectId | None:
    """Who made an object of the key index; None when the key is of another kind or another prefix. Strict."""
    try:
        begin, epoch, writer, sequence = key.removeprefix(prefix + INDEX).split("-")
        made = ObjectId(int(epoch), writer, int(sequence))
        is_whole = index_key(prefix, int(begin), made) == key
    except ValueError:
        return None
    return made if is_whole and len(writer) == 8 and _HEX.issuperset(writer) else None  # noqa: PLR2004 (the id's fixed width)


def maker_of(key: str) -> ObjectId | None:
    """Who made a data object or an object of the key index, by its key below the broker's prefix; None: neither."""
    data = parse_data_key("", key)
    return data.object_id if data else parse_index_key("", key)


def parse_data_key(prefix: str, key: str) -> DataKey | None:
    """What the key of a bundle or of a quarantined record says; None when it is of another kind or another prefix.

    Strict: what is parsed gives the same key when it is built again.
    """
    if not key.startswith(prefix):
        return None
    try:
        parsed = _parse_data_key(key.removeprefix(prefix))
        return parsed if parsed and prefix + _build(parsed) == key else None
    except ValueError:
        return None


def _parse_data_key(rest: str) -> DataKey | None:
    *path, leaf = rest.split("/")
    begins, epoch, writer, sequence = leaf.split("-")
    if not path or len(writer) != 8 or not _HEX.issuperset(writer):  # noqa: PLR2004 (the id's fixed width)
        return None
    made = ObjectId(int(epoch), writer, int(sequence))
    kind, *names = path
    if kind == "bundle":
        (level,) = names
        return DataKey(kind, made, level=int(level), begins=int(begins))
    if kind == "topic":
        *name, level = names
        topic, escapes = _topic(name)
        return DataKey(
            kind, made, topic, level=int(level), begins=int(begins), escapes_case=escapes
        )
    if kind not in {"queue", "quarantine"}:
        return None
    *name, queue_id, incarnation = names
    topic, escapes = _topic(name)
    place = int(queue_id), int(incarnation)
    return DataKey(kind, made, topic, *place, begins=int(begins), escapes_case=escapes)


def _topic(name: list[str]) -> tuple[str, bool]:
    escaped = "/".join(name)
    topic = unescape_name(escaped)
    return topic, escaped != escape_name(topic)


def _build(key: DataKey) -> str:
    if key.kind == "bundle":
        return bundle_key("", key.level, key.begins, key.object_id)
    escapes = key.escapes_case
    if key.kind == "topic":
        made = key.object_id
        return topic_bundle_key("", key.topic, key.level, key.begins, made, escapes_case=escapes)
    assert key.queue is not None
    root = QUARANTINE if key.kind == "quarantine" else QUEUE
    path = _queue_path(key.queue, escapes_case=escapes)
    return _data_key(f"{root}{path}/", key.incarnation, key.begins, key.object_id)


def _queue_path(queue: MessageQueue, *, escapes_case: bool) -> str:
    topic = escape_name(queue.topic, escapes_case=escapes_case)
    return f"{topic}/{queue.queue_id:0{NUMBER_DIGITS}d}"


def _data_key(root: str, incarnation: int, offset: int, made: ObjectId) -> str:
    folder = f"{incarnation:0{NUMBER_DIGITS}d}"
    return f"{root}{folder}/{offset:0{OFFSET_DIGITS}d}-{made}"
