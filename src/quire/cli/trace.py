"""`quire trace`: records the engine's event log, of a prompt or of a running server, and converts recordings.

Next to read: `../engine/recorder.py`, `../insight/trace.py`, `../insight/chrome.py`.
"""

import json
import time
from contextlib import AbstractContextManager, closing, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO
from urllib.parse import urlsplit

import click

from quire.cli.command import option, output_of, verb
from quire.cli.options import OF_SERVE, chosen_options, option_flags, read_prompt, split_arguments
from quire.cli.server_client import LOOPBACK, ServerClient, find_url, url_option
from quire.cli.terminal import Output, open_file
from quire.config import EngineOptions
from quire.lazy_torch import require_torch
from quire.sampling_params import SamplingParams

if TYPE_CHECKING:
    from quire.insight.torch_profile import TorchProfile
    from quire.insight.trace import EngineTrace
    from quire.runtime.machine_limits import MachineLimits

SUFFIXES = (".jsonl", ".json", ".html")
DEFAULT_MAX_TOKENS = 32
OPS_OF_STEPS = 8
NOT_EVENTS = ("limits", "served")
"""Kinds of lines that the engine's event log does not have."""
HELP = f"""Record what the engine does, step by step, or make a timeline of a recording.

The model answers PROMPT in this process, with {DEFAULT_MAX_TOKENS} tokens unless --max-tokens says otherwise; or with
--attach a running server is recorded until Ctrl-C or for --seconds. With a recording (.jsonl) in place of a PROMPT it
is converted. The name of the output decides its form: .jsonl is the recording itself, .json a timeline for Perfetto or
chrome://tracing, .html a page that opens without a network.
"""
TRACE_EXAMPLES = (
    'quire trace "Why is the sky blue?" -o sky.jsonl',
    "quire trace sky.jsonl -o sky.json",
    "quire trace --attach --seconds 10 -o load.html",
)


@verb("trace", TRACE_EXAMPLES, help=HELP)
@click.argument("words", nargs=-1, metavar="[MODEL] [PROMPT] | RECORDING")
@option(
    "-o",
    "--output",
    "path",
    default="trace.jsonl",
    show_default=True,
    metavar="FILE",
    help="file to write: .jsonl, .json or .html",
)
@option("--attach", is_flag=True, help="record a running server")
@url_option
@option(
    "--seconds",
    type=click.FloatRange(min=0, min_open=True),
    metavar="N",
    help="with --attach: time to record  [until Ctrl-C]",
)
@option(
    "--op-period",
    type=click.IntRange(0, 1 << 20),
    default=OPS_OF_STEPS,
    show_default=True,
    metavar="N",
    help="time the instructions of every N-th step; 0: of none",
)
@option("--torch-profiler", is_flag=True, help="add what torch.profiler sees: shown by a .json timeline")
@option_flags(SamplingParams, defaults={"max_tokens": str(DEFAULT_MAX_TOKENS)})
@option_flags(EngineOptions, without=OF_SERVE | {"seed"})
def trace_command(
    words: tuple[str, ...],
    path: str,
    attach: bool,
    url: str | None,
    seconds: float | None,
    op_period: int,
    torch_profiler: bool,
    **values: Any,
) -> None:
    """Record or read a trace, then write it in the form that the file's name asks for."""
    output, target = output_of(), Path(path)
    if target.suffix not in SUFFIXES:
        raise click.UsageError(f"-o {path}: the name must end with {', '.join(SUFFIXES)}")
    if attach and words:
        raise click.UsageError("--attach records the server's own requests: leave the PROMPT out")
    if attach and torch_profiler:
        raise click.UsageError("--torch-profiler sees this process only: give a PROMPT in place of --attach")
    if len(words) == 1 and words[0].endswith(".jsonl"):
        if target.suffix == ".jsonl":
            raise click.UsageError(f"{words[0]} is a recording already: name a .json or .html file with -o")
        return _convert(Path(words[0]), target, output)
    if torch_profiler:
        require_torch("--torch-profiler")
    recording = target.with_suffix(".jsonl")
    with open_file("-o", recording) as file:
        if attach:
            _record_server(file, url, seconds, op_period, output)
        else:
            _record_prompt(file, words, values, op_period, torch_profiler, output)
    _convert(recording, target, output)


