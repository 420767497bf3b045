"""Spark reads archives and tiers: the functions that programs call. docs/spark.md is the guide.

Importing this package needs no Spark; what makes a frame does.
"""

from __future__ import annotations

from typing import Any

from tiered.spark.frames import archive, file_list, messages, report, tier

__all__ = ["archive", "file_list", "messages", "register", "report", "tier"]


def register(spark: Any) -> None:  # noqa: ANN401 (pyspark has no types)
    """Make ``format("tieredmq")`` known to a session, for SQL and for programs that give options one by one."""
    from tiered.spark import source  # noqa: PLC0415 (needs pyspark)

    source.register(spark)
