"""Programs that a test needs in another version, or beside what this project needs: each in an environment of its own."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path

from support.servers import missing

ROOT = Path(__file__).resolve().parents[2]


def fetched(what: str, *command: str | Path) -> None:
    """Run what brings something here; the test is left out where it cannot be had."""
    try:
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=900)
    except (OSError, subprocess.TimeoutExpired) as error:
        missing(f"{what} cannot be had: {error}")
    if done.returncode:
        missing(f"{what} cannot be had: {' '.join(done.stderr.split())[-300:]}")


def python_of(name: str) -> Path:
    """An interpreter whose packages are those of ``requirements/<name>.txt``, made once."""
    wanted = ROOT / "requirements" / f"{name}.txt"
    pins = [line for line in wanted.read_text("utf-8").splitlines() if line[:1] != "#"]
    home = ROOT / ".tools" / name / hashlib.sha256("\n".join(pins).encode()).hexdigest()[:16]
    python = home / "bin" / "python"
    if not (home / "installed").exists():
        fetched(f"an environment for {name}", sys.executable, "-m", "venv", "--clear", home)
        pip = (python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
        fetched(f"{wanted.name}, of the package index,", *pip, "--require-hashes", "-r", wanted)
        (home / "installed").touch()
    return python
