"""Options of the commands that delete or give up (``gc``, ``expire``, ``delete-topic``, ``take-back``), and of ``lease``."""

from __future__ import annotations

from functools import partial

from tiered.cli.settings_planned import planned
from tiered.cli.values import parse_duration, whole
from tiered.config import Setting, Shape

_HOUR_MS = 3_600_000
_flag = partial(Setting, shape=Shape.FLAG, default=False, metavar="")
_duration = partial(Setting, metavar="DURATION", parse=parse_duration)

LEASE: tuple[Setting, ...] = (
    _flag(section="lease", name="break", help="free the lease, whoever holds it"),
)


def _limited(section: str, *, unit: str) -> tuple[Setting, ...]:
    """The options of those that plan what is to go, of which one run takes only so much."""
    limit = Setting(
        section=section,
        name="max-deletions",
        help=f"{unit} in one run, at most",
        default=10_000,
        metavar="N",
        parse=partial(whole, low=1),
    )
    return (*planned(section), limit)


GC: tuple[Setting, ...] = (
    *_limited("gc", unit="objects deleted"),
    _duration(
        section="gc",
        name="grace",
        help="delete only what nobody has been able to read for so long, as 24h or 7d; longer than the longest read",
        default=24 * _HOUR_MS,
        default_text="24h",
    ),
)

EXPIRE: tuple[Setting, ...] = (
    *_limited("expire", unit="objects given up"),
    Setting(
        section="expire",
        name="topics",
        help="topics whose messages expire, as globs",
        default_text="all",
        default=(),
        metavar="GLOB,...",
        shape=Shape.LIST,
    ),
    _duration(
        section="expire",
        name="ttl",
        help="a segment expires when its newest message is older than this, as 7d",
        default_text="none: only topics of which --topic-ttl or --store tells one expire",
    ),
    _flag(
        section="expire",
        name="archived",
        help="give up only segments that the archive of --archive has, each of whose files is read and checked",
    ),
    Setting(
        section="expire",
        name="archive",
        help="URL of that archive",
        default_text="none",
        metavar="URL",
    ),
    Setting(
        section="expire",
        name="store",
        help="store directory whose topics' reserve.time rules before --ttl",
        default_text="none",
        metavar="DIR",
    ),
    Setting(
        section="expire",
        name="topic-ttl",
        help="time to live of some topics, as orders*=30d; the first that fits rules, before --ttl",
        default_text="none",
        default=(),
        metavar="GLOB=DURATION,...",
        shape=Shape.LIST,
    ),
)

DELETE_TOPIC: tuple[Setting, ...] = _limited("delete-topic", unit="objects given up")

TAKE_BACK: tuple[Setting, ...] = (
    *planned("take-back"),
    Setting(
        section="take-back",
        name="queue",
        help="the queue",
        default_text="that of the plan in --apply FILE",
        metavar="N",
        parse=partial(whole, low=0),
    ),
    Setting(
        section="take-back",
        name="to",
        help="queue offset at which it ends from now on: the first that is wrong, or the end of the local queue",
        default_text="that of the plan in --apply FILE",
        metavar="OFFSET",
        parse=partial(whole, low=0),
    ),
)

RECLAIM: tuple[Setting, ...] = (*LEASE, *GC, *EXPIRE, *DELETE_TOPIC, *TAKE_BACK)
