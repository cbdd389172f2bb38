"""Experts as a service: expert layers that run in servers of their own, and what their clients need."""
