"""``tiered support-bundle``: what somebody needs who is asked for help, in one file, without secrets."""

from __future__ import annotations

import contextlib
import io
import json
import platform
import re
import sys
import tarfile
from dataclasses import replace
from importlib.metadata import distributions, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from backends.lazy_dataclass import dataclass
from backends.local_files import write_regular
from tiered.cli import kinds
from tiered.cli.exits import DONE, explain
from tiered.cli.frame import command
from tiered.cli.options import argument, option
from tiered.cli.output import show
from tiered.cli.values import counted
from tiered.errors import InvalidError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from tiered.addresses import Address
    from tiered.cli.call import Call

_LOG_BYTES_MAX = 8 << 20
_ANSWER_BYTES_MAX = 8 << 20
_ANSWER_S = 10.0
_SUFFIXES = (".tar.gz", ".tgz")
_PAGES = ("metrics", "livez", "readyz", "healthz")


@dataclass(frozen=True, kw_only=True)
class BundleOptions:
    """What ``tiered support-bundle`` can be told."""

    url: str = argument()
    file: str = argument("the .tar.gz or .tgz to write", click.Path())
    store: str | None = option("also check this local store", kinds.DIR)
    log_file: str | None = option("log file to include the end of", kinds.FILE)
    log_lines: int = option("lines of it", kinds.COUNT, default=5000)
    metrics: Address | None = option("a running process's --metrics-listen", kinds.ADDRESS)


@command("support-bundle", BundleOptions)
def run(call: Call, options: BundleOptions) -> int:
    """Collects what support needs in one file, without secrets.

    Contains settings, versions, the output of doctor and status, and log lines and metrics if named.

    Examples:
        tiered support-bundle s3://bucket/prefix bundle.tar.gz --log-file /var/log/tiered.log
        tiered support-bundle file:///tmp/tier bundle.tar.gz --metrics 127.0.0.1:9400 --json
    """
    if not options.file.endswith(_SUFFIXES):
        raise InvalidError(
            "a support bundle is a .tar.gz", where=options.file, do="name it so, or .tgz"
        )
    hide, errors, texts = Hidden.of(call), {}, {}
    for name, make in _parts(call, options):
        try:
            texts[name] = hide(make())
        except Exception as error:  # noqa: BLE001 (each part for itself: help is asked for when things are broken)
            errors[name] = hide(explain(error).line)
    about = _about(call, errors)
    texts["about.json"] = hide(json.dumps(about, indent=1))
    rows: list[dict[str, Any]] = [
        *({"name": name, "size_bytes": len(text.encode())} for name, text in texts.items()),
        *({"name": name, "error": text} for name, text in errors.items()),
    ]
    from tiered.upkeep.workplace import writing

    with writing("bundle", options.file):
        write_regular(options.file, _packed(texts, call.clock.now_ms()))
        Path(options.file).chmod(0o600)  # names of topics and hosts stand in it
    document = {"format": 1, "file": options.file, "parts": rows}
    lines = [
        f"{options.file}: {counted(len(texts), 'part')}, without secrets; look through it before you send it"
    ]
    lines += [f"  {name} is missing: {text}" for name, text in errors.items()]
    show(call, document, rows=rows, columns=["name", "size_bytes", "error"], lines=lines)
    return DONE


def _parts(call: Call, options: BundleOptions) -> Iterator[tuple[str, Callable[[], str]]]:
    """Each file's name, and what makes its text."""
    from tiered.cli import config, doctor, status

    yield "config.json", lambda: _told(call, config.show.does, config.ShowOptions())
    url, store = options.url, options.store
    yield (
        "doctor.json",
        lambda: _told(call, doctor.run.does, doctor.DoctorOptions(url=url, store=store)),
    )
    yield (
        "status.json",
        lambda: _told(call, status.run.does, status.StatusOptions(url=url, store=store)),
    )
    if (log := options.log_file) is not None:
        yield "log.txt", lambda: _tail(Path(log), options.log_lines)
    if (address := options.metrics) is not None:
        for page in _PAGES:
            yield f"{page}.txt", lambda page=page: _fetched(address, page)  # type: ignore[misc]


