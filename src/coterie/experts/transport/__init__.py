"""Ways between clients and expert servers: shared memory of one host, and TCP (`tcp`)."""

from coterie.experts.transport.intake import Intake
from coterie.experts.transport.pending import Pending
from coterie.experts.transport.shared import SharedClient, SharedServer

__all__ = ["Intake", "Pending", "SharedClient", "SharedServer"]
