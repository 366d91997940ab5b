"""`base-moe chat`: mlx-lm's chat under an expert budget that can be switched while talking."""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Generator
from contextlib import closing
from dataclasses import asdict, dataclass
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx_lm import chat as stock
from mlx_lm.cli_ui import ChatUI, print_header_panel
from mlx_lm.generate import GenerationResponse
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.sample_utils import make_sampler
from mlx_lm.tokenizer_utils import TokenizerWrapper

from backends.mlx.generate import load, stream_generate
from backends.mlx.integration import Policy, Session, Stats, base_budget
from base_core.artifact import load_predictor
from base_core.audit import add_audit_arguments, audit_table
from base_core.embedded import resolve_model

DEFAULT_BUDGET = "off"
DEFAULT_NUM_DRAFT_TOKENS = 3
DENSE_REPEAT_TOKENS = 64
DESCRIPTION = "Chat with a mixture-of-experts model under an expert budget (mlx_lm.chat's flags and keys)."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--predictor", help="Predictor file, folder or hub id (default: the embedded model's)")
    parser.add_argument(
        "--budget",
        default=DEFAULT_BUDGET,
        help="Experts that a layer may read in a step: 16, 12.5%%, energy:0.98, share:0.01, plan:FILE or off (off)",
    )
    parser.add_argument("--draft-model", help="A smaller model of the same tokenizer, for speculative decoding")
    parser.add_argument(
        "--num-draft-tokens",
        type=int,
        default=DEFAULT_NUM_DRAFT_TOKENS,
        help=f"Drafts that the model checks in one step (default: {DEFAULT_NUM_DRAFT_TOKENS})",
    )
    add_audit_arguments(parser)
    for action in stock.setup_arg_parser()._actions:
        if not isinstance(action, argparse._HelpAction) and "--pipeline" not in action.option_strings:
            parser._add_action(action)
    parser.set_defaults(model=None)


class BudgetUI(ChatUI):
    """mlx-lm's chat screen with a budget in its header and two more commands."""

    def __init__(self, args: argparse.Namespace, session: Session) -> None:
        super().__init__(args)
        self._session = session

    def __enter__(self) -> BudgetUI:
        rows = [("model", str(self._args.model)), ("predictor", str(self._args.predictor))]
        if self._args.adapter_path:
            rows.append(("adapter", str(self._args.adapter_path)))
        if self._args.draft_model:
            rows.append(("draft", f"{self._args.draft_model} · {self._args.num_draft_tokens} tokens"))
        rows += [("budget", str(self._session.budget)), ("max tokens", f"{self._args.max_tokens:,}")]
        if self._args.system_prompt:
            rows.append(("system", self._args.system_prompt[:60]))
        print_header_panel(self._console, "base-moe chat", rows)
        self.say_help()
        self.say_budget()
        return self

    def prompt(self) -> str:
        """One line from the user; the end of input and Ctrl-C leave the chat."""
        try:
            return super().prompt()
        except (EOFError, KeyboardInterrupt):
            return "q"

    def say_help(self) -> None:
        super().say_help()
        self.say(
            "              [ui.strong]/budget 12[/ui.strong] [ui.muted]switch[/ui.muted]   "
            "[ui.strong]/stats[/ui.strong] [ui.muted]experts, energy, speed[/ui.muted]"
        )

    def say(self, text: str) -> None:
        self._console.print(f"  {text}")

    def say_budget(self) -> None:
        """Says what the budget is, and where it cannot matter."""
        session = self._session
        self.say(f"[ui.good]budget[/ui.good] [ui.muted]{session.budget}[/ui.muted]")
        if not session.budget.is_off and session.policy.decode_window == 1 and not session.restricts(1):
            k = session.experts_per_token
            self.say(
                f"[ui.warn]one stream without drafts reads {k} experts a layer and step, so a budget of {k} or more "
                "changes nothing: lower it, or give --draft-model[/ui.warn]"
            )

    def say_stats(self, chat: Chat) -> None:
        """Experts, energy kept, and speed beside the dense model's in this chat."""
        stats = self._stats()
        if stats.active_mean is None or stats.kept_energy is None:
            self.say("[ui.muted]no step so far in which the budget could change anything[/ui.muted]")
        else:
            self._say_figure("experts", f"{stats.active_mean:.1f}", f"of {stats.union_mean:.1f} a layer and step")
            self._say_figure(
                "energy", f"{100 * stats.kept_energy:.2f} %", f"kept, predicted; {stats.fallbacks} fallbacks"
            )
        budget, dense = chat.tokens_per_s()
        self._say_figure("speed", _rate(budget), f"under a budget; dense {_rate(dense)}")
        self.say_audit()

    def say_audit(self) -> None:
        """The audit's table, and its warning; nothing without an audit."""
        audit = self._stats().audit
        if audit is None:
            return
        for line in audit_table(asdict(audit)).splitlines():
            self._console.print(f"  {line}", markup=False, highlight=False)
        warning = audit.warning()
        if warning is not None:
            self.say(f"[ui.warn]{warning}[/ui.warn]")

    def _stats(self) -> Stats:
        # What the audit would warn of is said on the screen instead.
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="audit: ")
            return self._session.stats()

    def _say_figure(self, name: str, figure: str, remark: str) -> None:
        self.say(f"[ui.label]{name:<7}[/ui.label] [ui.strong]{figure}[/ui.strong] [ui.muted]{remark}[/ui.muted]")

    def say_error(self, error: Exception) -> None:
        self._console.print(f"  {error}", style="ui.warn", markup=False)


