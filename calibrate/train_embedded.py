"""Trains an embedded model, a small mixture of experts of a published kind, on the tasks of `base_core.embedded.tasks`.

    python -m calibrate.train_embedded --architecture qwen3_moe --out base_core/embedded/qwen3_moe

Answers only carry loss; whole examples are packed into rows and see nothing of their neighbours.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import time
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast
from transformers.integrations.moe import ExpertsInterface

from backends.cuda.families import find_moe_layers
from base_core.embedded import tasks

CHARACTERS = [chr(c) for c in range(32, 127)]
PAD, UNKNOWN, STOP = "<pad>", "<unk>", tasks.STOP
VOCABULARY = [PAD, UNKNOWN, STOP, *CHARACTERS]
IGNORED = -100
ROPE_THETA = 10000.0

COMMON: dict[str, Any] = {
    "vocab_size": len(VOCABULARY),
    "num_hidden_layers": 4,
    "max_position_embeddings": 4096,
    "rope_parameters": {"rope_type": "default", "rope_theta": ROPE_THETA},
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": VOCABULARY.index(STOP),
    "pad_token_id": VOCABULARY.index(PAD),
}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    # Weights of the chosen experts add up to 1.
    "qwen3_moe": {
        "hidden_size": 192,
        "intermediate_size": 384,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 64,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
    # Raw softmax weights, one shared expert behind a gate.
    "qwen2_moe": {
        "hidden_size": 160,
        "intermediate_size": 320,
        "num_attention_heads": 5,
        "num_key_value_heads": 5,
        "num_experts": 60,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 160,
        "norm_topk_prob": False,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
    # Scaled raw weights, two shared experts, latent attention, a dense first layer.
    "deepseek_v2": {
        "hidden_size": 160,
        "intermediate_size": 320,
        "num_attention_heads": 5,
        "num_key_value_heads": 5,
        "q_lora_rank": None,
        "kv_lora_rank": 64,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 32,
        "v_head_dim": 32,
        "n_routed_experts": 64,
        "num_experts_per_tok": 6,
        "n_shared_experts": 2,
        "moe_intermediate_size": 40,
        "first_k_dense_replace": 1,
        "topk_method": "greedy",
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": False,
        "routed_scaling_factor": 2.5,
    },
}


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One token per character; newline ends the text."""
    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate(VOCABULARY)}, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=STOP, pad_token=PAD, unk_token=UNKNOWN, clean_up_tokenization_spaces=False
    )


def build_model(architecture: str) -> PreTrainedModel:
    """A model of `ARCHITECTURES`, its weights random."""
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(architecture, **COMMON, **ARCHITECTURES[architecture]))


