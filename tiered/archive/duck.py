"""Questions in SQL, answered by DuckDB in this process. Each topic of the archive is a table of its name.

Files of a folder are read by DuckDB itself. Those of another store come through the same ``ObjectStore`` as everything else
here, with its credentials and options, as a file system that DuckDB is handed: ranges of objects, nothing is downloaded
whole. No extension of DuckDB is installed or loaded. A question may do what DuckDB can do with the rights of this process,
reading and writing other files too: do not take questions from strangers.
"""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from tiered.archive.columns import schema
from tiered.archive.ranges import ObjectFile
from tiered.archive.tables import files_by_topic, read_archive
from tiered.errors import InvalidError
from tiered.plugin.arrow import load_pyarrow

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import pyarrow as pa

    from backends.base import ObjectStore

SCHEME = "tieredarchive"


def load_duckdb() -> Any:  # noqa: ANN401 (a foreign module)
    """The module.

    Raises:
        InvalidError: It is not installed.
    """
    try:
        import duckdb  # noqa: PLC0415 (heavy; only who asks)
    except ImportError as error:
        raise InvalidError(
            "this needs DuckDB, which is not installed", do="pip install 'tieredmq[sql]'"
        ) from error
    return duckdb


def ask(archive: ObjectStore, question: str) -> pa.Table:
    """The answer to a question.

    Args:
        archive: Of which.
        question: One statement of SQL.

    Raises:
        InvalidError: There is no archive, or the statement is wrong.
        DataError: The log is damaged.
        BackendError: The store failed.
    """
    load_pyarrow()
    duckdb = load_duckdb()
    state = read_archive(archive)
    sizes = {
        file.key: file.size_bytes for files in files_by_topic(state).values() for file in files
    }
    with duckdb.connect(":memory:") as connection:
        root = _mount(connection, archive, sizes)
        for topic, files in files_by_topic(state).items():
            _table(connection, topic, [f"{root}{file.key}" for file in files])
        connection.execute("SET autoinstall_known_extensions = false")
        connection.execute("SET autoload_known_extensions = false")
        try:
            found = connection.sql(question)
            return load_pyarrow().table({}) if found is None else found.to_arrow_table()
        except duckdb.Error as error:
            raise InvalidError(_said(error), do=_help(files_by_topic(state))) from error


def local_root(archive: ObjectStore) -> str | None:
    """The folder that an archive is, ending in a slash; None when it is none."""
    if not archive.url.startswith("file://"):
        return None
    return unquote(archive.url.removeprefix("file://")).rstrip("/") + "/"


def _mount(connection: Any, archive: ObjectStore, sizes: Mapping[str, int]) -> str:  # noqa: ANN401
    """Make the archive's files readable; what their names begin with."""
    root = local_root(archive)
    if root is not None:
        return root
    connection.register_filesystem(file_system(archive, sizes))
    return f"{SCHEME}://"


def _table(connection: Any, topic: str, names: Sequence[str]) -> None:  # noqa: ANN401
    quoted = '"' + topic.encode("utf-8", "replace").decode().replace('"', '""') + '"'
    if not names:
        connection.register("no_rows", schema().empty_table())
        connection.execute(f"CREATE VIEW {quoted} AS SELECT * FROM no_rows")  # noqa: S608 (quoted)
        return
    listed = ", ".join("'" + name.replace("'", "''") + "'" for name in names)
    options = "hive_partitioning = false, union_by_name = true"
    connection.execute(
        f"CREATE VIEW {quoted} AS SELECT * FROM read_parquet([{listed}], {options})"  # noqa: S608 (quoted)
    )


def file_system(archive: ObjectStore, sizes: Mapping[str, int]) -> Any:  # noqa: ANN401
    """The archive's files for whoever takes fsspec's interface."""
    from fsspec import AbstractFileSystem  # noqa: PLC0415 (heavy)

    class ArchiveFiles(AbstractFileSystem):  # type: ignore[misc] # it has no types
        """Read-only; names are keys."""

        protocol = SCHEME
        cachable = False

        def info(self, path: str, **_more: Any) -> dict[str, Any]:  # noqa: ANN401
            """Size and kind."""
            key = self._strip_protocol(path)
            if key not in sizes:
                raise FileNotFoundError(path)
            return {"name": key, "size": sizes[key], "type": "file"}

        def glob(self, path: str, **_more: Any) -> list[str]:  # noqa: ANN401
            """A file's own name."""
            key = self._strip_protocol(path)
            return [key] if key in sizes else []

        def _open(self, path: str, mode: str = "rb", **_more: Any) -> io.BufferedReader:  # noqa: ANN401, ARG002
            key = self._strip_protocol(path)
            return io.BufferedReader(ObjectFile(archive, key, sizes[key]), buffer_size=1 << 16)

        def modified(self, path: str) -> Any:  # noqa: ANN401, ARG002
            """Files never change."""
            from datetime import UTC, datetime  # noqa: PLC0415

            return datetime.fromtimestamp(0, UTC)

    return ArchiveFiles()


def _said(error: Exception) -> str:
    return str(error).strip().splitlines()[0]


def _help(topics: Mapping[str, Any]) -> str:
    names = ", ".join(f'"{topic}"' for topic in list(topics)[:8])
    return f"tables are {names}" if names else "the archive has no topic yet"
