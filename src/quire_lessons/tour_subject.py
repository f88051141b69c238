"""Model and tokenizer of a tour: any model that `explain` takes, with random weights where it has none.

Next to read: `quire/insight/explain/subject.py`, `tour.py`.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from quire.config import EngineOptions
from quire.engine.tokenizer_source import has_tokenizer, load_tokenizer
from quire.errors import ConfigError, ModelError
from quire.insight.explain.subject import has_config_alone, open_subject
from quire.text.tokenizer import Tokenizer
from quire.weights.checkpoint import Checkpoint, open_checkpoint
from quire.weights.model_files import Progress
from quire.weights.sources import resolve_source

LENDER = EngineOptions.model
"""The model whose tokenizer is borrowed."""
LAYER_COUNTS = ("num_hidden_layers", "n_layer")


def open_model(
    options: EngineOptions, num_layers: int | None, progress: Progress | None = None
) -> tuple[EngineOptions, Checkpoint]:
    """Return the options and the checkpoint of a tour. `num_layers`: keep the first ones only; None: all.

    Weights are random, and `tensors` empty, where the model has none or is cut. Raises: ModelError, ConfigError.
    """
    if options.load_format != "dummy" and num_layers is None and not has_config_alone(options.model):
        return options, open_checkpoint(resolve_source(options.model, revision=options.revision, progress=progress))
    checkpoint = open_subject(options.model, progress)
    config = checkpoint.hf_config if num_layers is None else cut_layers(checkpoint.hf_config, num_layers)
    return replace(options, load_format="dummy"), replace(checkpoint, hf_config=config, tensors={})


def cut_layers(config: Mapping[str, Any], num_layers: int) -> dict[str, Any]:
    """Return a model's config with its first layers only; every list with an entry per layer is cut too.

    Raises: ConfigError if there are fewer layers.
    """
    text = config.get("text_config")
    if isinstance(text, Mapping):
        return {**config, "text_config": cut_layers(text, num_layers)}
    name = next((name for name in LAYER_COUNTS if isinstance(config.get(name), int)), None)
    if name is None:
        raise ConfigError(f"--num-layers needs a config.json that has {' or '.join(LAYER_COUNTS)}: leave it out")
    count = config[name]
    if num_layers > count:
        raise ConfigError(f"--num-layers {num_layers} exceeds the {count} layers of the model: leave it out")
    cut = {
        key: value[:num_layers] if isinstance(value, list) and len(value) == count > 1 else value
        for key, value in config.items()
    }
    return {**cut, name: num_layers}


def open_tokenizer(
    options: EngineOptions, checkpoint: Checkpoint, vocab_size: int, progress: Progress | None = None
) -> tuple[Tokenizer, bool]:
    """Return the tokenizer that the options name or the model has, else that of `LENDER`, and whether it is borrowed.

    Raises: ConfigError, ModelError.
    """
    path, source = checkpoint.files.path, options.tokenizer
    if source is None and path.is_file() and path.suffix == ".json":
        source = str(path.parent)  # the tokenizer beside a config.json
    if options.tokenizer is not None or has_tokenizer(checkpoint):
        return load_tokenizer(checkpoint, source, vocab_size), False
    try:
        lender = open_checkpoint(resolve_source(LENDER, progress=progress), with_tensors=False)
    except ModelError as error:
        raise type(error)(
            f"{options.model} has no tokenizer, and that of {LENDER} cannot be had: --tokenizer DIR names one. {error}"
        ) from error
    return load_tokenizer(lender), True
