"""One of the processes of `coterie serve --processes`, which starts it; not a command of its own."""

from __future__ import annotations

import sys

from coterie.cli.serve import describe, set_up_logging
from coterie.engines.vllm_nixl import VllmNixl
from coterie.gateway.processes.child import run_process


def main() -> None:
    """Serve; the last argument is the descriptor of the link to the first process."""
    set_up_logging()
    run_process(int(sys.argv[-1]), VllmNixl(), lambda served: tuple(describe(served)))


if __name__ == "__main__":
    main()
