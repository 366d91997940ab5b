"""`vllm serve` as users start it: compiled, in several processes, under load, with clients that leave early."""

from __future__ import annotations

import asyncio
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections import defaultdict

import psutil
import pytest
from openai import AsyncOpenAI, OpenAI

from backends.cuda.generate import generate_texts
from base_core.embedded import model_path, predictor_path, tasks
from base_core.report import wilson_interval
from tests.vllm.engines import HERE, TIME_LIMIT, engine_environment

BUDGET = 16
CONCURRENCY = 16
SOAK = 500
MEGABYTE = 1 << 20
GROWTH = 64 * MEGABYTE
"""Of all processes in the second half of the soak. A worker of vLLM takes 40, then 10, then 5 MB more for each 250
requests, with and without a budget."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Server:
    """A running `vllm serve`; its processes write to one log."""

    def __init__(self, model, folder) -> None:
        self.folder, self.log, self.port = folder, folder / "log", free_port()
        entry = f'{{"base": {{"predictor": "{predictor_path()}", "budget": "{BUDGET}"}}}}'
        options = {
            "--host": "127.0.0.1",
            "--port": str(self.port),
            "--served-model-name": "embedded",
            "--dtype": "float32",
            "--max-num-seqs": str(CONCURRENCY),
            "--max-model-len": "256",
            # A small cache: its pages count as memory only once they were used, which looks like growth.
            "--num-gpu-blocks-override": "48",
            "--additional-config": entry,
        }
        arguments = [text for pair in options.items() for text in pair]
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, str(HERE / "command.py"), "serve", str(model), *arguments],
                env=engine_environment(folder),
                cwd=folder,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def wait(self) -> None:
        """Until it answers."""
        deadline = time.monotonic() + TIME_LIMIT
        while not self.is_up():
            assert self.process.poll() is None and time.monotonic() < deadline, self.log.read_text()[-6000:]
            time.sleep(0.5)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def is_up(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=2) as answer:
                return answer.status == 200
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            return False

    def metrics(self) -> dict[str, float]:
        """Samples of the metrics endpoint, by name without labels, once the worker has written its last counters."""
        time.sleep(1)
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=10) as answer:
            text = answer.read().decode()
        return {m[1]: float(m[2]) for m in re.finditer(r"^([\w:]+)(?:\{[^}]*\})? (\S+)$", text, re.M)}

    def memory(self) -> int:
        """Resident bytes of all its processes."""
        root = psutil.Process(self.process.pid)
        return sum(process.memory_info().rss for process in (root, *root.children(recursive=True)))

    def stop(self) -> None:
        self.process.send_signal(signal.SIGINT)
        self.process.wait(60)


@pytest.fixture(scope="module")
def server(checkpoint, tmp_path_factory):
    running = Server(checkpoint, tmp_path_factory.mktemp("serve"))
    try:
        running.wait()
        yield running
    finally:
        if running.process.poll() is None:
            running.stop()


@pytest.fixture(scope="module")
def examples():
    return tasks.evaluation_examples(400)


def assert_consistent(before: dict[str, float], after: dict[str, float]) -> None:
    """The counters of the time between two scrapes fit each other and the budget."""
    steps, active, union, fallbacks = (
        after[f"base_moe:{name}_total"] - before.get(f"base_moe:{name}_total", 0)
        for name in ("layer_steps", "active_experts", "union_experts", "fallbacks")
    )
    assert steps > 0 and steps % 4 == 0 and fallbacks == 0
    assert steps <= active <= BUDGET * steps and active <= union
    assert after["base_moe:max_active_experts"] <= BUDGET
    assert after["base_moe:mean_active_experts"] == pytest.approx(
        after["base_moe:active_experts_total"] / after["base_moe:layer_steps_total"]
    )


def test_openai_client_and_counters(server):
    client = OpenAI(base_url=f"{server.url}/v1", api_key="none")
    before = server.metrics()
    answer = client.completions.create(model="embedded", prompt="sort 593118=", max_tokens=12, temperature=0)
    assert answer.choices[0].text == "113589"
    after = server.metrics()
    assert_consistent(before, after)
    assert after["base_moe:layer_steps_total"] - before.get("base_moe:layer_steps_total", 0) == 4 * 6


def test_log_says_once_what_is_in_force(server):
    log = server.log.read_text()
    assert log.count("BASE active") == 1
    assert f"BASE active: 4 layers, budget {BUDGET}, predictor {predictor_path()}" in log


def test_accuracy_under_load_is_that_of_the_offline_evaluation(server, examples):
    """The interval of 95 % around what `base-moe` itself measures on the same prompts, over all tasks and for each."""
    offline = generate_texts(
        model_path(),
        predictor_path(),
        BUDGET,
        [example.prompt for example in examples],
        batch=CONCURRENCY,
        max_tokens=14,
        dtype="float32",
    ).texts

    async def ask_all() -> list[str]:
        client = AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        slots = asyncio.Semaphore(CONCURRENCY)

        async def ask(prompt: str) -> str:
            async with slots:
                answer = await client.completions.create(model="embedded", prompt=prompt, max_tokens=14, temperature=0)
                return answer.choices[0].text

        return await asyncio.gather(*(ask(example.prompt) for example in examples))

    before = server.metrics()
    served = asyncio.run(ask_all())
    assert_consistent(before, server.metrics())
    results: dict[str, list[tuple[bool, bool]]] = defaultdict(list)
    for example, text, reference in zip(examples, served, offline, strict=True):
        for key in ("all", example.task):
            results[key].append((text.strip() == example.answer, reference.strip() == example.answer))
    assert len(results) == 9
    for key, pairs in results.items():
        low, high = wilson_interval(sum(reference for _, reference in pairs), len(pairs))
        share = sum(right for right, _ in pairs) / len(pairs)
        assert low - 1e-9 <= share <= high + 1e-9, key


def test_vllms_own_benchmark(server, checkpoint):
    options = {
        "--base-url": server.url,
        "--model": "embedded",
        "--tokenizer": str(checkpoint),
        "--dataset-name": "random",
        "--random-input-len": "24",
        "--random-output-len": "24",
        "--num-prompts": "48",
        "--max-concurrency": str(CONCURRENCY),
    }
    before = server.metrics()
    done = subprocess.run(
        [sys.executable, str(HERE / "command.py"), "bench", "serve", *(t for pair in options.items() for t in pair)],
        env=engine_environment(server.folder),
        cwd=server.folder,
        capture_output=True,
        text=True,
        timeout=TIME_LIMIT,
        check=False,
    )
    assert re.search(r"Successful requests: +48", done.stdout), done.stdout + done.stderr
    assert re.search(r"Failed requests: +0", done.stdout)
    assert_consistent(before, server.metrics())


def test_soak(server, examples):
    """500 requests of mixed length, 16 at a time; one in ten is cancelled amid its stream, one in ten hangs up."""
    finished: list[int] = []

    async def cancel(client: AsyncOpenAI, prompt: str) -> None:
        stream = await client.completions.create(
            model="embedded", prompt=prompt, max_tokens=200, temperature=1, stream=True
        )
        async for _ in stream:
            break
        await stream.close()

    async def hang_up(prompt: str) -> None:
        _, writer = await asyncio.open_connection("127.0.0.1", server.port)
        body = f'{{"model": "embedded", "prompt": "{prompt}", "max_tokens": 200, "ignore_eos": true}}'
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
        )
        writer.write(f"{head}\r\n\r\n{body}".encode())
        await writer.drain()
        await asyncio.sleep(0.05)
        writer.transport.abort()

    async def ask(client: AsyncOpenAI, i: int, prompt: str) -> None:
        length = 1 + i * 37 % 90
        answer = await client.completions.create(
            model="embedded",
            prompt=prompt,
            max_tokens=length,
            temperature=i % 2,
            extra_body={"ignore_eos": True},
        )
        assert answer.usage is not None and answer.usage.completion_tokens == length
        finished.append(i)

    async def run(numbers: range) -> None:
        client = AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        slots = asyncio.Semaphore(CONCURRENCY)

        async def one(i: int) -> None:
            prompt = "".join(example.prompt for example in examples[i % 50 : i % 50 + 1 + i % 9])
            async with slots:
                if i % 10 == 3:
                    await cancel(client, prompt)
                elif i % 10 == 7:
                    await hang_up(prompt)
                else:
                    await ask(client, i, prompt)

        await asyncio.gather(*(one(i) for i in numbers))

    before = server.metrics()
    asyncio.run(run(range(SOAK // 2)))
    middle, memory = server.metrics(), server.memory()
    asyncio.run(run(range(SOAK // 2, SOAK)))
    after, grown = server.metrics(), server.memory() - memory
    assert len(finished) == SOAK * 8 // 10
    assert_consistent(before, middle)
    assert_consistent(middle, after)
    assert after["vllm:num_requests_running"] == after["vllm:num_requests_waiting"] == 0
    assert grown < GROWTH, f"{grown / MEGABYTE:.1f} MB more after the second half"
    log = server.log.read_text()
    assert "ERROR" not in log and "Traceback" not in log


def test_it_still_answers_and_leaves_nothing_behind(server):
    client = OpenAI(base_url=f"{server.url}/v1", api_key="none")
    answer = client.completions.create(model="embedded", prompt="12+30=", max_tokens=12, temperature=0)
    assert answer.choices[0].text == "42"
    assert list(server.folder.glob("base-moe-*"))
    server.stop()
    assert not list(server.folder.glob("base-moe-*"))
