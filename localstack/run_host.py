#!/usr/bin/env python3
"""LocalStack, S3 only, without Docker, on 127.0.0.1.

usage: run_host.py up [--port 4566] [--buckets tier-cold] | status [--port 4566] | down

``up`` makes a virtual environment of its own in the state folder (.state beside this file, or
LOCALSTACK_STATE), installs the pinned packages into it, starts LocalStack, waits until the hooks in
init/ready.d have run, and prints the variables to export. Needs Python 3.11 and nothing else.

LocalStack checks no keys and keeps nothing when it ends: for trying things, not for trusting them.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
MODULE = "localstack.runtime.main"
STOP_TIMEOUT_S = 15.0


class State:
    """Files of one LocalStack: its environment, data, log and process id."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.python = folder / "venv" / "bin" / "python"
        self.root = folder / "root"
        self.log = folder / "log"
        self.pid_file = folder / "pid"

    def pid(self) -> int | None:
        """The process that runs, if it does and is LocalStack."""
        try:
            pid = int(self.pid_file.read_text())
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
        except (OSError, ValueError):
            return None
        return pid if MODULE.encode() in command else None


def install(state: State) -> None:
    """Make the virtual environment; done once, truncated when it fails."""
    if state.python.exists():
        return
    if sys.version_info[:2] != (3, 11):
        sys.exit(f"run_host.py: needs Python 3.11, this is {sys.version.split()[0]}")
    print("installing LocalStack, about half a minute ...", file=sys.stderr)
    venv = state.folder / "venv"
    pinned = HERE / "requirements-host.txt"
    pip: list[str | Path] = [state.python, "-m", "pip", "--disable-pip-version-check", "install"]
    try:
        subprocess.run([sys.executable, "-m", "venv", venv], check=True)
        subprocess.run([*pip, "--quiet", "--require-hashes", "--no-deps", "-r", pinned], check=True)
    except (subprocess.CalledProcessError, KeyboardInterrupt):
        shutil.rmtree(venv, ignore_errors=True)
        sys.exit("run_host.py: installing failed, see above")


def environment(state: State, port: int, buckets: str) -> dict[str, str]:
    """What LocalStack is told, besides what this process was told."""
    return os.environ | {
        "FILESYSTEM_ROOT": str(state.root),
        "OVERRIDE_IN_DOCKER": "0",  # else a container that runs this is taken for its own
        "GATEWAY_LISTEN": f"127.0.0.1:{port}",
        "GATEWAY_SERVER": "hypercorn",  # the default one listens on all addresses
        "SERVICES": "s3",
        "EAGER_SERVICE_LOADING": "1",
        "SKIP_SSL_CERT_DOWNLOAD": "1",
        "DISABLE_EVENTS": "1",
        "DNS_ADDRESS": "0",
        "LS_LOG": "warning",
        "TIER_BUCKETS": buckets,
        "TIER_S3_PORT": str(port),
    }


def start(state: State, port: int, buckets: str) -> subprocess.Popen[bytes]:
    """Start LocalStack in a session of its own, so that it outlives this command."""
    hooks = state.root / "etc" / "localstack" / "init"
    hooks.parent.mkdir(parents=True, exist_ok=True)
    hooks.unlink(missing_ok=True)
    hooks.symlink_to(HERE / "init")
    with state.log.open("wb") as log:
        process = subprocess.Popen(
            [state.python, "-m", MODULE],
            env=environment(state, port, buckets),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    state.pid_file.write_text(str(process.pid))
    return process


def ask(port: int, path: str) -> Any:  # noqa: ANN401 (JSON)
    """The JSON that LocalStack answers; OSError when it does not."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5) as answer:
        return json.load(answer)


def is_ready(port: int) -> bool:
    """Whether all hooks have run; ends the program when one of them failed."""
    try:
        init = ask(port, "/_localstack/init")
    except (OSError, ValueError):
        return False
    failed = [
        script for script in init["scripts"] if script["state"] not in {"SUCCESSFUL", "UNKNOWN"}
    ]
    if failed and init["completed"]["READY"]:
        sys.exit(f"run_host.py: a hook failed: {failed}")
    return bool(init["completed"]["READY"])


def up(state: State, port: int, buckets: str, timeout_s: float) -> None:
    """Install, start, wait, and print what to export."""
    state.folder.mkdir(parents=True, exist_ok=True)
    if state.pid() is not None:
        sys.exit(f"run_host.py: it runs already, as process {state.pid()}; `down` stops it")
    install(state)
    process = start(state, port, buckets)
    deadline = time.monotonic() + timeout_s
    while not is_ready(port):
        if process.poll() is not None:
            sys.exit(f"run_host.py: LocalStack ended with {process.returncode}, see {state.log}")
        if time.monotonic() > deadline:
            down(state)
            sys.exit(f"run_host.py: not ready after {timeout_s:.0f} s, see {state.log}")
        time.sleep(0.1)
    print(
        f"export AWS_ENDPOINT_URL_S3=http://127.0.0.1:{port} AWS_ACCESS_KEY_ID=test"
        " AWS_SECRET_ACCESS_KEY=test AWS_DEFAULT_REGION=us-east-1"
    )


def down(state: State) -> None:
    """Stop it, gently first."""
    pid = state.pid()
    if pid is None:
        print("run_host.py: it does not run", file=sys.stderr)
        return
    os.kill(pid, signal.SIGTERM)
    deadline = time.monotonic() + STOP_TIMEOUT_S
    while state.pid() is not None and time.monotonic() < deadline:
        time.sleep(0.1)
    if state.pid() is not None:
        os.kill(pid, signal.SIGKILL)
    state.pid_file.unlink(missing_ok=True)


def main() -> None:
    """Read the command line and do what it says."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", choices=["up", "status", "down"])
    parser.add_argument("--port", type=int, default=4566)
    parser.add_argument("--buckets", default="tier-cold", help="names with commas between")
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds to wait for `up`")
    given = parser.parse_args()
    state = State(Path(os.environ.get("LOCALSTACK_STATE", HERE / ".state")))
    if given.command == "up":
        up(state, given.port, given.buckets, given.timeout)
    elif given.command == "down":
        down(state)
    elif state.pid() is None:
        sys.exit("run_host.py: it does not run")
    else:
        print(json.dumps(ask(given.port, "/_localstack/health")["services"]["s3"]))


if __name__ == "__main__":
    main()
