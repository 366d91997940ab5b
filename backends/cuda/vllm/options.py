"""What a user may write under `base`, and the engines that cannot honour it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

from packaging.version import Version

from backends.cuda.families import FAMILIES
from backends.cuda.vllm import CONFIG_KEY, TESTED_VERSIONS
from base_core import Budget
from base_core.fingerprint import FINGERPRINT_TOLERANCE


@dataclass(frozen=True)
class Options:
    """The `base` entry of vLLM's additional configuration.

    Attributes:
        budget: in any form of `base_core.budget`.
        predictor: a path or a hub id; may be missing only with the budget off.
        revision: of the predictor, for a hub id.
        tolerance: largest relative distance between the model's routers and the predictor's.
        speculative: rows that verify drafted tokens count as decode rows. Speculative decoding is refused without it.
        force: run on a version of vLLM that was not tested.
    """

    budget: Budget
    predictor: str | None = None
    revision: str | None = None
    tolerance: float = FINGERPRINT_TOLERANCE
    speculative: bool = False
    force: bool = False

    @classmethod
    def parse(cls, entry: Any) -> Options:
        """Reads the entry.

        Raises:
            ValueError: an unknown, missing or mistyped field.
        """
        if not isinstance(entry, dict):
            raise ValueError(
                f"additional_config {CONFIG_KEY!r} is {entry!r}: give an object such as "
                f'{{"predictor": "...", "budget": "16"}}'
            )
        known = [field.name for field in fields(cls)]
        for name in entry:
            if name not in known:
                raise ValueError(f"additional_config {CONFIG_KEY!r} has no field {name!r}: use {', '.join(known)}")
        if "budget" not in entry:
            raise ValueError(f"additional_config {CONFIG_KEY!r} lacks a budget: give a number of experts, or off")
        types: dict[str, tuple[type, ...]] = {
            "predictor": (str,),
            "revision": (str,),
            "tolerance": (int, float),
            "speculative": (bool,),
            "force": (bool,),
        }
        for name, expected in types.items():
            if name in entry and (type(entry[name]) not in expected):
                raise ValueError(
                    f"additional_config {CONFIG_KEY!r}: {name} is {entry[name]!r}, expected a {expected[-1].__name__}"
                )
        options = cls(**{**entry, "budget": Budget.parse(entry["budget"])})
        if options.predictor is None and not options.budget.is_off:
            raise ValueError(
                f"additional_config {CONFIG_KEY!r} has a budget but no predictor: add one made by base-moe calibrate"
            )
        return options


def check_engine(vllm_config: Any, options: Options, version: str, batch_invariant: bool, simulated: bool) -> None:
    """Refuses an engine in which the budget would not hold.

    Args:
        vllm_config: vLLM's whole configuration.
        version: of vLLM.
        batch_invariant: vLLM is to give outputs that do not depend on the batch.
        simulated: vLLM invents its routing.

    Raises:
        ValueError: all reasons at once.
    """
    if Version(version).base_version not in TESTED_VERSIONS and not options.force:
        raise ValueError(
            f"BASE was tested with vLLM {', '.join(TESTED_VERSIONS)}, this is {version}: install a tested version, or "
            f'add "force": true to the {CONFIG_KEY!r} entry to try it'
        )
    reasons = list(_reasons(vllm_config, options, batch_invariant, simulated))
    if reasons:
        raise ValueError("BASE cannot run in this engine: " + "; ".join(reasons))


def _reasons(vllm_config: Any, options: Options, batch_invariant: bool, simulated: bool) -> Iterator[str]:
    parallel = vllm_config.parallel_config
    if batch_invariant:
        yield "VLLM_BATCH_INVARIANT asks for outputs that do not depend on the batch, a budget makes them depend on it"
    if simulated:
        yield "VLLM_MOE_ROUTING_SIMULATION_STRATEGY replaces the model's routing"
    if parallel.data_parallel_size > 1:
        yield "data parallel ranks exchange rows inside the MoE layers; run one engine per replica instead"
    if parallel.pipeline_parallel_size > 1:
        yield "pipeline parallel stages each hold only some of the predictor's layers; use tensor parallel"
    if parallel.prefill_context_parallel_size > 1:
        yield "prefill context parallel ranks exchange rows inside the MoE layers"
    if parallel.enable_eplb:
        yield "the expert parallel load balancer moves experts between ranks; serve without --enable-eplb"
    if parallel.enable_dbo:
        yield "dual batch overlap splits a batch in two; serve without --enable-dbo"
    if vllm_config.speculative_config is not None and not options.speculative:
        yield f'verification rows would stop every budget; add "speculative": true to the {CONFIG_KEY!r} entry'
    model_type = vllm_config.model_config.hf_text_config.model_type
    if model_type not in (supported := [family.model_type for family in FAMILIES]):
        yield f"model type {model_type!r} is not supported; use one of {', '.join(supported)}"
