#!/usr/bin/env python3
"""Asks the real RocketMQ what its filters take, and keeps the answers as test data.

    scenarios/filters.py [FILE]     (default: tests/data/filters/answers.jsonl)

The first line of the file has the messages: base64 of their stored properties. Every further line has an expression
and either ``answers``, one letter for each message (T, F, N for null, X when evaluating fails), or the ``error`` with
which Java refuses it.
"""

from __future__ import annotations

import base64
import json
import subprocess
import sys
from pathlib import Path

ORACLE = Path(__file__).resolve().parents[1] / "oracle"
ANSWERS = Path(__file__).resolve().parents[2] / "data" / "filters" / "answers.jsonl"

# fmt: off
VALUES = [
    *("0", "1", "5", "-5", "+5", "--5", "05", "5L", "5 ", " 5", "\t5\n", "5.0", "5.5", "-5.5", ".5", "5.", "-0",
      "-0.0"),
    *("0.0", "1e3", "1E-3", "1e400", "-1e400", "4.9e-324", "NaN", "-NaN", "nan", "Infinity", "-Infinity", "inf"),
    *("0x10", "0x1p3", "0X1.8P1", "-0x.8p0", "0x1p99999999999", "0x1p-99999999999", "0x1", "5f", "5D", "5dd",
      "1_000", "1,5"),
    *("2147483647", "2147483648", "-2147483648", "-2147483649", "9223372036854775807", "9223372036854775808"),
    *("-9223372036854775808", "9007199254740993", "9007199254740992.0", "0.1", "0.10", "100000000000000000000000000"),
    *("true", "TRUE", "tRuE", "false", "False", "yes", "null", "NULL", " true", "T"),
    *("x", "X", "abc", "a", "b", "c", "it's", "'", "''", '"q"', "a b", "a%", "%", "\\", "-- no", "/* no */", "a,b",
      "||"),
    *("ä", "a\u0308", "日本語", "😀", "\u0665", "\uff15", "\U0001d7d3", "\u00a05", "\u2003x", "ß", "SS", "\ufffd", "e",
      "E", "+", "-", "."),
]
"""Of the property ``a``."""

ROWS: list[dict[str, str]] = [
    {},
    {"b": "1"},
    {"a": "1", "b": "1"},
    {"a": "1", "b": "2"},
    {"a": "2", "b": "1"},
    {"a": "1", "b": "1.0"},
    {"a": "x", "b": "1"},
    {"a": "1", "b": "x"},
    {"a": "x", "b": "x"},
    {"a": "5", "b": "5", "c": "true"},
    {"a": "10", "b": "9", "c": "false"},
    {"a": "-0.0", "b": "0.0"},
    {"a": "NaN", "b": "NaN"},
    {"a": "NaN", "b": "Infinity"},
    {"a": "true", "b": "true"},
    {"a": "true", "b": "false"},
    {"c": "true"},
    {"c": "x"},
    {"a": "1", "b": "1", "c": "1"},
    {"A": "1"},
    {"aa": "1", "a1": "2", "_a": "3", "$a": "4", "a$": "5"},
    {"TAGS": "red", "KEYS": "k1 k2", "a": "7"},
    {"TAGS": "blue", "region": "eu-west", "price": "12.50", "amount": "100"},
    {"TAGS": "green", "region": "us-east", "price": "7", "amount": "20"},
    {"TAGS": "Aa", "region": "eu-north", "price": "free", "amount": "x"},
    {"TAGS": "BB", "region": "ap"},
    {"TAGS": "*"},
    {"TAGS": "a||b"},
    {"TAGS": "日本"},
    {"TAGS": "\u2003x"},
    {"TAGS": "x y"},
]

RAW = [
    b"a\x01",
    b"a\x01\x02",
    b"a\x011",
    b"a\x011\x02a\x012\x02",
    b"a\x012\x02a\x01\x02",
    b"a\x01\x02a\x015\x02a\x01",
    b"\x01x\x02a\x015\x02",
    b"\x02\x02a\x015\x02\x02",
    b"noise\x02a\x015\x02b",
    b"a\x015\x01b\x011\x02",
    b"xa\x011\x02b\x01a\x02",
    b"a\x01\xff\xfe\x02",
    b"a\x01\xe6\x97\x02b\x011\x02",
    b"a\x01\xed\xa0\x80\x02",
    b"a\x01\xf0\x9f\x98\x02",
    b"b\x01a\x015\x02",
]

