"""Options of the commands that look for damage and mend it, ``rebuild`` and ``doctor``; and of ``policy``."""

from __future__ import annotations

from functools import partial

from tiered.cli.settings_planned import planned
from tiered.config import Setting, Shape

_flag = partial(Setting, shape=Shape.FLAG, default=False, metavar="")

REBUILD: tuple[Setting, ...] = (
    *planned("rebuild"),
    _flag(
        section="rebuild",
        name="accept-gaps",
        help="record messages whose objects are missing as gaps, for ever",
    ),
)

DOCTOR: tuple[Setting, ...] = (
    _flag(
        section="doctor",
        name="new",
        help=(
            "a tier is to be made here: look also at a folder that is not there yet (the one above it must be),"
            " or that has other things in it; without it that is an error, and an empty one is looked at"
        ),
    ),
    Setting(
        section="doctor",
        name="store",
        help="local store directory to look at as well",
        default_text="none",
        metavar="DIR",
    ),
)

POLICY: tuple[Setting, ...] = (
    Setting(
        section="policy",
        name="archive",
        help="for an archiver: where it writes",
        default_text="none",
        metavar="URL",
    ),
)

MEND: tuple[Setting, ...] = (*REBUILD, *DOCTOR, *POLICY)
