"""Coverage-guided fuzzing of everything that reads foreign bytes; run by ``test_fuzz.py`` in a process of its own.

.venv/bin/python tests/fuzz/fuzz_formats.py -atheris_runs=100000
"""

from __future__ import annotations

import sys
from contextlib import suppress
from pathlib import Path

import atheris

sys.path.insert(0, str(Path(__file__).parents[1]))

with atheris.instrument_imports(include=["tiered.format", "tiered.journal.entry"]):
    import numpy as np
    from support import scalar

    from tiered.errors import TieredStoreError
    from tiered.format import (
        block,
        broker_checkpoint,
        bundle,
        fastjson,
        items,
        property_columns,
        record,
    )
    from tiered.format import object as described
    from tiered.format.message_forms import decompress_body
    from tiered.journal.entry import decode_entry


def one_input(data: bytes) -> None:
    """Every reader either understands the bytes or says so by its own error; block and scalar agree."""
    if not data:
        return
    kind, rest = data[0] % 7, data[1:]
    if kind == 0:
        with suppress(record.RecordError):
            record.decode_record(rest)
    elif kind == 1:
        compare(rest)
    elif kind == 2:
        with suppress(fastjson.JsonError):
            fastjson.loads(rest)
    elif kind == 3:
        with suppress(TieredStoreError):
            described.parse_trailer(rest, where="fuzz")
        with suppress(TieredStoreError):
            bundle.read_table(rest, len(rest), where="fuzz")
        with suppress(TieredStoreError):
            bundle.unpack_table(rest, where="fuzz")
    elif kind == 4:
        with suppress(TieredStoreError):
            decode_entry(rest, where="fuzz")
    elif kind == 5:
        with suppress(TieredStoreError):
            decompress_body(rest[4:], int.from_bytes(rest[:4]) | 1)
    else:
        items.decode_items(rest[: len(rest) // 20 * 20])
        broker_checkpoint.decode_checkpoint(rest.ljust(4096, b"\0"))


def compare(data: bytes) -> None:
    """The vectorised reader against its readable twin."""
    found, walk = block.split_records(data, 0, len(data), physical_offset=0, size_max=1 << 20)
    assert walk.end <= len(data)
    for index, position in enumerate(found.positions.tolist()):
        twin = scalar.parse(data, position, int(found.sizes[index]))
        scalar.check(data, twin, expected_physical=position)
        assert int(found.faults[index]) == int(twin.fault), (position, found.faults[index], twin)
    property_columns.tag_hashes(found)
    block.inner_counts(found)
    grouped = [indices for _, indices in block.group_by_queue(found)]
    assert sum(map(len, grouped)) == int(np.count_nonzero(found.faults == 0))


if __name__ == "__main__":
    atheris.Setup(sys.argv, one_input)
    atheris.Fuzz()
