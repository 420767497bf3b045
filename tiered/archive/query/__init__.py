"""Questions to an archive: SQL by DuckDB, lookups by key, and which files and rows they need at all."""
