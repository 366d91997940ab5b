"""mlx-lm's own model tests with a budget on their models: `make test-upstream`.

The tests are in mlx-lm's source distribution, which is fetched from the package index. Models of supported families
run them stock, with the budget off, and with a budget of all experts, which sends every decode step through selection.
"""

from __future__ import annotations

import argparse
import importlib.util
import subprocess
import sys
import tarfile
import tempfile
import unittest
from collections import Counter
from importlib.metadata import version
from pathlib import Path

import mlx.core as mx

from backends.mlx import Policy, base_budget
from backends.mlx.families import FAMILIES, describe, find_moe_layers
from base_core.predictor import random_predictor

BUDGETS = (None, "off", "100%")


def fetch(folder: Path) -> Path:
    """The file with the model tests of the installed mlx-lm."""
    wanted = f"mlx-lm=={version('mlx-lm')}"
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", ":all:", wanted]
    subprocess.run([*command, "--dest", str(folder)], check=True)
    (archive,) = folder.glob("mlx_lm-*.tar.gz")
    with tarfile.open(archive) as file:
        file.extractall(folder, filter="data")
    return folder / archive.name.removesuffix(".tar.gz") / "tests" / "test_models.py"


def run(tests: Path, budget: str | None) -> tuple[unittest.TestResult, Counter[str]]:
    """All model tests under one budget, None for stock, and how often each family went through it."""
    specification = importlib.util.spec_from_file_location("upstream_test_models", tests)
    assert specification is not None and specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    stock, seen = module.TestModels.model_test_runner, Counter[str]()

    def runner(self, model, *arguments):
        try:
            layers = find_moe_layers(model)
        except (ValueError, AttributeError):
            return  # nothing here that a budget could be for
        seen[model.model_type] += 1
        for layer in layers:
            if not layer.router_weight.any():  # as some are before they are loaded
                layer.router.weight = mx.random.normal(layer.router.weight.shape)
        if budget is None:
            stock(self, model, *arguments)
            return
        predictor = random_predictor(**describe(model))
        with base_budget(model, predictor, budget, Policy(count_all=True)) as session:
            stock(self, model, *arguments)
            model.set_dtype(mx.float32)  # MLX's CPU backend evaluates nothing else
            session.reset_stats()
            mx.eval(model(mx.array([[0], [1]])))
            assert session.stats().steps == (budget != "off")

    module.TestModels.model_test_runner = runner
    return unittest.TextTestRunner(verbosity=0).run(unittest.defaultTestLoader.loadTestsFromModule(module)), seen


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tests", type=Path, help="a test_models.py, instead of fetching the installed version's")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        tests = args.tests or fetch(Path(folder))
        outcomes = []
        for budget in BUDGETS:
            result, seen = run(tests, budget)
            outcomes.append({test.id() for test, _ in (*result.failures, *result.errors)})
            print(f"budget {budget}: {result.testsRun} tests, {len(outcomes[-1])} failed; {', '.join(sorted(seen))}")
        missing = {module for module, _ in FAMILIES} - set(seen)
        print(f"no mixture of experts of theirs in these tests: {', '.join(sorted(missing)) or 'none'}")
        print(f"failed without a budget too: {', '.join(sorted(outcomes[0])) or 'none'}")
    return int(not seen or any(outcome != outcomes[0] for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
