"""Log lines on stderr, as text or as JSON, for as long as a command runs."""

from __future__ import annotations

import contextlib
import json
import logging
import sys
from typing import TYPE_CHECKING

from tiered.cli.times import format_time

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tiered.cli.call import Call


class _Text(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        """As ``2026-07-01T12:00:00.123Z WARNING tiered.attach: what happened``."""
        text = " ".join(record.getMessage().split())
        if record.exc_info:
            text += f"\n{self.formatException(record.exc_info)}"
        return (
            f"{format_time(round(record.created * 1000))} {record.levelname} {record.name}: {text}"
        )


class _Json(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        """One object a line."""
        fields = {
            "time": format_time(round(record.created * 1000)),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            fields["traceback"] = self.formatException(record.exc_info)
        return json.dumps(fields)


@contextlib.contextmanager
def logging_to_stderr(call: Call) -> Iterator[None]:
    """Show logs: warnings and worse; all of ours with ``--debug``."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Json() if call.words("log-format") == "json" else _Text())
    ours = [logging.getLogger(name) for name in ("tiered", "backends", "fetcher", "timer")]
    levels = [logger.level for logger in ours]
    root = logging.getLogger()
    root.addHandler(handler)
    for logger in ours:
        logger.setLevel(logging.DEBUG if call.flag("debug") else logging.INFO)
    try:
        yield
    finally:
        root.removeHandler(handler)
        for logger, level in zip(ours, levels, strict=True):
            logger.setLevel(level)
