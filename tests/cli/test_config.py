"""Where settings come from, which rules, and what is refused."""

from pathlib import Path

import pytest
from support.command_line import CommandLine, Ran

from tiered.cli.frame import all_settings


def setting(ran: Ran, key: str) -> dict:
    return next(row for row in ran.document["settings"] if row["key"] == key)


def write(path: Path, text: str) -> Path:
    path.write_text(text, "utf-8")
    return path


def test_the_later_source_rules(tiered: CommandLine, tmp_path: Path):
    file = write(
        tmp_path / "t.toml", 'region = "from-file"\n[attach]\nfreshness = 3\nuploads = 2\n'
    )
    plain = tiered.good("config", "show", "--json")
    assert setting(plain, "attach.uploads")["value"] == 8
    assert setting(plain, "attach.uploads")["source"] == "default"

    filed = tiered.good("config", "show", "--json", "--config", file)
    assert setting(filed, "attach.freshness")["value"] == 3.0
    assert setting(filed, "attach.freshness")["source"] == f"file {file}"

    tiered.environment = {"TIERED_CONFIG": str(file), "TIERED_ATTACH_UPLOADS": "5"}
    both = tiered.good("config", "show", "--json")
    assert setting(both, "attach.uploads")["value"] == 5
    assert setting(both, "attach.uploads")["source"] == "environment TIERED_ATTACH_UPLOADS"
    assert setting(both, "region")["value"] == "from-file"

    tiered.environment["TIERED_REGION"] = "from-environment"
    last = tiered.good("config", "show", "--json", "--region", "from-line")
    assert setting(last, "region") == {
        "key": "region",
        "value": "from-line",
        "source": "command line",
        "variable": "TIERED_REGION",
    }


def test_every_setting_is_shown_once_and_has_its_own_variable(tiered: CommandLine):
    keys = [row["key"] for row in tiered.good("config", "show", "--json").document["settings"]]
    assert keys == [setting.key for setting in all_settings()]
    assert len({setting.variable for setting in all_settings()}) == len(keys)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("freshness = 1", ["unknown key 'freshness'"]),
        ("[attach]\nfreshnes = 1", ["'attach.freshnes'", "did you mean 'attach.freshness'"]),
        ("[attach]\nlease_seconds = 1", ["did you mean 'attach.lease-seconds'"]),
        ("[atach]\nonce = true", ["'atach'"]),
        ("[bench.make-stor]\nseed = 1", ["unknown key"]),
        ("[attach]\nfreshness = 'soon'", ["attach.freshness", "'soon' is not a duration"]),
        ("[attach]\nfreshness = [1]", ["attach.freshness", "not a single value"]),
        ("[attach]\nonce = 'maybe'", ["attach.once", "neither true nor false"]),
        ("output = 'xml'", ["output", "none of table, wide, json, jsonl, csv"]),
        ("region = ", ["no TOML"]),
    ],
)
def test_a_bad_file_is_refused_by_name(
    text: str, words: list[str], tiered: CommandLine, tmp_path: Path
):
    file = write(tmp_path / "bad.toml", text)
    ran = tiered("config", "show", "--config", file)
    assert ran.code == 2
    for word in [*words, str(file)]:
        assert word in ran.error


def test_a_missing_file_is_refused(tiered: CommandLine, tmp_path: Path):
    ran = tiered("config", "show", "--config", tmp_path / "none.toml")
    assert ran.code == 2
    assert "cannot be read" in ran.error


def test_a_bad_variable_is_refused_by_name(tiered: CommandLine):
    tiered.environment = {"TIERED_ATTACH_LEASE_SECONDS": "-1"}
    ran = tiered("config", "show")
    assert ran.code == 2
    assert "TIERED_ATTACH_LEASE_SECONDS" in ran.error
    tiered.environment = {"TIERED_ATTACH_LEASE_SECONDS": ""}
    assert tiered("config", "show").code == 0


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--freshness", "0"], "must be above 0"),
        (["--freshness", "nan"], "is not a duration"),
        (["--max-upload-rate", "50 parsecs"], "not a size"),
        (["--uploads", "0"], "at least 1"),
        (["--start", "yesterday"], "not a time"),
        (["--metrics-listen", "here"], "not a HOST:PORT"),
        (["--s3-header", "token"], "NAME=VALUE"),
    ],
)
def test_a_bad_option_is_refused_by_name(arguments: list[str], word: str, tiered: CommandLine):
    ran = tiered("attach", "store", "--to", "memory://x", *arguments)
    assert ran.code == 2
    assert word in ran.error
    assert arguments[0] in ran.error


def test_lists_come_from_commas_repetition_and_toml(tiered: CommandLine, tmp_path: Path):
    file = write(tmp_path / "t.toml", '[attach]\ntopics = ["a*", "b"]\n')
    shown = tiered.good("config", "show", "--json", "--config", file)
    assert setting(shown, "attach.topics")["value"] == ["a*", "b"]
    tiered.environment = {"TIERED_ATTACH_TOPICS": "x, y"}
    assert setting(tiered.good("config", "show", "--json"), "attach.topics")["value"] == ["x", "y"]


def test_header_values_are_never_shown(tiered: CommandLine):
    text = tiered.good("config", "show", "--s3-header", "x-token=secret", "--json").text
    assert "secret" not in text
    assert "x-token=***" in text
    refused = tiered("config", "show", "--s3-header", "secret")
    assert refused.code == 2
    assert "secret" not in refused.error


def test_forms_of_the_result(tiered: CommandLine):
    assert tiered.good("config", "show", "-o", "csv").text.startswith("key,value,source\n")
    rows = tiered.good("config", "show", "-o", "jsonl").rows
    assert rows[0]["key"] == "cluster"
    assert tiered.good("config", "show").text.splitlines()[0].split() == ["key", "value", "source"]
    assert tiered.good("config", "show", "-o", "json", "--json").document["format"] == 1
    assert tiered("config", "show", "-o", "csv", "--json").code == 2
