"""Opens object stores for the layers above: registry, then retries and metering, each one decorator."""

from __future__ import annotations

import contextlib
import random
import threading
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from backends.errors import (
    BackendError,
    ConfigurationError,
    ObjectNotFoundError,
    PermissionDeniedError,
    UntrustedError,
)
from backends.local_files import advice_for
from backends.registry import open_store
from backends.wrapping import MeteredStore, RetryingStore, RetryPolicy
from tiered.errors import InvalidError, StoreUnavailableError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from backends.base import ObjectStore
    from backends.s3_settings import S3Options
    from tiered.clock import Clock


@contextlib.contextmanager
def backend_errors() -> Iterator[None]:
    """Turn what a backend says into what an operator does about it."""
    try:
        yield
    except ConfigurationError as error:
        raise InvalidError(str(error)) from error
    except ObjectNotFoundError as error:
        raise StoreUnavailableError(str(error), do="check the URL") from error
    except PermissionDeniedError as error:
        raise StoreUnavailableError(str(error), do="check credentials and permissions") from error
    except UntrustedError as error:
        raise StoreUnavailableError(str(error)) from error
    except BackendError as error:
        do = advice_for(error, "check that the store can be reached")
        raise StoreUnavailableError(str(error), do=do) from error


def open_metered(url: str, options: S3Options) -> MeteredStore:
    """The store itself, metered.

    Raises:
        InvalidError: The URL or an option is wrong.
    """
    with backend_errors():
        return MeteredStore(open_store(url, options))


def with_retries(
    store: ObjectStore,
    clock: Clock,
    rng: random.Random,
    stop: threading.Event,
    on_retry: Callable[[], None] | None = None,
    *,
    give_up_s: float | None = None,
) -> RetryingStore:
    """For readers, and for a writer's reads, listings and lease; the meter counts what is made again.

    Its data uploads switch files instead, and its journal tries again by itself. ``on_retry`` is needed only where ``store``
    is not the meter itself; ``give_up_s`` shortens how long one request is tried.
    """
    if on_retry is None:
        on_retry = store.count_retry if isinstance(store, MeteredStore) else lambda: None
    policy = RetryPolicy()
    if give_up_s is not None:
        policy = replace(policy, deadline_s=min(policy.deadline_s, give_up_s))
    return RetryingStore(store, clock=clock, rng=rng, stop=stop, policy=policy, on_retry=on_retry)


@dataclass(frozen=True, slots=True)
class OpenStore:
    """A store as readers have it.

    Attributes:
        meter: The store itself, metered; for a journal's writer, who tries again by himself.
        store: The same with retries.
        stop: Set: nothing is tried again.
    """

    meter: MeteredStore
    store: RetryingStore
    stop: threading.Event = field(default_factory=threading.Event)

    def close(self) -> None:
        """Give back connections, and try nothing again."""
        self.stop.set()
        self.store.close()


def open_for_reading(
    url: str,
    options: S3Options,
    clock: Clock,
    *,
    rng: random.Random | None = None,
    stop: threading.Event | None = None,
    give_up_s: float | None = None,
) -> OpenStore:
    """Open a store with a meter and retries.

    Args:
        url: Which.
        options: Endpoint, region and the like.
        clock: Of the pauses between tries.
        rng: For their jitter.
        stop: See ``OpenStore``.
        give_up_s: Shortens how long one request is tried.

    Raises:
        InvalidError: The URL or an option is wrong.
    """
    meter, stop = open_metered(url, options), stop or threading.Event()
    rng = rng or random.SystemRandom()
    return OpenStore(meter, with_retries(meter, clock, rng, stop, give_up_s=give_up_s), stop)
