"""Options of the commands that make and read an archive."""

from __future__ import annotations

from functools import partial

from tiered.cli.parsers import pair, whole
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
