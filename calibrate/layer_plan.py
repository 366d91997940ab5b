"""`base-moe plan`: shares experts out over the layers so that the predicted damage in all is least.

A layer's curve is the share of a step's predicted removal cost that its M best experts do not hold, averaged over the
decode steps of a dense run on calibration prompts. The damage of M is the curve times the layer's weight, one of:

share  1: a share of one layer's cost counts as much as the same share of another's
cost   the mean removal cost of a step in that layer: what counts is the squared error itself
kl     how far the model's next-token distribution moves (KL, nats a token) for a share lost when this layer alone is
       under the budget; takes one more run for each layer
mixed  the geometric mean of `share` and `kl`

On the embedded models `cost` starves the early layers, whose outputs are smaller. `kl` gains most where it gains, but
the divergence is not proportional to the share lost, and layers do not lose apart from each other: now and then it
starves one. `mixed` keeps the order and halves the contrast: it is never far from the better of the two. It is the
default by what these three models showed, on their calibration and evaluation prompts alike. `share` is even with the
same number everywhere and needs one run only, which is what a large model on a slow machine has time for.

A curve falls ever more slowly as M grows, since experts come in the order of their cost. With convex curves, giving the
next expert to the layer that it helps most, again and again, is the best allocation of any total.
"""

from __future__ import annotations

import argparse
import heapq
import math
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from base_core import Budget, Predictor, save_plan
from base_core.embedded import resolve_model
from base_core.embedded.tasks import examples
from base_core.policies import Step, run_policy
from base_core.report import format_table
from base_core.selection import DECODE, Selection, removal_cost
from calibrate.evaluation.metrics import Judge
from calibrate.evaluation.prompt_file import Prompt, read_prompts
from calibrate.evaluation.routing import Rule
from calibrate.evaluation.subject import MIXED, Subject
from calibrate.evaluation.variants import Variant

DEFAULT_PROMPTS = 512
DEFAULT_BATCH = 16
DEFAULT_MAX_TOKENS = 12
TRAINING_SEED = 2
WEIGHINGS = ("share", "cost", "kl", "mixed")
DEFAULT_WEIGHING = "mixed"
LEAST_WEIGHT = 0.01
DESCRIPTION = "Makes a budget plan: so many experts a layer on average, more where they matter more."


Curves = dict[int, NDArray[np.float64]]


class CurveRecorder:
    """A `Rule` that leaves routing alone and adds up how the predicted removal cost is spread over experts.

    Attributes:
        curves: by layer, float64 [E + 1]: the mean share of cost outside the best M experts, for M of 0 to E.
    """

    reads_true_energy = False

    def __init__(self, predictor: Predictor) -> None:
        self.predictor = predictor
        self._lost: dict[int, NDArray[np.float64]] = {}
        self._cost: dict[int, float] = {}
        self._steps: dict[int, int] = {}

    def log_energy(self, layer: int, z: NDArray, true: NDArray | None) -> NDArray:
        """See `Rule`."""
        return self.predictor.layers[layer].log_energy(z)

    def __call__(self, layer: int, step: Step) -> Selection:
        """See `Rule`."""
        routing, E = step.routing, step.num_experts
        assert step.log_energy is not None
        cost = removal_cost(routing.ids, routing.weights, step.log_energy, step.rows == DECODE, E)
        total = float(cost.sum(dtype=np.float64))
        if total > 0:
            self._cost[layer] = self._cost.get(layer, 0.0) + total
            held = np.concatenate(([0], np.cumsum(np.sort(cost)[::-1], dtype=np.float64))) / total
            self._lost[layer] = self._lost.get(layer, 0) + (1 - held)
            self._steps[layer] = self._steps.get(layer, 0) + 1
        return run_policy("dense", step, Budget())

    @property
    def curves(self) -> Curves:
        """See the class."""
        return {layer: lost / self._steps[layer] for layer, lost in sorted(self._lost.items())}

    @property
    def mean_cost(self) -> dict[int, float]:
        """By layer, the mean removal cost of all experts of a step."""
        return {layer: cost / self._steps[layer] for layer, cost in self._cost.items()}