def _record_prompt(
    file: BinaryIO, words: tuple[str, ...], values: dict[str, Any], op_period: int, profiles: bool, output: Output
) -> None:
    from quire.cli.run import chat_of, continues_text, generate, open_engine, sampling_params_for
    from quire.engine.recorder import Recorder

    engine_values, chosen = chosen_options(values, EngineOptions), chosen_options(values, SamplingParams)
    arguments = split_arguments(words, engine_values, what="prompt")
    text = read_prompt(arguments.text, missing=arguments.missing_text)
    if text is None:
        raise click.UsageError("nothing to record: give a PROMPT, or --attach to a running server")
    options = EngineOptions.from_kwargs(**{**engine_values, "model": arguments.model})
    with open_engine(options, output) as engine:
        params = sampling_params_for(engine, {"max_tokens": DEFAULT_MAX_TOKENS, **chosen})
        recorder = Recorder(engine, op_period=op_period, with_text=True)

        def write(_: str = "") -> None:
            file.write(recorder.take())

        if op_period:
            from quire.insight.explain.device import find_device

            file.write(recorder.take() + _limits_line(find_device(engine.config.device).limits))
        prompt, phases = dict[str, Any](prompt=text), []
        if not continues_text(engine, output):
            began_s = time.monotonic()
            chat = chat_of(engine, [{"role": "user", "content": text}], params)
            prompt, params = chat.prompt, chat.params
            phases.append(["tokenise", began_s, time.monotonic()])
        with _torch_profile(profiles) as profile:
            request_id = generate(engine, prompt, params, write).output.request_id
        write()
        file.write(_line(kind="served", id=request_id, phases=phases))
        file.write(b"" if profile is None else profile.line())
        recorder.close()


def _limits_line(limits: "MachineLimits") -> bytes:
    """Return the line with the machine's limits: a timeline then shows the share that each timed step reached."""
    rates = dict(limits.flops_per_s)
    return _line(kind="limits", id="", read_bytes_per_s=limits.read_bytes_per_s, flops_per_s=rates)


def _line(**fields: Any) -> bytes:
    return json.dumps({"t": time.monotonic(), **fields}).encode() + b"\n"


def _torch_profile(is_wanted: bool) -> "AbstractContextManager[TorchProfile | None]":
    if not is_wanted:
        return nullcontext()
    from quire.insight.torch_profile import TorchProfile

    return TorchProfile()


def _record_server(file: BinaryIO, url: str | None, seconds: float | None, op_period: int, output: Output) -> None:
    with ServerClient(find_url(url)) as client:
        output.note(f"recording {client.url}" + ("; Ctrl-C ends it" if seconds is None else f" for {seconds:g} s"))
        end_s = time.monotonic() + (seconds or float("inf"))
        is_local = urlsplit(client.url).hostname in LOOPBACK
        try:
            with closing(client.event_lines(f"/xray/events?op_period={op_period}")) as lines:
                for line in lines:
                    if line:
                        file.write(line.encode() + b"\n")
                    if line and op_period and is_local and '"uses_plan":true' in line:
                        is_local = False  # once, after the first header
                        file.write(_kept_limits())
                    if time.monotonic() >= end_s:
                        break
        except KeyboardInterrupt:
            pass


def _kept_limits() -> bytes:
    """Return the limits that `quire doctor --calibrate` keeps, or nothing: measuring would disturb the server."""
    from quire.insight.explain.device import read_calibration
    from quire.runtime.hardware import detect_hardware
    from quire.runtime.machine_limits import MachineLimits

    found = read_calibration(detect_hardware("cpu"))
    return b"" if found is None else _limits_line(MachineLimits(found.read[-1][1], found.limits))


def _convert(recording: Path, target: Path, output: Output) -> None:
    """Write a recording in the form of the target, unless it is the target, and say what it holds."""
    from quire.insight.trace import EngineTrace

    trace = EngineTrace.read(recording)
    if trace.is_cut:
        output.note(f"{recording}: the last line is incomplete and was left out", style="yellow")
    if target != recording:
        with open_file("-o", target) as file:
            file.write(_converted(trace, target.suffix).encode())
    num_steps = len(trace.steps)
    num_events = sum(line.get("kind") not in (None, *NOT_EVENTS) for line in trace.lines)
    if output.json:
        output.result_json("quire.trace/1", {"file": str(target), "num_steps": num_steps, "num_events": num_events})
    else:
        output.result(f"{target}: {num_steps} steps, {num_events} events of {trace.header['model']['name']}")


def _converted(trace: "EngineTrace", suffix: str) -> str:
    if suffix == ".json":
        from quire.insight.chrome import to_chrome

        return json.dumps(to_chrome(trace))
    from quire.insight.trace import to_html

    return to_html(trace)
