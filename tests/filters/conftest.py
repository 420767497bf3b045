"""What RocketMQ answered, as ``tests/oracle/scenarios/filters.py`` has kept it."""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ANSWERS = Path(__file__).resolve().parents[1] / "data" / "filters" / "answers.jsonl"


@dataclass(frozen=True)
class Answers:
    """Of the real RocketMQ.

    Attributes:
        messages: Stored properties.
        rows: ``kind``, ``text``, and ``answers`` (a letter for each message) or ``error``.
    """

    messages: list[bytes]
    rows: list[dict[str, Any]]


@pytest.fixture(scope="session")
def answers() -> Answers:
    first, *rows = map(json.loads, ANSWERS.read_text("ascii").splitlines())
    return Answers([base64.b64decode(raw) for raw in first["messages"]], rows)
