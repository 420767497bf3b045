"""SIGHUP to a command that was started with a configuration file: the file is read again, and what can change changes.

What cannot change while the command runs is named on stderr and counts from its next start. A file that is broken changes
nothing, and that is said, too: the command goes on by its old settings. Without a file SIGHUP ends the command, as ever.

Threads: each signal is answered in a thread of its own, one after another.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from typing import TYPE_CHECKING, Any, TypeVar, cast

from tiered.cli.options import build, settings_of
from tiered.errors import TieredStoreError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

    from tiered.cli.call import Call

T = TypeVar("T")


@contextlib.contextmanager
def on_hangup(
    call: Call, options: T, changeable: Collection[str], apply: Callable[[Call, T], None]
) -> Iterator[None]:
    """Take new settings on SIGHUP while the block runs.

    Args:
        changeable: Fields of the options that can change.
        apply: Goes on by others, and by the rules of the call that it is given. ``TieredStoreError``: it cannot.
    """
    if call.reread is None:
        yield
        return
    one_at_a_time, present = threading.Lock(), [options]

    def reload() -> None:
        with one_at_a_time:
            present[0] = _reload(call, present[0], changeable, apply)

    before, call.watch.reload = call.watch.reload, reload
    try:
        yield
    finally:
        call.watch.reload = before


def hold_hangups(call: Call) -> None:
    """Let no SIGHUP end a command that will take new settings, but is not as far yet, or any more."""
    if call.reread is not None:
        text = "tiered: SIGHUP: not following just now, so nothing was read again"
        call.watch.reload = lambda: call.say(text, level="warning")


def _reload(
    call: Call, options: T, changeable: Collection[str], apply: Callable[[Call, T], None]
) -> T:
    """Read the file and go on by it; the options that rule from now on."""
    assert call.reread is not None
    kind, shown = type(options), cast("Any", options)
    settings = settings_of(kind, call.section)
    fields = {one.name for one in dataclasses.fields(shown) if "argument" in one.metadata}
    try:
        chosen, rules = call.reread()
        given = {name: getattr(options, name) for name in fields}
        wanted = build(kind, settings, chosen, call.path, given)
        differing = [
            one for one in settings if getattr(options, one.field) != getattr(wanted, one.field)
        ]
        changed = {
            one.field: getattr(wanted, one.field) for one in differing if one.field in changeable
        }
        new: T = dataclasses.replace(shown, **changed)
        apply(dataclasses.replace(call, rules=rules), new)
    except TieredStoreError as error:
        call.say(f"tiered: SIGHUP: the old settings stay: {error}", level="error")
        return options
    names = ", ".join(one.key for one in differing if one.field in changed) or "none"
    call.say(f"tiered: SIGHUP: the configuration file was read; settings that changed: {names}")
    stay = [one.key for one in differing if one.field not in changed]
    stay += [
        key
        for key, one in chosen.items()
        if not one.setting.section and one.value != call.chosen[key].value
    ]
    for key in stay:
        what = f"{key} cannot change while this runs, and counts from the next start"
        call.say(f"tiered: SIGHUP: {what}", level="warning")
    return new