class OneLayer:
    """A `Rule` that restricts one layer as `inner` does and leaves the others alone."""

    reads_true_energy = False

    def __init__(self, inner: Rule, layer: int) -> None:
        self.inner, self.layer = inner, layer

    def log_energy(self, layer: int, z: NDArray, true: NDArray | None) -> NDArray | None:
        """See `Rule`."""
        return self.inner.log_energy(layer, z, true) if layer == self.layer else None

    def __call__(self, layer: int, step: Step) -> Selection:
        """See `Rule`."""
        return self.inner(layer, step) if layer == self.layer else run_policy("dense", step, Budget())


def record_curves(subject: Subject, batch: int) -> CurveRecorder:
    """The curves and mean costs of all layers, from one dense run over the subject's prompts."""
    assert subject.predictor is not None
    recorder = CurveRecorder(subject.predictor)
    subject.engine.decode(recorder, subject.decoding(batch), subject.queues(batch, MIXED))
    return recorder


def divergence_by_layer(subject: Subject, batch: int, experts: int) -> dict[int, float]:
    """By layer the KL to the dense model, nats a token along its answers, with that layer alone under the budget."""
    reference, rule = subject.reference(), subject.rule(Variant("base", str(experts)))
    found = {}
    for layer in (layer.index for layer in subject.engine.layers):
        judge = Judge(reference)
        subject.engine.decode(
            OneLayer(rule, layer),
            subject.decoding(batch),
            subject.queues(batch, MIXED),
            forced=reference.tokens,
            on_logits=judge,
        )
        found[layer] = judge.kl / judge.count
    return found


def divergence_weights(divergence: Mapping[int, float], lost: Mapping[int, float]) -> dict[int, float]:
    """KL for a share lost, by layer. A layer that lost nothing counts as the others do on average.

    What can hardly be measured must not starve a layer: no weight is below `LEAST_WEIGHT` of the mean.

    Args:
        divergence: KL with the layer alone under the budget.
        lost: share of the removal cost that the layer lost there.
    """
    measured = {i: divergence[i] / share for i, share in lost.items() if share > 0}
    if not any(measured.values()):
        return dict.fromkeys(lost, 1.0)
    mean = float(np.mean(list(measured.values())))
    return {i: max(measured.get(i, mean), LEAST_WEIGHT * mean) for i in lost}


def record_damage(
    subject: Subject, batch: int, experts: int, weighings: Sequence[str] = (DEFAULT_WEIGHING,)
) -> dict[str, Curves]:
    """By weighing and layer the damage of a budget of M, [E + 1]; see the module's text.

    Args:
        experts: the budget at which `kl` is measured, near the plan's mean.
        weighings: some of `WEIGHINGS`.
    """
    recorder = record_curves(subject, batch)
    curves = recorder.curves
    weights = {"share": dict.fromkeys(curves, 1.0), "cost": recorder.mean_cost}
    if {"kl", "mixed"} & set(weighings):
        divergence = divergence_by_layer(subject, batch, experts)
        kl = divergence_weights(divergence, {i: float(curve[experts]) for i, curve in curves.items()})
        weights |= {"kl": kl, "mixed": {i: math.sqrt(weight) for i, weight in kl.items()}}
    return {by: {i: curve * weights[by][i] for i, curve in curves.items()} for by in weighings}


def allocate(damage: Curves, total: int) -> dict[int, int]:
    """Experts of each layer, `total` in all and at least one each, with the least sum of damage.

    Args:
        damage: by layer, [E + 1], convex and falling.

    Raises:
        ValueError: a total that cannot be shared out.
    """
    most = sum(len(curve) - 1 for curve in damage.values())
    if not len(damage) <= total <= most:
        raise ValueError(
            f"{total} experts cannot be shared out over {len(damage)} layers: give {len(damage)} to {most}"
        )
    given = dict.fromkeys(damage, 1)
    gains = [(curve[2] - curve[1], layer) for layer, curve in damage.items() if len(curve) > 2]
    heapq.heapify(gains)
    for _ in range(total - len(damage)):
        _, layer = heapq.heappop(gains)
        given[layer] += 1
        curve, n = damage[layer], given[layer]
        if n < len(curve) - 1:
            heapq.heappush(gains, (curve[n + 1] - curve[n], layer))
    return given


