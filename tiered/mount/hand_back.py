"""Handing back: what groups have told a mount goes to the broker whose disk is there again, before that starts.

Overview: offsets of consumer groups go into ``config/consumerOffset.json``, of which a copy is kept; what was sent back to
the mount is appended to the broker's log: what waits, what groups have not consumed of their retry topics, and dead
letters. What waits begins to wait anew, since a broker counts from when it has stored a message.

Ordering: the mount's place is taken first, so that no mount serves meanwhile, then the broker's lock, so that it does not
start; then messages, offsets, and at last the retry log gives up what it had.

After a crash the same command does all of it again: what was appended already is there twice then. For one thread.
"""

from __future__ import annotations

import contextlib
import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from backends.lazy_dataclass import dataclass
from tiered.api.broker_place import (
    RetryPlace,
    require_rocketmq,
    require_same_store,
    retry_places,
    store_document,
)
from tiered.api.stores import backend_errors
from tiered.errors import InvalidError
from tiered.format.fastjson import loads
from tiered.keys import mount_prefix
from tiered.local.catalog import RETRY_PREFIX, SCHEDULE_TOPIC
from tiered.local.layout import OFFSETS_FILE, read_text
from tiered.local.rocketmq import RocketMQOptions, RocketMQStore
from tiered.log.broker_tables import read_handover
from tiered.model import MessageQueue
from tiered.mount.offsets import OffsetsKeeper, mounts_with_offsets
from tiered.mount.retries import RetryWriter, consumed_of
from tiered.store.disk import Disk, make_folder, replace_file
from tiered.store.embedded import MessageStore
from tiered.store.special import message_of

if TYPE_CHECKING:
    import random
    from collections.abc import Iterator, Mapping

    from tiered.api.open_tier import OpenTier
    from tiered.clock import Clock
    from tiered.format.record import Record
    from tiered.mount.offsets import Name

LEASE_S = 30.0


@dataclass(frozen=True, slots=True)
class HandedBack:
    """What was handed back."""

    offsets: int = 0  # queues of which a group's offset was written
    waiting: int = 0  # messages that wait for their time
    retries: int = 0  # messages that groups have not consumed of their retry topics
    dead: int = 0  # dead letters
    kept_as: str = ""  # the copy of the broker's offsets as they were; empty: there were none


def hand_back(
    tier: OpenTier, directory: str, mount: str, clock: Clock, rng: random.Random
) -> HandedBack:
    """Hand back what a mount knows.

    Args:
        mount: Its name, with ``/address`` of one that is shared.

    Raises:
        InvalidError: It is not the tier's broker's store, a broker runs on it, or no such mount has kept anything.
        FencedError: The mount serves.
    """
    _require_stopped(tier, directory)
    with backend_errors():
        there = mounts_with_offsets(tier.store, tier.place.prefix)
    if mount not in there:
        raise InvalidError(
            f"no mount {mount!r} has kept anything of this tier, but {', '.join(there) or 'none at all'}",
            where=tier.store.url,
            do="name one of these with --mount",
        )
    name, _, member = mount.partition("/")
    keeper = OffsetsKeeper(
        tier.meter,
        tier.store,
        mount_prefix(tier.place.prefix, name, member),
        clock,
        rng,
        lease_s=LEASE_S,
    )
    with contextlib.ExitStack() as held, backend_errors():
        known = keeper.begin(wait=False, announce=lambda _state: None, stop=lambda _seconds: True)
        held.callback(keeper.end)
        handover = read_handover(tier.store, tier.place.prefix, tier.state.store)
        if keeper.handover != (handover.key if handover is not None else ""):
            raise InvalidError(
                "the broker has been back since that mount served: what it knows is older than what the broker does",
                where=tier.store.url,
                do="start the broker as it is",
            )
        place = tier.place
        store = held.enter_context(
            MessageStore.open(directory, cluster=place.cluster, broker=place.broker, clock=clock)
        )
        return _Handing(tier, store, known, RetryPlace(place.cluster, place.broker, mount)).run(
            clock, rng
        )


