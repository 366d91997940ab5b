"""BASE for PyTorch on any device: expert budgets for transformers models."""

from backends.cuda.families import MoELayer, find_moe_layers, fingerprint
from backends.cuda.integration import Policy, Session, Stats, base_budget, disable_base, enable_base, routed_log_energy
from backends.cuda.selection import RowKinds, TorchSelection, select_no_sync

__all__ = [
    "MoELayer",
    "Policy",
    "RowKinds",
    "Session",
    "Stats",
    "TorchSelection",
    "base_budget",
    "disable_base",
    "enable_base",
    "find_moe_layers",
    "fingerprint",
    "routed_log_energy",
    "select_no_sync",
]