def make_plan(
    subject: Subject, batch: int, mean: float, weighing: str = DEFAULT_WEIGHING
) -> tuple[dict[int, int], Curves]:
    """Experts of each layer, `mean` on average, and the damage curves that they come from.

    Args:
        weighing: one of `WEIGHINGS`.

    Raises:
        ValueError: a mean below 1 or above the number of experts.
    """
    if not 1 <= mean <= subject.num_experts:
        raise ValueError(f"--experts {mean:g} is outside 1..{subject.num_experts}, the experts of a layer")
    damage = record_damage(subject, batch, max(1, round(mean)), [weighing])[weighing]
    return allocate(damage, round(mean * len(damage))), damage


def plan_of(given: Mapping[int, int]) -> Budget:
    """The allocation as a budget."""
    return Budget(layers={layer: Budget(experts=n) for layer, n in given.items()})


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--experts", type=float, required=True, metavar="N", help="mean over the layers, as 12 or 12.5")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="for instance plan.json")
    parser.add_argument("--model", metavar="PATH_OR_ID", help="checkpoint, or embedded/NAME (default: an embedded one)")
    parser.add_argument("--predictor", metavar="PATH_OR_ID", help="default: the embedded model's own")
    parser.add_argument(
        "--prompts-file", type=Path, metavar="FILE", help="JSONL with a prompt a line (default: the embedded tasks')"
    )
    parser.add_argument("--prompts", type=int, default=DEFAULT_PROMPTS, metavar="N", help="how many (%(default)s)")
    parser.add_argument(
        "--by", choices=WEIGHINGS, default=DEFAULT_WEIGHING, help="how layers are weighed (%(default)s)"
    )
    parser.add_argument("--batch", type=int, default=DEFAULT_BATCH, metavar="N", help="decoded together (%(default)s)")
    parser.add_argument(
        "--max-tokens", type=int, default=DEFAULT_MAX_TOKENS, metavar="N", help="of an answer (%(default)s)"
    )


def run(args: argparse.Namespace) -> None:
    """Records the curves, writes the plan and prints it.

    Raises:
        ValueError: options, prompts, model or predictor that cannot be used.
    """
    for name in ("prompts", "batch", "max_tokens"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} {getattr(args, name)} must be at least 1")
    if not args.out.absolute().parent.is_dir():
        raise ValueError(f"--out {str(args.out)!r}: its folder does not exist")
    source, predictor = resolve_model(args.model, args.predictor)
    if predictor is None:
        raise ValueError(f"--model {args.model!r} needs a predictor: pass one of base-moe calibrate with --predictor")
    subject = Subject(
        Path(source).name, source, predictor, calibration_prompts(args), max_tokens=args.max_tokens, progress=True
    )
    given, damage = make_plan(subject, args.batch, args.experts, args.by)
    save_plan(args.out, plan_of(given).layers or {})
    print(describe(damage, given))
    print(f"plan written to {args.out}: use it as --budget plan:{args.out}")


def calibration_prompts(args: argparse.Namespace) -> list[Prompt]:
    """Those of the file, or of the embedded tasks' training split."""
    if args.prompts_file is not None:
        return read_prompts(args.prompts_file)[: args.prompts]
    if args.model is not None and not args.model.startswith("embedded/"):
        raise ValueError("--model of your own needs prompts: give them with --prompts-file")
    return [Prompt(e.prompt, e.answer, e.task) for e in islice(examples(TRAINING_SEED), args.prompts)]


def describe(damage: Curves, given: Mapping[int, int]) -> str:
    """The allocation as a table, and its predicted damage beside that of as many experts in every layer."""
    total, L = sum(given.values()), len(given)
    same = {layer: total // L + (i < total % L) for i, layer in enumerate(given)}
    body = [
        (str(i), str(n), f"{damage[i][n]:.4g}", str(same[i]), f"{damage[i][same[i]]:.4g}") for i, n in given.items()
    ]
    sums = [f"{sum(damage[i][n] for i, n in own.items()):.4g}" for own in (given, same)]
    total_row = ("all", str(total), sums[0], str(total), sums[1])
    return format_table([("layer", "plan", "damage", "uniform", "damage"), *body, total_row])
