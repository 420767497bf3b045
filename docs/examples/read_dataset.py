"""Sums the bytes of bodies by queue, by DuckDB over a dataset: python read_dataset.py URL TOPIC"""

import sys

import duckdb

import tiered


def main(url: str, topic: str) -> None:
    with tiered.open(url) as tier:
        messages = tier.dataset(topic, columns=["queue_id", "body"])
        by_queue = "SELECT queue_id, sum(octet_length(body)) FROM messages GROUP BY 1 ORDER BY 1"
        with duckdb.connect() as connection:
            connection.register("messages", messages)
            for queue_id, size_bytes in connection.sql(by_queue).fetchall():
                print(queue_id, size_bytes)


if __name__ == "__main__":
    if not sys.argv[2:]:
        sys.exit(__doc__)
    main(*sys.argv[1:3])
