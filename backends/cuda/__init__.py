"""BASE for PyTorch on any device: expert budgets for transformers models.

The names below are loaded when they are first used: the vLLM plugin lives in this package too, and neither needs nor
waits for the hooks on transformers.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from backends.cuda.families import MoELayer, find_moe_layers, fingerprint
    from backends.cuda.integration import (
        Policy,
        Session,
        Stats,
        base_budget,
        disable_base,
        enable_base,
        routed_log_energy,
    )
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

_MODULES = ("families", "selection", "integration")


def __getattr__(name: str) -> Any:
    if name in __all__:
        for module in _MODULES:
            found = getattr(import_module(f"{__name__}.{module}"), name, None)
            if found is not None:
                return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
