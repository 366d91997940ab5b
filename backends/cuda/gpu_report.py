"""What a run on a GPU found, as JSON, Markdown and a picture; and the targets that it is held against."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from backends.cuda.gpu_layers import STAGES
from backends.cuda.gpu_model import PAPER_FITS, ModelTimes
from base_core.files import write_atomically
from base_core.report import installed_versions, markdown_table, write_report

UNMEASURED = "not yet measured"
MOST_FRONT_US, LEAST_ROOF, MOST_SELECTION, LEAST_R2 = 7.0, 0.8, 0.02, 0.99
TARGET_ROWS, TARGET_BUDGETS = 16, (10, 16)
DRY = "Triton interpreter on a CPU: no figure here is a GPU's"


@dataclass
class Findings:
    """Everything that one run found.

    Attributes:
        settings: hardware, driver, arguments.
        checks: one row per comparison with float64: what, shape, batch, budget, dtype, error, tolerance, ok.
        sanitizer: tool -> clean, absent, dry, or what it said.
        layers: rows of `bench_layers`.
        model: of `bench_model`.
        skipped: what was left out, and why.
    """

    settings: dict[str, Any]
    checks: list[dict[str, Any]] = field(default_factory=list)
    sanitizer: dict[str, str] = field(default_factory=dict)
    layers: list[dict[str, Any]] = field(default_factory=list)
    model: ModelTimes | None = None
    skipped: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Nothing is wrong. An absent sanitizer and a missed target are no faults."""
        clean = all(said in ("clean", "absent", "dry") for said in self.sanitizer.values())
        return clean and all(check["ok"] for check in self.checks)


