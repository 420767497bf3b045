"""What can be set: a frozen dataclass beside each command says it, and everything else is made of that.

    @dataclass(frozen=True, kw_only=True)
    class Attach:
        store: str = argument()
        to: str = required("URL of the tier", "URL", str)
        once: bool = flag("end when the present end is durable")
        freshness_s: float = option("a message is durable so soon", "DURATION", seconds_above_zero, default=2.0)

A field is an option (``--freshness``), a key of the ``--config`` file in the table of its command, a variable of the
environment (``TIERED_ATTACH_FRESHNESS``), a row of ``config show`` and a line of docs/reference; it is called as the
field is, without the unit that its value has. Common settings (``CommonOptions``) stand at the top of a file:

    endpoint-url = "http://127.0.0.1:9000"
    [attach]
    freshness = 5
    topics = ["orders", "events*"]

The later of these rules: default, file, environment, command line. click reads the command line and writes help; the rest
is done here, because click's own maps of defaults and variables do not say which file or variable a bad value came from,
and know neither common options on both sides of a command's name nor keys that nobody has.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import inspect
import re
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, ClassVar, Final, TypeVar, cast, overload

import click

from backends.lazy_dataclass import dataclass
from tiered.cli import kinds
from tiered.cli.values import format_duration, size_text
from tiered.errors import InvalidError, nearest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from click.shell_completion import CompletionItem

    from backends.base import ObjectStore
    from tiered.cli.values import Moment

ENVIRONMENT_PREFIX = "TIERED_"
_USER = re.compile(r"//[^/@]*@")
"""User and password in a URL: never shown, although no URL of ours takes them."""
_TRUE = frozenset({"1", "true", "yes", "on"})
_FALSE = frozenset({"0", "false", "no", "off"})
ISOLATION_HELP = "Kafka transactions: committed only, or all"
_UNITS = {"SIZE": ("_bytes_s", "_bytes"), "DURATION": ("_ms", "_s")}
"""What the name of a field ends with, and that of its option does not, by what stands for its value in help."""

T = TypeVar("T")


class Shape(enum.Enum):
    """How a setting is written."""

    ONE = "one"
    """One value."""
    FLAG = "flag"
    """Yes or no."""
    LIST = "list"
    """Several values, in one text (see ``Setting.separator``) or, in a file, in a list."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One thing that can be set."""

    help: str  # what it does, as a clause with its unit
    kind: kinds.Kind[Any] = kinds.Kind("", str)  # what values it takes
    shape: Shape = Shape.ONE  # how it is written
    default: object = None  # value when nobody says anything
    default_text: str = ""
    """How help puts the default when the value alone would not tell."""
    separator: str = ","  # divides the values of a list that is written as one text
    spellings: tuple[str, ...] = ()
    """Options on the command line, when they are not just ``--name``."""
    needs: str = ""
    """Names of options, divided by blanks, without one of which it makes no sense."""
    excludes: str = ""
    """Likewise, of those that it cannot stand beside."""
    is_required: bool = False  # there must be a value
    is_masked: bool = False  # values are not shown, only the part before ``=``
    section: str = ""
    """The command it belongs to (``bench.read`` for a command of a command); "" for all commands."""
    field: str = ""  # of the dataclass
    name: str = ""  # its long option without the dashes, and its key in a file

    @property
    def key(self) -> str:
        """Section and name, as ``config show`` gives it."""
        return f"{self.section}.{self.name}" if self.section else self.name

    @property
    def variable(self) -> str:
        """The environment variable."""
        return ENVIRONMENT_PREFIX + self.key.upper().replace("-", "_").replace(".", "_")

    def convert(self, raw: object, source: str) -> object:
        """The value that ``raw`` (text, or what TOML gives) stands for.

        Raises:
            InvalidError: It is none that this setting can take; the message names key and source.
        """
        try:
            return self._convert(raw)
        except InvalidError as error:
            raise InvalidError(f"{self.key}: {error.what}", where=source, do=error.do) from error
        except ValueError as error:
            what = "write NAME=VALUE" if self.is_masked else str(error)  # values may be secrets
            raise InvalidError(f"{self.key}: {what}", where=source) from (
                None if self.is_masked else error
            )

    def _convert(self, raw: object) -> object:
        if self.shape is Shape.FLAG:
            return _yes_or_no(raw)
        if self.shape is Shape.LIST:
            texts = raw.split(self.separator) if isinstance(raw, str) else _items(raw)
            return tuple(self.kind.parse(text.strip()) for text in texts if text.strip())
        if isinstance(raw, bool) or not isinstance(raw, str | int | float):
            raise InvalidError(f"{raw!r} is not a single value")
        return self.kind.parse(str(raw))

    def shown(self, value: object) -> object:
        """The value as people and JSON may see it."""
        if self.shape is Shape.LIST:
            return [self._shown(item) for item in cast("tuple[object, ...]", value)]
        return self._shown(value)

    def _shown(self, value: object) -> object:
        if value is None or isinstance(value, bool | int | float):
            return value
        text = str(value)
        return text.partition("=")[0] + "=***" if self.is_masked else _USER.sub("//***@", text)

    @property
    def default_shown(self) -> str:
        """The default as people read it; "" when there is none or it goes without saying."""
        default = self.default
        if self.default_text:
            return self.default_text
        if self.is_required or self.shape is Shape.FLAG:
            return ""
        if default in {None, ()}:
            return ""
        if self.kind.metavar == "SIZE":
            return size_text(cast("int", default))
        if self.kind.metavar == "DURATION":
            in_ms = round(default * 1000) if isinstance(default, float) else cast("int", default)
            return format_duration(in_ms)
        is_whole = isinstance(default, float) and default.is_integer()
        return str(int(cast("float", default)) if is_whole else default)

    def click_option(self) -> click.Option:
        """The option of the command line; without it, its value is None or ()."""
        text = self.help + (f" ({', '.join(self.kind.choices)})" if self.kind.choices else "")
        text += f" [default: {self.default_shown}]" if self.default_shown else ""
        text += "  [required]" if self.is_required else ""
        declared = [self.field, *(self.spellings or (f"--{self.name}",))]
        if self.shape is Shape.FLAG:
            return click.Option(declared, is_flag=True, default=None, help=text)
        is_list = self.shape is Shape.LIST
        kind, metavar = _Kind(self), self.kind.metavar
        return click.Option(
            declared, type=kind, metavar=metavar, multiple=is_list, default=None, help=text
        )


