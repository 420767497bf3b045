"""Sealed segments rewritten as Parquet, each file proved equal to its source, and a log of the files that count.

docs/archive.md tells how to use it, docs/formats/archive.md what the bytes are. Of the faces above ``tiered.upkeep`` this is
the one that knows Parquet, DuckDB and Spark; nothing below it does.
"""
