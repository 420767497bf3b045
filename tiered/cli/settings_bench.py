"""Options of the commands that make something up and measure: ``demo`` and ``bench``."""

from __future__ import annotations

from functools import partial

from tiered.cli.parsers import whole
from tiered.cli.sizes import parse_size
from tiered.config import Setting

_MIB = 1024 * 1024
_count = partial(Setting, metavar="N", parse=partial(whole, low=0))
_positive = partial(Setting, metavar="N", parse=partial(whole, low=1))
_size = partial(Setting, metavar="SIZE", parse=parse_size)

DEMO: tuple[Setting, ...] = (
    Setting(
        section="demo",
        name="dir",
        help="directory to work in, emptied of earlier demos first",
        default_text="a new temporary one",
        metavar="DIR",
    ),
    _positive(section="demo", name="messages", help="messages to store", default=10_000),
)

MAKE_STORE: tuple[Setting, ...] = (
    _positive(section="bench.make-store", name="messages", help="messages in all", default=200_000),
    _size(section="bench.make-store", name="body", help="bytes of each body", default=1024),
    _positive(section="bench.make-store", name="queues", help="queues of each topic", default=16),
    _positive(section="bench.make-store", name="topics", help="topics", default=1),
    _size(
        section="bench.make-store",
        name="file-size",
        help="bytes of each file of the commit log",
        default=64 * _MIB,
    ),
    _count(section="bench.make-store", name="seed", help="of the bodies", default=1),
)

BENCH_DISPATCH: tuple[Setting, ...] = (
    Setting(
        section="bench.dispatch",
        name="store",
        help="store directory to tier",
        metavar="DIR",
        is_required=True,
    ),
    Setting(
        section="bench.dispatch",
        name="to",
        help="URL of an empty place for the tier",
        metavar="URL",
        is_required=True,
    ),
)

BENCH_READ: tuple[Setting, ...] = (
    Setting(
        section="bench.read",
        name="topic",
        help="only this topic",
        default_text="all",
        metavar="TOPIC",
    ),
    _count(section="bench.read", name="queue", help="only this queue", default_text="all"),
)
