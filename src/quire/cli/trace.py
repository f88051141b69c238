"""`quire trace` records the engine's event log, of a prompt or of a running server, and converts recordings;
`quire view` draws one step of it, or a layer of a model.

Next to read: `../engine/recorder.py`, `../insight/trace.py`, `../insight/view.py`.
"""

import json
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, closing, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO
from urllib.parse import urlsplit

import click

from quire.cli.command import is_english, lang_option, option, output_of, verb
from quire.cli.options import OF_SERVE, chosen_options, option_flags, read_prompt, split_arguments
from quire.cli.server_client import LOOPBACK, ServerClient, find_url, url_option
from quire.cli.terminal import Output, open_file, show_progress
from quire.config import DTYPE_ALIASES, DTYPES, EngineOptions
from quire.lazy_torch import require_torch
from quire.sampling_params import SamplingParams

if TYPE_CHECKING:
    from quire.insight.picture import Picture
    from quire.insight.torch_profile import TorchProfile
    from quire.insight.trace import EngineTrace
    from quire.runtime.machine_limits import MachineLimits

# --- `quire trace` --------------------------------------------------------------------------------

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
    from quire.insight.trace_page import to_html

    return to_html(trace)


# --- `quire view` ---------------------------------------------------------------------------------

OF_STEPS = ("mask", "blocks", "step", "ops")
OF_MODELS = ("layer", "ranks")
LIVE_LINES = 2000
VIEW_EXAMPLES = (
    "quire view blocks sky.jsonl",
    "quire view mask sky.jsonl --step 1 --svg mask.svg",
    "quire view ops sky.jsonl --by layer",
    "quire view step --url http://127.0.0.1:8000",
    "quire view layer qwen3-4b --tokens 128",
    "quire view ranks smollm2 --tp 3",
)
ONLY = {"step": OF_STEPS, "url": OF_STEPS, "by": ("ops",), "tokens": ("layer",), "start": ("layer",),
        "layer": OF_MODELS, "tp": OF_MODELS, "dtype": OF_MODELS, "device": OF_MODELS}  # fmt: skip
"""Per option the pictures that it belongs to."""
AUTO = "auto"


@verb("view", VIEW_EXAMPLES)
@click.argument("what", type=click.Choice((*OF_STEPS, *OF_MODELS)), metavar="WHAT")
@click.argument("subject", required=False, metavar="[RECORDING|MODEL]")
@option("--step", type=int, metavar="N", help="number of the step  [the newest; of mask that with most requests]")
@option("--by", type=click.Choice(("kind", "layer")), help="add up instructions by kind or by layer  [kind]")
@option("--layer", type=click.IntRange(min=0), metavar="N", help="layer of the model  [0]")
@option("--tokens", type=click.IntRange(min=1), metavar="N", help="tokens that the layer computes  [128]")
@option("--start", type=click.IntRange(min=0), metavar="N", help="tokens before them, in the KV cache  [0]")
@option(
    "--tp",
    "--tensor-parallel-size",
    "tp",
    type=click.IntRange(1, 1024),
    metavar="N",
    help="ranks that share each layer  [1, of ranks 2]",
)
@option("--dtype", type=click.Choice((AUTO, *DTYPES, *DTYPE_ALIASES)), help="compute type  [auto]")
@option("--device", metavar="NAME|FILE", help="device of the model, as for explain  [auto]")
@option("--svg", type=click.Path(dir_okay=False), metavar="FILE", help="write an SVG file")
@option("--html", type=click.Path(dir_okay=False), metavar="FILE", help="write an HTML file")
@url_option
@lang_option
def view_command(
    what: str, subject: str | None, svg: str | None, html: str | None, translate: Callable[[str], str], **values: Any
) -> None:
    """Draw one step: its attention mask, the KV blocks, its place among the last steps, or its instructions.

    WHAT is mask, blocks, step or ops of a step; or layer or ranks of a model: one layer with its values, shapes and
    work, and the same layer cut over --tp ranks. The step is the newest one of RECORDING (see `quire trace`), of mask
    the one with most requests, unless --step names another; without a RECORDING it is the next one of a running
    server. MODEL is any that `quire explain` takes. --svg and --html write a file instead of text.
    """
    from quire.insight.picture import to_html

    output, given = output_of(), {name: value for name, value in values.items() if value is not None}
    for name in given:
        if what not in ONLY[name]:
            flag = f"--{name}"
            raise click.UsageError(f"{flag} is an option of `quire view {'` and `'.join(ONLY[name])}`: leave it out")
    facts: dict[str, Any]
    if what in OF_MODELS:
        name = subject or EngineOptions.model
        picture, facts = _of_model(what, name, **given), {"model": name}
    else:
        picture, step_id = _of_step(what, subject, **given)
        facts = {"step": step_id}
    if not output.json and not is_english(translate):
        picture = picture.translated(translate)
    drawn = picture.to_svg() if svg or html else ""
    for name, path, text in (("--svg", svg, drawn), ("--html", html, to_html(picture.title, [drawn]))):
        if path:
            output.write_file(name, path, text)
    if output.json:
        cells = [{"label": row.label, "cells": list(row.cells), "remark": row.remark} for row in picture.rows]
        told = {"caption": picture.caption, "formula": picture.formula, "source": picture.source}
        output.result_json("quire.view/1", {"what": what, **facts, **told, "rows": cells})
    elif not svg and not html:
        output.result(picture.to_text())


def _of_step(
    what: str, recording: str | None, *, step: int | None = None, by: str = "kind", url: str | None = None
) -> "tuple[Picture, int]":
    """Draw a step. Returns: the picture and the step's number."""
    from quire.insight.trace import EngineTrace
    from quire.insight.view import VIEWS, fullest_step, view_layers

    output = output_of()
    if not recording:
        output.note("waiting for the server's next step")
    trace = EngineTrace.read(recording) if recording else _fetch(url)
    if trace.is_cut:
        output.note(f"{recording}: the last line is incomplete and was left out", style="yellow")
    chosen = fullest_step(trace) if what == "mask" and step is None else trace.step(step)
    return (view_layers if by == "layer" else VIEWS[what])(trace, chosen), chosen["step_id"]


def _of_model(
    what: str,
    model: str,
    *,
    layer: int = 0,
    tokens: int = 128,
    start: int = 0,
    tp: int | None = None,
    dtype: str = AUTO,
    device: str = AUTO,
) -> "Picture":
    """Draw a layer of a model, or its ranks."""
    from quire.insight.explain.settings import Settings
    from quire.insight.explain.subject import open_subject
    from quire.insight.view_layer import view_layer
    from quire.insight.view_ranks import view_ranks

    with show_progress(output_of()) as progress:
        checkpoint = open_subject(model, progress)
    tp = (2 if what == "ranks" else 1) if tp is None else tp
    settings = Settings(tp=tp, batches=(1,), ctx=start + tokens, dtype=dtype, device=device)
    if what == "ranks":
        return view_ranks(checkpoint, settings, layer=layer)
    return view_layer(checkpoint, settings, layer=layer, start=start)


def _fetch(url: str | None) -> "EngineTrace":
    """Watch a server until it has computed a step."""
    from quire.insight.trace import EngineTrace

    lines: list[str] = []
    with ServerClient(find_url(url)) as client, closing(client.event_lines("/xray/events?op_period=1")) as received:
        for line in received:
            lines += [line] if line else []
            if len(lines) > LIVE_LINES or '"kind":"step"' in line:
                break
    return EngineTrace.parse("\n".join(lines) + "\n", client.url)
