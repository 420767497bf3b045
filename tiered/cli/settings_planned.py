"""Options of every command that plans first, and then applies."""

from __future__ import annotations

from tiered.cli.values import above_zero
from tiered.config import Setting, Shape


def planned(section: str) -> tuple[Setting, ...]:
    """``--plan``, ``--apply`` and ``--exit-code`` of one command."""
    return (
        Setting(
            section=section,
            name="plan",
            help="save the plan in this file, and change nothing",
            default_text="the plan is only shown",
            metavar="FILE",
        ),
        Setting(
            section=section,
            name="apply",
            help="carry out exactly the plan in this file; -: plan and carry out in one go",
            default_text="nothing is changed",
            metavar="FILE",
        ),
        Setting(
            section=section,
            name="exit-code",
            help="end with code 1 when the plan has work",
            shape=Shape.FLAG,
            default=False,
            metavar="",
        ),
        Setting(
            section=section,
            name="give-up-seconds",
            help="end with code 3 when the store has refused for so long, seconds",
            default=60.0,
            metavar="SECONDS",
            parse=above_zero,
        ),
    )
