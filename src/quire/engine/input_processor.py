"""Turns a prompt and its parameters into a `RequestSpec`, or into the error that says what is wrong with them.

Every mistake in one request is found here or in `Scheduler.add_request`, before anything runs, so that a bad request
disturbs no other. Knows the tokenizer and the model's limits; no tensors, no scheduler.
Next to read: `llm_engine.py`.
"""

import itertools
import logging
import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import msgspec

from quire.config import EngineConfig, ModelConfig
from quire.engine.adapters import Adapters, LoRARequest
from quire.engine.prompts import ParsedPrompt, parse_prompt
from quire.errors import ContextLengthError, InvalidParameterError, PromptError, RequestError
from quire.grammar.compiler import CompiledGrammar, CompiledReasoning, GrammarCompiler, ReservedMatchers
from quire.grammar.matcher import Vocabulary
from quire.sampling_params import ALL_LOGPROBS, PoolingParams, SamplingParams
from quire.scheduler.request import Request
from quire.text.tokenizer import Tokenizer
from quire.types import RequestSpec

logger = logging.getLogger("quire.engine")
_MASK_64 = 2**64 - 1
LIKELY_CHARS_PER_TOKEN = 16
"""Shorter texts are simply tokenised: finding the longest token takes as long as a few thousand tokens."""


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """A checked request, not yet queued. `streams` is False where only the final output is wanted.

    `grammar` is that of its `structured_outputs`: while this is held, the executor finds it compiled. `tells_news`: an
    output has what is new since the one before; False: all of the text so far.
    """

    request: Request
    prompt: str | None
    streams: bool = True
    grammar: CompiledGrammar | CompiledReasoning | ReservedMatchers | None = None
    tells_news: bool = False


