"""Parameters of one request: `SamplingParams`, `PoolingParams`, `BeamSearchParams`.

Names and defaults are vLLM's, those of `LLAMA_CPP_FIELDS` llama.cpp's. A bad value raises `InvalidParameterError`
naming field, value and limit at construction; limits that need the model (vocabulary, context) are checked when the
request is added (`engine/input_processor.py`). No tensors here.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from quire.errors import InvalidParameterError
from quire.structured_outputs import StructuredOutputsParams

MAX_N = 16384
GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy."""
MAX_BAD_WORDS = 128
ALL_LOGPROBS = -1
"""`logprobs=-1` asks for the whole vocabulary."""
MODEL_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""Fields that a model's generation_config.json may give another default."""
LLAMA_CPP_FIELDS = (
    "typical_p", "top_n_sigma", "xtc_probability", "xtc_threshold", "dry_multiplier", "dry_base", "dry_allowed_length",
    "dry_penalty_last_n", "dry_sequence_breakers", "mirostat", "mirostat_tau", "mirostat_eta", "dynatemp_range",
    "dynatemp_exponent",
)  # fmt: skip
"""Fields with llama.cpp's names, defaults and formulas."""
DRY_SEQUENCE_BREAKERS = ("\n", ":", '"', "*")
MAX_DRY_BREAKERS = 128


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Sampling and stop rules of one request.

    Fields, of which the first sentence is the help of the command line's flag:
        n: completions of the prompt, at most 16384; they share its KV blocks.
        presence_penalty: in [-2, 2]: lowers tokens that were generated at all.
        frequency_penalty: in [-2, 2]: lowers tokens by how often they were generated.
        repetition_penalty: above 0: divides the logits of tokens seen, prompt included.
        temperature: in [0, 2]; 0 is greedy.
        top_p: in (0, 1]: keep the likeliest tokens that together reach it.
        top_k: keep the k likeliest tokens; 0 and -1 are off.
        min_p: in [0, 1]: drop tokens below this share of the likeliest.
        typical_p: in (0, 1]: keep the tokens of most typical surprise that together reach it; 1 is off.
        top_n_sigma: keep logits within this many standard deviations of the largest; 0 and -1 are off.
        xtc_probability: in [0, 1]: chance, per token, to drop all tokens that reach xtc_threshold but the least likely.
        xtc_threshold: in [0, 1]: probability that a token needs to be dropped by XTC; above 0.5 XTC drops none.
        dry_multiplier: in [0, 100]: lowers tokens that would continue a repetition; 0 is off.
        dry_base: in [1, 100]: growth of that penalty per token of the repetition.
        dry_allowed_length: tokens of a repetition from which on it is penalised.
        dry_penalty_last_n: tokens in which repetitions are sought; -1: all, prompt included; 0 is off.
        dry_sequence_breakers: text behind which a repetition begins anew. None: a line end, a colon, a quotation mark
            and an asterisk.
        mirostat: 2 holds the surprise of the tokens near mirostat_tau, in place of top_k, top_p and min_p; 0 is off.
        mirostat_tau: in [0, 100]: surprise in bits that mirostat aims at.
        mirostat_eta: in [0, 1]: share of each deviation by which mirostat corrects itself.
        dynatemp_range: in [0, 2]: widest distance of dynamic temperature from temperature; 0 is off.
        dynatemp_exponent: in [0, 10]: power of the entropy's share that dynamic temperature follows.
        seed: seed of the draws; they depend on it and the position only. None: chosen by the engine.
        stop: text that ends the answer.
        stop_token_ids: token id that ends the answer.
        bad_words: text that must not be generated.
        include_stop_str_in_output: keep the stop text in the answer.
        ignore_eos: do not stop at the end-of-sequence token.
        max_tokens: tokens to generate at most. None: up to the context length.
        min_tokens: tokens to generate at least. Until then EOS and stop tokens are masked.
        logprobs: log-probabilities per token beside its own, in --json; -1: whole vocabulary.
        prompt_logprobs: the same for prompt tokens.
        detokenize: turn token ids into text.
        skip_special_tokens: leave special tokens out of the text.
        logit_bias: add a bias in [-100, 100] to a token's logit.
        allowed_token_ids: generate nothing but this token id.
        structured_outputs: structure of the answer, such as {"json": {…}}, {"regex": "…"} or {"choice": ["…"]}. EOS and
            stop tokens are allowed when the text is complete. When it cannot be continued, only they are allowed: with
            `ignore_eos` or before `min_tokens` they repeat until the request ends. A text cut by `max_tokens` or `stop`
            may be incomplete.
        logits_processors: functions that change the logits, in Python only. Each gets the list of generated token ids
            and the logits, a NumPy array [V] of fp32, and returns the logits to use; it may change the array. They are
            called for each token one after another, before any other option, while the whole step waits; `logprobs` are
            those of the logits that they return. Beside their own time a token costs 0.04 ms for 49,152 logits (Zen 3).
            An engine of several ranks refuses them, and the server has no such field.

    A request that sets one of `LLAMA_CPP_FIELDS` is sampled in llama.cpp's order: `sampling/chain.py`.

    Raises: InvalidParameterError.
    """

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    typical_p: float = 1.0
    top_n_sigma: float = -1.0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_penalty_last_n: int = -1
    dry_sequence_breakers: Sequence[str] | None = None
    mirostat: int = 0
    mirostat_tau: float = 5.0
    mirostat_eta: float = 0.1
    dynatemp_range: float = 0.0
    dynatemp_exponent: float = 1.0
    seed: int | None = None
    stop: Sequence[str] | str | None = None
    stop_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    structured_outputs: StructuredOutputsParams | None = None
    logits_processors: Sequence[Any] | None = field(default=None, metadata={"python_only": True})

    def __post_init__(self) -> None:
        self._check_numbers()
        self._check_llama_cpp()
        self._check_lengths()
        self._check_lists()

    def _check_numbers(self) -> None:
        _integer("n", self.n, 1, MAX_N)
        _number("presence_penalty", self.presence_penalty, -2, 2)
        _number("frequency_penalty", self.frequency_penalty, -2, 2)
        _number("repetition_penalty", self.repetition_penalty, 0, math.inf, open_low=True)
        _number("temperature", self.temperature, 0, 2)
        _number("top_p", self.top_p, 0, 1, open_low=True)
        _integer("top_k", self.top_k, -1, None)
        _number("min_p", self.min_p, 0, 1)
        if self.seed is not None:
            _integer("seed", self.seed, -(2**63), 2**64 - 1)

    def _check_llama_cpp(self) -> None:
        for name, low, high in (
            ("top_n_sigma", -1, 1000),
            ("xtc_probability", 0, 1),
            ("xtc_threshold", 0, 1),
            ("dry_multiplier", 0, 100),
            ("dry_base", 1, 100),
            ("mirostat_tau", 0, 100),
            ("mirostat_eta", 0, 1),
            ("dynatemp_range", 0, 2),
            ("dynatemp_exponent", 0, 10),
        ):
            _number(name, getattr(self, name), low, high)
        _number("typical_p", self.typical_p, 0, 1, open_low=True)
        _integer("dry_allowed_length", self.dry_allowed_length, 0, None)
        _integer("dry_penalty_last_n", self.dry_penalty_last_n, -1, None)
        if type(self.mirostat) is not int or self.mirostat not in (0, 2):
            raise InvalidParameterError("mirostat", self.mirostat, "0 (off) or 2: version 1 of Mirostat is not built")
        if self.mirostat:
            for name, off in (("typical_p", 1), ("xtc_probability", 0), ("dynatemp_range", 0)):
                if getattr(self, name) != off:
                    raise InvalidParameterError(name, getattr(self, name), f"{off} with mirostat 2, which replaces it")
            if self.top_n_sigma > 0:
                raise InvalidParameterError("top_n_sigma", self.top_n_sigma, "-1 with mirostat 2, which replaces it")
        breakers = self.dry_sequence_breakers
        _set(self, "dry_sequence_breakers", None if breakers is None else _strings("dry_sequence_breakers", breakers))
        if len(self.dry_sequence_breakers or ()) > MAX_DRY_BREAKERS:
            limit = f"at most {MAX_DRY_BREAKERS} strings"
            raise InvalidParameterError("dry_sequence_breakers", len(breakers or ()), limit)

    def _check_lengths(self) -> None:
        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, 1, None)
        _integer("min_tokens", self.min_tokens, 0, None)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            limit = f"at most max_tokens ({self.max_tokens})"
            raise InvalidParameterError("min_tokens", self.min_tokens, limit)
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if value is not None:
                _integer(name, value, ALL_LOGPROBS, None)
        for name in ("include_stop_str_in_output", "ignore_eos", "detokenize", "skip_special_tokens"):
            _boolean(name, getattr(self, name))

    def _check_lists(self) -> None:
        stop = [self.stop] if isinstance(self.stop, str) else self.stop
        _set(self, "stop", _strings("stop", stop))
        _set(self, "bad_words", _strings("bad_words", self.bad_words))
        if len(self.bad_words or ()) > MAX_BAD_WORDS:
            limit = f"at most {MAX_BAD_WORDS} strings"
            raise InvalidParameterError("bad_words", len(self.bad_words or ()), limit)
        _set(self, "stop_token_ids", _token_ids("stop_token_ids", self.stop_token_ids) or ())
        _set(self, "allowed_token_ids", _token_ids("allowed_token_ids", self.allowed_token_ids))
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise InvalidParameterError("allowed_token_ids", [], "None or a non-empty list")
        if self.stop and not self.detokenize:
            raise InvalidParameterError("stop", list(self.stop), "empty when detokenize=False")
        if self.logit_bias is not None:
            _set(self, "logit_bias", _logit_bias(self.logit_bias))
        if not isinstance(self.structured_outputs, StructuredOutputsParams | None):
            raise InvalidParameterError("structured_outputs", self.structured_outputs, "StructuredOutputsParams")
        if self.logits_processors is not None:
            functions = self.logits_processors
            if (
                isinstance(functions, (str, bytes))
                or not isinstance(functions, Sequence)
                or not all(map(callable, functions))
            ):
                raise InvalidParameterError("logits_processors", functions, "a list of functions (token_ids, logits)")
            _set(self, "logits_processors", tuple(functions))

    @property
    def is_greedy(self) -> bool:
        """Each token is the argmax of the (penalised, masked) logits."""
        return self.temperature < GREEDY_BELOW

    @property
    def takes_logits_as_they_are(self) -> bool:
        """True if nothing changes the logits before the draw, and no log-probabilities are returned."""
        return (
            self.logprobs is None
            and self.allowed_token_ids is None
            and not self.logit_bias
            and not self.bad_words
            and self.repetition_penalty == 1
            and not self.frequency_penalty
            and not self.presence_penalty
            and self.structured_outputs is None
            and not self.logits_processors
            and not self.uses_chain
        )

    @property
    def uses_chain(self) -> bool:
        """True if one of `LLAMA_CPP_FIELDS` is on: the token is chosen by `sampling/chain.py`."""
        return (
            self.typical_p < 1
            or self.top_n_sigma > 0
            or self.xtc_probability > 0
            or self.penalises_repeats
            or self.mirostat > 0
            or self.dynatemp_range > 0
        )

    @property
    def penalises_repeats(self) -> bool:
        """True if DRY is on."""
        return self.dry_multiplier > 0 and self.dry_penalty_last_n != 0

    @property
    def dry_breakers(self) -> tuple[str, ...]:
        """`dry_sequence_breakers`, or llama.cpp's."""
        return DRY_SEQUENCE_BREAKERS if self.dry_sequence_breakers is None else tuple(self.dry_sequence_breakers)

    def num_best(self, vocab_size: int) -> int:
        """Return the number of tokens of the largest logits that decide a draw: `top_k`, 1 if greedy; 0: all."""
        return 1 if self.is_greedy else self.top_k if 0 < self.top_k < vocab_size else 0

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as a tuple."""
        return tuple(self.stop or ())


@dataclass(frozen=True, kw_only=True)
class PoolingParams:
    """Pooling of the hidden states of one prompt to one vector.

    Fields:
        pooling: "last" (the last token's) or "mean" (the mean over all tokens).
        normalize: divide by the Euclidean length; only of an embedding.
        task: "embed" returns the pooled vector, "classify" what the model's classification head makes of it (a logit
            per label), "token_logits" the logits of `token_ids` behind the last token.
    """

    pooling: str = "last"
    normalize: bool = True
    task: str = "embed"
    token_ids: Sequence[int] = field(default=())

    def __post_init__(self) -> None:
        if self.pooling not in ("last", "mean"):
            raise InvalidParameterError("pooling", self.pooling, "'last' or 'mean'")
        if self.task not in ("embed", "classify", "token_logits"):
            raise InvalidParameterError("task", self.task, "'embed', 'classify' or 'token_logits'")
        _boolean("normalize", self.normalize)
        _set(self, "token_ids", _token_ids("token_ids", self.token_ids) or ())
        if bool(self.token_ids) != (self.task == "token_logits"):
            limit = "given with task 'token_logits', and only then"
            raise InvalidParameterError("token_ids", list(self.token_ids), limit)
        if self.pooling != "last" and self.task == "token_logits":
            raise InvalidParameterError("pooling", self.pooling, "'last' with task 'token_logits'")


@dataclass(frozen=True, kw_only=True)
class BeamSearchParams:
    """Beam search: keep the `beam_width` likeliest texts at each step.

    A finished beam's score is `cumulative_logprob / len(generated) ** length_penalty`. Beams follow no grammar:
    `structured_outputs` is refused.
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False
    stop_token_ids: Sequence[int] = field(default=())
    structured_outputs: StructuredOutputsParams | None = None

    def __post_init__(self) -> None:
        _integer("beam_width", self.beam_width, 1, 256)
        _integer("max_tokens", self.max_tokens, 1, None)
        _number("length_penalty", self.length_penalty, -10, 10)
        _boolean("ignore_eos", self.ignore_eos)
        _boolean("include_stop_str_in_output", self.include_stop_str_in_output)
        _set(self, "stop_token_ids", _token_ids("stop_token_ids", self.stop_token_ids) or ())
        if self.structured_outputs is not None:
            limit = "left out in beam search: use SamplingParams with n for several texts"
            raise InvalidParameterError("structured_outputs", self.structured_outputs, limit)


