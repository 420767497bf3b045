"""The frame of the command line: groups that load a command when it is called, and commands made of dataclasses.

A command is a click command in a module of ``tiered.cli``. Common options may stand before or after its name; what stands
further right rules.
"""

from __future__ import annotations

import importlib
import inspect
from functools import cache, partial
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

import click

from tiered.cli.call import Call, CommonOptions, Surroundings
from tiered.cli.options import (
    ENVIRONMENT_PREFIX,
    BrokersOptions,
    Setting,
    Shape,
    TopicRules,
    arguments_of,
    build,
    misspelled,
    read_file,
    read_rules,
    resolve,
    settings_of,
)
from tiered.errors import nearest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from tiered.cli.options import SettingInForce

T = TypeVar("T")
WIDTH = 100
HELP_OPTIONS = ["--help", "-h"]
COMPLETION_VARIABLE = "_TIERED_COMPLETE"
COMMON = settings_of(CommonOptions, "")
_VERBOSE = frozenset({"attach", "mount", "web"})
"""Commands that run for long, whose log says what they do."""


ALIASES: Mapping[str, str] = {"take-back": "truncate"}
"""Deprecated names of commands, which help and completion do not list (docs/upgrading.md)."""


class _Listed(NamedTuple):
    """What is known of a command before it is loaded."""

    module: str  # of ``tiered.cli``, where it describes itself
    summary: str  # the first sentence of its help: who asks for all commands loads none


LISTED: Mapping[str, _Listed] = {
    "demo": _Listed("demo", "Demonstrates everything on a local folder, without a server."),
    "attach": _Listed("attach", "Follows a store directory, live or dead, and tiers it."),
    "status": _Listed("status", "Shows how far each queue is tiered, and what is pending."),
    "ls": _Listed("status", "Lists topics and queues, or the segments and their objects."),
    "cat": _Listed("cat", "Prints the messages of a topic, queue after queue."),
    "query": _Listed("query", "Finds messages by key or unique id, newest first."),
    "verify": _Listed("verify", "Checks that a tier is intact, or equal to a local store."),
    "archive": _Listed("archive", "Rewrites sealed segments as Parquet, or verifies them."),
    "sql": _Listed("sql", "Answers a question in SQL from an archive."),
    "hand-back": _Listed("restore", "Returns a mount's offsets and retries to its broker."),
    "gc": _Listed("planned", "Deletes what no reader can reach: plan, then apply."),
    "expire": _Listed("planned", "Expires messages older than a time: plan, then apply."),
    "delete-topic": _Listed("planned", "Expires everything of a topic: plan, then apply."),
    "truncate": _Listed("planned", "Ends a queue at an earlier offset: plan, then apply."),
    "compact": _Listed("compact", "Keeps the newest message of each key: plan, then apply."),
    "pause": _Listed("pause", "Makes attach skip a topic until it is resumed."),
    "resume": _Listed("pause", "Resumes a paused topic."),
    "lease": _Listed("status", "Shows who writes a tier and until when, or frees its lease."),
    "rebuild": _Listed("verify", "Rebuilds a lost journal from the objects."),
    "doctor": _Listed("doctor", "Finds what is set up wrong, and says what to do."),
    "web": _Listed("web", "Shows a tier as pages in a browser, read-only."),
    "mount": _Listed("mount", "Serves a tier read-only to RocketMQ's clients."),
    "restore": _Listed("restore", "Rebuilds a broker's store directory from a tier."),
    "timer": _Listed("timer", "Imports, lists, cancels and delivers long-delayed messages."),
    "store": _Listed("store", "Makes and writes local stores without a broker."),
    "support-bundle": _Listed(
        "support_bundle", "Collects what support needs in one file, without secrets."
    ),
    "policy": _Listed("doctor", "Prints the S3 policy that a role needs."),
    "bench": _Listed("bench", "Measures this machine against plain copying."),
    "config": _Listed("config", "Shows the settings in force."),
    "man": _Listed("man", "Writes the manual pages of all commands into a directory."),
    "completion": _Listed("config", "Prints the completion script of a shell."),
}
"""Commands in the order of help: a module is loaded when its command is called."""


