#!/usr/bin/env python3
"""Compares what a consumer was given with a dump.

    compare.py PULL.jsonl DUMP.jsonl TOPIC [message|compacted]

Both may be gzipped. Every field that the two share must be equal; messages beyond the dumped end
of a queue (delivered since) are counted as new. Exit status 1 when anything differs.
"""

import gzip
import json
import sys
from collections import defaultdict
from pathlib import Path

Place = tuple[int, int]  # queue id and queue offset, as the record says


def records(path: str) -> list[dict]:
    opener = gzip.open if path.endswith(".gz") else open
    with opener(path, "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def by_place(rows: list[dict], fields: set[str]) -> dict[Place, list[str]]:
    """Rows of each place, cut to the fields compared.

    After some crashes Java lists one record twice: hence a list.
    """
    places = defaultdict(list)
    for row in rows:
        cut = {field: row[field] for field in fields}
        places[row["queue_id"], row["queue_offset"]].append(json.dumps(cut, sort_keys=True))
    return places


def main() -> None:
    if len(sys.argv) < 4 or not Path(sys.argv[1]).exists():
        sys.exit(__doc__)
    pull_path, dump_path, topic = sys.argv[1:4]
    kind = sys.argv[4] if len(sys.argv) > 4 else "message"
    dump = records(dump_path)
    ends = {
        row["queue_id"]: row["max_offset"]
        for row in dump
        if row["type"] == "queue" and row["topic"] == topic
    }
    # A client sets the queue id to that of the queue it asked, whatever the record says.
    dumped_rows = [
        row | {"queue_id": row.get("listed_queue_id", row["queue_id"])}
        for row in dump
        if row["type"] == kind and row.get("listed_topic", row["topic"]) == topic
    ]
    pulled_rows = records(pull_path)
    known = [row for row in pulled_rows if row["queue_offset"] < ends.get(row["queue_id"], 0)]

    fields = set(pulled_rows[0]) if pulled_rows else {"msg_id"}
    pulled, dumped = by_place(known, fields), by_place(dumped_rows, fields)
    different = [
        place
        for place in sorted(pulled.keys() | dumped.keys())
        if pulled.get(place) != dumped.get(place)
    ]
    for place in different[:5]:
        print(
            f"{topic} {place}: pulled {pulled.get(place)}\n    dumped {dumped.get(place)}",
            file=sys.stderr,
        )
    print(
        f"{topic}: pulled {len(pulled_rows)}, dumped {len(dumped_rows)}, "
        f"different {len(different)}, new {len(pulled_rows) - len(known)}"
    )
    sys.exit(bool(different))


if __name__ == "__main__":
    main()
