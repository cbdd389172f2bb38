"""Expert-locality-aware decode routing for disaggregated Mixture-of-Experts serving."""

__version__ = "0.1.0"
