"""Ablation: what the predictor needs. Calibration tokens, text, pair weights, rank and storage, by the energy it keeps.

All at the size of the top-1 union of every step and layer, where the paper compares ranking rules (table 2), along the
dense model's own answers.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from base_core import LayerPredictor, Predictor, load_predictor, save_predictor
from base_core.artifact import Dtype
from base_core.embedded.tasks import STOP, TASKS, examples
from base_core.report import report_row
from calibrate.evaluation.document import Block, Heading, Table, Text
from calibrate.evaluation.engine import deal
from calibrate.evaluation.studies import Part, remember
from calibrate.evaluation.subject import MIXED, Subject
from calibrate.evaluation.tables import percent
from calibrate.evaluation.units import Row, Store
from calibrate.evaluation.variants import Variant, VariantRule
from calibrate.ridge import MIN_PAIRS, fit_layer
from calibrate.statistics import LayerStatistics
from calibrate.text import Document, Sequences, pack, tokenise
from calibrate.torch_pass import collecting

STUDY = "predictor"
VARIANT = Variant("base", "union:1")
BATCH = 16
TEXT_SEED = 1
TARGET, PAPER = 0.98, 0.965
PROMPT_PART, ALIKE_PART = "prompts", "alike"
BYTES = {"float32": 4, "bfloat16": 2, "int8": 1}

ABOUT = (
    "*energy kept*: true removal energy of the chosen experts relative to the oracle's choice of as many, at the size "
    "of the top-1 union (paper: 96.5 %; aim: 98 %), along the dense answers. *tokens*: calibration tokens that count, "
    "which are those of answers that a decode step reads, unless the row says otherwise. Fitted rows share one text "
    "from the training split; the shipped predictor has more of it. *shared basis*: the rows of all layers' predictors "
    "written in r vectors, the best ones for the rows themselves or, with the inputs' covariance, for what they "
    "predict; intercepts moved so that an expert's mean prediction stays; its full rank is the shipped predictor. "
    "*bytes*: of a layer's weights, the shared basis divided among the layers. *without the task*: for each task a "
    "predictor that has not seen it, judged on that task alone; beside it all tasks' predictor, judged the same way; "
    "the mean over tasks."
)


@dataclass(frozen=True)
class Settings:
    """How much is done.

    Attributes:
        tokens: of the text, prompts included; about a quarter of them count.
        length: of a packed row.
        prompts: of the subject, for the judgement.
        shares: of the text, for the learning curve; ascending, the last one 1.
        ranks: of the shared basis.
        min_pairs: as in `calibrate.ridge`.
    """

    tokens: int = 65_536
    length: int = 256
    prompts: int = 256
    shares: tuple[float, ...] = (1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 1.0)
    ranks: tuple[int, ...] = (4, 16, 64)
    min_pairs: int = MIN_PAIRS


ByLayer = dict[int, LayerStatistics]


class _Parted:
    """Stands in for one layer's statistics: every pair goes to the parts of the text that it belongs to.

    Attributes:
        marks: of the coming batch, by part: bool [T], and whether pairs count by their routing weight.
    """

    def __init__(self, parts: Mapping[str, LayerStatistics]) -> None:
        self.parts = parts
        self.marks: dict[str, tuple[Tensor, bool]] = {}

    def add(self, z: Tensor, ids: Tensor, energy: Tensor, weights: Tensor, eps: float) -> None:
        """As `LayerStatistics.add`, for all T tokens of the batch."""
        for part, (mark, weighted) in self.marks.items():
            kept = mark.to(z.device)
            if kept.any():
                own = weights[kept] if weighted else torch.ones_like(weights[kept])
                self.parts[part].add(z[kept], ids[kept], energy[kept], own, eps)


def read_text(tokenizer: Any, settings: Settings) -> dict[str, tuple[Sequences, NDArray[np.bool_]]]:
    """Of every task equal text of the training split: its rows, where answers count, and bool [R, L] the prompts."""
    amount = settings.tokens // len(TASKS)
    found = {}
    for task in TASKS:
        answers, prompts, size = [], [], 0
        for example in examples(TEXT_SEED, task):
            ids, counted = tokenise(Document(example.answer + STOP, example.prompt), tokenizer, "answer")
            length = len(tokenizer(example.prompt)["input_ids"])
            answers.append((ids, counted))
            prompts.append((ids, [i < length for i in range(len(ids))]))
            size += len(ids)
            if size >= amount:
                break
        found[task] = pack(answers, settings.length, amount), pack(prompts, settings.length, amount).counted
    return found


@dataclass(frozen=True)
class Gathered:
    """What one run over the text gave.

    Attributes:
        curve: counted tokens and the predictor fitted to them, for every share.
        parts: statistics by part: each task's answers, all prompts, and all answers with pairs alike.
        tokens: that count, by part.
    """

    curve: list[tuple[int, Predictor]]
    parts: dict[str, ByLayer]
    tokens: dict[str, int]


def total(parts: Iterable[ByLayer]) -> ByLayer:
    """Statistics of several parts together."""
    parts = list(parts)
    found = {}
    for i, first in parts[0].items():
        own = LayerStatistics(first.num_experts, first.hidden_size, first.pairs.device)
        for part in parts:
            for name, tensor in own.tensors().items():
                tensor.add_(part[i].tensors()[name])
        found[i] = own
    return found


def fit(like: Predictor, statistics: ByLayer, min_pairs: int = MIN_PAIRS) -> Predictor:
    """A predictor for the model of `like`. Of its card the model's facts are kept, and the fit's quality is its own."""
    fits = {i: fit_layer(own, min_pairs) for i, own in statistics.items()}
    quality = {i: own.quality for i, own in fits.items()}
    card = replace(like.card, source="", tokens=0, pairs={}, ridge={}, fit=quality, fallback={})
    return Predictor(card, {i: own.predictor for i, own in fits.items()})


def gather(subject: Subject, settings: Settings) -> Gathered:
    """Runs the dense model over the text once, all tasks side by side, and fits the learning curve on the way.

    Raises:
        ValueError: see `fit_layer`; give more tokens.
    """
    assert subject.predictor is not None
    text = read_text(subject.tokenizer, settings)
    layers = {layer.index: layer for layer in subject.engine.layers}
    parts: dict[str, ByLayer] = {
        part: {i: LayerStatistics(one.num_experts, one.hidden_size, one.device) for i, one in layers.items()}
        for part in (*TASKS, PROMPT_PART, ALIKE_PART)
    }
    parted = {i: _Parted({part: own[i] for part, own in parts.items()}) for i in layers}
    tokens = dict.fromkeys(parts, 0)
    R = min(len(rows.ids) for rows, _ in text.values())
    ends = [max(1, round(share * R)) for share in settings.shares]
    curve = []
    eps = subject.predictor.card.eps
    with collecting(subject.model, cast("dict[int, LayerStatistics]", parted), eps=eps, weighted=True) as run:
        for row in range(R):
            ids, positions = (
                np.stack([getattr(s, name)[row] for s, _ in text.values()]) for name in ("ids", "positions")
            )
            answers = torch.from_numpy(np.stack([s.counted[row] for s, _ in text.values()]))
            prompts = torch.from_numpy(np.stack([p[row] for _, p in text.values()]))
            marks = {ALIKE_PART: (answers.flatten(), False), PROMPT_PART: (prompts.flatten(), True)}
            for place, task in enumerate(text):
                own = torch.zeros_like(answers)
                own[place] = answers[place]
                marks[task] = (own.flatten(), True)
            for layer in parted.values():
                layer.marks = marks
            run((ids, positions, np.ones_like(ids, bool)))
            for part, (mark, _) in marks.items():
                tokens[part] += int(mark.sum())
            for _ in range(ends.count(row + 1)):
                whole = total(parts[task] for task in TASKS)
                curve.append((tokens[ALIKE_PART], fit(subject.predictor, whole, settings.min_pairs)))
    return Gathered(curve, parts, tokens)


def shared_basis(
    predictor: Predictor, rank: int, means: Mapping[int, NDArray], covariance: NDArray | None = None
) -> Predictor:
    """`predictor` with all layers' rows in one basis of `rank` vectors.

    Args:
        means: of every layer, float [E, d]: the mean of z / ||z|| over each expert's pairs, whose prediction stays.
        covariance: float64 [d, d], of z / ||z||. With it the basis has the least squared error of predictions for such
            inputs, without it that of the rows themselves.
    """
    stacked = np.concatenate([layer.weight for layer in predictor.layers.values()]).astype(np.float64)
    root = inverse = np.eye(stacked.shape[1])
    if covariance is not None:
        values, vectors = np.linalg.eigh(covariance)
        spread = np.sqrt(np.maximum(values, values.max() * 1e-12))
        root, inverse = vectors * spread @ vectors.T, vectors / spread @ vectors.T
    basis = np.linalg.svd(stacked @ root, full_matrices=False)[2][:rank]
    projection = root @ basis.T @ basis @ inverse  # [d, d], of rank `rank`
    layers = {}
    for i, layer in predictor.layers.items():
        weight = layer.weight.astype(np.float64) @ projection
        bias = layer.bias + ((layer.weight - weight) * means[i]).sum(1)
        layers[i] = LayerPredictor(weight.astype(np.float32), bias.astype(np.float32), layer.mean_energy)
    return Predictor(predictor.card, layers)


def input_means(statistics: ByLayer) -> dict[int, NDArray]:
    """Of every layer, float64 [E, d]: the weighted mean of z / ||z|| over each expert's pairs, 0 without any."""
    return {
        i: (own.first[:, 0] / own.moments[:, :1].clamp_min(torch.finfo(torch.float64).tiny)).cpu().numpy()
        for i, own in statistics.items()
    }


