"""`with_draft`: adds the draft model that `draft_model` names to a model's configuration.

Next to read: `runtime/drafter.py`, which runs it; `rank_plan.py` for what it cannot be combined with.
"""

from dataclasses import replace

from quire.config import DraftModel, EngineOptions, ModelConfig
from quire.errors import ConfigError
from quire.models.registry import ModelRegistry
from quire.runtime.plan.packed_weights import kept_bytes
from quire.weights.checkpoint import open_checkpoint
from quire.weights.progress import Progress
from quire.weights.sources import resolve_source


def with_draft(model: ModelConfig, options: EngineOptions, progress: Progress | None = None) -> ModelConfig:
    """Return the model with the draft model that the options name, if they name one.

    Raises: ConfigError for another vocabulary; as `resolve_source` and `open_checkpoint`.
    """
    if options.draft_model is None:
        return model
    files = resolve_source(options.draft_model, progress=progress)
    checkpoint = open_checkpoint(files, with_tensors=options.load_format != "dummy")
    draft = ModelRegistry.make_model_config(checkpoint.hf_config, checkpoint.generation_config)
    if checkpoint.tensors:
        draft = replace(draft, stored_bytes=kept_bytes(checkpoint.tensors.values()))
    if draft.vocab_size != model.vocab_size:
        raise ConfigError(
            f"draft_model={options.draft_model!r} has a vocabulary of {draft.vocab_size} tokens, and the model one of"
            f" {model.vocab_size}: choose a smaller model of the same family"
        )
    return replace(model, draft=DraftModel(draft, str(files.path), files.kind))
