"""Prints the messages of a topic: python read_messages.py URL TOPIC"""

import sys

import tiered


def main(url: str, topic: str) -> None:
    with tiered.open(url) as tier:
        for queue in tier.queues(topic):
            bounds = tier.bounds(topic, queue.queue_id)
            print(f"{queue}: queue offsets {bounds.min} to {bounds.end}")
            for message in tier.read(topic, queue.queue_id):
                print(message.queue_offset, message.keys, message.tags, len(message.body))


if __name__ == "__main__":
    if not sys.argv[2:]:
        sys.exit(__doc__)
    main(*sys.argv[1:3])