class _Sections:
    """Help whose common options stand apart, and errors that know whose options they speak of."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """An error of click's parser does not say by itself in which command it was made.

        While a shell completes the value of an option, that option stands last, without one: click's parser would give up
        there, and know none of the arguments that stand before it.
        """
        if ctx.resilient_parsing and args and self._takes_value(ctx, args[-1]):
            args = args[:-1]
        try:
            return cast("list[str]", super().parse_args(ctx, args))  # type: ignore[misc] # of click
        except click.UsageError as error:
            error.ctx = error.ctx or ctx
            raise

    def _takes_value(self, ctx: click.Context, word: str) -> bool:
        """Whether a word is an option that has a value."""
        options = cast("click.Command", self).get_params(ctx)
        return any(
            isinstance(one, click.Option) and word in one.opts and not one.is_flag
            for one in options
        )

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        command = cast("click.Command", self)
        common = {setting.field for setting in COMMON} | {"config_file"}
        own: list[tuple[str, str]] = []
        shared: list[tuple[str, str]] = []
        for parameter in command.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if isinstance(parameter, click.Option) and record is not None:
                (shared if parameter.name in common else own).append(record)
        if isinstance(command, click.Group):
            command.format_commands(ctx, formatter)
        for title, rows in (("Options", own), ("Common options", shared)):
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows)

    def format_epilog(self, _ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Notes; and examples as they stand, one a line."""
        details = self.details if isinstance(self, CliCommand) else ""
        if details:
            with formatter.section("Notes"):
                formatter.write_text(details)
        examples = cast("click.Command", self).epilog
        if examples:
            with formatter.section("Examples"):
                for line in examples.splitlines():
                    formatter.write(f"{'':>{formatter.current_indent}}{line}\n")


class CliCommand(_Sections, click.Command):
    """A command with common options and examples."""

    settings: Sequence[Setting] = ()  # its own
    details = ""  # notes below the options; "" where there is nothing to add
    does: Callable[[Call, Any], int]  # what carries it out