def flag(help: str, *, needs: str = "", excludes: str = "") -> bool:  # noqa: A002 (as click has it)
    """A field that is yes or no; no by default."""
    made = Setting(help=help, shape=Shape.FLAG, default=False, needs=needs, excludes=excludes)
    return cast("bool", _field(made))


@overload
def option(help: str, kind: kinds.Kind[T], *, default: T, **more: str) -> T: ...
@overload
def option(help: str, kind: kinds.Kind[T], **more: str) -> T | None: ...
def option(help: str, kind: kinds.Kind[Any], **more: Any) -> Any:  # noqa: A002
    """A field of one value; ``more``: of its ``Setting``, with ``name`` where the option is not called as the field is."""
    return _field(Setting(help=help, kind=kind, **more))


def required(help: str, kind: kinds.Kind[T]) -> T:  # noqa: A002
    """A field that somebody must give."""
    return cast("T", _field(Setting(help=help, kind=kind, is_required=True)))


def several(help: str, kind: kinds.Kind[T], **more: Any) -> tuple[T, ...]:  # noqa: A002, ANN401
    """A field of any number of values; none by default."""
    made = Setting(help=help, kind=kind, shape=Shape.LIST, default=(), **more)
    return cast("tuple[T, ...]", _field(made))


def custom(setting: Setting) -> Any:  # noqa: ANN401 (of any type)
    """A field that none of the others can say."""
    return _field(setting)


def argument(
    text: str = "", kind: click.ParamType[Any] | None = None, *, metavar: str | None = None
) -> str:
    """A field that stands by its place, without a name; a URL or topic needs no text that says what it is."""
    return cast("str", dataclasses.field(metadata={"argument": (True, text, kind, metavar)}))


def maybe(
    text: str, kind: click.ParamType[Any] | None = None, *, metavar: str | None = None
) -> str | None:
    """An argument that may be left out."""
    found = dataclasses.field(default=None, metadata={"argument": (False, text, kind, metavar)})
    return cast("str | None", found)


def _field(setting: Setting) -> object:
    return dataclasses.field(default=setting.default, metadata={"setting": setting})


