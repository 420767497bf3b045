"""``tiered config show``: every setting, its value and where it came from."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tiered.cli.config import ENTRIES
from tiered.cli.frame import default_text, make_command
from tiered.cli.output import Output

if TYPE_CHECKING:
    from tiered.cli.call import Call


def run(call: Call) -> int:
    """Print them."""
    rows = [
        {
            "key": key,
            "value": chosen.setting.shown(chosen.value),
            "source": chosen.source,
            "variable": chosen.setting.variable,
        }
        for key, chosen in call.chosen.items()
    ]
    output = Output(call)
    if output.form == "table":
        for row, chosen in zip(rows, call.chosen.values(), strict=True):
            if chosen.source == "default" and chosen.value in {None, ()}:
                row["value"] = f"({default_text(chosen.setting) or 'none'})"
    output.emit({"format": 1, "settings": rows}, rows, ["key", "value", "source"])
    return 0


COMMAND = make_command(
    "show",
    run,
    summary=ENTRIES["show"].summary,
    section="config",
    examples=["tiered config show", "tiered --config tiered.toml config show --json"],
)
