"""What the real compiler makes of the kernels, for every supported GPU, without one."""

from pathlib import Path

import pytest

pytest.importorskip("torch")
triton = pytest.importorskip("triton")

from backends.cuda.kernels.resources import (  # noqa: E402
    ARCHITECTURES,
    SHAPES,
    Build,
    Resources,
    builds,
    compile_kernel,
    faults,
    row,
)

TABLE = Path(__file__).parents[4] / "docs" / "kernel-resources.md"

# `python -m backends.cuda.kernels.resources` compiles everything; a test run takes both layouts on sm_90 and one shape
# and batch elsewhere.
PICKED = {
    "sm_90": [("qwen3-30b-a3b", 16), ("qwen3-30b-a3b", 64), ("gpt-oss-120b", 16)],
    "sm_80": [("deepseek-v2-lite", 16)],
    "sm_89": [("qwen1.5-moe", 64)],
    "sm_100": [("qwen3-30b-a3b", 16)],
    "sm_120": [("gpt-oss-120b", 64)],
    "gfx942": [("qwen1.5-moe", 16)],
}

pytestmark = pytest.mark.skipif(triton.knobs.runtime.interpret, reason="TRITON_INTERPRET is set: nothing is compiled")


def section(arch):
    """The committed table's part for one architecture, or None when another Triton made it."""
    text = TABLE.read_text(encoding="utf-8")
    if f"Triton {triton.__version__} " not in text:
        return None
    return text.split(f"## {arch}\n")[1].split("\n## ")[0]


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_every_kernel_keeps_to_its_limits(arch):
    committed = section(arch)
    for shape, rows in PICKED[arch]:
        for build in builds(shape, hip=arch.startswith("gfx")):
            if build.rows != rows:
                continue
            found = compile_kernel(build, arch)
            assert faults(build, arch, found) == []
            assert committed is None or row(build, found) in committed, (
                "stale: python -m backends.cuda.kernels.resources"
            )


def test_fp16_takes_the_same_instructions():
    for build in builds("qwen3-30b-a3b", fp16=True):
        if build.kernel in ("gate_up", "down") and build.rows == 16:
            assert faults(build, "sm_90", compile_kernel(build, "sm_90")) == []


def test_the_table_holds_every_kernel_shape_and_architecture():
    for arch in ARCHITECTURES:
        committed = section(arch)
        if committed is not None:
            for shape in SHAPES:
                for build in builds(shape, hip=arch.startswith("gfx")):
                    assert f"| {build.kernel} | {shape} | {build.rows} |" in committed


def test_faults_are_found():
    build = Build("down", "x", 16, None, {}, 4, 4)
    clean = Resources(56, 0, 80 * 1024, 40, 44, {"HGMMA": 8})
    assert faults(build, "sm_90", clean) == []
    for change, text in [
        ({"spills": 2}, "spills"),
        ({"registers": 129}, "registers"),
        ({"shared": 120 * 1024}, "programs do not fit"),
        ({"matrix": {"HMMA": 8}}, "warpgroup"),
        ({"copies16": 0}, "16 bytes"),
        ({"copies": 60}, "16 bytes"),
    ]:
        assert any(text in fault for fault in faults(build, "sm_90", Resources(**{**vars(clean), **change})))
