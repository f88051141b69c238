"""Options of other engines, and their names here. Knows no verb. Next to read: `command.py`."""

import re
from collections.abc import Container

_CONTEXT = ("--max-model-len is the context length here",)
_THREADS = ("the engine takes the CPUs that it may use: `taskset -c 0-3 quire …` gives it four",)
_TOOLS = ("tools need no option: the chat template tells how calls are written",)
_KEY = (
    "keys are not taken from the command line, which others can read: set QUIRE_API_KEY, or use --api-key-file",
    "keys are not taken from the command line, which others can read: set QUIRE_API_KEY",
)
_LAYERS = ("a model is on one device: --device cpu, or --device cuda",)
_PARALLEL = ("--max-num-seqs is the number of sequences that run at once",)
_MAX_TOKENS = ("--max-tokens is the length of the answer here",)

OTHER_OPTIONS: dict[str, tuple[str, ...]] = {
    "--api-key": _KEY,
    "-c": _CONTEXT,
    "--ctx-size": _CONTEXT,
    "--max-seq-len": _CONTEXT,
    "-t": _THREADS,
    "--threads": _THREADS,
    "-np": _PARALLEL,
    "--parallel": _PARALLEL,
    "-ngl": _LAYERS,
    "--gpu-layers": _LAYERS,
    "--n-gpu-layers": _LAYERS,
    "--predict": _MAX_TOKENS,
    "--n-predict": _MAX_TOKENS,
    "--temp": ("--temperature is its whole name",),
    "--repeat-penalty": ("--repetition-penalty is its name here",),
    "-m": ("the model is an argument, or --model", "the model is an argument"),
    "--alias": ("--served-model-name is the model's name in the API",),
    "--cache-type-k": ("--kv-cache-dtype is the type of keys and values",),
    "--cache-type-v": ("--kv-cache-dtype is the type of keys and values",),
    "--kv-cache-dtype-k": ("--kv-cache-dtype is the type of keys and values",),
    "--metrics": ("/metrics is always there",),
    "--disable-log-requests": ("--quiet leaves the lines of requests out",),
    "--uvicorn-log-level": ("--quiet and --verbose choose what is logged",),
    "--log-level": ("--quiet and --verbose choose what is logged",),
    "--enable-auto-tool-choice": _TOOLS,
    "--tool-call-parser": _TOOLS,
    "--jinja": _TOOLS,
    "--guided-decoding-backend": ("structured output needs no option",),
    "--swap-space": ("nothing is swapped: preempted sequences are computed again",),
    "--generation-config": ("the model's recommended sampling is used; requests may set other values",),
}
"""Advice per option; of several, the first one whose options the verb has. No verb has an option of this table."""


def advice(option: str, options: Container[str]) -> str | None:
    """Return the advice for an unknown option of a verb with these `options`; None without one."""
    for text in OTHER_OPTIONS.get(option, ()):
        if all(name in options for name in re.findall(r"(?<!\S)--[a-z-]+", text)):
            return text
    return None
