"""What RocketMQ answered, as ``tests/oracle/scenarios/filters.py`` has kept it."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest
from support.filter_records import Answers

ANSWERS = Path(__file__).resolve().parents[1] / "data" / "filters" / "answers.jsonl"


@pytest.fixture(scope="session")
def answers() -> Answers:
    first, *rows = map(json.loads, ANSWERS.read_text("ascii").splitlines())
    return Answers([base64.b64decode(raw) for raw in first["messages"]], rows)
