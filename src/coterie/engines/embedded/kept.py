"""Blocks of finished prompts that wait for another engine, each with a lease.

The other engine copies them and then says so.  If it does not in time, they are taken back; so a lost engine costs
memory for as long as a lease, and no longer.
"""

from __future__ import annotations

import dataclasses
import threading

from coterie.engines.embedded.request import KeptBlocks


class KeptTable:
    """Leases by request id.  Any thread may release or renew; the engine's thread alone keeps and collects.

    Args:
        lease_s: seconds for which blocks are kept.
    """

    def __init__(self, lease_s: float) -> None:
        self._lease_s = lease_s
        self._lock = threading.Lock()
        self._kept: dict[str, KeptBlocks] = {}
        self._released: list[KeptBlocks] = []

    def __len__(self) -> int:
        return len(self._kept)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._kept

    def keep(self, request_id: str, blocks: tuple[int, ...], tokens: int, now_s: float) -> KeptBlocks:
        """Start a lease."""
        kept = KeptBlocks(blocks, tokens, now_s + self._lease_s)
        with self._lock:
            self._kept[request_id] = kept
        return kept

    def renew(self, request_id: str, now_s: float) -> bool:
        """Start the lease anew; False where it has ended."""
        with self._lock:
            kept = self._kept.get(request_id)
            if kept is None:
                return False
            self._kept[request_id] = dataclasses.replace(kept, expires_s=now_s + self._lease_s)
            return True

    def find(self, request_id: str) -> KeptBlocks | None:
        """What is kept of a request; None where its lease has ended."""
        return self._kept.get(request_id)

    def release(self, request_id: str) -> bool:
        """End a lease; False where it has ended.  What was copied before is whole where this says True."""
        with self._lock:
            kept = self._kept.pop(request_id, None)
            if kept is not None:
                self._released.append(kept)
            return kept is not None

    def collect(self, now_s: float) -> list[KeptBlocks]:
        """Blocks whose lease was ended or has run out since the last call."""
        with self._lock:
            for request_id in [name for name, kept in self._kept.items() if kept.expires_s <= now_s]:
                self._released.append(self._kept.pop(request_id))
            released, self._released = self._released, []
            return released

    def next_expiry_s(self) -> float | None:
        """When the first lease runs out; None without leases."""
        with self._lock:
            return min((kept.expires_s for kept in self._kept.values()), default=None)