SQL = [
    # Equality with an integer, a long, a decimal, a string, a boolean, both ways round.
    *("a = 5", "5 = a", "a <> 5", "5 <> a", "a = 5L", "a = 5l", "a = 0", "a = -5", "-5 = a", "a = - 5", "a = +5",
      "a = + + 5"),
    *("a = 2147483647", "a = 2147483648", "a = -2147483648", "a = -2147483649", "a = 9223372036854775807",
      "a = 9223372036854775808"),
    *("a = -9223372036854775808", "a = -9223372036854775807", "a = 9007199254740993", "a = 9007199254740992.0"),
    *("a = 5.0", "5.0 = a", "a <> 5.0", "a = 5.", "a = .5", "a = 1e3", "a = 1E3", "a = 1e+3", "a = 1e-3", "a = 0.1",
      "a = 5.5", "a = -5.5"),
    *("a = 0.0", "a = 0.", "a = .0", "a = 0e0", "a = -0.0", "a = 1e400", "a = 1e-400", "a = 4.9e-324",
      "a = 1.7976931348623157e308"),
    *("a = 'x'", "'x' = a", "a <> 'x'", "a = '5'", "a = ''", "a <> ''", "a = 'it''s'", "a = ''''", "a = ''''''",
      "a = 'ä'", "a = '日本語'"),
    *("a = '😀'", "a = '\ufffd'", "a = '-- no'", "a = '/* no */'", "a = 'a,b'", "a = '\\'", "a = ' 5'", "a = '\t5\n'",
      "a = 'X'"),
    *("a = TRUE", "a = true", "a = False", "a <> TRUE", "a <> false", "TRUE = a", "FALSE <> a", "TRUE = TRUE",
      "TRUE = FALSE"),
    *("a = NULL", "a <> NULL", "NULL = a", "NULL = NULL", "TRUE = 5", "5 = TRUE", "TRUE = 'true'", "'true' = TRUE",
      "5 = 5", "5 = 5.0"),
    *("5 = '5'", "'5' = 5", "'5' = '5.0'", "'x' = 5", "5 = 'x'", "5 <> 'x'", "9007199254740993 = 9007199254740992.0",
      "3000000000 = 5"),
    *("a = b", "b = a", "a <> b", "b <> a", "a = a", "a <> a", "missing = missing", "missing <> missing",
      "a = missing", "missing = a"),
    *("a = -b", "-a = 5", "-a = -5", "-(-5) = a", "-TRUE = a", "-'5' = a", "-NULL = a", "- missing = missing",
      "-a = -b"),
    # Order.
    *("a > 5", "a >= 5", "a < 5", "a <= 5", "5 > a", "5 >= a", "5 < a", "5 <= a", "a > 2147483648", "a > 5L",
      "a >= -2147483649"),
    *("a > 5.0", "a >= 5.0", "a < 5.0", "a <= 5.5", "a > -5.5", "a < 1e3", "5.5 < a", "a >= 1e308", "a <= -1e308",
      "a > 9007199254740992.0"),
    *("a > b", "a >= b", "a < b", "a <= b", "b > a", "a > a", "a >= a", "a > missing", "missing > a", "a > -b",
      "-a > b", "-a < -5"),
    *("a > 'x'", "a > '5'", "'5' < a", "a > TRUE", "TRUE > a", "a > NULL", "NULL < a", "a >= (b = 1)", "(a = 1) < 5",
      "5 > 3", "3 > 5"),
    *("5 > 3.5", "3 >= 3.0", "9007199254740993 > 9007199254740992.0", "-5 < 3", "-5 < -3.5", "a > - - 5",
      "a > -TRUE", "5 > 4 > 3"),
    # BETWEEN.
    *("a BETWEEN 1 AND 5", "a between 1 and 5", "a NOT BETWEEN 1 AND 5", "a BETWEEN 5 AND 5", "a BETWEEN 5 AND 1",
      "a NOT BETWEEN 5 AND 1"),
    *("a BETWEEN -5 AND 5", "a BETWEEN 5 AND -5", "a BETWEEN 0.5 AND 5.5", "a BETWEEN 1 AND 5.5",
      "a BETWEEN 5.5 AND 1", "a BETWEEN 1.5 AND 3000000000"),
    *("a BETWEEN 3000000000 AND 2", "a BETWEEN 'a' AND 'c'", "a BETWEEN 'a' AND 5", "a BETWEEN TRUE AND 5",
      "a BETWEEN NULL AND 5"),
    *("a BETWEEN 1 AND NULL", "a NOT BETWEEN NULL AND 5", "a BETWEEN b AND 5", "a BETWEEN 1 AND b",
      "a BETWEEN b AND b", "a NOT BETWEEN b AND 5"),
    *("5 BETWEEN 1 AND 10", "5 BETWEEN a AND b", "'5' BETWEEN 1 AND 10", "a BETWEEN 1 AND 5 AND b = 1",
      "a BETWEEN 1", "a BETWEEN 1 OR 5"),
    *("NOT a BETWEEN 1 AND 5", "NOT (a BETWEEN 1 AND 5)", "NOT (a NOT BETWEEN 1 AND 5)", "(a) BETWEEN (1) AND (5)",
      "a BETWEEN (5) AND (1)"),
    # IN.
    *("a IN ('x')", "a IN ('x', 'abc', '5')", "a in ('a','b','c','x','X','ä','5')", "a NOT IN ('x')",
      "a not in ('x','5','a','b','c','abc')"),
    *("a IN ()", "a IN (5)", "a IN ('x', 5)", "a IN ('x',)", "a IN 'x'", "a IN (b)", "'x' IN ('x')", "5 IN ('5')",
      "(a) IN ('x')", "(a = 1) IN ('x')"),
    *("a IN ('')", "a NOT IN ('')", "NOT a IN ('x')", "NOT (a IN ('x'))", "a IN ('it''s')", "a IN ('x') IN ('x')",
      "+a IN ('x')", "-a IN ('x')", "TRUE IN ('x')"),
    # NULL.
    *("a IS NULL", "a IS NOT NULL", "a is null", "NOT a IS NULL", "NOT (a IS NULL)", "NOT a IS NOT NULL",
      "5 IS NULL", "NULL IS NULL", "NULL IS NOT NULL"),
    *("'x' IS NOT NULL", "(a = 1) IS NULL", "a = 1 IS NULL", "a = 1 IS NOT NULL", "a IS NULL IS NULL",
      "a IS NULL = TRUE", "a IS NULL = FALSE", "a IS NULL = b"),
    *("a IS", "a IS 5", "a IS TRUE", "a IS NOT", "a IS NOT TRUE", "a IS NOT NOT NULL", "-a IS NULL", "a > 5 IS NULL",
      "(a > b) IS NULL", "missing IS NULL"),
    # CONTAINS, STARTSWITH, ENDSWITH.
    *("a CONTAINS 'b'", "a contains 'B'", "a NOT CONTAINS 'b'", "a CONTAINS ''", "a NOT CONTAINS ''",
      "a STARTSWITH 'a'", "a NOT STARTSWITH 'a'"),
    *("a STARTSWITH ''", "a NOT STARTSWITH ''", "a ENDSWITH 'c'", "a NOT ENDSWITH 'c'", "a ENDSWITH ''",
      "a NOT ENDSWITH ''", "a CONTAINS '''", "a CONTAINS ''''"),
    *("a CONTAINS 5", "a CONTAINS b", "a CONTAINS ('x')", "5 CONTAINS '5'", "'abc' CONTAINS 'b'",
      "'abc' STARTSWITH 'b'", "NULL CONTAINS 'x'", "TRUE CONTAINS 'T'"),
    *("(a = 5) CONTAINS 'x'", "(a = 5) NOT CONTAINS 'x'", "(a = 5) CONTAINS ''", "a CONTAINS 'a' CONTAINS 'b'",
      "a CONTAINS 'a' NOT CONTAINS 'b'", "NOT (a CONTAINS 'b')"),
    *("NOT a CONTAINS 'b'", "NOT (a NOT CONTAINS 'b')", "a CONTAINS '日'", "a ENDSWITH '語'", "a STARTSWITH '\u00e4'",
      "a CONTAINS '%'", "-a CONTAINS 'x'", "a LIKE 'a%'"),
    *("a CONTAINS 'b' = TRUE", "a CONTAINS 'b' <> TRUE", "a CONTAINS 'b' IS NULL", "a CONTAINS 'b' > 5"),
    # AND, OR, NOT; what order does to failures.
    *("a = 5 AND b = 1", "a = 5 OR b = 1", "b = 1 OR a = 5", "b = 1 AND a = 5", "b = 2 AND a = 5",
      "a = 1 OR a = 'x'", "a = 'x' OR a = 1"),
    *("NOT a = 1", "NOT a = 'x'", "NOT a <> 1", "NOT (a = 1)", "NOT (a <> 1)", "NOT NOT (a = 1)", "NOT a", "a",
      "(a)", "+a", "-a", "NOT NOT a", "NOT a > 5"),
    *("TRUE", "FALSE", "NULL", "NOT TRUE", "NOT NULL", "NOT FALSE", "5", "'x'", "NOT 5", "-5", "a AND b",
      "a OR TRUE", "a OR NOT b", "a AND FALSE"),
    *("NULL AND TRUE", "NULL AND FALSE", "NULL OR TRUE", "NULL OR FALSE", "FALSE OR NULL", "TRUE AND NULL",
      "(NULL OR FALSE) IS NULL", "NOT (NULL AND FALSE)"),
    *("a = 1 OR b = 1 AND c = 'true'", "(a = 1 OR b = 1) AND c = 'true'", "a = 1 AND b = 1 OR c = 'true'",
      "NOT a = 1 OR b = 1", "NOT (a = 1 OR b = 1)"),
    *("NOT (a = 1 AND b = 1)", "a = 1 AND NOT (b = 1)", "a = 1 AND NOT b = 1", "c = TRUE AND a = 5",
      "c = TRUE OR a = 5", "c", "c = TRUE", "c = 'true'"),
    *("a = 'x' AND 5", "5 OR a = 'x'", "a AND 'x'", "missing > 5 OR b = 1", "missing > 5 AND b = 1",
      "NOT (missing > 5)", "missing = 5", "missing <> 5"),
    *("a = 1 = TRUE", "a = 1 = b", "a = (b = 1)", "(a = 1) = (b = 1)", "(a = 1) <> (b = 1)", "(a = 1) = TRUE",
      "(a = 1) = 'true'", "(a > 1) = c", "c = (a > 1)"),
    *("a < 5 = TRUE", "a > 1 = b > 1", "TRUE AND a = 1", "((((a))))", "((a = 1))", "a = ((1))", "- - 5 = a",
      "NOT + a", "+ NOT a", "- NOT a"),
    # Words, blanks, comments.
    *("A = 1", "aa = 1", "a1 = 2", "_a = '3'", "$a = '4'", "a$ = '5'", "a = 5 and b = 5", "a=5", " a\t=\n5\r\f",
      "a=5AND b=5", "a = 5AND b = 5", "a='x'AND b='x'"),
    *("a /* five */ = 5", "a = 5 -- five\n", "a = 5 -- five", "-- five\na = 5", "a = --5\n5", "a = --5", "a = /**/5",
      "a = /***/ 5", "a = /* * / */ 5", "a = /* x 5"),
    *("nothing = 1", "notes = 1", "inn = 1", "is_a IS NULL", "order = 1", "not_a IS NULL", "NOTa", "TAGS = 'red'",
      "TAGS IN ('red','blue')", "KEYS CONTAINS 'k1'"),
    *("region STARTSWITH 'eu' AND price > 10", "region STARTSWITH 'eu' AND price > 10.0",
      "price > 10.0 AND region STARTSWITH 'eu'", "amount > 50 OR region = 'ap'"),
    *("region = 'ap' OR amount > 50", "price BETWEEN 5.0 AND 20.0", "price IS NOT NULL AND amount < 100",
      "NOT (region IN ('ap','us-east')) AND amount > 1"),
    # What stands behind an expression is not looked at by Java's parser.
    *("a = 5 b", "a = 5)", "a = 5 garbage = here", "a = 5 #", "a = 5 b #", "a = 5 ,", "a = 5 'x'", "a = 5 5",
      "a = 05", "a = 007", "a = 5.5.5", "a = 5e", "a = 5x"),
    *("a = 0l", "a = 0x10", "a LIKE 'x'", "a = 5 TRUE", "a = 5 (b = 1)", "a IS NULL NULL", "a == 5", "a != 5",
      "a = 5;", "a = 5 AND", "a = 5 OR", "a = 5 NOT", "a = 5 NOT b"),
    *("a + b", "a + 5 = 10", "a - 5 = 0", "a = 5 + 5", "a = 5 - 5", "a = 5 --", "a * 5 = 25", "a / 5 = 1",
      "a = 5 IN ('5')", "a = 5 /", "a < > 5", "a > = 5", "a <>5"),
    # Not an expression.
    *("", " ", "\n", "--", "-- x\n", "/* */", "=", "a =", "= 5", "a = = 5", "(a = 5", "a = (5", "()", "a = 'x",
      "a = x'", 'a = "x"', "ä = 5", "a.b = 5", "a-b = 5", "a = 5 AND AND b = 1"),
    *("NOT", "AND", "OR a", "a AND", "a BETWEEN", "a BETWEEN 1 AND", "a NOT", "a NOT 5", "a NOT NULL",
      "a NOT IS NULL", "IN", "IN ('x')", "a b = 5", "@a = 5", "a = \u00a05", "a = \u0665"),
    *("a = 5\u0000", "a\u2003= 5", "\ufeffa = 5", "a = 1.5L", "a = 5LL", "a = 99999999999999999999",
      "a = 99999999999999999999.0", "a = 1e", "a = .", "a = 5..", "a = e5", "\u017f = 5", "\u212a = 1"),
]
TAG = [
    *("red", "red||blue", " red || blue ", "red|blue", "*", "", " ", "||", " || ", "||red", "red||", "*||red"),
    *("* ", "Aa", "BB", "Aa||BB", "RED"),
    *("日本", "a||b", "a", "x y", "\u2003x", "\tred\n", "red||||blue", "red blue", "red ||| blue", "\u00a0red"),
]
# fmt: on


