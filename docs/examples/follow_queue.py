"""Prints messages as they are tiered, from the beginning on: python follow_queue.py URL TOPIC QUEUE [COUNT]"""

import signal
import sys
import threading

import tiered


def main(url: str, topic: str, queue_id: str, count: str = "0") -> None:
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    with tiered.open(url) as tier:
        messages = tier.follow(topic, int(queue_id), start=0, stop=stop)
        for number, message in enumerate(messages, 1):
            print(message.queue_offset, message.msg_id)
            if number == int(count):
                stop.set()


if __name__ == "__main__":
    if not sys.argv[3:]:
        sys.exit(__doc__)
    main(*sys.argv[1:])