@dataclass(frozen=True, kw_only=True)
class SpanOptions:
    """From when to when messages are taken of each queue."""

    from_: Moment | None = option(
        "start each queue at the first message stored from this time on",
        kinds.TIME,
    )
    until: Moment | None = option(
        "end each queue before the first one stored from this time on",
        kinds.TIME,
    )


@dataclass(frozen=True, kw_only=True)
class PatienceOptions:
    """How long a store that refuses is asked again."""

    give_up_s: float = option(
        "exit with code 3 when the object store has failed this long",
        kinds.DURATION_S,
        name="give-up-seconds",
        default=60.0,
    )


@dataclass(frozen=True, kw_only=True)
class BrokersOptions:
    """Which of several brokers of a tier a command is for (``tiered.cli.fleet``)."""

    url: str = argument()
    brokers: tuple[str, ...] = several(
        "these brokers: BROKER or CLUSTER/BROKER; a row each",
        kinds.GLOBS,
        default_text="the only one",
        excludes="broker all-brokers",
    )
    all_brokers: bool = flag("every broker; a row each", excludes="broker")

    brokers_at_once: ClassVar[int] = 4  # so many run at the same time
    broker_columns: ClassVar[tuple[str, ...]] = ()
    """What a table says of each broker: fields of its document."""

    @property
    def names_several(self) -> bool:
        """It is not for one broker."""
        return bool(self.brokers) or self.all_brokers

    def of_one_broker(self) -> list[str]:
        """Options that are given and make sense for one broker only."""
        return []


@dataclass(frozen=True, kw_only=True)
class StoreFileOptions:
    """How large the files of a store that is made are."""

    log_file_size_bytes: int = option(
        "the broker's mappedFileSizeCommitLog",
        kinds.SIZE,
        default=1 << 30,
    )
    queue_items: int = option(
        "the broker's mappedFileSizeConsumeQueue / 20",
        kinds.COUNT,
        default=300_000,
    )


def settings_of(options: type, section: str) -> tuple[Setting, ...]:
    """The settings of a dataclass, as those of one command: its own first, then those that it has from others."""
    owners = [inspect.get_annotations(kind) for kind in options.__mro__]
    found = []
    for field in sorted(
        dataclasses.fields(options),
        key=lambda field: [field.name in owned for owned in owners].index(True),
    ):
        setting: Setting | None = field.metadata.get("setting")
        if setting is not None:
            name = setting.name or _name_of(field.name, setting.kind.metavar)
            found.append(dataclasses.replace(setting, section=section, field=field.name, name=name))
    return tuple(found)


def _name_of(field: str, metavar: str) -> str:
    units = [unit for unit in _UNITS.get(metavar, ()) if field.endswith(unit)]
    return field.removesuffix(units[0] if units else "_").replace("_", "-")


def arguments_of(options: type) -> list[click.Argument]:
    """The positional arguments of a dataclass."""
    return [
        _argument(field.name, *field.metadata["argument"])
        for field in dataclasses.fields(options)
        if "argument" in field.metadata
    ]


_TEXTS = {"url": "URL or folder of the tier", "topic": "name of the topic"}


def _argument(
    name: str, required: bool, text: str, kind: click.ParamType[Any] | None, metavar: str | None
) -> click.Argument:
    """What is neither a URL nor a topic is completed by its kind."""
    completes = {
        "url": lambda _context, _parameter, incomplete: _places(incomplete, "dir"),
        "topic": lambda context, _parameter, incomplete: _named(context, name, incomplete),
    }.get(name)
    made = click.Argument(
        [name], required=required, type=kind, metavar=metavar, shell_complete=completes
    )
    made.help = text or _TEXTS[name]  # of click 8.5; those before show no arguments
    return made


def _places(incomplete: str, kind: str) -> list[CompletionItem]:
    from click.shell_completion import CompletionItem

    return [CompletionItem(incomplete, type=kind)]


def _named(context: click.Context, field: str, incomplete: str) -> list[CompletionItem]:
    from click.shell_completion import CompletionItem

    return [CompletionItem(name) for name in names_for(context, field, incomplete)]


if TYPE_CHECKING:
    _ParamType = click.ParamType[object]
else:
    _ParamType = click.ParamType  # generic in newer releases only


