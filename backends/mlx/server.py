"""`base-moe serve`: mlx-lm's OpenAI-compatible server with an expert budget.

A request may carry `"budget": "12"` beside the usual fields; without one the server's own budget holds. Requests are
batched with others of the same budget, and prompt caches are kept apart by budget.
"""

from __future__ import annotations

import argparse
import json
import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from huggingface_hub.constants import HF_HUB_CACHE
from mlx import nn
from mlx_lm import server as stock
from mlx_lm.models.cache import LRUPromptCache, can_trim_prompt_cache, trim_prompt_cache
from mlx_lm.utils import maybe_set_recommended_wired_limit

from backends.mlx.generate import BudgetedBatchGenerator, fit_to_device, stream_generate
from backends.mlx.integration import Policy, Session, apply, cache_key
from base_core.artifact import load_predictor
from base_core.budget import Budget, BudgetError
from base_core.embedded import resolve_model

DEFAULT_BUDGET = "off"
THREAD_END_SECONDS = 0.5
"""A joined thread still frees what MLX compiled in it, and aborts the process if the interpreter is gone by then."""
DESCRIPTION = "OpenAI-compatible server for a mixture-of-experts model under an expert budget (mlx_lm.server's flags)."


@contextmanager
def replaced(owner: Any, **names: Any) -> Iterator[None]:
    """Sets attributes of `owner` and puts the old ones back."""
    before = {name: getattr(owner, name) for name in names}
    for name, value in names.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)


def stock_parser() -> argparse.ArgumentParser:
    """mlx-lm's own parser, which `mlx_lm.server.main` builds inside: it is stopped where it would parse."""

    class Built(Exception):  # noqa: N818
        pass

    def stop(parser: argparse.ArgumentParser, *_: Any) -> None:
        raise Built(parser)

    with replaced(argparse.ArgumentParser, parse_args=stop):
        try:
            stock.main()
        except Built as built:
            return built.args[0]
    raise AssertionError("mlx_lm.server.main no longer parses arguments")


