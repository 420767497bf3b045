"""Reads a table of Iceberg as somebody else does: DuckDB with its extension, in an environment without this project.

``by_duckdb.py METADATA CONDITION OUT``: its rows as Parquet; prints how many fulfil a condition.
"""

from __future__ import annotations

import sys
from pathlib import Path

import duckdb
import duckdb_extension_avro
import duckdb_extension_iceberg

NO_DOWNLOAD = {"autoinstall_known_extensions": False, "autoload_known_extensions": False}


def main(metadata: str, condition: str, out: str) -> None:
    connection = duckdb.connect(config=NO_DOWNLOAD)
    for package in (duckdb_extension_avro, duckdb_extension_iceberg):
        (file,) = Path(next(iter(package.__path__))).rglob("*.duckdb_extension")
        connection.load_extension(str(file))
    table = f"iceberg_scan('{metadata}')"
    connection.execute(f"COPY (FROM {table}) TO '{out}' (FORMAT parquet)")
    (counted,) = connection.execute(f"SELECT count(*) FROM {table} WHERE {condition}").fetchall()
    print(*counted)


main(*sys.argv[1:])
