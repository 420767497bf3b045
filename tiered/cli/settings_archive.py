"""Options of the commands that make and read an archive."""

from __future__ import annotations

from functools import partial

from tiered.cli.settings_bodies import BODIES
from tiered.cli.settings_planned import planned
from tiered.cli.values import check_time, destination, pair, parse_duration, parse_size, whole
from tiered.config import Setting, Shape

_flag = partial(Setting, shape=Shape.FLAG, default=False, metavar="")


def _spark(section: str) -> tuple[Setting, ...]:
    """Where and how Spark runs."""
    return (
        Setting(
            section=section,
            name="master",
            help="where Spark runs, as local[2] or spark://host:7077",
            default_text="as spark-submit says, else this machine's processors",
            metavar="MASTER",
        ),
        Setting(
            section=section,
            name="spark-conf",
            help="a setting of Spark; may be repeated (in a variable: one a line)",
            metavar="NAME=VALUE",
            shape=Shape.LIST,
            default=(),
            parse=pair,
            separator="\n",
        ),
    )


ARCHIVE: tuple[Setting, ...] = (
    Setting(
        section="archive", name="to", help="URL of the archive", metavar="URL", is_required=True
    ),
    Setting(
        section="archive",
        name="engine",
        help="what does the work: this process, or Spark",
        default="local",
        metavar="ENGINE",
        choices=("local", "spark"),
    ),
    *_spark("archive"),
    Setting(
        section="archive",
        name="jobs",
        help="with the local engine: segments at once",
        default_text="one for each processor",
        metavar="N",
        parse=partial(whole, low=1),
    ),
    Setting(
        section="archive",
        name="topics",
        help="topics to archive, as globs",
        default_text="all",
        default=(),
        metavar="GLOB,...",
        shape=Shape.LIST,
    ),
    Setting(
        section="archive",
        name="exclude",
        help="topics to leave out, as globs",
        default_text="none",
        default=(),
        metavar="GLOB,...",
        shape=Shape.LIST,
    ),
    Setting(
        section="archive",
        name="from",
        help="leave out segments whose messages were all stored before this time",
        default_text="none",
        metavar="TIME",
        parse=check_time,
    ),
    Setting(
        section="archive",
        name="until",
        help="leave out segments whose messages were all stored at this time or later",
        default_text="none",
        metavar="TIME",
        parse=check_time,
    ),
    Setting(
        section="archive",
        name="max-bytes",
        help="commit log to archive in one run, at most, but one segment at least; the oldest first",
        default_text="all",
        metavar="SIZE",
        parse=parse_size,
    ),
    Setting(
        section="archive",
        name="max-runtime",
        help="begin no segment after so long, as 50m; what is under way is finished. With Spark: two tasks a core",
        default_text="none",
        metavar="DURATION",
        parse=parse_duration,
    ),
    Setting(
        section="archive",
        name="pack-below",
        help="segments of less commit log than this share files, one for each topic and day; 0: none does",
        default=4 << 20,
        default_text="4MiB",
        metavar="SIZE",
        parse=parse_size,
    ),
    _flag(
        section="archive",
        name="seal",
        help="first seal the open segments; while a writer is attached it says so and seals none",
    ),
    _flag(section="archive", name="dry-run", help="say what would be archived, and do nothing"),
    Setting(
        section="archive",
        name="publish",
        help="then bring a table for each topic up to date, in an Iceberg catalog by URI or by its name in .pyiceberg.yaml",
        default_text="none",
        metavar="iceberg:CATALOG#NAMESPACE",
        parse=destination,
    ),
    _flag(
        section="archive",
        name="merge",
        help="archive nothing: make large files of small ones, of each topic and day",
    ),
    Setting(
        section="archive",
        name="merge-below",
        help="with --merge: files of less are merged",
        default=32 << 20,
        default_text="32MiB",
        metavar="SIZE",
        parse=parse_size,
    ),
    _flag(
        section="archive",
        name="clean",
        help="archive nothing: delete files that others have replaced; plan, then apply",
    ),
    Setting(
        section="archive",
        name="grace",
        help="with --clean: leave what was replaced within it; longer than the longest read",
        default=24 * 3_600_000,
        default_text="24h",
        metavar="DURATION",
        parse=parse_duration,
    ),
    Setting(
        section="archive",
        name="max-deletions",
        help="with --clean: files deleted in one run, at most",
        default=10_000,
        metavar="N",
        parse=partial(whole, low=1),
    ),
    *planned("archive"),
    Setting(
        section="archive",
        name="metrics-file",
        help="write the run's figures to this file after each entry of the log, for Prometheus",
        default_text="none",
        metavar="FILE",
    ),
    *BODIES,
    _flag(
        section="archive",
        name="key-index",
        help="archive nothing: make an index of the keys, so that `tiered query` of the archive reads less",
    ),
    _flag(
        section="archive",
        name="verify",
        help="archive nothing: read every file of the archive and hold it against its log and the tier",
    ),
)

SQL: tuple[Setting, ...] = (
    Setting(
        section="sql",
        name="engine",
        help="what answers: DuckDB in this process, or Spark",
        default="duckdb",
        metavar="ENGINE",
        choices=("duckdb", "spark"),
    ),
    *_spark("sql"),
    Setting(
        section="sql",
        name="to",
        help="write the result to this file, as Parquet",
        default_text="print it",
        metavar="FILE",
    ),
)

ARCHIVES: tuple[Setting, ...] = (*ARCHIVE, *SQL)
