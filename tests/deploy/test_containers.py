"""The image and the compose file, built and run: real servers in images made here, under the names of the official ones."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from support.containers import Containers
from support.environments import python_of
from support.monitoring import Monitor, page
from support.oracle import needs_java
from support.servers import S3Server, free_port, use_server
from support.waiting import until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from support.command_line import CommandLine

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1_200)]
DEPLOY = Path(__file__).parents[2] / "docs/deploy"
IMAGE = "tieredmq:latest"
NOBODY = 65_532
LOCKED = (
    "--read-only",
    "--tmpfs",
    "/tmp",
    "--cap-drop",
    "ALL",
    "--security-opt",
    "no-new-privileges",
)
ABSENT = "grafana"
"""Its image cannot be made here; test_board.py asks a real Prometheus what its board asks."""


@pytest.fixture(scope="module")
def containers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Containers]:
    made = Containers(tmp_path_factory.mktemp("containers"))
    try:
        assert made.base
        made.build(DEPLOY / "container/Containerfile", IMAGE)
        yield made
    finally:
        made.close()


def test_the_image_is_small_and_runs_as_nobody(containers: Containers):
    base, image = (
        json.loads(containers.podman("image", "inspect", name))[0]
        for name in (containers.base, IMAGE)
    )
    assert image["Config"]["User"] == f"{NOBODY}:{NOBODY}"
    assert image["Config"]["StopSignal"] in {"SIGTERM", "15"}
    assert image["Size"] - base["Size"] < 250_000_000
    assert containers.podman("run", "--rm", *LOCKED, IMAGE, "--version").startswith("tiered ")
    script = "import os; print(os.getuid(), os.access('/usr', os.W_OK), os.access('/tmp', os.W_OK))"
    words = ("run", "--rm", *LOCKED, "--entrypoint", "python", IMAGE, "-c", script)
    assert containers.podman(*words) == f"{NOBODY} False True"


def test_attach_in_a_container_tiers_into_a_folder(
    containers: Containers, basic: Path, tmp_path: Path, tiered: CommandLine
):
    tier, port = tmp_path / "tier", free_port()
    tier.mkdir()
    os.chown(tier, NOBODY, NOBODY)
    containers.podman(
        *("run", "--detach", "--name", "folder", *LOCKED, "--publish", f"127.0.0.1:{port}:9400"),
        *("--volume", f"{basic}:/store:ro", "--volume", f"{tier}:/tier", IMAGE),
        *("attach", "/store", "--to", "/tier", "--metrics-listen", ":9400"),
    )
    pages = f"http://127.0.0.1:{port}"
    until(lambda: "tiered_committed_messages_total 2613" in page(f"{pages}/metrics")[1])
    assert [page(f"{pages}/{name}")[0] for name in ("livez", "readyz", "healthz")] == [200] * 3
    containers.podman("stop", "--time", "30", "folder")
    assert containers.podman("inspect", "folder", "--format", "{{.State.ExitCode}}") == "0"
    assert "2,613 messages" in tiered.good("status", str(tier)).text
    assert tiered.good("verify", str(tier)).code == 0


class Composed:
    """The compose file without Grafana, its ports on free ones of this machine."""

    def __init__(self, containers: Containers, folder: Path) -> None:
        self._containers = containers
        shutil.copytree(DEPLOY, folder / "deploy")
        self._file = folder / "deploy/container/compose.yaml"
        described: dict[str, Any] = yaml.safe_load(self._file.read_text())
        del described["services"][ABSENT]
        self.services = described["services"]
        self.ports: dict[str, int] = {}
        for name, service in self.services.items():
            if "ports" in service:
                self.ports[name] = free_port()
                inside = service["ports"][0].rpartition(":")[2]
                service["ports"] = [f"127.0.0.1:{self.ports[name]}:{inside}"]
        self._file.write_text(yaml.safe_dump(described, sort_keys=False))

    def __call__(self, *words: str) -> str:
        program = python_of("compose").with_name("podman-compose")
        return self._containers.run(program, "-p", "tried", "-f", self._file, *words)

    def container(self, service: str) -> str:
        return f"tried_{service}_1"


@pytest.fixture
def composed(containers: Containers, tmp_path: Path, prometheus: Path) -> Iterator[Composed]:
    made = Composed(containers, tmp_path)
    containers.rocketmq(made.services["broker"]["image"])
    containers.minio(made.services["minio"]["image"])
    containers.prometheus(made.services["prometheus"]["image"], prometheus)
    try:
        made("up", "--detach")
        yield made
    finally:
        made("down", "--volumes")


@pytest.mark.java
@pytest.mark.go
@needs_java
def test_a_message_goes_through_all_that_the_compose_file_starts(
    composed: Composed,
    containers: Containers,
    tiered: CommandLine,
    monkeypatch: pytest.MonkeyPatch,
):
    send = ("sh", "mqadmin", "sendMessage", "-n", "namesrv:9876", "-t", "Tried", "-p", "hello")

    def sent() -> bool:
        words = ("podman", "exec", composed.container("broker"), *send)
        done = subprocess.run(
            words, env=containers.environment, capture_output=True, text=True, check=False
        )
        return "SEND_OK" in done.stdout

    until(sent, seconds_max=120)
    monitor = Monitor(composed.ports["prometheus"])
    until(lambda: monitor.series("tiered_committed_messages_total >= 1"), seconds_max=120)
    (target,) = monitor.data("targets")["activeTargets"]
    assert (target["labels"]["job"], target["health"]) == ("tiered", "up")
    loaded = monitor.data("rules")["groups"][0]["rules"]
    wanted = yaml.safe_load((DEPLOY / "prometheus/tiered-rules.yml").read_text())
    assert [one["name"] for one in loaded] == [one["alert"] for one in wanted["groups"][0]["rules"]]
    settings = composed.services["minio"]["environment"]
    at = f"http://127.0.0.1:{composed.ports['minio']}"
    use_server(
        S3Server("minio", at, settings["MINIO_ROOT_USER"], settings["MINIO_ROOT_PASSWORD"]),
        monkeypatch,
    )
    tiered.environment.update(os.environ)
    assert "hello" in tiered.good("cat", "s3://tier/demo", "Tried", "--format", "body").text
    attach = composed.container("attach")
    containers.podman("stop", "--time", "30", attach)
    assert containers.podman("inspect", attach, "--format", "{{.State.ExitCode}}") == "0"
