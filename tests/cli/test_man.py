"""Manual pages: one a command, made of the help, which groff takes without a word."""

from __future__ import annotations

import re
import shutil
import subprocess
from typing import TYPE_CHECKING

import pytest

from tiered.cli.frame import COMMON, CliCommand, program
from tiered.cli.man import pages

if TYPE_CHECKING:
    from pathlib import Path

    from support.command_line import CommandLine


def plain(text: str) -> str:
    """As it reads, without what roff needs."""
    return re.sub(r"\\f[BR]|\\&", "", text).replace("\\-", "-").replace("\\e", "\\")


def test_every_command_has_a_page_that_names_every_option_of_its_own():
    made = pages()
    assert "tiered.1" in made
    for path, command in program().walk():
        text = plain(made[f"tiered-{path.replace(' ', '-')}.1"])
        assert text.startswith(f".TH TIERED-{path.replace(' ', '-').upper()} 1 ")
        assert f"tiered-{path.replace(' ', '-')} - {(command.help or '').rstrip('.')}" in text
        if isinstance(command, CliCommand):
            for setting in command.settings:
                assert (
                    all(name in text for name in setting.spellings) or f"--{setting.name}" in text
                )
            assert all(line in text for line in (command.epilog or "").splitlines())
        assert "--sse-kms-key-id" not in text or path == "policy", "those of all stand on one page"
    assert all(setting.help.split("(")[0][:30] in plain(made["tiered.1"]) for setting in COMMON)
    requests = re.compile(r"\.(TH|SH|TP|PP|B|BR|nf|fi)( |$)")
    for text in made.values():
        assert all(
            requests.match(line) for line in text.splitlines() if line.startswith((".", "'"))
        )


@pytest.mark.skipif(not shutil.which("groff"), reason="groff is not installed")
def test_groff_takes_them():
    """Without a warning, and the words are there."""
    made = pages()
    run = subprocess.run(
        ["groff", "-man", "-Tutf8", "-ww", "-z"],
        input="".join(made.values()).encode(),
        capture_output=True,
        check=False,
    )
    assert (run.returncode, run.stderr.decode()) == (0, "")
    shown = subprocess.run(
        ["groff", "-man", "-Tascii", "-P-cbou"],
        input=made["tiered-attach.1"].encode(),
        capture_output=True,
        check=True,
    ).stdout.decode()
    assert "--segment-age DURATION" in shown
    assert "tiered attach /data/rocketmq/store --to s3://bucket/prefix" in shown


def test_they_are_written_where_they_are_wanted(tiered: CommandLine, tmp_path: Path):
    ran = tiered.good("man", tmp_path / "man1", "--json")
    assert sorted(one.name for one in (tmp_path / "man1").iterdir()) == ran.document["pages"]
    (tmp_path / "file").write_text("")
    assert tiered("man", tmp_path / "file").code == 2
