"""Without PyTorch: every verb on a CPU, every family of models with the same bits, and one line for what needs it.

What is forbidden is its import, here and in child processes; `make test-bare` runs this file where it is missing.
"""

import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers

from quire.extras import install_command
from quire.models.registry import model_types
from quire_lessons.learn.grading import PROGRAMS
from tests.cli.tiny_directory import CONFIG, make_tiny_directory, tensor_shapes
from tests.models.tiny_configs import LLAMA, TINY_CONFIGS, full_config
from tests.server.serving import Serving, serving

ROOT = Path(__file__).parents[1]
FORBIDDEN = str(Path(__file__).parent / "without_torch")
TORCH = f"needs PyTorch: {install_command('torch')}\n"
OP_BY_OP = f"a model that runs op by op {TORCH}"
DTYPES = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16}
needs_torch = pytest.mark.skipif(find_spec("torch") is None, reason="PyTorch is not installed")


def paths(*directories: str) -> str:
    """Return a PYTHONPATH that begins with these."""
    return os.pathsep.join([*directories, str(ROOT), os.environ.get("PYTHONPATH", "")])


def child(kind: str, items: dict[str, Any], *words: str, path: str = "", **environment: str) -> dict[str, Any]:
    """Run `tests.without_torch.child`, with what the environment says."""
    variables = {**os.environ, "PYTHONPATH": path or paths(FORBIDDEN), **environment}
    command = [sys.executable, "-m", "tests.without_torch.child", kind, *words]
    done = subprocess.run(
        command, input=json.dumps(items), capture_output=True, text=True, cwd=ROOT, env=variables, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def test_import_is_an_error_in_child_processes() -> None:
    """All else here would hold in any case if it were not."""
    variables = {**os.environ, "PYTHONPATH": paths(FORBIDDEN)}
    done = subprocess.run([sys.executable, "-c", "import torch"], capture_output=True, env=variables, check=False)
    assert b"ModuleNotFoundError" in done.stderr


# --- Verbs --------------------------------------------------------------------------------------

PLAN = ["--max-tokens", "6", "--temperature", "1", "--seed", "4"]
VERBS: dict[str, tuple[list[str], str]] = {
    "run": (["run", "{tiny}", "hi", *PLAN], ""),
    "structured": (["run", "{tiny}", "hi", "--structured-outputs", '{"choice": ["ab", "cd"]}'], "cd"),
    "tensor ranks": (["run", "{tiny}", "hi", *PLAN, "--tensor-parallel-size", "2"], ""),
    "pipeline ranks": (["run", "{tiny}", "hi", *PLAN, "--pipeline-parallel-size", "2"], ""),
    "int8 KV": (["run", "{tiny}", "hi", *PLAN, "--kv-cache-dtype", "int8", "--dtype", "float16"], ""),
    "quantized at load": (["run", "{wide}", "hi", *PLAN, "--quantization", "int4"], ""),
    "random weights": (["run", "{tiny}", "hi", *PLAN, "--load-format", "dummy"], ""),
    "bench": (["bench", "{tiny}", "-p", "16", "-n", "4", "-c", "1,2", "-r", "1"], "tg4@2"),
    "explain": (["explain", "{tiny}", "--ctx", "64", "--ops", "--measure"], "Parameters"),
    "explain ranks": (["explain", "{tiny}", "--ctx", "64", "--tp", "2"], "rank 0 of 2"),
    "explain preset": (["explain", "qwen3-4b"], "4,022,468,096"),
    "tour": (["tour", "hi", "--model", "{tiny}"], "Text becomes tokens"),
    "trace": (["trace", "hi", "--model", "{tiny}", "-o", "{out}/t.jsonl", "--op-period", "1"], "steps"),
    "timeline": (["trace", "{out}/t.jsonl", "-o", "{out}/t.json"], "steps"),
    "view": (["view", "ops", "{out}/t.jsonl"], "Gemm"),
    "compare": (["compare", "batching", "--requests", "32"], "tokens/step"),
    "learn program": (["learn", "check", "mask", "{out}/mask.py"], "Right."),
    "learn number": (["learn", "check", "bits", "5"], "Right."),
    "show": (["show", "{tiny}"], "on CPUs as a plan"),
    "tokenize": (["tokenize", "{tiny}", "hi"], "position"),
    "quantize": (["quantize", "{wide}", "{out}/q.gguf", "--type", "Q4_K_M"], "q.gguf"),
    "run GGUF": (["run", "{out}/q.gguf", "hi", *PLAN], ""),
    "convert": (["quantize", "{out}/q.gguf", "{out}/f.gguf", "--type", "BF16"], "f.gguf"),
    "doctor": (["doctor"], "not installed: models run as plans on the CPU"),
}
REFUSED: dict[str, tuple[list[str], str]] = {
    "GPU": (["run", "{tiny}", "hi", "--device", "cuda"], f"device='cuda' {TORCH}"),
    "op by op": (["run", "{tiny}", "hi", "--enforce-eager"], OP_BY_OP),
    "ranks op by op": (
        ["run", "{tiny}", "hi", "--enforce-eager", "--tensor-parallel-size", "2"], OP_BY_OP,
    ),
    "block size": (["run", "{tiny}", "hi", "--block-size", "8"], OP_BY_OP),
    "profiler": (
        ["trace", "hi", "--model", "{tiny}", "--torch-profiler", "-o", "{out}/p.json"], f"--torch-profiler {TORCH}",
    ),
    "diff": (["diff", "{tiny}"], f"quire diff needs PyTorch: {install_command('hf')}\n"),
    "importance": (
        ["quantize", "{wide}", "{out}/i.gguf", "--type", "Q4_K_M", "--imatrix-text", "{out}/text"],
        f"an importance matrix {TORCH}",
    ),
}  # fmt: skip


def write_wide(path: Path, dtype: str = "F32") -> Path:
    """Write a model of whole blocks of 32 columns, with weights of this type of safetensors."""
    sizes = {"hidden_size": 32, "intermediate_size": 256, "max_position_embeddings": 512}
    make_tiny_directory(path, **sizes)
    generator, header, data = np.random.default_rng(0), {}, b""
    for name, shape in tensor_shapes({**CONFIG, **sizes}).items():
        values = generator.normal(0, 0.1, shape).astype(np.float32)
        stored = (values.view(np.uint32) >> 16 if dtype == "BF16" else values).astype(DTYPES[dtype]).tobytes()
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(stored)]}
        data += stored
    head = json.dumps(header).encode()
    (path / "model.safetensors").write_bytes(len(head).to_bytes(8, "little") + head + data)
    return path


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Run all command lines in one process that cannot import PyTorch."""
    base = tmp_path_factory.mktemp("verbs")
    (base / "text").write_text("ab cd " * 400)
    (base / "mask.py").write_text(next(item.solution for item in PROGRAMS if item.name == "mask"))
    places = {"tiny": str(make_tiny_directory(base / "tiny")), "wide": str(write_wide(base / "wide")), "out": str(base)}
    lines = {
        name: [word.format_map(places) if word[0] == "{" and word[1] != '"' else word for word in words]
        for name, (words, _) in {**VERBS, **REFUSED}.items()
    }
    variables = {"QUIRE_CACHE_DIR": str(base / "cache"), "XDG_STATE_HOME": str(base / "state")}
    return child("verbs", lines, **variables)["found"]


@pytest.mark.parametrize("name", VERBS)
def test_verb_works(results: dict[str, Any], name: str) -> None:
    found = results[name]
    assert found["code"] == 0, found["stderr"]
    assert VERBS[name][1] in found["stdout"]
    assert found["stdout"]
    assert "op by op" not in found["stderr"]


@pytest.mark.parametrize("name", REFUSED)
def test_what_needs_torch_says_so_in_one_line(results: dict[str, Any], name: str) -> None:
    found = results[name]
    assert (found["code"], found["stdout"]) == (2, "")
    assert found["stderr"] == f"error[missing_extra]: {REFUSED[name][1]}"


def test_ranks_draw_the_tokens_of_one(results: dict[str, Any]) -> None:
    answers = [results[name]["stdout"] for name in ("run", "tensor ranks", "pipeline ranks")]
    assert answers == [answers[0]] * 3


OUTSIDE = {
    "that imports torch": ("import torch", "", "outside:Outside, the model of Other, needs PyTorch"),
    "with a branch on values": ("", "if hidden.sum(): pass", "a plan cannot hold .sum of a value, and running op"),
    "with a function of torch": (
        "from quire.lazy_torch import torch", "torch.relu(hidden)", "computing op by op needs PyTorch",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", OUTSIDE)
def test_model_from_outside_that_needs_torch_says_so(tmp_path: Path, name: str) -> None:
    imports, statement, expected = OUTSIDE[name]
    (tmp_path / "outside.py").write_text(
        f"{imports}\nfrom quire.models.llama import LlamaForCausalLM\n\n\nclass Outside(LlamaForCausalLM):\n"
        f"    def forward(self, *arguments):\n        hidden = super().forward(*arguments)\n        {statement}\n"
        "        return hidden\n"
    )
    point = tmp_path / "outside-1.dist-info"
    point.mkdir()
    (point / "METADATA").write_text("Metadata-Version: 2.1\nName: outside\nVersion: 1\n")
    (point / "entry_points.txt").write_text("[quire.models]\nOther = outside:Outside\n")
    model = str(make_tiny_directory(tmp_path / "model", architectures=["Other"], model_type="other"))
    path = paths(FORBIDDEN, str(tmp_path))
    found = child("verbs", {"run": ["run", model, "hi", "-q"]}, path=path)["found"]["run"]
    assert found["code"] == 2
    assert found["stderr"].startswith(f"error[missing_extra]: {expected}")
    assert found["stderr"].count("\n") == 1


# --- The server ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    model = write_wide(tmp_path_factory.mktemp("served") / "model")
    with serving(model, PYTHONPATH=paths(FORBIDDEN)) as running:
        running.wait_until("/health/ready", 200)
        yield running


def test_server_chats_embeds_and_shows_its_page(server: Serving) -> None:
    status, answer = server.chat(8)
    assert (status, answer["usage"]["completion_tokens"]) == (200, 8)
    body: dict[str, Any] = {"model": "tiny", "input": ["ab", "cd"]}
    status, answer = server.request("/v1/embeddings", body)
    assert (status, [len(item["embedding"]) for item in answer["data"]]) == (200, [32, 32])
    body = {"model": "tiny", "prompt": "ab", "max_tokens": 9, "structured_outputs": {"regex": "[ab]{3}"}}
    status, answer = server.request("/v1/completions", body)
    assert (status, len(answer["choices"][0]["text"])) == (200, 3)
    with urllib.request.urlopen(server.url) as page:
        assert b"<title>" in page.read()


# --- Models -------------------------------------------------------------------------------------

OPTIONS: list[dict[str, Any]] = [
    {"kv_cache_dtype": "int8"}, {"quantization": "int8"}, {"quantization": "fp8"}, {"dtype": "float32"},
    {"dtype": "float16", "block_size": 32}, {"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
]  # fmt: skip


def write_config(path: Path, model_type: str, fields: dict[str, Any]) -> str:
    path.mkdir()
    (path / "config.json").write_text(json.dumps(full_config(model_type, fields)))
    vocabulary = {str(index): index for index in range(50)}
    tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, "0")).save(str(path / "tokenizer.json"))
    return str(path)


def make_cases(path: Path) -> dict[str, Any]:
    """A model of each family with random weights, one with each option, one per type of stored floats, a classifier."""
    random = {"load_format": "dummy"}
    cases: dict[str, Any] = {}
    for model_type in model_types():
        directory = write_config(path / model_type, model_type, next(iter(TINY_CONFIGS[model_type].values())))
        cases[model_type] = [directory, random]
    wide = write_config(
        path / "wide", "qwen3_moe", {**next(reversed(TINY_CONFIGS["qwen3_moe"].values())), "hidden_size": 64}
    )
    cases |= {str(options): [wide, {**random, **options}] for options in OPTIONS}
    cases |= {dtype: [str(write_wide(path / dtype, dtype)), {}] for dtype in DTYPES}
    labelled = {**LLAMA, "architectures": ["LlamaForSequenceClassification"], "num_labels": 3, "pad_token_id": 0}
    cases["classifier"] = [write_config(path / "classifier", "llama", labelled), random]
    return cases


def test_every_family_answers_the_same_with_and_without_torch(tmp_path: Path) -> None:
    cases = make_cases(tmp_path)
    without = child("models", cases)
    assert not without["has_torch"]
    assert without["found"].keys() == cases.keys()
    if find_spec("torch") is not None:
        found = child("models", cases, "torch", path=paths())
        assert found["has_torch"]
        for answers in (*found["found"].values(), *without["found"].values()):
            answers.pop("has_torch", None)
        assert found["found"] == without["found"]


@needs_torch
@pytest.mark.parametrize("options", [{}, {"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}])
def test_first_start_imports_no_torch_where_it_is_installed(tmp_path: Path, options: dict[str, Any]) -> None:
    directory = write_config(tmp_path / "model", "llama", LLAMA)
    found = child("models", {"first": [directory, {"load_format": "dummy", **options}]}, path=paths())
    assert not found["has_torch"]
    assert found["found"]["first"]["has_torch"] == [False] * (2 if options else 1)


# --- The real model -----------------------------------------------------------------------------


@pytest.mark.model
def test_real_model_gives_the_text_that_it_gives_with_torch(smollm2_path: Path) -> None:
    words = ["run", str(smollm2_path), "The capital of France is", "--raw", "--temperature", "0", "--max-tokens", "24"]
    lines = {
        "text": words,
        "ranks": [*words, "--tensor-parallel-size", "3"],
        "stages": [*words, "--pipeline-parallel-size", "2"],
        "choice": [*words, "--structured-outputs", '{"choice": ["Berlin", "Paris"]}'],
    }
    found = child("verbs", lines)["found"]
    assert [item["code"] for item in found.values()] == [0] * 4, found
    assert "Paris" in found["text"]["stdout"]
    assert found["stages"]["stdout"] == found["text"]["stdout"]
    assert found["choice"]["stdout"] == "Paris\n"
    if find_spec("torch") is not None:
        (with_torch,) = child("verbs", {"text": words}, "torch", path=paths())["found"].values()
        assert with_torch["stdout"] == found["text"]["stdout"]