def _rate(tokens_per_s: float | None) -> str:
    return "not measured yet" if tokens_per_s is None else f"{tokens_per_s:.1f} tok/s"


class Chat:
    """One conversation: its tokens, its prompt cache and its speed.

    A cache belongs to one budget. After a switch the conversation is prefilled anew, which a budget never touches. A
    model without a chat template completes every line by itself.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: TokenizerWrapper,
        session: Session,
        args: argparse.Namespace,
        draft_model: nn.Module | None = None,
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.session = session
        self.args = args
        self.draft_model = draft_model
        self.sampler = make_sampler(
            args.temp,
            args.top_p,
            xtc_threshold=args.xtc_threshold,
            xtc_probability=args.xtc_probability,
            xtc_special_tokens=tokenizer.encode("\n") + list(tokenizer.eos_token_ids),
        )
        self._under_budget, self._dense = Speed(), Speed()
        self.reset()

    def reset(self) -> None:
        """Forgets the conversation."""
        self.history: list[int] = []
        self._last_prompt: list[int] = []
        self._drop_cache()

    def _drop_cache(self) -> None:
        self.cache = self._new_cache()
        self._cached = 0

    def _new_cache(self) -> list[Any]:
        cache = make_prompt_cache(self.model, self.args.max_kv_size)
        if self.draft_model is not None:
            cache += make_prompt_cache(self.draft_model, self.args.max_kv_size)
        return cache

    def set_budget(self, text: str) -> None:
        """Switches the budget; a bad one raises a ValueError and changes nothing."""
        self.session.set_budget(text)
        self._drop_cache()

    def encode(self, query: str) -> list[int]:
        """Token ids of the user's turn, through the chat template where the tokenizer has one."""
        if not self.tokenizer.has_chat_template:
            return self.tokenizer.encode(query)
        messages = [{"role": "user", "content": query}]
        if self.args.system_prompt is not None:
            messages.insert(0, {"role": "system", "content": self.args.system_prompt})
        return self.tokenizer.apply_chat_template(messages, add_generation_prompt=True)

    def reply(self, query: str) -> Generator[GenerationResponse, None, None]:
        """Streams the answer to one turn. Stopped early, it leaves the conversation as far as it got."""
        if not self.tokenizer.has_chat_template:
            self.reset()
        self.history += self.encode(query)
        self._last_prompt = list(self.history)
        speed = self._dense if self.session.budget.is_off else self._under_budget
        complete = False
        try:
            for response in self._generate(self.history[self._cached :], self.cache, self.args.max_tokens, speed):
                self.history.append(response.token)
                yield response
            complete = True
        finally:
            self._cached = getattr(self.cache[0], "offset", len(self.history))
            if not complete or self._cached > len(self.history):
                self._drop_cache()

    def _generate(
        self, prompt: list[int], cache: list[Any], most: int, speed: Speed
    ) -> Generator[GenerationResponse, None, None]:
        options = {} if self.draft_model is None else {"num_draft_tokens": self.args.num_draft_tokens}
        started = None
        responses = stream_generate(
            self.model,
            self.tokenizer,
            prompt,
            max_tokens=most,
            draft_model=self.draft_model,
            sampler=self.sampler,
            prompt_cache=cache,
            prefill_step_size=self.args.prefill_step_size,
            **options,
        )
        with closing(responses):
            for response in responses:
                now = time.perf_counter()
                if started is not None:
                    speed.tokens += 1
                    speed.seconds += now - started
                started = now
                yield response

    def tokens_per_s(self) -> tuple[float | None, float | None]:
        """Decode speed under a budget and dense. Where no turn ran dense, the last one is repeated dense."""
        if self._dense.tokens_per_s is None and self._last_prompt:
            with self.session.suspended():
                for _ in self._generate(self._last_prompt, self._new_cache(), DENSE_REPEAT_TOKENS, self._dense):
                    pass
        return self._under_budget.tokens_per_s, self._dense.tokens_per_s