def _told(call: Call, run: Callable[[Call, Any], int], options: object) -> str:
    """What a command writes under ``--json``, with all that this call says."""
    written = io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True)
    common = replace(call.common, json=True, output="json", quiet=True)
    with contextlib.redirect_stdout(written):
        run(replace(call, common=common), options)
    written.flush()
    assert isinstance(written.buffer, io.BytesIO)
    return written.buffer.getvalue().decode()


def _tail(path: Path, lines: int) -> str:
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - _LOG_BYTES_MAX))
        found = file.read(_LOG_BYTES_MAX).decode("utf-8", "replace").splitlines()
    return "\n".join(found[-lines:])


def _fetched(address: Address, page: str) -> str:
    """A page of a running process, with its status."""
    from http.client import HTTPConnection

    connection = HTTPConnection(address.host or "127.0.0.1", address.port, timeout=_ANSWER_S)
    with contextlib.closing(connection):
        connection.request("GET", f"/{page}")
        answer = connection.getresponse()
        text = answer.read(_ANSWER_BYTES_MAX).decode("utf-8", "replace")
    return text if page == "metrics" else f"{answer.status} {text}\n"


def _about(call: Call, errors: Mapping[str, str]) -> dict[str, object]:
    packages = {one.metadata["Name"]: one.version for one in distributions()}
    return {
        "tieredmq": version("tieredmq"),
        "python": sys.version,
        "system": platform.platform(),
        "time_ms": call.clock.now_ms(),
        "missing": errors,
        "packages": dict(sorted(packages.items())),
    }


def _packed(texts: Mapping[str, str], now_ms: int) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        for name, text in texts.items():
            data = text.encode()
            entry = tarfile.TarInfo(f"support-bundle/{name}")
            entry.size, entry.mtime, entry.mode = len(data), now_ms // 1000, 0o600
            archive.addfile(entry, io.BytesIO(data))
    return packed.getvalue()


# -- secrets ---------------------------------------------------------------------------------------
#
# No part says any by itself. A log may have been written by others, so all that is known to be one is taken out once more.

_SECRET_NAME = re.compile(
    r"SECRET|TOKEN|PASSWORD|PASSWD|CREDENTIAL|ACCESS_KEY|PRIVATE|API_?KEY|AUTH", re.IGNORECASE
)
_SHAPES = (
    (re.compile(r"//[^/@\s\"']*@"), "//***@"),  # user and password of a URL
    (re.compile(r"\b(?:AKIA|ASIA)[A-Z0-9]{16}\b"), "***"),  # ids of AWS keys
    (re.compile(r"(?i)\b(X-Amz-(?:Signature|Credential|Security-Token))=[^&\s\"']+"), r"\1=***"),
    (re.compile(r"(?i)\b(authorization\"?\s*[:=]\s*\"?)[^\"\n]+"), r"\1***"),
    (
        re.compile(r"(?i)\b((?:aws_)?(?:secret(?:_access)?_key|session_token|password)\"?\s*[:=]\s*\"?)[^\"\s,]+"),
        r"\1***",
    ),
)  # fmt: skip
_SHORT = 4
"""Values below this length are no secrets, and stand in every text."""
_IN_EVERY_TEXT = frozenset({"tiered", "true", "false", "none"})
"""Test servers have the program's name for a user: without it a log cannot be read, and with it nothing is told."""


@dataclass(frozen=True, slots=True)
class Hidden:
    """Takes secrets out of a text."""

    values: tuple[str, ...]  # longest first

    @classmethod
    def of(cls, call: Call) -> Hidden:
        """What this process knows to be secret: variables whose name says so, and headers of requests."""
        import os

        known = {value for name, value in os.environ.items() if _SECRET_NAME.search(name)}
        headers: Iterable[str] = call.common.s3_header
        known |= {text.partition("=")[2].strip() for text in headers}
        known = {one for one in known if len(one) >= _SHORT and one not in _IN_EVERY_TEXT}
        return cls(tuple(sorted(known, key=len, reverse=True)))

    def __call__(self, text: str) -> str:
        """The text without them."""
        for value in self.values:
            text = text.replace(value, "***").replace(json.dumps(value)[1:-1], "***")
        for shape, instead in _SHAPES:
            text = shape.sub(instead, text)
        return text
