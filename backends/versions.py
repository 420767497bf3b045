"""The version of an object in a store that keeps none: a hash of its bytes."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from backends.base import Version

if TYPE_CHECKING:
    from typing_extensions import Buffer


def content_version(data: Buffer) -> Version:
    """The same for the same bytes, and practically only for them."""
    return Version(hashlib.sha256(data).hexdigest())
