"""An expert budget on an mlx-lm model: the MoE blocks change class, everything else about the model stays as it is.

    with base_budget(model, predictor, "16") as session:
        batch_generate(model, tokenizer, prompts)
        print(session.stats())

Parameter paths, saving, quantised experts and adapters keep working, and `restore` gives the stock classes back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from importlib import import_module
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import mlx.core as mx
import numpy as np
from mlx import nn
from mlx.nn.layers.distributed import sum_gradients

from backends.mlx.audit import Audit, output_energy
from backends.mlx.families import MoELayer, describe, find_moe_layers
from backends.mlx.selection import SHARE_UNIT, LogEnergy, MlxSelection, Predicted, select_no_sync
from base_core.audit import NOTHING_TO_WATCH, AuditStats, check_audit
from base_core.budget import Budget
from base_core.fingerprint import FINGERPRINT_TOLERANCE
from base_core.predictor import LayerPredictor, Predictor, PredictorError
from base_core.selection import Denominator, Fill, Ranking

NEEDS_PREDICTOR = ("removal_cost", "static_energy")
PROBE_ROWS = (1, 2, 4, 8, 16, 32)
Kernels: TypeAlias = Literal["auto", "always", "off"]


@dataclass(frozen=True)
class Policy:
    """How a budget chooses and what it applies to.

    Attributes:
        ranking, fill, denominator: as in `base_core.select`, but `oracle` is not offered.
        decode_window: longest run of tokens per sequence that still counts as decoding: 1, or the drafts plus 1.
        count_all: also send the steps that the budget cannot change through selection, so that they are counted.
        kernels: `auto` uses the Metal kernels where there is a Metal device, `off` never does, `always` builds them
            into the graph on any machine, for a look at it.
        tolerance: largest distance between the predictor's fingerprint and the model's routers.
        audit: every so many decode steps the executed experts' true energies are measured beside the predicted ones,
            see `backends.mlx.audit`; 0 never. Audited steps run in MLX operations, without the kernels.
        audit_correct: the intercepts follow what the audit finds.
    """

    ranking: Ranking = "removal_cost"
    fill: Fill = "backfill"
    denominator: Denominator = "native"
    decode_window: int = 1
    count_all: bool = False
    kernels: Kernels = "auto"
    tolerance: float = FINGERPRINT_TOLERANCE
    audit: int = 0
    audit_correct: bool = False

    def __post_init__(self) -> None:
        for name, known in (("ranking", Ranking), ("fill", Fill), ("denominator", Denominator)):
            if getattr(self, name) not in get_args(known):
                raise ValueError(f"unknown {name} {getattr(self, name)!r}: choose one of {', '.join(get_args(known))}")
        if self.ranking == "oracle":
            raise ValueError("ranking 'oracle' runs every expert and is for evaluation only: take removal_cost")
        if self.decode_window < 1:
            raise ValueError(f"decode_window {self.decode_window} is below 1: give 1, or the number of drafts plus 1")
        if self.kernels not in get_args(Kernels):
            raise ValueError(f"kernels {self.kernels!r} is unknown: choose one of {', '.join(get_args(Kernels))}")
        check_audit(self.audit, self.audit_correct, self.ranking)


class Operations(NamedTuple):
    """The two places where a kernel replaces MLX operations. Either may return None to leave a case to the operations.

    Attributes:
        select: takes and returns what `select_no_sync` does.
        experts: takes and returns what `weighted_experts` does.
    """

    select: Callable[..., MlxSelection | None]
    experts: Callable[..., mx.array | None]


def weighted_experts(
    switch: nn.Module, x: mx.array, ids: mx.array, weights: mx.array, keeps_dtype: bool, lists: Any = None
) -> mx.array:
    """Weighted sum of the experts' outputs, operation for operation as mlx-lm's blocks have it: [..., d].

    Args:
        switch: mlx-lm's SwitchGLU, quantised or not.
        x: [..., d].
        ids, weights: [..., k].
        keeps_dtype: cast the sum back to the experts' dtype.
        lists: a selection's row lists, which only kernels read.
    """
    return weighted_sum(switch(x, ids), weights, keeps_dtype)


def weighted_sum(outputs: mx.array, weights: mx.array, keeps_dtype: bool) -> mx.array:
    """[..., d] of experts' outputs [..., k, d] and weights [..., k], see `weighted_experts`."""
    total = (outputs * weights[..., None]).sum(axis=-2)
    return total.astype(outputs.dtype) if keeps_dtype else total


