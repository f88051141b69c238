"""Every verb refuses what it cannot do with one line that names the fix, an exit code, and nothing on stdout."""

import shlex
from pathlib import Path

import pytest

from tests.cli.batch_inputs import request, write_lines
from tests.cli.command_line import call
from tests.cli.tiny_directory import make_tiny_directory

LONG = "x" * 200
REFUSALS: list[tuple[str, int, list[str]]] = [
    ("batch missing -o out", 2, ["missing cannot be read"]),
    ("batch in -o in", 2, ["is not an answer of a batch"]),
    ("batch in -o out --url 127.0.0.1:1", 5, ["no server at"]),
    ("batch in -o out --url 127.0.0.1:1 --max-num-seqs 4", 2, ["--max-num-seqs is the engine's"]),
    ("batch in -o out --model nowhere", 3, ["nowhere"]),
    ("batch double -o out", 2, ["'a' in lines 1 and 2"]),
    ("batch in -o /dev/full", 2, ["/dev/full is not a file"]),
    ("batch in -o -", 2, ["-o needs a file"]),
    ("bench serve --sweep", 2, ["needs limits"]),
    ("bench serve -c 1 --rate 1", 2, ["exclude each other"]),
    ("bench serve --rate fast", 2, ["not a list of numbers"]),
    ("bench serve --rate 0", 2, ["above 0"]),
    ("bench serve --slo 'ttft<5'", 2, ["not a limit"]),
    ("bench serve -c 1,0", 2, ["--concurrency is at least 1"]),
    ("chat --temperature 9 why", 2, ["temperature"]),
    ("chat ''", 2, ["the prompt is empty"]),
    ("chat --json", 2, ["standard input is empty"]),
    ("chat why --url 127.0.0.1:1", 5, ["start one with `quire serve`"]),
    ("compare nothing", 2, ["'cache', 'batching', 'kv', 'ladder', 'speculation', 'adapters', 'attention'"]),
    ("compare batching --rate -1", 2, ["rate=-1.0"]),
    ("compare batching --requests 0", 2, ["requests=0"]),
    ("compare batching --slots 0", 2, ["slots=0"]),
    ("compare batching --seed -1", 2, ["seed=-1"]),
    ("compare batching --context 8", 2, ["context=8"]),
    ("compare kv --context 100", 2, ["not a power of two"]),
    ("compare kv --pool 1MiB", 4, ["the KV cache has 2 blocks (720 KiB): --pool 47554560 fits"]),
    ("compare kv --context 256K", 2, ["context=262144"]),
    ("compare batching --model no-such-model", 3, ["no-such-model"]),
    ("compare batching --requests 6 --html missing/x.html", 2, ["--html missing/x.html cannot be written"]),
    ("explain tinylama", 3, ["did you mean 'tinyllama'"]),
    ("explain tinyllama --device tpu", 2, ["known are cpu, cuda, A100-80GB"]),
    ("explain tinyllama --device l4 --tensor-parallel-size 3", 2, ["nearest that fits"]),
    ("explain tinyllama --device l4 --ctx 0", 2, ["--ctx 0 explains nothing"]),
    ("explain tinyllama --device l4 --measure", 2, ["--measure runs the model here"]),
    ("explain qwen3-4b --device A100-80GB --chunk 600", 2, ["--chunk 512 fits"]),
    ("explain qwen3-4b --device A100", 2, ["did you mean", "a100-80gb"]),
    ("explain tinyllama --device l4 --html /nowhere/page.html", 2, ["cannot be written"]),
    *(
        (f"cache {verb} missing", 2, ["cannot be listed (No such file or directory): name the directory of --kv-disk"])
        for verb in ("ls", "verify", "clear")
    ),
    ("cache --help", 2, ["there are cache ls, cache verify, cache clear"]),
    ("chat --api-key 1", 2, ["which others can read: set QUIRE_API_KEY (see"]),
    ("chat --temp 1", 2, ["--temperature is its whole name"]),
    ("ps --ctx-size 1", 2, ["No such option '--ctx-size' (see"]),
    ("pull empty", 3, ["error[model_", "no model"]),
    ("pull missing.gguf", 3, ["error[model_", "missing.gguf"]),
    ("quantize TINY out --type Q9", 2, ["'Q9' is none of F32, F16"]),
    ("quantize TINY out", 2, ["Missing option '--type'"]),
    ("quantize TINY in --type Q8_0", 2, ["exists; remove it"]),
    ("quantize TINY out --type Q8_0 --imatrix absent.dat", 3, ["cannot be opened"]),
    ("quantize TINY out --type Q8_0 --imatrix-text absent.txt", 2, ["absent.txt: No such file"]),
    ("quantize TINY out --type Q8_0 --imatrix-text in", 2, ["has 94 tokens; an importance matrix needs 127 or more"]),
    # Before the model is loaded, which is not here.
    ("run 'Hi there' --temperature 5", 2, ["error[invalid_parameter]", "temperature", "5.0", "[0, 2]"]),
    ("run 'Hi there' --max-model-len 0", 2, ["error[invalid_option]", "max_model_len", "0", "at least 1"]),
    ("run 'Hi there' --max-model-len 12q", 2, ["error[usage]", "--max-model-len", "12q", "2048"]),
    ("run 'Hi there' --dtype int8", 2, ["error[invalid_option]", "dtype", "int8", "float32"]),
    ("run 'Hi there' --logit-bias 5", 2, ["error[usage]", "--logit-bias", "5", "TOKEN_ID=BIAS"]),
    ("run TINY Hi --max-model-len 1M", 2, ["error[invalid_option]", "max_model_len", "1048576", "128"]),
    ("run TINY Hi --kv-cache-memory-bytes 1KiB", 4, ["error[out_of_memory]", "--kv-cache-memory-bytes"]),
    ("run TINY 'Hi there' --max-model-len 8", 2, ["error[context_length_exceeded]", "17", "8"]),
    ("run TINY Hi --device cuda:99", 2, ["error[invalid_option]", "cuda:99"]),
    ("run TINY Hi --logit-bias 9999=1", 2, ["error[invalid_parameter]", "logit_bias", "9999", "257"]),
    ("run TINY Hi --logprobs 50", 2, ["error[invalid_parameter]", "logprobs", "50", "20"]),
    ("run TINY Hi --chat-template '{{ x'", 2, ["error[invalid_option]", "line 1", "correct it"]),
    ("run TINY Hi --chat-template nowhere.jinja", 2, ["error[invalid_option]", "nowhere.jinja"]),
    ("run TINY Hi --revision main", 2, ["error[invalid_option]", "revision"]),
    ("run why is it", 2, ["quote the prompt"]),
    ("run --model a/b smollm2 'Hi there'", 2, ["twice"]),
    ("serve --ctx-size 1", 2, ["No such option '--ctx-size': --max-model-len is the context length here"]),
    ("serve a=./one.gguf a=./two.gguf", 2, ["two models have the name 'a': write NAME=MODEL"]),
    ("serve ./one.gguf ./one.gguf", 2, ["two models have the name './one.gguf'"]),
    ("serve a=./one.gguf ./two.gguf --served-model-name x", 2, ["write NAME=MODEL for each of several"]),
    ("serve a=./one.gguf --model ./two.gguf", 2, ["the model is given twice"]),
    ("serve a=./one.gguf", 3, ["there is no file or directory './one.gguf'"]),
    ("serve ./odd=name.gguf", 3, ["there is no file or directory './odd=name.gguf'"]),
    ("serve one --model two", 2, ["the model is given twice: 'one' and --model two"]),
    ("show missing.gguf", 3, ["error[model_", "missing.gguf"]),
    ("show empty", 3, ["error[model_", "no model"]),
    ("show text.gguf", 3, ["error[model_", "text.gguf"]),
    ("show cut.gguf", 3, ["error[model_", "cut.gguf"]),
    ("tour --model TINY --chunk 0", 2, ["--chunk"]),
    ("tour --model TINY --max-tokens 1", 2, ["--max-tokens"]),
    ("tour --model TINY '  '", 2, ["the prompt is empty"]),
    ("tour --model TINY --tp 3", 2, ["3"]),
    (f"tour --model TINY {LONG}", 2, ["128"]),
    ("tour --model TINY Hi --prompt-len 100000000000", 2, ["100000000008 tokens, one step takes"]),
    ("view layer TINY --tp 1000000", 2, ["--tensor-parallel-size", "1024"]),
    ("compare kv --requests 10001", 2, ["requests=10001 is not in 1 … 10000"]),
    ("tour ./no-such-model Hi", 3, ["no-such-model"]),
    ("trace hi -o x.txt", 2, ["-o x.txt: the name must end with .jsonl, .json, .html"]),
    ("trace hi --attach", 2, ["leave the PROMPT out"]),
    ("trace a.jsonl -o b.jsonl", 2, ["is a recording already"]),
    ("trace hi -o missing/x.jsonl", 2, ["-o missing/x.jsonl cannot be written: No such file"]),
    ("trace missing.jsonl -o b.json", 3, ["missing.jsonl cannot be read: No such file"]),
    ("version --jsn", 2, ["'--json'"]),
    ("versoin", 2, ["did you mean 'version'?"]),
    ("run --temprature 1 'hi there'", 2, ["'--temperature'"]),
    ("trace --attach --url http://127.0.0.1:9 -o x.jsonl", 5, ["no server at http://127.0.0.1:9"]),
]


