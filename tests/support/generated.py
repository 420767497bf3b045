"""Writes what of the pages is generated: ``python -m tests.support.generated [FOLDER]``; a test fails when it is stale.

The reference's pages are made of the commands' help; on pages written by hand, parts between ``<!-- NAME: begin -->`` and
``<!-- NAME: end -->``.
"""

from __future__ import annotations

import ast
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import click

from backends.s3_wire import rows
from tiered.cli.attach import RELOADED, AttachOptions
from tiered.cli.frame import COMMON, HELP_OPTIONS, program
from tiered.cli.options import RULES, Shape, settings_of
from tiered.metrics import (
    FLEET_METRICS,
    METRICS,
    MOUNT_METRICS,
    PROCESS_METRICS,
    TIMER_METRICS,
    MetricType,
)
from tiered.mount.protocol import REQUESTS, Treatment

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence

    from tiered.metrics import Metric

    _Record = tuple[str, str]  # an option with its value, and what it does

BY_HAND = "<!-- by hand: begin -->\n"
"""What is above it is written by `make docs`."""
WIDTH = 100
SHARED_FROM = 3
"""Options and arguments of so many commands stand once, on the page of the program."""
ATTACH = settings_of(AttachOptions, "attach")
SHARED = [metric for metric in METRICS if metric in MOUNT_METRICS]
DOCS = Path(__file__).parents[2] / "docs"
LAYERS = (
    *("tiered/cli", "tiered/web", "tiered/spark", "tiered/archive", "tiered/mount", "tiered/bench"),
    *("tiered/upkeep", "tiered/attach", "tiered/api", "tiered/dispatch", "tiered/compaction"),
    *("tiered/index", "fetcher", "fetcher/filters", "timer", "tiered/log", "tiered/journal"),
    *("tiered/store", "tiered/local", "tiered/format", "tiered", "backends", "backends/testing"),
)
"""Folders of the product, from the command line down to the object stores."""


def pages() -> dict[str, str]:
    """Text of each page by its name."""
    found = {f"reference/{name}.md": text for name, text in reference_pages(DOCS / "reference")}
    for page, parts in PARTS.items():
        found[page] = (DOCS / page).read_text("utf-8")
        for name, make in parts.items():
            found[page] = _with_part(found[page], f"{page}: {name}", name, make())
    return found


def _page(title: str, *lines: str) -> str:
    return "\n".join([f"# {title}", "", *lines, ""])


def _with_part(page: str, where: str, name: str, lines: Iterable[str]) -> str:
    """A page that is written by hand, with what stands between the marks of this name made anew."""
    begin, end = (f"<!-- {name}: {which} -->\n" for which in ("begin", "end"))
    before, _, rest = page.partition(begin)
    _, mark, after = rest.partition(end)
    if not mark:
        raise ValueError(f"{where}: the marks are missing")
    return f"{before}{begin}\n" + "\n".join(lines) + f"\n\n{end}{after}"