STOCK_OPERATIONS = Operations(select_no_sync, weighted_experts)


def operations(kernels: Kernels) -> Operations:
    """The operations that `Policy.kernels` asks for on this machine."""
    if kernels == "off" or (kernels == "auto" and not mx.metal.is_available()):
        return STOCK_OPERATIONS
    metal = import_module("backends.mlx.kernels")
    return Operations(metal.select, metal.experts)


@dataclass(frozen=True)
class Stats:
    """Means over decode steps and layers; None where nothing was counted.

    Attributes:
        steps: forward passes, without those that the budget could not change unless the policy counts all.
        active_mean: experts read in one layer.
        union_mean: experts that the rows would have read without a budget.
        fallbacks: (step, layer) pairs that kept native routing because a cost was not finite.
        kept_energy: share of the ranking's cost that the active sets held: for `removal_cost`, the predicted energy.
        audit: what `Policy.audit` found.
    """

    steps: int
    active_mean: float | None
    union_mean: float | None
    fallbacks: int
    kept_energy: float | None
    audit: AuditStats | None = None


class BudgetedLayer:
    """State of one MoE block under a budget. It hangs on the block outside the parameter tree."""

    def __init__(self, moe: MoELayer, predictor: LayerPredictor | None, session: Session) -> None:
        policy = session.policy
        self.moe = moe
        self.session = session
        self.operations = operations(policy.kernels)
        self.weight: mx.array | None = None
        self.bias: mx.array | None = None
        self._stacked: mx.array | None = None
        self._stacked_bias: mx.array | None = None
        self._router_weight: mx.array | None = None
        if policy.ranking == "removal_cost" and predictor is not None:
            self.weight, self.bias = mx.array(predictor.weight), mx.array(predictor.bias)
        elif policy.ranking == "static_energy" and predictor is not None:
            self.bias = mx.array(predictor.static_log_energy())
        self.stacks = self.weight is not None and self._stacking_keeps_logits()
        self.reset()
        mx.eval([a for a in (self.weight, self.bias, self._stacked, self._stacked_bias) if a is not None])

    def reset(self) -> None:
        """Sets the counters to zero."""
        self.counters = mx.zeros((5,), mx.int64)
        mx.eval(self.counters)

    def set_budget(self, budget: Budget) -> None:
        """Takes over this layer's budget."""
        self.most = budget.limit(self.moe.num_experts)
        self.limit = mx.array(self.most)
        self.tau = None if budget.tau is None else mx.array(budget.tau)
        self.floor = None if budget.floor is None else mx.array(budget.floor)
        self.follows_cost = budget.follows_cost
        mx.eval(self.limit)

    def decodes(self, shape: tuple[int, ...]) -> bool:
        """Whether rows of this shape [..., L, d] are a decode step."""
        return not self.session.in_prefill and shape[-2] <= self.session.policy.decode_window and 0 not in shape

    def audit_due(self, shape: tuple[int, ...]) -> Audit | None:
        """The audit, where it takes rows of this shape [..., L, d] in, whether the budget restricts them or not.

        The first layer under a budget begins a pass. The host decides, so a compiled pass is not to be audited.
        """
        audit = self.session._audit
        if audit is None:
            return None
        if self.moe.index == self.session._leading:
            audit.begin(self.decodes(shape))
        return audit if audit.due and self.decodes(shape) else None

    def restricts(self, shape: tuple[int, ...]) -> bool:
        """Whether rows of this shape [..., L, d] are decoded under the budget, and could read more than it allows."""
        if not self.decodes(shape):
            return False
        rows = int(np.prod(shape[:-1]))
        widest = min(self.moe.num_experts, rows * self.moe.experts_per_token)
        return self.follows_cost or widest > self.most or self.session.policy.count_all

    def _stack(self) -> None:
        router = self.moe.router
        assert self.weight is not None
        weight, bias = router.weight, router.get("bias")
        self._router_weight = weight
        self._stacked = mx.concatenate([weight, self.weight.astype(weight.dtype)])
        self._stacked_bias = None if bias is None else mx.concatenate([bias, mx.zeros_like(bias)])

    def _product(self, x: mx.array) -> mx.array:
        assert self._stacked is not None
        if self._stacked_bias is None:
            return x @ self._stacked.T
        return mx.addmm(self._stacked_bias, x, self._stacked.T)

    def _stacking_keeps_logits(self) -> bool:
        """Whether `[router; predictor]` as one product leaves the router's logits as they are, bit for bit."""
        router = self.moe.router
        if not (self.moe.family.chooses_itself or type(router) is nn.Linear):
            return False
        self._stack()
        E, d = self.moe.num_experts, self.moe.hidden_size
        rows = mx.random.normal((max(PROBE_ROWS), 1, d), key=mx.random.key(0)).astype(router.weight.dtype)
        same = [mx.array_equal(self._product(rows[:T])[..., :E], self._logits(rows[:T])) for T in PROBE_ROWS]
        if mx.all(mx.stack(same)).item():
            return True
        self._stacked = self._stacked_bias = self._router_weight = None
        return False

    def _logits(self, x: mx.array) -> mx.array:
        router = self.moe.router
        return x @ router.weight.T if self.moe.family.chooses_itself else router(x)

    def project(self, x: mx.array) -> tuple[mx.array, LogEnergy]:
        """Router logits [..., E] and log-energies, by row, by expert or none, for router inputs x [..., d]."""
        if self.weight is None or self.bias is None:
            return self._logits(x), self.bias
        rows = x.reshape(-1, x.shape[-1])
        if not self.stacks:
            return self._logits(x), Predicted(rows.astype(mx.float32) @ self.weight.T, 0, rows, self.bias)
        if self._router_weight is not self.moe.router.weight:
            self._stack()  # weights were loaded since
        product, E = self._product(x), self.moe.num_experts
        return product[..., :E], Predicted(product.reshape(-1, 2 * E), E, rows, self.bias)

    def routed(self, x: mx.array) -> dict[str, Any]:
        """What a selection takes, for router inputs x [..., d]."""
        E, k, policy = self.moe.num_experts, self.moe.experts_per_token, self.session.policy
        logits, log_energy = self.project(x)
        routing = self.moe.family.route(self.moe.block, logits)
        rows = self.session.rows
        return dict(
            scores=routing.scores.reshape(-1, E),
            ids=routing.ids.reshape(-1, k),
            weights=routing.weights.reshape(-1, k),
            log_energy=log_energy,
            limit=self.limit,
            tau=self.tau,
            floor=self.floor,
            preference=routing.preference.reshape(-1, E),
            rows=None if rows is None else mx.repeat(rows, x.shape[-2]),
            counters=self.counters,
            ranking=policy.ranking,
            fill=policy.fill,
            denominator=policy.denominator,
        )

    def select(self, x: mx.array) -> MlxSelection:
        """The step's selection for router inputs x [..., d]; the counters now hold the step."""
        arguments = self.routed(x)
        selection = self.operations.select(**arguments) or select_no_sync(**arguments)
        assert selection.counters is not None
        self.counters = selection.counters
        return selection

    def execute(self, x: mx.array) -> mx.array:
        """Weighted sum of the experts that the step's selection leaves, for router inputs x [..., d]: [..., d]."""
        family = self.moe.family
        selection = self.select(x)
        shape = (*x.shape[:-1], self.moe.experts_per_token)
        arguments = (
            self.moe.block[family.experts],
            x,
            selection.ids.reshape(shape),
            selection.weights.reshape(shape),
            family.keeps_dtype,
        )
        y = self.operations.experts(*arguments, selection.lists)
        return weighted_experts(*arguments) if y is None else y

    def execute_audited(self, audit: Audit, x: mx.array, group: Any) -> mx.array:
        """As `execute`, in operations, and the audit takes the step in. No expert runs more often than without it.

        Args:
            group: over which each expert is sharded, so that its output is a sum; None is no sharding.
        """
        family, k = self.moe.family, self.moe.experts_per_token
        arguments = self.routed(x)
        assert self.bias is not None and isinstance(arguments["log_energy"], Predicted)
        predicted = arguments["log_energy"] = arguments["log_energy"].log_energy()
        selection = select_no_sync(**arguments)
        if self.restricts(x.shape):
            assert selection.counters is not None
            self.counters = selection.counters
        shape = (*x.shape[:-1], k)
        outputs = self.moe.block[family.experts](x, selection.ids.reshape(shape))
        whole = outputs if group is None else mx.distributed.all_sum(outputs, group=group)
        moved = audit.observe(
            self.moe.index,
            selection.ids,
            mx.log(output_energy(whole)).reshape(-1, k),
            arguments["ids"],
            arguments["weights"],
            predicted,
            selection.active,
            arguments["rows"],
        )
        if moved is not None:
            self.bias = self.bias + moved
        return weighted_sum(outputs, selection.weights.reshape(shape), family.keeps_dtype)


