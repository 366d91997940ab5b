"""The evaluation's units of work, and the folder that keeps what is done, so that an interrupted one goes on."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import CancelledError, ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from tqdm import tqdm

from base_core.files import write_atomically
from base_core.report import report_row
from calibrate.evaluation.metrics import evaluate
from calibrate.evaluation.subject import MIXED, Subject
from calibrate.evaluation.variants import Variant

Row = dict[str, Any]
COMPARED = 512
"""Prompts along whose dense answers a variant is compared with the dense model."""


@dataclass(frozen=True)
class Unit:
    """One variant on one model.

    Attributes:
        arrangement: `mixed` or `one task`, see `Subject.queues`.
        prompts: only the first so many, or None for all.
    """

    variant: Variant
    batch: int = 16
    arrangement: str = MIXED
    seed: int = 0
    prompts: int | None = None

    @property
    def key(self) -> str:
        """A file name that tells units apart."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:16]


def run_unit(subject: Subject, unit: Unit) -> Row:
    """Evaluates one unit: a row with the names of `base_core.report` and of `evaluate`."""
    variant = unit.variant
    result = evaluate(
        subject.engine,
        subject.rule(variant),
        subject.decoding(unit.batch, unit.seed),
        subject.queues(unit.batch, unit.arrangement, unit.prompts),
        subject.reference(unit.seed),
        subject.grade if subject.has_answers else None,
        along=subject.queues(unit.batch, unit.arrangement, min(COMPARED, unit.prompts or COMPARED)),
    )
    right = result.pop("right")
    return report_row(
        model=subject.name,
        policy=variant.policy,
        budget=variant.budget,
        batch=unit.batch,
        label=variant.label,
        options=dict(variant.options),
        arrangement=unit.arrangement,
        seed=unit.seed,
        prompts=unit.prompts or len(subject.prompts),
        accuracy_by_task=None if right is None else _by_task(subject, right),
        right=None if right is None else pack_bits(right),
        **result,
    )


def _by_task(subject: Subject, right: list[bool]) -> dict[str, float]:
    marks: dict[str, list[bool]] = {}
    for prompt, mark in zip(subject.prompts, right, strict=False):
        if prompt.task is not None:
            marks.setdefault(prompt.task, []).append(mark)
    return {task: sum(own) / len(own) for task, own in marks.items()}


def pack_bits(marks: Iterable[bool]) -> str:
    """Marks as hexadecimal text, eight to a byte, the first one the highest bit."""
    return np.packbits(np.array(list(marks), bool)).tobytes().hex()


def unpack_bits(text: str, count: int) -> NDArray[np.bool_]:
    """The first `count` marks of `pack_bits`."""
    return np.unpackbits(np.frombuffer(bytes.fromhex(text), np.uint8), count=count).astype(bool)


class Keyed(Protocol):
    """What a row is kept under: a unit, or a part of another study."""

    @property
    def key(self) -> str: ...


class Store:
    """A folder with one JSON file for every unit that is done.

    Args:
        folder: made if it is not there.
        identity: of what is evaluated; rows of another one are refused.
        resume: rows from before are welcome.

    Raises:
        ValueError: rows from before without `resume`, or of another evaluation.
    """

    def __init__(self, folder: Path, identity: Mapping[str, Any], resume: bool) -> None:
        self.folder = folder
        path, text = folder / "identity.json", json.dumps(identity, sort_keys=True)
        if path.exists():
            if not resume:
                raise ValueError(
                    f"{str(folder)!r} holds an unfinished evaluation: add --resume to go on with it, or remove it"
                )
            if path.read_text() != text:
                raise ValueError(
                    f"{str(folder)!r} belongs to another evaluation: evaluate as it was begun, or remove it"
                )
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(path, text.encode())

    def find(self, unit: Keyed) -> Row | None:
        """The row of a unit that is done."""
        path = self.folder / f"{unit.key}.json"
        return json.loads(path.read_text()) if path.exists() else None

    def keep(self, unit: Keyed, row: Row) -> None:
        """Writes the row of a unit."""
        write_atomically(self.folder / f"{unit.key}.json", json.dumps(row, allow_nan=False).encode())

    def remove(self) -> None:
        """Deletes the folder with all its rows."""
        for path in self.folder.iterdir():
            path.unlink()
        self.folder.rmdir()


Job = tuple[Callable[..., Any], tuple[Any, ...]]
"""A function and its arguments behind the subject."""


def run_jobs(
    subject: Subject, jobs: Iterable[Job], pool: ProcessPoolExecutor | None = None
) -> Iterator[tuple[int, Any]]:
    """Calls every job's function with the subject; the jobs' places with their results, as they come in.

    Args:
        pool: of processes begun with `start_worker` on the same subject, which then do the work.
    """
    if pool is None:
        for place, (function, args) in enumerate(jobs):
            yield place, function(subject, *args)
        return
    futures = {pool.submit(_work, *job): place for place, job in enumerate(jobs)}
    for future in as_completed(futures):
        yield futures[future], future.result()


def run_units(
    subject: Subject,
    units: Iterable[Unit],
    store: Store | None = None,
    bar: tqdm | None = None,
    pool: ProcessPoolExecutor | None = None,
) -> list[Row]:
    """Evaluates units, without those that the store has; the rows in the units' order.

    Args:
        pool: see `run_jobs`.
    """
    units = list(units)
    rows = {unit.key: row for unit in units if store is not None and (row := store.find(unit)) is not None}
    if bar is not None:
        bar.update(len(rows))
    missing = list({unit.key: unit for unit in units if unit.key not in rows}.values())
    for place, row in run_jobs(subject, [(run_unit, (unit,)) for unit in missing], pool):
        unit = missing[place]
        rows[unit.key] = row
        if store is not None:
            store.keep(unit, row)
        if bar is not None:
            bar.set_postfix_str(f"{unit.variant.label}, batch {unit.batch}")
            bar.update()
    return [rows[unit.key] for unit in units]


_own: list[tuple[Event, Subject]] = []


def start_worker(stop: Event, make: Callable[..., Subject], *args: Any) -> None:
    """Begins a process of a pool: one thread, its own copy of the subject, which `make(*args)` gives, and no Ctrl-C.

    It ends with the process that began it, however that one ends.

    Args:
        stop: once it is set, units that a pool has already handed out are not begun.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    _own[:] = [(stop, make(*args))]


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _work(function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    stop, subject = _own[0]
    if stop.is_set():
        raise CancelledError
    return function(subject, *args)
