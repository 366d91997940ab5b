"""Expert budgets in vLLM: a plugin that acts only where an engine's `--additional-config` holds a `base` entry.

vLLM calls `register` in every one of its processes. All it does is look at each new worker's configuration; the budget
itself is put on that worker's model and runner alone, see `backends.cuda.vllm.worker`.
"""

from __future__ import annotations

from functools import wraps
from typing import Any

CONFIG_KEY = "base"
"""Entry of vLLM's additional configuration."""

TESTED_VERSIONS = ("0.32.0",)
"""Releases of vLLM whose internals this plugin was run on."""


def options_of(vllm_config: Any) -> Any:
    """The `base` entry of a `VllmConfig`, or None where there is none."""
    additional = vllm_config.additional_config
    return additional.get(CONFIG_KEY) if isinstance(additional, dict) else None


def register() -> None:
    """The entry point: every worker made from now on honours the entry. Calling it again changes nothing."""
    from vllm.v1.worker.worker_base import WorkerBase

    initialise = WorkerBase.__init__
    if getattr(initialise, "_base_registered", False):
        return

    from backends.cuda.vllm.metrics import export

    export()

    @wraps(initialise)
    def initialise_with_base(self: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        initialise(self, vllm_config, *args, **kwargs)
        options = options_of(vllm_config)
        if options is not None:
            from backends.cuda.vllm.worker import attach

            attach(self, options)

    initialise_with_base._base_registered = True  # type: ignore[attr-defined]
    WorkerBase.__init__ = initialise_with_base
