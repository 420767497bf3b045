"""The contract over LocalFolderStore, and what only it does."""

from __future__ import annotations

import errno
import multiprocessing
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from support.unprivileged import reachable_folder, run_unprivileged

from backends import local_files
from backends.base import ByteRange, foreign_below
from backends.errors import (
    AlreadyExistsError,
    BackendError,
    ConfigurationError,
    InvalidKeyError,
    ObjectNotFoundError,
    PermissionDeniedError,
    PreconditionFailedError,
    StoreFullError,
    UnavailableError,
    UnknownOutcomeError,
)
from backends.local import HIDDEN, LocalFolderStore
from backends.testing.contract import ObjectStoreContract

if TYPE_CHECKING:
    from collections.abc import Callable


def names(folder: Path) -> list[str]:
    return sorted(found.name for found in folder.iterdir())


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.fixture
def store(tmp_path: Path):
    made = LocalFolderStore(tmp_path / "not" / "yet")
    yield made
    made.close()


class TestLocalFolderStore(ObjectStoreContract):
    @pytest.fixture
    def store(self, tmp_path: Path):
        made = LocalFolderStore(tmp_path / "not" / "yet")
        yield made
        made.close()


class TestLocalFolderStoreWithNamedFiles(ObjectStoreContract):
    """As on a file system without O_TMPFILE."""

    @pytest.fixture
    def store(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr(local_files, "_TMPFILE", 0)
        made = LocalFolderStore(tmp_path)
        yield made
        assert names(tmp_path / HIDDEN) in ([], ["lock"]) if (tmp_path / HIDDEN).exists() else 1
        made.close()


@pytest.mark.parametrize(("first", "second"), [("x", "x/y"), ("x/y", "x"), ("x", "x/y/z")])
def test_no_key_is_the_folder_of_another(store: LocalFolderStore, first: str, second: str):
    store.put_if_absent(first, b"")
    with pytest.raises(InvalidKeyError):
        store.put_if_absent(second, b"")
    with pytest.raises(InvalidKeyError):
        store.compare_and_set(second, b"", None)
    store.put_if_absent(first + "-y", b"")


def test_hidden_folder_is_no_place_for_keys(store: LocalFolderStore):
    store.compare_and_set("lease", b"", None)
    for key in (HIDDEN, f"{HIDDEN}/lock"):
        with pytest.raises(InvalidKeyError):
            store.put_if_absent(key, b"")
        with pytest.raises(InvalidKeyError):
            store.get(key)
    for prefix in ("", ".", HIDDEN, HIDDEN + "/", HIDDEN + "/l"):
        assert HIDDEN not in str(list(store.list(prefix)))
    store.put_if_absent(HIDDEN + "x", b"")
    assert [found.key for found in store.list(HIDDEN)] == [HIDDEN + "x"]


def test_foreign_things_in_the_folder_are_no_objects(store: LocalFolderStore, tmp_path: Path):
    root = tmp_path / "not" / "yet"
    store.put_if_absent("a", b"")
    (root / "link").symlink_to(root / "a")
    (root / "folder").mkdir()
    os.mkfifo(root / "fifo")
    Path(os.fsdecode(os.fsencode(root) + b"/\xff\xfe")).write_bytes(b"")
    (root / "line\nbreak").write_bytes(b"")
    (root / "lost+found").mkdir(mode=0)
    (root / "lost+found" / "#1").write_bytes(b"")
    assert [found.key for found in store.list("")] == ["a"]
    assert foreign_below(store, "") == ["\\xff\\xfe", "fifo", "line\\nbreak", "link"]
    assert foreign_below(store, "l") == ["line\\nbreak", "link"]
    with pytest.raises(InvalidKeyError):
        store.put_if_absent("lost+found/x", b"")
    for key in ("folder", "fifo"):
        with pytest.raises(ObjectNotFoundError):
            store.get(key)


def test_opening_and_reading_make_nothing(store: LocalFolderStore, tmp_path: Path):
    assert list(store.list("")) == []
    store.delete("a/b")
    with pytest.raises(ObjectNotFoundError):
        store.get("a")
    assert names(tmp_path) == []


def test_root_must_be_an_absolute_folder(tmp_path: Path):
    (tmp_path / "file").write_bytes(b"")
    for root in ("relative", tmp_path / "file"):
        with pytest.raises(ConfigurationError):
            LocalFolderStore(root)


def test_deleting_the_last_key_of_a_folder_removes_it(store: LocalFolderStore, tmp_path: Path):
    store.put_if_absent("a/b/c/d", b"")
    store.put_if_absent("a/x", b"")
    store.delete("a/b/c/d")
    assert names(tmp_path / "not" / "yet" / "a") == ["x"]


def test_put_survives_that_another_process_removes_its_folder(
    store: LocalFolderStore, tmp_path: Path
):
    other = LocalFolderStore(tmp_path / "not" / "yet")
    for turn in range(5):
        store.put_if_absent(f"a/b/{turn}", b"")
        other.delete(f"a/b/{turn}")
    store.put_if_absent("a/b/c", b"1")
    assert other.get("a/b/c") == b"1"
    other.close()


def test_every_new_name_is_forced_to_disk_after_its_bytes(
    store: LocalFolderStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """What is fsynced, in order: bytes, then each folder that got a name, upwards; once when it is known."""
    synced: list[str] = []
    real = os.fsync

    def fsync(fd: int) -> None:
        path = Path(f"/proc/self/fd/{fd}").readlink()
        is_folder = stat.S_ISDIR(os.fstat(fd).st_mode)
        name = os.path.relpath(path, tmp_path) if is_folder else "bytes"
        synced.extend([] if name.startswith("..") else [name])
        real(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    store.put_if_absent("a/b/c", b"1")
    assert synced == [".", "not", "bytes", "not/yet/a/b", "not/yet/a", "not/yet"]
    synced.clear()
    store.put_if_absent("a/b/d", b"1")
    assert synced == ["bytes", "not/yet/a/b"]
    synced.clear()
    version = store.compare_and_set("a/e", b"1", None)
    assert synced == ["not/yet", "bytes", "not/yet/a"]
    synced.clear()
    store.compare_and_set("a/e", b"2", version)
    assert synced == ["bytes", "not/yet/a"]
    synced.clear()
    with pytest.raises(AlreadyExistsError):
        store.put_if_absent("a/e", b"3")
    assert synced == ["bytes", "not/yet/a"]  # whoever is told that it exists may rely on it


def test_what_fails_for_one_object_does_not_for_the_next(
    store: LocalFolderStore, monkeypatch: pytest.MonkeyPatch
):
    store.put_if_absent("taken", b"old")
    wanted = ["a/1", "taken", "taken/below", "//", "b/full", "b/2", "c/lost", "c/lost too"]
    real_write, real_sync = os.writev, os.fsync
    monkeypatch.setattr(
        os,
        "writev",
        lambda fd, views: _refuse(errno.ENOSPC, real_write, views[0] == b"full", fd, views),
    )
    monkeypatch.setattr(
        os, "fsync", lambda fd: _refuse(errno.EIO, real_sync, _path(fd).endswith("/c"), fd)
    )
    errors = [_put(store, key, key.rpartition("/")[2].encode()) for key in wanted]
    kinds = [type(error) for error in errors]
    assert kinds == [
        type(None),
        AlreadyExistsError,
        InvalidKeyError,
        InvalidKeyError,
        StoreFullError,
        type(None),
        UnknownOutcomeError,
        UnknownOutcomeError,
    ]
    assert all(key in str(error) for key, error in zip(wanted, errors, strict=True) if error)
    assert [found.key for found in store.list("")] == [
        "a/1",
        "b/2",
        "c/lost",
        "c/lost too",
        "taken",
    ]


def _put(store: LocalFolderStore, key: str, data: bytes) -> BackendError | None:
    try:
        store.put_if_absent(key, data)
    except BackendError as error:
        return error
    return None


def _path(fd: int) -> str:
    return str(Path(f"/proc/self/fd/{fd}").readlink())


def _refuse(code: int, real: Callable[..., object], refused: bool, *args: object) -> object:
    if refused:
        raise OSError(code, os.strerror(code))
    return real(*args)


def test_names_above_that_could_not_be_forced_are_forced_next_time(
    store: LocalFolderStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    store.put_if_absent("first", b"")
    real = os.fsync
    with monkeypatch.context() as patch:
        patch.setattr(
            os, "fsync", lambda fd: _refuse(errno.EIO, real, _path(fd).endswith("/yet"), fd)
        )
        with pytest.raises(UnknownOutcomeError):
            store.put_if_absent("a/b/1", b"")
    synced: list[str] = []
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append(os.path.relpath(_path(fd), tmp_path)))
    store.put_if_absent("a/b/2", b"")
    assert synced[1:] == ["not/yet/a/b", "not/yet/a", "not/yet"]


def test_of_the_known_folders_those_used_last_stay_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("backends.local_files.FOLDERS_KNOWN_MAX", 4)
    store = LocalFolderStore(tmp_path)
    before = open_files()
    for turn in range(2):
        for folder in range(20):
            store.put_if_absent(f"{folder}/{turn}", b"")
    assert open_files() <= before + 4
    synced = []
    monkeypatch.setattr(os, "fsync", synced.append)
    store.put_if_absent("19/2", b"")
    assert len(synced) == 2  # the bytes and the folder; not what holds the folder
    synced.clear()
    store.put_if_absent("0/2", b"")
    assert len(synced) > 2
    store.close()
    assert open_files() == before


def test_a_folder_made_anew_is_forced_upwards_though_it_has_the_old_one_s_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("backends.local_files.FOLDERS_KNOWN_MAX", 4)
    store, other = LocalFolderStore(tmp_path), LocalFolderStore(tmp_path)
    for turn in range(40):
        store.put_if_absent(f"a{turn}/b", b"")
        for folder in range(5):  # the descriptor of the first one goes
            store.put_if_absent(f"{folder}/{turn}", b"")
        other.delete(f"a{turn}/b")
        other.put_if_absent(f"a{turn}/c", b"")
        synced: list[str] = []
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", lambda fd: synced.append(_path(fd)))  # noqa: B023 (called at once)
            store.put_if_absent(f"a{turn}/d", b"")
        assert str(tmp_path) in synced, turn
    store.close()
    other.close()


@pytest.mark.parametrize(
    ("number", "kind"),
    [
        ("ENOSPC", StoreFullError),
        ("EDQUOT", StoreFullError),
        ("EACCES", PermissionDeniedError),
        ("EROFS", PermissionDeniedError),
        ("EIO", UnavailableError),
        ("EMFILE", UnavailableError),
    ],
)
def test_system_errors_before_the_name_is_there_wrote_nothing(
    store: LocalFolderStore, monkeypatch: pytest.MonkeyPatch, number: str, kind: type[BackendError]
):
    store.put_if_absent("first", b"")
    code = getattr(errno, number)

    def fail(*args: object) -> None:
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr(os, "writev", fail)
        with pytest.raises(kind) as caught:
            store.put_if_absent("second", b"1")
        assert not isinstance(caught.value, UnknownOutcomeError)
        assert "second" in str(caught.value)
    assert [found.key for found in store.list("")] == ["first"]


def test_unknown_when_the_name_may_not_be_on_disk(
    store: LocalFolderStore, monkeypatch: pytest.MonkeyPatch
):
    store.put_if_absent("first", b"")
    calls = []

    def fail_second(fd: int) -> None:
        calls.append(fd)
        if len(calls) == 2:
            raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail_second)
        with pytest.raises(UnknownOutcomeError):
            store.put_if_absent("second", b"1")
    assert store.get("second") == b"1"


@pytest.mark.parametrize("unnamed", [True, False])
def test_unknown_when_the_answer_to_a_name_was_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, unnamed: bool
):
    """A file system over a network says EIO when its server does not answer, which may have done it."""
    if not unnamed:
        monkeypatch.setattr(local_files, "_TMPFILE", 0)
    store = LocalFolderStore(tmp_path)
    version = store.compare_and_set("first", b"1", None)
    link, rename = os.link, os.rename

    def lost(call: Callable[..., None]) -> Callable[..., None]:
        def calls(*args: Any, **more: Any) -> None:
            call(*args, **more)
            raise OSError(errno.EIO, "Input/output error")

        return calls

    with monkeypatch.context() as patch:
        patch.setattr(os, "link", lost(link))
        patch.setattr(os, "rename", lost(rename))
        with pytest.raises(UnknownOutcomeError):
            store.put_if_absent("second", b"2")
        with pytest.raises(UnknownOutcomeError):
            store.compare_and_set("first", b"2", version)
    assert (store.get("first"), store.get("second")) == (b"2", b"2")
    store.close()


def test_short_writes_are_continued(store: LocalFolderStore, monkeypatch: pytest.MonkeyPatch):
    real = os.writev
    monkeypatch.setattr(os, "writev", lambda fd, views: real(fd, [memoryview(views[0])[:3]]))
    store.put_if_absent("a", [b"0123456789", b"", b"ab", b"cdef"])
    assert store.get("a") == b"0123456789abcdef"


def test_short_reads_are_continued(store: LocalFolderStore, monkeypatch: pytest.MonkeyPatch):
    store.put_if_absent("a", b"0123456789")
    real = os.pread
    monkeypatch.setattr(os, "pread", lambda fd, size, at: real(fd, min(size, 3), at))
    assert store.get("a") == b"0123456789"
    assert store.get("a", ByteRange(1, 9)) == b"12345678"


def test_read_only_folder():
    def refused() -> None:
        store = LocalFolderStore(folder)
        assert [found.key for found in store.list("")] == ["there"]
        with pytest.raises(PermissionDeniedError):
            store.put_if_absent("a", b"")
        store.close()

    with reachable_folder() as folder:
        owner = LocalFolderStore(folder)
        owner.put_if_absent("there", b"")
        owner.close()
        folder.chmod(0o555)
        (folder / "there").chmod(0o444)
        try:
            run_unprivileged(refused)
            assert "a" not in names(folder)
        finally:
            folder.chmod(0o755)


def test_what_may_not_be_looked_at_is_not_told_to_be_deleted():
    def refused() -> None:
        store = LocalFolderStore(folder)
        with pytest.raises(PermissionDeniedError):
            store.delete("closed/there")
        store.delete("open/not there")
        store.delete("open/there/below")
        store.close()

    with reachable_folder() as folder:
        owner = LocalFolderStore(folder)
        owner.put_if_absent("closed/there", b"")
        owner.put_if_absent("open/there", b"")
        (folder / "closed").chmod(0o444)
        try:
            run_unprivileged(refused)
        finally:
            (folder / "closed").chmod(0o755)
        assert owner.get("closed/there") == b""
        owner.close()


@pytest.mark.parametrize("unnamed", [True, False])
def test_the_hidden_folder_may_be_removed_by_who_cleans_up(tmp_path: Path, unnamed: bool):
    store = LocalFolderStore(tmp_path)
    store._writer._unnamed &= unnamed
    version = store.compare_and_set("lease", b"1", None)
    for turn in range(2):
        shutil.rmtree(tmp_path / HIDDEN)
        version = store.compare_and_set("lease", b"%d" % turn, version)
        shutil.rmtree(tmp_path / HIDDEN)
        store.put_if_absent(f"a{turn}/b", b"x")
        shutil.rmtree(tmp_path / HIDDEN, ignore_errors=True)
        store.delete(f"a{turn}/b")
    assert [found.key for found in store.list("")] == ["lease"]
    store.close()


def test_waiting_for_the_lock_has_a_deadline(store: LocalFolderStore, tmp_path: Path):
    other = LocalFolderStore(tmp_path / "not" / "yet", timeout_s=0.05)
    with store._locked(), pytest.raises(UnavailableError):
        other.compare_and_set("a", b"", None)
    other.compare_and_set("a", b"", None)
    other.close()


def test_what_a_crash_left_is_removed_after_a_day(store: LocalFolderStore, tmp_path: Path):
    hidden = tmp_path / "not" / "yet" / HIDDEN
    hidden.mkdir(parents=True)
    now_s = hidden.stat().st_mtime
    for name, age_s in (("new-old", 90_000), ("new-young", 3600), ("lock", 90_000)):
        (hidden / name).write_bytes(b"")
        os.utime(hidden / name, (now_s - age_s, now_s - age_s))
    version = store.compare_and_set("a", b"1", None)
    store.compare_and_set("a", b"2", version)
    assert names(hidden) == ["lock", "new-young"]


def test_a_link_that_met_itself(store: LocalFolderStore, monkeypatch: pytest.MonkeyPatch):
    """As on NFS, when the answer to a link is lost and it is asked for again."""
    real = os.link

    def link_twice(*args: object, **kwargs: object) -> None:
        real(*args, **kwargs)  # type: ignore[arg-type]  # (passed through)
        real(*args, **kwargs)  # type: ignore[arg-type]  # (passed through)

    store._writer._unnamed = False
    with monkeypatch.context() as patch:
        patch.setattr(os, "link", link_twice)
        store.put_if_absent("a", b"1")
    with pytest.raises(AlreadyExistsError):
        store.put_if_absent("a", b"2")
    assert store.get("a") == b"1"


def test_url_is_canonical(tmp_path: Path):
    assert LocalFolderStore(tmp_path / "a b%c").url == f"file://{tmp_path}/a%20b%25c"


def _count(root: Path, times: int, results: multiprocessing.Queue[int]) -> None:
    store = LocalFolderStore(root)
    done = made = 0
    while done < times:
        value, version = store.get_versioned("counter")
        try:
            store.compare_and_set("counter", b"%d" % (int(value) + 1), version)
        except PreconditionFailedError:
            continue
        done += 1
        try:
            store.put_if_absent(f"made/{done}", b"%d" % os.getpid())
            made += 1
        except AlreadyExistsError:
            pass
    store.close()
    results.put(made)


def test_atomic_among_processes(tmp_path: Path):
    store = LocalFolderStore(tmp_path)
    store.compare_and_set("counter", b"0", None)
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    workers = [context.Process(target=_count, args=(tmp_path, 50, results)) for _ in range(3)]
    for worker in workers:
        worker.start()
    made = sum(results.get(timeout=60) for _ in workers)
    for worker in workers:
        worker.join(60)
    assert store.get("counter") == b"150"
    assert made == 50
    store.close()
    results.close()


def test_a_stopped_process_that_holds_the_lock_is_named_and_blocks_neither_readers_nor_creators(
    tmp_path: Path,
):
    store = LocalFolderStore(tmp_path, timeout_s=0.2)
    version = store.compare_and_set("lease", b"1", None)
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "holds\n"
        os.kill(holder.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, holder.pid, os.WSTOPPED | os.WNOWAIT)
        for change in (
            lambda: store.compare_and_set("lease", b"2", version),
            lambda: store.delete("lease"),
        ):
            with pytest.raises(UnavailableError) as caught:
                change()
            assert f"process {holder.pid} on {socket.gethostname()}, which is stopped," in str(
                caught.value
            )
            assert f"kill -CONT {holder.pid}" in caught.value.do
        store.put_if_absent("journal/1", b"entry")
        assert [found.key for found in store.list("")] == ["journal/1", "lease"]
        assert store.get_versioned("lease") == (b"1", version)
    finally:
        holder.kill()
        holder.communicate()
    store.compare_and_set("lease", b"2", version)


HOLDER = """
import sys, threading
from backends.local import LocalFolderStore
with LocalFolderStore(sys.argv[1])._locked():
    print("holds", flush=True)
    threading.Event().wait(100)
"""
