"""One call of a command: what it was told, where it writes, the time it has, and the stores that it opens."""

from __future__ import annotations

import contextlib
import sys
from dataclasses import field
from typing import TYPE_CHECKING

from backends.lazy_dataclass import dataclass
from tiered.cli import kinds
from tiered.cli.options import Setting, Shape, TopicRules, custom, flag, option, several
from tiered.cli.signals import SignalWatch
from tiered.cli.values import Moment, is_glob, unmatched
from tiered.clock import Clock, SystemClock
from tiered.errors import InvalidError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping

    from typing_extensions import Buffer

    from backends.base import ObjectStore
    from backends.s3_settings import S3Options
    from tiered.api.open_tier import OpenTier
    from tiered.cli.options import SettingInForce
    from tiered.cli.stderr import Progress, Progressed
    from tiered.local.interface import LocalStore

OUTPUTS = kinds.one_of("FORM", "table", "wide", "json", "jsonl", "csv")


@dataclass(frozen=True, kw_only=True)
class CommonOptions:
    """What every command can be told, before its name or behind it."""

    cluster: str | None = option(
        "the broker's cluster",
        kinds.NAME,
        default_text="the only one; for attach the store's, else DefaultCluster",
    )
    broker: str | None = option(
        "the broker",
        kinds.NAME,
        default_text="the only one; for attach the store's, else broker",
    )
    endpoint_url: str | None = option(
        "S3 endpoint",
        kinds.URL,
        default_text="from AWS settings, else AWS",
    )
    region: str | None = option("S3 region", kinds.NAME, default_text="from AWS settings")
    profile: str | None = option("AWS profile", kinds.NAME, default_text="AWS_PROFILE")
    path_style: bool | None = custom(
        Setting(
            help="bucket in the path, or in the host name",
            shape=Shape.FLAG,
            default_text="path with a custom endpoint",
            spellings=("--path-style/--virtual-host",),
        )
    )
    s3_header: tuple[str, ...] = several(
        "header of each S3 request; repeatable (in a variable: one a line)",
        kinds.PAIR,
        separator="\n",
        is_masked=True,
    )
    sse_kms_key_id: str | None = option(
        "key for S3's server-side encryption",
        kinds.Kind("ID", str),
        default_text="the bucket's own rule",
    )
    ca_bundle: str | None = option(
        "PEM file of further trusted authorities",
        kinds.FILE,
        default_text="AWS_CA_BUNDLE, else the AWS profile's",
    )
    request_timeout_s: float = option(
        "deadline of each request, plus at least a second for each 512 KiB",
        kinds.DURATION_S,
        default=30.0,
    )
    output: str = custom(
        Setting(
            help="output format; wide is never truncated",
            kind=OUTPUTS,
            default="table",
            spellings=("--output", "-o"),
        )
    )
    json: bool = flag("as -o json: one document")
    quiet: bool = flag("no progress or summary on stderr")
    log_format: str = option(
        "format of lines on stderr", kinds.one_of("FORM", "text", "json"), default="text"
    )
    debug: bool = flag("log everything, with tracebacks")


class Results:
    """Where results go: this process's stdout. Knows whether any did."""

    def __init__(self) -> None:
        self.has_any = False

    def write(self, data: bytes) -> int:
        """Write some."""
        self.has_any = True
        return sys.stdout.buffer.write(data)

    def writelines(self, some: Iterable[Buffer]) -> None:
        """Write many."""
        self.has_any = True
        sys.stdout.buffer.writelines(some)

    def flush(self) -> None:
        """Write what waits."""
        sys.stdout.buffer.flush()

    def isatty(self) -> bool:
        """Whether people look at it."""
        return sys.stdout.isatty()


@dataclass(slots=True)
class Surroundings:
    """What a program meets when it is started; tests bring their own."""

    environment: Mapping[str, str]  # variables
    clock: Clock = field(default_factory=SystemClock)  # time
    watch: SignalWatch = field(default_factory=SignalWatch)  # takes signals over
    debug: bool = False  # whether a defect shows its traceback; set once the settings are known
    log_format: str = ""  # of what goes to stderr; "" until the settings are known
    form: str = ""  # of results; likewise
    stdout: Results = field(default_factory=Results)  # where results go


