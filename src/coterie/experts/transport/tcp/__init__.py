"""Expert servers and clients of several hosts: a TCP connection for each slot."""

from coterie.experts.transport.tcp.client import TcpClient
from coterie.experts.transport.tcp.server import TcpServer

__all__ = ["TcpClient", "TcpServer"]
