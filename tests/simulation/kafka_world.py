"""A world whose queues are partitions of a Kafka node; all else is as in the others."""

from __future__ import annotations

from typing import TYPE_CHECKING

from simulation.kafka_broker import KafkaBroker
from simulation.world import World

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from simulation.broker import Broker, QueueKey
    from simulation.contents import Section
    from simulation.incarnations import ModelIncarnation

THOROUGH_EVERY = 2


class KafkaWorld(World):
    """See the module."""

    reads_records = False

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.is_thorough = seed % THOROUGH_EVERY == 0

    def _make_broker(self, topics: Sequence[str], queues: int) -> Broker:
        return KafkaBroker(self.rng, topics, queues)

    def _choose_operations(self) -> list[tuple[Callable[[], None], float]]:
        assert isinstance(self.broker, KafkaBroker)
        cleans = self.rng.choice((0.0, 2.0, 6.0))
        return [*super()._choose_operations(), *((self.broker.clean_some, cleans),) * bool(cleans)]

    def _part_of_clone(
        self, key: QueueKey, incarnation: ModelIncarnation
    ) -> tuple[tuple[str, int, int], Section] | None:
        """A clone that tells of no lineage would be none."""
        return None
