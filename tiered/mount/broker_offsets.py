"""Reads ``config/consumerOffset.json`` as a broker leaves it: ``{"offsetTable":{"topic@group":{0:12,1:34}}}``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tiered.format.fastjson import loads

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tiered.mount.offsets import Name


def parse_offsets(data: bytes) -> Mapping[Name, Mapping[int, int]]:
    """Offsets by group and topic, then by queue id; rows of broadcasting clients and the like are left out.

    Raises:
        ValueError: It is no such file.
    """
    document = loads(data)
    table = document.get("offsetTable") if isinstance(document, dict) else None
    if not isinstance(table, dict):
        raise ValueError("there is no offsetTable")  # noqa: TRY004 (its text is wrong, not the call)
    found: dict[Name, Mapping[int, int]] = {}
    for name, row in table.items():
        topic, at, group = str(name).partition("@")
        if at and topic and group and isinstance(row, dict):
            offsets = {int(queue_id): int(offset) for queue_id, offset in row.items()}
            found[group, topic] = {key: value for key, value in offsets.items() if value >= 0}
    return found