def stored(properties: dict[str, str]) -> bytes:
    """The stored form."""
    return "".join(f"{name}\x01{value}\x02" for name, value in properties.items()).encode()


def question() -> dict[str, list[object]]:
    """All messages, all expressions."""
    messages = [stored(row) for row in [*({"a": value} for value in VALUES), *ROWS]] + RAW
    texts = [("SQL92", text) for text in SQL] + [("TAG", text) for text in TAG]
    return {
        "messages": [base64.b64encode(raw).decode() for raw in messages],
        "expressions": [{"kind": kind, "text": text} for kind, text in dict.fromkeys(texts)],
    }


def ask(asked: dict[str, list[object]], *command: str) -> list[dict[str, str]]:
    """The oracle's answers, by ``filter`` or ``filter-live``."""
    told = subprocess.run(
        [ORACLE, *command], input=json.dumps(asked).encode(), stdout=subprocess.PIPE, check=True
    )
    return [json.loads(line) for line in told.stdout.splitlines()]


def main() -> None:
    """Writes the file."""
    asked = question()
    lines = [{"messages": asked["messages"]}, *ask(asked, "filter")]
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else ANSWERS
    text = "".join(json.dumps(line, ensure_ascii=True) + "\n" for line in lines)
    path.write_text(text, "ascii")


if __name__ == "__main__":
    main()