class Session:
    """A budget in force on a model; `apply` makes it.

    Attributes:
        policy: how it chooses.
        budget: what is allowed now; `set_budget` changes it.
        rows: int [B], the kind of each sequence in the next decode steps (0 padding, 1 decode), or None: all decode.
        in_prefill: true while `prefill` holds the budget off.
    """

    def __init__(
        self, model: nn.Module, predictor: Predictor | None, budget: Budget | str | int, policy: Policy
    ) -> None:
        self.policy = policy
        self.budget = Budget()
        self.rows: mx.array | None = None
        self.in_prefill = False
        self._found = find_moe_layers(model)
        self._stock = [type(moe.block) for moe in self._found]
        self._predictor = predictor
        self._layers: dict[int, BudgetedLayer] = {}
        self._audit: Audit | None = None
        self._leading: int | None = None
        if predictor is not None:
            predictor.check_model(**describe(model), tolerance=policy.tolerance)
        if policy.audit and Budget.parse(budget).is_off:
            raise ValueError(NOTHING_TO_WATCH)
        if policy.audit and predictor is not None:
            fit = predictor.card.fit
            folded = {moe.index: fit.get(moe.index, {}).get("correction", 0.0) for moe in self._found}
            self._audit = Audit(folded, policy.audit, policy.audit_correct)
        self.set_budget(budget)

    def check(self, budget: Budget) -> None:
        """Refuses a budget that this model cannot have.

        Raises:
            BudgetError: outside the model's range.
            PredictorError: the ranking needs a predictor, and there is none.
        """
        for moe in self._found:
            budget.for_layer(moe.index).limit(moe.num_experts)
        if self.policy.ranking in NEEDS_PREDICTOR and self._predictor is None and not budget.is_off:
            raise PredictorError(
                f"ranking {self.policy.ranking!r} needs a predictor, got None: pass one made by base-moe calibrate, or "
                "choose a ranking that reads the router alone (weight_sum, squared_weight, top1_union)"
            )

    def set_budget(self, budget: Budget | str | int) -> None:
        """Changes the budget between two steps. Off gives every block its stock class back.

        Raises:
            ValueError: as `check`, or not a budget; the old one stays.
        """
        budget = Budget.parse(budget)
        self.check(budget)
        for moe, stock in zip(self._found, self._stock, strict=True):
            own = budget.for_layer(moe.index)
            if own.is_off:
                moe.block.__class__ = stock
                continue
            layer = self._layers.get(moe.index)
            if layer is None:
                predictor = None if self._predictor is None else self._predictor.layers[moe.index]
                layer = self._layers[moe.index] = BudgetedLayer(moe, predictor, self)
            layer.set_budget(own)
            moe.block._base = layer
            moe.block.__class__ = _budgeted(stock)  # type: ignore[arg-type]
        restricted = (moe.index for moe in self._found if not budget.for_layer(moe.index).is_off)
        self._leading = next(restricted, None)
        self.budget = budget

    @property
    def experts_per_token(self) -> int:
        """k."""
        return self._found[0].experts_per_token

    def restricts(self, rows: int) -> bool:
        """Whether the budget can change anything in a decode step of `rows` rows."""
        each = [(moe, self.budget.for_layer(moe.index)) for moe in self._found]
        return any(
            own.follows_cost or min(moe.num_experts, rows * moe.experts_per_token) > own.limit(moe.num_experts)
            for moe, own in each
        )

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Runs the stock model inside."""
        budget = self.budget
        self.set_budget("off")
        try:
            yield
        finally:
            self.set_budget(budget)

    @contextmanager
    def prefill(self) -> Iterator[None]:
        """Runs the stock model inside: prompts, whatever their length, and anything else that is no decoding."""
        before, self.in_prefill = self.in_prefill, True
        try:
            yield
        finally:
            self.in_prefill = before

    def stats(self) -> Stats:
        """What happened so far. Waits for the device, and warns where an audit found drift."""
        counted = self._counted()
        if self._audit is None:
            return counted
        found = self._audit.stats()
        found.warn()
        return replace(counted, audit=found)

    def _counted(self) -> Stats:
        counters = np.array([np.zeros(5, np.int64), *(np.array(layer.counters) for layer in self._layers.values())])
        pairs, active, union, kept, fallbacks = map(int, counters.sum(axis=0))
        if pairs == 0:
            return Stats(0, None, None, 0, None)
        return Stats(int(counters[:, 0].max()), active / pairs, union / pairs, fallbacks, kept / pairs / SHARE_UNIT)

    def reset_stats(self) -> None:
        """Sets all counters to zero, the audit's too; intercepts that it moved stay."""
        for layer in self._layers.values():
            layer.reset()
        if self._audit is not None:
            self._audit.reset()

    def remove(self) -> None:
        """Gives every block its stock class back."""
        for moe, stock in zip(self._found, self._stock, strict=True):
            moe.block.__class__ = stock
            moe.block.__dict__.pop("_base", None)


