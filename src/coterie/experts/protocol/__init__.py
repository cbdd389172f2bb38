"""How a client hands a request to an expert server, and takes the reply: see docs/experts-protocol.md.

`rules` says who may do what to a slot, and in which order; `layout` says where a slot's parts lie in memory.
"""

from coterie.experts.protocol.floats import from_float32, to_float32
from coterie.experts.protocol.layout import Dtype, Reply, Request, SlotShape, Status, least_and_most
from coterie.experts.protocol.rules import (
    NOBODY,
    Slot,
    State,
    Word,
    answer,
    claim,
    is_stale,
    pick_up,
    post,
    release,
    sweep,
    take,
    withdraw,
)

__all__ = [
    "NOBODY",
    "Dtype",
    "Reply",
    "Request",
    "Slot",
    "SlotShape",
    "State",
    "Status",
    "Word",
    "answer",
    "claim",
    "from_float32",
    "is_stale",
    "least_and_most",
    "pick_up",
    "post",
    "release",
    "sweep",
    "take",
    "to_float32",
    "withdraw",
]
