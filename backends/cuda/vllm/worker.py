"""Puts a budget on one vLLM worker: on the routers while the model loads, on the runner's input preparation after.

Everything is attached to that worker's own objects. Nothing of vLLM is replaced for good.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Any

import numpy as np
import torch
import vllm
from torch import nn
from vllm import envs
from vllm.logger import init_logger
from vllm.model_executor.layers.fused_moe import layer as fused_moe_layer
from vllm.model_executor.layers.fused_moe.expert_map_manager import determine_expert_map
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner

from backends.cuda.vllm.metrics import publish
from backends.cuda.vllm.options import Options, check_engine
from backends.cuda.vllm.router import COUNTERS, BudgetRouter, LayerBudget, wrap_factory
from backends.cuda.vllm.rows import RowBuffer, kinds_in_v1, kinds_in_v2
from base_core import Predictor, load_predictor
from base_core.fingerprint import router_fingerprint

logger = init_logger("vllm.base_moe")

ROUTER_NAMES = ("gate", "router")
"""What vLLM's models call the router's linear layer beside `experts`; the second is gpt_oss."""


@dataclass(frozen=True, eq=False)
class Block:
    """One MoE layer of a model in vLLM.

    Attributes:
        index: of the decoder layer.
        runner: vLLM's object that routes and runs its experts.
        gate: the linear layer that makes the router's logits, whole on every rank.
    """

    index: int
    runner: Any
    gate: nn.Module


def attach(worker: Any, entry: Any) -> None:
    """Prepares a worker, before it loads its model.

    Args:
        worker: a vLLM worker.
        entry: the `base` entry of its configuration.

    Raises:
        ValueError: bad options, a predictor that cannot be had, or an engine that is not supported.
    """
    options = Options.parse(entry)
    if options.budget.is_off:
        logger.info("BASE is off: its budget says so")
        return
    strategy = envs.VLLM_MOE_ROUTING_SIMULATION_STRATEGY
    check_engine(worker.vllm_config, options, vllm.__version__, envs.VLLM_BATCH_INVARIANT, bool(strategy))
    assert options.predictor is not None
    predictor = load_predictor(options.predictor, options.revision)
    load_model = worker.load_model

    @wraps(load_model)
    def load_with_budget(*args: Any, **kwargs: Any) -> Any:
        with _wrapped_routers():
            result = load_model(*args, **kwargs)
        _BudgetOnWorker(worker, options, predictor)
        return result

    worker.load_model = load_with_budget


@contextmanager
def _wrapped_routers() -> Iterator[None]:
    """Layers that are made inside get a `BudgetRouter`."""
    create = fused_moe_layer.create_fused_moe_router
    fused_moe_layer.create_fused_moe_router = wrap_factory(create)
    try:
        yield
    finally:
        fused_moe_layer.create_fused_moe_router = create


def find_blocks(model: nn.Module) -> list[Block]:
    """The MoE layers of a loaded model by ascending index; a speculator's own are not among them.

    Raises:
        ValueError: none, or one that the budget cannot hold in.
    """
    blocks = []
    for path, module in model.named_modules():
        if not isinstance(module, MoERunner):
            continue
        parent = model.get_submodule(path.rpartition(".")[0])
        gate = next((getattr(parent, name) for name in ROUTER_NAMES if hasattr(parent, name)), None)
        if not isinstance(module.router, BudgetRouter):
            raise ValueError(f"BASE cannot run on this model: {path} brings a router of its own")
        if module.is_monolithic:
            raise ValueError(
                f"BASE cannot run with the expert kernel of {path}: it routes by itself; choose another one, such as "
                f"--moe-backend triton"
            )
        if module.moe_config.is_sequence_parallel:
            raise ValueError(
                "BASE cannot run with sequence parallel MoE layers: each rank sees only some of the rows; serve "
                "without expert parallelism"
            )
        if gate is None:
            raise ValueError(f"BASE cannot run on this model: {path} has no router beside it")
        blocks.append(Block(module.layer_id, module, gate))
    if not blocks:
        raise ValueError(f"BASE cannot run on {type(model).__name__}: it has no mixture of experts")
    return sorted(blocks, key=lambda block: block.index)


@torch.inference_mode()
def router_weight(gate: nn.Module, hidden_size: int, dtype: torch.dtype, device: torch.device) -> np.ndarray:
    """The router matrix, float32 [E, d], by what the layer makes of the unit vectors.

    Its own tensor would not do: vLLM packs weights for some processors and leaves an empty one behind.
    """

    def logits(z: torch.Tensor) -> torch.Tensor:
        output = gate(z)
        return (output[0] if isinstance(output, tuple) else output).float()

    unit = torch.eye(hidden_size, dtype=dtype, device=device)
    return (logits(unit) - logits(torch.zeros_like(unit[:1]))).T.cpu().numpy()


def expert_ranks(runner: Any) -> np.ndarray | None:
    """The expert parallel rank of each expert, int64 [E], or None when every rank holds a part of all experts."""
    parallel = runner.moe_config.moe_parallel_config
    if not parallel.use_ep or parallel.ep_size == 1:
        return None
    E = runner.moe_config.num_logical_experts
    ranks = np.empty(E, np.int64)
    for rank in range(parallel.ep_size):
        held = determine_expert_map(parallel.ep_size, rank, E, runner.expert_placement_strategy)[1]
        assert held is not None
        ranks[(held >= 0).numpy()] = rank
    return ranks


class _BudgetOnWorker:
    """The budget of one worker whose model is loaded."""

    def __init__(self, worker: Any, options: Options, predictor: Predictor) -> None:
        config = worker.vllm_config
        blocks = find_blocks(worker.model_runner.get_model())
        self.indices = [block.index for block in blocks]
        device = worker.device
        self._check(config, options, predictor, blocks, device)
        captured = config.compilation_config.max_cudagraph_capture_size or 0
        self.rows = RowBuffer(max(config.scheduler_config.max_num_batched_tokens, captured), device)
        with torch.inference_mode(False):
            self.counters = torch.zeros(len(blocks), len(COUNTERS), dtype=torch.int64, device=device)
        restricted = 0
        for slot, block in enumerate(blocks):
            budget = options.budget.for_layer(block.index)
            if budget.is_off:
                continue
            router = block.runner.router
            router.layer = LayerBudget(
                router.rule(),
                router.correction,
                budget,
                predictor.layers[block.index],
                self.rows,
                self.counters[slot],
                expert_ranks(block.runner),
            )
            router.name = block.runner.layer_name
            restricted += 1
        self._follow(worker.model_runner)
        worker.base_stats = self.stats
        if worker.rank == 0:
            ranks = expert_ranks(blocks[0].runner)
            per_rank = "" if ranks is None else f" on each of {ranks.max() + 1} expert parallel ranks"
            logger.info(
                "BASE active: %d layers, budget %s%s, predictor %s",
                restricted,
                options.budget,
                per_rank,
                options.predictor,
            )
            served = config.model_config.served_model_name
            name = served if isinstance(served, str) else (served or [config.model_config.model])[0]
            publish(self.counters, self.rows.written, {"model_name": name, "engine": "0"})

    @staticmethod
    def _check(config: Any, options: Options, predictor: Predictor, blocks: list[Block], device: torch.device) -> None:
        d, dtype = config.model_config.get_hidden_size(), config.model_config.dtype
        weights = {block.index: router_weight(block.gate, d, dtype, device) for block in blocks}
        E = len(weights[blocks[0].index])
        for block in blocks:
            options.budget.for_layer(block.index).limit(E)
        predictor.check_model(
            model_type=config.model_config.hf_text_config.model_type,
            layers=tuple(weights),
            num_experts=E,
            experts_per_token=blocks[0].runner.router.top_k,
            hidden_size=d,
            fingerprint={index: tuple(router_fingerprint(weight)) for index, weight in weights.items()},
            tolerance=options.tolerance,
        )

    def _follow(self, runner: Any) -> None:
        """From now on the runner tells the kinds of its rows, outside all that is compiled or captured."""
        if hasattr(runner, "_prepare_inputs"):
            prepare = runner._prepare_inputs

            @wraps(prepare)
            def prepare_in_v1(scheduler_output: Any, num_scheduled_tokens: Any) -> Any:
                result = prepare(scheduler_output, num_scheduled_tokens)
                self.rows.write(kinds_in_v1(runner, scheduler_output, num_scheduled_tokens))
                return result

            runner._prepare_inputs = prepare_in_v1
        else:
            prepare = runner.prepare_inputs

            @wraps(prepare)
            def prepare_in_v2(*args: Any, **kwargs: Any) -> Any:
                batch = prepare(*args, **kwargs)
                self.rows.write(kinds_in_v2(batch))
                return batch

            runner.prepare_inputs = prepare_in_v2

    def stats(self) -> dict[str, list[int]]:
        """What each layer counted so far, see `COUNTERS`; waits for the device. `LLM.collective_rpc("base_stats")`."""
        table = self.counters.tolist()
        return {"layers": self.indices} | {name: [row[column] for row in table] for column, name in enumerate(COUNTERS)}
