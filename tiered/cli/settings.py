"""Every option of every command, as data: the command line, ``--config``, the environment and the docs are made of it."""

from __future__ import annotations

from functools import cache, partial

from tiered.cli.settings_archive import ARCHIVES
from tiered.cli.settings_bench import BENCH_DISPATCH, BENCH_READ, BENCH_STORE, DEMO, MAKE_STORE
from tiered.cli.settings_index import ATTACH_INDEX, QUERY, REBUILD_INDEX
from tiered.cli.settings_mend import MEND
from tiered.cli.settings_mount import MOUNT
from tiered.cli.settings_reclaim import RECLAIM
from tiered.cli.settings_store import STORE
from tiered.cli.settings_timer import TIMER
from tiered.cli.values import (
    above_zero,
    address,
    check_time,
    compression,
    incarnation,
    not_below_zero,
    pair,
    parse_size,
    start,
    whole,
)
from tiered.config import Setting, Shape

OUTPUTS = ("table", "wide", "json", "jsonl", "csv")
CAT_FORMATS = ("json", "raw", "body", "text")
_MIB = 1024 * 1024


_flag = partial(Setting, shape=Shape.FLAG, default=False, metavar="")
_count = partial(Setting, metavar="N", parse=partial(whole, low=0))
_positive = partial(Setting, metavar="N", parse=partial(whole, low=1))
_seconds = partial(Setting, metavar="SECONDS", parse=above_zero)
_size = partial(Setting, metavar="SIZE", parse=parse_size)
_time = partial(Setting, metavar="TIME", parse=check_time)

COMMON: tuple[Setting, ...] = (
    Setting(
        section="",
        name="cluster",
        help="cluster whose broker is meant",
        default_text="the only one there; for attach, as the store says, else DefaultCluster",
        metavar="NAME",
    ),
    Setting(
        section="",
        name="broker",
        help="broker that is meant",
        default_text="the only one there; for attach, as the store says, else broker",
        metavar="NAME",
    ),
    Setting(
        section="",
        name="endpoint-url",
        help="S3 endpoint",
        default_text="AWS_ENDPOINT_URL_S3, AWS_ENDPOINT_URL, the AWS profile, else AWS",
        metavar="URL",
    ),
    Setting(
        section="",
        name="region",
        help="S3 region",
        default_text="from AWS settings",
        metavar="NAME",
    ),
    Setting(
        section="",
        name="profile",
        help="AWS profile to take credentials and settings from",
        default_text="AWS_PROFILE",
        metavar="NAME",
    ),
    Setting(
        section="",
        name="path-style",
        help="put the bucket into the path, or into the host name",
        default_text="path with an endpoint of one's own",
        shape=Shape.FLAG,
        metavar="",
        spellings=("--path-style/--virtual-host",),
    ),
    Setting(
        section="",
        name="s3-header",
        help="header added to each S3 request; may be repeated (in a variable: one a line)",
        metavar="NAME=VALUE",
        shape=Shape.LIST,
        default=(),
        parse=pair,
        separator="\n",
        is_masked=True,
    ),
    Setting(
        section="",
        name="sse-kms-key-id",
        help="key with which the S3 server encrypts each object",
        default_text="the bucket's own rule",
        metavar="ID",
    ),
    Setting(
        section="",
        name="ca-bundle",
        help="PEM file of authorities to trust beside the system's, for an https endpoint",
        default_text="AWS_CA_BUNDLE, else that of the AWS profile",
        metavar="FILE",
    ),
    _seconds(
        section="", name="request-timeout", help="deadline of each request, seconds", default=30.0
    ),
    Setting(
        section="",
        name="output",
        help="form of the result; a table fits the terminal, and wide is one of which nothing is cut",
        default="table",
        metavar="FORM",
        choices=OUTPUTS,
        spellings=("--output", "-o"),
    ),
    _flag(section="", name="json", help="the result as exactly one JSON document, as -o json"),
    _flag(section="", name="quiet", help="no progress and no summary on stderr"),
    Setting(
        section="",
        name="log-format",
        help="form of every line on stderr",
        default="text",
        metavar="FORM",
        choices=("text", "json"),
    ),
    _flag(section="", name="debug", help="log everything, and show tracebacks"),
)

