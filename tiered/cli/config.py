"""``tiered config`` and ``tiered completion``: what the program says of itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from backends.lazy_dataclass import dataclass
from tiered.cli.frame import COMPLETION_VARIABLE, command, group, program
from tiered.cli.options import argument
from tiered.cli.output import Output
from tiered.errors import InvalidError

if TYPE_CHECKING:
    from tiered.cli.call import Call

SHELLS = ("bash", "zsh", "fish")


CONFIG = group(
    "config",
    "Shows the settings in force.",
    examples=["tiered config show", "TIERED_ATTACH_FRESHNESS=5 tiered config show --json"],
)


@dataclass(frozen=True, kw_only=True)
class ShowOptions:
    """``tiered config show`` has none of its own."""


@CONFIG.has("show", ShowOptions)
def show(call: Call, _options: ShowOptions) -> int:
    """Prints every setting, its value and where it came from.

    Examples:
        tiered config show
        tiered --config tiered.toml config show --json
    """
    rows = [
        {
            "key": key,
            "value": chosen.setting.shown(chosen.value),
            "source": chosen.source,
            "variable": chosen.setting.variable,
        }
        for key, chosen in call.chosen.items()
    ]
    rows += [
        {"key": key, "value": value, "source": call.rules.source, "variable": None}
        for key, value in call.rules.shown()
    ]
    output = Output(call)
    if output.form == "table":
        for row, chosen in zip(rows, call.chosen.values(), strict=False):
            if chosen.source == "default" and chosen.value in {None, ()}:
                row["value"] = f"({chosen.setting.default_shown or 'none'})"
    output.emit({"format": 1, "settings": rows}, rows, ["key", "value", "source"])
    return 0


@dataclass(frozen=True, kw_only=True)
class CompletionOptions:
    """What ``tiered completion`` can be told."""

    shell: str = argument("which shell", click.Choice(SHELLS))


@command("completion", CompletionOptions)
def complete(call: Call, options: CompletionOptions) -> int:
    """Prints the completion script of a shell.

    Examples:
        eval "$(tiered completion bash)"
        tiered completion fish > ~/.config/fish/completions/tiered.fish
    """
    from click.shell_completion import get_completion_class

    shell = get_completion_class(options.shell)
    if shell is None:
        raise InvalidError(f"no completion for {options.shell}")
    text = shell(program(), {}, "tiered", COMPLETION_VARIABLE).source()
    call.stdout.write(text.encode() + b"\n")
    return 0
