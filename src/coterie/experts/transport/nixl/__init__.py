"""Expert servers and clients of several hosts by NIXL: one-sided transfers to and from a server's slots.

NIXL (https://github.com/ai-dynamo/nixl) moves memory by UCX: over RDMA where there is a network for it, else over
shared memory or TCP.  It is loaded when a server or a client of this kind is made: `pip install 'coterie[nixl]'`.
"""

from coterie.experts.transport.nixl.agent import Agent, is_installed
from coterie.experts.transport.nixl.client import NixlClient
from coterie.experts.transport.nixl.server import NixlServer

__all__ = ["Agent", "NixlClient", "NixlServer", "is_installed"]
