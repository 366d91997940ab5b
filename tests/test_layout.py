"""The arrows of the layout point down: base_core knows no backend, backends know neither each other nor calibrate."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FRAMEWORKS = {"torch", "transformers", "triton", "mlx", "mlx_lm", "vllm"}
FORBIDDEN = {
    "base_core": FRAMEWORKS | {"backends", "calibrate"},
    "backends/cuda": {"mlx", "mlx_lm", "backends.mlx", "calibrate"},
    "backends/mlx": {"torch", "transformers", "triton", "backends.cuda", "calibrate"},
}


def imported_names(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} has a relative import"
            names.add(node.module or "")
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return names


@pytest.mark.parametrize("folder", FORBIDDEN)
def test_arrows_point_down(folder):
    files = sorted((ROOT / folder).rglob("*.py"))
    assert files
    for path in files:
        for name in imported_names(path):
            for banned in FORBIDDEN[folder]:
                assert name != banned and not name.startswith(banned + "."), f"{path.relative_to(ROOT)} imports {name}"


def test_backends_is_a_namespace_package():
    assert not (ROOT / "backends" / "__init__.py").exists()


def test_nothing_unsafe_is_loaded():
    for folder in ("base_core", "backends", "calibrate"):
        for path in (ROOT / folder).rglob("*.py"):
            assert not imported_names(path) & {"pickle", "torch.load", "joblib", "dill"}, path
            assert "trust_remote_code=True" not in path.read_text(), path