_PLACES = frozenset({"DIR", "FILE"})
_NAMED = frozenset({"topic", "topics", "exclude", "broker", "brokers", "cluster"})
"""Fields whose values are names of a tier or a store."""


class _Kind(_ParamType):
    """Hands a text of the command line to a setting's own parser."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.name = setting.kind.metavar

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> object:
        if value == "" and self.setting.kind.metavar in _PLACES:
            # A script's variable that is not set: as no option it would be compared with nothing, or only planned.
            self.fail("an empty text names nothing; leave the option out", param, ctx)
        try:
            return self.setting.convert(value, "command line")
        except InvalidError as error:
            self.fail(error.what.removeprefix(f"{self.setting.key}: "), param, ctx)

    def shell_complete(
        self,
        ctx: click.Context,
        param: click.Parameter,  # noqa: ARG002 (click's signature)
        incomplete: str,
    ) -> list[CompletionItem]:
        from click.shell_completion import CompletionItem

        if self.setting.kind.metavar in _PLACES:
            return _places(incomplete, self.setting.kind.metavar.lower())
        if self.setting.field in _NAMED:
            return _named(ctx, self.setting.field, incomplete)
        fitting = [text for text in self.setting.kind.choices if text.startswith(incomplete)]
        return [CompletionItem(text) for text in fitting]


@dataclass(frozen=True, slots=True)
class SettingInForce:
    """A value and where it came from (``default``, ``file PATH``, ``environment NAME``, ``command line``)."""

    setting: Setting
    value: object
    source: str


def resolve(
    settings: Iterable[Setting],
    *,
    file: Mapping[str, object],
    file_name: str,
    environment: Mapping[str, str],
    given: Mapping[str, object],
) -> dict[str, SettingInForce]:
    """Which value rules for each setting, by key.

    Args:
        environment: Variables; an empty one is as good as none.
        given: By key, what the command line says, converted already.
    """
    chosen: dict[str, SettingInForce] = {}
    for setting in settings:
        value, source = setting.default, "default"
        if setting.key in file:
            source = f"file {file_name}"
            value = setting.convert(file[setting.key], source)
        if text := environment.get(setting.variable, ""):
            source = f"environment {setting.variable}"
            value = setting.convert(text, source)
        if setting.key in given:
            value, source = given[setting.key], "command line"
        chosen[setting.key] = SettingInForce(setting, value, source)
    return chosen


def build(
    options: type[T],
    settings: Iterable[Setting],
    chosen: Mapping[str, SettingInForce],
    path: str,
    arguments: Mapping[str, object],
) -> T:
    """A dataclass of what rules."""
    values = dict(arguments)
    for setting in settings:
        value = values[setting.field] = chosen[setting.key].value
        if value is None and setting.is_required:
            what = f"no --{setting.name} is given"
            raise InvalidError(what, where=path, do=f"see `{path} --help`")
        if value != setting.default:
            _require_together(setting, chosen, path)
    return options(**values)


def _require_together(setting: Setting, chosen: Mapping[str, SettingInForce], path: str) -> None:
    def is_set(name: str) -> bool:
        found = chosen.get(f"{setting.section}.{name}") or chosen[name]
        return found.value != found.setting.default

    needs = setting.needs.split()
    if needs and not any(map(is_set, needs)):
        others = " or ".join(f"--{name}" for name in needs)
        what = f"--{setting.name} goes with {others}"
        raise InvalidError(what, where=path, do=f"add --{needs[0]}")
    for name in filter(is_set, setting.excludes.split()):
        what = f"--{setting.name} and --{name} contradict each other"
        raise InvalidError(what, where=path, do="leave one of them out")


def taken(kind: type[T], options: object, **more: object) -> T:
    """A dataclass of the options that are called as its fields are, and of ``more``."""
    names = {field.name for field in dataclasses.fields(kind)} - more.keys()  # type: ignore[arg-type] # of dataclasses
    return kind(
        **{name: getattr(options, name) for name in names if hasattr(options, name)}, **more
    )


def read_file(path: str, settings: Sequence[Setting]) -> tuple[dict[str, object], object]:
    """The settings of a TOML file by key, not converted yet; and its table of rules for topics."""
    import tomllib

    from backends.local_files import read_regular

    try:
        document = tomllib.loads(read_regular(path).decode())
    except OSError as error:
        what = f"the configuration file cannot be read: {error.strerror or error}"
        raise InvalidError(what, where=path, do="name an existing TOML file") from error
    except ValueError as error:  # TOML and UTF-8 alike
        what = f"the configuration file is no TOML: {error}"
        raise InvalidError(
            what, where=path, do="fix it; docs/configuration.md has an example"
        ) from error
    known = {setting.key for setting in settings}
    sections = {setting.section for setting in settings}
    rules = document.pop("topics", {})
    found: dict[str, object] = {}
    _flatten("", document, sections, found)
    for key in found:
        if key not in known:
            close = nearest(key.replace("_", "-"), known)
            near = f"did you mean {close!r}? " if close else ""
            do = f"{near}`tiered config show` lists all keys"
            raise InvalidError(f"unknown key {key!r}", where=path, do=do)
    return found, rules


def _flatten(
    prefix: str, table: Mapping[str, object], sections: set[str], found: dict[str, object]
) -> None:
    for name, value in table.items():
        key = f"{prefix}{name}"
        is_section = any(key == section or section.startswith(f"{key}.") for section in sections)
        if is_section and isinstance(value, Mapping):
            _flatten(f"{key}.", value, sections, found)
        else:
            found[key] = value


def misspelled(environment: Mapping[str, str], settings: Iterable[Setting]) -> dict[str, str]:
    """What a variable should be called, for each that looks like one of a setting; others may be anybody's."""
    known = {setting.variable for setting in settings} | {"TIERED_CONFIG"}
    unknown = [name for name in environment if name.startswith(ENVIRONMENT_PREFIX)]
    found = {name: nearest(name, known, 0.8) for name in unknown if name not in known}
    return {name: near for name, near in found.items() if near}


