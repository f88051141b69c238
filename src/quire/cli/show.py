"""`quire show`: architecture, sizes, tensor formats, tokenizer and origin of a model, from its files alone.

Reads headers only, no weights. The model's code runs once without values, as it does before weights are loaded, so that
a model that cannot run is known here. Next to read: `tokenize.py`.
"""

import json
from collections import defaultdict
from typing import TYPE_CHECKING, Any

import click

from quire.byte_sizes import format_bytes
from quire.cli.command import option, output_of, verb
from quire.cli.options import environment_name, revision_option
from quire.cli.output import Output, format_count
from quire.cli.progress import show_progress
from quire.config import EngineOptions
from quire.errors import QuireError, escaped

if TYPE_CHECKING:
    from quire.text.tokenizer import Tokenizer
    from quire.weights.checkpoint import Checkpoint

CONFIG_FIELDS = {
    "hidden_size": "hidden size",
    "num_hidden_layers": "layers",
    "num_attention_heads": "query heads",
    "num_key_value_heads": "KV heads",
    "head_dim": "head size",
    "intermediate_size": "MLP size",
    "vocab_size": "vocabulary",
    "max_position_embeddings": "context",
    "sliding_window": "sliding window",
    "rope_theta": "RoPE theta",
    "tie_word_embeddings": "tied embeddings",
}
"""The shown fields of config.json, and their labels."""
IMPLEMENTATIONS = {
    "quire": "Quire's own model, on CPUs as a plan",
    "transformers": "Transformers' own module, op by op",
}


@verb("show", ("quire show", "quire show ./model.gguf --tensors"))
@click.argument("model", default=EngineOptions.model, envvar=environment_name("model"))
@revision_option
@option("--tensors", is_flag=True, help="list every tensor")
@option("--template", is_flag=True, help="print the chat template, and what rendering it found out")
def show_command(model: str, revision: str | None, tensors: bool, template: bool) -> None:
    """Describe a model: architecture, sizes, tensors, tokenizer."""
    from quire.engine.tokenizer_source import load_tokenizer

    output = output_of()
    checkpoint = open_model(model, revision, output)
    if template:
        return show_template(load_tokenizer(checkpoint, None), output)
    value = describe(checkpoint)
    listed = [
        {"name": tensor.name, "shape": list(tensor.shape), "format": tensor.format, "num_bytes": tensor.num_bytes}
        for tensor in checkpoint.tensors.values()
    ]
    if output.json:
        output.result_json("quire.show/1", {**value, "tensors": listed} if tensors else value)
        return
    lines = _lines(value)
    width = max(map(len, lines))
    for name, text in lines.items():
        output.result(f"{name:<{width}}  {escaped(text)}")
    if tensors:
        rows = [
            [tensor.name, "×".join(map(str, tensor.shape)), tensor.format, format_bytes(tensor.num_bytes)]
            for tensor in checkpoint.tensors.values()
        ]
        output.result()
        output.table(["tensor", "shape", "format", "size"], rows, right=frozenset({1, 3}))


def open_model(name: str, revision: str | None, output: Output) -> "Checkpoint":
    """Fetch the model if it is not there yet, and open its checkpoint; weights are not read. Raises: ModelError."""
    from quire.weights.checkpoint import open_checkpoint
    from quire.weights.sources import resolve_source

    with show_progress(output) as progress:
        files = resolve_source(name, revision=revision, progress=progress)
    return open_checkpoint(files)


