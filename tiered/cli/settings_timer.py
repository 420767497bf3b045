"""Options of ``tiered timer``."""

from __future__ import annotations

from functools import partial

from tiered.cli.values import above_zero, parse_duration
from tiered.config import Setting, Shape

_HOUR_MS = 3_600_000
_flag = partial(Setting, shape=Shape.FLAG, default=False, metavar="")
_give_up = partial(
    Setting,
    name="give-up-seconds",
    help="end with code 3 when the store has refused for so long, seconds",
    default=60.0,
    metavar="SECONDS",
    parse=above_zero,
)

TIMER: tuple[Setting, ...] = (
    Setting(
        section="timer.import",
        name="to",
        help="URL of the tier",
        metavar="URL",
        is_required=True,
    ),
    Setting(
        section="timer.import",
        name="near",
        help="leave what is due within so long with the broker, as 4h; 0s: take all that is pending, due or not",
        default=4 * _HOUR_MS,
        default_text="4h",
        metavar="DURATION",
        parse=parse_duration,
    ),
    _flag(
        section="timer.import",
        name="no-wait",
        help="end with code 4 when another process writes these timers, instead of waiting",
    ),
    _flag(section="timer.ls", name="messages", help="list each pending message, in due order"),
    _give_up(section="timer.cancel"),
)
