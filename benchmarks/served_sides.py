"""Sides that answer conversations: the engine in this process, Quire's server, and the servers of peers.

Each is set up as one would serve this model with it on these cores; `settings` says how. All get the same bodies and
return what each client saw. Next to read: `served.py`, `server_process.py`.
"""

import contextlib
import os
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.server_process import ServerProcess, quire_serve
from benchmarks.side_specs import KINDS, Models, interpreter
from quire.cli.server_client import StreamedAnswer
from quire.engine.chat import dialogue_of
from quire.engine.llm import LLM
from quire.sampling_params import SamplingParams
from quire_workshop.load_client import Load, LoadResult, LoadTarget, put_load

MAX_MODEL_LEN = 2048
MAX_NUM_SEQS = 64
PEER_START_S = 600.0
"""vLLM compiles the model the first time."""
CHAT = "/v1/chat/completions"
Body = dict[str, Any]


class Offline:
    """The engine in this process."""

    name = "offline"
    settings: Mapping[str, Any] = {"max_model_len": MAX_MODEL_LEN, "enable_prefix_caching": False}

    def __init__(self, model: str) -> None:
        self._engine = LLM(model, **self.settings).llm_engine
        self._num_asked = 0

    def measure(self, num_clients: int, bodies: Sequence[Body]) -> LoadResult:
        """Answer them, `num_clients` at once."""
        engine = self._engine
        waiting = iter(bodies)
        answers: dict[str, StreamedAnswer] = {}
        begin_s = time.perf_counter()
        for body in [body for _, body in zip(range(num_clients), waiting, strict=False)]:
            self._ask(body, answers)
        while engine.has_unfinished_requests():
            for output in engine.step():
                answer, now_s = answers[output.request_id], time.perf_counter()
                answer.num_tokens = len(output.outputs[0].token_ids)
                answer.chunk_times.append(now_s)
                if output.finished:
                    answer.ended_s = now_s
                    if (body := next(waiting, None)) is not None:
                        self._ask(body, answers)
        return LoadResult(Load(concurrency=num_clients), tuple(answers.values()), time.perf_counter() - begin_s)

    def _ask(self, body: Body, answers: dict[str, StreamedAnswer]) -> None:
        self._num_asked += 1
        request_id = str(self._num_asked)
        answers[request_id] = StreamedAnswer(time.perf_counter())
        token_ids = dialogue_of(self._engine).prepare(body["messages"]).token_ids
        params = SamplingParams(temperature=0, max_tokens=body["max_tokens"], ignore_eos=True)
        self._engine.add_request(request_id, token_ids, params)

    def pause(self) -> None:
        """It does nothing unless asked."""

    def resume(self) -> None:
        """As `pause`."""


@dataclass(frozen=True)
class Recipe:
    """Command and address of a server. `url` and `ready_path` as `ServerProcess` takes them."""

    name: str
    command: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)
    url: str = ""
    ready_path: str = ""
    knows_ignore_eos: bool = True

    @property
    def settings(self) -> dict[str, Any]:
        """Its options as they were given, without what differs from machine to machine."""
        own = [word for word in self.command[3:] if not word.startswith("http") and not Path(word).is_absolute()]
        environment = {name: value for name, value in self.environment.items() if name != "PYTHONPATH"}
        return {"options": own, "environment": environment}


class Served:
    """A server in a process of its own."""

    def __init__(self, recipe: Recipe, process: ServerProcess) -> None:
        self.name = recipe.name
        self.settings: Mapping[str, Any] = {**recipe.settings, "start_s": process.start_s}
        self._knows_ignore_eos = recipe.knows_ignore_eos
        self._process = process
        self.pause = process.pause
        self.resume = process.resume

    def measure(self, num_clients: int, bodies: Sequence[Body]) -> LoadResult:
        """As `Offline.measure`, seen by clients. Raises: RuntimeError if not all are answered in full."""
        asked = list(bodies)
        if not self._knows_ignore_eos:
            asked = [{**body, "min_tokens": body["max_tokens"]} for body in bodies]
        result = put_load(LoadTarget(self._process.url, CHAT), Load(concurrency=num_clients), asked)
        failed = [answer.error for answer in result.answers if answer.error is not None or not answer.chunk_times]
        if failed:
            raise RuntimeError(f"{self.name}: {len(failed)} of {len(asked)} requests failed: {failed[0]}")
        return result