def add_stock_arguments(parser: argparse.ArgumentParser, source: argparse.ArgumentParser) -> None:
    """Adds every flag of `source` but its help."""
    for action in source._actions:
        if not isinstance(action, argparse._HelpAction):
            parser._add_action(action)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--predictor", help="Predictor file, folder or hub id (default: the embedded model's)")
    parser.add_argument(
        "--budget",
        default=DEFAULT_BUDGET,
        help="Budget of requests that name none: 16, 12.5%%, energy:0.98, share:0.01, plan:FILE or off (default: off)",
    )
    add_stock_arguments(parser, stock_parser())


class ModelName(str):
    """A requested model's name and budget: mlx-lm batches requests whose models are equal."""

    budget: Budget

    def __new__(cls, name: str, budget: Budget) -> ModelName:
        self = super().__new__(cls, name)
        self.budget = budget
        return self

    def __eq__(self, other: object) -> bool:
        return str.__eq__(self, other) is True and self.budget == getattr(other, "budget", None)

    __hash__ = str.__hash__


class BudgetedModelProvider(stock.ModelProvider):
    """Loads models as mlx-lm's server does and puts them under the budget that a request asks for.

    Attributes:
        session: of the loaded model, or None where no budget can be applied to it.
        refusal: why not.
    """

    def __init__(self, cli_args: argparse.Namespace) -> None:
        super().__init__(cli_args)
        self.model_key: tuple[str | None, ...] | None = None
        self.budget = Budget.parse(cli_args.budget)
        self.predictor = None if cli_args.predictor is None else load_predictor(cli_args.predictor)
        self.session: Session | None = None
        self.refusal: ValueError | None = None

    def reset(self) -> None:
        # mlx-lm resets in its generation thread, where all that has run must also be freed.
        super().reset()
        self.session = None
        self.refusal = None

    def _load(self, model_path: str, adapter_path: str | None = None, draft_model_path: str | None = None) -> None:
        super()._load(model_path, adapter_path, draft_model_path)
        fit_to_device(self.model)
        if self.draft_model is not None:
            fit_to_device(self.draft_model)
        window = 1 if self.draft_model is None else self.cli_args.num_draft_tokens + 1
        try:
            self.session = apply(self.model, self.predictor, "off", Policy(decode_window=window))
        except ValueError as error:
            self.refusal = error

    def load(
        self, model_path: str, adapter_path: str | None = None, draft_model_path: str | None = None
    ) -> tuple[nn.Module, Any]:
        budget = getattr(model_path, "budget", self.budget)
        self.model_key = None if self.model_key is None else self.model_key[:3]
        loaded = super().load(str(model_path), adapter_path, draft_model_path)
        # The key names prompt caches too, and a budget leaves its mark on them.
        self.model_key = (*(self.model_key or ()), cache_key(budget))
        self.check(budget)
        if self.session is not None:
            self.session.set_budget(budget)
        return loaded

    def check(self, budget: Budget) -> None:
        """Refuses a budget that the loaded model cannot have.

        Raises:
            ValueError: out of range, or the model takes no budget.
        """
        if self.session is not None:
            self.session.check(budget)
        elif self.refusal is not None and not budget.is_off:
            raise self.refusal

    def requested_budget(self, text: object) -> Budget:
        """The budget that a request names.

        Raises:
            ValueError: not a budget, one that the model cannot have, or one that would read a file of this machine.
        """
        if isinstance(text, str) and (text.strip().startswith("plan:") or text.strip().endswith(".json")):
            raise BudgetError(
                f"budget {text!r} is a file of the server: give a number, a percentage, energy:TAU, share:SHARE or off"
            )
        budget = Budget.parse(text)  # type: ignore[arg-type]
        self.check(budget)
        return budget


class BudgetedAPIHandler(stock.APIHandler):
    """mlx-lm's handler with a `budget` field. What would end mlx-lm's only generation thread is refused."""

    def validate_model_parameters(self) -> None:
        super().validate_model_parameters()
        name: str = self.body.get("model", "default_model")
        provider = self.response_generator.model_provider
        self.requested_model = ModelName(
            name,
            provider.requested_budget(self.body["budget"]) if "budget" in self.body else provider.budget,
        )
        _check_stop(self.body.get("stop"))
        if self.seed is not None and not 0 <= self.seed < 1 << 64:
            raise ValueError(f"seed {self.seed} is outside 0..2^64-1")
        if self.path == "/v1/completions":
            _check_text("prompt", self.body.get("prompt"))
        else:
            _check_messages(self.body.get("messages"))

    def do_POST(self) -> None:  # noqa: N802
        self.answered = False
        try:
            super().do_POST()
        except (BrokenPipeError, ConnectionResetError):
            logging.info("the client went away")
        except UnicodeDecodeError as error:
            self._refuse(400, f"the request body is not UTF-8: {error}")
        except Exception as error:
            logging.exception("request failed")
            self._refuse(500, f"{type(error).__name__}: {error}")

    def send_response(self, code: int, message: str | None = None) -> None:
        self.answered = True
        super().send_response(code, message)

    def _refuse(self, status: int, reason: str) -> None:
        if self.answered:
            return
        self._set_completion_headers(status)
        self.end_headers()
        self.wfile.write(json.dumps({"error": reason}).encode())


def _check_text(name: str, value: object) -> None:
    if not isinstance(value, str) or not value:
        raise ValueError(f"{name} must be a non-empty string, got {value!r}")


def _check_stop(stop: object) -> None:
    words = [stop] if isinstance(stop, str) else stop or []
    if not isinstance(words, Sequence) or not all(isinstance(word, str) and word for word in words):
        raise ValueError(f"stop must be a non-empty string or a list of them, got {stop!r}")


def _check_messages(messages: object) -> None:
    if not isinstance(messages, list) or not messages:
        raise ValueError(f"messages must be a non-empty list, got {messages!r}")
    for i, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise ValueError(f"messages[{i}] must be an object with a role, got {message!r}")


class GuardedResponseGenerator(stock.ResponseGenerator):
    """mlx-lm's generator; what MLX would index out of bounds is refused while the error still reaches the client."""

    def _tokenize(self, tokenizer: Any, request: stock.CompletionRequest, args: stock.GenerationArguments) -> Any:
        if args.logits.logit_bias:
            size = self.model_provider.model.args.vocab_size
            for token in args.logits.logit_bias:
                if not 0 <= token < size:
                    raise ValueError(f"logit_bias names token {token}: this model's run from 0 to {size - 1}")
        tokenized = super()._tokenize(tokenizer, request, args)
        if not tokenized[0]:
            raise ValueError("the prompt has no token: give some text")
        return tokenized


class PromptCache(LRUPromptCache):
    """mlx-lm's cache, except that of a prompt it holds whole the last token is left to run: generation needs one."""

    def fetch_nearest_cache(self, model: Any, tokens: list[int]) -> tuple[list[Any] | None, list[int]]:
        cache, rest = super().fetch_nearest_cache(model, tokens)
        if cache is None or rest:
            return cache, rest
        if not can_trim_prompt_cache(cache):
            return None, tokens
        trim_prompt_cache(cache, 1)
        return cache, tokens[-1:]


def run(args: argparse.Namespace) -> None:
    """Serves until interrupted. The default model is loaded first: a foreign predictor never starts a server."""
    args.model, args.predictor = resolve_model(args.model, args.predictor)
    logging.basicConfig(level=args.log_level.upper(), format="%(asctime)s - %(levelname)s - %(message)s")
    maybe_set_recommended_wired_limit()
    provider = BudgetedModelProvider(args)
    provider.load_default()
    if provider.refusal is not None and provider.predictor is not None:
        raise provider.refusal
    Path(HF_HUB_CACHE).mkdir(parents=True, exist_ok=True)  # /v1/models lists it
    serve(args.host, args.port, provider)


def serve(host: str, port: int, provider: BudgetedModelProvider) -> None:
    """Runs mlx-lm's HTTP server over `provider`, its two generators replaced by ours."""
    with replaced(stock, BatchGenerator=BudgetedBatchGenerator, stream_generate=stream_generate):
        generator = GuardedResponseGenerator(provider, PromptCache(provider.cli_args.prompt_cache_size))
        try:
            stock._run_http_server(host, port, generator, handler_class=BudgetedAPIHandler)
        finally:
            generator.stop_and_join()
            time.sleep(THREAD_END_SECONDS)