_TOPICS = Setting(
    section="attach",
    name="topics",
    help="topics to tier, as globs",
    default_text="all",
    default=(),
    metavar="GLOB,...",
    shape=Shape.LIST,
)

ATTACH: tuple[Setting, ...] = (
    Setting(section="attach", name="to", help="URL of the tier", metavar="URL", is_required=True),
    _flag(section="attach", name="once", help="end when the present end is durable"),
    _flag(section="attach", name="seal", help="with --once: then seal every open segment"),
    _flag(
        section="attach",
        name="decommission",
        help=(
            "tier all that a stopped broker left, as --once --seal, keep its tables of topics, groups and"
            " offsets in the tier, and mark it as decommissioned, for `tiered mount`; does not when"
            " something is not done yet, and says what"
        ),
    ),
    _flag(
        section="attach",
        name="accept-pending",
        help="with --decommission: give up what only the broker would have done, such as delayed messages that are not due",
    ),
    _flag(
        section="attach",
        name="recommission",
        help="go on with a tier whose broker was decommissioned, and is back",
    ),
    _TOPICS,
    Setting(
        section="attach",
        name="exclude",
        help="topics not to tier, as globs",
        default_text="none",
        default=(),
        metavar="GLOB,...",
        shape=Shape.LIST,
    ),
    Setting(
        section="attach",
        name="start",
        help="where a queue begins that is not in the tier yet: earliest, latest, or a time",
        default="earliest",
        metavar="WHERE",
        parse=start,
    ),
    _seconds(
        section="attach",
        name="freshness",
        help="a message is durable at most so many seconds after it is seen",
        default=2.0,
    ),
    _seconds(
        section="attach",
        name="lease-seconds",
        help="how long the lease lasts, seconds",
        default=10.0,
    ),
    _flag(
        section="attach",
        name="no-wait",
        help="end with code 4 when another writer holds the lease, instead of waiting",
    ),
    Setting(
        section="attach",
        name="drain-seconds",
        help="when told to stop: how long to upload what is in hand, seconds",
        default=10.0,
        metavar="SECONDS",
        parse=not_below_zero,
    ),
    _count(
        section="attach",
        name="nice",
        help="how far to step back behind the broker when the processors are busy: niceness, 0 to 19",
        default=10,
    ),
    _seconds(
        section="attach",
        name="give-up-seconds",
        help="with --once: end with code 3 when nothing could be uploaded for so long, seconds",
        default=60.0,
    ),
    Setting(
        section="attach",
        name="broker-addr",
        help="the running broker, asked for the end of its log where replicas may truncate it",
        default_text="not asked",
        metavar="HOST:PORT",
        parse=address,
    ),
    _size(
        section="attach",
        name="max-upload-rate",
        help="bytes uploaded in a second, at most; 0: no limit",
        default=0,
    ),
    _size(
        section="attach",
        name="max-read-rate",
        help="bytes of the local store read in a second, at most; 0: no limit",
        default=0,
    ),
    Setting(
        section="attach",
        name="metrics-listen",
        help="serve Prometheus metrics (/metrics) and /healthz at this address",
        default_text="not served",
        metavar="HOST:PORT",
        parse=address,
    ),
    _size(
        section="attach",
        name="bundle-size",
        help="bytes at which a round of uploads is due, and of which each of its objects has about so many",
        default=16 * _MIB,
    ),
    _size(
        section="attach",
        name="segment-size",
        help="bytes at which a segment is rolled",
        default=1024 * _MIB,
    ),
    _size(
        section="attach",
        name="buffer-size",
        help="bytes of records held in memory, at most",
        default=128 * _MIB,
    ),
    _positive(section="attach", name="uploads", help="uploads at once", default=8),
    Setting(
        section="attach",
        name="compress",
        help="compress what merging is done with: zstd, zstd:LEVEL with a level from 1 to 19, or none",
        default="zstd",
        default_text="zstd, which is level 3",
        metavar="zstd[:LEVEL]|none",
        parse=compression,
    ),
    _flag(
        section="attach",
        name="strict",
        help="end with code 1 also for what is explained and recorded (gaps, torn tails, left-out queues)",
    ),
)

