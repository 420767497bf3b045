"""What `make lint` runs, so that the tests fail where it would."""

import subprocess
import sys
from pathlib import Path

import pytest

BIN = Path(sys.executable).parent
TOOLS = {
    "ruff check": ["ruff", "check", "--quiet"],
    "ruff format": ["ruff", "format", "--check", "--quiet"],
    "mypy": ["mypy"],
    "import contracts": ["lint-imports"],
}


@pytest.mark.parametrize("tool", TOOLS)
def test_finds_nothing(tool: str, root: Path):
    name, *arguments = TOOLS[tool]
    command = [BIN / name, *arguments]
    run = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    if run.returncode:
        pytest.fail(f"{tool}:\n{run.stdout}{run.stderr}", pytrace=False)
