"""``tiered config``: the settings in force."""

from __future__ import annotations

from tiered.cli.frame import COMMANDS, Entry, make_program

ENTRIES = {
    "show": Entry(
        "tiered.cli.config_show", "Prints every setting, its value and where it came from."
    )
}

COMMAND = make_program(
    "config",
    ENTRIES,
    COMMANDS["config"].summary,
    ["tiered config show", "TIERED_ATTACH_FRESHNESS=5 tiered config show --json"],
)
