"""What the tests of the vLLM plugin share: the environment of an engine, and how one went."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from base_core.embedded import predictor_path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
TIME_LIMIT = 600


def engine_environment(folder: Path, **changes: str) -> dict[str, str]:
    """What vLLM on a small machine without a network wants to know; its files go to `folder`."""
    return {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        "VLLM_CACHE_ROOT": str(folder),
        "VLLM_RPC_BASE_PATH": str(folder),
        "TMPDIR": str(folder),
        "PYTHONPATH": f"{HERE}{os.pathsep}{ROOT}",
        **changes,
    }


@dataclass(frozen=True)
class Ran:
    """How an engine went: what it reported, or None, and all that it printed."""

    result: Any
    log: str


def base(budget: int | str, **more: Any) -> dict[str, Any]:
    """The `base` entry for the embedded model."""
    return {"predictor": str(predictor_path()), "budget": str(budget), **more}