class InputProcessor:
    """Makes requests. `prepare` may be called from several threads: the tokenizer and the counter allow it."""

    def __init__(
        self,
        config: EngineConfig,
        tokenizer: Tokenizer | None,
        clock: Callable[[], float] = time.monotonic,
        grammars: GrammarCompiler | None = None,
    ) -> None:
        """`grammars`: the executor's compiler, so that it finds the grammars compiled here; None: a new one."""
        self._config = config
        self._tokenizer = tokenizer
        self._clock = clock
        self._num_seeds_drawn = itertools.count()
        self.adapters = Adapters(config)
        self.eos_token_ids = find_eos_token_ids(config.model, tokenizer)
        if left_out := sorted(set(config.model.eos_token_ids) - self.eos_token_ids):
            logger.warning(
                "the model's config names %s as the end of a text, which is ordinary text to the tokenizer: left out",
                ", ".join(f"token {item}" for item in left_out),
            )
        self.grammars = grammars or GrammarCompiler(lambda: make_vocabulary(config.model, tokenizer))

    @property
    def default_sampling_params(self) -> SamplingParams:
        """Return the values of the model's generation_config.json over the defaults of `SamplingParams`."""
        return SamplingParams(**self._config.model.generation_defaults)

    @property
    def default_pooling_params(self) -> PoolingParams:
        """Return the pooling that the model's files name over the defaults of `PoolingParams`."""
        return PoolingParams(**self._config.model.embedding_defaults)

    def prepare(
        self,
        request_id: str,
        prompt: Any,
        params: SamplingParams | PoolingParams | None,
        *,
        streams: bool = True,
        **identity: Any,
    ) -> PreparedRequest:
        """Check everything and build the request with its `n - 1` siblings. `identity`: as in `make_spec`.

        A grammar that was not seen before may take up to 2 s.
        Raises: as `make_spec`; QueueFullError while other grammars are compiled.
        """
        text, spec = self.make_spec(request_id, prompt, params, **identity)
        return self.complete(spec, text, streams=streams)

    def complete(
        self,
        spec: RequestSpec,
        text: str | None = None,
        *,
        streams: bool,
        tells_news: bool = False,
        with_matchers: bool = False,
    ) -> PreparedRequest:
        """Return what was checked as a request with its siblings and its grammar. Raises: as `prepare`.

        `with_matchers`: a matcher of each sequence is made now, so that the step that samples first need not.
        """
        request, params = Request(spec), spec.sampling
        grammar: CompiledGrammar | CompiledReasoning | ReservedMatchers | None = None
        if params is not None:
            request.siblings = [Request(_of_sibling(spec, index)) for index in range(1, params.n)]
            if (form := params.structured_outputs) is not None and with_matchers:
                names = [item.request_id for item in (request, *request.siblings)]
                grammar = self.grammars.reserve(names, form, spec.checked_grammar)
            elif form is not None:
                grammar = self.grammars.compile(form, spec.checked_grammar)
        return PreparedRequest(request, text, streams, grammar, tells_news)

    def make_spec(
        self,
        request_id: str,
        prompt: Any,
        params: SamplingParams | PoolingParams | None,
        *,
        priority: int = 0,
        client_id: str = "",
        cache_salt: str = "",
        arrival_time_s: float | None = None,
        deadline_s: float | None = None,
        lora_request: LoRARequest | str | None = None,
    ) -> tuple[str | None, RequestSpec]:
        """Return the prompt's text, if there is one, and what was asked, which `complete` makes a request.

        `deadline_s`: seconds from its arrival after which the request ends, if it is not complete.
        Raises: RequestError of the matching kind.
        """
        if params is None:
            params = self.default_sampling_params
        self._check_identity(request_id, priority, client_id, cache_salt)
        if arrival_time_s is not None and not _is_time(arrival_time_s):
            raise RequestError(f"arrival_time_s must be a finite number of seconds, got {arrival_time_s!r}")
        if deadline_s is not None and not (_is_time(deadline_s) and deadline_s > 0):
            raise InvalidParameterError("deadline_s", deadline_s, "a finite number of seconds above 0, or None")
        arrival_time_s = self._clock() if arrival_time_s is None else arrival_time_s
        text, token_ids, salt = self.tokenize(prompt)
        adapter, hash_extras = self.adapters.choose(lora_request, token_ids, (cache_salt or salt,))
        if isinstance(params, SamplingParams):
            chosen = self._check_generation(len(token_ids), params)
        elif isinstance(params, PoolingParams):
            chosen = self._check_pooling(len(token_ids), params)
        else:
            kind = type(params).__name__
            raise RequestError(f"params must be SamplingParams or PoolingParams, got {kind}")
        spec = RequestSpec(
            request_id=request_id,
            prompt_token_ids=token_ids,
            arrival_time_s=arrival_time_s,
            deadline_time_s=None if deadline_s is None else arrival_time_s + deadline_s,
            priority=priority,
            client_id=client_id,
            hash_extras=hash_extras,
            eos_token_ids=self.eos_token_ids,
            adapter=adapter,
            **chosen,
        )
        return text, spec

    def check_grammars(self) -> None:
        """Raises: InvalidParameterError if this model's texts can follow no grammar."""
        check_vocabulary(self._config.model, self._tokenizer)

    def tokenize(self, prompt: Any) -> tuple[str | None, list[int], str]:
        """Text (None if only ids were given), token ids and cache salt of a prompt. Raises: PromptError."""
        parsed = parse_prompt(prompt)
        token_ids = self._encode(parsed)
        vocab_size = self._config.model.vocab_size
        low, high = min(token_ids), max(token_ids)
        if low < 0 or high >= vocab_size:
            wrong = low if low < 0 else high
            raise PromptError(f"token id {wrong} is not in the vocabulary: ids are 0 … {vocab_size - 1}")
        return parsed.text, token_ids, parsed.cache_salt

    def room_for_generation(self, num_prompt_tokens: int) -> int:
        """Tokens that may follow the prompt in the context. Raises: ContextLengthError when there is no room."""
        max_model_len = self._config.scheduler.max_model_len
        if num_prompt_tokens > max_model_len - 1:
            most = max_model_len - 1
            fix = self._way_out(f"by {num_prompt_tokens - most} tokens to {most}") if most else "raise max_model_len"
            raise ContextLengthError(
                f"the prompt has {num_prompt_tokens} tokens, the context holds {max_model_len} including at least "
                f"one generated token: {fix}"
            )
        return max_model_len - num_prompt_tokens

    def _encode(self, parsed: ParsedPrompt) -> list[int]:
        if parsed.token_ids is not None:
            return parsed.token_ids
        if self._tokenizer is None:
            raise PromptError(
                "this engine has no tokenizer: give the prompt as token ids, or name one with tokenizer=DIR"
            )
        text = parsed.text or ""
        self.check_text_length(text)
        token_ids = self._tokenizer.encode(text)
        if not token_ids:
            raise PromptError("the prompt is empty: its text has no tokens")
        return token_ids

    def check_text_length(self, text: str) -> None:
        """Refuse at once a text that is too long however it is cut: 10 MB would take 18 s to tokenise.

        Raises: ContextLengthError.
        """
        max_model_len, tokenizer = self._config.scheduler.max_model_len, self._tokenizer
        # Only where a token is a run of bytes: elsewhere one unknown token may stand for a text of any length.
        is_likely = len(text) <= LIKELY_CHARS_PER_TOKEN * max_model_len
        if is_likely or tokenizer is None or tokenizer.byte_decoding is None:
            return
        fewest_tokens = -(-len(text) // tokenizer.max_token_chars)
        if fewest_tokens > max_model_len:
            raise ContextLengthError(
                f"the prompt has {len(text)} characters, so at least {fewest_tokens} tokens; the context holds "
                f"{max_model_len}: {self._way_out(f'by at least {fewest_tokens - max_model_len} tokens')}"
            )

    def _way_out(self, change: str) -> str:
        """Return the advice for a prompt that is too long; the model's own limit cannot be raised."""
        can_grow = self._config.scheduler.max_model_len < self._config.model.context_len
        return f"shorten the prompt {change}{' or raise max_model_len' if can_grow else ''}"

    def _check_identity(self, request_id: Any, priority: Any, client_id: Any, cache_salt: Any) -> None:
        for name, value in (("request_id", request_id), ("client_id", client_id), ("cache_salt", cache_salt)):
            if not isinstance(value, str):
                raise RequestError(f"{name} must be a string, got {type(value).__name__}")
        if not request_id:
            raise RequestError("request_id must not be empty")
        if not isinstance(priority, int) or isinstance(priority, bool):
            raise RequestError(f"priority must be an integer, got {priority!r}")
        policy = self._config.scheduler.policy
        if priority and policy != "priority":
            limit = f"0 with scheduling_policy='{policy}' (scheduling_policy='priority' obeys it)"
            raise InvalidParameterError("priority", priority, limit)

    def _check_pooling(self, num_prompt_tokens: int, params: PoolingParams) -> dict[str, Any]:
        """Return fields of a spec. Raises: RequestError."""
        max_model_len = self._config.scheduler.max_model_len
        if num_prompt_tokens > max_model_len:
            raise ContextLengthError(
                f"the prompt has {num_prompt_tokens} tokens, the context holds {max_model_len}: "
                f"{self._way_out(f'by {num_prompt_tokens - max_model_len} tokens')}"
            )
        if params.task == "classify" and not self._config.model.labels:
            raise InvalidParameterError("task", "classify", "left to models with a classification head")
        self.check_in_vocabulary("token_ids", params.token_ids)
        reads_cache = params.pooling != "mean"
        return {"sampling": None, "pooling": params, "max_tokens": 0, "reads_prefix_cache": reads_cache}

    def _check_generation(self, num_prompt_tokens: int, params: SamplingParams) -> dict[str, Any]:
        """Return fields of a spec. Raises: RequestError."""
        if self._config.model.labels:
            raise RequestError("this model has a classification head and generates no text: use classify or score")
        room = self.room_for_generation(num_prompt_tokens)
        self._check_numbers(params)
        self.check_in_vocabulary("stop_token_ids", params.stop_token_ids)
        self.check_in_vocabulary("allowed_token_ids", params.allowed_token_ids)
        self.check_in_vocabulary("logit_bias", params.logit_bias)
        return {
            "sampling": params,
            "max_tokens": room if params.max_tokens is None else min(params.max_tokens, room),
            "bad_words_token_ids": self._bad_words(params),
            "reads_prefix_cache": params.prompt_logprobs is None,
            "seed": self._drawn_seed() if params.seed is None else params.seed & _MASK_64,
        }

    def _check_numbers(self, params: SamplingParams) -> None:
        if params.n > 1 and params.is_greedy:
            raise InvalidParameterError("n", params.n, "1 with temperature 0, where all completions are the same")
        max_num_seqs = self._config.scheduler.max_num_seqs
        if params.n > max_num_seqs:
            raise InvalidParameterError("n", params.n, f"at most max_num_seqs ({max_num_seqs})")
        if params.stop and self._tokenizer is None:
            raise InvalidParameterError("stop", list(params.stop), "empty: this engine has no tokenizer")
        knows_bytes = self._tokenizer is not None and self._tokenizer.byte_decoding is not None
        if params.penalises_repeats and params.dry_breakers and not knows_bytes:
            reason = "has no tokenizer" if self._tokenizer is None else "has tokens that are not runs of bytes"
            limit = f"an empty list: this engine {reason}"
            raise InvalidParameterError("dry_sequence_breakers", list(params.dry_breakers), limit)
        if params.logits_processors:
            options = self._config.options
            num_ranks = options.tensor_parallel_size * options.pipeline_parallel_size
            if num_ranks > 1:
                limit = f"left out with {num_ranks} ranks, whose processes have no Python functions of the caller"
                raise InvalidParameterError("logits_processors", list(params.logits_processors), limit)
        max_logprobs = self._config.options.max_logprobs
        if max_logprobs == ALL_LOGPROBS:
            return
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(params, name)
            asked = self._config.model.vocab_size if value == ALL_LOGPROBS else value
            if asked is not None and asked > max_logprobs:
                raise InvalidParameterError(name, value, f"at most the engine's max_logprobs ({max_logprobs})")

    def check_in_vocabulary(self, name: str, token_ids: Iterable[int] | None) -> None:
        """Raises: InvalidParameterError naming the parameter and the first id above the vocabulary."""
        vocab_size = self._config.model.vocab_size
        for token_id in token_ids or ():
            if token_id >= vocab_size:
                raise InvalidParameterError(name, token_id, f"token ids in the vocabulary (0 … {vocab_size - 1})")

    def _bad_words(self, params: SamplingParams) -> tuple[tuple[int, ...], ...]:
        # A word has other tokens at the start of a text than after a space, so both spellings are banned.
        if not params.bad_words:
            return ()
        if self._tokenizer is None:
            raise InvalidParameterError("bad_words", list(params.bad_words), "empty: this engine has no tokenizer")
        found: dict[tuple[int, ...], None] = {}
        for word in params.bad_words:
            for spelling in (word, " " + word.lstrip()):
                found[tuple(self._tokenizer.encode(spelling, add_special_tokens=False))] = None
        return tuple(token_ids for token_ids in found if token_ids)

    def _drawn_seed(self) -> int:
        # SplitMix64 of (engine seed, number of the request): neighbouring requests get unrelated seeds, so that
        # the consecutive seeds of one request's siblings meet no other request's.
        drawn = next(self._num_seeds_drawn)
        mixed = ((self._config.options.seed << 1) + (drawn + 1) * 0x9E3779B97F4A7C15) & _MASK_64
        mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK_64
        mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK_64
        return mixed ^ (mixed >> 31)


def _is_time(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < math.inf


def _of_sibling(leader: RequestSpec, index: int) -> RequestSpec:
    """Return the same with an id and a seed of its own."""
    seed = (leader.seed + index) & _MASK_64
    return msgspec.structs.replace(leader, request_id=f"{leader.request_id}/{index}", seed=seed)


def find_eos_token_ids(model: ModelConfig, tokenizer: Tokenizer | None) -> frozenset[int]:
    """Return the tokens that end a text: those of generation_config.json, config.json and the tokenizer.

    A piece of ordinary text is an end only if generation_config.json (without one, config.json) names it beside a token
    that is none, or if nothing else ends a text: some configurations have an id of another vocabulary.
    """
    named = frozenset(model.eos_token_ids)
    if tokenizer is None:
        return named
    known = frozenset(item for item in tokenizer.end_token_ids if item < model.vocab_size)
    if known and all(map(tokenizer.is_text, named)):
        named = frozenset()
    configured = model.hf_config.get("eos_token_id")
    ids = configured if isinstance(configured, list) else [configured]
    others = {item for item in ids if isinstance(item, int) and not tokenizer.is_text(item)}
    return named | others | known


def check_vocabulary(model: ModelConfig, tokenizer: Tokenizer | None) -> Tokenizer:
    """Raises: InvalidParameterError if this model's texts can follow no grammar."""
    if tokenizer is None:
        limit = "left out: this engine has no tokenizer"
    elif tokenizer.byte_decoding is None:
        limit = "left out: this model's tokens are not runs of bytes, so that no grammar can choose among them"
    elif not any(token_id < model.vocab_size for token_id in find_eos_token_ids(model, tokenizer)):
        limit = "left out: this model has no end-of-sequence token, so that a complete text could not end"
    else:
        return tokenizer
    raise InvalidParameterError("structured_outputs", "a form", limit)


def make_vocabulary(model: ModelConfig, tokenizer: Tokenizer | None) -> Vocabulary:
    """Return the tokens as grammars need them, one entry per logit of the model. Raises: as `check_vocabulary`."""
    tokenizer = check_vocabulary(model, tokenizer)
    vocab_size = model.vocab_size
    ends = tuple(sorted(item for item in find_eos_token_ids(model, tokenizer) if item < vocab_size))
    return Vocabulary(
        [tokenizer.token_bytes(token_id) for token_id in range(vocab_size)],
        frozenset(token_id for token_id in tokenizer.special_token_ids if token_id < vocab_size),
        ends,
        lambda text: tokenizer.encode(text, add_special_tokens=False),
    )
