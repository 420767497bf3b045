"""How a command ends: each error as one line on stderr, and the exit code of the contract.

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

from tiered.errors import TieredStoreError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import TracebackType
    from typing import TextIO

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
        line, code = explain(error)
        trace = "".join(traceback.format_exception(error)) if around.debug else ""
        _complain(around, arguments, line, code, trace)
    finally:
        _give_up_unwritten(sys.stderr)
    return code


def explain(error: Exception) -> tuple[str, int]:
    """What to say of an error, and the exit code."""
    from backends.errors import BackendError, ConfigurationError
    from backends.local_files import advice_for

    if isinstance(error, TieredStoreError):
        return str(error), error.exit_code
    if isinstance(error, click.exceptions.NoArgsIsHelpError):
        return f"no command is given; see `{_path(error)} --help`", USAGE
    if isinstance(error, click.ClickException):
        return _usage(error), USAGE
    if isinstance(error, ConfigurationError):
        return str(error), USAGE
    if isinstance(error, BackendError):
        from tiered.api.stores import what_to_do

        return "; ".join(filter(None, [str(error), what_to_do(error)])), UNREACHABLE
    if isinstance(error, OSError):
        name = f" ({error.filename})" if error.filename else ""
        advice = advice_for(error, "mend it")
        return f"{error.strerror or error}{name}; {advice} and try again", NEEDS_A_PERSON
    place = _place(error.__traceback__)
    what = f"a defect of ours: {type(error).__name__}: {error}"
    return f"{what} ({place}); please report it with what --debug shows", DEFECT


def _complain(
    around: Surroundings, arguments: Sequence[str], line: str, code: int, trace: str
) -> None:
    """One error line."""
    from tiered.cli.stderr import guess_format, write, write_line

    form = around.log_format or guess_format(arguments, around.environment)
    if trace and form != "json":
        write(trace)
    fields = {"exit_code": code, **({"traceback": trace} if trace else {})}
    text = f"tiered: error: {' '.join(line.split())}"
    write_line(form, around.clock.now_ms(), "error", text, fields)


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
