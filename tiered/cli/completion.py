"""``tiered completion``: the completion script of a shell."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from tiered.cli.frame import COMMANDS, COMPLETION_VARIABLE, make_command, program
from tiered.errors import InvalidError

if TYPE_CHECKING:
    from tiered.cli.call import Call

SHELLS = ("bash", "zsh", "fish")


def run(call: Call) -> int:
    """Print the script."""
    from click.shell_completion import get_completion_class

    shell = get_completion_class(call.argument("shell"))
    if shell is None:
        raise InvalidError(f"no completion for {call.argument('shell')}")
    text = shell(program(), {}, "tiered", COMPLETION_VARIABLE).source()
    call.stdout.write(text.encode() + b"\n")
    return 0


COMMAND = make_command(
    "completion",
    run,
    summary=COMMANDS["completion"].summary,
    arguments=[click.Argument(["shell"], type=click.Choice(SHELLS))],
    examples=[
        'eval "$(tiered completion bash)"',
        "tiered completion fish > ~/.config/fish/completions/tiered.fish",
    ],
)
