"""Waiting for an append to be stored as the policy says: what goes wrong, in our own errors."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from backends.local_files import advice_for
from tiered.errors import StoreUnavailableError

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextlib.contextmanager
def waiting(root: str, timeout_s: float) -> Iterator[None]:
    """A block that waits, ``timeout_s`` at most.

    Raises:
        StoreUnavailableError: It took too long, or the disk refused it.
    """
    try:
        yield
    except TimeoutError:
        raise StoreUnavailableError(
            f"not on the disk or with the replica after {timeout_s} s",
            where=root,
            do="it may still be stored: look before sending it again",
        ) from None
    except OSError as error:
        raise StoreUnavailableError(
            f"the flush failed: {error.strerror or error}",
            where=root,
            do=advice_for(error, "look at the disk"),
        ) from error
