"""Offline: collect traces from an engine and fit a profile."""