def _table(titles: str, rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """Lines of a table; ``titles`` as they stand in its first one."""
    yield f"| {titles} |"
    yield "|---" * (titles.count("|") + 1) + "|"
    yield from (f"| {' | '.join(cells)} |" for cells in rows)


def s3_answers() -> Iterator[str]:
    """What an S3 server's refusals mean: codes that mean the same share a row."""
    codes: dict[tuple[str, str], list[str]] = {}
    for code, answer in rows():
        reason = (answer.reason or "-") + (" (retried)" if answer.kind.retriable else "")
        codes.setdefault((reason, answer.do or "-"), []).append(f"`{code}`")
    table = ((*said, ", ".join(found)) for said, found in codes.items())
    return _table("reason | what to do | codes and statuses", table)


def reference_pages(folder: Path) -> Iterator[tuple[str, str]]:
    """A page for each command: its help, made anew, and below the mark what was written there, its JSON documents."""
    root = program()
    commands = list(root.walk())
    counts = Counter(record for path, one in commands for record in _records(one, path))
    shared = {record: None for record, count in counts.items() if count >= SHARED_FROM}
    yield "tiered", _page("`tiered`", *_root_lines(root, shared))
    blocks: dict[str, list[str]] = {}
    for path, command in commands:
        lines = blocks.setdefault(path.split()[0], ["[Common options](tiered.md) apply.", ""])
        lines += ["", f"## `tiered {path}`", ""] if " " in path else []
        lines += _help_block(command, path, shared)
    for name, lines in blocks.items():
        page = folder / f"{name}.md"
        said = page.read_text("utf-8") if page.exists() else ""
        _, mark, below = said.partition(BY_HAND)
        yield name, _page(f"`tiered {name}`", *lines) + (f"\n{mark}{below}" if mark else "")


def _root_lines(root: click.Command, shared: Iterable[_Record]) -> Iterator[str]:
    """The help of the program, and the options that many commands have."""
    text = root.get_help(_context(root, "tiered"))
    yield from ("```text", *(line.rstrip() for line in text.splitlines()), "```")
    yield from (
        "",
        "## Shared options",
        "",
        "Several commands have these options and arguments; their pages only name them.",
        "",
    )
    formatter = _context(root, "tiered").make_formatter()
    formatter.write_dl(list(shared))
    yield from ("```text", *formatter.getvalue().splitlines(), "```")


def _context(command: click.Command, path: str) -> click.Context:
    return click.Context(
        command, info_name=path, terminal_width=WIDTH, help_option_names=HELP_OPTIONS
    )


def _records(command: click.Command, path: str) -> list[_Record]:
    """Options of its own, with their texts: no common one, no ``--help``, no argument that the usage explains."""
    context = _context(command, path)
    common = {"config_file", *(one.field for one in COMMON)}
    found = [
        one.get_help_record(context)
        for one in command.get_params(context)
        if one.name not in common
    ]
    return [record for record in found if record and record[1] and "--help" not in record[0]]


def _help_block(command: click.Command, path: str, shared: Container[_Record]) -> list[str]:
    """As ``--help`` prints it, but for options that other pages have, and the commands of a group, which follow."""
    context = _context(command, f"tiered {path}")
    formatter = context.make_formatter()
    command.format_usage(context, formatter)
    command.format_help_text(context, formatter)
    records = _records(command, path)
    if own := [record for record in records if record not in shared]:
        with formatter.section("Options"):
            formatter.write_dl(own)
    command.format_epilog(context, formatter)
    block = ["```text", *formatter.getvalue().strip("\n").splitlines(), "```"]
    elsewhere = ", ".join(
        f"`{name.split()[0]}`" for name, text in records if (name, text) in shared
    )
    return [
        *block,
        *(["", f"[Shared options](tiered.md#shared-options): {elsewhere}."] if elsewhere else []),
    ]


def topic_rules() -> Iterator[str]:
    """Every key that a rule for topics may have."""
    rules = (
        (
            f"`{name}`",
            "true or false" if rule.shape is Shape.FLAG else rule.kind.metavar,
            rule.default_text or str(rule.default).lower(),
            rule.help,
        )
        for name, rule in RULES.items()
    )
    escaped = ([cell.replace("|", "\\|") for cell in row] for row in rules)
    return _table("key | value | default | meaning", escaped)


def reloaded() -> Iterator[str]:
    """The settings that apply at once."""
    yield ", ".join(f"`{one.name}`" for one in ATTACH if one.field in RELOADED) + "."


def _metrics(metrics: Iterable[Metric]) -> Iterator[str]:
    return _table("metric | meaning", ((_series(one), one.help) for one in metrics))


def _series(metric: Metric) -> str:
    labels = f"{{{','.join(metric.labels)}}}" if metric.labels else ""
    return f"`{metric.name}{labels}`" + " (histogram)" * (metric.kind is MetricType.HISTOGRAM)


def _own(metrics: Iterable[Metric]) -> Iterator[str]:
    """Without those that every process has."""
    return _metrics(metric for metric in metrics if metric not in SHARED)


def mount_requests() -> Iterator[str]:
    """Every request that is not answered as one that a mount does not know; those answered alike share a row."""
    alike: dict[tuple[Treatment, str], list[str]] = {}
    for one in (one for one in REQUESTS if one.answer is not Treatment.UNSUPPORTED):
        alike.setdefault((one.answer, one.note), []).append(f"`{one.name}`")
    rows = ((", ".join(found), _answer(*said)) for said, found in alike.items())
    return _table("requests | answer", rows)


def _answer(treatment: Treatment, note: str) -> str:
    if treatment is Treatment.SERVED:
        return note or "As a broker."
    return f"{treatment.value}. {note}".strip()


def where() -> Iterator[str]:
    """Every folder of the product, a line each, as its package says; its modules say it of themselves."""
    for_each = ((f"`{folder}/`", _about(DOCS.parent / folder)) for folder in LAYERS)
    return _table("package | what it is", for_each)


def _about(folder: Path) -> str:
    """The first sentences of a package, up to the first empty line, on one line."""
    text = ast.get_docstring(ast.parse((folder / "__init__.py").read_text("utf-8"))) or ""
    return " ".join(text.split("\n\n", maxsplit=1)[0].split()).replace("``", "`")


FLEET = [metric for metric in FLEET_METRICS if metric.name.startswith("tiered_fleet_")]
PARTS: Mapping[str, Mapping[str, Callable[[], Iterable[str]]]] = {
    "configuration.md": {"rules": topic_rules, "reloaded": reloaded},
    "metrics.md": {
        "every process": lambda: _metrics((PROCESS_METRICS[0], *SHARED)),
        "attach": lambda: _own(METRICS),
        "mount": lambda: _own(MOUNT_METRICS),
        "fleet": lambda: _metrics(FLEET),
        "timer run": lambda: _own(TIMER_METRICS),
    },
    "mount.md": {"requests": mount_requests},
    "s3-answers.md": {"answers": s3_answers},
    "where.md": {"packages": where},
}
"""What is made anew on pages that are written by hand."""


def main(arguments: list[str]) -> None:
    """Write the pages into a folder, by default ``docs``."""
    folder = Path(arguments[0] if arguments else "docs")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "reference").mkdir(exist_ok=True)
    for name, text in pages().items():
        (folder / name).write_text(text, "utf-8")
        sys.stdout.write(f"{folder / name}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
