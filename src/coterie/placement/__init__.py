"""Which rank holds which experts, and how often: from measured load, with spare slots for replicas of the busy ones."""

from coterie.placement.balance import balance, balance_by_node, balance_without_replicas
from coterie.placement.placement import Placement, even_slots

__all__ = ["Placement", "balance", "balance_by_node", "balance_without_replicas", "even_slots"]