@dataclass
class Speed:
    """Tokens decoded after each turn's first one, and the time they took."""

    tokens: int = 0
    seconds: float = 0.0

    @property
    def tokens_per_s(self) -> float | None:
        return self.tokens / self.seconds if self.seconds else None


def run(args: argparse.Namespace) -> None:
    """Chats until q, the end of input or Ctrl-C at the prompt; Ctrl-C during an answer stops the answer."""
    args.model, args.predictor = resolve_model(args.model, args.predictor)
    if args.num_draft_tokens < 1:
        raise ValueError(
            f"--num-draft-tokens {args.num_draft_tokens} is below 1: leave --draft-model out to chat without"
        )
    mx.random.seed(args.seed)
    trust = {"trust_remote_code": args.trust_remote_code}
    model, tokenizer = load(args.model, adapter_path=args.adapter_path, tokenizer_config=trust, **trust)
    draft_model = None
    if args.draft_model is not None:
        draft_model, draft_tokenizer = load(args.draft_model, tokenizer_config=trust, **trust)
        if draft_tokenizer.vocab_size != tokenizer.vocab_size:
            raise ValueError(
                f"draft model {args.draft_model!r} has {draft_tokenizer.vocab_size} tokens, the model "
                f"{tokenizer.vocab_size}: take a draft model of the same tokenizer"
            )
    predictor = None if args.predictor is None else load_predictor(args.predictor)
    policy = Policy(
        decode_window=1 if draft_model is None else args.num_draft_tokens + 1,
        audit=args.audit,
        audit_correct=args.audit_correct,
    )
    with base_budget(model, predictor, args.budget, policy) as session, BudgetUI(args, session) as ui:
        chat = Chat(model, tokenizer, session, args, draft_model)
        while (query := ui.prompt().strip()) != "q":
            answer(chat, ui, query)
        ui.say_audit()
        ui.say_bye()


def answer(chat: Chat, ui: BudgetUI, query: str) -> None:
    """Obeys one command, or answers one turn."""
    command, _, argument = query.partition(" ")
    if not query:
        return
    if query == "r":
        chat.reset()
        ui.say_reset()
    elif query == "h":
        ui.say_help()
    elif query == "/stats":
        ui.say_stats(chat)
    elif command == "/budget":
        try:
            if argument.strip():
                chat.set_budget(argument)
            ui.say_budget()
        except ValueError as error:
            ui.say_error(error)
    else:
        last = None
        with closing(chat.reply(query)) as responses:
            try:
                for last in responses:
                    ui.stream_token(last.text)
            except KeyboardInterrupt:
                pass
        ui.end_turn(last)
