"""``python -m tests.simulation SEED`` replays one seed; ``--seeds N`` runs many in parallel."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from simulation.runner import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