Side = Offline | Served


@contextlib.contextmanager
def running(recipe: Recipe) -> Iterator[Served]:
    """Start it and wait until it answers. Raises: RuntimeError."""
    process = ServerProcess(
        recipe.command, recipe.environment, url=recipe.url, ready_path=recipe.ready_path, start_s=PEER_START_S
    )
    try:
        yield Served(recipe, process)
    finally:
        process.kill()


def quire(model: str, num_threads: int, interpreters: Mapping[str, Any]) -> Recipe:
    """`quire serve`: all as it comes, but for the cache of prefixes, which no prompt here would hit."""
    options = ("--max-model-len", str(MAX_MODEL_LEN), "--no-enable-prefix-caching", "--speculative", "off")
    return Recipe("quire serve", quire_serve(model, *options, name=model))


def parent(model: str, num_threads: int, interpreters: Mapping[str, Any]) -> Recipe:
    """`quire serve` of another commit, as `quire`. Raises: Skipped."""
    own = quire(model, num_threads, interpreters)
    python = interpreter("parent", KINDS["parent"], interpreters)
    return Recipe("parent", [python, *own.command[1:]], {"PYTHONPATH": ""})


def llama_cpp(model: str, num_threads: int, interpreters: Mapping[str, Any]) -> Recipe:
    """llama-cpp-python's server. It answers one request at a time, and would cut one off for the next. Raises: Skipped.

    Against its defaults: all cores, logits of the last token only, prompts in one batch. Flash attention gains nothing.
    It knows no `ignore_eos`; `min_tokens`, which makes answers as long as the others', costs it 1 to 2 ms per token.
    """
    python = interpreter("llama.cpp", KINDS["llama.cpp"], interpreters)
    url = _free_url()
    options = {
        "model": str(Models.of(model).gguf), "model_alias": model, "port": url.rpartition(":")[2], "host": "127.0.0.1",
        "n_ctx": MAX_MODEL_LEN, "n_batch": MAX_MODEL_LEN, "n_threads": num_threads, "n_threads_batch": num_threads,
        "logits_all": "false", "verbose": "false", "interrupt_requests": "false",
        "disable_ping_events": "true",
    }  # fmt: skip
    command = [python, "-m", "llama_cpp.server"]
    command += [word for name, value in options.items() for word in (f"--{name}", str(value))]
    return Recipe("llama.cpp", command, {"PYTHONPATH": ""}, url, "/v1/models", knows_ignore_eos=False)


def vllm(model: str, num_threads: int, interpreters: Mapping[str, Any]) -> Recipe:
    """vLLM's server, on the bf16 weights, since it reads no GGUF on CPUs; threads bound. Raises: Skipped."""
    python = interpreter("vllm", KINDS["vllm"], interpreters)
    url = _free_url()
    options = {
        "model": str(Models.of(model).path("bf16")), "served-model-name": model, "port": url.rpartition(":")[2],
        "host": "127.0.0.1", "dtype": "bfloat16", "max-model-len": MAX_MODEL_LEN, "max-num-seqs": MAX_NUM_SEQS,
        "generation-config": "vllm",
    }  # fmt: skip
    command = [python, "-m", "vllm.entrypoints.openai.api_server", "--no-enable-prefix-caching"]
    command += [word for name, value in options.items() for word in (f"--{name}", str(value))]
    cpus = sorted(os.sched_getaffinity(0))[:num_threads]
    environment = {
        "PYTHONPATH": "", "VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cpus)),
        "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "VLLM_LOGGING_STREAM": "ext://sys.stderr",
    }  # fmt: skip
    return Recipe("vllm", command, environment, url, "/health")


RECIPES = {"quire": quire, "parent": parent, "llama.cpp": llama_cpp, "vllm": vllm}


def _free_url() -> str:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return f"http://127.0.0.1:{listener.getsockname()[1]}"