def show_template(tokenizer: "Tokenizer", output: Output) -> None:
    """Write the sources of all chat templates to stdout, and their properties to stderr; with --json all as JSON.

    Raises: ChatTemplateError for a template that does not parse.
    """
    from quire.text.dialogue import Dialogue

    dialogue = Dialogue(tokenizer.chat_templates, tokenizer)
    found: dict[str, dict[str, Any]] = {
        name: {
            "source": source,
            "traits": dialogue.traits(source).described(),
            "call_format": dialogue.call_format(source, dialogue.traits(source)).name,
        }
        for name, source in tokenizer.chat_templates.items()
    }
    if output.json:
        return output.result_json("quire.show.template/1", {"templates": found})
    for name, item in found.items():
        if len(found) > 1:
            output.result(f"{{# {name} #}}")
        output.result(item["source"])
        output.note(f"{name}: calls are read as {item['call_format']}")
        for trait, value in item["traits"].items():
            output.note(f"  {trait} = {json.dumps(value, ensure_ascii=False)}")


def describe(checkpoint: "Checkpoint") -> dict[str, Any]:
    """Return the facts of a model, without reading weights, as they appear in JSON."""
    from quire.insight.explain.explanation import implementation_of

    files, config = checkpoint.files, checkpoint.hf_config
    formats: dict[str, dict[str, int]] = defaultdict(lambda: {"num_tensors": 0, "num_bytes": 0})
    for tensor in checkpoint.tensors.values():
        formats[tensor.format]["num_tensors"] += 1
        formats[tensor.format]["num_bytes"] += tensor.num_bytes
    return {
        "model": files.name,
        "origin": files.origin,
        "path": str(files.path),
        "format": {"gguf": "gguf", "hf": "safetensors"}[files.kind],
        "architectures": list(config.get("architectures") or ()),
        "implementation": implementation_of(checkpoint),
        "num_parameters": checkpoint.num_parameters,
        "num_bytes": sum(item["num_bytes"] for item in formats.values()),
        "config": {name: config[name] for name in CONFIG_FIELDS if config.get(name) is not None},
        "rope_scaling": config.get("rope_scaling") or config.get("rope_parameters"),
        "tensor_formats": dict(formats),
        "generation_config": dict(checkpoint.generation_config),
        "tokenizer": _tokenizer(checkpoint),
    }


def _tokenizer(checkpoint: "Checkpoint") -> dict[str, Any]:
    """Return the tokenizer's facts, or its error: a broken tokenizer must not hide the rest."""
    from quire.engine.tokenizer_source import load_tokenizer

    try:
        tokenizer = load_tokenizer(checkpoint, None)
    except QuireError as error:
        return {"error": error.message}
    return {
        "vocab_size": tokenizer.vocab_size,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "num_special_tokens": len(tokenizer.special_token_ids),
        "has_chat_template": tokenizer.chat_template is not None,
    }


def _lines(value: dict[str, Any]) -> dict[str, str]:
    """Return the facts for people: labels and texts."""
    formats = [
        f"{name} {item['num_tensors']} tensors, {format_bytes(item['num_bytes'])}"
        for name, item in value["tensor_formats"].items()
    ]
    lines = {
        **{name: value[name] for name in ("model", "origin", "path", "format")},
        "architecture": ", ".join(value["architectures"]) or "unknown",
        "computed by": IMPLEMENTATIONS.get(value["implementation"], value["implementation"]),
        "parameters": f"{format_count(value['num_parameters'])} ({value['num_parameters']})",
        "weights": f"{format_bytes(value['num_bytes'])}: {'; '.join(formats)}",
        **{CONFIG_FIELDS[name]: str(item) for name, item in value["config"].items()},
        "RoPE scaling": str(value["rope_scaling"] or "none"),
        "generation": ", ".join(f"{name}={item}" for name, item in value["generation_config"].items()) or "no defaults",
    }
    tokenizer = value["tokenizer"]
    if "error" in tokenizer:
        return {**lines, "tokenizer": f"unusable: {tokenizer['error']}"}
    ends = f"BOS {tokenizer['bos_token_id']}, EOS {tokenizer['eos_token_id']}"
    return {
        **lines,
        "tokenizer": f"{tokenizer['vocab_size']} tokens, {tokenizer['num_special_tokens']} special, {ends}",
        "chat template": "yes (--template prints it)" if tokenizer["has_chat_template"] else "none",
    }
