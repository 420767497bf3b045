"""A topic as a dataset of pyarrow: the Arrow files of ``tiered.api.filesystem``, each with what is known of it beforehand.

One mechanism for both: pyarrow (and whatever takes its datasets, as DuckDB and Polars) opens a file when it comes to it and
lets go of it when its rows are used; what it reads ahead of a slow reader ends at 1 GiB. What is known of a file (queue,
queue offsets, store times) is its partition expression: a filter on these opens no file that cannot have such rows.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from tiered.api.arrow import load_pyarrow
from tiered.api.filesystem import ARROW, FileRange, TieredFileSystem

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import ModuleType

    import pyarrow.dataset as pd

    from tiered.api.tier import Tier
    from tiered.model import MessageQueue

_QUEUE, _OFFSET = ("queue_id", "partition"), ("queue_offset", "offset", "index")
"""What stores call the same column."""


def make_dataset(tier: Tier, topic: str, columns: Sequence[str] | None) -> pd.FileSystemDataset:
    """See ``Tier.dataset``."""
    arrow = load_pyarrow()
    importlib.import_module("pyarrow.dataset")
    files = TieredFileSystem(tier=tier, columns=columns, skip_instance_cache=True)
    schema, form = files.schema(), arrow.dataset.IpcFileFormat()
    system = arrow.fs.PyFileSystem(arrow.fs.FSSpecHandler(files))
    fragments = [
        form.make_fragment(
            files.name(queue, one, ARROW), system, _known(arrow, schema.names, queue, one)
        )
        for queue in tier.queues(topic)
        for one in files.ranges(queue)
    ]
    return arrow.dataset.FileSystemDataset(fragments, schema, form, system)


def _known(arrow: ModuleType, names: Sequence[str], queue: MessageQueue, one: FileRange) -> object:
    """What holds of each row of a file, as far as its columns are there."""
    time = arrow.timestamp("ms", "UTC")
    known = arrow.dataset.scalar(True)
    for name in names:
        column = arrow.dataset.field(name)
        if name == "topic":
            known &= column == queue.topic
        elif name in _QUEUE:
            known &= column == arrow.scalar(queue.queue_id, arrow.int32())
        elif name in _OFFSET:
            known &= (column >= one.start) & (column < one.stop)
        elif name == "store_timestamp":
            known &= column >= arrow.scalar(one.store_min_ms, time)
            known &= column <= arrow.scalar(one.store_max_ms, time)
    return known
