"""`quire pull`, `ls`, `rm`, `show`, `tokenize`: models in the cache, and what their files say.

`show` reads headers only, no weights, and runs the model's code once without values, as it does before weights are
loaded, so that a model that cannot run is known here. `tokenize` loads the tokenizer only. Next to read: `explain.py`.
"""

import json
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import click

from quire.byte_sizes import format_bytes
from quire.cli.command import option, output_of, verb
from quire.cli.options import environment_name, read_text, revision_option, split_arguments
from quire.cli.terminal import Output, format_count, show_progress
from quire.config import EngineOptions
from quire.errors import QuireError, escaped

if TYPE_CHECKING:
    from quire.runtime.shared_file import FoundFile
    from quire.text.tokenizer import Tokenizer
    from quire.weights.checkpoint import Checkpoint
    from quire.weights.model_cache import CachedModel


# --- `quire pull`, `quire ls`, `quire rm` ---------------------------------------------------------


@verb("pull", ("quire pull", "quire pull smollm2 --json"))
@click.argument("model", default=EngineOptions.model, envvar=environment_name("model"))
@revision_option
def pull_command(model: str, revision: str | None) -> None:
    """Fetch a model into the cache."""
    from quire.weights.sources import resolve_source

    output = output_of()
    with show_progress(output) as progress:
        files = resolve_source(model, revision=revision, progress=progress)
    if output.json:
        value = {"model": files.name, "origin": files.origin, "kind": files.kind, "path": str(files.path)}
        output.result_json("quire.pull/1", value)
    else:
        output.result(str(files.path))
        output.note(f"{files.name} → {files.origin}   next: quire run {files.name}")


@verb("ls", ("quire ls", "quire ls --json"))
def ls_command() -> None:
    """List cached models."""
    from quire.weights.model_cache import list_cached

    output = output_of()
    cached = list_cached()
    packed = [sum(file.num_bytes for file in files) for files in _packed_weights(cached)]
    if output.json:
        models = [
            {
                "name": item.name,
                "origin": item.origin,
                "path": str(item.path),
                "size_bytes": item.size_bytes,
                "packed_bytes": packed_bytes,
            }
            for item, packed_bytes in zip(cached, packed, strict=True)
        ]
        output.result_json("quire.ls/1", {"models": models})
    elif cached:
        rows = [
            [item.name, format_bytes(item.size_bytes), format_bytes(num_bytes), item.origin, str(item.path)]
            for item, num_bytes in zip(cached, packed, strict=True)
        ]
        output.table(["name", "size", "packed", "origin", "path"], rows, right=frozenset({1, 2}))
    else:
        output.note(f"no models yet   next: quire pull {EngineOptions.model}")


@verb("rm", ("quire rm smollm2", "quire rm smollm2 --yes"))
@click.argument("model")
@option("-y", "--yes", is_flag=True, help="do not ask")
def rm_command(model: str, yes: bool) -> None:
    """Remove a model from the cache, with its packed weights."""
    from quire.weights.model_cache import find_cached, remove_cached

    output = output_of()
    found = find_cached(model)
    (files,) = _packed_weights([found])
    size_bytes = found.size_bytes + sum(file.num_bytes for file in files)
    size = format_bytes(size_bytes)
    if not yes and not output.confirm(f"removing '{model}' ({size})", f"Remove {found.path} ({size})?"):
        output.note(f"kept {found.name}")
        return
    remove_cached(found.name)
    for file in files:
        file.path.unlink(missing_ok=True)
    if output.json:
        output.result_json("quire.rm/1", {"removed": found.name, "size_bytes": size_bytes})
    else:
        output.note(f"removed {found.name}, {size} freed")


def _packed_weights(models: Sequence["CachedModel"]) -> list[list["FoundFile"]]:
    """Return the files of packed weights of each model, of all its versions."""
    from quire.runtime.shared_file import list_files
    from quire.weights.model_cache import weight_directory

    directory = weight_directory(EngineOptions())
    files: list[FoundFile] = []
    with suppress(OSError):  # no weights were packed yet
        files = [] if directory is None else list(list_files(directory))
    sources = [model.path.parent.parent if model.origin.startswith("hub:") else model.path for model in models]
    return [[file for file in files if file.is_of(source)] for source in sources]


