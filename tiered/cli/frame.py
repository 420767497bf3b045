"""The frame of the command line: groups that load a command when it is called, and options made of settings.

A command is a module of ``tiered.cli`` with a ``COMMAND``. Common options may stand before or after the command's name.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import click

from tiered.cli.call import Call, Surroundings
from tiered.cli.settings import COMMON, all_settings, settings_of
from tiered.config import ENVIRONMENT_PREFIX, Setting, Shape, nearest, read_file, resolve

Run = Callable[[Call], int]
WIDTH = 100
HELP_OPTIONS = ["--help", "-h"]
COMPLETION_VARIABLE = "_TIERED_COMPLETE"


@dataclass(frozen=True, slots=True)
class Entry:
    """A command that a group knows of without loading it."""

    module: str
    summary: str


COMMANDS: Mapping[str, Entry] = {
    "demo": Entry("tiered.cli.demo", "Shows the whole story on a local folder, without a server."),
    "attach": Entry("tiered.cli.attach", "Follows a store directory, live or dead, and tiers it."),
    "status": Entry(
        "tiered.cli.status", "Says how far each queue is tiered, and what waits and why."
    ),
    "ls": Entry("tiered.cli.ls", "Lists topics and queues, or the segments and their objects."),
    "cat": Entry("tiered.cli.cat", "Prints the messages of a topic, queue after queue."),
    "query": Entry("tiered.cli.query", "Finds messages by key or unique id, newest first."),
    "verify": Entry("tiered.cli.verify", "Checks that a tier is whole, or equal to a local store."),
    "archive": Entry(
        "tiered.cli.archive", "Rewrites sealed segments as Parquet, or verifies them."
    ),
    "sql": Entry("tiered.cli.sql", "Answers a question in SQL from an archive."),
    "gc": Entry("tiered.cli.gc", "Deletes what no reader can reach any more: plan, then apply."),
    "expire": Entry(
        "tiered.cli.expire:EXPIRE",
        "Gives up messages older than a time to live: plan, then apply.",
    ),
    "delete-topic": Entry(
        "tiered.cli.expire:DELETE_TOPIC", "Gives up everything of a topic: plan, then apply."
    ),
    "take-back": Entry(
        "tiered.cli.take_back", "Ends a queue at an earlier offset: plan, then apply."
    ),
    "lease": Entry(
        "tiered.cli.lease", "Says who writes a tier and until when, or frees its lease."
    ),
    "rebuild": Entry("tiered.cli.rebuild", "Makes a lost journal again, from the objects."),
    "doctor": Entry("tiered.cli.doctor", "Looks for what is set up wrong, and says what to do."),
    "mount": Entry("tiered.cli.mount", "Serves a tier read-only to RocketMQ's clients."),
    "timer": Entry("tiered.cli.timer", "Keeps messages that are due much later."),
    "store": Entry("tiered.cli.store", "Makes and writes local stores without a broker."),
    "policy": Entry("tiered.cli.policy", "Prints the S3 policy that a role needs."),
    "bench": Entry("tiered.cli.bench", "Measures this machine against plain copying."),
    "config": Entry("tiered.cli.config", "Shows the settings in force."),
    "completion": Entry("tiered.cli.completion", "Prints the completion script of a shell."),
}


if TYPE_CHECKING:
    _ParamType = click.ParamType[object]
else:
    _ParamType = click.ParamType  # generic in newer releases only


class SettingType(_ParamType):
    """Hands a text to a setting's own parser."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.name = setting.metavar

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> object:
        """See ``click.ParamType``."""
        if not isinstance(value, str):
            return value
        try:
            if self.setting.shape is Shape.LIST:
                return self.setting.convert(value, "command line")
            return (self.setting.convert(value, "command line"),)  # None stays "not given"
        except Exception as error:  # noqa: BLE001 (any parser's complaint is the user's text)
            what = str(error.__cause__ or error).removeprefix(f"{self.setting.key}: ")
            self.fail(what, param, ctx)

    def shell_complete(
        self,
        ctx: click.Context,  # noqa: ARG002 (click's signature)
        param: click.Parameter,  # noqa: ARG002 (click's signature)
        incomplete: str,
    ) -> list[click.shell_completion.CompletionItem]:
        """See ``click.ParamType``."""
        from click.shell_completion import CompletionItem

        fitting = [text for text in self.setting.choices if text.startswith(incomplete)]
        if self.setting.metavar == "DIR":
            return [CompletionItem(incomplete, type="dir")]
        return [CompletionItem(text) for text in fitting]


