"""Calibration of the rivals: SERE's expert similarities, ExFold's norms, folding scalars and losses.

One pass of the dense model over the same text that a predictor is fitted on. SERE's statistics come from all experts on
every one of the first counted tokens, ExFold's from the experts that a token's router chose together.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from tqdm import tqdm
from transformers import PreTrainedModel

from backends.cuda.experts import EXPERTS_IMPLEMENTATION, register_experts, routed_outputs
from backends.cuda.families import MoELayer, find_moe_layers, fingerprint
from base_core import Card
from base_core.report import installed_versions
from base_core.rivals import DEFAULT_RIVAL_TOKENS, UNSEEN_LOSS, Rivals
from calibrate.text import Sequences
from calibrate.torch_pass import packed_mask

SIMILARITY_TOKENS = 12_800
"""Tokens on which all experts run: 200 sequences of 64, the default of SERE's script."""
CKA_TOKENS = 1024
"""CKA compares token by token matrices, so it takes fewer still."""
RIDGE = 1e-3  # of ExFold's scalars
CLIP = 4.0  # of ExFold's scalars, as for Qwen3
CHUNK_NUMBERS = 1 << 24
"""Numbers in the outputs of all experts that are computed at a time."""
FOLD_ROWS = 1024
"""Tokens whose pairs are computed at a time."""


