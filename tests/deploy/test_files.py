"""What docs/deploy ships is what systemd, Docker, Kubernetes and Prometheus take, and calls commands that exist."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.environments import python_of
from support.servers import missing

from tiered.cli import exits
from tiered.cli.frame import program
from tiered.errors import DataError, FencedError

DEPLOY = Path(__file__).parents[2] / "docs/deploy"
UNITS = sorted(DEPLOY.glob("systemd/*.service"))
COMPOSE: dict[str, Any] = yaml.safe_load((DEPLOY / "container/compose.yaml").read_text())
SIDECAR: dict[str, Any] = yaml.safe_load((DEPLOY / "kubernetes/sidecar.yaml").read_text())
IMAGE = re.compile(r"[a-z]+(/[a-z]+)?:[\w.-]+")


def check_call(words: list[str]) -> None:
    """A call of the program: the command and its options exist."""
    paths = dict(program().walk())
    name = next(name for name in (" ".join(words[:2]), words[0]) if name in paths)
    known = {option for one in paths[name].params for option in one.opts}
    assert {word for word in words if word.startswith("--")} <= known


def settings_of(unit: Path) -> dict[str, str]:
    lines = [line for line in unit.read_text().splitlines() if re.match(r"\w+=", line)]
    return dict(line.split("=", 1) for line in lines)


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_systemd_takes_each_unit(unit: Path, tmp_path: Path):
    if not (analyze := shutil.which("systemd-analyze")):
        missing("systemd-analyze is not installed")
    copy = tmp_path / unit.name.replace("@", "@a")
    copy.write_text(unit.read_text().replace("/opt/tiered/bin/tiered", sys.executable))
    ran = subprocess.run(
        [analyze, "verify", "--man=no", copy], capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr
    assert str(copy) not in ran.stderr  # lines about it are warnings
    copy.write_text(copy.read_text().replace("ProtectSystem=strict", "ProtectSystem=yess"))
    ran = subprocess.run(
        [analyze, "verify", "--man=no", copy], capture_output=True, text=True, check=False
    )
    assert "protect system" in ran.stderr  # it looks


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_each_unit_is_bounded_and_calls_what_exists(unit: Path):
    said = settings_of(unit)
    assert {"MemoryMax", "TasksMax", "LimitNOFILE", "TimeoutStopSec"} <= set(said)
    assert (said["NoNewPrivileges"], said["ProtectSystem"]) == ("yes", "strict")
    assert said["Restart"] == "on-failure"
    codes = {exits.NEEDS_A_PERSON, exits.USAGE, FencedError.exit_code, DataError.exit_code}
    assert {int(code) for code in said["RestartPreventExitStatus"].split()} == codes
    assert exits.UNREACHABLE not in codes
    program_path, *words = shlex.split(said["ExecStart"])
    assert program_path.endswith("/tiered")
    check_call(words)
    example = unit.parent / f"{unit.stem.removesuffix('@')}.env"
    given = {line.split("=")[0] for line in example.read_text().splitlines() if line[:1] != "#"}
    assert set(re.findall(r"\$\{(\w+)\}", said["ExecStart"])) - {"CACHE_DIRECTORY"} <= given


def test_compose_is_whole():
    services = COMPOSE["services"]
    assert {"broker", "namesrv", "minio", "attach", "prometheus", "grafana"} <= set(services)
    for service in services.values():
        assert IMAGE.fullmatch(service["image"])
        assert set(service.get("depends_on", ())) <= set(services)
        for volume in service.get("volumes", ()):
            source = volume.split(":")[0]
            is_file = source.startswith(".")
            assert (
                (DEPLOY / "container" / source).is_file()
                if is_file
                else source in COMPOSE["volumes"]
            )
        for port in service.get("ports", ()):
            assert port.startswith("127.0.0.1:")
    check_call(services["attach"]["command"])
    assert "store:/store:ro" in services["attach"]["volumes"]
    scrapes = yaml.safe_load((DEPLOY / "prometheus/prometheus.yml").read_text())["scrape_configs"]
    assert scrapes[0]["static_configs"][0]["targets"] == ["attach:9400"]
    assert ":9400" in services["attach"]["command"]


def test_docker_takes_the_compose_file():
    docker = shutil.which("docker")
    asked = docker and subprocess.run(
        [docker, "compose", "version"], capture_output=True, check=False
    )
    if not docker or not asked or asked.returncode:
        pytest.skip("LEFT OUT: docker compose is not installed")
    ran = subprocess.run(
        [docker, "compose", "-f", DEPLOY / "container/compose.yaml", "config", "--quiet"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr


def test_probes_of_the_sidecar_are_those_that_an_outage_does_not_fail():
    pod = SIDECAR["spec"]["template"]
    assert pod["metadata"]["labels"] == SIDECAR["spec"]["selector"]["matchLabels"]
    spec = pod["spec"]
    volumes = {one["name"] for one in spec["volumes"]}
    volumes |= {one["metadata"]["name"] for one in SIDECAR["spec"]["volumeClaimTemplates"]}
    for container in spec["containers"]:
        assert IMAGE.fullmatch(container["image"])
        assert {one["name"] for one in container["volumeMounts"]} <= volumes
    sidecar = spec["containers"][1]
    check_call(sidecar["args"])
    probes = {name: sidecar[name]["httpGet"] for name in sidecar if name.endswith("Probe")}
    assert {name: one["path"] for name, one in probes.items()} == {
        "startupProbe": "/livez",
        "livenessProbe": "/livez",
        "readinessProbe": "/readyz",
    }
    (port,) = sidecar["ports"]
    assert {one["port"] for one in probes.values()} == {port["name"]}
    assert f":{port['containerPort']}" in sidecar["args"]
    store = next(one for one in sidecar["volumeMounts"] if one["name"] == "store")
    assert store["readOnly"] is True


@pytest.mark.slow
def test_kubernetes_takes_the_manifest(tmp_path: Path):
    """By the API's own schemas, which know every field, of a version that is old by now and of a new one."""
    validate = python_of("kubernetes").with_name("kubernetes-validate")
    manifest = (DEPLOY / "kubernetes/sidecar.yaml").read_text()
    for text, code in ((manifest, 0), (manifest.replace("failureThreshold", "failuresMax"), 1)):
        (tmp_path / "sidecar.yaml").write_text(text)
        for version in ("1.28", "1.37"):
            ran = subprocess.run(
                [validate, "--strict", "-k", version, tmp_path / "sidecar.yaml"],
                capture_output=True, text=True, check=False,
            )  # fmt: skip
            assert ran.returncode == code, ran.stdout + ran.stderr


def test_the_image_runs_as_nobody_with_what_it_needs():
    text = (DEPLOY / "container/Containerfile").read_text()
    said = dict(re.findall(r"^([A-Z]+) (.+)$", text, re.MULTILINE))
    assert IMAGE.fullmatch(said["ARG"].removeprefix("BASE="))
    assert int(said["USER"].split(":")[0]) > 0
    assert said["ENTRYPOINT"] == '["tiered"]'
    assert "[s3,metrics]" in text


def test_prometheus_takes_its_configuration(promtool: Path):
    ran = subprocess.run(
        [promtool, "check", "config", DEPLOY / "prometheus/prometheus.yml"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
