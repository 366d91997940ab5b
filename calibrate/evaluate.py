"""`base-moe eval`: quality against cost for every policy, on an embedded model or on the user's own."""

from __future__ import annotations

import argparse
import multiprocessing
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tqdm import tqdm

from backends.cuda.generate import load
from base_core import Budget, load_predictor
from base_core.embedded import MODELS, PREFIX, model_path, predictor_path, resolve_model
from base_core.embedded.tasks import STOP, evaluation_examples, examples
from base_core.policies import POLICIES
from base_core.report import format_table, write_report
from base_core.rivals import load_rivals, save_rivals
from calibrate.evaluation import ablations_budget, beyond, plan, report, tables
from calibrate.evaluation.matching import StepCost
from calibrate.evaluation.prompt_file import Prompt, read_prompts
from calibrate.evaluation.report import ModelRows
from calibrate.evaluation.subject import Subject
from calibrate.evaluation.units import Row, Store, Unit, run_units, start_worker
from calibrate.evaluation.variants import UNION, Variant, union_size
from calibrate.rivals import calibrate_rivals
from calibrate.text import Document, pack, tokenise, unbroken

DEFAULT_PROMPTS = 2048
DEFAULT_BATCH = 16
DEFAULT_MAX_TOKENS = 12
DEFAULT_BUDGETS = "6.25%,12.5%,25%"
MOST_WORKERS = 8
BLAS_THREADS = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")
NEEDS_RIVALS = ("sere", "exfold")
RIVAL_LENGTH = 256
RIVAL_TEXT_TOKENS = 214_000
"""Of prompts and answers; about a quarter of them count, which makes the rivals' default number of tokens."""
DESCRIPTION = (
    "Accuracy, active experts, energy kept, layer error and distance to the dense model for every policy and budget."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `base-moe eval`."""
    parser.add_argument("--model", metavar="PATH_OR_ID", help=f"checkpoint (default: {PREFIX}{MODELS[0]})")
    parser.add_argument("--predictor", metavar="PATH_OR_ID", help="default: the embedded model's own")
    parser.add_argument(
        "--rivals", type=Path, metavar="FILE", help="of base-moe calibrate --rivals; for sere and exfold"
    )
    parser.add_argument("--policies", default="all", help=f"all, or some of {', '.join(POLICIES)} with commas")
    parser.add_argument(
        "--budgets",
        default=DEFAULT_BUDGETS,
        help="with commas: numbers, percentages, or union:n (default: %(default)s)",
    )
    parser.add_argument("--batch", type=int, default=DEFAULT_BATCH, metavar="N", help="requests decoded together (16)")
    parser.add_argument("--prompts", type=int, default=DEFAULT_PROMPTS, metavar="N", help="how many (%(default)s)")
    parser.add_argument(
        "--prompts-file",
        type=Path,
        metavar="FILE",
        help="JSONL with a prompt, and optionally an answer and a task, a line",
    )
    parser.add_argument(
        "--max-tokens", type=int, default=DEFAULT_MAX_TOKENS, metavar="N", help="of an answer (%(default)s)"
    )
    parser.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0 is greedy (default)")
    parser.add_argument("--seeds", default="0", metavar="S,S", help="of sampling, with commas")
    parser.add_argument("--dtype", choices=("auto", "float32", "bfloat16"), default="auto", help="of the weights")
    parser.add_argument("--backend", choices=("torch", "mlx"), default="torch")
    parser.add_argument(
        "--bench", type=Path, metavar="FILE", help="of base-moe bench --device cpu --json: compares at equal time too"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="writes rows, settings and versions")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="writes report.md, report.html and figures there")
    parser.add_argument(
        "--all-embedded", action="store_true", help="the whole report over the embedded models, into --out"
    )
    parser.add_argument(
        "--workers",
        type=int,
        metavar="N",
        help=f"processes of --all-embedded (default: one a core, {MOST_WORKERS} at most)",
    )
    parser.add_argument("--resume", action="store_true", help="go on with what an interrupted run left")


def run(args: argparse.Namespace) -> None:
    """Evaluates, prints a table and writes what is asked for.

    Raises:
        ValueError: options, prompts, model, predictor, calibration or output that cannot be used.
    """
    _check(args)
    cost = None if args.bench is None else StepCost.read(args.bench)
    if args.all_embedded:
        _run_all(args, cost)
    elif args.backend == "mlx":
        _run_mlx(args)
    else:
        _run_grid(args, cost)


def _check(args: argparse.Namespace) -> None:
    for name, least in (("batch", 1), ("prompts", 1), ("max_tokens", 2)):
        if getattr(args, name) < least:
            raise ValueError(f"--{name.replace('_', '-')} {getattr(args, name)} must be at least {least}")
    if args.workers is not None and args.workers < 1:
        raise ValueError(f"--workers {args.workers} must be at least 1")
    if not args.temperature >= 0:
        raise ValueError(f"--temperature {args.temperature} is negative: 0 is greedy")
    if args.json is not None and not args.json.absolute().parent.is_dir():
        raise ValueError(f"--json {str(args.json)!r}: its folder does not exist")
    if args.out is not None and args.out.exists() and not args.out.is_dir():
        raise ValueError(f"--out {str(args.out)!r} is a file: give a folder")
    if args.all_embedded and args.out is None:
        raise ValueError("--all-embedded writes a report: give its folder with --out")
    if args.all_embedded and (args.model or args.prompts_file or args.backend == "mlx"):
        raise ValueError("--all-embedded takes the embedded models and prompts, on PyTorch: leave out --model, "
                         "--prompts-file and --backend")  # fmt: skip
    if args.resume and args.out is None:
        raise ValueError("--resume goes on with what is in a folder: give it with --out")


def parse_policies(text: str, has_rivals: bool) -> list[str]:
    """Policies of `--policies`; `all` leaves those out that need a calibration which is not there, and says so.

    Raises:
        ValueError: an unknown one.
    """
    if text == "all":
        left_out = [] if has_rivals else list(NEEDS_RIVALS)
        if left_out:
            print(f"without --rivals: {' and '.join(left_out)} are left out", file=sys.stderr)
        return [name for name in POLICIES if name not in left_out]
    names = [part.strip() for part in text.split(",") if part.strip()]
    for name in names:
        if name not in POLICIES:
            raise ValueError(f"--policies: unknown policy {name!r}; choose from {', '.join(POLICIES)}, or all")
    if not names:
        raise ValueError(f"--policies {text!r} names none: give for instance base,oea")
    return list(dict.fromkeys(names))


def parse_budgets(text: str) -> list[str]:
    """Budgets of `--budgets`; energy budgets with a cap are not among them, for their comma.

    Raises:
        ValueError: none, or one that cannot be read.
    """
    names = [part.strip() for part in text.split(",") if part.strip()]
    for name in names:
        if name.startswith(UNION):
            union_size(name)
        elif Budget.parse(name).is_off:
            raise ValueError("--budgets: off is always evaluated, as policy dense; leave it out")
    if not names:
        raise ValueError(f"--budgets {text!r} names none: give for instance {DEFAULT_BUDGETS}")
    return names


def parse_seeds(text: str) -> list[int]:
    """Seeds of `--seeds`.

    Raises:
        ValueError: not whole numbers.
    """
    try:
        return [int(part) for part in text.split(",")]
    except ValueError as error:
        raise ValueError(f"--seeds {text!r}: give whole numbers with commas, as 0,1,2") from error


def _embedded_prompts(count: int) -> list[Any]:

    return [Prompt(example.prompt, example.answer, example.task) for example in evaluation_examples(count)]


def _prompts(args: argparse.Namespace) -> list[Prompt]:

    if args.prompts_file is not None:
        return read_prompts(args.prompts_file)[: args.prompts]
    if args.model is not None and not args.model.startswith(PREFIX):
        raise ValueError("--model of your own needs prompts: give them with --prompts-file")
    return _embedded_prompts(args.prompts)


def _sources(args: argparse.Namespace) -> tuple[str, str, str | None]:
    """Name, checkpoint and predictor."""
    source, predictor = resolve_model(args.model, args.predictor)
    name = args.model or PREFIX + MODELS[0]
    return name if name.startswith(PREFIX) else Path(name).name, source, predictor


def _run_grid(args: argparse.Namespace, cost: StepCost | None) -> None:

    budgets, seeds = parse_budgets(args.budgets), parse_seeds(args.seeds)
    policies = parse_policies(args.policies, args.rivals is not None)
    rivals = None if args.rivals is None else load_rivals(args.rivals)
    prompts = _prompts(args)
    name, source, predictor = _sources(args)
    dtype = "float32" if name.startswith(PREFIX) and args.dtype == "auto" else args.dtype
    subject = Subject(
        name, source, predictor, prompts, max_tokens=args.max_tokens, temperature=args.temperature,
        dtype=None if dtype == "auto" else dtype, progress=True,
    )  # fmt: skip
    if rivals is not None:
        subject.set_rivals(rivals)
    variants = plan.grid(policies, budgets, subject)
    for variant in variants:
        subject.rule(variant)
    units = [Unit(variant, args.batch, seed=seed) for seed in seeds for variant in variants]
    store = None
    if args.out is not None:
        store = Store(args.out / "partial", subject.identity(), args.resume)
    started = time.perf_counter()
    with tqdm(total=len(units), unit="run", smoothing=0.1) as bar:
        rows = run_units(subject, units, store, bar)
    print_rows(rows)
    command = _command(args)
    if args.json is not None:
        write_report(args.json, rows, _settings(args, time.perf_counter() - started))
        print(f"rows written to {args.json}")
    if args.out is not None:
        report.write(args.out, report.grid_report(rows, command, cost))
        print(f"report written to {args.out}")
    if store is not None:
        store.remove()


def _run_mlx(args: argparse.Namespace) -> None:
    try:
        from calibrate.evaluation import mlx_path
    except ImportError as error:
        raise ValueError(f"--backend mlx is not installed here ({error}): take torch") from error
    if args.out is not None or args.bench is not None or args.rivals is not None:
        raise ValueError("--backend mlx measures accuracy, experts and speed: leave out --out, --bench and --rivals")
    budgets = parse_budgets(args.budgets)
    policies = mlx_path.OFFERED if args.policies == "all" else parse_policies(args.policies, has_rivals=False)
    mlx_path.check_offered(policies, budgets)
    prompts = _prompts(args)
    name, source, predictor = _sources(args)
    variants = [Variant("dense"), *(Variant(p, budget) for p in policies if p != "dense" for budget in budgets)]
    seeds = parse_seeds(args.seeds)
    started = time.perf_counter()
    with tqdm(total=len(variants) * len(seeds) * len(prompts), unit="prompt") as bar:
        rows = mlx_path.evaluate_mlx(
            name,
            source,
            None if predictor is None else load_predictor(predictor),
            prompts,
            variants,
            batch=args.batch,
            max_tokens=args.max_tokens,
            temperature=args.temperature,
            seeds=seeds,
            dtype=None if args.dtype == "auto" else args.dtype,
            bar=bar,
        )
    print_speed_rows(rows)
    if args.json is not None:
        write_report(args.json, rows, _settings(args, time.perf_counter() - started))
        print(f"rows written to {args.json}")


def print_speed_rows(rows: Sequence[Row]) -> None:
    """The table of the MLX backend on the terminal."""
    header = ["policy", "experts", "union", "right answers", "95 % interval", "cost kept", "tokens/s", "of dense"]
    body = [
        [
            row["label"],
            f"{row['active_mean']:.2f}",
            f"{row['union_mean']:.2f}",
            tables.percent(row["accuracy"]),
            tables.interval(row),
            tables.percent(row["kept_energy"], 2),
            f"{row['tokens_per_s']:.1f}",
            f"{row['ratio_to_dense']:.2f}",
        ]
        for row in rows
    ]
    print(format_table([header, *body]))


def print_rows(rows: Sequence[Row]) -> None:
    """The table on the terminal."""

    table = tables.all_rows(rows)
    print(format_table([table.header, *table.rows]))


def _settings(args: argparse.Namespace, seconds: float) -> dict[str, Any]:
    values = {name: str(value) if isinstance(value, Path) else value for name, value in vars(args).items()}
    return {**values, "seconds": seconds}


def _command(args: argparse.Namespace) -> str:
    parts = ["base-moe eval"]
    defaults = argparse.ArgumentParser()
    add_arguments(defaults)
    for name, value in vars(args).items():
        if value != defaults.get_default(name) and name != "resume":
            parts += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
    return " ".join(parts)


def calibrate_embedded_rivals(name: str, path: Path) -> None:
    """Calibrates the rivals of an embedded model on the tasks' training split and writes them to `path`."""
    model, tokenizer = load(model_path(name), "float32")
    documents = (Document(example.answer + STOP, example.prompt) for example in examples(1))
    tokenised = (tokenise(document, tokenizer, "answer") for document in documents)
    text = pack(unbroken(tokenised, RIVAL_LENGTH), RIVAL_LENGTH, RIVAL_TEXT_TOKENS)
    source = f"training split of the embedded tasks, seed 1, {text.tokens} tokens"
    rivals = calibrate_rivals(model, text, model_id=PREFIX + name, source=source, progress=True)
    save_rivals(path, rivals)


def _run_all(args: argparse.Namespace, cost: StepCost | None) -> None:
    started = time.perf_counter()
    args.out.mkdir(parents=True, exist_ok=True)
    models = [_evaluate_embedded(name, args) for name in MODELS]
    seconds = time.perf_counter() - started
    report.write(args.out, report.full_report(models, _command(args), None if args.resume else seconds, cost))
    rows = [row for model in models for row in model.rows]
    write_report(args.json or args.out / "report.json", rows, _settings(args, seconds))
    for name in MODELS:
        shutil.rmtree(args.out / "partial" / name)
    (args.out / "partial").rmdir()
    print(f"report written to {args.out}")


def open_embedded(name: str, prompts: Sequence[Prompt], max_tokens: int, rivals: Path) -> Subject:
    """An embedded model ready for every policy."""
    subject = Subject(
        PREFIX + name, model_path(name), predictor_path(name), prompts, max_tokens=max_tokens, dtype="float32"
    )
    subject.set_rivals(load_rivals(rivals))
    return subject


def _evaluate_embedded(name: str, args: argparse.Namespace) -> ModelRows:
    folder = args.out / "partial" / name
    rivals = folder / "rivals.safetensors"
    if folder.exists() and not args.resume:
        raise ValueError(f"{str(folder)!r} holds an unfinished evaluation: add --resume to go on with it, or remove it")
    if not rivals.exists():
        folder.mkdir(parents=True, exist_ok=True)
        calibrate_embedded_rivals(name, rivals)
    what = (name, _embedded_prompts(args.prompts), args.max_tokens, rivals)
    subject = open_embedded(*what)
    store = Store(folder / "rows", subject.identity(), args.resume)
    anchors, one_task, sweep = plan.anchors(), plan.arrangement_units(), plan.sweep_units(max(1, args.prompts // 4))
    source = model_path(name)
    beside = len(beyond.study_jobs(source)) + len(ablations_budget.sizes(subject.num_experts))
    with (
        _pool(args.workers or min(os.cpu_count() or 1, MOST_WORKERS), open_embedded, *what) as pool,
        tqdm(unit="run", desc=name, smoothing=0.1) as bar,
    ):
        bar.total = len(anchors) + beside + len(one_task) + len(sweep)
        budgets = plan.regime_budgets(run_units(subject, anchors, store, bar, pool))
        studies = beyond.run_studies(subject, source, store, bar, pool)
        places = ablations_budget.tune_all(subject, store, bar, pool)
        main = plan.main_units(subject, budgets)
        parts = [main, one_task, sweep, [place.unit for place in places]]
        bar.total += len(main) + len(places)
        rows = iter(run_units(subject, [unit for units in parts for unit in units], store, bar, pool))
        main_rows, one_task_rows, sweep_rows, ablation = ([next(rows) for _ in units] for units in parts)
    facts = (
        f"{len(subject.engine.layers)} MoE layers of {subject.num_experts} experts, {subject.k} a token, width "
        f"{subject.model.config.hidden_size}; {'normalised' if subject.normalises else 'raw'} routing weights."
    )
    if not subject.normalises:
        facts += " Rivals that renormalise share out the native total of each row, which here is below 1."
    return ModelRows(
        name,
        budgets,
        main_rows,
        one_task_rows,
        sweep_rows,
        ablations_budget.ablation_rows(places, ablation),
        studies,
        facts,
    )


@contextmanager
def _pool(workers: int, make: Callable[..., Subject], *args: Any) -> Iterator[ProcessPoolExecutor | None]:
    """Processes that share the work, or None for one; on Ctrl-C they end what they are at and stop."""
    if workers == 1:
        yield None
        return
    context = multiprocessing.get_context("spawn")
    stop = context.Event()
    pool = ProcessPoolExecutor(workers, mp_context=context, initializer=start_worker, initargs=(stop, make, *args))
    before = {name: os.environ.get(name) for name in BLAS_THREADS}
    os.environ.update(dict.fromkeys(BLAS_THREADS, "1"))  # read by NumPy's BLAS in the processes to come
    try:
        yield pool
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
        stop.set()
        pool.shutdown(cancel_futures=True)
