"""One call of a command: its arguments, its settings with their origin, and what it writes to."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

from tiered.cli.signals import Watch
from tiered.clock import Clock, SystemClock
from tiered.errors import InvalidError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import BinaryIO

    from backends.s3_settings import S3Options
    from tiered.cli.stderr import Progress, Progressed
    from tiered.config import Chosen


@dataclass(slots=True)
class Surroundings:
    """What a program meets when it is started; tests bring their own.

    Attributes:
        environment: Variables.
        clock: Time.
        watch: Takes signals over.
        debug: Whether a defect shows its traceback; set once the settings are known.
        log_format: Of what goes to stderr; "" until the settings are known.
    """

    environment: Mapping[str, str]
    clock: Clock = field(default_factory=SystemClock)
    watch: Watch = field(default_factory=Watch)
    debug: bool = False
    log_format: str = ""


@dataclass(frozen=True, slots=True)
class Call:
    """What a command is given.

    Attributes:
        path: The command as typed, as ``tiered bench read``.
        section: Section of its settings.
        arguments: Positional arguments.
        chosen: Every setting's value, by key.
        clock: Time.
        watch: Takes signals over.
    """

    path: str
    section: str
    arguments: Mapping[str, str | None]
    chosen: Mapping[str, Chosen]
    clock: Clock
    watch: Watch = field(default_factory=Watch)

    def argument(self, name: str) -> str:
        """A positional argument that must be there."""
        value = self.arguments[name]
        assert value is not None
        return value

    def find(self, name: str) -> Chosen:
        """A setting of this command, else a common one."""
        found = self.chosen.get(f"{self.section}.{name}")
        return self.chosen[name] if found is None else found

    def get(self, name: str) -> object:
        """A setting's value.

        Raises:
            InvalidError: There is none, and there must be one.
        """
        found = self.find(name)
        if found.value is None and found.setting.is_required:
            raise InvalidError(
                f"no --{name} is given", where=self.path, do=f"see `{self.path} --help`"
            )
        return found.value

    def text(self, name: str) -> str | None:
        """A text, or None."""
        return cast("str | None", self.get(name))

    def words(self, name: str) -> str:
        """A text that is always there."""
        return cast("str", self.get(name))

    def flag(self, name: str) -> bool:
        """Yes or no."""
        return bool(self.get(name))

    def number(self, name: str) -> float:
        """A number that is always there."""
        return cast("float", self.get(name))

    def whole(self, name: str) -> int:
        """A whole number or a size in bytes that is always there."""
        return cast("int", self.get(name))

    def whole_or_none(self, name: str) -> int | None:
        """A whole number, or None."""
        return cast("int | None", self.get(name))

    def texts(self, name: str) -> tuple[str, ...]:
        """The values of a list."""
        return cast("tuple[str, ...]", self.get(name))

    def time_ms(self, name: str) -> int | None:
        """A time in UTC milliseconds, or None; ``now`` is now."""
        from tiered.cli.values import parse_time

        text = self.text(name)
        return None if text is None else parse_time(text, self.clock.now_ms())

    @property
    def form(self) -> str:
        """The form of the result; ``--json`` is short for ``-o json``.

        Raises:
            InvalidError: Both are given and contradict each other.
        """
        output = self.find("output")
        if not self.flag("json"):
            return cast("str", output.value)
        if output.source == "command line" and output.value != "json":
            raise InvalidError(
                f"--json and -o {output.value} contradict each other", do="give one of them"
            )
        return "json"

    @property
    def stdout(self) -> BinaryIO:
        """Where results go."""
        return sys.stdout.buffer

    @property
    def is_quiet(self) -> bool:
        """No progress and no summary."""
        return self.flag("quiet")

    def say(self, text: str, *, level: str = "info") -> None:
        """A line for people on stderr, unless ``--quiet``."""
        from tiered.cli.stderr import write_line

        if not self.is_quiet:
            write_line(self.words("log-format"), self.clock.now_ms(), level, text)

    def progress(self, what: str, ask: Callable[[], Progressed]) -> Progress:
        """Shows how far ``what`` is while a ``with`` block runs, unless ``--quiet``; ``ask`` comes from another thread."""
        from tiered.cli.stderr import Progress

        form = self.words("log-format")
        return Progress(what, ask, clock=self.clock, is_quiet=self.is_quiet, form=form)

    def s3_options(self) -> S3Options:
        """How to reach S3."""
        from backends.s3_settings import S3Options

        pairs = (text.partition("=") for text in self.texts("s3-header"))
        return S3Options(
            endpoint_url=self.text("endpoint-url"),
            region=self.text("region"),
            profile=self.text("profile"),
            path_style=cast("bool | None", self.get("path-style")),
            headers={name.strip(): value for name, _, value in pairs},
            sse_kms_key_id=self.text("sse-kms-key-id"),
            ca_bundle=self.text("ca-bundle"),
            timeout_s=self.number("request-timeout"),
        )