# --- `quire show` ---------------------------------------------------------------------------------

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


# --- `quire tokenize` -----------------------------------------------------------------------------

TOKENIZE_EXAMPLES = ('quire tokenize "Hello world"', 'quire tokenize smollm2 --template --ids "Hi" ')


@verb("tokenize", TOKENIZE_EXAMPLES)
@click.argument("words", nargs=-1, metavar="[MODEL] [TEXT]")
@option("--template", is_flag=True, help="render TEXT as a user's message first")
@option("--system", metavar="TEXT", help="system message, with --template")
@option("--ids", is_flag=True, help="print the ids only, on one line")
@option("--special/--no-special", default=True, help="add the model's BOS and EOS  [on]")
@option(
    "--model",
    "engine_model",
    envvar=environment_name("model"),
    metavar="TEXT",
    help="the model  [smollm2; QUIRE_MODEL]",
)
@revision_option
@option(
    "--tokenizer",
    envvar=environment_name("tokenizer"),
    metavar="PATH",
    help="tokenizer file or directory, if not the model's",
)
def tokenize_command(
    words: tuple[str, ...],
    template: bool,
    system: str | None,
    ids: bool,
    special: bool,
    engine_model: str | None,
    revision: str | None,
    tokenizer: str | None,
) -> None:
    """Show how text becomes tokens.

    Prints one line per token: its position, id, and text. Without TEXT, or with "-", standard input is read.
    A single argument is a MODEL if it is an alias, a path or a hub id, and otherwise the TEXT.
    """
    from quire.engine.tokenizer_source import load_tokenizer
    from quire.text.dialogue import Dialogue

    output = output_of()
    arguments = split_arguments(words, {"model": engine_model}, what="text", plain_word_is_model=False)
    if system and not template:
        raise click.UsageError("--system needs --template")
    text = read_text(arguments.text, missing=arguments.missing_text)
    if text is None:
        raise click.UsageError("no text: give one, or pipe it in")
    encoder = load_tokenizer(open_model(arguments.model, revision, output), tokenizer)
    if template:
        messages = [{"role": "system", "content": system}] if system else []
        dialogue = Dialogue(encoder.chat_templates, encoder)
        prepared = dialogue.prepare([*messages, {"role": "user", "content": text}])
        text, token_ids = prepared.text, prepared.token_ids
    else:
        token_ids = encoder.encode(text, add_special_tokens=special)
    pieces = [token_text(encoder, token_id) for token_id in token_ids]
    if output.json:
        tokens = [
            {"id": token_id, "text": piece, "piece": encoder.id_to_token(token_id)}
            for token_id, piece in zip(token_ids, pieces, strict=True)
        ]
        output.result_json(
            "quire.tokenize/1",
            {"model": arguments.model, "text": text, "num_tokens": len(token_ids), "ids": token_ids, "tokens": tokens},
        )
    elif ids:
        output.result(" ".join(map(str, token_ids)))
    else:
        rows = [
            [str(position), str(token_id), json.dumps(piece, ensure_ascii=False)]
            for position, (token_id, piece) in enumerate(zip(token_ids, pieces, strict=True))
        ]
        output.table(["position", "id", "text"], rows, right=frozenset({0, 1}))
    tokens_word = "token" if len(token_ids) == 1 else "tokens"
    output.note(f"{len(token_ids)} {tokens_word} · {len(text)} characters")


def token_text(tokenizer: "Tokenizer", token_id: int) -> str:
    """Return the text of one token; part of a character shows its bytes, as `<F0><9F>`."""
    if tokenizer.byte_decoding is None:
        return tokenizer.decode([token_id], skip_special_tokens=False)
    # A byte that is not part of a whole character becomes the surrogate U+DC00 + byte.
    text = tokenizer.token_bytes(token_id).decode("utf-8", "surrogateescape")
    return "".join(f"<{ord(char) - 0xDC00:02X}>" if 0xDC80 <= ord(char) <= 0xDCFF else char for char in text)
