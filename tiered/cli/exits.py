"""How a command ends: each error as one line on stderr, and the exit code of the contract.

Where the result is to be one JSON document and nothing of it is written yet, the error is one, too, on stdout.

==== ======================================================================================
code meaning
==== ======================================================================================
0    done; what is explained and recorded is in the output and is not a failure
1    done, and something needs a person
2    wrong usage, configuration or argument
3    an endpoint or object store cannot be reached, or refuses us
4    fenced
5    a tier or store that cannot be read at the asked place because it is damaged
70   a defect of ours
129  cut short by SIGHUP
130  cut short by SIGINT
143  cut short by SIGTERM
==== ======================================================================================
"""

from __future__ import annotations

import os
import sys
import traceback
from contextlib import suppress
from typing import TYPE_CHECKING

import click

from backends.lazy_dataclass import dataclass
from tiered.errors import TieredStoreError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import TracebackType
    from typing import TextIO

    from backends.errors import BackendError
    from tiered.cli.call import Surroundings

DONE = 0
NEEDS_A_PERSON = 1
USAGE = 2
UNREACHABLE = 3
DEFECT = 70
INTERRUPTED = 130


def ending(body: Callable[[], int], around: Surroundings, arguments: Sequence[str] = ()) -> int:
    """Run a command and turn whatever ends it into an exit code, with at most one line on stderr."""
    try:
        code = body()
        sys.stdout.flush()
    except BrokenPipeError:
        _forget(sys.stdout)
        return DONE
    except (KeyboardInterrupt, click.Abort):
        return INTERRUPTED
    except Exception as error:  # noqa: BLE001 (the last line of defence: what is not known is a defect)
        told = explain(error)
        code = told.exit_code
        trace = "".join(traceback.format_exception(error)) if around.debug else ""
        _complain(around, arguments, told, trace)
    finally:
        _give_up_unwritten(sys.stderr)
    return code


@dataclass(frozen=True, slots=True)
class Explained:
    """What is said of an error."""

    reason: str  # for programs: one of the list in docs/json.md
    line: str  # for people
    exit_code: int


def explain(error: Exception) -> Explained:
    """What to say of an error."""
    from backends.errors import BackendError, ConfigurationError
    from backends.local_files import advice_for, is_full

    if isinstance(error, TieredStoreError):
        return Explained(_reason_of(error), str(error), error.exit_code)
    if isinstance(error, click.exceptions.NoArgsIsHelpError):
        return Explained("usage", f"no command is given; see `{_path(error)} --help`", USAGE)
    if isinstance(error, click.ClickException):
        return Explained("usage", _usage(error), USAGE)
    if isinstance(error, ConfigurationError):
        return Explained("invalid", str(error), USAGE)
    if isinstance(error, BackendError):
        from tiered.api.stores import what_to_do

        line = "; ".join(filter(None, [str(error), what_to_do(error)]))
        return Explained(_reason_of(error), line, UNREACHABLE)
    if isinstance(error, OSError):
        name = f" ({error.filename})" if error.filename else ""
        advice = advice_for(error, "mend it")
        line = f"{error.strerror or error}{name}; {advice} and try again"
        return Explained("full" if is_full(error) else "local", line, NEEDS_A_PERSON)
    place = _place(error.__traceback__)
    what = f"a defect of ours: {type(error).__name__}: {error}"
    line = f"{what} ({place}); please report it with what --debug shows"
    return Explained("defect", line, DEFECT)


def _reason_of(error: TieredStoreError | BackendError) -> str:
    """Of an error of an object store, the store's own reason where it has one."""
    from backends.errors import BackendError, ObjectNotFoundError

    asked = error.__cause__ if error.reason == "unavailable" else error
    if not isinstance(asked, BackendError):
        return error.reason
    if isinstance(asked, ObjectNotFoundError):
        return "not_found"
    return asked.reason or "unavailable"


def _complain(around: Surroundings, arguments: Sequence[str], told: Explained, trace: str) -> None:
    """One error line; and one document, where the result was to be one."""
    from tiered.cli.output import json_bytes
    from tiered.cli.stderr import guess, write, write_line

    said = arguments, around.environment
    form = around.log_format or guess(*said, "--log-format") or "text"
    if trace and form != "json":
        write(trace)
    line = " ".join(told.line.split())
    fields = {"exit_code": told.exit_code, **({"traceback": trace} if trace else {})}
    write_line(form, around.clock.now_ms(), "error", f"tiered: error: {line}", fields)
    is_short = not around.form and ("--json" in arguments or "TIERED_JSON" in around.environment)
    wants_json = is_short or (around.form or guess(*said, "--output", "-o")) == "json"
    if wants_json and not around.stdout.has_any:
        error = {"reason": told.reason, "message": line, "exit_code": told.exit_code}
        with suppress(OSError):  # a closed pipe
            around.stdout.write(json_bytes({"format": 1, "error": error}, indent=2) + b"\n")
            around.stdout.flush()


def _usage(error: click.ClickException) -> str:
    message = error.format_message().strip().rstrip(".")
    return f"{message[:1].lower()}{message[1:]}; see `{_path(error)} --help`"


def _path(error: click.ClickException) -> str:
    context = getattr(error, "ctx", None)
    return context.command_path if context is not None else "tiered"


def _place(trace: TracebackType | None) -> str:
    frames = traceback.extract_tb(trace)
    last = frames[-1] if frames else None
    return f"{'/'.join(last.filename.split('/')[-3:])}:{last.lineno}" if last else "unknown place"


def _give_up_unwritten(stream: TextIO) -> None:
    """What a full disk has not taken; else the interpreter tries again when it ends, and changes the exit code."""
    with suppress(ValueError):  # closed
        try:
            stream.flush()
        except OSError:
            _forget(stream)


def _forget(stream: TextIO) -> None:
    """So that the interpreter does not complain, when it ends, of a closed pipe or a full disk."""
    try:
        descriptor = stream.fileno()
    except (OSError, ValueError):
        return
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, descriptor)
    os.close(null)
