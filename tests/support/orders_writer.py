"""A process that appends orders under sync, prints their receipts, and is killed: python -m support.orders_writer FOLDER."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path

from support.embedded import create
from support.oracle import SMALL as FILES

from tiered.store.new_message import NewMessage
from tiered.store.store_options import Flush, StoreOptions

OPTIONS = StoreOptions(
    FILES["mappedFileSizeCommitLog"],
    FILES["mappedFileSizeConsumeQueue"] // 20,
    index_slots=1000,
    index_items=4000,
)


ORDERS = [
    NewMessage("orders", at % 4, b"x" * 1000, tags=f"t{at % 3}", keys=f"k{at} all")
    for at in range(600)
]


def main() -> None:
    store = create(Path(sys.argv[1]), replace(OPTIONS, flush=Flush.SYNC))
    for start in range(0, 500, 10):
        for where in store.append_batch(ORDERS[start : start + 10]):
            print(json.dumps({"offset": where.queue_offset, "at": where.physical_offset}))
    sys.stdout.flush()
    store.append_batch(ORDERS[500:])
    os.kill(os.getpid(), 9)


if __name__ == "__main__":
    main()
