"""The routed experts of a transformers MoE layer, each active one's weights read once a step.

Registered with transformers as the experts implementation `base`: Triton kernels on a GPU, a C++ kernel on a CPU. Stock
`grouped_mm` also reads only the experts that have rows, but multiplies bfloat16 on a CPU so slowly that reading fewer
experts gains nothing, and on a GPU its tiles are made for many rows an expert.
"""

from __future__ import annotations

import os
from importlib.util import find_spec

import numpy as np
import torch
from torch import Tensor, nn
from transformers.integrations.moe import ExpertsInterface, grouped_mm_experts_forward

from backends.cuda.cpu_linear import Groups, grouped_linear

EXPERTS_IMPLEMENTATION = "base"
WITHOUT_KERNELS = "base_without_kernels"

HAS_TRITON = find_spec("triton") is not None
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def register_experts() -> None:
    """Makes `set_experts_implementation("base")` work; calling it again changes nothing."""
    ExpertsInterface.register(EXPERTS_IMPLEMENTATION, experts_forward)
    ExpertsInterface.register(WITHOUT_KERNELS, experts_without_kernels)


def triton_runs_on(device: torch.device) -> bool:
    """Whether Triton is installed and runs on `device`: a GPU, or anything at all in its interpreter."""
    return HAS_TRITON and (device.type == "cuda" or INTERPRETED)


def keep_address(*tensors: Tensor) -> None:
    """Tells torch.compile that these stay where they are: its CUDA graphs neither copy them nor shun their updates.

    On a CPU, where there are no such graphs, nothing is done.
    """
    for tensor in tensors:
        if triton_runs_on(tensor.device):
            torch._dynamo.mark_static_address(tensor)


def experts_forward(self: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """What an experts module of transformers computes, for any of its families.

    Args:
        self: the experts module, with the attributes that `use_experts_implementation` sets.
        hidden_states: [T, d].
        top_k_index: integer [T, k], expert ids below E.
        top_k_weights: [T, k]. A slot of weight 0 costs nothing: its expert is neither run nor read for it.

    Returns:
        [T, d], of the dtype of `hidden_states`.
    """
    if triton_runs_on(hidden_states.device):
        from backends.cuda.kernels.module import run_experts, runs_on_kernels

        if runs_on_kernels(self, hidden_states):
            return run_experts(self, hidden_states, top_k_index, top_k_weights)
    return experts_without_kernels(self, hidden_states, top_k_index, top_k_weights)


def experts_without_kernels(
    self: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """`experts_forward` without Triton."""
    if _runs_on_cpu(self, hidden_states):
        return _experts_on_cpu(self, hidden_states, top_k_index, top_k_weights)
    return grouped_mm_experts_forward(self, hidden_states, top_k_index, top_k_weights)


def routed_outputs(experts: nn.Module, z: Tensor, ids: Tensor) -> Tensor:
    """What each routed expert gives on its own, before the routing weight: [T, k, d].

    Args:
        experts: called with T * k rows of one expert each, at weight 1; its hooks are not.
        z: [T, d].
        ids: int [T, k].
    """
    T, k = ids.shape
    single = ids.reshape(-1, 1)
    alone = torch.ones(single.shape, dtype=z.dtype, device=z.device)
    return experts.forward(z.repeat_interleave(k, 0), single, alone).view(T, k, -1)


def group_slots(ids: Tensor, weights: Tensor, num_experts: int) -> Groups:
    """Sorts the slots [T, k] by expert, leaving out those of weight 0. Within a group rows ascend."""
    wanted = np.where((weights == 0).numpy(), num_experts, ids.numpy()).ravel()
    order = wanted.argsort(kind="stable")
    counts = np.bincount(wanted, minlength=num_experts + 1)[:num_experts]
    experts = counts.nonzero()[0]
    counts = counts[experts]
    slots = order[: counts.sum()]
    return Groups(slots // ids.shape[1], slots, experts, counts.cumsum() - counts, counts)


def _runs_on_cpu(self: nn.Module, hidden_states: Tensor) -> bool:
    weight = _up_projection(self)
    trains = torch.is_grad_enabled() and (weight.requires_grad or hidden_states.requires_grad)
    return (
        hidden_states.device.type == "cpu"
        and weight.dtype in (torch.bfloat16, torch.float32)
        and not self._is_expert_parallel
        and not trains
        and not torch.compiler.is_compiling()
    )


def _up_projection(self: nn.Module) -> Tensor:
    return self.gate_up_proj if self.has_gate else self.up_proj  # type: ignore[return-value]


def _experts_on_cpu(self, hidden_states: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """Rounds to the weights' dtype where the stock implementations do, so that bfloat16 outputs agree with theirs."""
    groups = group_slots(ids, weights, self.num_experts)
    if not len(groups.experts):
        return torch.zeros_like(hidden_states)
    up, up_bias = _up_projection(self), None
    down_bias = None
    if self.has_bias:
        # A slot that is left out borrows a bias; its own may be of an expert that is not to be read.
        biased = ids.masked_fill(weights == 0, int(groups.experts[0])).flatten()
        up_bias = (self.gate_up_proj_bias if self.has_gate else self.up_proj_bias)[biased]
        down_bias = self.down_proj_bias[biased]

    def project(x: Tensor, weight: Tensor, groups: Groups, bias: Tensor | None) -> Tensor:
        y = grouped_linear(x.to(weight.dtype), weight, groups, ids.numel(), transposed=self.is_transposed)
        return y if bias is None else y.add_(bias)

    inner = project(hidden_states, up, groups, up_bias)  # [T * k, 2I]
    inner = self._apply_gate(inner) if self.has_gate else self.act_fn(inner)  # [T * k, I]
    y = project(inner, self.down_proj, groups._replace(rows=groups.slots), down_bias)  # [T * k, d]
    if self.has_post_expert_norm:
        y = self.post_expert_norm(y)
    return (y.view(*ids.shape, -1) * weights.unsqueeze(-1)).sum(1).to(hidden_states.dtype)