def gpu_settings(device: torch.device, **arguments: Any) -> dict[str, Any]:
    """Date and hardware, with driver and clocks where nvidia-smi tells them. A CPU stands for a dry run."""
    settings: dict[str, Any] = {"date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()), **arguments}
    if device.type != "cuda":
        return settings | {"device": DRY, "machine": platform.machine()}
    found = torch.cuda.get_device_properties(device)
    settings |= {"device": found.name, "multiprocessors": found.multi_processor_count, "cuda": torch.version.cuda}
    if shutil.which("nvidia-smi"):
        query = "driver_version,clocks.max.sm,clocks.max.mem,power.limit"
        command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"]
        said = subprocess.run(command, capture_output=True, text=True, check=False).stdout
        settings["driver, clocks, power"] = said.strip()
    return settings


def targets_table(findings: Findings | None = None) -> str:
    """The targets beside what was measured, the worst of all shapes and budgets; Markdown."""
    layers = [] if findings is None else findings.layers
    model = None if findings is None else findings.model
    at_target = [row for row in layers if row["batch"] == TARGET_ROWS]
    fronts = [row["front_us"] for row in at_target if row["front_us"]]
    roofs = [row["roof_fraction"] for row in at_target if row["budget"] in TARGET_BUDGETS and row["roof_fraction"]]
    shares = [row["selection_share"] for row in model.rows if row["selection_share"] is not None] if model else []
    r2 = model.fit.r2 if model and model.fit else None
    lines = [
        (
            f"`front` (router included) at {TARGET_ROWS} rows, us a layer",
            f"at most {MOST_FRONT_US:g}",
            f"{max(fronts):.1f}" if fronts else UNMEASURED,
        ),
        (
            f"`gate_up` and `down` at {TARGET_ROWS} rows, M=10 and M=16, of the measured copy bandwidth",
            f"at least {LEAST_ROOF:.0%}",
            f"{min(roofs):.0%}" if roofs else UNMEASURED,
        ),
        (
            f"selection (`front` less the stock router) at {TARGET_ROWS} rows, of a step of the whole model",
            f"at most {MOST_SELECTION:.0%}",
            f"{max(shares):.1%}" if shares else UNMEASURED,
        ),
        ("R^2 of t(M) = a + b M", f"at least {LEAST_R2}", UNMEASURED if r2 is None else f"{r2:.4f}"),
    ]
    return markdown_table([("target", "wanted", "measured"), *lines])


def markdown(findings: Findings) -> str:
    """The run as Markdown."""
    lines = ["# GPU run", ""]
    if findings.settings["device"] == DRY:
        lines += [f"A dry run: every step ran at toy size in the interpreter. **On a GPU: {UNMEASURED}.**", ""]
    lines += [f"- {name}: {value}" for name, value in findings.settings.items()]
    lines += ["- " + ", ".join(f"{name} {version}" for name, version in installed_versions().items())]
    lines += ["", targets_table(findings), ""]
    if findings.checks:
        wrong = [check for check in findings.checks if not check["ok"]]
        right = len(findings.checks) - len(wrong)
        lines += [f"Correctness against float64: {right} of {len(findings.checks)} comparisons right.", ""]
        lines += [f"- {check_line(check).strip()}" for check in wrong]
    lines += [f"- compute-sanitizer {tool}: {said}" for tool, said in findings.sanitizer.items()]
    if findings.layers:
        lines += ["", "## One layer", "", LAYER_NOTE, "", layer_table(findings.layers)]
    if findings.model is not None:
        lines += ["", "## Whole model", "", *model_lines(findings.model)]
    if findings.skipped:
        lines += ["", "Left out: " + "; ".join(findings.skipped) + "."]
    return "\n".join(lines) + "\n"


LAYER_NOTE = (
    "`layer` is front and experts, `floor` reading the active weights at the measured copy bandwidth, `of roof` that "
    "of `gate_up` and `down` together. `grouped_mm` and `batched_mm` are torch's experts on the same ids. `front` "
    "timed alone finds router and predictor in the cache."
)


def layer_table(rows: Sequence[dict[str, Any]]) -> str:
    """Rows of `bench_layers` as Markdown."""
    header = ("model", "batch", "M", "active", *(f"{s.removesuffix('_us')} us" for s in STAGES), "floor us", "GB/s")
    body = [
        (
            row["model"],
            str(row["batch"]),
            str(row["budget"] or "dense"),
            f"{row['active_mean']:.1f}",
            *(_figure(row[stage], ".1f") for stage in STAGES),
            _figure(row["roof_us"], ".1f"),
            _figure(row["gb_per_s"], ".0f"),
            _figure(row["roof_fraction"], ".0%"),
            _figure(row["ratio_to_dense"], ".2f"),
        )
        for row in rows
    ]
    return markdown_table([(*header, "of roof", "x dense"), *body])


def model_lines(model: ModelTimes) -> list[str]:
    """The whole model's part, line by line."""
    lines = [
        f"{model.layers} layers, decode steps as CUDA graphs over a static cache. `floor` is reading active experts, "
        f"attention, output layer and cached rows at the measured copy bandwidth.",
        "",
        model_table(model.rows),
    ]
    if model.eager_ms is not None:
        verdict = (
            "this machine is host-bound there, and a budget gains little: decode with a static cache and "
            "torch.compile, or with generate_batch, which captures graphs"
            if model.host_bound
            else "the host keeps up, so a budget gains there too"
        )
        lines += ["", f"Dense without a captured graph: {model.eager_ms:.2f} ms a step; {verdict}."]
    if model.front_us is not None:
        lines += ["", f"Stock router {model.router_us:.1f} us a layer; front with selection {model.front_us:.1f} us."]
    fits = [("paper, " + name, f"{a:.2f}", f"{b:.1f}", f"{r2:.4f}") for name, (a, b, r2) in PAPER_FITS.items()]
    if model.fit is not None:
        ours = (f"{model.fit.a_ms:.2f}", f"{model.fit.b_us:.1f}", f"{model.fit.r2:.4f}")
        fits.insert(0, ("this run", *ours))
    lines += ["", "t(M) = a + b M; the paper's Table 7 is of an RTX PRO 6000 Max-Q at 16 rows.", ""]
    lines += [markdown_table([("", "a ms", "b us", "R^2"), *fits])]
    if model.rivals:
        lines += [
            "",
            "### At equal active experts",
            "",
            "Each rival's rule in torch on the same experts kernels, then BASE with a budget of as many active "
            "experts. Lynx and ExFold are not offered: the former keeps one anchor a row, as OEA with k0 = 1 does, the "
            "latter as many experts as its budget.",
            "",
            model_table(model.rivals),
        ]
    return lines


def model_table(rows: Sequence[dict[str, Any]]) -> str:
    """Rows of `bench_model` as Markdown."""
    header = ("policy", "M", "active", "ms/step", "tokens/s", "floor ms", "of roof", "selection", "x dense", "x stock")
    body = [
        (
            row["policy"],
            str(row["budget"] or "-"),
            f"{row['active_mean']:.1f}",
            _figure(row["ms_per_step"], ".2f"),
            _figure(row["tokens_per_s"], ".0f"),
            _figure(row["floor_ms"], ".2f"),
            _figure(row["roof_fraction"], ".0%"),
            _figure(row["selection_share"], ".1%"),
            _figure(row["ratio_to_dense"], ".2f"),
            _figure(row["ratio_to_stock"], ".2f"),
        )
        for row in rows
    ]
    return markdown_table([header, *body])


def check_line(check: dict[str, Any]) -> str:
    """One comparison as a line of text."""
    mark = "ok   " if check["ok"] else "WRONG"
    case = f"{check['shape']:18s} T={check['batch']:<3} M={check['budget']:<7} {check['dtype']:9s}"
    return f"  {mark} {case} {check['what']}: {check['error']:.2g} (at most {check['tolerance']:.2g})"


def _figure(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def write_findings(
    findings: Findings,
    *,
    json: str | os.PathLike | None = None,
    text: str | os.PathLike | None = None,
    plot: str | os.PathLike | None = None,
) -> None:
    """Writes whichever files are asked for, each whole or not at all."""
    if json:
        extra = {name: value for name, value in asdict(findings).items() if name not in ("settings", "layers")}
        write_report(json, findings.layers, findings.settings, **extra, ok=findings.ok)
    if text:
        write_atomically(text, markdown(findings).encode())
    if plot:
        plot_findings(findings, plot)


def plot_findings(findings: Findings, path: str | os.PathLike) -> None:
    """A layer's time and the whole model's tokens a second against active experts, at the first batch measured."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.4), constrained_layout=True)
    timed = [row for row in findings.layers if row["layer_us"] is not None]
    batch = timed[0]["batch"] if timed else TARGET_ROWS
    for model in dict.fromkeys(row["model"] for row in timed):
        points = sorted(
            (row["active_mean"], row["layer_us"], row["roof_us"])
            for row in timed
            if row["model"] == model and row["batch"] == batch
        )
        (line,) = left.plot([p[0] for p in points], [p[1] for p in points], marker="o", label=model)
        left.plot([p[0] for p in points], [p[2] for p in points], ls=":", color=line.get_color())
    left.set_ylabel("us a layer (dotted: reading alone)")
    rows = [] if findings.model is None else [row for row in findings.model.rows if row["tokens_per_s"] is not None]
    for policy, marker in (("base", "o"), ("dense", "s"), ("stock", "^")):
        speeds = sorted((row["active_mean"], row["tokens_per_s"]) for row in rows if row["policy"] == policy)
        if speeds:
            right.plot([s[0] for s in speeds], [s[1] for s in speeds], marker=marker, label=policy)
    right.set_ylabel("tokens/s, whole model")
    for axis in (left, right):
        axis.set_xlabel(f"active experts a layer (batch {batch})")
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
        if axis.lines:
            axis.legend(frameon=False, fontsize=9)
        else:
            axis.text(0.5, 0.5, UNMEASURED, transform=axis.transAxes, ha="center", color="#777777")
    figure.savefig(path, dpi=150, format="png")
    plt.close(figure)