@pytest.mark.parametrize(("line", "code", "words"), REFUSALS, ids=[line[:60] for line, _, _ in REFUSALS])
def test_refusal_is_one_line_with_its_exit_code(
    line: str, code: int, words: list[str], tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "text.gguf").write_text("not a model")
    (tmp_path / "cut.gguf").write_bytes(b"GGUF\x03\x00\x00\x00\x05\x00")
    before = write_lines(tmp_path / "in", request("a")).read_text()
    write_lines(tmp_path / "double", request("a"), request("a"))
    result = call("-q", *shlex.split(line.replace("TINY", tiny)))
    assert (result.exit_code, result.stdout) == (code, ""), result.stderr
    assert result.stderr.startswith("error[")
    assert result.stderr.count("\n") == 1
    assert [word for word in words if word not in result.stderr] == [], result.stderr
    assert (tmp_path / "in").read_text() == before


def test_model_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    unknown = make_tiny_directory(tmp_path / "unknown", architectures=["NoSuchForCausalLM"])
    other_mathematics = make_tiny_directory(tmp_path / "other", attn_logit_softcapping=30.0)
    truncated = make_tiny_directory(tmp_path / "truncated")
    weights = (truncated / "model.safetensors").read_bytes()
    (truncated / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    for model, named in (
        (unknown, "NoSuchForCausalLM"),
        (other_mathematics, "attn_logit_softcapping=30.0"),
        (truncated, "model.safetensors"),
        ("smolm2", "'smollm2'"),
    ):
        result = call("run", "-q", str(model), "Hi there")
        assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (3, "", 1)
        assert result.stderr.startswith("error[model_")
        assert named in result.stderr