class Program(_Sections, click.Group):
    """A group of commands."""

    def has(self, name: str, options: type[T]) -> Callable[[Callable[[Call, T], int]], CliCommand]:
        """Makes a command of it; see ``command``."""

        def add(run: Callable[[Call, T], int]) -> CliCommand:
            made = command(f"{self.name}.{name}", options)(run)
            self.add_command(made)
            return made

        return add

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 (click's signature)
        """Names of the commands, as they were added."""
        return list(self.commands)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """A name that nobody has is answered with the nearest one."""
        name, known = args[0], self.list_commands(ctx)
        if ALIASES.get(name, name) not in known and not name.startswith("-"):
            near = nearest(name, known)
            ctx.fail(f"no such command {name!r}" + (f"; did you mean {near!r}?" if near else ""))
        return super().resolve_command(ctx, args)

    def walk(self) -> Iterator[tuple[str, click.Command]]:
        """Every command in it with its path below it, as ``bench read``; loads them all."""
        context = click.Context(self)
        for name in self.list_commands(context):
            command = self.get_command(context, name)
            assert command is not None
            yield name, command
            if isinstance(command, Program):
                for path, inner in command.walk():
                    yield f"{name} {path}", inner


class _Root(Program):
    """All commands, each loaded when it is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 (click's signature)
        return list(LISTED)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002 (click's signature)
        """A line for each, without loading them."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, command.summary) for name, command in LISTED.items()])

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002 (click's signature)
        name = ALIASES.get(cmd_name, cmd_name)
        if name not in LISTED:
            return None
        if name != cmd_name:
            click.echo(f"tiered: {cmd_name} is deprecated; use {name}", err=True)
        module = importlib.import_module(f"tiered.cli.{LISTED[name].module}")
        found = (one for one in vars(module).values() if isinstance(one, click.Command))
        return next(one for one in found if one.name == name)


_CONTEXT: dict[str, Any] = {"max_content_width": WIDTH, "help_option_names": HELP_OPTIONS}


@cache
def _common_options() -> tuple[click.Option, ...]:
    text = "TOML file that gives every option a default [default: TIERED_CONFIG]"
    file = click.Option(["config_file", "--config"], metavar="FILE", default=None, help=text)
    return file, *(setting.click_option() for setting in COMMON)


def group(
    name: str, summary: str, *, examples: Sequence[str], run: Callable[[Call], int] | None = None
) -> Program:
    """A group; its commands are what it ``has``. ``run`` is what it does when no command is given."""

    def callback(**_parameters: object) -> int | None:
        context = click.get_current_context()
        if run is None or context.invoked_subcommand is not None:
            return None
        return _run(run, make_call(context, name, ()))

    return Program(
        name,
        callback=callback,
        **_common(summary, "\n".join(examples)),
        invoke_without_command=run is not None,
    )


def command(path: str, options: type[T]) -> Callable[[Callable[[Call, T], int]], CliCommand]:
    """Makes a command of the function that does it and gives the exit code; its docstring is the help.

    The first paragraph says in one sentence what it does; ``Examples:`` are two lines that run; what stands between them
    are notes: what must be known before it is used.

    Args:
        path: The command's name, for one of a group as ``bench read``; also the section of its settings.
    """
    settings, arguments = settings_of(options, path), arguments_of(options)

    def made_of(run: Callable[[Call, T], int]) -> CliCommand:
        def callback(**parameters: object) -> int:
            call = make_call(click.get_current_context(), path, settings)
            given = {one.name: parameters[one.name] for one in arguments if one.name}
            chosen = build(options, settings, call.chosen, call.path, given)
            return _run(lambda call: _run_chosen(run, call, chosen), call)

        text, _, examples = inspect.cleandoc(run.__doc__ or "").partition("\n\nExamples:\n")
        summary, _, details = text.partition("\n\n")
        made = CliCommand(
            path.rpartition(".")[2],
            callback=callback,
            **_common(summary, inspect.cleandoc(examples)),
        )
        made.params = [*arguments, *(setting.click_option() for setting in settings), *made.params]
        made.settings, made.details = settings, " ".join(details.split())
        made.does = run
        return made

    return made_of


def _common(summary: str, examples: str) -> dict[str, Any]:
    """What a group and a command have in common."""
    return {
        "help": summary,
        "short_help": summary,
        "epilog": examples,
        "params": [*_common_options()],
        "context_settings": _CONTEXT,
    }


@cache
def all_settings() -> tuple[Setting, ...]:
    """Every setting there is; loads all commands."""
    commands = (command for _, command in program().walk() if isinstance(command, CliCommand))
    return (*COMMON, *chain.from_iterable(command.settings for command in commands))


def _run_chosen(run: Callable[[Call, T], int], call: Call, options: T) -> int:
    """Run a command, of several brokers for each."""
    if isinstance(options, BrokersOptions) and options.names_several:
        from tiered.cli.fleet import over_brokers

        return over_brokers(run, call, options)
    return run(call, options)


def _run(run: Callable[[Call], int], call: Call) -> int:
    import logging

    from tiered.api.stores import backend_errors
    from tiered.cli.stderr import logging_to_stderr

    level = logging.INFO if call.section in _VERBOSE else logging.WARNING
    level = logging.DEBUG if call.common.debug else level
    with (
        logging_to_stderr(call.common.log_format, level, call.clock.now_ms),
        backend_errors(),
        call.opened,
    ):
        return run(call)


def make_call(context: click.Context, section: str, own: Sequence[Setting]) -> Call:
    """Resolve the settings of a call: all, where a file or a variable may name any of them."""
    around = context.find_object(Surroundings)
    assert around is not None
    environment = around.environment
    given, file_name = _given(context, own)
    file_name = file_name or environment.get("TIERED_CONFIG", "")
    needs_all = file_name or any(name.startswith(ENVIRONMENT_PREFIX) for name in environment)
    settings = all_settings() if needs_all or section in _READS_ALL else (*COMMON, *own)
    reread = partial(_resolve, settings, file_name, environment, given)
    chosen, rules = reread()
    path = context.command_path
    common = build(CommonOptions, COMMON, chosen, path, {})
    around.debug, around.log_format = common.debug, common.log_format
    call = Call(
        path,
        section,
        common,
        chosen,
        around.clock,
        around.watch,
        around.stdout,
        rules,
        reread if file_name else None,
    )
    around.form = call.form
    for name, near in misspelled(environment, settings).items():
        text = f"tiered: the variable {name} means nothing; did you mean {near}?"
        call.say(text, level="warning")
    return call


def _resolve(
    settings: Sequence[Setting],
    file_name: str,
    environment: Mapping[str, str],
    given: Mapping[str, object],
) -> tuple[dict[str, SettingInForce], TopicRules]:
    """What rules now, and what the file says of topics."""
    file: Mapping[str, object] = {}
    rules = TopicRules()
    if file_name:
        file, table = read_file(file_name, settings)
        rules = read_rules(table, file_name) if table else rules
    chosen = resolve(settings, file=file, file_name=file_name, environment=environment, given=given)
    return chosen, rules


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

    summary = "Tiered storage for RocketMQ-format message stores: attach, copy to S3, read back."
    examples = "tiered demo\ntiered attach /data/rocketmq/store --to s3://bucket/prefix"
    root = _Root("tiered", **_common(summary, examples))
    version = click.version_option(
        __version__, message="%(prog)s %(version)s", help="print the version and end"
    )
    return version(root)


def invoke(arguments: Sequence[str], surroundings: Surroundings) -> int:
    """Run a command line, or answer a shell that completes one.

    Not ``main`` of click, which makes a closed pipe an error.
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
