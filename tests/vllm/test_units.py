"""What needs no running engine: options, refusals, row kinds of both runners, the operator, ranks, metrics."""

from __future__ import annotations

import json
import multiprocessing
import os
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from backends.cuda.vllm import TESTED_VERSIONS, options_of, register
from backends.cuda.vllm.metrics import FILE, FOLDER_VARIABLE, Collector, export, publish
from backends.cuda.vllm.options import Options, check_engine
from backends.cuda.vllm.router import COUNTERS, BudgetRouter, LayerBudget, rank_limits, wrap_factory
from backends.cuda.vllm.rows import RowBuffer, kinds_in_v1, kinds_in_v2
from backends.cuda.vllm.worker import expert_ranks
from base_core import Budget, LayerPredictor, RouterRule, route, select
from base_core.selection import DECODE, PADDING, PREFILL

E, K, D = 16, 4, 24
CPU = torch.device("cpu")


def parse(**entry):
    return Options.parse({"predictor": "p", "budget": "4", **entry})


class TestOptions:
    def test_reads_all_fields(self):
        options = parse(budget=4, revision="main", tolerance=0.3, speculative=True, force=True)
        assert options == Options(Budget(experts=4), "p", "main", 0.3, True, True)

    @pytest.mark.parametrize(
        ("entry", "message"),
        [
            ("16", "give an object"),
            ({"predictor": "p"}, "lacks a budget"),
            ({"budget": "4"}, "no predictor"),
            ({"predictor": "p", "budget": "0"}, "below 1"),
            ({"predictor": "p", "budget": "4", "buget": 3}, "no field 'buget'"),
            ({"predictor": 3, "budget": "4"}, "predictor is 3"),
            ({"predictor": "p", "budget": "4", "force": "yes"}, "expected a bool"),
        ],
    )
    def test_says_what_is_wrong(self, entry, message):
        with pytest.raises(ValueError, match=message):
            Options.parse(entry)

    def test_off_needs_no_predictor(self):
        assert Options.parse({"budget": "off"}).budget.is_off


def config(model_type="qwen3_moe", speculative=None, **parallel):
    plain = {
        "data_parallel_size": 1,
        "pipeline_parallel_size": 1,
        "prefill_context_parallel_size": 1,
        "enable_eplb": False,
        "enable_dbo": False,
    }
    return SimpleNamespace(
        parallel_config=SimpleNamespace(**{**plain, **parallel}),
        speculative_config=speculative,
        model_config=SimpleNamespace(hf_text_config=SimpleNamespace(model_type=model_type)),
    )


class TestRefusals:
    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"data_parallel_size": 2}, "data parallel"),
            ({"pipeline_parallel_size": 2}, "pipeline parallel"),
            ({"prefill_context_parallel_size": 2}, "context parallel"),
            ({"enable_eplb": True}, "--enable-eplb"),
            ({"enable_dbo": True}, "--enable-dbo"),
            ({"model_type": "llama"}, "'llama' is not supported"),
            ({"speculative": object()}, '"speculative": true'),
        ],
    )
    def test_engines_in_which_it_would_not_hold(self, changes, message):
        with pytest.raises(ValueError, match=message):
            check_engine(config(**changes), parse(), TESTED_VERSIONS[0], False, False)

    def test_all_reasons_at_once(self):
        with pytest.raises(ValueError, match=r"BATCH_INVARIANT.*ROUTING_SIMULATION.*overlap"):
            check_engine(config(enable_dbo=True), parse(), TESTED_VERSIONS[0], True, True)

    def test_versions(self):
        with pytest.raises(ValueError, match=r"tested with vLLM .*, this is 0\.99\.1"):
            check_engine(config(), parse(), "0.99.1", False, False)
        check_engine(config(), parse(force=True), "0.99.1", False, False)
        check_engine(config(speculative=object()), parse(speculative=True), TESTED_VERSIONS[0] + "+cpu", False, False)

    def test_routing_of_unknown_kind(self):
        with pytest.raises(ValueError, match="custom_routing_function"):
            wrap_factory(lambda **_: None)(top_k=2, custom_routing_function=print)


def test_register_twice_wraps_once():
    from vllm.v1.worker.worker_base import WorkerBase

    register()
    wrapped = WorkerBase.__init__
    register()
    assert WorkerBase.__init__ is wrapped


def test_options_of_other_configurations():
    assert options_of(SimpleNamespace(additional_config={})) is None
    assert options_of(SimpleNamespace(additional_config=object())) is None
    assert options_of(SimpleNamespace(additional_config={"base": 1})) == 1


