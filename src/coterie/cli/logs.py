"""What commands that serve log."""

from __future__ import annotations

import logging
import sys


def log_to_stderr(*quiet: str) -> None:
    """Log to stderr, of these libraries and uvicorn warnings alone."""
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    for library in ("uvicorn", *quiet):
        logging.getLogger(library).setLevel(logging.WARNING)
