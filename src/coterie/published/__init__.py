"""Published figures of expert-locality routing (ELDR, arXiv 2607.00466), and constants fitted to some of them.

Every row says what it may serve for: constants may be fitted to `fit` rows, and only be compared with `compare` rows.
"""

from coterie.published.fitted import Check, Fitted, FittedSpread, FittedStep, dump_fitted, load_fitted
from coterie.published.records import (
    FOLDER,
    Domain,
    Figure,
    Model,
    Prompts,
    Published,
    Tpot,
    Workload,
    load_published,
)

__all__ = [
    "FOLDER",
    "Check",
    "Domain",
    "Figure",
    "Fitted",
    "FittedSpread",
    "FittedStep",
    "Model",
    "Prompts",
    "Published",
    "Tpot",
    "Workload",
    "dump_fitted",
    "load_fitted",
    "load_published",
]
