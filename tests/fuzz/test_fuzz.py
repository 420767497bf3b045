"""A bounded run of the fuzzer: a seed corpus of real records, then what coverage leads it to."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from support import captures

HERE = Path(__file__).parent


# The fuzzer itself keeps 2.6 KiB of each run (the readers keep nothing), so a million is five processes.
@pytest.mark.parametrize(
    ("seed", "runs"),
    [(1, 20_000), *(pytest.param(seed, 200_000, marks=pytest.mark.slow) for seed in range(2, 7))],
)
@pytest.mark.timeout(900)
def test_no_bytes_crash_or_hang_a_reader(seed: int, runs: int, tmp_path: Path):
    pytest.importorskip("atheris", reason="atheris has wheels for Linux on x86-64 only")
    for name in ("s01-basic", "s04-batch-compress", "s09-big-offsets"):
        data = next(iter(captures.log_files(name).values()))
        for kind in (0, 1):
            (tmp_path / f"{name}-{kind}").write_bytes(bytes([kind]) + data[:4000])
    options = [
        f"-atheris_runs={runs}",
        f"-seed={seed}",
        "-timeout=20",
        "-max_len=8192",
        "-rss_limit_mb=2048",
    ]
    done = subprocess.run(
        [
            sys.executable,
            str(HERE / "fuzz_formats.py"),
            *options,
            f"-artifact_prefix={tmp_path}/crash-",
            str(tmp_path),
        ],
        capture_output=True,
        text=True,
        check=False,
        cwd=HERE.parent.parent,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
