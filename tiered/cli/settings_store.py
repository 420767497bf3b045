"""Options of ``tiered store``."""

from __future__ import annotations

from functools import partial

from tiered.cli.values import parse_size, whole
from tiered.config import Setting, Shape

_flag = partial(Setting, shape=Shape.FLAG, default=False, metavar="")
_positive = partial(Setting, metavar="N", parse=partial(whole, low=1))
_MIB = 1024 * 1024

STORE: tuple[Setting, ...] = (
    Setting(
        section="store.create",
        name="log-file-size",
        help="size of a commit-log file, as the broker's mappedFileSizeCommitLog",
        default=1024 * _MIB,
        metavar="SIZE",
        parse=parse_size,
    ),
    _positive(
        section="store.create",
        name="queue-items",
        help="items of a consume-queue file; 20 times it is the broker's mappedFileSizeConsumeQueue",
        default=300_000,
    ),
    _flag(
        section="store.put",
        name="sync",
        help="each batch is on the disk before the next one is read",
    ),
    _flag(
        section="store.put",
        name="keep-offsets",
        help="a queue that is new begins at the queue offset of its first message, and gaps are refused",
    ),
    Setting(
        section="store.tail",
        name="count",
        help="how many messages of each queue, at most",
        default=10,
        metavar="N",
        parse=partial(whole, low=0),
    ),
    _flag(section="store.tail", name="follow", help="go on with what is stored from now on"),
    _flag(
        section="store.recover",
        name="anew",
        help="make consume queues and key index anew from the whole log, whatever is there",
    ),
)
