"""A client of expert servers: sends each token's experts to the servers that hold them, and adds up what they reply.

`RemoteExperts` is the whole of it.  Which server gets what is decided by `choose` and `split` (`parts`), from a
`RoutingTable` and from what the client thinks of the servers (`standing`); `Call` says what of a layer's tokens is
still to be asked for; only `Exchange` and `Probes` send and hear.
"""

from coterie.experts.client.connections import Connector
from coterie.experts.client.exchange import Patience
from coterie.experts.client.links import Connect, Link, Pending
from coterie.experts.client.monitored import MonitoredDirectory
from coterie.experts.client.remote import RemoteExperts, Started
from coterie.experts.client.table import Directory, RoutingTable, Server

__all__ = [
    "Connect",
    "Connector",
    "Directory",
    "Link",
    "MonitoredDirectory",
    "Patience",
    "Pending",
    "RemoteExperts",
    "RoutingTable",
    "Server",
    "Started",
]
