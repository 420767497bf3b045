"""The contract over FsspecStore, as far as a file system can keep it."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import TYPE_CHECKING

import fsspec
import pytest
from support.unprivileged import reachable_folder, run_unprivileged

from backends.base import ByteRange, foreign_below
from backends.errors import (
    AlreadyExistsError,
    ConfigurationError,
    ObjectNotFoundError,
    PermissionDeniedError,
    UnknownOutcomeError,
    UnsupportedError,
)
from backends.fsspec_store import FsspecStore, open_fsspec
from backends.registry import open_store
from backends.testing.contract import ObjectStoreContract

if TYPE_CHECKING:
    from collections.abc import Iterator

    from support.servers import S3Server

    from backends.base import ObjectStore


class TestFsspecLocal(ObjectStoreContract):
    @pytest.fixture
    def store(self, tmp_path: Path) -> FsspecStore:
        return open_fsspec(f"file://{tmp_path}/not/yet", single_writer=True)


class TestFsspecMemory(ObjectStoreContract):
    @pytest.fixture
    def store(self) -> Iterator[FsspecStore]:
        yield open_fsspec("memory://some/where", single_writer=True)
        memory = fsspec.filesystem("memory")
        memory.store.clear()
        memory.pseudo_dirs[:] = [""]


class TestS3fs(ObjectStoreContract):
    """s3fs creates atomically, and says so."""

    @pytest.fixture
    def store(self, s3_environment: S3Server) -> Iterator[FsspecStore]:
        file_system = fsspec.filesystem(
            "s3",
            endpoint_url=s3_environment.endpoint_url,
            key=s3_environment.access_key,
            secret=s3_environment.secret_key,
            use_listings_cache=False,
            skip_instance_cache=True,
        )
        yield FsspecStore(file_system, f"{s3_environment.bucket()}/p")
        if file_system._s3 is not None:
            file_system.close_session(file_system.loop, file_system._s3)

    @pytest.mark.slow
    def test_lists_more_than_a_page(self, store: ObjectStore) -> None:
        super().test_lists_more_than_a_page(store)


def test_what_is_not_atomic_is_refused(tmp_path: Path):
    (tmp_path / "a").write_bytes(b"1")
    store = open_store(f"fsspec+file://{tmp_path}")
    assert (store.capabilities.put_if_absent, store.capabilities.compare_and_set) == (False, False)
    with pytest.raises(UnsupportedError, match="s3://"):
        store.put_if_absent("b", b"")
    with pytest.raises(UnsupportedError, match="s3://"):
        store.compare_and_set("b", b"", None)
    assert store.get("a") == b"1"
    assert [found.key for found in store.list("")] == ["a"]


class _LosesAnswers:
    """What FsspecStore takes for s3fs; each answer to a PUT is lost, or says 412."""

    protocol = "s3"

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}

    def pipe_file(self, path: str, body: bytes, mode: str) -> None:
        assert mode == "create"
        if path in self.objects:
            raise OSError(errno.EINVAL, "At least one of the pre-conditions did not hold")
        self.objects[path] = body
        raise TimeoutError("the answer did not come")

    def exists(self, path: str) -> bool:
        return path in self.objects


def test_a_create_whose_answer_was_lost_is_unknown_and_not_another_s(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(
        "backends.fsspec_store.CREATES_ATOMICALLY", {f"{__name__}.{_LosesAnswers.__qualname__}"}
    )
    store = FsspecStore(_LosesAnswers(), "bucket/p")
    with pytest.raises(UnknownOutcomeError):
        store.put_if_absent("a", b"ours")
    with pytest.raises(AlreadyExistsError):
        store.put_if_absent("a", b"ours")


def test_a_range_that_may_not_be_read_is_refused_and_not_cut():
    def refused() -> None:
        store = open_fsspec(f"file://{folder}")
        for byte_range in (None, ByteRange(0, 2)):
            with pytest.raises(PermissionDeniedError):
                store.get("a", byte_range)

    with reachable_folder() as folder:
        (folder / "a").write_bytes(b"abc")
        (folder / "a").chmod(0)
        run_unprivileged(refused)


def test_names_that_are_no_keys_are_left_out_and_noted(tmp_path: Path):
    for name in (b"a", b"line\nbreak", b"\xff\xfe"):
        Path(os.fsdecode(os.fsencode(tmp_path) + b"/" + name)).write_bytes(b"")
    store = open_store(f"fsspec+file://{tmp_path}")
    assert [found.key for found in store.list("")] == ["a"]
    assert foreign_below(store, "") == ["\\udcff\\udcfe", "line\\nbreak"]


def test_urls(tmp_path: Path):
    assert open_store(f"local://{tmp_path}").url == f"file://{tmp_path}"
    with pytest.raises(ConfigurationError, match="nonsense"):
        open_store("nonsense://a/b")
    with pytest.raises(ConfigurationError) as caught:
        open_store("nonsense://user:pass-word@host/b")
    assert "pass-word" not in str(caught.value)
    with pytest.raises(ObjectNotFoundError):
        open_store(f"fsspec+file://{tmp_path}").get("absent")
