"""A real Prometheus in a process of its own, which scrapes what a test runs; and what it answers."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import yaml
from support.servers import free_port, run_server

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path


def page(url: str) -> tuple[int, str]:
    """Status and text; 0 while nobody answers."""
    try:
        with urllib.request.urlopen(url, timeout=30) as answer:
            return int(answer.status), answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()
    except OSError:
        return 0, ""


class Monitor:
    """Prometheus at a port of this machine."""

    def __init__(self, port: int) -> None:
        self._at = f"http://127.0.0.1:{port}/api/v1"

    def data(self, path: str) -> Any:
        """``data`` of an answer of its API; empty while it does not answer."""
        status, text = page(f"{self._at}/{path}")
        assert status in {0, 200, 503}, text
        return json.loads(text)["data"] if status == 200 else {}

    def series(self, expression: str) -> list[tuple[dict[str, str], float]]:
        """Labels and value of what an expression finds now."""
        found = self.data(f"query?query={quote(expression)}").get("result", [])
        return [(one["metric"], float(one["value"][1])) for one in found]


@contextmanager
def run_prometheus(program: Path, folder: Path, ports: Sequence[int]) -> Iterator[Monitor]:
    """Scrape these ports each second, as the job ``tiered``, until the block ends."""
    targets = [f"127.0.0.1:{port}" for port in ports]
    (folder / "prometheus.yml").write_text(
        yaml.safe_dump(
            {
                "global": {"scrape_interval": "1s"},
                "scrape_configs": [
                    {"job_name": "tiered", "static_configs": [{"targets": targets}]}
                ],
            }
        )
    )
    port = free_port()
    command = (
        *(str(program), f"--config.file={folder}/prometheus.yml"),
        *(f"--storage.tsdb.path={folder}/prometheus", f"--web.listen-address=127.0.0.1:{port}"),
    )
    with run_server(command, {}, port, folder / "prometheus.log"):
        yield Monitor(port)
