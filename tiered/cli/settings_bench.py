"""Options of the commands that make something up and measure: ``demo`` and ``bench``."""

from __future__ import annotations

from functools import partial

from tiered.cli.values import not_below_zero, parse_size, whole
from tiered.config import Setting

PATTERNS = ("sequential", "groups", "seeks", "stops", "keys", "times")
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

BENCH_STORE: tuple[Setting, ...] = (
    _positive(
        section="bench.store",
        name="messages",
        help="messages to append, and to recover",
        default=300_000,
    ),
    _size(section="bench.store", name="body", help="bytes of each body", default=1024),
    _positive(
        section="bench.store", name="threads", help="threads that append under sync", default=32
    ),
    Setting(
        section="bench.store",
        name="seconds",
        help="how long sync and visibility are measured",
        metavar="N",
        parse=not_below_zero,
        default=5.0,
    ),
    _positive(
        section="bench.store",
        name="rate",
        help="messages a second while visibility is measured",
        default=20_000,
    ),
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

_read_count = partial(_count, section="bench.read")
_read_positive = partial(_positive, section="bench.read")
_read_number = partial(Setting, section="bench.read", metavar="N", parse=not_below_zero)

BENCH_READ: tuple[Setting, ...] = (
    Setting(
        section="bench.read",
        name="topic",
        help="only this topic",
        default_text="all",
        metavar="TOPIC",
    ),
    _read_count(name="queue", help="only this queue", default_text="all"),
    _read_positive(name="queues", help="only the first so many queues", default_text="all"),
    Setting(
        section="bench.read",
        name="pattern",
        help="what readers do",
        default="sequential",
        metavar="PATTERN",
        choices=PATTERNS,
    ),
    _read_positive(name="groups", help="readers (sequential, groups)", default=1),
    _read_positive(name="threads", help="threads that read (sequential, seeks)", default=1),
    _read_positive(name="count", help="messages that a client asks for at once", default=32),
    _read_positive(name="reads", help="reads (seeks, stops, keys, times)", default=200),
    _read_number(name="seconds", help="how long to read (groups), seconds", default=5.0),
    _size(
        section="bench.read",
        name="memory",
        help="memory for what is cached, read ahead and on its way",
        default=256 * _MIB,
    ),
    _read_positive(name="requests", help="requests under way at once, on both sides", default=16),
    _read_number(name="latency-ms", help="added to each request, milliseconds", default=0.0),
    _read_number(
        name="bandwidth", help="of each request by itself, MiB/s; 0: no limit", default=0.0
    ),
    _read_number(
        name="stall-percent",
        help="share of the requests that is held up, percent; not with plain GETs",
        default=0.0,
    ),
    _read_number(name="stall-ms", help="for how long, milliseconds", default=1000.0),
    _read_count(name="seed", help="of what is random", default=1),
)
