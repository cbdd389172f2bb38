"""Offline: collect traces from an engine and fit a profile."""

from coterie.calibration.fit import fit
from coterie.calibration.profile import Profile

__all__ = ["Profile", "fit"]
