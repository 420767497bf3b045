"""Reads a table of Iceberg as somebody else does: Spark with Iceberg's runtime, in an environment without this project.

``by_spark.py CATALOG WAREHOUSE TABLE CONDITION OUT JAR…``: its rows as Parquet; prints how many fulfil a condition.
"""

from __future__ import annotations

import sys

from pyspark.sql import SparkSession

CLASSES = "org.apache.iceberg.spark"


def main(catalog: str, warehouse: str, table: str, condition: str, out: str, *jars: str) -> None:
    conf = {
        "spark.jars": ",".join(jars),
        "spark.driver.host": "127.0.0.1",
        "spark.ui.enabled": "false",
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
        "spark.sql.extensions": f"{CLASSES}.extensions.IcebergSparkSessionExtensions",
        "spark.sql.catalog.tiered": f"{CLASSES}.SparkCatalog",
        "spark.sql.catalog.tiered.type": "jdbc",
        "spark.sql.catalog.tiered.uri": f"jdbc:sqlite:{catalog}",
        "spark.sql.catalog.tiered.warehouse": warehouse,
        "spark.sql.catalog.tiered.jdbc.schema-version": "V1",
    }
    builder = SparkSession.builder.master("local[2]")
    for name, value in conf.items():
        builder = builder.config(name, value)
    session = builder.getOrCreate()
    rows = session.table(f"tiered.{table}")
    rows.coalesce(1).write.parquet(out)
    print(rows.where(condition).count())
    session.stop()


main(*sys.argv[1:])
