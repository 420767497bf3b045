"""The contract on LocalStack without Docker, installed from its pins: slow, and run last."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from support.servers import S3Server, run_localstack

from backends.base import Capabilities, ObjectStore
from backends.registry import open_store, probe
from backends.testing.contract import ObjectStoreContract

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def localstack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with run_localstack(tmp_path_factory.mktemp("localstack")) as server:
        yield server


@pytest.fixture
def environment(localstack: S3Server, monkeypatch: pytest.MonkeyPatch) -> S3Server:
    for name, value in localstack.environment.items():
        monkeypatch.setenv(name, value)
    return localstack


class TestS3StoreOnLocalStack(ObjectStoreContract):
    is_atomic = False

    @pytest.fixture
    def store(self, environment: S3Server) -> Iterator[ObjectStore]:
        made = open_store(f"s3://{environment.bucket()}/p")
        yield made
        made.close()


def test_hooks_made_the_buckets(environment: S3Server):
    for bucket in ("tier-one", "tier-two"):
        store = open_store(f"s3://{bucket}/p")
        assert probe(store, "0a1b") == Capabilities(put_if_absent=True, compare_and_set=True)
        store.close()