def _require_stopped(tier: OpenTier, directory: str) -> None:
    """Refuse another broker's store, and one that is being written to."""
    place = tier.place
    names = RocketMQOptions(cluster=place.cluster, broker=place.broker)
    require_rocketmq(
        tier.state.store.get("kind"), "only brokers of RocketMQ are handed back to", tier.store.url
    )
    with contextlib.closing(RocketMQStore.open(directory, options=names)) as local:
        if local.identity.is_live:
            raise InvalidError(
                "a broker runs on the store", where=directory, do="stop it, and say it again"
            )
        require_same_store(tier.state.store, store_document(local.identity, place), directory)


@dataclass(slots=True)
class _Handing:
    """One handing back, with everything held."""

    tier: OpenTier
    store: MessageStore
    known: Mapping[Name, Mapping[int, int]]
    place: RetryPlace

    def run(self, clock: Clock, rng: random.Random) -> HandedBack:
        ends = {queue: int(end) for queue, end in self.store.queues().items()}
        offsets = {name: dict(row) for name, row in self.known.items()}
        writer = self._writer(clock, rng)
        counts = {SCHEDULE_TOPIC: 0, RETRY_PREFIX: 0, "": 0}
        for topic in {queue.topic for queue in writer.state.queues} if writer else ():
            if topic != SCHEDULE_TOPIC:
                self.store.create_topic(topic, queues=1)  # as brokers make them
        for queue, record in self._left(writer, offsets) if writer else ():
            self.store.append_as_is(message_of(record))
            kinds = (SCHEDULE_TOPIC, RETRY_PREFIX, "")
            counts[next(kind for kind in kinds if queue.topic.startswith(kind))] += 1
        self.store.flush()
        result = self._write_offsets(offsets, ends, clock)
        if writer is not None:
            writer.give_up()
        waiting, retries, dead = counts.values()
        return replace(result, waiting=waiting, retries=retries, dead=dead)

    def _writer(self, clock: Clock, rng: random.Random) -> RetryWriter | None:
        if self.place not in retry_places(self.tier.store, self.tier.place):
            return None
        tier = self.tier
        writer = RetryWriter(
            tier.meter,
            tier.store,
            self.place.prefix,
            clock,
            rng,
            place=tier.place,
            old_end=lambda _queue: 0,  # what is there is handed back, and nothing begins
        )
        writer.begin()
        return writer

    def _left(
        self, writer: RetryWriter, offsets: dict[Name, dict[int, int]]
    ) -> Iterator[tuple[MessageQueue, Record]]:
        """What of the log is not consumed; a group that has gone on in it is where the log's part of its queue begins."""
        for queue, incarnations in writer.state.queues.items():
            now = incarnations[-1]
            at = consumed_of(self.known, queue)
            start = max(at, now.min_offset)
            if at > now.min_offset:
                group = queue.topic.removeprefix(RETRY_PREFIX)
                offsets[group, queue.topic][queue.queue_id] = int(now.min_offset)
            if start < now.commit_offset:
                for record in writer.reader.records(queue, start, now.commit_offset):
                    yield queue, record

    def _write_offsets(
        self,
        offsets: Mapping[Name, Mapping[int, int]],
        ends: Mapping[MessageQueue, int],
        clock: Clock,
    ) -> HandedBack:
        """Put them into the broker's table, in one step; none beyond what its queue had."""
        root = Path(self.store.root)
        path = root / OFFSETS_FILE
        text = read_text(str(path))
        document: dict[str, Any] = dict(loads(text)) if text is not None else {}
        table = {name: dict(row) for name, row in document.get("offsetTable", {}).items()}
        count = 0
        for (group, topic), row in sorted(offsets.items()):
            told = {
                str(queue_id): min(offset, ends.get(MessageQueue(topic, queue_id), 0))
                for queue_id, offset in row.items()
            }
            table[f"{topic}@{group}"] = {**table.get(f"{topic}@{group}", {}), **told}
            count += len(told)
        kept = ""
        with Disk(str(root)):
            make_folder(path.parent)
            if text is not None:
                kept = f"{path.name}.{clock.now_ms()}"
                replace_file(path.with_name(kept), path.read_bytes())
            data = json.dumps({**document, "offsetTable": table}, ensure_ascii=False, indent="\t")
            replace_file(path, data.encode("utf-8", "surrogateescape"))
        return HandedBack(count, kept_as=kept)
