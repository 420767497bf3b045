"""Counts the messages of every queue at once, with asyncio: python read_async.py URL TOPIC"""

import asyncio
import sys

import tiered


async def count(tier: tiered.AsyncTier, topic: str, queue_id: int) -> int:
    total = 0
    async for batch in tier.read_records(topic, queue_id):
        total += int((batch.records.sizes > 0).sum())
    return total


async def main(url: str, topic: str) -> None:
    async with await tiered.open_async(url) as tier:
        queues = tier.queues(topic)
        counts = await asyncio.gather(*(count(tier, topic, q.queue_id) for q in queues))
        for queue, number in zip(queues, counts, strict=True):
            print(queue.queue_id, number)


if __name__ == "__main__":
    if not sys.argv[2:]:
        sys.exit(__doc__)
    asyncio.run(main(*sys.argv[1:3]))