def _yes_or_no(raw: object) -> bool:
    if isinstance(raw, bool):
        return raw
    text = str(raw).strip().lower()
    if text in _TRUE | _FALSE:
        return text in _TRUE
    raise ValueError(f"{raw!r} is neither true nor false")


def _items(raw: object) -> list[str]:
    if not isinstance(raw, list) or not all(isinstance(item, str) for item in raw):
        raise ValueError(f"{raw!r} is no list of texts")
    return raw


# --------------------------------------------------------------------------------------------------
# What a shell completes beside options: topics and brokers, of the tier or the store that the command line names so
# far.
#
# A shell waits for it, and shows nothing of what goes wrong: so it asks for a moment only, and what fails completes
# nothing.
# --------------------------------------------------------------------------------------------------


TOPICS: Final = frozenset({"topic", "topics", "exclude"})
BROKERS: Final = frozenset({"broker", "brokers", "cluster"})
GIVE_UP_S: Final = 3.0


def names_for(context: click.Context, field: str, incomplete: str) -> list[str]:
    """What may stand for a value of a field, or of a list of such; nothing when nobody knows."""
    before, comma, last = incomplete.rpartition(",")
    found: Iterable[str] = ()
    with contextlib.suppress(Exception):  # a shell has no use for an error
        found = _topics(context) if field in TOPICS else _brokers(context, field)
    return [before + comma + name for name in sorted(found) if name.startswith(last)]


def _given(context: click.Context, name: str) -> Any:  # noqa: ANN401 (of any kind)
    """A parameter of the command, or one that stands further left."""
    at: click.Context | None = context
    while at is not None:
        if at.params.get(name):
            return at.params[name]
        at = at.parent
    return None


def _objects(context: click.Context) -> ObjectStore | None:
    from backends.s3_settings import S3Options
    from tiered.api.stores import open_for_reading
    from tiered.clock import SystemClock

    url = _given(context, "url") or _given(context, "to")
    if not url:
        return None
    names = ("endpoint_url", "region", "profile", "path_style", "ca_bundle")
    options = S3Options(**{name: _given(context, name) for name in names}, timeout_s=GIVE_UP_S)
    store = open_for_reading(url, options, SystemClock(), give_up_s=GIVE_UP_S).store
    context.call_on_close(store.close)
    return store


