"""Gateways of other hosts that lease the same workers: each tells the others what it holds."""
