"""`base-moe serve` in a process of its own: the OpenAI client, budgets by request, and clients that misbehave."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from base_core.embedded import model_path

pytest.importorskip("mlx.core")

ROOT = Path(__file__).parents[3]
# A shell's background jobs ignore Ctrl-C, and so would their children.
START = (
    "import argparse, signal, sys; from backends.mlx import server; parser = argparse.ArgumentParser(); "
    "signal.signal(signal.SIGINT, signal.default_int_handler); "
    "server.add_arguments(parser); server.run(parser.parse_args(sys.argv[1:]))"
)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def start(*arguments: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-c", START, *arguments],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


class Server:
    def __init__(self, predictor: Path) -> None:
        self.port = free_port()
        options = (
            "--model",
            str(model_path()),
            "--predictor",
            str(predictor),
            "--budget",
            "6",
            "--log-level",
            "CRITICAL",
        )
        self.process = start(*options, "--port", str(self.port))
        self.url = f"http://127.0.0.1:{self.port}"
        deadline = time.monotonic() + 180
        while time.monotonic() < deadline:
            try:
                urllib.request.urlopen(self.url + "/health", timeout=1)
                return
            except OSError:
                assert self.process.poll() is None, self.process.stderr.read()
                time.sleep(0.2)
        raise AssertionError("the server did not start")

    def post(self, body: bytes | dict, path: str = "/v1/completions") -> tuple[int, str]:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        try:
            with urllib.request.urlopen(urllib.request.Request(self.url + path, data=data), timeout=30) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def complete(self, prompt: str, **fields) -> str:
        status, text = self.post({"prompt": prompt, "max_tokens": 12, **fields})
        assert status == 200, text
        return json.loads(text)["choices"][0]["text"]


@pytest.fixture(scope="module")
def server(predictor_file):
    server = Server(predictor_file)
    yield server
    assert server.post({"prompt": "12+34=", "budget": "off"})[0] == 200, "the server survived everything above"
    server.process.send_signal(signal.SIGINT)
    assert server.process.wait(20) == 0
    assert "Traceback" not in server.process.stderr.read()


def test_openai_client(server):
    openai = pytest.importorskip("openai", reason="the OpenAI client is not installed: pip install openai")
    client = openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0, timeout=60)
    complete = client.completions.create
    assert str(model_path()) in [model.id for model in client.models.list()]
    whole = complete(model="default_model", prompt="sort 735142=", max_tokens=12).choices[0].text
    parts = complete(model="default_model", prompt="sort 735142=", max_tokens=12, stream=True)
    assert "".join(part.choices[0].text for part in parts) == whole
    chat = client.chat.completions.create(
        model="default_model",
        messages=[{"role": "user", "content": "12+34="}],
        max_tokens=4,
        extra_body={"budget": "3"},
    )
    assert chat.usage.completion_tokens >= 1

    answers: dict[str, str] = {}

    def ask(prompt: str) -> None:
        answers[prompt] = (
            complete(model="default_model", prompt=prompt, max_tokens=12, extra_body={"budget": "off"}).choices[0].text
        )

    threads = [threading.Thread(target=ask, args=(prompt,)) for prompt in ("12+34=", "1+2=", "rev abcdef=", "max 3 9=")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert answers == {"12+34=": "46", "1+2=": "3", "rev abcdef=": "fedcba", "max 3 9=": "9"}

    with pytest.raises(openai.BadRequestError) as refused:
        complete(model="default_model", prompt="1+1=", extra_body={"budget": "65"})
    assert "65 is outside 1..64" in refused.value.response.json()["error"]


@pytest.mark.parametrize(
    ("budget", "reason"),
    (
        ("65", "outside 1..64"),
        (0, "below 1"),
        ("plenty", "not understood"),
        ("plan:/etc/hostname", "file of the server"),
        ("plan.json", "file of the server"),
        (None, "NoneType"),
        ([6], "list"),
        (True, "bool"),
    ),
)
def test_unknown_budgets_are_refused_with_the_reason(server, budget, reason):
    status, text = server.post({"prompt": "1+1=", "budget": budget})
    assert status == 400 and reason in json.loads(text)["error"]


def test_budgets_are_kept_apart(server):
    def log_probabilities(budget):
        status, text = server.post({"prompt": "57+99=", "max_tokens": 4, "logprobs": True, "budget": budget})
        assert status == 200
        return [token["logprob"] for token in json.loads(text)["choices"][0]["logprobs"]["content"]]

    stock, narrow = log_probabilities("off"), log_probabilities(1)
    assert max(abs(a - b) for a, b in zip(stock, narrow, strict=True)) > 1e-3
    # Neither finds the other's prompt cache, whose tokens after the prompt bear the mark of their budget.
    assert log_probabilities("off") == pytest.approx(stock, abs=1e-4)
    assert log_probabilities(1) == pytest.approx(narrow, abs=1e-4)
    assert log_probabilities("energy:1") == pytest.approx(stock, abs=1e-4)


def test_a_prompt_that_is_wholly_cached_is_answered(server):
    begin = server.complete("rev abcdef=", max_tokens=3, budget="off")
    assert begin == "fed"
    assert server.complete("rev abcdef=" + begin, budget="off") == "cba"


@pytest.mark.parametrize(
    ("body", "status"),
    (
        (b"{", 400),
        (b"\xff\xfe", 400),
        (b"[]", 400),
        (b"", 400),
        ({}, 400),
        ({"prompt": ""}, 400),
        ({"prompt": ["1+1="]}, 400),
        ({"prompt": "1+1=", "stop": 5}, 400),
        ({"prompt": "1+1=", "stop": [""]}, 400),
        ({"prompt": "1+1=", "max_tokens": "x"}, 400),
        ({"prompt": "1+1=", "max_tokens": 0}, 400),
        ({"prompt": "1+1=", "seed": -1}, 400),
        ({"prompt": "1+1=", "logit_bias": {"98": 1}}, 404),
        ({"prompt": "1+1=", "logit_bias": {"-1": 1}}, 404),
        ({"prompt": "1+1=", "model": "no/such/model"}, 404),
    ),
)
def test_malformed_completions_get_an_answer(server, body, status):
    got, text = server.post(body)
    assert got == status and json.loads(text)["error"]


@pytest.mark.parametrize("messages", (None, 5, [], [5], [{}], [{"role": 1}]))
def test_malformed_chats_get_an_answer(server, messages):
    got, text = server.post({"messages": messages}, "/v1/chat/completions")
    assert got == 400 and "messages" in json.loads(text)["error"]


def test_clients_that_go_away(server):
    body = json.dumps({"prompt": "rev abcdef=", "stream": True, "max_tokens": 200, "logit_bias": {"2": -100}}).encode()
    for sent, promised in ((body, len(body)), (body[:9], len(body))):
        with socket.create_connection(("127.0.0.1", server.port)) as client:
            head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {promised}\r\n\r\n"
            client.sendall(head.encode() + sent)
            if sent is body:
                assert client.recv(20).startswith(b"HTTP/1.0 200")
    assert server.complete("12+34=", budget="off") == "46"


def test_a_foreign_predictor_never_starts_a_server(tmp_path, build):
    from base_core import save_predictor

    save_predictor(tmp_path / "predictor.safetensors", build("qwen2_moe")[1])
    process = start("--model", str(model_path()), "--predictor", str(tmp_path), "--port", str(free_port()))
    _, errors = process.communicate(timeout=180)
    assert process.returncode != 0 and "model_type is 'qwen2_moe'" in errors
