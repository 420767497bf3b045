"""A tier's place on each kind of store."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from support.servers import use_server
from support.victims import url_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


@pytest.fixture(
    params=[
        "folder",
        pytest.param("ministack", marks=pytest.mark.slow),
        pytest.param("minio", marks=[pytest.mark.slow, pytest.mark.go]),
    ]
)
def new_url(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Callable[[Path], str]:
    """Makes the URL of a new tier; on a folder in every run of the tests, on servers in `make torture`."""
    kind = request.param
    server = None if kind == "folder" else request.getfixturevalue(kind)
    if server is not None:
        use_server(server, monkeypatch)
    return lambda folder: url_of(kind, server, folder)
