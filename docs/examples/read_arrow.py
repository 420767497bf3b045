"""Sums the bytes of bodies by tag, with Arrow: python read_arrow.py URL TOPIC"""

import sys

import pyarrow as pa
import pyarrow.compute as pc

import tiered


def main(url: str, topic: str) -> None:
    with tiered.open(url) as tier:
        batches = list(tier.read_topic_arrow(topic, columns=["tags", "body"]))
    table = pa.Table.from_batches(batches)
    table = table.append_column("bytes", pc.binary_length(table["body"]))
    for row in table.group_by("tags").aggregate([("bytes", "sum")]).sort_by("tags").to_pylist():
        print(row["tags"], row["bytes_sum"])


if __name__ == "__main__":
    if not sys.argv[2:]:
        sys.exit(__doc__)
    main(*sys.argv[1:3])
