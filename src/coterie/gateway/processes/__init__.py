"""A gateway of several processes on one port."""
