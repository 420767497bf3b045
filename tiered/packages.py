"""Whether the four import packages are this distribution's own.

``timer``, ``fetcher`` and ``backends`` are also names of other people's distributions, and installers overwrite our files
with theirs, or remove ours with theirs, without a word. So each of ours bears a mark in its ``__init__.py``, which is
looked for without importing anything: what lies there may be anybody's program.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Final

from tiered.errors import InvalidError

OURS: Final = "tieredmq"
_PACKAGES: Final = ("tiered", "backends", "fetcher", "timer")
_MARK: Final = f'__distribution__ = "{OURS}"'.encode()
_AGAIN: Final = f"install {OURS} again (`pip install --force-reinstall --no-deps {OURS}`)"


def require_own() -> None:
    """Refuse to work with a package of another distribution; well below a millisecond when all is well.

    Raises:
        InvalidError: One is another's, or is not whole; it says whose, and what to do.
    """
    for package in _PACKAGES:
        place, is_own = _look(package)
        if not is_own:
            raise _foreign(package, place)


def shared_with() -> list[str]:
    """Other distributions that list a package of ours among their files; looks through all that are installed."""
    return sorted({name for package in _PACKAGES for name in _owners(package)})


def _look(package: str) -> tuple[str, bool]:
    """Where a package lies ("" for nowhere), and whether it bears our mark."""
    spec = find_spec(package)
    place = spec.origin if spec is not None and spec.has_location else None
    if place is None:
        return "", False
    read = getattr(spec.loader, "get_data", None) if spec is not None else None
    try:
        return place, read is not None and _MARK in read(place)
    except OSError:
        return place, False


def _owners(package: str) -> list[str]:
    from importlib.metadata import distributions  # noqa: PLC0415 (slow, and for failures only)

    line = f"\n{package}/__init__.py,"
    return [
        f"{one.name} {one.version}"
        for one in distributions()
        if line in f"\n{one.read_text('RECORD')}" and one.name != OURS
    ]


def _foreign(package: str, place: str) -> InvalidError:
    owners = _owners(package)
    if owners:
        name = owners[0].split()[0]
        what = f"the package {package!r} is that of another distribution, {owners[0]}"
        both = f"if both are needed, give {OURS} an environment of its own"
        do = f"remove it (`pip uninstall {name}`), then {_AGAIN}; {both}"
    elif place:
        what = f"the package {package!r} that Python finds is not {OURS}'s"
        do = f"rename it, or start in another folder; if neither helps, {_AGAIN}"
    else:
        why = "as when another distribution with the same files was removed"
        what = f"{OURS}'s package {package!r} has lost its __init__.py, {why}"
        do = _AGAIN
    return InvalidError(what, where=place, do=do)