@cache
def _budgeted(stock: Any) -> Any:
    """The subclass of a stock block that decodes under a budget; it has the stock block's name."""

    def __call__(self: Any, x: mx.array) -> mx.array:  # noqa: N807
        layer: BudgetedLayer = self._base
        audit = layer.audit_due(x.shape)
        if audit is None and not layer.restricts(x.shape):
            return stock.__call__(self, x)
        family = layer.moe.family
        group = getattr(self, "sharding_group", None)
        if group is not None:
            x = sum_gradients(group)(x)
        y = layer.execute(x) if audit is None else layer.execute_audited(audit, x, group)
        shared = family.shared(self, x)
        if shared is not None:
            y = y + shared
        if group is not None:
            y = mx.distributed.all_sum(y, group=group)
        # The counters are evaluated with the output: read later they cost nothing, and they never pin a step's graph.
        state = [layer.counters]
        if audit is not None and layer.bias is not None:
            state += [audit.sums[layer.moe.index], layer.bias]
        return mx.depends(y, state)

    return type(stock.__name__, (stock,), {"__call__": __call__, "__module__": __name__})


def apply(
    model: nn.Module,
    predictor: Predictor | None,
    budget: Budget | str | int,
    policy: Policy | None = None,
) -> Session:
    """Puts `model` under a budget, in place of one it may already have. With the budget off it stays stock.

    Decoding is told from prefill by shape: up to `policy.decode_window` tokens per sequence. A prompt's last token
    looks like decoding to that rule; `backends.mlx.generate` marks prompts exactly.

    Args:
        model: of mlx-lm, loaded and of a supported family.
        predictor: checked against the model first; None suits rankings that need none.
        budget: a `Budget`, or its text or number.

    Raises:
        PredictorError: no predictor, or one of another model.
        BudgetError: not a budget, or outside the model's range.
        ValueError: an unsupported model.
    """
    restore(model)
    session = Session(model, predictor, budget, policy or Policy())
    model._base = session
    return session


def restore(model: nn.Module) -> None:
    """Gives a model its stock blocks back; does nothing where no budget was applied."""
    session = model.__dict__.pop("_base", None)
    if session is not None:
        session.remove()


def session_of(model: nn.Module) -> Session | None:
    """The budget in force on `model`, or None."""
    return getattr(model, "_base", None)


@contextmanager
def base_budget(
    model: nn.Module,
    predictor: Predictor | None,
    budget: Budget | str | int,
    policy: Policy | None = None,
) -> Iterator[Session]:
    """`apply` on entry, `restore` on exit."""
    session = apply(model, predictor, budget, policy)
    try:
        yield session
    finally:
        restore(model)


def cache_key(budget: Budget) -> str:
    """Names a budget exactly, plans included: prompt caches filled under one budget do not suit another."""
    if budget.layers is None:
        return str(budget)
    return ";".join(f"{index}={own}" for index, own in sorted(budget.layers.items()))
