"""Looks messages up by time, by filter and by key: python find_messages.py URL TOPIC KEY"""

import sys
from datetime import UTC, datetime, timedelta

import tiered


def main(url: str, topic: str, key: str) -> None:
    with tiered.open(url) as tier:
        queue_id = tier.queues(topic)[0].queue_id
        since = tier.offset_for_time(topic, queue_id, datetime.now(UTC) - timedelta(days=365))
        print("since a year ago:", sum(1 for _ in tier.read(topic, queue_id, since)))

        tagged = tier.read_topic(topic, tags="TagA || TagB")
        print("by tag:", sum(1 for _ in tagged))
        chosen = tier.read_topic(topic, sql="TAGS = 'TagA' AND KEYS IS NOT NULL")
        print("by expression:", sum(1 for _ in chosen))

        found = tier.query(topic, key)
        if found.unscanned:
            print("not looked at:", found.unscanned, "messages that no index covers")
        for message in found:
            print("by key:", message.queue_id, message.queue_offset, message.store_time)


if __name__ == "__main__":
    if not sys.argv[3:]:
        sys.exit(__doc__)
    main(*sys.argv[1:4])
