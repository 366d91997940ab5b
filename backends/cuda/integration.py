"""Expert budgets for transformers models: hooks on the routers, as a context manager or an enable/disable pair."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from backends.cuda.audit import Audit, AuditStats
from backends.cuda.experts import (
    EXPERTS_IMPLEMENTATION,
    WITHOUT_KERNELS,
    keep_address,
    register_experts,
    routed_outputs,
    triton_runs_on,
)
from backends.cuda.families import MoELayer, correction_bias, find_moe_layers, router_rule, routing_terms
from backends.cuda.selection import (
    RowKinds,
    native_union,
    predicted_log_energy,
    removal_cost_no_sync,
    select_no_sync,
)
from base_core import Budget, LayerPredictor, Predictor
from base_core.audit import NOTHING_TO_WATCH, check_audit
from base_core.fingerprint import FINGERPRINT_TOLERANCE
from base_core.selection import DECODE, PADDING, PREFILL, Denominator, Fill, Ranking

if TYPE_CHECKING:
    from backends.cuda.kernels.module import FrontRouter

PREDICTED = ("removal_cost", "static_energy")
"""Rankings that need a predictor."""


@dataclass(frozen=True)
class Policy:
    """How a budget is applied.

    Attributes:
        ranking, fill, denominator: see `base_core.select`. The `oracle` ranking runs every routed expert once more.
        decode_window: input lengths up to this one, beside a filled cache, are decoding; longer ones are prefill.
        measure: also run every routed expert for its true energy, so that `Session.stats` can tell what was kept. Slow.
        experts_implementation: how transformers runs the experts meanwhile; None leaves it as it is.
        kernels: `auto` routes and runs experts with the Triton kernels where Triton runs and they take the case; `off`
            never does. With them router logits are float32, so in bfloat16 a near tie may go the other way.
        tolerance: largest relative distance between the model's routers and the predictor's.
        audit: every so many decode steps the executed experts run once more, for their true energies beside the
            predicted ones, see `backends.cuda.audit`; 0 never. Audited steps select in torch.
        audit_correct: the intercepts follow what the audit finds.
    """

    ranking: Ranking = "removal_cost"
    fill: Fill = "backfill"
    denominator: Denominator = "native"
    decode_window: int = 1
    measure: bool = False
    experts_implementation: str | None = EXPERTS_IMPLEMENTATION
    kernels: Literal["auto", "off"] = "auto"
    tolerance: float = FINGERPRINT_TOLERANCE
    audit: int = 0
    audit_correct: bool = False

    def __post_init__(self) -> None:
        for name, known in (("ranking", Ranking), ("fill", Fill), ("denominator", Denominator)):
            if getattr(self, name) not in get_args(known):
                raise ValueError(f"unknown {name} {getattr(self, name)!r}: choose one of {', '.join(get_args(known))}")
        if self.decode_window < 1:
            raise ValueError(f"decode_window {self.decode_window} is below 1: give the longest decoding input")
        if self.kernels not in ("auto", "off"):
            raise ValueError(f"kernels {self.kernels!r} is unknown: choose auto or off")
        check_audit(self.audit, self.audit_correct, self.ranking)

    @property
    def is_base(self) -> bool:
        """Whether this is the paper's method, which is what the front kernel computes."""
        parts = (self.ranking, self.fill, self.denominator)
        return parts == ("removal_cost", "backfill", "native") and not self.measure


@dataclass(frozen=True)
class Stats:
    """Means over decode steps and layers; None where nothing was counted.

    Attributes:
        steps: forward passes with a decode row and no prefill row.
        active_mean, active_max: experts read in one layer.
        union_mean: experts that the rows would have read without a budget.
        fallbacks: (step, layer) pairs that kept native routing because a cost was not finite.
        retained_energy: true removal cost that the active sets hold, relative to the best sets of their size.
        audit: what `Policy.audit` found.
    """

    steps: int
    active_mean: float | None
    active_max: int | None
    union_mean: float | None
    fallbacks: int
    retained_energy: float | None
    audit: AuditStats | None = None


