"""URLs: what opens what, and what is refused with which words."""

from __future__ import annotations

import builtins
import sys
from typing import TYPE_CHECKING

import pytest

from backends import fsspec_store
from backends.errors import ConfigurationError, UnavailableError
from backends.local import LocalFolderStore
from backends.memory import MemoryStore
from backends.registry import open_store, redacted
from backends.s3 import S3Store
from backends.s3_settings import S3Options

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(
    ("url", "kind", "canonical"),
    [
        ("file:///tmp/a%20b", LocalFolderStore, "file:///tmp/a%20b"),
        ("file:///tmp/a b/", LocalFolderStore, "file:///tmp/a%20b"),
        ("FILE://localhost/tmp/a", LocalFolderStore, "file:///tmp/a"),
        ("file:/tmp/a", LocalFolderStore, "file:///tmp/a"),
        ("/tmp/a/", LocalFolderStore, "file:///tmp/a"),
        ("/tmp/a%20b c", LocalFolderStore, "file:///tmp/a%2520b%20c"),
        ("/tmp/x/../a", LocalFolderStore, "file:///tmp/a"),
        ("memory://", MemoryStore, "memory://"),
        ("memory://name/", MemoryStore, "memory://name"),
        ("s3://bucket", S3Store, "s3://bucket"),
        ("s3://bucket/a/b/", S3Store, "s3://bucket/a/b"),
        ("s3a://bucket/a", S3Store, "s3://bucket/a"),
    ],
)
def test_opens(url: str, kind: type, canonical: str):
    store = open_store(url)
    assert type(store) is kind
    assert store.url == canonical
    store.close()


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("", "not a URL"),
        ("tier", "not a URL"),
        ("file://tier", "file:///"),
        ("file://tier/x", "file:///"),
        ("file:tier", "file:///"),
        ("file://./tier", "file:///"),
        ("s3://", "no bucket"),
        ("s3:///prefix", "no bucket"),
        ("s3:bucket", "no //"),
        ("s3://bu", "bucket name"),
        ("s3://bad_bucket!/x", "bucket name"),
        ("s3://bucket//x", "prefix"),
        ("s3://bucket/a/../b", "prefix"),
        ("s3://bucket/x?versionId=1", "no \\? or #"),
        ("s3://key:secret-word@bucket/x", "no user, password"),
        ("memory:name", "no //"),
        ("gopher://host/x", r"nothing opens gopher://.*s3://.*install tieredmq\[s3\].*gcsfs"),
        ("fsspec+gopher://host/x", "nothing opens gopher://"),
        ("github://owner/x", "cannot open a URL of scheme 'github'"),
    ],
)
def test_refuses(url: str, words: str):
    with pytest.raises(ConfigurationError, match=words) as caught:
        open_store(url)
    assert "secret-word" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (S3Options(endpoint_url="localhost:9000"), "http://host"),
        (S3Options(endpoint_url="ftp://host"), "http://host"),
        (S3Options(endpoint_url="http://me:secret-word@host"), "no user, password"),
        (S3Options(timeout_s=0), "timeout"),
        (S3Options(headers={"X-Token\r\nHost": "x"}), "header"),
        (S3Options(headers={"X-Token": "secret-word\r\nHost: x"}), "X-Token"),
    ],
)
def test_refuses_options(options: S3Options, words: str):
    with pytest.raises(ConfigurationError, match=words) as caught:
        open_store("s3://bucket/x", options)
    assert "secret-word" not in str(caught.value)


def test_header_values_are_not_shown():
    assert "secret-word" not in repr(S3Options(headers={"X-Token": "secret-word"}))


def test_says_what_to_install(monkeypatch: pytest.MonkeyPatch):
    real = builtins.__import__

    def without_obstore(name: str, *args: object, **kwargs: object) -> object:
        if name.partition(".")[0] == "obstore":
            raise ModuleNotFoundError(name)
        return real(name, *args, **kwargs)  # type: ignore[arg-type]  # (passed through)

    monkeypatch.delitem(sys.modules, "backends.s3_obstore", raising=False)
    monkeypatch.setattr(builtins, "__import__", without_obstore)
    with pytest.raises(ConfigurationError, match=r"tieredmq\[s3\]"):
        open_store("s3://bucket/x")


def test_says_that_other_schemes_need_fsspec(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "fsspec", None)
    monkeypatch.delitem(sys.modules, "backends.fsspec_store", raising=False)
    with pytest.raises(ConfigurationError, match=r"gs:// needs fsspec: install tieredmq\[fsspec\]"):
        open_store("gs://bucket/x")


def test_a_file_system_that_cannot_be_had_says_why_in_one_line(monkeypatch: pytest.MonkeyPatch):
    def refuses(url: str, **_: object) -> None:
        raise OSError(f"no library for {url}\ntried here\nand there")

    monkeypatch.setattr(fsspec_store, "url_to_fs", refuses)
    with pytest.raises(UnavailableError, match=r"cannot open hdfs://: no library for hdfs://x$"):
        open_store("hdfs://x")


def test_folder_must_be_one(tmp_path: Path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ConfigurationError, match="not a folder"):
        open_store(f"file://{tmp_path}/file")


def test_redacted():
    assert redacted("x://u:p@host/path?token=1#y") == "x://***@host/path"
    assert redacted("s3://bucket/a@b") == "s3://bucket/a@b"
