"""What `support.untouched` says is so: whatever a process does to a folder but read it is seen."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from support.untouched import Watch, entries

if TYPE_CHECKING:
    from pathlib import Path

READ = (
    "open(f).read(); os.listdir(d); os.stat(f); fcntl.fcntl(os.open(f, os.O_RDONLY), fcntl.F_GETFL)"
)
ACTS = {
    "open(f, 'r+')": "open",
    "os.open(f, os.O_RDWR)": "open",
    "fcntl.flock(os.open(f, os.O_RDONLY), fcntl.LOCK_SH)": "fcntl.flock",
    "fcntl.lockf(os.open(f, os.O_RDONLY), fcntl.LOCK_SH)": "fcntl.lockf",
    "os.rename(f, f + '2')": "os.rename",
    "os.utime(f)": "os.utime",
    "os.mkdir(d + '/new')": "os.mkdir",
}


def run(code: str, folder: Path) -> None:
    words = f"import fcntl, os; d = {str(folder)!r}; f = d + '/file'; {code}"
    subprocess.run([sys.executable, "-W", "ignore", "-c", words], check=True, timeout=60)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    found = tmp_path / "watched"
    found.mkdir()
    (found / "file").write_text("text")
    return found


@pytest.mark.parametrize("code", ACTS)
def test_an_act_is_seen(code: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    watch = Watch(folder, folder.parent / "acts", monkeypatch)
    run(code, folder)
    processes, acts = watch.acts()
    assert (processes, {act.split()[0] for act in acts}) == (1, {ACTS[code]})


def test_reading_and_acts_elsewhere_are_none(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    watch, was = Watch(folder, folder.parent / "acts", monkeypatch), entries(folder)
    run(READ + "; open(d + '-2', 'w')", folder)
    assert watch.acts() == (1, [])
    assert entries(folder) == was


@pytest.mark.parametrize(
    "code", ["os.utime(f, (0, 0))", "os.chmod(f, 0o600)", "open(f, 'a').write('x')"]
)
def test_entries_tell_of_a_change(code: str, folder: Path) -> None:
    was = entries(folder)
    run(code, folder)
    assert entries(folder) != was
