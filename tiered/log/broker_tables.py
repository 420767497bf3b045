"""What a broker knew besides its messages, kept in its tier when it was decommissioned (docs/formats/metadata.md).

An object ``meta/handover/…`` holds it: one JSON line and its checksum, as journal entries. The tier's journal names it in
the document of the store that it belongs to (``meta`` action, member ``handover``): as long as that stands there, the
broker is gone, and no writer goes on. Pure but for ``read_handover`` and ``recall``, one request each.
"""

from __future__ import annotations

from dataclasses import field, replace
from typing import TYPE_CHECKING, Any, Final

from backends.lazy_dataclass import dataclass
from backends.wrapping import put_own
from tiered.errors import OtherVersionError
from tiered.journal.entry import open_text, seal_text
from tiered.keys import parse_handover_key, recall_key

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from backends.base import ObjectInfo, ObjectStore
    from tiered.keys import ObjectId

HANDOVER: Final = "handover"
"""Member of the store's document that names the object."""
FORMAT: Final = 1
Offsets = dict[tuple[str, str], dict[int, int]]
"""By group and topic, then by queue id: the next queue offset that the group wants."""


@dataclass(frozen=True, slots=True)
class Handover:
    """What a broker knew."""

    time_ms: int  # when it was written down, UTC
    topics: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """The broker's ``TopicConfig`` of each topic, also of its system topics, as it was."""
    groups: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Its ``SubscriptionGroupConfig`` of each group, likewise."""
    offsets: Offsets = field(default_factory=dict)  # where groups were
    delay_offsets: Mapping[int, int] = field(default_factory=dict)
    """Queue offset up to which the messages of each delay level were delivered."""
    pending: Sequence[Mapping[str, Any]] = ()
    """What was not done when it was written, ``{"what": …, "count": …}`` each."""
    notes: Sequence[str] = ()  # what was met in the broker's tables, for people
    acl: Mapping[str, Any] | None = None
    """Who was allowed what, without secrets, as ``tiered.mount.acl`` has it; None: it is not known."""
    key: str = field(default="", compare=False)
    """Of the object it was read from, below the broker's prefix; not part of it."""

    def encode(self) -> bytes:
        """As the object holds it."""
        offsets = [
            [group, topic, sorted(row), [row[queue_id] for queue_id in sorted(row)]]
            for (group, topic), row in sorted(self.offsets.items())
        ]
        return seal_text(
            {
                "format": FORMAT,
                "time_ms": self.time_ms,
                "topics": self.topics,
                "groups": self.groups,
                "consumer_offsets": offsets,
                "delay_offsets": sorted(self.delay_offsets.items()),
                "pending": list(self.pending),
                "notes": list(self.notes),
                **({"acl": self.acl} if self.acl is not None else {}),
            }
        )

    @classmethod
    def decode(cls, data: bytes, *, where: str) -> Handover:
        """Undo ``encode``."""
        document = open_text(data, where=where, versions=(FORMAT,))
        try:
            return cls(
                int(document["time_ms"]),
                {str(name): dict(row) for name, row in document["topics"].items()},
                {str(name): dict(row) for name, row in document["groups"].items()},
                {
                    (str(group), str(topic)): dict(zip(ids, offsets, strict=True))
                    for group, topic, ids, offsets in document["consumer_offsets"]
                },
                {int(level): int(offset) for level, offset in document["delay_offsets"]},
                tuple(dict(one) for one in document["pending"]),
                tuple(str(note) for note in document["notes"]),
                dict(document["acl"]) if "acl" in document else None,
            )
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise OtherVersionError(
                f"a broker's metadata has another form: {error!r:.200}", where=where
            ) from error


def recall(objects: ObjectStore, prefix: str, time_ms: int, made: ObjectId) -> None:
    """Note beside what a broker left that it is back: for who has to tell without the journal."""
    data = seal_text({"format": FORMAT, "time_ms": time_ms})
    put_own(objects, recall_key(prefix, time_ms, made), data)


def found_handover(listed: Iterable[ObjectInfo], prefix: str) -> dict[str, Any]:
    """The mark that objects alone allow (the member ``HANDOVER`` of the store's document); empty: the broker is not gone.

    The newest below ``meta/handover/`` counts, by epoch and then by time: what a broker left, or that it is back.
    """
    parsed = [(found, info) for info in listed if (found := parse_handover_key(prefix, info.key))]
    if not parsed:
        return {}
    (time_ms, _, is_back), info = max(
        parsed, key=lambda one: (one[0][1].epoch, one[0][0], one[0][1].sequence, one[0][2])
    )
    key = info.key[len(prefix) :]
    return {} if is_back else {"key": key, "size_bytes": info.size_bytes, "time_ms": time_ms}


def is_handed_over(store: Mapping[str, Any]) -> bool:
    """Whether the broker was decommissioned, by the document of its store (``TierState.store``)."""
    return bool(store.get(HANDOVER))


def read_handover(objects: ObjectStore, prefix: str, store: Mapping[str, Any]) -> Handover | None:
    """What the broker of a tier knew; None: it was not decommissioned."""
    if not is_handed_over(store):
        return None
    key = str(store[HANDOVER]["key"])
    where = f"{objects.url}/{prefix}{key}"
    return replace(Handover.decode(objects.get(prefix + key), where=where), key=key)
