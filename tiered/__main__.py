"""The door of the program ``tiered``."""

from __future__ import annotations

import gc
import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tiered.cli.call import Surroundings

YOUNG_OBJECTS = 50_000
"""Made since it last looked, when Python's collector of cycles looks again. By default it does after 700, which was a fifth
of what dispatch cost: slices and views of records are made by the thousand, and go by themselves."""


def main() -> None:
    """Run the command line of this process and end it.

    Raises:
        SystemExit: Always, with the exit code of the contract.
    """
    gc.set_threshold(YOUNG_OBJECTS)
    _require_own_packages()
    from tiered.cli.signals import SignalWatch  # noqa: PLC0415 (start-up loads only what is needed)

    watch = SignalWatch()
    watch.begin()
    from tiered.cli.call import Surroundings  # noqa: PLC0415

    gc.freeze()  # what is loaded stays: the collector need not look at it, nor count it
    os.environ.setdefault(
        "OPENBLAS_NUM_THREADS", "1"
    )  # NumPy's threads for algebra spin, and we have no algebra
    raise SystemExit(run(sys.argv[1:], Surroundings(os.environ, watch=watch)))


def _require_own_packages() -> None:
    """Before anything of them is imported: then nothing else of ours may work, not even how errors are told."""
    from tiered.errors import InvalidError  # noqa: PLC0415 (start-up loads only what is needed)
    from tiered.packages import require_own  # noqa: PLC0415

    try:
        require_own()
    except InvalidError as error:
        sys.stderr.write(f"tiered: error: {error}\n")
        raise SystemExit(error.exit_code) from None


def run(arguments: Sequence[str], surroundings: Surroundings | None = None) -> int:
    """Run a command line."""
    from tiered.cli.call import Surroundings  # noqa: PLC0415 (start-up loads only what is needed)
    from tiered.cli.exits import ending  # noqa: PLC0415
    from tiered.cli.frame import invoke  # noqa: PLC0415

    around = surroundings or Surroundings(os.environ)
    around.debug = "--debug" in arguments
    return ending(lambda: invoke(arguments, around), around, arguments)


if __name__ == "__main__":
    main()
