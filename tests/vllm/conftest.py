"""Engines for the tests: each in a process of its own, never two at a time, on a checkpoint without the predictor."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from base_core.embedded import model_path, predictor_path, tasks
from tests.vllm.engines import HERE, TIME_LIMIT, Ran, engine_environment

Run = Callable[..., Ran]


@pytest.fixture(scope="session")
def run_engine(tmp_path_factory) -> Run:
    """Runs `engine.py`; arguments as in its specification, `one_process` aside."""
    folder = tmp_path_factory.mktemp("vllm")

    def run(
        model: Path | str, groups: list, *, one_process: bool = True, expect_failure: bool = False, **specification: Any
    ) -> Ran:
        engine = {"model": str(model), "enforce_eager": True, **specification.pop("engine", {})}
        changes = {}
        if one_process:
            engine["distributed_executor_backend"] = "uni"
            changes["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        question, answer = folder / "question.json", folder / "answer.json"
        answer.unlink(missing_ok=True)
        question.write_text(
            json.dumps({"engine": engine, "groups": groups, "sampling": {"max_tokens": 14}, **specification})
        )
        process = subprocess.run(
            [sys.executable, str(HERE / "engine.py"), str(question), str(answer)],
            env=engine_environment(folder, **changes),
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=TIME_LIMIT,
            check=False,
        )
        assert expect_failure == (process.returncode != 0), process.stdout[-6000:]
        return Ran(json.loads(answer.read_text()) if answer.exists() else None, process.stdout)

    return run


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory) -> Path:
    """The embedded model without its predictor: vLLM reads every safetensors file of a folder as weights."""
    folder = tmp_path_factory.mktemp("checkpoint")
    for file in model_path().iterdir():
        if file != predictor_path():
            (folder / file.name).symlink_to(file)
    return folder


@pytest.fixture(scope="session")
def prompts() -> list[str]:
    return [example.prompt for example in tasks.evaluation_examples(96)]


@pytest.fixture(scope="session")
def groups(prompts) -> list[list[str]]:
    """Prompts that arrive together, sixteen at a time."""
    return [prompts[start : start + 16] for start in range(0, len(prompts), 16)]