class Step(NamedTuple):
    """The rows of one forward pass.

    Attributes:
        rows: their kinds, as selection in torch reads them.
        counted: bool [], true when it is a decode step.
        raw: int32 [T], the kinds as the front kernel reads them.
    """

    rows: RowKinds
    counted: Tensor
    raw: Tensor

    @classmethod
    def of(cls, rows: Tensor) -> Step:
        kinds = RowKinds.of(rows)
        return cls(kinds, ~kinds.silent.all() & ~kinds.mixed, rows.int().contiguous())

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (*self.rows, self.counted, self.raw)

    def to(self, device: torch.device) -> Step:
        silent, real, mixed, counted, raw = (part.to(device) for part in self.tensors)
        return Step(RowKinds(silent, real, mixed), counted, raw)


def routed_log_energy(experts: nn.Module, z: Tensor, ids: Tensor) -> Tensor:
    """True log ||E_e(z_t)||^2 of the routed pairs, float32 [T, k], through the experts module itself.

    Args:
        experts: called with T * k rows of one expert each, at weight 1.
        z: [T, d].
        ids: int [T, k].
    """
    return routed_outputs(experts, z, ids).float().square().sum(-1).log()


class Session:
    """A budget in force on one model. Made by `enable_base` or `base_budget`; read it with `stats`."""

    def __init__(self, model: nn.Module, predictor: Predictor | None, budget: Budget, policy: Policy) -> None:
        self.model, self.budget, self.policy = model, budget, policy
        self.layers = find_moe_layers(model)
        _check(self.layers, predictor, budget, policy)
        self._handles: list[Any] = []
        self._previous_experts: dict[str, str | None] | None = None
        self._fixed: Step | None = None
        self._step: Step | None = None
        # A transformers model, wrapped or not, says what its rows are; bare blocks decode unless told otherwise.
        self._host = next((module for module in model.modules() if isinstance(module, PreTrainedModel)), None)
        self._audit: Audit | None = None
        limits = [budget.for_layer(layer.index) for layer in self.layers]
        self._acts = policy.measure or not all(limit.is_off for limit in limits)
        if self._acts:
            with torch.inference_mode(False):
                self._counters = _Counters(len(self.layers), self.layers[0].num_experts, self.layers[0].device)
                self._hooks = [
                    _RouterHook(self, slot, layer, limit, predictor.layers[layer.index] if predictor else None)
                    for slot, (layer, limit) in enumerate(zip(self.layers, limits, strict=True))
                ]
                if policy.audit and predictor is not None:
                    self._audit = _make_audit(self.layers, predictor, policy, self._host)

    def set_rows(self, rows: Tensor | None) -> None:
        """Says what the rows of the coming forward passes are, instead of looking at the model's input.

        A second call for as many rows writes into the tensors of the first, so that a captured CUDA graph follows it.

        Args:
            rows: int [T], 0 padding, 1 decode, 2 prefill; None ends it.
        """
        if rows is None:
            self._fixed = None
            return
        with torch.inference_mode(False), torch.no_grad():
            step = Step.of(rows.clone())
            if self._fixed is None or self._fixed.raw.shape != rows.shape or self._fixed.raw.device != rows.device:
                self._fixed = step
                return
            for old, new in zip(self._fixed.tensors, step.tensors, strict=True):
                old.copy_(new)

    def set_budget(self, budget: Budget | str | int) -> None:
        """Puts another budget in force without opening anew. A captured CUDA graph of the front kernel follows it.

        Raises:
            ValueError: the budget does not fit, or restricts other layers than the one before.
        """
        budget = Budget.parse(budget)
        limits = [budget.for_layer(layer.index) for layer in self.layers]
        hooks = self._hooks if self._acts else []
        same = [hook.limit is None for hook in hooks] == [limit.is_off for limit in limits]
        if not same or self.budget.is_off:
            raise ValueError(
                f"budget {budget} restricts other layers than {self.budget}: leave this session and open another one"
            )
        for layer, limit in zip(self.layers, limits, strict=True):
            limit.limit(layer.num_experts)
        if any(hook.front is not None and limit.floor is not None for hook, limit in zip(hooks, limits, strict=True)):
            raise ValueError(
                f"budget {budget} is not one that the front kernel of this session follows: leave it and open another"
            )
        for hook, limit in zip(hooks, limits, strict=True):
            hook.set_budget(limit)
        self.budget = budget

    def stats(self) -> Stats:
        """What happened so far. Waits for the device."""
        if not self._acts:
            return Stats(0, None, None, None, 0, None)
        fronts = [hook.front.state.counters for hook in self._hooks if hook.front is not None]
        stats = self._counters.stats(self.policy.measure, fronts)
        if self._audit is None:
            return stats
        found = self._audit.stats()
        found.warn()
        return replace(stats, audit=found)

    def open(self) -> None:
        """Installs the hooks; with the budget off and nothing to measure there are none."""
        for layer in self.layers:
            if getattr(layer.router, "_base_session", None) is not None:
                raise ValueError(
                    f"{type(self.model).__name__} already has a budget in force: leave its base_budget block, or call "
                    f"disable_base, first"
                )
        for layer in self.layers:
            layer.router._base_session = self  # type: ignore[assignment]
        if not self._acts:
            return
        try:
            if self._host is not None:
                self._set_experts(self._host)
                self._handles.append(self._host.register_forward_pre_hook(self._before, with_kwargs=True))
                self._handles.append(self._host.register_forward_hook(self._after, always_call=True))
            for hook in self._hooks:
                self._handles.append(hook.layer.router.register_forward_hook(hook))
                hook.replace_forward()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Takes everything back; a second call does nothing. `stats` stays readable."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        for hook in self._hooks if self._acts else ():
            hook.restore_forward()
        for layer in self.layers:
            if getattr(layer.router, "_base_session", None) is self:
                del layer.router._base_session
        if self._host is not None and self._previous_experts is not None:
            self._host.set_experts_implementation(self._previous_experts)
            self._previous_experts = None

    @property
    def audit_due(self) -> Audit | None:
        """The audit, where it takes the pass under way in."""
        return self._audit if self._audit is not None and self._audit.due else None

    def step_for(self, T: int, device: torch.device) -> Step | None:
        """The step that a router with T rows is part of, or None when routing is to be left alone.

        Raises:
            ValueError: rows were given for another number of rows.
        """
        step = self._fixed if self._host is None else self._step
        if step is None:
            if self._host is not None:
                return None
            step = self._fixed = Step.of(torch.full((T,), DECODE, device=device))
        known = step.rows.real.shape[0]
        if known != T:
            raise ValueError(
                f"rows describe {known} rows, the router got {T}: call set_rows for this batch, or with None"
            )
        if step.rows.real.device != device:
            step = step.to(device)
        return step

    def _set_experts(self, host: PreTrainedModel) -> None:
        name = self.policy.experts_implementation
        if name is None or self.budget.is_off:
            return
        if name == EXPERTS_IMPLEMENTATION:
            register_experts()
            if self.policy.kernels == "off":
                name = WITHOUT_KERNELS
        previous = host.get_experts_implementation()
        host.set_experts_implementation(name)
        self._previous_experts = previous

    def _before(self, model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        if self._fixed is not None:
            self._step = self._fixed
        else:
            rows = classify_rows(
                args[0] if args else kwargs.get("input_ids"), kwargs, self.policy.decode_window, end_tokens(model)
            )
            self._step = None if rows is None else Step.of(rows)
        if self._audit is not None:
            self._audit.begin(self._step is not None)

    def _after(self, model: nn.Module, args: tuple, output: Any) -> None:
        self._step = None


def end_tokens(model: nn.Module) -> list[int]:
    """Input ids that only finished rows of `generate` have: the model's own EOS and padding tokens.

    Those of `model.generation_config`; an `eos_token_id` passed to `generate` alone is not seen.
    """
    config = getattr(model, "generation_config", None)
    tokens: set[int] = set()
    for value in (getattr(config, "eos_token_id", None), getattr(config, "pad_token_id", None)):
        if value is not None:
            tokens.update(value if isinstance(value, (list, tuple)) else [int(value)])
    return sorted(tokens)


def classify_rows(
    input_ids: Tensor | None, kwargs: dict[str, Any], decode_window: int, ends: list[int]
) -> Tensor | None:
    """Row kinds of a causal language model's input, int32 [T] in the order of the flattened batch, without waiting.

    Args:
        input_ids: int [B, L], or None beside `inputs_embeds` in kwargs.
        kwargs: the other arguments of the model's forward.
        decode_window: see `Policy`.
        ends: input ids of finished rows, see `end_tokens`.

    Returns:
        The kinds, or None when the shapes alone say that everything is prefill.
    """
    tokens = kwargs.get("inputs_embeds") if input_ids is None else input_ids
    if tokens is None:
        return None
    if kwargs.get("cu_seq_lens_q") is not None:
        return _classify_packed(kwargs["cu_seq_lens_q"], kwargs.get("position_ids"), tokens.shape[1], decode_window)
    B, L = tokens.shape[:2]
    cache = kwargs.get("cache", kwargs.get("past_key_values"))  # the older name is still accepted by transformers
    count_cached = getattr(cache, "get_seq_length", None)
    cached = 0 if count_cached is None or decode_window < L else count_cached()
    if not isinstance(cached, Tensor) and cached == 0:
        return None
    rows = torch.full((B, L), DECODE, dtype=torch.int32, device=tokens.device)
    if input_ids is not None:
        for token in ends:
            rows = rows.masked_fill_(input_ids == token, PADDING)
    mask = kwargs.get("attention_mask")
    if isinstance(mask, Tensor) and mask.ndim == 2 and mask.shape[1] >= L:
        rows = rows.masked_fill_(mask[:, -L:] == 0, PADDING)
    if isinstance(cached, Tensor):
        # A static cache counts on the device: one-token prompts are told apart there.
        rows = torch.where(cached.to(rows.device) > 0, rows, PREFILL)
    return rows.flatten()


def _classify_packed(bounds: Tensor, positions: Tensor | None, T: int, decode_window: int) -> Tensor:
    """Continuous batching: sequences of any length one behind the other, then padding.

    A sequence of at most `decode_window` tokens decodes unless it begins at position 0, as a short prompt does. The
    one-token rest of a prompt that was split over two passes looks like decoding and is treated so.
    """
    row = torch.arange(T, device=bounds.device)
    sequence = torch.searchsorted(bounds[1:], row.to(bounds.dtype), right=True).clamp_max(len(bounds) - 2)
    begin = bounds[sequence].long()
    decodes = bounds[sequence + 1] - begin <= decode_window
    if positions is not None:
        decodes &= positions.flatten()[begin.clamp_max(T - 1)] > 0
    return torch.where(row < bounds[-1], torch.where(decodes, DECODE, PREFILL), PADDING).int()


class _RouterHook:
    """Replaces what one router returns, or the router itself where the front kernel takes both in one launch.

    Holds everything that its layer needs on the layer's device. Whether the kernel runs depends on shapes and dtypes
    alone, so that what a CUDA graph captures stays true.
    """

    def __init__(
        self, session: Session, slot: int, layer: MoELayer, budget: Budget, predictor: LayerPredictor | None
    ) -> None:
        self.session, self.slot, self.layer, self.policy = session, slot, layer, session.policy
        self.rule, self.bias = router_rule(layer), correction_bias(layer)
        self.limit = None if budget.is_off else budget.limit(layer.num_experts)
        self.tau, self.floor = budget.tau, budget.floor
        self.front: FrontRouter | None = None
        self._fused = False
        if (
            self.limit is not None
            and self.floor is None
            and predictor is not None
            and self.policy.kernels == "auto"
            and self.policy.is_base
            and triton_runs_on(layer.device)
        ):
            from backends.cuda.kernels.module import FrontRouter

            if FrontRouter.takes(layer):
                self.front = FrontRouter(layer, predictor, budget)
        if self.limit is not None and predictor is not None:
            if self.policy.ranking == "removal_cost":
                self.weight = torch.tensor(predictor.weight.T.copy(), device=layer.device)
                self.offset = torch.tensor(predictor.bias, device=layer.device)
                keep_address(self.weight, self.offset)
            elif self.policy.ranking == "static_energy":
                self.static = torch.tensor(predictor.static_log_energy(), device=layer.device)

    def set_budget(self, budget: Budget) -> None:
        self.limit = None if budget.is_off else budget.limit(self.layer.num_experts)
        self.tau, self.floor = budget.tau, budget.floor
        if self.front is not None:
            self.front.set_budget(budget)

    def replace_forward(self) -> None:
        """Puts the front kernel in the router's place, where there is one."""
        if self.front is None:
            return
        self._stock_forward = self.layer.router.forward
        self.layer.router.forward = self.forward  # type: ignore[method-assign]
        # Another experts implementation would never take what the front leaves for it.
        if self.session._host is None or self.policy.experts_implementation == EXPERTS_IMPLEMENTATION:
            self.front.attach()

    def restore_forward(self) -> None:
        """Undoes `replace_forward`; a second call does nothing."""
        if self.front is not None and self.layer.router.__dict__.get("forward") == self.forward:
            del self.layer.router.forward
            self.front.detach()

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The router's forward: native routing for prefill and large batches, the finished selection otherwise."""
        assert self.front is not None
        z = hidden_states.reshape(-1, hidden_states.shape[-1])
        step = self.session.step_for(len(z), z.device)
        self._fused = step is not None and self.session.audit_due is None and self.front.takes_batch(z)
        if step is None or not self._fused:
            return self._stock_forward(hidden_states)
        self.session._counters.pass_by(self.slot, step)
        return self.front.route(z, step.raw)

    def __call__(self, router: nn.Module, args: tuple, output: tuple[Tensor, Tensor, Tensor]) -> Any:
        if self._fused:
            return None
        logits, weights, ids = output
        step = self.session.step_for(len(ids), ids.device)
        if step is None:
            return None
        z = args[0].reshape(-1, args[0].shape[-1])
        true = None
        if self.policy.measure or (self.policy.ranking == "oracle" and self.limit is not None):
            with torch.no_grad():
                true = routed_log_energy(self.layer.experts, z, ids)
        if self.limit is None:
            union = native_union(ids, step.rows.real, logits.shape[1])
            self.session._counters.record(self.slot, step, union, union)
            return None
        terms = routing_terms(logits, self.rule, self.bias)
        log_energy = self._log_energy(z, ids, true, logits.shape)
        out = select_no_sync(
            terms.scores,
            ids,
            weights,
            log_energy,
            self.limit,
            tau=self.tau,
            floor=self.floor,
            preference=terms.preference,
            rows=step.rows,
            ranking=self.policy.ranking,
            fill=self.policy.fill,
            denominator=self.policy.denominator,
        )
        retained = None
        if self.policy.measure and true is not None:
            retained = retained_energy(ids, weights, true, step.rows.silent, out.active)
        self.session._counters.record(self.slot, step, out.active, out.union, out.fell_back, retained)
        audit = self.session.audit_due
        if audit is not None and log_energy is not None:
            with torch.no_grad():
                energies = routed_log_energy(self.layer.experts, z, out.ids)
            offsets = [self.offset] if self.front is None else [self.offset, self.front.energy_bias]
            audit.observe(self.slot, out.ids, energies, ids, weights, log_energy, out.active, step.rows, offsets)
        return logits, out.weights, out.ids

    def _log_energy(self, z: Tensor, ids: Tensor, true: Tensor | None, shape: torch.Size) -> Tensor | None:
        if self.policy.ranking == "removal_cost":
            return predicted_log_energy(z, self.weight, self.offset)
        if self.policy.ranking == "static_energy":
            return self.static
        if self.policy.ranking == "oracle":
            assert true is not None
            return torch.zeros(shape, device=z.device).scatter_(1, ids, true)
        return None


@torch.no_grad()
def retained_energy(ids: Tensor, weights: Tensor, log_energy: Tensor, silent: Tensor, active: Tensor) -> Tensor:
    """True removal cost inside `active`, relative to the best set of the same size: float32 [].

    Args:
        ids, weights, log_energy: [T, k], native choice, its weights and its true log-energies.
        silent: bool [T, 1], rows without a vote.
        active: bool [E].
    """
    cost = removal_cost_no_sync(ids, weights, log_energy, silent, len(active))
    place = torch.arange(len(active), device=cost.device)
    best = (cost.sort(descending=True).values * (place < active.sum())).sum()
    return torch.where(best > 0, (cost * active).sum() / best, 1.0).clamp_max(1)


class _Counters:
    """Totals over decode steps, on the device. A step is over when its last MoE layer has been recorded or passed by.

    The front kernel counts for itself: a layer that it routes is passed by here. Which layers are does not depend on
    any tensor's value, so they are kept in a list of Python.
    """

    def __init__(self, L: int, E: int, device: torch.device) -> None:
        self.layers = L
        self.recorded: list[int] = []
        self.active = torch.zeros(L, E, dtype=torch.bool, device=device)
        self.union = torch.zeros(L, E, dtype=torch.bool, device=device)
        self.fell_back = torch.zeros(L, dtype=torch.bool, device=device)
        self.retained = torch.ones(L, device=device)
        self.totals = torch.zeros(4, dtype=torch.int64, device=device)  # (step, layer) pairs, active, union, fallbacks
        self.most = torch.zeros((), dtype=torch.int64, device=device)
        self.retained_total = torch.zeros((), dtype=torch.float64, device=device)
        keep_address(self.active, self.union, self.fell_back, self.retained)
        keep_address(self.totals, self.most, self.retained_total)

    @torch.no_grad()
    def record(
        self,
        slot: int,
        step: Step,
        active: Tensor,
        union: Tensor,
        fell_back: Tensor | None = None,
        retained: Tensor | None = None,
    ) -> None:
        self._begin(slot)
        self.active[slot].copy_(active)
        self.union[slot].copy_(union)
        if fell_back is not None:
            self.fell_back[slot].copy_(fell_back)
        if retained is not None:
            self.retained[slot].copy_(retained)
        self.recorded.append(slot)
        self._end(slot, step)

    @torch.no_grad()
    def pass_by(self, slot: int, step: Step) -> None:
        """Nothing to record of this layer, but the step may be over."""
        self._begin(slot)
        self._end(slot, step)

    def _begin(self, slot: int) -> None:
        if slot == 0:
            self.recorded.clear()  # of a step that was not finished

    def _end(self, slot: int, step: Step) -> None:
        if slot < self.layers - 1 or not self.recorded:
            return
        counted = step.counted.to(self.active.device)
        whole = len(self.recorded) == self.layers
        for part in [slice(0, self.layers)] if whole else [slice(i, i + 1) for i in self.recorded]:
            self._add(counted, part)
        self.recorded.clear()

    def _add(self, counted: Tensor, part: slice) -> None:
        sizes = self.active[part].sum(1)
        self.totals += counted * torch.stack(
            (torch.full_like(self.most, len(sizes)), sizes.sum(), self.union[part].sum(), self.fell_back[part].sum())
        )
        self.most.copy_(torch.maximum(self.most, counted * sizes.amax()))
        self.retained_total += counted * self.retained[part].sum()

    def stats(self, measured: bool, fronts: list[Tensor]) -> Stats:
        """Together with the counters of the front kernels, int64 [5] each, see `FrontState`."""
        pairs, active, union, fallbacks = self.totals.tolist()
        most = int(self.most.item())
        for counters in fronts:
            front_steps, front_fallbacks, front_active, front_union, front_most = counters.tolist()
            pairs, fallbacks = pairs + front_steps, fallbacks + front_fallbacks
            active, union, most = active + front_active, union + front_union, max(most, front_most)
        if pairs == 0:
            return Stats(0, None, None, None, 0, None)
        retained = self.retained_total.item() / pairs if measured else None
        return Stats(pairs // self.layers, active / pairs, most, union / pairs, fallbacks, retained)


def _make_audit(layers: list[MoELayer], predictor: Predictor, policy: Policy, host: PreTrainedModel | None) -> Audit:
    if host is None:
        raise ValueError("audit counts a transformers model's forward passes, and this module holds none: set audit=0")
    folded = [predictor.card.fit.get(layer.index, {}).get("correction", 0.0) for layer in layers]
    return Audit([layer.index for layer in layers], folded, policy.audit, policy.audit_correct, layers[0].device)


def _check(layers: list[MoELayer], predictor: Predictor | None, budget: Budget, policy: Policy) -> None:
    """Everything that can be wrong is found here, before the first token."""
    for layer in layers:
        budget.for_layer(layer.index).limit(layer.num_experts)
    if policy.audit and budget.is_off:
        raise ValueError(NOTHING_TO_WATCH)
    first = layers[0]
    if predictor is None:
        if policy.ranking in PREDICTED and not budget.is_off:
            raise ValueError(
                f"ranking {policy.ranking!r} needs a predictor, got None: pass one made by base-moe calibrate, or "
                f"choose a ranking that reads the router alone (weight_sum, squared_weight, top1_union)"
            )
        return
    predictor.check_model(
        model_type=first.family.model_type,
        layers=tuple(layer.index for layer in layers),
        num_experts=first.num_experts,
        experts_per_token=first.experts_per_token,
        hidden_size=first.hidden_size,
        fingerprint={layer.index: layer.fingerprint() for layer in layers},
        tolerance=policy.tolerance,
    )


def enable_base(
    model: nn.Module,
    predictor: Predictor | None,
    budget: Budget | str | int,
    policy: Policy | None = None,
    **changes: Any,
) -> Session:
    """Puts `budget` in force on `model` until `disable_base`.

    Args:
        model: a transformers model of a supported family, or any module that holds its MoE blocks. The rows of the
            latter all decode unless `Session.set_rows` says otherwise.
        predictor: calibrated on this model. Rankings that read the router alone do without: pass None.
        budget: in any form of `base_core.budget`. With `off` the stock model runs untouched.
        policy: how the budget is applied; `changes` replace single fields of it.

    Raises:
        ValueError: unsupported model, budget that does not fit, missing or foreign predictor, unknown policy field, or
            a budget already in force.
    """
    try:
        policy = replace(policy or Policy(), **changes)
    except TypeError as error:
        raise ValueError(f"unknown policy field ({error}): see Policy") from error
    session = Session(model, predictor, Budget.parse(budget), policy)
    session.open()
    return session


def disable_base(model: nn.Module) -> None:
    """Takes the budget off `model`, which is then as it was before.

    Raises:
        ValueError: none is in force.
    """
    session = getattr(find_moe_layers(model)[0].router, "_base_session", None)
    if session is None:
        raise ValueError(f"{type(model).__name__} has no budget in force: enable_base comes first")
    session.close()


@contextmanager
def base_budget(
    model: nn.Module,
    predictor: Predictor | None,
    budget: Budget | str | int,
    policy: Policy | None = None,
    **changes: Any,
) -> Iterator[Session]:
    """`with base_budget(model, predictor, 16): model.generate(...)`; see `enable_base`."""
    session = enable_base(model, predictor, budget, policy, **changes)
    try:
        yield session
    finally:
        session.close()
