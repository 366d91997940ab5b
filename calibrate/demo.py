"""`base-moe demo`: the embedded model answers held-out prompts in batches, dense and under every budget and ranking."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tqdm import tqdm

from backends.cuda import base_budget
from backends.cuda.generate import load
from backends.cuda.integration import Stats
from base_core import Budget, load_predictor
from base_core.embedded import MODELS, PREFIX, model_path, predictor_path
from base_core.embedded.tasks import Example, evaluation_examples
from base_core.policies import RANKINGS
from base_core.report import format_table, report_row, wilson_interval, write_report

DEFAULT_PROMPTS = 960
DEFAULT_BATCH = 16
DEFAULT_BUDGETS = "4,6,8,12"
UNION_BATCHES = (1, 4, 16, 64)
UNION_PROMPTS = 64
TIMED_BATCHES = 2
MAX_ANSWER_TOKENS = 12
DESCRIPTION = "The embedded model on held-out prompts: accuracy, active experts and energy kept, dense and by budget."


@dataclass(frozen=True)
class Run:
    """One policy at one budget over all prompts, `budget` None for dense."""

    policy: str
    budget: Budget
    answers: tuple[str, ...]
    stats: Stats


class Answerer:
    """An embedded model with its predictor; answers prompts in left-padded batches, greedily."""

    def __init__(self, name: str = MODELS[0]) -> None:
        self.name = name
        self.model, self.tokenizer = load(model_path(name), "float32")
        self.predictor = load_predictor(predictor_path(name))
        self.experts = self.predictor.card.num_experts
        self.k = self.predictor.card.experts_per_token

    def batch(self, prompts: Sequence[str]) -> list[str]:
        inputs = self.tokenizer(list(prompts), return_tensors="pt", padding=True)
        with torch.inference_mode():
            output = self.model.generate(**inputs, max_new_tokens=MAX_ANSWER_TOKENS, do_sample=False)
        return self.tokenizer.batch_decode(output[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)

    def run(self, policy: str, budget: Budget, prompts: Sequence[str], batch: int, progress: tqdm | None = None) -> Run:
        """Answers every prompt, measuring active experts and the energy kept."""
        answers: list[str] = []
        with self.under(policy, budget, measure=True) as session:
            for start in range(0, len(prompts), batch):
                answers += self.batch(prompts[start : start + batch])
                if progress is not None:
                    progress.update()
            return Run(policy, budget, tuple(answers), session.stats())

    def under(self, policy: str, budget: Budget, measure: bool = False):
        ranking = RANKINGS.get(policy, "removal_cost")
        return base_budget(self.model, self.predictor, budget, ranking=ranking, measure=measure)

    def tokens_per_s(
        self, runs: Sequence[Run], prompts: Sequence[str], batch: int, repeats: int = 2
    ) -> list[tuple[float, float]]:
        """Speed of each run's policy without measurement, the policies in turn: tokens/s and ms per decode step."""
        best = [(0.0, 0.0)] * len(runs)
        for _ in range(repeats):
            for i, run in enumerate(runs):
                with self.under(run.policy, run.budget):
                    started = time.perf_counter()
                    tokens, steps = 0, 0
                    for start in range(0, len(prompts), batch):
                        answers = self.batch(prompts[start : start + batch])
                        tokens += sum(len(a) + 1 for a in answers)
                        steps += max(len(a) + 1 for a in answers)
                    seconds = time.perf_counter() - started
                if tokens / seconds > best[i][0]:
                    best[i] = (tokens / seconds, seconds / steps * 1e3)
        return best


def parse_budgets(text: str, experts: int) -> list[Budget]:
    """Comma-separated numbers or percentages; every one is checked against the model."""
    budgets = [Budget.parse(part) for part in text.split(",") if part.strip()]
    if not budgets:
        raise ValueError(f"--budgets {text!r} names no budget: give for instance {DEFAULT_BUDGETS}")
    for budget in budgets:
        budget.limit(experts)
    return budgets


def count_right(run: Run, examples: Sequence[Example]) -> int:
    return sum(answer == example.answer for answer, example in zip(run.answers, examples, strict=True))


def to_row(
    model: str, run: Run, examples: Sequence[Example], batch: int, speed: tuple[float, float], dense_speed: float
) -> dict:
    right = count_right(run, examples)
    low, high = wilson_interval(right, len(examples))
    by_task: dict[str, list[bool]] = {}
    for answer, example in zip(run.answers, examples, strict=True):
        by_task.setdefault(example.task, []).append(answer == example.answer)
    return report_row(
        model=model,
        policy=run.policy,
        budget=str(run.budget),
        batch=batch,
        active_mean=run.stats.active_mean,
        accuracy=right / len(examples),
        retained_energy=run.stats.retained_energy,
        tokens_per_s=speed[0],
        ms_per_step=speed[1],
        ratio_to_dense=speed[0] / dense_speed,
        accuracy_low=low,
        accuracy_high=high,
        union_mean=run.stats.union_mean,
        accuracy_by_task={task: sum(marks) / len(marks) for task, marks in by_task.items()},
    )


