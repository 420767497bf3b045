"""Plain key prefixes, for servers and file systems that list by folders."""

from __future__ import annotations

from backends.base import check_key
from backends.errors import InvalidKeyError

_LAST_CHARACTER = "\U0010ffff"
_FIRST_SAFE = 0x22  # what is before a space or below, XML cannot carry
_AFTER_SURROGATES = 0xE000
_BEFORE_SURROGATES = 0xD7FF


def keys_from(root: str, prefix: str, start_after: str) -> tuple[str, str]:
    """Folder and key with which to list what begins with ``prefix``, behind ``start_after``.

    The folder is that of the prefix, "" or ending in a slash. The listing begins behind the later
    of ``start_after`` and a key just before the prefix, so that what sorts before is not sent; what
    does not begin with the prefix must still be left out.

    Args:
        root: The store's own prefix, "" or ending in a slash.
        prefix: Below ``root``.
        start_after: Below ``root``.
    """
    wanted = root + prefix
    folder = wanted[: wanted.rfind("/") + 1]
    after = root + start_after if start_after else ""
    return folder, max(after, _just_before(wanted) if len(wanted) > len(folder) else "")


def _just_before(wanted: str) -> str:
    """A key before ``wanted`` with hardly a key between them, or "" where that is not safe."""
    last = ord(wanted[-1])
    if last < _FIRST_SAFE:
        return ""
    before = _BEFORE_SURROGATES if last == _AFTER_SURROGATES else last - 1
    return wanted[:-1] + chr(before) + _LAST_CHARACTER


def is_key(text: str) -> bool:
    """Whether something can have this key."""
    try:
        check_key(text)
    except InvalidKeyError:
        return False
    return True
