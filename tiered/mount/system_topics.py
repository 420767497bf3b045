"""Topics that a proxy of RocketMQ 5.x makes for itself on the brokers of its cluster, or it does not start.

In cluster mode it keeps other proxies told of its clients by messages of such a topic. Where a mount is the only broker, the
topic is made on it: announced as one that can be written to, though what is sent there is let go. So proxies do not know of
one another's clients, which consumers and ``mqadmin`` behind them notice in lists of consumers alone. As soon as a live
broker of the cluster takes messages of the topic, it is left to that one. Nothing of it is kept: a proxy makes it again at
its start.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from tiered.format.remoting import Command
from tiered.mount import protocol
from tiered.mount.protocol import READ_ONLY, Code, RefusalError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tiered.mount.name_servers import MountedTopics, NameServers
    from tiered.mount.server import Exchange, Handled, Handler

SYSTEM_TOPICS: Final = frozenset({"DefaultHeartBeatSyncerTopic"})


class SystemTopics:
    """Answers who makes such a topic, and who sends to it."""

    def __init__(
        self, topics: MountedTopics, names: NameServers, otherwise: Mapping[int, Handler]
    ) -> None:
        """None is there yet.

        Args:
            otherwise: What answers requests of other topics, by code; else they are refused.
        """
        self._topics, self._names, self._otherwise = topics, names, otherwise

    def handlers(self) -> Mapping[int, Handler]:
        """By code."""
        return {
            protocol.UPDATE_AND_CREATE_TOPIC: self.create,
            protocol.SEND_MESSAGE: lambda asked: self.send(asked, "topic", "queueId"),
            protocol.SEND_MESSAGE_V2: lambda asked: self.send(asked, "b", "e"),
        }

    def create(self, asked: Exchange) -> Handled:
        """UPDATE_AND_CREATE_TOPIC."""
        topic = asked.request.fields.get("topic")
        return self._create(topic) if topic in SYSTEM_TOPICS else self._refuse(asked)

    async def _create(self, topic: str) -> Command:
        """Announce it, if nobody else has it; name servers know it when it is answered."""
        try:
            others = {broker for broker, _, _ in await self._names.queues(topic)}
        except RefusalError as error:
            if error.code != Code.TOPIC_NOT_EXIST:
                raise
            others = set()
        if others and topic not in self._topics.queues:
            raise RefusalError(Code.NO_PERMISSION, f"{READ_ONLY}, and others have the topic")
        if self._topics.add_system(topic):
            await self._names.register()
        return Command(Code.SUCCESS)

    def send(self, asked: Exchange, topic: str, queue_id: str) -> Handled:
        """SEND_MESSAGE and SEND_MESSAGE_V2, whose fields have names of one letter: let go."""
        fields = asked.request.fields
        if fields.get(topic) not in SYSTEM_TOPICS:
            return self._refuse(asked)
        told = {"msgId": "", "queueId": fields.get(queue_id, "0"), "queueOffset": "0"}
        return Command(Code.SUCCESS, fields=told)

    def _refuse(self, asked: Exchange) -> Handled:
        answer = self._otherwise.get(asked.request.code)
        if answer is None:
            raise RefusalError(Code.NO_PERMISSION, READ_ONLY)
        return answer(asked)
