"""Writes down what this process does to a folder but read it: files opened for writing, locks, names.

Python runs this when it starts.

``WATCHED``: the folder; ``WATCHED_LOG``: where a line for each such act goes, after one that
says that this process is watched.
"""

from __future__ import annotations

import fcntl
import os
import sys

_NAMES = {"os.rename", "os.remove", "os.truncate", "os.utime", "os.chmod", "os.chown", "os.link"}
_NAMES |= {"os.symlink", "os.mkdir", "os.rmdir", "os.setxattr", "os.removexattr"}
_LOCKS = {fcntl.F_SETLK, fcntl.F_SETLKW, getattr(fcntl, "F_OFD_SETLK", -1), fcntl.F_SETLEASE}
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


def _acts(event: str, arguments: tuple[object, ...]) -> tuple[object, ...]:
    """What an event changes or locks: paths and descriptors."""
    if event == "open" and isinstance(arguments[2], int):
        return arguments[:1] if arguments[2] & _WRITES else ()
    if event in {"fcntl.flock", "fcntl.lockf"}:
        return arguments[:1]
    if event == "fcntl.fcntl":
        return arguments[:1] if arguments[1] in _LOCKS else ()
    return arguments if event in _NAMES else ()


def _path(thing: object) -> str:
    if isinstance(thing, int):
        link = f"/proc/self/fd/{thing}"
        return os.path.realpath(link) if os.path.lexists(link) else ""
    return os.path.realpath(os.fsdecode(thing)) if isinstance(thing, (str, bytes)) else ""


def _install() -> None:
    watched = os.path.realpath(os.environ["WATCHED"]) + "/"
    log = os.open(os.environ["WATCHED_LOG"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.write(log, b"watched\n")

    def hook(event: str, arguments: tuple[object, ...]) -> None:
        for thing in _acts(event, arguments):
            if f"{_path(thing)}/".startswith(watched):
                os.write(log, f"{event} {arguments!r}\n".encode())

    sys.addaudithook(hook)


if "WATCHED" in os.environ:
    _install()
