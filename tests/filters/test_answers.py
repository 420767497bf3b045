"""Every answer of the real RocketMQ, again from here: refused where it refuses, the same letter for every message."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from support.filter_records import batch_of_properties, letter, letters

from fetcher.filters import compile_filter
from tiered.format.properties import parse_properties

if TYPE_CHECKING:
    from support.filter_records import Answers


def test_there_are_enough(answers: Answers):
    sql = [row for row in answers.rows if row["kind"] == "SQL92"]
    assert len(answers.messages) > 140
    assert len([row for row in sql if "answers" in row]) > 300
    assert len([row for row in sql if "error" in row]) > 100
    assert {letter for row in sql for letter in row.get("answers", "")} == set("TFNX")


def test_every_answer_is_the_same(answers: Answers):
    got = [letters(row, answers.messages) for row in answers.rows]
    both = zip(answers.rows, got, strict=True)
    assert [(row, one) for row, one in both if one != row.get("answers")] == []


def test_selecting_from_a_batch_takes_what_a_consumer_gets(answers: Answers):
    batch = batch_of_properties([*answers.messages, None])
    for row in answers.rows:
        if "answers" in row:
            made = compile_filter(row["text"], row["kind"], strict=False)
            expected = [n for n, letter in enumerate(row["answers"]) if letter == "T"]
            assert made.select(batch).tolist() == [
                n + (n >= len(answers.messages)) for n in expected
            ], row["text"]


def test_tag_codes_never_leave_out_what_matches(answers: Answers):
    batch = batch_of_properties(answers.messages)
    for row in answers.rows:
        if row["kind"] == "TAG" and "answers" in row:
            codes = compile_filter(row["text"], "TAG", strict=False).tag_codes
            if codes is not None:
                by_code = np.isin(batch.tag_codes.astype(np.int32), codes)
                assert all(by_code[n] for n, letter in enumerate(row["answers"]) if letter == "T")


@pytest.mark.parametrize("strict", [True, False])
def test_mappings_of_text_and_of_bytes_are_the_same(answers: Answers, *, strict: bool):
    made = compile_filter("a BETWEEN 1 AND 5 OR b IN ('x', '日本語')", "SQL92", strict=strict)
    for raw in answers.messages:
        properties = parse_properties(raw)
        stored = {name.encode(): value.encode() for name, value in properties.items()}
        assert made.matches(properties) == made.matches(stored) == (letter(made, raw) == "T")
