"""What an archive holds, read by others, in the form in which Java's dumps tell it."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow.parquet as pq
from support.command_line import here

if TYPE_CHECKING:
    import pyarrow as pa
    from support.archive_fixtures import Sealed
    from support.captures import Message


def folder(url: str) -> Path:
    return Path(url.removeprefix("file://"))


def files(url: str) -> list[Path]:
    """What a reader of directories would find."""
    return sorted(folder(url).glob("**/*.parquet"))


def rows_of(table: pa.Table) -> list[dict[str, Any]]:
    return table.to_pylist(maps_as_pydicts="strict")


def read_all(url: str) -> dict[str, list[dict[str, Any]]]:
    """Rows of each topic in order, by pyarrow, file by file."""
    found: dict[str, list[dict[str, Any]]] = {}
    for file in files(url):
        for row in rows_of(pq.ParquetFile(file).read()):
            found.setdefault(row["topic"], []).append(row)
    for rows in found.values():
        rows.sort(key=lambda row: (row["queue_id"], row["queue_offset"]))
    return found


def said_by_java(message: Message) -> dict[str, Any]:
    """The fields of a dump's message that an archive has, in the archive's names."""
    names = {
        "topic": "topic",
        "queue_id": "queue_id",
        "queue_offset": "queue_offset",
        "tags": "tag",
        "keys": "msg_key",
        "born_host": "born_host",
        "store_host": "store_host",
        "sys_flag": "sys_flag",
        "flag": "flag",
        "body_crc": "body_crc",
        "reconsume_times": "reconsume_times",
        "prepared_transaction_offset": "prepared_tx_offset",
        "properties": "properties",
        "physical_offset": "physical_offset",
        "store_timestamp_ms": "store_ms",
        "born_timestamp_ms": "born_ms",
    }
    found = {ours: message[name] for name, ours in names.items()}
    return found | {"body": base64.b64decode(message["body_base64"])}


def said_by_archive(row: dict[str, Any]) -> dict[str, Any]:
    """The same of a row."""
    found = dict(row)
    for name in ("store", "born"):
        found[f"{name}_ms"] = round(found.pop(f"{name}_ts").timestamp() * 1000)
    found["properties"] = dict(found["properties"])
    for name in ("uniq_key", "keys", "broker", "incarnation"):
        del found[name]
    return found


def check(tier: Sealed, url: str) -> None:
    """After whatever happened one more run leaves nothing to do, and the archive is what Java found, each message once."""
    here("archive", tier.url, "--to", url).good()
    verified = here("archive", tier.url, "--to", url, "--verify", "--json").good().document
    assert (verified["rows"], verified["findings"]) == (tier.dump.count, [])
    assert verified["files"] == len(files(url)), "files that no entry names"
    wanted = {t: [said_by_java(m) for m in found] for t, found in tier.dump.messages.items()}
    found = {t: [said_by_archive(row) for row in rows] for t, rows in read_all(url).items()}
    assert found == wanted


def java_rows(tier: Sealed) -> list[dict[str, Any]]:
    return [said_by_java(m) for _, found in sorted(tier.dump.messages.items()) for m in found]
