"""Fixtures of tests of archives, which the conftest of their folder imports: sealed tiers, a session of Spark, a shop."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
from support import captures
from support.command_line import here
from support.servers import use_server
from support.shop import Shop, make

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from support.servers import S3Server


@dataclass(frozen=True)
class Sealed:
    """A captured store in a tier, every segment sealed.

    Attributes:
        name: Of the capture.
        url: Of the tier.
        dump: What Java found.
    """

    name: str
    url: str
    dump: captures.Dump


@pytest.fixture(scope="session")
def sealed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Sealed]:
    """The tier of a capture by its name; made once. Not to be changed."""
    folder = tmp_path_factory.mktemp("sealed")
    made: dict[str, Sealed] = {}

    def tier(name: str) -> Sealed:
        if name not in made:
            store, url = captures.unpack(name, folder), f"file://{folder}/{name}-tier"
            options = ("--to", url, "--once", "--seal")
            assert here("attach", store, *options).code in {0, 1}
            made[name] = Sealed(name, url, captures.captured(name))
        return made[name]

    return tier


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory, ministack: S3Server) -> Iterator[Any]:
    """Of Spark; its workers have the environment in which the JVM was started, so that knows the S3 server."""
    from tiered.spark import driver as spark

    conf = {
        "spark.driver.host": "127.0.0.1",
        "spark.local.dir": str(tmp_path_factory.mktemp("spark")),
        "spark.sql.warehouse.dir": str(tmp_path_factory.mktemp("warehouse")),
        "spark.driver.extraJavaOptions": "-XX:+UseSerialGC -XX:TieredStopAtLevel=1",
    }
    with pytest.MonkeyPatch.context() as monkeypatch, warnings.catch_warnings():
        use_server(ministack, monkeypatch)
        warnings.simplefilter("ignore")
        made = spark.open_session("local[2,3]", conf)
    yield made
    made.stop()


@pytest.fixture
def archive_url(tmp_path: Path) -> str:
    return f"file://{tmp_path}/parquet"


@pytest.fixture(scope="session")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Shop:
    """A day of a small shop, archived; made once. Not to be changed."""
    return make(tmp_path_factory.mktemp("shop"))
