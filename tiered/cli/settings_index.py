"""Options of ``query``, and those of ``attach`` and ``rebuild`` that are about the key index."""

from __future__ import annotations

from functools import partial

from tiered.cli.values import above_zero, check_time, parse_size, whole
from tiered.config import Setting, Shape

_flag = partial(Setting, shape=Shape.FLAG, default=False, metavar="")
_time = partial(Setting, metavar="TIME", parse=check_time)
_positive = partial(Setting, metavar="N", parse=partial(whole, low=1))
_MIB = 1024 * 1024

ATTACH_INDEX: tuple[Setting, ...] = (
    _flag(section="attach", name="no-index", help="make no key index; `tiered query` then reads"),
    _positive(
        section="attach",
        name="index-items",
        help="keys in one index object; it takes 34 bytes each",
        default=1 << 20,
    ),
    Setting(
        section="attach",
        name="index-age",
        help="an index object is made at the latest so many seconds after its first key",
        default=3600.0,
        metavar="SECONDS",
        parse=above_zero,
    ),
    Setting(
        section="attach",
        name="index-dir",
        help="where the key index's work file goes (40 bytes a key; never into the store)",
        default_text="the system's directory for temporary files",
        metavar="DIR",
    ),
)

QUERY: tuple[Setting, ...] = (
    Setting(
        section="query",
        name="key",
        help="one of the messages' keys, or a unique id",
        metavar="KEY",
        is_required=True,
    ),
    _time(
        section="query",
        name="from",
        help="only messages stored at or after this time",
        default_text="the first there is",
    ),
    _time(
        section="query",
        name="until",
        help="only messages stored before this time",
        default_text="the last there is",
    ),
    _positive(section="query", name="count", help="messages at most, the newest", default=64),
    _flag(
        section="query",
        name="lives",
        help="also in incarnations that are over, and in what the broker took back",
    ),
    Setting(
        section="query",
        name="scan",
        help="read so much, at most, of what no index covers yet",
        default=256 * _MIB,
        metavar="SIZE",
        parse=parse_size,
    ),
    _flag(section="query", name="raw-body", help="bodies as stored, perhaps compressed"),
)

REBUILD_INDEX: tuple[Setting, ...] = (
    _flag(
        section="rebuild",
        name="index",
        help="not the journal but the key index: what is damaged, lost or not there yet",
    ),
)