@dataclass(frozen=True, slots=True)
class Call:
    """What a command is given beside its own options."""

    path: str  # the command as typed, as ``tiered bench read``
    section: str  # of its settings, as ``bench.read``
    common: CommonOptions  # what every command can be told
    chosen: Mapping[str, SettingInForce]
    """The value of each setting that was looked at and where it came from, by key."""
    clock: Clock  # time
    watch: SignalWatch = field(default_factory=SignalWatch)  # takes signals over
    stdout: Results = field(default_factory=Results)  # where results go
    rules: TopicRules = field(
        default_factory=TopicRules
    )  # what the configuration file says of topics
    reread: Callable[[], tuple[Mapping[str, SettingInForce], TopicRules]] | None = None
    """Reads that file again, and says what rules then; None: the command was started without one."""
    speaks_for: str = ""
    """One of several brokers that the command is called for: what it says begins with the name, and it shows no progress."""
    opened: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    """Closes what the command has opened, when it ends."""

    def is_given(self, key: str) -> bool:
        """Whether the command line itself says it, by the key of the setting."""
        return self.chosen[key].source == "command line"

    def require_topics(
        self, name: str, globs: Iterable[str], topics: Collection[str], where: str
    ) -> None:
        """Say which globs of topics no topic fits, so that what is misspelled does not do nothing without a word.

        Raises:
            InvalidError: The command line names a topic, without a wildcard, that is not there. A file that is written once
                for many runs may.
        """
        for glob in unmatched(globs, topics):
            if self.is_given(f"{self.section}.{name}") and not is_glob(glob):
                do = f"check --{name}; `tiered ls URL` lists the topics"
                raise InvalidError(f"there is no topic {glob}", where=where, do=do)
            self.say(f"tiered: no topic matches --{name} {glob}")

    def ms(self, moment: Moment | None) -> int | None:
        """A time in UTC milliseconds, or None; ``now`` is now."""
        return None if moment is None else moment.ms(self.clock.now_ms())

    @property
    def form(self) -> str:
        """The form of the result; ``--json`` is short for ``-o json``."""
        output = self.common.output
        if not self.common.json:
            return output
        if self.is_given("output") and output != "json":
            raise InvalidError(
                f"--json and -o {output} contradict each other", do="give one of them"
            )
        return "json"

    def say(self, text: str, *, level: str = "info") -> None:
        """A line for people on stderr, unless ``--quiet``."""
        from tiered.cli.stderr import write_line

        if self.speaks_for:
            text = f"tiered: {self.speaks_for}: {text.removeprefix('tiered: ')}"
        if not self.common.quiet:
            write_line(self.common.log_format, self.clock.now_ms(), level, text)

    def progress(self, what: str, ask: Callable[[], Progressed] | str) -> Progress:
        """Shows how far ``what`` is while a ``with`` block runs, unless ``--quiet``; see ``Progress``."""
        from tiered.cli.stderr import Progress

        is_quiet = self.common.quiet or bool(self.speaks_for)
        form = self.common.log_format
        return Progress(what, ask, clock=self.clock, is_quiet=is_quiet, form=form)

    def s3_options(self) -> S3Options:
        """How to reach S3."""
        from backends.s3_settings import S3Options

        common = self.common
        pairs = (text.partition("=") for text in common.s3_header)
        return S3Options(
            endpoint_url=common.endpoint_url,
            region=common.region,
            profile=common.profile,
            path_style=common.path_style,
            headers={name.strip(): value for name, _, value in pairs},
            sse_kms_key_id=common.sse_kms_key_id,
            ca_bundle=common.ca_bundle,
            timeout_s=common.request_timeout_s,
        )

    # What a command reads: opened by what the call says, closed when the command ends.

    def objects(self, url: str, *, give_up_s: float | None = None) -> ObjectStore:
        """The object store that a URL names, with retries; ``give_up_s`` shortens how long one request is tried."""
        return self.both(url, give_up_s=give_up_s)[1]

    def both(self, url: str, *, give_up_s: float | None = None) -> tuple[ObjectStore, ObjectStore]:
        """The object store that a URL names, without retries (for a journal's writer) and with; see ``objects``."""
        from tiered.api.stores import open_for_reading

        found = open_for_reading(url, self.s3_options(), self.clock, give_up_s=give_up_s)
        self.opened.callback(found.close)
        return found.meter, found.store

    def tier(
        self,
        url: str,
        *,
        memory_bytes: int | None = None,
        is_sequential: bool = False,
        isolation: str = "read_committed",
    ) -> OpenTier:
        """The one broker's tier that is meant.

        Args:
            memory_bytes: What it caches and reads ahead at most; default: that of the API.
        """
        from tiered.api import tier as api

        found = api.open_tier(
            url,
            cluster=self.common.cluster,
            broker=self.common.broker,
            options=self.s3_options(),
            memory_bytes=memory_bytes or api.MEMORY_BYTES,
            clock=self.clock,
            is_sequential=is_sequential,
            isolation=isolation,
        )
        self.opened.callback(found.close)
        return found

    def local(self, directory: str) -> LocalStore:
        """A local store directory, read-only."""
        from tiered.local.sources import open_store

        found = open_store(directory, clock=self.clock)
        self.opened.callback(found.close)
        return found