class TestRows:
    def test_first_runner(self):
        """Decoding, a fresh prompt, the last token of a chunked prompt, a preempted request, verified drafts."""
        batch = SimpleNamespace(
            req_ids=["a", "b", "c", "d", "e", "gone"],
            num_computed_tokens_cpu=np.array([7, 0, 3, 6, 9, 0]),
            num_prompt_tokens=np.array([5, 4, 4, 4, 8, 0]),
        )
        drafts = SimpleNamespace(scheduled_spec_decode_tokens={"e": [1, 2]})
        kinds = kinds_in_v1(SimpleNamespace(input_batch=batch), drafts, np.array([1, 4, 1, 3, 3], np.int32))
        assert kinds.tolist() == [DECODE, *[PREFILL] * 4, PREFILL, *[PREFILL] * 3, *[DECODE] * 3]

    def test_second_runner(self):
        batch = SimpleNamespace(
            num_reqs=3,
            is_prefilling_np=np.array([False, False, True]),
            query_start_loc_np=np.array([0, 1, 3, 7, 7, 7]),
        )
        assert kinds_in_v2(batch).tolist() == [DECODE, DECODE, DECODE, *[PREFILL] * 4]

    def test_buffer_keeps_its_tensors(self):
        rows = RowBuffer(6, CPU)
        views = rows.first(4)
        assert views.mixed and not rows.counted
        rows.write(np.array([DECODE, DECODE, DECODE], np.int8))
        assert views.silent.flatten().tolist() == [False, False, False, True]
        assert views.real.flatten().tolist() == [True, True, True, False]
        assert not views.mixed and rows.counted
        rows.write(np.array([DECODE, PREFILL], np.int8))
        assert views.mixed and not rows.counted
        rows.write(np.array([], np.int8))
        assert not views.mixed and not rows.counted


class Setup:
    """A layer of random numbers, beside what the reference selects in it."""

    def __init__(self, budget, kinds, groups=None, rule=None, seed=0):
        rng = np.random.default_rng(seed)
        self.budget, self.kinds, self.groups = Budget.parse(budget), np.array(kinds, np.int8), groups
        self.rule = rule or RouterRule(k=K)
        self.predictor = LayerPredictor(
            rng.normal(size=(E, D)).astype(np.float32), rng.normal(size=E).astype(np.float32), np.ones(E, np.float32)
        )
        self.logits = rng.normal(size=(len(kinds), E)).astype(np.float32)
        self.z = rng.normal(size=(len(kinds), D)).astype(np.float32)
        self.routing = route(self.logits, self.rule)
        self.rows = RowBuffer(len(kinds) + 3, CPU)
        self.rows.write(self.kinds)
        self.counters = torch.zeros(len(COUNTERS), dtype=torch.int64)
        self.layer = LayerBudget(self.rule, None, self.budget, self.predictor, self.rows, self.counters, groups)

    def run(self, ids=None):
        ids = self.routing.ids if ids is None else ids
        padded = np.pad(self.z, ((0, 0), (0, 8)))  # vLLM may hand over wider rows
        return self.layer(
            torch.tensor(padded),
            torch.tensor(self.logits),
            torch.tensor(self.routing.weights),
            torch.tensor(ids, dtype=torch.int32),
        )

    def reference(self):
        r = self.routing
        return select(
            r.scores,
            r.ids,
            r.weights,
            self.predictor.log_energy(self.z),
            self.budget,
            preference=r.preference,
            rows=self.kinds,
            groups=self.groups,
        )


