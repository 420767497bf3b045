"""The frame of the command line: groups that load a command when it is called, and commands made of dataclasses.

A command is a click command in a module of ``tiered.cli``. Common options may stand before or after its name; what stands
further right rules.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from functools import cache
from itertools import chain
from typing import TYPE_CHECKING, Any, TypeVar, cast

import click

from tiered.cli.call import Call, CommonOptions, Surroundings
from tiered.cli.options import (
    ENVIRONMENT_PREFIX,
    Setting,
    Shape,
    arguments_of,
    build,
    misspelled,
    read_file,
    resolve,
    settings_of,
)
from tiered.errors import nearest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

T = TypeVar("T")
WIDTH = 100
HELP_OPTIONS = ["--help", "-h"]
COMPLETION_VARIABLE = "_TIERED_COMPLETE"
COMMON = settings_of(CommonOptions, "")
_VERBOSE = frozenset({"attach", "mount"})
"""Commands that run for long, whose log says what they do."""


@dataclass(frozen=True, slots=True)
class CommandEntry:
    """A command that a group knows of without loading it."""

    place: str  # its module in ``tiered.cli``, and its name there where that is not ``COMMAND``
    summary: str  # one sentence


ALIASES: Mapping[str, str] = {"take-back": "truncate"}
"""Other names of commands, which help and completion do not list."""
COMMANDS: Mapping[str, CommandEntry] = {
    "demo": CommandEntry("demo", "Shows the whole story on a local folder, without a server."),
    "attach": CommandEntry("attach", "Follows a store directory, live or dead, and tiers it."),
    "status": CommandEntry("status", "Says how far each queue is tiered, and what waits and why."),
    "ls": CommandEntry("status:LS", "Lists topics and queues, or the segments and their objects."),
    "cat": CommandEntry("cat", "Prints the messages of a topic, queue after queue."),
    "query": CommandEntry("query", "Finds messages by key or unique id, newest first."),
    "verify": CommandEntry("verify", "Checks that a tier is whole, or equal to a local store."),
    "archive": CommandEntry("archive", "Rewrites sealed segments as Parquet, or verifies them."),
    "sql": CommandEntry("sql", "Answers a question in SQL from an archive."),
    "gc": CommandEntry(
        "planned:GC", "Deletes what no reader can reach any more: plan, then apply."
    ),
    "expire": CommandEntry(
        "planned:EXPIRE", "Gives up messages older than a time to live: plan, then apply."
    ),
    "delete-topic": CommandEntry(
        "planned:DELETE_TOPIC", "Gives up everything of a topic: plan, then apply."
    ),
    "truncate": CommandEntry(
        "planned:TRUNCATE", "Ends a queue at an earlier offset: plan, then apply."
    ),
    "compact": CommandEntry("compact", "Keeps the newest message of each key: plan, then apply."),
    "lease": CommandEntry(
        "status:LEASE", "Says who writes a tier and until when, or frees its lease."
    ),
    "rebuild": CommandEntry("verify:REBUILD", "Makes a lost journal again, from the objects."),
    "doctor": CommandEntry("doctor", "Looks for what is set up wrong, and says what to do."),
    "mount": CommandEntry("mount", "Serves a tier read-only to RocketMQ's clients."),
    "restore": CommandEntry(
        "restore", "Makes a store directory of a tier, for a broker to start on."
    ),
    "timer": CommandEntry("timer", "Keeps messages that are due much later."),
    "timer.import": CommandEntry(
        "timer:IMPORT", "Takes a broker's pending timers into the tier, once."
    ),
    "timer.ls": CommandEntry("timer:LS", "Lists the hours in which messages are due."),
    "timer.show": CommandEntry("timer:SHOW", "Lists the messages that are due in one hour."),
    "timer.cancel": CommandEntry("timer:CANCEL", "Takes one pending message back."),
    "timer.run": CommandEntry("timer:RUN", "Hands messages over before they are due, each once."),
    "store": CommandEntry("store", "Makes and writes local stores without a broker."),
    "store.create": CommandEntry("store:CREATE", "Makes an empty store directory."),
    "store.topic": CommandEntry(
        "store:TOPIC", "Makes a topic, or gives one more queues; a compacted one, if asked."
    ),
    "store.put": CommandEntry(
        "store:PUT", "Appends messages: JSON lines, of a topic and a body at least."
    ),
    "store.tail": CommandEntry("store:TAIL", "Prints the last messages of a store directory."),
    "store.info": CommandEntry("store:INFO", "Says what a store directory holds."),
    "store.refill": CommandEntry(
        "refill:COMMAND", "Gives a replica's compacted topics what lies before its own messages."
    ),
    "store.recover": CommandEntry(
        "store:RECOVER", "Makes a store whole that was not stopped cleanly."
    ),
    "policy": CommandEntry("doctor:POLICY", "Prints the S3 policy that a role needs."),
    "bench": CommandEntry("bench", "Measures this machine against plain copying."),
    "bench.make-store": CommandEntry(
        "bench:MAKE_STORE", "Makes a local store of messages to measure with."
    ),
    "bench.store": CommandEntry(
        "bench:STORE", "Measures the embedded store, beside plain writes and reads."
    ),
    "bench.dispatch": CommandEntry(
        "bench:DISPATCH", "Measures how fast a store is tiered, beside cp and fsync."
    ),
    "bench.read": CommandEntry(
        "bench:READ", "Measures how fast a tier is read, beside plain ranged GETs."
    ),
    "config": CommandEntry("config", "Shows the settings in force."),
    "config.show": CommandEntry(
        "config:SHOW", "Prints every setting, its value and where it came from."
    ),
    "completion": CommandEntry("config:COMPLETION", "Prints the completion script of a shell."),
}
"""Every command by its path, groups before what is in them."""


class _Sections:
    """Help whose common options stand apart, and errors that know whose options they speak of."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """An error of click's parser does not say by itself in which command it was made."""
        try:
            return cast("list[str]", super().parse_args(ctx, args))  # type: ignore[misc] # of click
        except click.UsageError as error:
            error.ctx = error.ctx or ctx
            raise

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        command = cast("click.Command", self)
        common = {setting.field for setting in COMMON} | {"config_file"}
        own: list[tuple[str, str]] = []
        shared: list[tuple[str, str]] = []
        for parameter in command.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None:
                (shared if parameter.name in common else own).append(record)
        if isinstance(command, Program):
            command.format_commands(ctx, formatter)
        for title, rows in (("Options", own), ("Common options", shared)):
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows)

    def format_epilog(self, _ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """When to use it; and examples as they stand, one a line."""
        details = self.details if isinstance(self, CliCommand) else ""
        if details:
            with formatter.section("When to use it"):
                formatter.write_text(details)
        examples = cast("click.Command", self).epilog
        if examples:
            with formatter.section("Examples"):
                for line in examples.splitlines():
                    formatter.write(f"{'':>{formatter.current_indent}}{line}\n")


class CliCommand(_Sections, click.Command):
    """A command with common options and examples."""

    settings: Sequence[Setting] = ()  # its own
    details = ""  # when to use it; "" where that goes without saying


class Program(_Sections, click.Group):
    """A group whose commands are loaded when they are called."""

    entries: Mapping[str, CommandEntry] = {}

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 (click's signature)
        """Names of the commands, in the order of the table."""
        return list(self.entries)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002 (click's signature)
        """Loads the command's module."""
        entry = self.entries.get(ALIASES.get(cmd_name, cmd_name))
        if entry is None:
            return None
        module, _, name = entry.place.partition(":")
        found = getattr(importlib.import_module(f"tiered.cli.{module}"), name or "COMMAND")
        return cast("click.Command", found)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """A name that nobody has is answered with the nearest one."""
        name = args[0]
        if ALIASES.get(name, name) not in self.entries and not name.startswith("-"):
            near = nearest(name, self.entries)
            ctx.fail(f"no such command {name!r}" + (f"; did you mean {near!r}?" if near else ""))
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002 (click's signature)
        """From the table, without loading anything."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, entry.summary) for name, entry in self.entries.items()])

    def walk(self) -> Iterator[tuple[str, click.Command]]:
        """Every command in it with its path below it, as ``bench read``; loads them all."""
        context = click.Context(self)
        for name in self.entries:
            command = self.get_command(context, name)
            assert command is not None
            yield name, command
            if isinstance(command, Program):
                for path, inner in command.walk():
                    yield f"{name} {path}", inner


_CONTEXT: dict[str, Any] = {"max_content_width": WIDTH, "help_option_names": HELP_OPTIONS}


def _common_options() -> list[click.Option]:
    text = "TOML file that gives every option a default [default: TIERED_CONFIG]"
    file = click.Option(["config_file", "--config"], metavar="FILE", default=None, help=text)
    return [file, *(setting.click_option() for setting in COMMON)]


def make_program(
    path: str,
    *,
    examples: Sequence[str],
    summary: str = "",
    params: Sequence[click.Parameter] = (),
    run: Callable[[Call], int] | None = None,
) -> Program:
    """A group of those commands whose path begins with its own; ``run`` is what it does when no command is given."""

    def callback(**_parameters: object) -> int | None:
        context = click.get_current_context()
        if run is None or context.invoked_subcommand is not None:
            return None
        return _run(run, make_call(context, path, ()))

    program = Program(
        path or "tiered",
        help=summary or COMMANDS[path].summary,
        epilog="\n".join(examples),
        params=[*params, *_common_options()],
        callback=callback,
        invoke_without_command=run is not None,
        context_settings=_CONTEXT,
    )
    start = f"{path}." if path else ""
    below = {
        at.removeprefix(start): entry for at, entry in COMMANDS.items() if at.startswith(start)
    }
    program.entries = {name: entry for name, entry in below.items() if "." not in name}
    return program


def make_command(
    path: str,
    options: type[T],
    run: Callable[[Call, T], int],
    *,
    examples: Sequence[str],
    details: str = "",
) -> CliCommand:
    """A command.

    Args:
        path: Its key in ``COMMANDS``, which is also that of its settings.
        options: Dataclass of its arguments and settings.
        run: Does it; gives the exit code.
        examples: Two, each a line that runs.
        details: When to use it, where that does not go without saying.
    """
    settings, arguments = settings_of(options, path), arguments_of(options)

    def callback(**parameters: object) -> int:
        context = click.get_current_context()
        call = make_call(context, path, settings)
        given = {
            argument.name: parameters[argument.name] for argument in arguments if argument.name
        }
        chosen = build(options, settings, call.chosen, call.path, given)
        return _run(lambda call: run(call, chosen), call)

    summary = COMMANDS[path].summary
    command = CliCommand(
        path.rpartition(".")[2],
        callback=callback,
        help=summary,
        short_help=summary,
        epilog="\n".join(examples),
        params=[*arguments, *(setting.click_option() for setting in settings), *_common_options()],
        context_settings=_CONTEXT,
    )
    command.settings, command.details = settings, details
    return command


@cache
def all_settings() -> tuple[Setting, ...]:
    """Every setting there is; loads all commands."""
    commands = (command for _, command in program().walk() if isinstance(command, CliCommand))
    return (*COMMON, *chain.from_iterable(command.settings for command in commands))


def _run(run: Callable[[Call], int], call: Call) -> int:
    import logging

    from tiered.cli.stderr import logging_to_stderr

    level = logging.INFO if call.section in _VERBOSE else logging.WARNING
    level = logging.DEBUG if call.common.debug else level
    with logging_to_stderr(call.common.log_format, level, call.clock.now_ms):
        return run(call)


def make_call(context: click.Context, section: str, own: Sequence[Setting]) -> Call:
    """Resolve the settings of a call: all, where a file or a variable may name any of them.

    Raises:
        InvalidError: In the file or the environment.
    """
    around = context.find_object(Surroundings)
    assert around is not None
    environment = around.environment
    given, file_name = _given(context, own)
    file_name = file_name or environment.get("TIERED_CONFIG", "")
    needs_all = file_name or any(name.startswith(ENVIRONMENT_PREFIX) for name in environment)
    settings = all_settings() if needs_all or section in _READS_ALL else (*COMMON, *own)
    chosen = resolve(
        settings,
        file=read_file(file_name, settings) if file_name else {},
        file_name=file_name,
        environment=environment,
        given=given,
    )
    path = context.command_path
    common = build(CommonOptions, COMMON, chosen, path, {})
    around.debug, around.log_format = common.debug, common.log_format
    call = Call(path, section, common, chosen, around.clock, around.watch)
    for name, near in misspelled(environment, settings).items():
        text = f"tiered: the variable {name} means nothing; did you mean {near}?"
        call.say(text, level="warning")
    return call


_READS_ALL = frozenset({"config.show", "bench"})
"""Commands that use settings of others."""


def _given(context: click.Context, own: Sequence[Setting]) -> tuple[dict[str, object], str]:
    """What the command line says, by key; and the configuration file."""
    given: dict[str, object] = {}
    levels = [context]
    while levels[-1].parent is not None:
        levels.append(levels[-1].parent)
    file_name = ""
    for level in reversed(levels):
        file_name = level.params.get("config_file") or file_name
        for setting in (*COMMON, *(own if level is context else ())):
            value = level.params.get(setting.field)
            if value is None or value == ():
                continue
            is_list = setting.shape is Shape.LIST
            given[setting.key] = tuple(chain.from_iterable(value)) if is_list else value
    return given, file_name


def program() -> Program:
    """The whole command line."""
    from tiered import __version__

    version = click.Option(
        ["--version"],
        is_flag=True,
        expose_value=False,
        is_eager=True,
        help="print the version and end",
        callback=lambda ctx, _option, wanted: _print_version(ctx, __version__) if wanted else None,
    )
    return make_program(
        "",
        summary="Tiered storage for RocketMQ-format message stores: attach, copy to S3, read back.",
        examples=["tiered demo", "tiered attach /data/rocketmq/store --to s3://bucket/prefix"],
        params=[version],
    )


def invoke(arguments: Sequence[str], surroundings: Surroundings) -> int:
    """Run a command line, or answer a shell that completes one.

    Not ``main`` of click, which makes a closed pipe an error.

    Returns:
        The exit code.

    Raises:
        click.ClickException: Wrong usage.
    """
    root = program()
    instruction = surroundings.environment.get(COMPLETION_VARIABLE)
    if instruction:
        from click.shell_completion import shell_complete

        return shell_complete(root, {}, "tiered", COMPLETION_VARIABLE, instruction)
    try:
        with root.make_context("tiered", list(arguments), obj=surroundings) as context:
            return cast("int | None", root.invoke(context)) or 0
    except click.exceptions.Exit as end:
        return end.exit_code


def _print_version(ctx: click.Context, version: str) -> None:
    click.echo(f"tiered {version}")
    ctx.exit()
