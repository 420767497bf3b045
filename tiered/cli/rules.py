"""Rules for topics in the configuration file: one table for all commands, of which each uses what concerns it.

    [topics."orders*"]
    ttl = "365d"
    compress = "zstd:9"
    [topics."audit*"]
    rate = "5MiB"
    [topics."debug*"]
    include = false

Of the rules whose glob fits a topic, the first that says something rules. What the command line says of topics
(``--topics``, ``--topic-ttl``) comes before.
"""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, Final

from backends.lazy_dataclass import dataclass
from tiered.cli import kinds
from tiered.cli.options import Setting, Shape
from tiered.cli.values import format_duration
from tiered.errors import InvalidError, nearest

if TYPE_CHECKING:
    from collections.abc import Iterator

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
