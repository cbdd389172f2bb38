"""Ways between clients and expert servers; shared memory of one host, so far."""

from coterie.experts.transport.intake import Intake
from coterie.experts.transport.shared import Pending, SharedClient, SharedServer

__all__ = ["Intake", "Pending", "SharedClient", "SharedServer"]
