"""What tests of many folders ask for: S3 servers, started once per run, captured stores, a command line; and which begin."""

from __future__ import annotations

import gc
import os
import shutil
import signal
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings
from support.captures import unpack
from support.command_line import CommandLine
from support.servers import S3Server, missing, run_minio, run_ministack, run_moto, use_server

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

settings.register_profile("tiered", deadline=None)  # a loaded machine is not a failure
settings.register_profile("short", deadline=None, max_examples=40)  # of `make test`
settings.register_profile("quick", deadline=None, max_examples=10)  # of `make quick`
settings.load_profile("tiered")

_SECONDS = {"java": 20.0, "torture": 15.0, "simulation": 15.0, "spark": 10.0, "e2e": 1.0}
"""About what a test takes that has this marker, or lies in this directory; any other takes ``_SHORT_S``."""
_SHORT_S = 0.2
_STAYS = "TIERED_TESTS_STAY"
"""Set by the process that was told to ignore SIGHUP, for its workers."""


def pytest_configure() -> None:
    """Commands that tests start react to signals, even where we ourselves were told to ignore them.

    A script that runs us in the background has us ignore Ctrl-C, and ``nohup`` the loss of the terminal; what is ignored a
    child inherits, what has a handler starts in it as the system has it. So we go on ignoring SIGHUP by a handler that does
    nothing, in workers, too: they are children, and are told by a variable.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN or _STAYS in os.environ:
        os.environ[_STAYS] = "1"
        signal.signal(signal.SIGHUP, lambda _number, _frame: None)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the files that take longest, so that no processor waits for the last of them."""
    files: dict[Path, float] = {}
    for item in items:
        names = {marker.name for marker in item.iter_markers()} | {item.path.parent.name}
        takes_s = max((_SECONDS.get(name, _SHORT_S) for name in names), default=_SHORT_S)
        files[item.path] = files.get(item.path, 0.0) + takes_s
    items.sort(key=lambda item: -files[item.path])  # (a file's tests stay in their order)


def pytest_collection_finish() -> None:
    """The thousands of tests stay until the end, so the garbage collector need not go over them each time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def _nothing_left_open() -> Iterator[None]:
    """A socket or a file that a module's tests leave open fails them, not whoever runs when it is collected."""
    yield
    gc.collect()


@pytest.fixture(scope="session")
def ministack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with run_ministack(tmp_path_factory.mktemp("ministack")) as server:
        yield server


@pytest.fixture(scope="session")
def minio(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """Mark what uses it: ``pytest.mark.go``."""
    with run_minio(tmp_path_factory.mktemp("minio")) as server:
        yield server


@pytest.fixture(scope="session")
def moto() -> Iterator[S3Server]:
    with run_moto() as server:
        yield server


@pytest.fixture(params=["ministack", pytest.param("minio", marks=pytest.mark.go)])
def s3_server(request: pytest.FixtureRequest) -> S3Server:
    """Each server on which every S3 test runs."""
    server = request.getfixturevalue(request.param)
    assert isinstance(server, S3Server)
    return server


@pytest.fixture
def s3_environment(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> S3Server:
    """The server, found through the environment, and nothing of this machine's AWS settings."""
    use_server(s3_server, monkeypatch)
    return s3_server


@pytest.fixture
def moto_environment(moto: S3Server, monkeypatch: pytest.MonkeyPatch) -> S3Server:
    """moto, found through the environment."""
    use_server(moto, monkeypatch)
    return moto


@pytest.fixture(scope="session")
def promtool() -> Path:
    """Prometheus' own checker of metrics and rules."""
    return _of_prometheus("promtool")


@pytest.fixture(scope="session")
def prometheus() -> Path:
    """Prometheus itself."""
    return _of_prometheus("prometheus")


def _of_prometheus(name: str) -> Path:
    cached = Path(os.environ.get("PROMTOOL_HOME") or Path.home() / ".cache/tiered-promtool")
    found = shutil.which(name) or shutil.which(name, path=cached)
    return (
        Path(found)
        if found
        else missing(f"{name} is not installed; requirements/system.sh promtool fetches it")
    )


@pytest.fixture
def tiered(capfdbinary: pytest.CaptureFixture[bytes]) -> CommandLine:
    """A command line in this process."""
    return CommandLine(capfdbinary)


@pytest.fixture(scope="session")
def stores(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A captured store by its name. Not to be changed."""
    folder = tmp_path_factory.mktemp("captured")

    def store(name: str) -> Path:
        directory = folder / name
        return directory if directory.exists() else unpack(name, folder)

    return store


@pytest.fixture(scope="session")
def basic(stores: Callable[[str], Path]) -> Path:
    """A store of 2,613 messages in 25 queues, stopped cleanly. Not to be changed."""
    return stores("s01-basic")
