#!/usr/bin/env python3
"""Edits a stopped store the way a power failure would: bytes that never reached the disk.

--cut-log N            zero the log from N bytes before its end, in the middle of a record
--damage-back N        flip one byte N bytes before the end of the log (inside a message body)
--lose-index-pages N   zero the newest N pages of 4096 bytes of one consume queue (with --topic)
"""

import argparse
import struct
from pathlib import Path

MAGICS = {0xDAA320A7, 0xDAA320AB}
PAGE = 4096


def log_records(store: Path) -> list[tuple[Path, int, int]]:
    """(file, position, size) of every record, in order."""
    found = []
    for file in sorted((store / "commitlog").iterdir()):
        data, at = file.read_bytes(), 0
        while at + 8 <= len(data):
            size, magic = struct.unpack_from(">iI", data, at)
            if magic not in MAGICS or size <= 0:
                break
            found.append((file, at, size))
            at += size
    return found


def back_from_end(records: list[tuple[Path, int, int]], distance: int) -> tuple[Path, int, int]:
    total = 0
    for record in reversed(records):
        total += record[2]
        if total >= distance:
            return record
    return records[0]


def overwrite(file: Path, at: int, data: bytes) -> None:
    with file.open("r+b") as out:
        out.seek(at)
        out.write(data)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("store", type=Path)
    parser.add_argument("--cut-log", type=int)
    parser.add_argument("--damage-back", type=int)
    parser.add_argument("--lose-index-pages", type=int)
    parser.add_argument("--topic")
    args = parser.parse_args()
    records = log_records(args.store)
    if args.cut_log:
        file, at, size = back_from_end(records, args.cut_log)
        cut = at + size // 2
        overwrite(file, cut, bytes(file.stat().st_size - cut))
        print(f"{file.name}: zero from {cut}, inside the record at {at}")
    if args.damage_back:
        file, at, size = back_from_end(records, args.damage_back)
        position = at + 88 + 10  # ten bytes into the body (IPv4 hosts)
        byte = file.read_bytes()[position]
        overwrite(file, position, bytes([byte ^ 0xFF]))
        print(f"{file.name}: byte {position} flipped, inside the record at {at}")
    if args.lose_index_pages:
        file = max((args.store / "consumequeue" / args.topic / "0").iterdir())
        used = len(file.read_bytes().rstrip(b"\0"))
        start = max(0, (used - 1) // PAGE * PAGE - (args.lose_index_pages - 1) * PAGE)
        overwrite(file, start, bytes(file.stat().st_size - start))
        print(f"{file}: zero from {start}")


if __name__ == "__main__":
    main()