def _topics(context: click.Context) -> set[str]:
    directory = None if _given(context, "url") else _given(context, "store")
    if directory:
        from tiered.local.layout import read_topics

        return set(read_topics(directory).names or ())
    from tiered.api.broker_place import choose_place
    from tiered.log.reader import TierReader

    store = _objects(context)
    if store is None:
        return set()
    place = choose_place(store, _given(context, "cluster"), _given(context, "broker"))
    reader = TierReader(store, place.prefix)
    reader.refresh()
    return {queue.topic for queue in reader.state.queues}


def _brokers(context: click.Context, field: str) -> set[str]:
    from tiered.api.broker_place import find_places

    store = _objects(context)
    places = find_places(store) if store is not None else []
    return {place.cluster if field == "cluster" else place.broker for place in places}


# --------------------------------------------------------------------------------------------------
# Rules for topics in the configuration file: one table for all commands, of which each uses what concerns it.
# docs/configuration.md has an example.
#
# Of the rules whose glob fits a topic, the first that says something rules. What the command line says of topics
# (``--topics``, ``--topic-ttl``) comes before.
# --------------------------------------------------------------------------------------------------


TABLE: Final = "topics"
_FLAG: Final = Shape.FLAG
RULES: Final[Mapping[str, Setting]] = {
    "include": Setting(help="`attach`: whether to tier it", shape=_FLAG, default=True),
    "pause": Setting(
        help="`attach`: stop tiering it for now, as `tiered pause` does",
        shape=_FLAG,
        default=False,
    ),
    "rate": Setting(
        help="`attach`: maximum bytes per second copied of each matching topic; 0: unlimited",
        kind=kinds.SIZE,
        default_text="no limit",
    ),
    "compress": Setting(
        help="`attach`: compression when merging",
        kind=kinds.Kind("zstd[:LEVEL]|none", kinds.compression),
        default_text="as `--compress` says",
    ),
    "compact": Setting(
        help="`attach --compact`, `compact`: keep only the newest message of each key",
        shape=_FLAG,
        default_text="as its cleanup.policy says",
    ),
    "ttl": Setting(
        help="`expire`: time to live", kind=kinds.DURATION_MS, default_text="as `--ttl` says"
    ),
    "archive": Setting(help="`archive`: whether to archive it", shape=_FLAG, default=True),
}


@dataclass(frozen=True, slots=True)
class TopicRules:
    """What the file says of topics."""

    rows: tuple[
        tuple[str, Mapping[str, Any]], ...
    ] = ()  # globs, and what is said of the topics that fit
    source: str = ""  # the file

    def get(self, topic: str, name: str, default: Any = None) -> Any:  # noqa: ANN401 (of any kind)
        """What the first rule says that fits, and says something of this name."""
        fitting = (
            said[name] for glob, said in self.rows if name in said and fnmatchcase(topic, glob)
        )
        return next(fitting, default)

    def shown(self) -> Iterator[tuple[str, object]]:
        """Key and value of each, as ``config show`` has them."""
        for glob, said in self.rows:
            for name, value in said.items():
                is_duration = RULES[name].kind is kinds.DURATION_MS
                text = format_duration(value) if is_duration else value
                yield f'{TABLE}."{glob}".{name}', text


def read_rules(table: object, path: str) -> TopicRules:
    """The rules that a file's table has.

    Raises:
        InvalidError: It has one that nobody knows, or a value that cannot be.
    """
    source, rows = f"file {path}", []
    if not isinstance(table, Mapping):
        raise InvalidError(f"{TABLE} is no table", where=source, do=f'write [{TABLE}."orders*"]')
    for glob, said in table.items():
        if not isinstance(said, Mapping):
            do = f'write [{TABLE}."{glob}"] and the rules below it'
            raise InvalidError(f"{TABLE}.{glob} is no table of rules", where=source, do=do)
        for name in said.keys() - RULES.keys():
            near = nearest(name, RULES)
            do = f"did you mean {near!r}?" if near else f"there are {', '.join(RULES)}"
            raise InvalidError(f"unknown key '{TABLE}.\"{glob}\".{name}'", where=path, do=do)
        rows.append(
            (glob, {name: _converted(glob, name, raw, source) for name, raw in said.items()})
        )
    return TopicRules(tuple(rows), source)


def _converted(glob: str, name: str, raw: object, source: str) -> object:
    from dataclasses import replace

    return replace(RULES[name], section=f'{TABLE}."{glob}"', name=name).convert(raw, source)