class LayerSums:
    """What the rivals' calibration of one layer needs, summed over tokens. E experts, float64.

    Attributes:
        inner: [E, E], sum of <E_p(z), E_q(z)> over the first `SIMILARITY_TOKENS`.
        cosine: [E, E], sum of their cosines.
        tokens: number of tokens.
        cka_inputs: the first `CKA_TOKENS` router inputs.
        fold: [3, E, E], over tokens routed to source s and target t, with n the norm of an output: sums of
            n_s <E_s, E_t>, n_s n_t^2 and n_s^3.
        norm, pairs: [E], sum of the norms of routed outputs, and their number.
    """

    def __init__(self, layer: MoELayer) -> None:
        E = layer.num_experts
        self.layer = layer
        self.inner, self.cosine = torch.zeros(2, E, E, dtype=torch.float64)
        self.fold = torch.zeros(3, E * E, dtype=torch.float64)
        self.norm, self.pairs = torch.zeros(2, E, dtype=torch.float64)
        self.tokens = 0
        self.cka_inputs: list[Tensor] = []

    def add(self, z: Tensor, ids: Tensor) -> None:
        """Takes tokens in: router inputs z [T, d], routed experts ids int [T, k]."""
        if (room := CKA_TOKENS - self.tokens) > 0:
            self.cka_inputs.append(z[:room].clone())
        if (room := SIMILARITY_TOKENS - self.tokens) > 0:
            for part in z[:room].split(max(1, CHUNK_NUMBERS // (self.layer.num_experts * z.shape[1]))):
                self._add_similarities(part)
        for part, chosen in zip(z.split(FOLD_ROWS), ids.split(FOLD_ROWS), strict=True):
            self._add_pairs(part, chosen)
        self.tokens += len(z)

    def _add_similarities(self, z: Tensor) -> None:
        everyone = torch.arange(self.layer.num_experts, device=z.device).expand(len(z), -1)
        outputs = routed_outputs(self.layer.experts, z, everyone).float().transpose(0, 1)  # [E, T, d]
        by_expert = outputs.flatten(1)
        self.inner += (by_expert @ by_expert.T).double().cpu()
        norms = torch.linalg.vector_norm(outputs, dim=-1, keepdim=True)
        unit = (outputs / norms.clamp_min(torch.finfo(torch.float32).tiny)).flatten(1)
        self.cosine += (unit @ unit.T).double().cpu()

    def _add_pairs(self, z: Tensor, ids: Tensor) -> None:
        E = self.layer.num_experts
        outputs = routed_outputs(self.layer.experts, z, ids).double()  # [T, k, d]
        n = torch.linalg.vector_norm(outputs, dim=-1)
        terms = (
            n[:, :, None] * (outputs @ outputs.mT),
            n[:, :, None] * n[:, None, :].square(),
            n[:, :, None].pow(3).expand(-1, -1, n.shape[1]),
        )
        place = (ids[:, :, None] * E + ids[:, None, :]).flatten().cpu()
        for sums, term in zip(self.fold, terms, strict=True):
            sums.index_add_(0, place, term.flatten().cpu())
        self.norm.index_add_(0, ids.flatten().cpu(), n.flatten().cpu())
        self.pairs += ids.flatten().cpu().bincount(minlength=E)

    def tensors(self) -> dict[str, NDArray[np.float32]]:
        """The calibration, see `base_core.rivals`."""
        E = self.layer.num_experts
        scalar, loss = fold_tables(*self.fold.view(3, E, E).numpy())
        similarity = {
            "similarity_frobenius": frobenius_similarity(self.inner.numpy()),
            "similarity_cosine": (self.cosine.numpy() / min(self.tokens, SIMILARITY_TOKENS) + 1) / 2,
            "similarity_cka": self._cka(),
        }
        for matrix in similarity.values():
            np.fill_diagonal(matrix, 1)
        seen = self.pairs.numpy() > 0
        norm = self.norm.numpy() / np.maximum(self.pairs.numpy(), 1)
        norm = np.where(seen, norm, np.median(norm[seen]))
        named = {**similarity, "norm": norm, "fold_scalar": scalar, "fold_loss": loss}
        return {name: array.astype(np.float32) for name, array in named.items()}

    @torch.inference_mode()
    def _cka(self) -> NDArray[np.float64]:
        """Linear CKA of centred outputs; products of tokens give the same as products of features."""
        z = torch.cat(self.cka_inputs)
        grams = []
        for expert in range(self.layer.num_experts):
            own = torch.full((len(z), 1), expert, device=z.device)
            y = routed_outputs(self.layer.experts, z, own)[:, 0].float()
            y = y - y.mean(0)
            gram = (y @ y.T).flatten()
            grams.append(gram / torch.linalg.vector_norm(gram).clamp_min(torch.finfo(torch.float32).tiny))
        stacked = torch.stack(grams)
        return (stacked @ stacked.T).double().clamp(0, 1).cpu().numpy()


def frobenius_similarity(inner: NDArray[np.float64]) -> NDArray[np.float64]:
    """1 - ||E_p(Z) - E_q(Z)|| / the largest such distance of the layer, from the inner products [E, E] (SERE)."""
    square = np.diag(inner)
    distance = np.sqrt(np.maximum(square[:, None] + square[None, :] - 2 * inner, 0))
    return 1 - distance / max(distance.max(), np.finfo(np.float64).tiny)


def fold_tables(
    product: NDArray[np.float64], target: NDArray[np.float64], source: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """ExFold's scalars c(s -> t) and relative losses L(s -> t), both [E, E], from the sums in `LayerSums.fold`.

    c is the least-squares factor that makes E_t look like E_s, tokens weighted by ||E_s||; the loss is what remains,
    the whole being 1. A pair that was never seen together gets scalar 0 and a loss above any other, an expert and
    itself scalar 1 and the same loss.
    """
    seen = source > 0
    scalar = np.where(seen, np.clip(product / (target + RIDGE), -CLIP, CLIP), 0)
    residual = source - 2 * scalar * product + scalar**2 * target
    loss = np.divide(np.maximum(residual, 0), source, out=np.full_like(source, UNSEEN_LOSS), where=seen)
    np.fill_diagonal(scalar, 1)
    np.fill_diagonal(loss, UNSEEN_LOSS)
    return scalar, loss


@torch.inference_mode()
def calibrate_rivals(
    model: PreTrainedModel,
    sequences: Sequences,
    *,
    tokens: int = DEFAULT_RIVAL_TOKENS,
    batch_tokens: int = 8192,
    model_id: str = "",
    model_revision: str | None = None,
    source: str = "",
    progress: bool = False,
) -> Rivals:
    """Runs the dense model over the text and returns the rivals' calibration of every MoE layer.

    Args:
        sequences: the text; its counted tokens are taken in.
        tokens: at most so many of them.
        batch_tokens: of a forward pass.
        model_id, model_revision, source: for the card.
        progress: shows a bar.

    Raises:
        ValueError: text without a counted token.
    """
    if not sequences.counted.any():
        raise ValueError("the text has no token that counts: give prompts with answers, or plain text")
    layers = find_moe_layers(model)
    sums = [LayerSums(layer) for layer in layers]
    wanted = min(tokens, int(sequences.counted.sum()))
    _run(model, sequences, sums, wanted, batch_tokens, progress)
    first = layers[0]
    card = Card(
        model_id=model_id,
        model_revision=model_revision,
        model_type=first.family.model_type,
        layers=tuple(layer.index for layer in layers),
        num_experts=first.num_experts,
        experts_per_token=first.experts_per_token,
        hidden_size=first.hidden_size,
        fingerprint=fingerprint(model),
        source=source,
        tokens=wanted,
        versions=installed_versions(),
    )
    settings = {
        "similarity_tokens": min(SIMILARITY_TOKENS, wanted),
        "cka_tokens": min(CKA_TOKENS, wanted),
        "ridge": RIDGE,
        "clip": CLIP,
    }
    fitted = {}
    for layer, layer_sums in tqdm(
        list(zip(layers, sums, strict=True)), desc="similarities", unit="layer", leave=False, disable=not progress
    ):
        fitted[layer.index] = layer_sums.tensors()
    return Rivals(card, settings, fitted)


def _run(
    model: PreTrainedModel,
    sequences: Sequences,
    sums: Sequence[LayerSums],
    wanted: int,
    batch_tokens: int,
    progress: bool,
) -> None:
    register_experts()
    kept = torch.zeros(0, dtype=torch.bool)

    def hook_for(layer_sums: LayerSums) -> Any:
        def hook(router: nn.Module, args: tuple, output: tuple[Tensor, Tensor, Tensor]) -> None:
            z, ids = args[0].reshape(-1, args[0].shape[-1]), output[2]
            rows = kept.to(z.device)
            layer_sums.add(z[rows], ids[rows].long())

        return hook

    rows = max(1, batch_tokens // sequences.ids.shape[1])
    previous, trained = model.get_experts_implementation(), model.training
    handles = [layer_sums.layer.router.register_forward_hook(hook_for(layer_sums)) for layer_sums in sums]
    try:
        model.eval()
        model.set_experts_implementation(EXPERTS_IMPLEMENTATION)
        decoder, device = model.base_model, next(model.parameters()).device
        with tqdm(total=wanted, unit="tok", unit_scale=True, desc="rivals", leave=False, disable=not progress) as bar:
            left = wanted
            for start in itertools.count(0, rows):
                if left == 0:
                    return
                part = slice(start, start + rows)
                counted = sequences.counted[part].ravel()
                counted = counted & (np.cumsum(counted) <= left)
                taken = int(counted.sum())
                if not taken:
                    continue
                kept = torch.from_numpy(counted)
                ids, positions = (torch.from_numpy(a[part]).to(device) for a in (sequences.ids, sequences.positions))
                mask = packed_mask(decoder, ids, positions)
                decoder(input_ids=ids, position_ids=positions, attention_mask=mask, use_cache=False)
                left -= taken
                bar.update(taken)
    finally:
        for handle in handles:
            handle.remove()
        model.set_experts_implementation(previous)
        model.train(trained)
