"""Offline: collect traces from an engine and fit a profile."""

from coterie.calibration.fit import fit, values_of
from coterie.calibration.profile import Donor, ExpertLead, LayerChoice, Profile
from coterie.calibration.transfer import transfer

__all__ = ["Donor", "ExpertLead", "LayerChoice", "Profile", "fit", "transfer", "values_of"]