def _set(params: object, name: str, value: Any) -> None:
    # A frozen value is written only here, at construction.
    object.__setattr__(params, name, value)


def _integer(name: str, value: Any, low: int, high: int | None) -> None:
    limit = f"an integer of at least {low}" if high is None else f"an integer in [{low}, {high}]"
    good = isinstance(value, int) and not isinstance(value, bool)
    if not good or value < low or (high is not None and value > high):
        raise InvalidParameterError(name, value, limit)


def _number(name: str, value: Any, low: float, high: float, *, open_low: bool = False) -> None:
    left = "(" if open_low else "["
    limit = f"a number in {left}{low}, {high}]" if high < math.inf else f"a finite number > {low}"
    good = isinstance(value, (int, float)) and not isinstance(value, bool) and _is_finite(value)
    if not good or not low <= value <= high or (open_low and value == low):
        raise InvalidParameterError(name, value, limit)


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer that no float can hold
        return False


def _boolean(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise InvalidParameterError(name, value, "true or false")


def _strings(name: str, values: Any) -> tuple[str, ...]:
    if values is None:
        return ()
    if isinstance(values, (str, bytes)) or not isinstance(values, Sequence):
        raise InvalidParameterError(name, values, "a list of strings")
    for value in values:
        if not isinstance(value, str) or not value:
            raise InvalidParameterError(name, value, "a list of non-empty strings")
        if any("\ud800" <= character <= "\udfff" for character in value):
            raise InvalidParameterError(name, value, "a list of valid Unicode strings, without lone surrogates")
    return tuple(values)


def _token_ids(name: str, values: Any) -> tuple[int, ...] | None:
    if values is None:
        return None
    if isinstance(values, (str, bytes)) or not isinstance(values, Sequence):
        raise InvalidParameterError(name, values, "a list of token ids")
    for value in values:
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise InvalidParameterError(name, value, "a list of token ids (integers >= 0)")
    return tuple(dict.fromkeys(values))


def _logit_bias(bias: Any) -> dict[int, float]:
    if not isinstance(bias, Mapping):
        raise InvalidParameterError("logit_bias", bias, "a mapping from token id to number")
    checked: dict[int, float] = {}
    for key, value in bias.items():
        # JSON has text keys only; int() refuses texts of thousands of digits with another error.
        is_text = isinstance(key, str) and key.isascii() and key.isdigit() and len(key) < 20
        if not is_text and (not isinstance(key, int) or isinstance(key, bool) or key < 0):
            raise InvalidParameterError("logit_bias", key, "keyed by token ids (integers >= 0)")
        _number("logit_bias", value, -100, 100)
        checked[int(key)] = float(value)
    return checked
