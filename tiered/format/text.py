"""Text as Java reads it from bytes."""

from __future__ import annotations

import re
from typing import Final

_SURROGATE: Final = re.compile(rb"\xed[\xa0-\xbf][\x80-\xbf]?")


def java_text(raw: bytes) -> str:
    """Bytes as Java decodes them: one U+FFFD for the UTF-8 form of a surrogate, where Python gives one for each byte."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return _SURROGATE.sub(b"\xef\xbf\xbd", raw).decode("utf-8", "replace")