def input_covariance(statistics: ByLayer) -> NDArray:
    """Of z / ||z|| around each expert's own mean, weighted, mean over layers: float64 [d, d]."""
    means = input_means(statistics)
    found = []
    for i, own in statistics.items():
        gram = own.full_gram(slice(None)).sum(0).cpu().numpy()
        centred = gram - np.einsum("ei,ej->ij", own.first[:, 0].cpu().numpy(), means[i])
        found.append(centred / float(own.moments[:, 0].sum()))
    return np.mean(found, axis=0)


def stored(predictor: Predictor, dtype: Dtype) -> Predictor:
    """`predictor` as it comes back from its file in `dtype`."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "predictor.safetensors"
        save_predictor(path, predictor, dtype)
        return load_predictor(path)


def judge(subject: Subject, predictor: Predictor, prompts: int, task: str | None = None) -> Row:
    """Energy kept by `predictor` at the top-1 union along the dense answers, over all tasks' prompts or one's."""
    if task is None:
        queues = subject.queues(BATCH, MIXED, prompts)
    else:
        own = [i for i, prompt in enumerate(subject.prompts[:prompts]) if prompt.task == task]
        queues = [[own[i] for i in part] for part in deal(len(own), max(1, len(own) // BATCH))]
    decoded = subject.engine.decode(
        VariantRule(VARIANT, subject.num_experts, predictor, None),
        subject.decoding(BATCH),
        queues,
        forced=subject.reference().tokens,
        measure=True,
    )
    tally = decoded.tally
    assert tally.retained_energy is not None
    return report_row(
        model=subject.name,
        policy=VARIANT.policy,
        budget=VARIANT.budget,
        batch=BATCH,
        active_mean=float(np.mean(tally.active_mean)),
        retained_energy=float(np.mean(tally.retained_energy)),
        by_layer={"layer": list(tally.layers), "retained_energy": list(tally.retained_energy)},
    )


class Predictors:
    """Makes every predictor of the study when it is asked for: the text is run through only if some row is missing."""

    def __init__(self, subject: Subject, settings: Settings) -> None:
        if subject.predictor is None:
            raise ValueError(f"the predictor study needs the predictor of {subject.name!r}: pass one with --predictor")
        self.subject, self.settings, self.shipped = subject, settings, subject.predictor

    @cached_property
    def gathered(self) -> Gathered:
        return gather(self.subject, self.settings)

    @cached_property
    def inputs(self) -> tuple[dict[int, NDArray], NDArray]:
        """Means and covariance of what the predictor reads, see `shared_basis`."""
        whole = total(self.gathered.parts[task] for task in TASKS)
        return input_means(whole), input_covariance(whole)

    def whole(self) -> tuple[int, Predictor]:
        """Fitted to all of the text."""
        return self.gathered.curve[-1]

    def of(self, part: str) -> tuple[int, Predictor]:
        """Fitted to one part."""
        found = self.gathered
        return found.tokens[part], fit(self.shipped, found.parts[part], self.settings.min_pairs)

    def without(self, task: str) -> Predictor:
        """Fitted to all tasks but one."""
        parts = self.gathered.parts
        return fit(self.shipped, total(parts[other] for other in TASKS if other != task), self.settings.min_pairs)

    def basis(self, rank: int, by_rows: bool) -> Predictor:
        """The shipped one in a shared basis."""
        means, covariance = self.inputs
        return shared_basis(self.shipped, rank, means, None if by_rows else covariance)


def run_predictors(
    subject: Subject,
    settings: Settings | None = None,
    store: Store | None = None,
    make: Predictors | None = None,
) -> list[Row]:
    """The study's rows: names of `base_core.report`, and `study`, `group`, `label`, `tokens` (that count), `bytes`.

    What is in the store is not done again.

    Args:
        make: of the same subject and settings, where something else needs its predictors too.

    Raises:
        ValueError: no predictor, or too little text.
    """
    settings = settings or Settings()
    make = make or Predictors(subject, settings)
    card = make.shipped.card
    E, d, L = card.num_experts, card.hidden_size, len(card.layers)
    shipped_tokens = sum(sum(own) for own in card.pairs.values()) // (card.experts_per_token * L)
    tasks = [task for task in TASKS if task in {prompt.task for prompt in subject.prompts[: settings.prompts]}]

    def row(group: str, label: str, work: Any, size: float = E * d * BYTES["float32"]) -> Row:
        def done() -> Row:
            tokens, found = work()
            return {**found, "study": STUDY, "group": group, "label": label, "tokens": tokens, "bytes": size}

        about = {**asdict(settings), "group": group}
        return remember(Part(STUDY, label, about), done, store)

    def judged(predictor: Predictor, tokens: int = shipped_tokens) -> tuple[int, Row]:
        return tokens, judge(subject, predictor, settings.prompts)

    def fitted(pair: tuple[int, Predictor]) -> tuple[int, Row]:
        return judged(pair[1], pair[0])

    def by_task(seen: bool) -> tuple[int, Row]:
        """Mean over tasks, each judged alone, with or without its own text."""
        rows = [
            judge(subject, make.whole()[1] if seen else make.without(task), settings.prompts, task) for task in tasks
        ]
        found = dict(rows[0])
        for name in ("active_mean", "retained_energy"):
            found[name] = float(np.mean([one[name] for one in rows]))
        del found["by_layer"]
        found["by_task"] = {task: one["retained_energy"] for task, one in zip(tasks, rows, strict=True)}
        tokens = make.gathered.tokens
        counted = sum(tokens[task] for task in TASKS)
        return counted if seen else counted - counted // len(TASKS), found

    rows = [row("shipped", "shipped", lambda: judged(make.shipped))]
    for place, share in enumerate(settings.shares):
        label = f"{share:.3g} of the text"
        rows.append(row("learning curve", label, lambda place=place: fitted(make.gathered.curve[place])))
    rows.append(row("pairs", "by routing weight", lambda: fitted(make.whole())))
    rows.append(row("pairs", "alike (paper)", lambda: fitted(make.of(ALIKE_PART))))
    for group, by_rows in (("shared basis by rows", True), ("shared basis by predictions", False)):
        for rank in settings.ranks:
            size = (rank * d / L + E * rank) * BYTES["float32"]
            rows.append(
                row(group, f"rank {rank}", lambda rank=rank, by_rows=by_rows: judged(make.basis(rank, by_rows)), size)
            )
    for dtype in ("bfloat16", "int8"):
        size = E * d * BYTES[dtype] + (E * BYTES["float32"] if dtype == "int8" else 0)
        rows.append(row("storage", dtype, lambda dtype=dtype: judged(stored(make.shipped, dtype)), size))
    rows.append(row("text", "prompts only", lambda: fitted(make.of(PROMPT_PART))))
    if tasks:
        rows.append(row("text", "all tasks, judged by task", lambda: by_task(True)))
        rows.append(row("text", "without the task, judged on it", lambda: by_task(False)))
    return rows


def section(found: Mapping[str, Sequence[Row]], level: int = 2) -> list[Block]:
    """The study's part of a report.

    Args:
        found: rows of each model by its name.
        level: of the heading.
    """
    blocks: list[Block] = [Heading(level, "What the predictor needs"), Text(ABOUT)]
    for model, rows in found.items():
        body = [
            [
                row["group"] if row["group"] == row["label"] else f"{row['group']}: {row['label']}",
                f"{row['tokens']:,}",
                f"{row['bytes'] / 1024:.1f} KiB",
                f"{row['active_mean']:.2f}",
                percent(row["retained_energy"], 2),
                percent(min(row["by_task"].values()), 2)
                if "by_task" in row
                else percent(min(row["by_layer"]["retained_energy"]), 2),
            ]
            for row in rows
        ]
        header = ["predictor", "tokens", "bytes", "experts", "energy kept", "worst layer or task"]
        blocks += [Heading(level + 1, model), Text(verdict(rows)), Table(header, body, frozenset({0}))]
    return blocks


def verdict(rows: Sequence[Row]) -> str:
    """In words: whether the shipped predictor reaches the aim, and the least that does."""

    def reaching(group: str) -> Row | None:
        return next((r for r in rows if r["group"] == group and r["retained_energy"] >= TARGET), None)

    shipped = rows[0]["retained_energy"]
    text = (
        f"The shipped predictor keeps {percent(shipped, 2)} of the oracle's energy: "
        f"{'at least' if shipped >= TARGET else 'below'} the {percent(TARGET)} aimed at (paper {percent(PAPER)})."
    )
    curve, basis = reaching("learning curve"), reaching("shared basis by predictions")
    text += f" {percent(TARGET)} takes " + (
        f"no more than {curve['tokens']:,} tokens that count" if curve else "more tokens than the curve has"
    )
    return f"{text}, and {'a shared basis of ' + basis['label'] if basis else 'no shared basis reaches it'}."