def print_rows(rows: Sequence[dict]) -> None:
    header = ("policy", "budget", "active experts", "accuracy", "95 % interval", "energy kept", "tokens/s")
    body = [
        (
            row["policy"],
            row["budget"],
            f"{row['active_mean']:.1f}",
            f"{100 * row['accuracy']:.1f} %",
            f"{100 * row['accuracy_low']:.1f} - {100 * row['accuracy_high']:.1f}",
            f"{100 * row['retained_energy']:.2f} %",
            f"{row['tokens_per_s']:.0f}",
        )
        for row in rows
    ]
    print(format_table([header, *body]))


def plot_rows(rows: Sequence[dict], path: Path) -> None:
    """Accuracy and energy kept against active experts, a line for each policy."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(11, 4.4), constrained_layout=True)
    dense = next(row for row in rows if row["policy"] == "dense")
    styles = {"base": ("#0b5fa5", "o", 2.4), "oracle": ("#222222", "s", 1.4)}
    others = iter(("#c8553d", "#6a994e", "#b08900", "#8e6bbf"))
    for policy in dict.fromkeys(row["policy"] for row in rows if row["policy"] != "dense"):
        points = sorted((r for r in rows if r["policy"] == policy), key=lambda r: r["active_mean"])
        color, marker, width = styles.get(policy) or (next(others), ".", 1.2)
        line = "--" if policy == "oracle" else "-"
        active = [r["active_mean"] for r in points]
        for axis, key in zip(axes, ("accuracy", "retained_energy"), strict=True):
            axis.plot(active, [100 * r[key] for r in points], line, color=color, marker=marker, lw=width, label=policy)
        if policy == "base":
            bounds = [[100 * r[key] for r in points] for key in ("accuracy_low", "accuracy_high")]
            axes[0].fill_between(active, *bounds, color=color, alpha=0.15, lw=0)
    axes[0].axhline(100 * dense["accuracy"], color="#777777", ls=":", lw=1)
    axes[0].annotate(
        f"dense, {dense['active_mean']:.0f} experts", (1, 100 * dense["accuracy"]), xycoords=("axes fraction", "data"),
        xytext=(-4, 3), textcoords="offset points", ha="right", color="#555555", fontsize=9,
    )  # fmt: skip
    axes[0].set_ylabel("right answers, %")
    axes[1].set_ylabel("energy kept against the oracle's choice, %")
    for axis in axes:
        axis.set_xlabel(f"active experts a layer (batch {dense['batch']})")
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    axes[1].legend(frameon=False, fontsize=9)
    figure.savefig(path, dpi=150, format="png")
    plt.close(figure)


def run(args: argparse.Namespace) -> None:
    if args.prompts < 1 or args.batch < 1:
        raise ValueError(f"--prompts {args.prompts} and --batch {args.batch} must be at least 1")
    answerer = Answerer(args.model)
    budgets = parse_budgets(args.budgets, answerer.experts)
    examples = evaluation_examples(args.prompts)
    prompts = [example.prompt for example in examples]

    print(f"Embedded model: {answerer.experts} experts a layer, {answerer.k} a token, {len(prompts)} held-out prompts.")
    print("Distinct experts that one decode step reads in each layer, by requests decoded together:")
    for batch in UNION_BATCHES:
        union = answerer.run("dense", Budget(), prompts[:UNION_PROMPTS], batch).stats.union_mean
        print(f"  {batch:3d} request{'s' if batch > 1 else ' '}  {union:5.1f} of {answerer.experts}")

    plan = [("dense", Budget()), *((policy, budget) for budget in budgets for policy in RANKINGS)]
    batches = -(-len(prompts) // args.batch)
    started = time.perf_counter()
    with tqdm(total=len(plan) * batches, unit="batch", desc="answering", smoothing=0.05) as progress:
        runs = []
        for policy, budget in plan:
            progress.set_postfix_str(f"{policy} {budget}")
            runs.append(answerer.run(policy, budget, prompts, args.batch, progress))
    speeds = answerer.tokens_per_s(runs, prompts[: TIMED_BATCHES * args.batch], args.batch)
    rows = [
        to_row(PREFIX + answerer.name, r, examples, args.batch, speed, speeds[0][0])
        for r, speed in zip(runs, speeds, strict=True)
    ]

    print()
    print_rows(rows)
    print(
        "\nenergy kept: removal energy of the chosen experts against the best choice of as many, the oracle's.\n"
        "tokens/s: this model is too small for memory traffic to matter; base-moe bench measures speed at true width."
    )
    if args.json:
        settings = {
            "prompts": args.prompts,
            "batch": args.batch,
            "budgets": args.budgets,
            "seconds": time.perf_counter() - started,
        }
        write_report(args.json, rows, settings)
        print(f"rows written to {args.json}")
    if args.plot:
        plot_rows(rows, args.plot)
        print(f"plot written to {args.plot}")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", choices=MODELS, default=MODELS[0], help="embedded model (default: %(default)s)")
    parser.add_argument("--prompts", type=int, default=DEFAULT_PROMPTS, help="held-out prompts, eight tasks in turn")
    parser.add_argument("--batch", type=int, default=DEFAULT_BATCH, help="requests decoded together")
    parser.add_argument("--budgets", default=DEFAULT_BUDGETS, help="comma-separated numbers or percentages of experts")
    parser.add_argument("--json", type=Path, help="write rows, settings and versions to this file")
    parser.add_argument("--plot", type=Path, help="write a PNG of quality against active experts to this file")