class TestOperator:
    @pytest.mark.parametrize("budget", ["5", "40%", "energy:0.8", "energy:0.9,max=6", "16"])
    @pytest.mark.parametrize("kinds", [[DECODE] * 6, [DECODE] * 5 + [PADDING] * 3, [DECODE, PREFILL, PREFILL]])
    def test_equals_the_reference(self, budget, kinds):
        setup = Setup(budget, kinds)
        weights, ids = setup.run()
        expected = setup.reference()
        np.testing.assert_array_equal(ids.numpy(), expected.ids)
        np.testing.assert_allclose(weights.numpy(), expected.weights, rtol=2e-5, atol=1e-7)
        steps, active, _union, fallbacks, most = setup.counters.tolist()
        counts = int(PREFILL not in kinds)
        assert (steps, active, most, fallbacks) == (counts, *[counts * int(expected.active.sum())] * 2, 0)

    def test_grouped_routing(self):
        rule = RouterRule(
            k=K, score="sigmoid", normalise="selected", num_groups=4, top_groups=2, group_score="top2_sum"
        )
        setup = Setup("5", [DECODE] * 6, rule=rule)
        weights, ids = setup.run()
        np.testing.assert_array_equal(ids.numpy(), setup.reference().ids)
        np.testing.assert_allclose(weights.numpy(), setup.reference().weights, rtol=2e-5, atol=1e-7)

    def test_rows_that_vllm_marked_as_padding_stay_marked(self):
        setup = Setup("5", [DECODE] * 5 + [PADDING] * 2)
        ids = setup.routing.ids.copy()
        ids[5:] = -1
        _, out = setup.run(ids)
        expected = setup.reference()
        np.testing.assert_array_equal(out.numpy()[:5], expected.ids[:5])
        assert (out[5:] == -1).all()
        assert setup.counters.tolist()[1] == expected.active.sum()

    def test_a_cost_that_is_not_finite_keeps_native_routing_and_is_counted(self):
        setup = Setup("5", [DECODE] * 4)
        setup.z[0, 0] = np.nan
        _, ids = setup.run()
        np.testing.assert_array_equal(ids.numpy(), setup.routing.ids)
        assert setup.counters.tolist()[3] == 1

    @pytest.mark.parametrize("budget", ["3", "25%", "energy:0.7"])
    def test_budgets_hold_on_each_expert_parallel_rank(self, budget):
        groups = np.arange(E) % 2
        setup = Setup(budget, [DECODE] * 8, groups=groups)
        _, ids = setup.run()
        expected = setup.reference()
        np.testing.assert_array_equal(ids.numpy(), expected.ids)
        limits = rank_limits(setup.budget, groups)
        for rank in (0, 1):
            assert expected.active[groups == rank].sum() <= limits[rank]


@pytest.mark.parametrize(
    ("strategy", "expected"), [("linear", [0] * 6 + [1] * 5 + [2] * 5), ("round_robin", [0, 1, 2] * 5 + [0])]
)
def test_expert_ranks_follow_vllms_placement(strategy, expected):
    parallel = SimpleNamespace(use_ep=True, ep_size=3)
    moe = SimpleNamespace(moe_parallel_config=parallel, num_logical_experts=E)
    runner = SimpleNamespace(moe_config=moe, expert_placement_strategy=strategy)
    assert expert_ranks(runner).tolist() == expected
    parallel.use_ep = False
    assert expert_ranks(runner) is None


def test_a_router_without_its_layer_changes_nothing():
    """A speculator's own layers are made with the model's, and never get a budget."""
    inner = SimpleNamespace(top_k=K, global_num_experts=E, eplb_state=None, _compute_routing=lambda *_, **__: (1, 2))
    assert BudgetRouter(inner, {})._compute_routing(None, None, None) == (1, 2)


def test_collector_reads_the_workers_file(tmp_path):
    collector = Collector(tmp_path)
    assert list(collector.collect()) == []
    publish_to(tmp_path, torch.tensor([[2, 10, 20, 0, 6], [2, 12, 22, 1, 7]]))
    samples = [sample for metric in collector.collect() for sample in metric.samples]
    assert all(sample.labels == {"engine": "0"} for sample in samples)
    assert {sample.name: sample.value for sample in samples} == {
        "base_moe:layer_steps_total": 4,
        "base_moe:active_experts_total": 22,
        "base_moe:union_experts_total": 42,
        "base_moe:fallbacks_total": 1,
        "base_moe:mean_active_experts": 5.5,
        "base_moe:max_active_experts": 7,
    }


def publish_to(folder, counters):
    """What a worker's thread does, until it has written the counters."""
    serving = threading.Event()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(FOLDER_VARIABLE, str(folder))
        publish(counters, serving, {"engine": "0"})
        wait_for(folder, [[0] * 5] * len(counters))  # before the first step the device is not asked
        serving.set()
        wait_for(folder, counters.tolist())


def wait_for(folder, table):
    deadline = time.monotonic() + 20
    while not (folder / FILE).exists() or json.loads((folder / FILE).read_text())["counters"] != table:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_processes_that_vllm_made_do_not_export(monkeypatch):
    monkeypatch.delenv(FOLDER_VARIABLE, raising=False)
    monkeypatch.setattr(multiprocessing, "parent_process", lambda: "the server")
    export()
    assert FOLDER_VARIABLE not in os.environ
