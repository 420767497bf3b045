"""The examples of every ``--help`` run as they stand: `support.shown` says with what.

``tiered bench`` takes minutes: ``test_demo_bench`` runs it with fewer messages.
"""

from __future__ import annotations

import tempfile
from typing import TYPE_CHECKING

import pytest
from support import shown
from support.servers import use_server

from tiered.cli.frame import program

if TYPE_CHECKING:
    from pathlib import Path

    from support.command_line import CommandLine
    from support.servers import S3Server

EXAMPLES = sorted(
    {
        line
        for path, command in program().walk()
        if path.split()[0] != "bench"
        for line in (command.epilog or "").splitlines()
    }
)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("examples")
    shown.make(root)
    return root


@pytest.mark.parametrize("example", EXAMPLES)
def test_example(  # noqa: PLR0917 (fixtures)
    example: str,
    tiered: CommandLine,
    made: Path,
    ministack: S3Server,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    use_server(ministack, monkeypatch)
    shown.World(tmp_path, made, ministack).run(tiered, example)
