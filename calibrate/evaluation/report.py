"""Puts the report together: for any evaluated grid, and for the whole evaluation of several models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from base_core.files import write_atomically
from base_core.report import installed_versions
from calibrate.evaluation import ablations_budget, beyond, figures, paper, tables
from calibrate.evaluation.ablations_budget import AblationRow
from calibrate.evaluation.document import Block, Figure, Heading, Table, Text, to_html, to_markdown
from calibrate.evaluation.matching import Comparison, StepCost
from calibrate.evaluation.plan import REGIMES
from calibrate.evaluation.units import Row

MEASURES = (
    "*experts*: mean number of experts that one layer reads in one decode step, over all batches, steps and "
    "layers, with the policy decoding its own text. All other measures but accuracy are taken with the dense "
    "model's tokens decoded under the policy. *energy kept*: true removal energy of the chosen experts, relative "
    "to the best choice of as many. *layer error*: squared error of the routed experts' output relative to the "
    "dense output's squared norm, at the same input, mean over layers. *KL*: KL divergence from the dense "
    "next-token distribution, nats a token. *agreement*: share of tokens whose likeliest token is the dense "
    "model's; drafting under the policy and verifying with the dense model would accept at most that share. "
    "Intervals are 95 % (Wilson); differences are paired by prompt (Agresti-Min)."
)
DECODING = (
    "Prompts are prefilled dense; only decode steps are restricted. A batch is a number of slots: a prompt that "
    "ends gives its slot to the next, so rows of a batch are at different positions. The first token of every "
    "answer comes from prefill and is the same for all policies."
)
EVERY_STEP = (
    "In every layer and step BASE may read as many experts as the rival: the same budget where the rival has one "
    "and keeps to it, `union:n` (as many as the union of each row's first n has) for what OEA, top-k and "
    "unprotected SERE read, and else, `as ...`, what the rival's rule would read of the same rows. This compares "
    "choices and fills, not sizes. *ahead* says `base` or `rival` where the 95 % interval of the difference leaves "
    "zero out, else `even`."
)
ON_AVERAGE = (
    "BASE as published, one number of experts for all layers and steps: the largest that does not read more than "
    "the rival on average (1 % tolerance). A rival that reads few experts where few rows are alive, and more where "
    "there are many, has an advantage here that no ranking makes up; the rounding down is BASE's loss too."
)
NO_TIME = (
    "At equal time for a step: not computed. The policies run through the NumPy reference here, whose speed says "
    "nothing. Give a file of `base-moe bench --json` with `--bench`; time is then taken as a constant and a cost for "
    "each expert read."
)


@dataclass(frozen=True)
class ModelRows:
    """The rows of one model's whole evaluation.

    Attributes:
        model_type: its architecture.
        budgets: fixed budget of each regime.
        main: batches of 16, mixed tasks; dense comes first.
        one_task: batches of 16 with one task each.
        sweep: several batch sizes.
        ablation: budgets that choose themselves, and denominators.
        studies: by name, see `calibrate.evaluation.beyond`.
        facts: what is said about the model, a paragraph.
    """

    model_type: str
    budgets: Mapping[str, int]
    main: Sequence[Row]
    one_task: Sequence[Row]
    sweep: Sequence[Row]
    ablation: Sequence[AblationRow]
    studies: Mapping[str, Sequence[Row]]
    facts: str

    @property
    def rows(self) -> list[Row]:
        """All of them."""
        studies = [row for rows in self.studies.values() for row in rows]
        return [*self.main, *self.one_task, *self.sweep, *(own.row for own in self.ablation), *studies]

    @property
    def methods(self) -> list[Row]:
        """Dense and the methods of table 1, without the oracle, which is none."""
        regimes = [row for name in REGIMES for row in tables.regime_rows(self.main, self.budgets, name)]
        return [self.main[0], *(row for row in regimes if row["policy"] != "oracle")]


def grid_report(rows: Sequence[Row], command: str, cost: StepCost | None) -> list[Block]:
    """The report of one model, some policies and budgets."""
    blocks: list[Block] = [
        Heading(1, f"{rows[0]['model']}: quality under expert budgets"),
        Text(f"Made by `{command}`. {_versions()}"),
        Text(DECODING),
        Text(MEASURES),
        tables.all_rows(rows),
        Figure("curves", figures.curves(rows, "curves"), "Quality against active experts; dotted: dense."),
    ]
    blocks += _matchings(rows, 2, cost)
    if rows[0]["accuracy"] is not None:
        blocks += [Heading(2, "At equal quality"), tables.equal_quality(rows)]
    return blocks


def full_report(models: Sequence[ModelRows], command: str, seconds: float | None, cost: StepCost | None) -> list[Block]:
    """The whole evaluation: a summary of all models, then each of them.

    Args:
        seconds: that it took in one go, or None.
    """
    prompts = models[0].main[0]["prompts"]
    blocks: list[Block] = [
        Heading(1, "Quality against cost: every policy on the embedded models"),
        Text(f"Made by `{command}`{'' if seconds is None else f' in {seconds / 60:.0f} minutes'}. {_versions()}"),
        Text(
            f"Every model answers {prompts} held-out prompts of eight tasks with exact answers, greedily, in "
            "float32. The models are small and trained for these tasks: what carries over is the order of the "
            f"policies and its reasons, not the absolute numbers. The paper's figures are from {paper.SOURCE}, on "
            "models of 16 to 30 billion parameters."
        ),
        Text(DECODING),
        Text(MEASURES),
        Heading(2, "Summary"),
        _summary(models),
        Text(
            "Both regimes with as many experts as the union of each row's first one or two in every layer and step; "
            "Lynx, which sizes its set itself, stands with the restricted ones."
        ),
        *_rival_wins(models),
        *([] if cost is None else [_equal_time_summary(models, cost)]),
        Text(_ranking_order(models)),
        Heading(2, "Figure 1: quality against cost"),
        Figure(
            "figure-1",
            figures.trade_off({model.model_type: model.methods for model in models}, "figure-1"),
            f"Above: these models, accuracy against experts read. Below: the paper's scores and speeds, drawn from the "
            f"numbers of its table 1 ({paper.SOURCE}).",
        ),
    ]
    for model in models:
        blocks += _model(model, cost)
    blocks += ablations_budget.section({model.model_type: model.ablation for model in models})
    return blocks + beyond.sections({model.model_type: model.studies for model in models})


def write(folder: Path, blocks: Sequence[Block]) -> None:
    """Writes `report.md`, its figures, and `report.html`."""
    (folder / "figures").mkdir(parents=True, exist_ok=True)
    for block in blocks:
        if isinstance(block, Figure):
            write_atomically(folder / "figures" / f"{block.name}.svg", f"{block.svg}\n".encode())
    write_atomically(folder / "report.md", to_markdown(blocks).encode())
    write_atomically(folder / "report.html", to_html(blocks).encode())


def _versions() -> str:
    found = installed_versions()
    return "Versions: " + ", ".join(f"{name} {value}" for name, value in found.items() if name != "base-moe") + "."


def _time(rows: Sequence[Row], cost: StepCost | None) -> list[Block]:
    if cost is None:
        return [Text(NO_TIME)]
    selection = ", ".join(f"{policy} {ms:.3f}" for policy, ms in cost.selection_ms.items())
    return [
        Heading(3, "At equal time for a step"),
        Text(
            f"From `{cost.source}` of `base-moe bench --json` ({cost.what}): a layer takes {cost.fixed_ms:.3f} ms + "
            f"{cost.expert_ms:.4f} ms an expert, and for the selection, in ms, {selection}; a policy that is not named "
            "counts as free. BASE gets as many experts fewer as its selection takes longer than the rival's."
        ),
        tables.equal_time(rows, cost),
    ]


def _matchings(rows: Sequence[Row], level: int, cost: StepCost | None) -> list[Block]:
    """BASE against every rival at equal experts, both ways, and at equal time."""
    every, average = tables.at_every_step(rows), tables.on_average(rows)
    blocks: list[Block] = []
    if every:
        title = Heading(level, "BASE against every rival, equal experts in every step")
        blocks += [title, Text(EVERY_STEP), tables.comparison_table(every)]
    if average:
        title = Heading(level, "BASE at a fixed budget against every rival, equal experts on average")
        blocks += [title, Text(ON_AVERAGE), tables.comparison_table(average), *_time(rows, cost)]
    return blocks


def _summary(models: Sequence[ModelRows]) -> Table:
    body = []
    for model in models:
        dense = model.main[0]
        every = tables.at_every_step(model.main)
        for regime, n in REGIMES.items():
            found = [c for c in every if tables.in_regime(c.rival, n)]
            best = max(found, key=lambda c: (c.rival["accuracy"], -c.rival["kl"]))
            oracle = next(c for c in tables.oracle_gap(model.main) if c.base["budget"] == f"union:{n}")
            counts = tables.verdicts(found)
            body.append(
                [
                    f"{model.model_type}, {regime}",
                    f"{oracle.base['active_mean']:.1f} of {dense['active_mean']:.1f}",
                    tables.percent(dense["accuracy"]),
                    tables.percent(oracle.base["accuracy"]),
                    f"{tables.percent(best.rival['accuracy'])} ({best.rival['label']})",
                    f"{100 * best.difference:+.1f} ({100 * best.low:+.1f} to {100 * best.high:+.1f})",
                    f"{counts['base']} / {counts['even']} / {counts['rival']}",
                    f"{100 * oracle.difference:+.1f} ({100 * oracle.low:+.1f} to {100 * oracle.high:+.1f})",
                    f"{oracle.base['kl']:.4f}",
                    f"{min(c.rival['kl'] for c in found):.4f}",
                    f"{oracle.rival['kl']:.4f}",
                ]
            )
    header = ["model, regime", "experts", "dense", "BASE", "best rival", "BASE - best rival, points"]
    header += ["ahead / even / behind", "BASE - oracle, points", "KL BASE", "KL best rival", "KL oracle"]
    return Table(header, body)


def _rival_wins(models: Sequence[ModelRows]) -> list[Block]:
    parts = [rows for model in models for rows in (model.main, model.one_task, model.sweep)]
    every = [c for rows in parts for c in tables.at_every_step(rows)]
    average = [c for model in models for c in tables.on_average(model.main)]
    blocks: list[Block] = []
    for name, found in (("the same experts in every step", every), ("a fixed budget, no more on average", average)):
        counts = tables.verdicts(found)
        text = (
            f"With {name}: of {len(found)} comparisons BASE is ahead in {counts['base']}, even in {counts['even']}, "
            f"behind in {counts['rival']}. At 95 % about one in forty of truly even pairs counts as won by either "
            "side."
        )
        lost = [
            f"{_where(c)}: {100 * c.difference:+.1f} points; {_why(c, every)}" for c in found if c.verdict == "rival"
        ]
        blocks.append(Text(" ".join([text, *(["Behind: " + "; ".join(lost) + "."] if lost else [])])))
    return blocks


def _equal_time_summary(models: Sequence[ModelRows], cost: StepCost) -> Text:
    found = [c for model in models for c in tables.on_average(model.main, cost)]
    counts = tables.verdicts(found)
    lost = [c.rival for c in found if c.verdict == "rival"]
    free = sum(rival["policy"] not in cost.selection_ms for rival in lost)
    at_ms = cost.layer_ms("base", 0) - cost.fixed_ms
    return Text(
        f"At equal time for a step, by `{cost.source}` ({cost.what}), where BASE's selection takes as long as reading "
        f"{at_ms / cost.expert_ms:.1f} experts: of {len(found)} comparisons BASE is ahead in {counts['base']}, even in "
        f"{counts['even']}, behind in {counts['rival']}, {free} of these against policies whose own selection was not "
        "measured and counts as free. What BASE loses here is the time of its selection, made of many small operations "
        "on this backend; a fused kernel changes the sums, not the tables at equal experts."
    )


def _where(c: Comparison) -> str:
    rival = c.rival
    return f"{rival['model']} {rival['label']} ({rival['arrangement']}, batch {rival['batch']})"


def _why(c: Comparison, every: Sequence[Comparison]) -> str:
    """What the other measures say about a comparison that BASE lost."""
    same = next((other for other in every if other.rival is c.rival and other.base is not c.base), None)
    closer = "BASE" if c.base["kl"] <= c.rival["kl"] else "the rival"
    text = f"{closer} is closer to dense (KL {c.base['kl']:.4f} against {c.rival['kl']:.4f})"
    if same is not None and same.verdict != "rival":
        text += (
            ", and with the rival's number of experts in every step BASE is "
            f"{'even' if same.verdict == 'even' else 'ahead'} ({100 * same.difference:+.1f}): the rival's gain is in "
            "how many it reads when"
        )
    return text


def _ranking_order(models: Sequence[ModelRows]) -> str:
    parts = []
    for model in models:
        at = [
            row
            for row in model.main
            if row["budget"] == "union:1" and row["policy"] in paper.TABLE_2 and not row["options"]
        ]
        ordered = sorted(at, key=lambda row: -row["retained_energy"])
        parts.append(
            f"{model.model_type}: "
            + ", ".join(f"{row['policy']} {100 * row['retained_energy']:.2f} %" for row in ordered)
        )
    return "Energy kept by ranking rule at the size of the top-1 union, most first. " + "; ".join(parts) + "."


def _model(model: ModelRows, cost: StepCost | None) -> list[Block]:
    rows, name = model.main, model.model_type
    blocks: list[Block] = [Heading(2, f"{name}"), Text(model.facts), Heading(3, "Table 1: accuracy by task")]
    regimes = ", ".join(f"{regime} M={fixed}" for regime, fixed in model.budgets.items())
    blocks += [
        Text(
            f"Regimes: {regimes}, the mean number of experts that OEA reads with k0 = 1 and 2, rounded down. SERE "
            "at rho = 0; ExFold, XShare and Lynx filled up get the same budget as BASE."
        ),
        tables.table_1(rows, model.budgets),
    ]
    beside = tables.paper_table_1(rows, model.budgets, name)
    if beside is not None:
        blocks += [
            Text(f"Beside the paper's {paper.TABLE_1[name].name}, each relative to its own dense model:"),
            beside,
        ]
    blocks += _matchings(rows, 3, cost)
    blocks += [
        Heading(3, "Experts needed for equal quality"),
        Text("Read off straight lines between the points of each policy, all its hyperparameters together."),
        tables.equal_quality(rows),
        Heading(3, "Gap to the oracle"),
        Text(
            "The oracle ranks by true energies, for which every routed expert has to run: the most that a "
            "predictor can reach."
        ),
        tables.comparison_table(tables.oracle_gap(rows)),
        Heading(3, "Table 2: ranking rules"),
        Text(
            "All with backfill and native weights, at the size of the top-1 union of every step and layer. The "
            "paper's columns are Qwen3-30B's."
        ),
        tables.table_2(rows),
        Heading(3, "Table 3: fill rules"),
        Text("BASE's active set; what a lost route is replaced with. Substitution: SERE's similarity, weight kept."),
        tables.table_3(rows, model.budgets),
        Heading(3, "Quality against active experts"),
        Figure(f"curves-{name}", figures.curves(rows, f"curves-{name}"), f"{name}, batches of 16; dotted: dense."),
        Heading(3, "Figure 3: batch sizes"),
        Text(_sweep_text(model)),
        Figure(f"figure-3-{name}", figures.sweep(model.sweep, f"figure-3-{name}"), f"{name}, by batch size."),
        tables.batches_table(model.sweep),
        Heading(3, "Batches of one task"),
        Text("Requests of one kind share experts: the native union is smaller, and so is what a budget can save."),
        tables.batches_table(model.one_task),
        Heading(3, "All rows"),
        tables.all_rows(rows),
    ]
    return blocks


def _sweep_text(model: ModelRows) -> str:
    text = (
        "Restricted regime at every batch size, on fewer prompts: the budget is the size of the top-1 union, which "
        "OEA and SERE load."
    )
    budgets = paper.BATCH_BUDGETS.get(model.model_type)
    if budgets is None:
        return text
    ours = {row["batch"]: row["active_mean"] for row in model.sweep if row["policy"] == "base"}
    return (
        f"{text} It comes to {', '.join(f'{n:.1f} at {batch}' for batch, n in sorted(ours.items()))} experts; the "
        f"paper, which matches speed, has M = {', '.join(f'{n} at {batch}' for batch, n in budgets.items())} on "
        f"{paper.TABLE_1[model.model_type].name} (its picture was not at hand, its budgets are)."
    )