def describe(setting: Setting) -> str:
    """Help of one option: what it does, its choices and its default."""
    text = setting.help
    if setting.choices:
        text += f" ({', '.join(setting.choices)})"
    default = default_text(setting)
    return f"{text} [default: {default}]" if default else text


def default_text(setting: Setting) -> str:
    """The default as people read it; "" when there is none or it goes without saying."""
    if setting.default_text:
        return setting.default_text
    if setting.is_required:
        return ""
    if setting.shape is Shape.FLAG or setting.default is None or setting.default == ():
        return ""
    if setting.metavar == "SIZE":
        from tiered.cli.values import format_size

        return format_size(cast("int", setting.default))
    if isinstance(setting.default, float) and setting.default.is_integer():
        return str(int(setting.default))
    return str(setting.default)


def _option(setting: Setting) -> click.Option:
    text = describe(setting) + ("  [required]" if setting.is_required else "")
    declared = [_parameter(setting), *(setting.spellings or (f"--{setting.name}",))]
    if setting.shape is Shape.FLAG:
        return click.Option(declared, is_flag=True, default=None, help=text)
    return click.Option(
        declared,
        type=SettingType(setting),
        metavar=setting.metavar,
        multiple=setting.shape is Shape.LIST,
        default=None,
        help=text,
    )


def _parameter(setting: Setting) -> str:
    return "set_" + setting.key.replace("-", "_").replace(".", "__")


def _config_option() -> click.Option:
    text = "TOML file that gives every option a default [default: TIERED_CONFIG]"
    return click.Option(["config_file", "--config"], metavar="FILE", default=None, help=text)


def _common_options() -> list[click.Option]:
    return [_config_option(), *(_option(setting) for setting in COMMON)]


