"""Ways between clients and expert servers; shared memory of one host, so far."""

from coterie.experts.transport.shared import SharedClient, SharedServer

__all__ = ["SharedClient", "SharedServer"]
