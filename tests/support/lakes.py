"""Iceberg tables that were published from an archive, as their catalog has them."""

from __future__ import annotations

import os
from contextlib import closing
from typing import TYPE_CHECKING, Any

from backends.s3_settings import S3Options
from tiered.archive.publish import Destination, Published, publish, table_name
from tiered.upkeep.engine import local_engine

if TYPE_CHECKING:
    from tiered.archive.task import JobContext


def published(at: JobContext, catalog: str) -> list[Published]:
    return list(
        publish(at.archive, Destination(catalog, "lake"), S3Options(), local_engine(at.context, 2))
    )


def table_of(catalog: str, topic: str, namespace: str = "lake") -> Any:
    from pyiceberg.catalog import load_catalog

    reach = {"s3.endpoint": os.environ.get("AWS_ENDPOINT_URL_S3", "")}
    with closing(load_catalog("tiered", uri=catalog, **reach)) as found:
        return found.load_table(f"{namespace}.{table_name(topic)}")