class _Sections:
    """Help whose common options stand apart."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """See ``click.Command``."""
        command = cast("click.Command", self)
        common = {_parameter(setting) for setting in COMMON} | {"config_file"}
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
        details = self.details if isinstance(self, Command) else ""
        if details:
            with formatter.section("When to use it"):
                formatter.write_text(details)
        examples = cast("click.Command", self).epilog
        if examples:
            with formatter.section("Examples"):
                for line in examples.splitlines():
                    formatter.write(f"{'':>{formatter.current_indent}}{line}\n")


class Command(_Sections, click.Command):
    """A command with common options and examples.

    Attributes:
        details: When to use it; "" where that goes without saying.
    """

    details = ""


class Program(_Sections, click.Group):
    """A group whose commands are loaded when they are called."""

    entries: Mapping[str, Entry] = {}

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 (click's signature)
        """See ``click.Group``."""
        return list(self.entries)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002 (click's signature)
        """See ``click.Group``; loads the command's module."""
        entry = self.entries.get(cmd_name)
        if entry is None:
            return None
        module, _, name = entry.module.partition(":")
        return cast("click.Command", getattr(importlib.import_module(module), name or "COMMAND"))

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """See ``click.Group``; a name that nobody has is answered with the nearest one."""
        name = args[0]
        if name not in self.entries and not name.startswith("-"):
            near = nearest(name, self.entries)
            ctx.fail(f"no such command {name!r}" + (f"; did you mean {near!r}?" if near else ""))
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002 (click's signature)
        """From the table, without loading anything."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, entry.summary) for name, entry in self.entries.items()])


_CONTEXT: dict[str, Any] = {"max_content_width": WIDTH, "help_option_names": HELP_OPTIONS}


def make_program(
    name: str,
    entries: Mapping[str, Entry],
    summary: str,
    examples: Sequence[str],
    *,
    params: Sequence[click.Parameter] = (),
    run: Run | None = None,
) -> Program:
    """A group of commands; ``run`` does what the group does when no command is given."""

    def callback(**_parameters: object) -> int | None:
        context = click.get_current_context()
        if run is None or context.invoked_subcommand is not None:
            return None
        return _run(run, make_call(context, name, {}))

    program = Program(
        name,
        help=summary,
        epilog="\n".join(examples),
        params=[*params, *_common_options()],
        callback=callback,
        invoke_without_command=run is not None,
        context_settings=_CONTEXT,
    )
    program.entries = entries
    return program


def make_command(
    name: str,
    run: Run,
    *,
    summary: str,
    examples: Sequence[str],
    arguments: Sequence[click.Argument] = (),
    section: str | None = None,
    details: str = "",
) -> Command:
    """A command.

    Args:
        name: As typed, without the groups.
        run: Does it; gives the exit code.
        summary: One sentence.
        examples: Two, each a line that runs.
        arguments: Positional ones.
        section: Of its settings; default: its name.
        details: When to use it, where that does not go without saying.
    """
    section = name if section is None else section
    names = [argument.name for argument in arguments]

    def callback(**parameters: str | None) -> int:
        context = click.get_current_context()
        chosen_arguments = {key: parameters[key] for key in names if key}
        return _run(run, make_call(context, section, chosen_arguments))

    command = Command(
        name,
        callback=callback,
        help=summary,
        short_help=summary,
        epilog="\n".join(examples),
        params=[*arguments, *map(_option, settings_of(section)), *_common_options()],
        context_settings=_CONTEXT,
    )
    command.details = details
    return command


def _run(run: Run, call: Call) -> int:
    import logging

    from tiered.cli.stderr import logging_to_stderr

    level = logging.INFO if call.section in {"attach", "mount"} else logging.WARNING
    level = logging.DEBUG if call.flag("debug") else level
    with logging_to_stderr(call.words("log-format"), level, call.clock.now_ms):
        return run(call)


def make_call(context: click.Context, section: str, arguments: Mapping[str, str | None]) -> Call:
    """Resolve the settings of a call.

    Raises:
        InvalidError: In the file or the environment.
    """
    surroundings = context.find_object(Surroundings)
    assert surroundings is not None
    given, file_name = _given(context)
    file_name = file_name or surroundings.environment.get("TIERED_CONFIG", "")
    chosen = resolve(
        all_settings(),
        file=read_file(file_name, all_settings()) if file_name else {},
        file_name=file_name,
        environment=surroundings.environment,
        given=given,
    )
    call = Call(
        context.command_path, section, arguments, chosen, surroundings.clock, surroundings.watch
    )
    for line in _misspelled(surroundings.environment):
        call.say(line, level="warning")
    surroundings.debug, surroundings.log_format = call.flag("debug"), call.words("log-format")
    return call


def _misspelled(environment: Mapping[str, str]) -> list[str]:
    """Of each variable that looks like one of a setting, what it should be called; others may be anybody's."""
    variables = [name for name in environment if name.startswith(ENVIRONMENT_PREFIX)]
    if not variables:
        return []
    known = {setting.variable for setting in all_settings()} | {"TIERED_CONFIG"}
    unknown = {name: nearest(name, known, 0.8) for name in variables if name not in known}
    return [
        f"tiered: the variable {name} means nothing; did you mean {near}?"
        for name, near in unknown.items()
        if near
    ]


def _given(context: click.Context) -> tuple[dict[str, object], str]:
    """What the command line says, by key; what stands further right rules."""
    given: dict[str, object] = {}
    file_name = ""
    chain: list[click.Context] = []
    at: click.Context | None = context
    while at is not None:
        chain.append(at)
        at = at.parent
    for level in reversed(chain):
        file_name = level.params.get("config_file") or file_name
        for setting in all_settings():
            value = level.params.get(_parameter(setting))
            if value is None or value == ():
                continue
            if setting.shape is Shape.LIST:
                value = tuple(item for group in value for item in group)
            elif setting.shape is Shape.ONE:
                value = value[0]
            given[setting.key] = value
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
        "tiered",
        COMMANDS,
        "Tiered storage for RocketMQ-format message stores: attach, copy to S3, read back.",
        ["tiered demo", "tiered attach /data/rocketmq/store --to s3://bucket/prefix"],
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
