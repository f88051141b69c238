"""Rank plan: the decisions that depend on how many processes share a model, each with its reason.

`tensor_parallel_size` ranks share each layer, `pipeline_parallel_size` stages share the layers. Pure arithmetic.
Next to read: `resolve.py`, the caller; `runtime/links.py` for the ranks themselves.
"""

from quire.config import Decision, EngineOptions, Hardware, ModelConfig
from quire.errors import ConfigError

MAX_RANKS = 64
PIPELINE_STEP_TOKENS = 256
"""Budget of a step of several stages, unless one is chosen: a prompt is then several steps, which the stages compute at
the same time. Products of 256 rows take no longer per row than those of more."""
DEFAULT_MAX_NUM_BATCHED_TOKENS = EngineOptions.__dataclass_fields__["max_num_batched_tokens"].default


def check_sizes(options: EngineOptions, model: ModelConfig, hardware: Hardware) -> None:
    """Check the number of ranks. Raises: ConfigError naming the largest that fits."""
    if options.distributed_executor_backend == "ray" and options.pipeline_parallel_size == 1:
        fits = "--pipeline-parallel-size 2" if options.num_ranks == 1 else "--distributed-executor-backend mp"
        raise ConfigError(
            f"distributed_executor_backend='ray' gives each stage a node, and there is one stage: {fits} fits"
        )
    if hardware.device != "cpu" and options.tensor_parallel_size > hardware.num_devices:
        there = f"{hardware.num_devices} GPU{'s' * (hardware.num_devices > 1)} from {hardware.device} on"
        raise ConfigError(
            f"tensor_parallel_size={options.tensor_parallel_size} is above the {there}, and each rank needs its own:"
            f" --tensor-parallel-size {hardware.num_devices} fits"
        )
    most_ranks = max(size for size in range(1, MAX_RANKS + 1) if model.num_heads % size == 0)
    for name, most, fitting, limit in (
        ("pipeline_parallel_size", model.num_layers, None, f"the model's {model.num_layers} layers"),
        ("tensor_parallel_size", MAX_RANKS, most_ranks, f"the limit of {MAX_RANKS} ranks on a machine"),
        ("pipeline_parallel_size", MAX_RANKS // options.tensor_parallel_size, None, f"the limit of {MAX_RANKS} ranks"),
    ):
        if getattr(options, name) > most:
            flag = f"--{name.replace('_', '-')}"
            raise ConfigError(f"{name}={getattr(options, name)} is above {limit}: {flag} {fitting or most} fits")


def explain_ranks(options: EngineOptions, hardware: Hardware, decisions: list[Decision]) -> None:
    """Say how many threads each rank has. Mutates: decisions."""
    num_ranks = options.num_ranks
    num_threads = max(1, hardware.num_threads // num_ranks)
    reason = f"chosen; each rank is a process with {num_threads} of {hardware.num_threads} threads"
    if hardware.device != "cpu":
        reason = "chosen; each rank is a process with a GPU of its own"
    elif options.distributed_executor_backend == "ray":
        num_threads = max(1, hardware.num_threads // options.tensor_parallel_size)
        reason = f"chosen; each rank but those of the last stage is a Ray actor with {num_threads} threads"
    elif num_ranks > hardware.num_threads:
        reason = f"chosen; the {num_ranks} ranks take turns on {hardware.num_threads} cores, which is slow"
    if options.data_parallel_size > 1:
        of_engine = f"chosen; this engine has {hardware.num_threads} threads and its share of the memory"
        decisions.append(Decision("data_parallel_size", str(options.data_parallel_size), of_engine))
    for name in ("tensor_parallel_size", "pipeline_parallel_size"):
        if getattr(options, name) > 1:
            decisions.append(Decision(name, str(getattr(options, name)), reason))


def step_tokens(options: EngineOptions, decisions: list[Decision]) -> int:
    """Return the token budget of a step. Mutates: decisions."""
    budget = options.max_num_batched_tokens
    is_chosen = budget != DEFAULT_MAX_NUM_BATCHED_TOKENS
    if options.pipeline_parallel_size == 1 or is_chosen or not options.enable_chunked_prefill:
        return budget
    budget = max(PIPELINE_STEP_TOKENS, options.max_num_seqs)
    decisions.append(Decision("max_num_batched_tokens", str(budget), "stages compute parts of a prompt side by side"))
    return budget


def decode_iterations(options: EngineOptions, decisions: list[Decision], *, has_device_plan: bool = False) -> int:
    """Return the most decode iterations of a step. Mutates: decisions."""
    reasons = {
        "the first stage of a pipeline needs a token before it can compute the next": options.pipeline_parallel_size
        > 1,
        "the next step is launched before the tokens of this one are known": has_device_plan,
    }
    against = next((reason for reason, holds in reasons.items() if holds), None)
    if against is None or options.multi_step_decode == 1:
        return options.multi_step_decode
    decisions.append(Decision("multi_step_decode", "1", against))
    return 1


def draft_source(options: EngineOptions, decisions: list[Decision], model: ModelConfig, *, uses_plan: bool) -> str:
    """Return where drafts come from: "suffix", "draft", "mtp", "eagle" or "off".

    Raises: ConfigError for a draft model that cannot be used, or is missing.
    """
    chosen = options.speculative
    if options.draft_model is not None or chosen in ("draft", "mtp", "eagle"):
        _check_draft(options, model, uses_plan=uses_plan)
        source = "draft" if model.draft is None else model.draft.kind
        guesser = "the model's own layer" if source == "mtp" else f"draft_model={options.draft_model}"
        decisions.append(Decision("speculative", source, f"{guesser} guesses tokens"))
        return source
    reasons = {
        "the stages of a pipeline compute steps in turn": options.pipeline_parallel_size > 1,
        "multi_step_decode=1 asks for one token a step": options.multi_step_decode == 1 and chosen == "auto",
        "without a native plan, the last bits depend on the number of rows": not uses_plan and chosen == "auto",
        "a wrong draft costs another step where layers have a recurrent state": chosen == "auto"
        and any(spec.is_state for spec in model.cache_specs),
    }
    against = next((reason for reason, holds in reasons.items() if holds), None)
    if chosen != "off" and against is not None:
        decisions.append(Decision("speculative", "off", against))
    return "off" if against is not None or chosen == "off" else "suffix"


def _check_draft(options: EngineOptions, model: ModelConfig, *, uses_plan: bool) -> None:
    """Check what chooses a draft model. Raises: ConfigError."""
    named = "speculative='mtp'" if options.draft_model is None else f"draft_model={options.draft_model!r}"
    if options.draft_model is None and options.speculative in ("draft", "eagle"):
        raise ConfigError(f"speculative={options.speculative!r} has no draft model: add --draft-model MODEL")
    kind = "draft" if model.draft is None else model.draft.kind
    if options.draft_model is not None and options.speculative not in ("auto", kind):
        raise ConfigError(f"{named} contradicts speculative={options.speculative!r}: --speculative {kind} fits")
    if options.pipeline_parallel_size > 1:
        raise ConfigError(
            f"{named} needs all layers in one stage, not pipeline_parallel_size={options.pipeline_parallel_size}:"
            " --tensor-parallel-size fits"
        )
    if not uses_plan:
        raise ConfigError(
            f"{named} runs as a native plan beside that of the model, and this model has none: see"
            " 'execution' in `quire explain`, or --speculative off without --draft-model"
        )
    draft = None if model.draft is None else model.draft.model
    if draft is not None and any(spec.is_state for spec in draft.cache_specs):
        raise ConfigError(
            f"{named} has layers with a recurrent state, which cannot return to the tokens before a wrong guess: choose"
            " a draft model with attention in all layers"
        )
