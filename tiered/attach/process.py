"""What this process does to be a good neighbour: memory given back, and a step back behind the broker."""

from __future__ import annotations

import ctypes
import os

NICENESS_MAX = 19
_M_ARENA_MAX = -8
_ARENAS = 2


def bound_malloc() -> None:
    """Have glibc share few pools of memory among all threads; without glibc, nothing.

    By default each thread gets a pool, which keeps what it once needed. Records are allocated by one thread and freed by
    another, so that pools grow. Before threads are started.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_ARENA_MAX, _ARENAS)


def step_back(niceness: int) -> None:
    """Let everybody else on this machine go first.

    Args:
        niceness: From 0 to ``NICENESS_MAX``; one that was given from outside is only ever raised.
    """
    if niceness > os.getpriority(os.PRIO_PROCESS, 0):
        os.setpriority(os.PRIO_PROCESS, 0, niceness)