STATUS: tuple[Setting, ...] = (
    Setting(
        section="status",
        name="store",
        help="local store directory to compare with",
        default_text="none: no lag",
        metavar="DIR",
    ),
)

LS: tuple[Setting, ...] = (
    _flag(section="ls", name="objects", help="list the objects (bundles) and what lies in them"),
    _flag(
        section="ls",
        name="lives",
        help="list each life of a queue: incarnations that are over, ends that the broker took back, the present one",
    ),
)

CAT: tuple[Setting, ...] = (
    _count(
        section="cat", name="queue", help="only this queue", default_text="all, one after another"
    ),
    _count(
        section="cat",
        name="offset",
        help="first queue offset in each queue",
        default_text="the first there is",
    ),
    _time(
        section="cat",
        name="from",
        help="begin with the first message stored at or after this time",
        default_text="the first there is",
    ),
    _time(
        section="cat",
        name="until",
        help="end before the first message stored at or after this time",
        default_text="the last there is",
    ),
    Setting(
        section="cat",
        name="incarnation",
        help=(
            "print this incarnation of each queue, or all, oldest first, with what the broker took back;"
            " messages then say which they are of"
        ),
        default_text="the present one",
        metavar="N|all",
        parse=incarnation,
    ),
    _count(section="cat", name="count", help="messages in all, at most", default_text="no limit"),
    Setting(
        section="cat",
        name="tag",
        help="only messages with one of these tags: A||B, or * for all",
        default_text="*",
        metavar="EXPR",
    ),
    Setting(
        section="cat",
        name="sql",
        help="only messages whose properties meet this SQL92 expression (docs/filters.md)",
        default_text="all messages",
        metavar="EXPR",
    ),
    _flag(section="cat", name="follow", help="go on with messages as they are tiered"),
    Setting(
        section="cat",
        name="format",
        help="json: a line each; raw: the records; body: the bodies, nothing between; text: for eyes",
        default="json",
        metavar="FORMAT",
        choices=CAT_FORMATS,
    ),
    _flag(section="cat", name="raw-body", help="bodies as stored, perhaps compressed"),
)

VERIFY: tuple[Setting, ...] = (
    _flag(section="verify", name="deep", help="read and check every byte of every object"),
    Setting(
        section="verify",
        name="store",
        help="local store directory to compare with, message by message",
        default_text="none",
        metavar="DIR",
    ),
    _flag(
        section="verify",
        name="repair",
        help="upload again what is damaged and the local store (or another object) still has, and check again",
    ),
    _flag(section="verify", name="strict", help="end with code 1 also for what is recorded"),
)


@cache
def all_settings() -> tuple[Setting, ...]:
    """Every setting there is."""
    return (
        *COMMON,
        *ATTACH,
        *ATTACH_INDEX,
        *STATUS,
        *LS,
        *CAT,
        *VERIFY,
        *QUERY,
        *REBUILD_INDEX,
        *ARCHIVES,
        *MEND,
        *MOUNT,
        *RECLAIM,
        *STORE,
        *TIMER,
        *DEMO,
        *MAKE_STORE,
        *BENCH_STORE,
        *BENCH_DISPATCH,
        *BENCH_READ,
    )


@cache
def settings_of(section: str) -> tuple[Setting, ...]:
    """The settings of one command."""
    return tuple(setting for setting in all_settings() if setting.section == section)
