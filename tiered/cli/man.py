"""``tiered man``: manual pages, made of the help."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import click

from backends.lazy_dataclass import dataclass
from tiered.cli.exits import DONE
from tiered.cli.frame import COMMON, HELP_OPTIONS, CliCommand, Program, command, program
from tiered.cli.options import argument
from tiered.cli.output import show
from tiered.errors import InvalidError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tiered.cli.call import Call

_CODES = (
    ("0", "done; what is explained and recorded is in the output and is not a failure"),
    ("1", "done, and something needs a person"),
    ("2", "wrong usage, configuration or argument"),
    ("3", "an endpoint or object store cannot be reached, or refuses us"),
    ("4", "fenced: another writer has taken over, or holds the lease"),
    ("5", "a tier or store cannot be read at the asked place because it is damaged"),
    ("70", "a defect of ours"),
    ("129, 130, 143", "cut short by SIGHUP, SIGINT, SIGTERM"),
)


@dataclass(frozen=True, kw_only=True)
class ManOptions:
    """What ``tiered man`` can be told."""

    dir: str = argument("folder for the pages", click.Path())


@command("man", ManOptions)
def run(call: Call, options: ManOptions) -> int:
    """Writes the manual pages of all commands into a directory.

    Examples:
        tiered man ~/.local/share/man/man1
        tiered man /tmp/man1 --json
    """
    folder = Path(options.dir)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in pages().items():
            (folder / name).write_text(text, "utf-8")
    except OSError as error:
        what = f"the pages cannot be written: {error.strerror}"
        raise InvalidError(what, where=options.dir, do="name a directory") from error
    names = sorted(pages())
    document = {"format": 1, "dir": options.dir, "pages": names}
    show(
        call, document, lines=[f"{len(names)} pages are in {options.dir}; `man -l FILE` shows one"]
    )
    return DONE


def pages() -> dict[str, str]:
    """Text of each page by its file's name."""
    root = program()
    commands: list[tuple[str, click.Command]] = [("", root), *root.walk()]
    return {f"{_page_name(path)}.1": "\n".join(_page(path, one)) + "\n" for path, one in commands}


def _page_name(path: str) -> str:
    return "-".join(["tiered", *path.split()])


def _page(path: str, one: click.Command) -> Iterator[str]:
    from tiered import __version__

    name, full = _page_name(path), f"tiered {path}".strip()
    context = click.Context(one, info_name=full, help_option_names=HELP_OPTIONS)
    yield f'.TH {name.upper()} 1 "" "tiered {__version__}" "tiered"'
    yield from (".SH NAME", f"{_escaped(name)} \\- {_escaped((one.help or '').rstrip('.'))}")
    usage = " ".join(one.collect_usage_pieces(context))
    yield from (".SH SYNOPSIS", f".B {_escaped(full)}", _escaped(usage))
    if isinstance(one, CliCommand) and one.details:
        yield from (".SH DESCRIPTION", _escaped(one.details))
    if isinstance(one, Program):
        yield ".SH COMMANDS"
        for inner in one.list_commands(context):
            found = one.get_command(context, inner)
            assert found is not None
            yield from _entry(inner, found.help or "")
    yield from _options(context, one)
    if one.epilog:
        yield ".SH EXAMPLES"
        yield from (".nf", *map(_escaped, one.epilog.splitlines()), ".fi")
    if not path:
        yield ".SH EXIT STATUS"
        for code, meaning in _CODES:
            yield from _entry(code, meaning)
    parent = _page_name(path.rpartition(" ")[0])
    yield from (
        ".SH SEE ALSO",
        f".BR {_escaped(parent)} (1)" if path else ".BR tiered\\-attach (1)",
    )


def _options(context: click.Context, one: click.Command) -> Iterator[str]:
    """Those of its own; the common ones stand on the page of the program."""
    common = {setting.field for setting in COMMON} | {"config_file"}
    shown = [
        record
        for parameter in one.get_params(context)
        if (record := parameter.get_help_record(context)) is not None
        and (parameter.name not in common or context.info_name == "tiered")
    ]
    yield ".SH OPTIONS"
    for names, text in shown:
        yield from _entry(names, text)
    if context.info_name != "tiered":
        yield from (".PP", "Options that all commands have stand in", ".BR tiered (1).")


def _entry(title: str, text: str) -> Iterator[str]:
    yield from (".TP", f"\\fB{_escaped(title)}\\fR", _escaped(text))


def _escaped(text: str) -> str:
    """As roff takes it: a backslash is one, a hyphen can be copied, and no line is a request."""
    plain = re.sub(r"\s+", " ", text).replace("\\", "\\e").replace("-", "\\-")
    return f"\\&{plain}" if plain.startswith((".", "'")) else plain
