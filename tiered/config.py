"""Settings: where a value comes from, and which one rules.

Order, the later one rules: default, ``--config`` file (TOML), environment (``TIERED_...``), command line. A file has its
common settings at the top and those of a command in a table of its name, as in::

    endpoint-url = "http://127.0.0.1:9000"
    [attach]
    freshness = 5
    topics = ["orders", "events*"]

Keys are the long options without the dashes. A key that no setting has is an error that names it, as is a value that the
setting cannot take. Which settings there are is the caller's table (``tiered.cli.settings``).
"""

from __future__ import annotations

import enum
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from backends.local_files import read_regular
from tiered.errors import InvalidError

ENVIRONMENT_PREFIX = "TIERED_"
_USER = re.compile(r"//[^/@]*@")
"""User and password in a URL: never shown, although no URL of ours takes them."""
_TRUE = frozenset({"1", "true", "yes", "on"})
_FALSE = frozenset({"0", "false", "no", "off"})


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
    """One thing that can be set.

    Attributes:
        section: The command it belongs to (``bench.read`` for a command of a command); "" for all commands.
        name: Its long option without the dashes, and its key in a file.
        help: What it does, as a clause with its unit.
        default: Value when nobody says anything.
        default_text: How help puts the default when the value alone would not tell; "" when there is nothing to say.
        metavar: What stands for the value in help, with its unit.
        shape: How it is written.
        parse: Makes the value out of its text; raises ``InvalidError`` or ``ValueError``.
        choices: The only texts allowed, when there are any.
        separator: Divides the values of a list that is written as one text.
        spellings: Options on the command line, when they are not just ``--name``.
        is_required: There must be a value.
        is_masked: Values are not shown, only the part before ``=``.
    """

    section: str
    name: str
    help: str
    default: object = None
    default_text: str = ""
    metavar: str = "TEXT"
    shape: Shape = Shape.ONE
    parse: Callable[[str], object] = str
    choices: tuple[str, ...] = ()
    separator: str = ","
    spellings: tuple[str, ...] = ()
    is_required: bool = False
    is_masked: bool = False

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
            return _flag(raw)
        if self.shape is Shape.LIST:
            texts = raw.split(self.separator) if isinstance(raw, str) else _items(raw)
            return tuple(self._one(text.strip()) for text in texts if text.strip())
        if isinstance(raw, bool) or not isinstance(raw, str | int | float):
            raise InvalidError(f"{raw!r} is no single value")
        return self._one(str(raw))

    def _one(self, text: str) -> object:
        if self.choices and text not in self.choices:
            raise ValueError(f"{text!r} is none of {', '.join(self.choices)}")
        return self.parse(text)

    def shown(self, value: object) -> object:
        """The value as people and JSON may see it."""
        if isinstance(value, tuple):
            return [self.shown(item) for item in value]
        if self.is_masked and isinstance(value, str):
            return value.partition("=")[0] + "=***"
        return _USER.sub("//***@", value) if isinstance(value, str) else value


@dataclass(frozen=True, slots=True)
class Chosen:
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
) -> dict[str, Chosen]:
    """Which value rules for each setting.

    Args:
        settings: All that may be asked for.
        file: By key, as ``read_file`` gives it.
        file_name: Of that file.
        environment: Variables; an empty one is as good as none.
        given: By key, what the command line says, converted already.

    Raises:
        InvalidError: A value that its setting cannot take.
    """
    chosen: dict[str, Chosen] = {}
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
        chosen[setting.key] = Chosen(setting, value, source)
    return chosen


def read_file(path: str, settings: Sequence[Setting]) -> dict[str, object]:
    """The settings of a TOML file by key, not converted yet.

    Raises:
        InvalidError: It cannot be read, is no TOML, or has a key that no setting has.
    """
    import tomllib  # noqa: PLC0415 (start-up loads only what is needed)

    try:
        text = read_regular(path).decode()
        document = tomllib.loads(text)
    except OSError as error:
        what = f"the configuration file cannot be read: {error.strerror or error}"
        raise InvalidError(what, where=path, do="name an existing TOML file") from error
    except ValueError as error:  # TOML and UTF-8 alike
        what = f"the configuration file is no TOML: {error}"
        raise InvalidError(what, where=path) from error
    known = {setting.key for setting in settings}
    sections = {setting.section for setting in settings}
    found: dict[str, object] = {}
    _flatten("", document, sections, found)
    for key in found:
        if key not in known:
            raise InvalidError(f"unknown key {key!r}", where=path, do=_advice(key, known))
    return found


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


def nearest(word: str, known: Iterable[str], likeness: float = 0.6) -> str:
    """The known word that was most likely meant; "" when none is as like as that (1: the same)."""
    import difflib  # noqa: PLC0415 (start-up loads only what is needed)

    return next(iter(difflib.get_close_matches(word, sorted(known), 1, likeness)), "")


def _advice(key: str, known: set[str]) -> str:
    close = nearest(key.replace("_", "-"), known)
    near = f"did you mean {close!r}? " if close else ""
    return f"{near}`tiered config show` lists all keys".strip()


def _flag(raw: object) -> bool:
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