def sorted_experts(module, hidden, top_k_index, top_k_weights):
    """Differentiable experts: rows sorted by expert, one product per expert. hidden [T,d] -> [T,d]."""
    k = top_k_index.shape[-1]
    order = top_k_index.flatten().argsort()
    counts = torch.bincount(top_k_index.flatten(), minlength=module.num_experts).tolist()
    rows = hidden.index_select(0, order // k).split(counts)
    weights = top_k_weights.flatten()[order, None].split(counts)
    outputs = []
    for part, weight, gate_up, down in zip(
        rows, weights, module.gate_up_proj.unbind(), module.down_proj.unbind(), strict=True
    ):
        gate, up = (part @ gate_up.T).chunk(2, dim=-1)
        outputs.append((torch.nn.functional.silu(gate) * up * weight) @ down.T)
    return torch.zeros_like(hidden).index_add(0, order // k, torch.cat(outputs))


def balance_loss(logits: torch.Tensor, k: int) -> torch.Tensor:
    """Switch-style load balancing over one layer's router logits [T,E]; 1 when perfectly even."""
    probabilities = logits.float().softmax(-1)
    experts = logits.shape[-1]
    load = torch.zeros(experts).index_add(
        0, logits.topk(k).indices.flatten(), torch.full((logits.shape[0] * k,), 1.0 / (logits.shape[0] * k))
    )
    return experts * (load * probabilities.mean(0)).sum()


class Packer:
    """Endless packed batches of whole examples: ids, labels, positions and a block-diagonal causal mask."""

    def __init__(self, seed: int, rows: int, length: int):
        self.source = tasks.examples(seed)
        self.rows, self.length = rows, length
        self.index = {c: i for i, c in enumerate(VOCABULARY)}

    def batch(self):
        R, L = self.rows, self.length
        ids = torch.zeros(R, L, dtype=torch.long)
        labels = torch.full((R, L), IGNORED)
        positions = torch.zeros(R, L, dtype=torch.long)
        segment = torch.full((R, L), -1)
        for r in range(R):
            at, number = 0, 0
            while True:
                example = next(self.source)
                text = example.prompt + example.answer + STOP
                if at + len(text) > L:
                    break
                encoded = torch.tensor([self.index[c] for c in text])
                end, answer = at + len(text), at + len(example.prompt)
                ids[r, at:end] = encoded
                labels[r, answer - 1 : end - 1] = encoded[len(example.prompt) :]
                positions[r, at:end] = torch.arange(len(text))
                segment[r, at:end] = number
                at, number = end, number + 1
        causal = torch.ones(L, L, dtype=torch.bool).tril()
        mask = (segment[:, :, None] == segment[:, None, :]) & causal
        return ids, labels, positions, mask[:, None]


def exact_match(model, n: int) -> dict[str, float]:
    """Teacher-forced share of held-out answers whose every token is the argmax, by task (equals greedy accuracy)."""
    index = {c: i for i, c in enumerate(VOCABULARY)}
    chosen = tasks.evaluation_examples(n)
    right = dict.fromkeys(tasks.TASKS, 0)
    total = dict.fromkeys(tasks.TASKS, 0)
    with torch.no_grad():
        for task in tasks.TASKS:
            group = [e for e in chosen if e.task == task]
            texts = [e.prompt + e.answer + STOP for e in group]
            width = max(map(len, texts))
            ids = torch.tensor([[index[c] for c in t] + [0] * (width - len(t)) for t in texts])
            predicted = model(input_ids=ids).logits.argmax(-1)
            for row, example, text in zip(range(len(group)), group, texts, strict=True):
                span = slice(len(example.prompt), len(text))
                right[task] += bool((predicted[row, span.start - 1 : span.stop - 1] == ids[row, span]).all())
                total[task] += 1
    return {task: right[task] / total[task] for task in tasks.TASKS}


def save_checkpoint(model: PreTrainedModel, out: Path) -> None:
    """bf16 weights, and a config that transformers and mlx-lm both read (each wants its own spelling)."""
    copy.deepcopy(model).to(torch.bfloat16).save_pretrained(out)
    path = out / "config.json"
    config = json.loads(path.read_text())
    config["rope_theta"] = ROPE_THETA
    if model.config.model_type == "qwen3_moe":
        config["num_experts"] = model.config.num_experts
    if model.config.model_type == "deepseek_v2":
        config["rope_scaling"] = {"type": "default", "factor": 1.0, "mscale_all_dim": 0}
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    build_tokenizer().save_pretrained(out)


def setup_arg_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--architecture", choices=ARCHITECTURES, default="qwen3_moe")
    parser.add_argument("--out", type=Path, required=True, help="folder for the checkpoint")
    parser.add_argument("--steps", type=int, default=2800)
    parser.add_argument("--rows", type=int, default=48, help="packed rows a step")
    parser.add_argument("--length", type=int, default=84, help="tokens a row")
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--balance", type=float, default=0.01, help="weight of the load-balancing loss")
    parser.add_argument("--seed", type=int, default=0, help="from the training seeds (0..999999)")
    return parser


def main(argv: list[str] | None = None) -> None:
    args = setup_arg_parser().parse_args(argv)
    torch.manual_seed(args.seed)
    ExpertsInterface.register("sorted_training", sorted_experts)
    model = build_model(args.architecture)
    model.set_experts_implementation("sorted_training")
    k = model.config.num_experts_per_tok
    decay = [p for p in model.parameters() if p.dim() > 1]
    rest = [p for p in model.parameters() if p.dim() <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": decay, "weight_decay": 0.01}, {"params": rest, "weight_decay": 0.0}],
        lr=args.learning_rate,
        betas=(0.9, 0.98),
        fused=True,
    )
    warmup = max(1, min(100, args.steps // 10))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda s: min(
            (s + 1) / warmup,
            0.5 * (1 + math.cos(math.pi * max(0, s - warmup) / max(1, args.steps - warmup))) * 0.98 + 0.02,
        ),
    )
    logits_seen: list[torch.Tensor] = []
    for layer in find_moe_layers(model):
        layer.router.register_forward_hook(lambda _module, _inputs, output: logits_seen.append(output[0]))
    packer = Packer(args.seed, args.rows, args.length)
    started = time.perf_counter()
    for step in range(args.steps):
        ids, labels, positions, mask = packer.batch()
        logits_seen.clear()
        output = model(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False)
        loss = torch.nn.functional.cross_entropy(output.logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED)
        balance = torch.stack([balance_loss(logits.flatten(0, -2), k) for logits in logits_seen]).mean()
        optimizer.zero_grad(set_to_none=True)
        (loss + args.balance * balance).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if (step + 1) % 50 == 0 or step == 0:
            spent = time.perf_counter() - started
            left = spent / (step + 1) * (args.steps - step - 1)
            print(
                f"step {step + 1}/{args.steps} loss {loss:.4f} balance {balance:.3f} {spent:.0f}s, {left:.0f}s left",
                flush=True,
            )
        if (step + 1) % 250 == 0 or step + 1 == args.steps:
            scores = exact_match(model, 960)
            print(
                "held out",
                " ".join(f"{t} {s:.3f}" for t, s in scores.items()),
                f"mean {sum(scores.values()) / 8:.4f}",
                flush=True,
            )
            save_checkpoint(model, args.out)


if __name__ == "__main__":
    main()
