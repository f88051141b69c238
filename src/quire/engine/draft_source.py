"""`with_draft`: adds to a model's configuration what guesses tokens for it: a draft model, or a layer of its own.

Next to read: `runtime/drafter.py`, which runs it; `rank_plan.py` for what it cannot be combined with.
"""

from dataclasses import replace

from quire import nn
from quire.config import DraftModel, EngineOptions, ModelConfig
from quire.errors import ConfigError, UnsupportedModelError
from quire.lazy_torch import on_meta
from quire.models.hf_predictor import ARCHITECTURE, EagleConfig, add_eagle, add_predictors
from quire.models.registry import ModelRegistry
from quire.runtime.plan.packed_weights import kept_bytes
from quire.weights.checkpoint import Checkpoint, open_checkpoint
from quire.weights.model_files import Progress
from quire.weights.sources import resolve_source

MIN_LAYERS = 4
"""Of a model whose low, middle and high hidden states an EAGLE-3 head reads."""


def with_draft(model: ModelConfig, options: EngineOptions, progress: Progress | None = None) -> ModelConfig:
    """Return the model with the draft model that the options choose, if they choose one.

    Raises: ConfigError for another vocabulary, or a model without such a layer; as `resolve_source` and
    `open_checkpoint`.
    """
    if options.draft_model is None:
        return _with_own_layer(model) if options.speculative == "mtp" else model
    files = resolve_source(options.draft_model, progress=progress)
    checkpoint = open_checkpoint(files, with_tensors=options.load_format != "dummy")
    if ARCHITECTURE in (checkpoint.hf_config.get("architectures") or ()):
        return _with_eagle(model, options, checkpoint)
    draft = ModelRegistry.make_model_config(checkpoint.hf_config, checkpoint.generation_config)
    if checkpoint.tensors:
        draft = replace(draft, stored_bytes=kept_bytes(checkpoint.tensors.values()))
    if draft.vocab_size != model.vocab_size:
        raise ConfigError(
            f"draft_model={options.draft_model!r} has a vocabulary of {draft.vocab_size} tokens, and the model one of"
            f" {model.vocab_size}: choose a smaller model of the same family"
        )
    return replace(model, draft=DraftModel(draft, str(files.path), files.kind))


def _with_own_layer(model: ModelConfig) -> ModelConfig:
    """Return the model with its layers that predict further tokens."""
    model_class = ModelRegistry.resolve(model.hf_config)
    config = model_class.Config.from_hf(model.hf_config)
    if not (count := getattr(config, "num_predictors", 0)):
        raise ConfigError(
            f"speculative='mtp' needs a layer that predicts further tokens, which {model.architecture} does not have:"
            " --speculative auto fits"
        )
    with on_meta():
        whole = model_class(config)
        add_predictors(whole)
    added = sum(parameter.numel() for name, parameter in nn.named_parameters(whole) if name.startswith("mtp."))
    specs = tuple(config.with_layers(count).kv_specs()[-count:])
    own = replace(model, num_layers=count, cache_specs=specs, num_parameters=added, stored_bytes=None)
    return replace(model, draft=DraftModel(own, "", "", kind="mtp"))


def _with_eagle(model: ModelConfig, options: EngineOptions, checkpoint: Checkpoint) -> ModelConfig:
    """Return the model with an EAGLE-3 head."""
    model_class = ModelRegistry.resolve(model.hf_config)
    named = f"draft_model={options.draft_model!r} is an EAGLE-3 head"
    try:
        head = EagleConfig.from_hf(checkpoint.hf_config)
    except UnsupportedModelError as error:  # its advice is for models
        reason = str(error).partition(";")[0].replace("the model's config", "a config that", 1)
        raise UnsupportedModelError(f"{named} with {reason}: --speculative auto without --draft-model fits") from error
    if (head.vocab_size, head.hidden_size) != (model.vocab_size, model.hidden_size):
        raise ConfigError(
            f"{named} for a model of {head.vocab_size} tokens and hidden size {head.hidden_size}, and the model has"
            f" {model.vocab_size} and {model.hidden_size}: choose the head that was trained for this model"
        )
    if not hasattr(model_class, "predictor_keeps_norm") or model.num_layers < MIN_LAYERS:
        raise ConfigError(
            f"{named}, which reads hidden states of Llama's layers, {MIN_LAYERS} at least: {model.architecture} with"
            f" {model.num_layers} does not give them; --speculative auto without --draft-model fits"
        )
    config = model_class.Config.from_hf(model.hf_config)
    with on_meta():
        whole = model_class(config)
        add_eagle(whole, head)
    if whole.layout().views:
        raise ConfigError(
            f"{named}, and {model.architecture} stores its weights otherwise than Llama, for which heads are read:"
            " --speculative auto without --draft-model fits"
        )
    added = sum(parameter.numel() for name, parameter in nn.named_parameters(whole) if name.startswith("eagle."))
    spec = head.behind(model.num_layers).kv_specs()[-1]
    own = replace(
        model,
        hf_config=checkpoint.hf_config,
        num_layers=1,
        cache_specs=(spec,),
        num_parameters=added,
        stored_bytes=None,
        context_len=head.context_len,
    )
    return replace(model, draft=DraftModel(own, str(checkpoint.files.path), checkpoint.files.kind, kind="eagle"))
