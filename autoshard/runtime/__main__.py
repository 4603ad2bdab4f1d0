"""`torchrun --nproc-per-node W -m autoshard.runtime plan.json …`: one rank of a run.

The command line is that of `autoshard run`. This is the one place where the runtime looks
up to it: an entry point has to know everything.
"""

from __future__ import annotations

from autoshard.cli.torchrun import main
from autoshard.runtime.torchrun import leave

if __name__ == "__main__":
    leave(main())
