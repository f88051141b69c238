"""`HFConfigReader`: a model's `config.json` read field by field, so that no field is overlooked.

A model reads the fields it honours and requires the value of fields it cannot vary; `finish` refuses every other
field, because it might change the mathematics. Understands the spellings of transformers 4 and 5. null means absent.
Next to read: `hf_decoder.py`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from quire.errors import ModelFileError, UnsupportedModelError, nearest

IGNORED_FIELDS = frozenset(
    {
        # origin of the file, and the programs it is for
        "architectures", "model_type", "auto_map", "transformers_version", "name_or_path", "model_name_or_path",
        "base_model_name_or_path", "tokenizer_class", "is_llama_config", "transformers.js_config", "unsloth_fixed",
        "unsloth_version",
        # computing, storing and training in other programs
        "dtype", "torch_dtype", "use_cache", "use_bfloat16", "torchscript", "tf_legacy_loss", "attn_implementation",
        "cache_implementation", "pretraining_tp", "chunk_size_feed_forward", "gradient_checkpointing",
        "initializer_range", "attention_dropout", "hidden_dropout", "activation_dropout", "dropout", "layerdrop",
        "output_attentions", "output_hidden_states", "return_dict", "is_decoder",
        # tokens and generation: tokenizer and generation_config.json have these
        "bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id", "sep_token_id", "decoder_start_token_id",
        "prefix", "max_length", "min_length", "max_new_tokens", "do_sample", "early_stopping", "num_beams",
        "num_beam_groups", "diversity_penalty", "temperature", "top_k", "top_p", "typical_p", "repetition_penalty",
        "length_penalty", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "bad_words_ids",
        "num_return_sequences", "output_scores", "return_dict_in_generate", "forced_bos_token_id",
        "forced_eos_token_id", "remove_invalid_values", "exponential_decay_length_penalty", "suppress_tokens",
        "begin_suppress_tokens",
        # classification heads, which are not used
        "id2label", "label2id", "num_labels", "problem_type", "finetuning_task", "task_specific_params",
    }
)  # fmt: skip
"""Fields that cannot change a decoder's hidden states or logits."""

ADVICE = "--model-impl transformers computes what Transformers does"
ACTIVATIONS = {
    "silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh", "relu": "relu", "relu2": "relu2",
}  # fmt: skip
"""Hugging Face's names of activations, and those of `kernels.activations`."""
MAX_SIZE = 1 << 20
"""Of widths, heads, experts and their like. A head has as many angles."""
MAX_LENGTH = 2**31 - 1
LENGTHS = frozenset({
    "max_position_embeddings", "original_max_position_embeddings", "n_positions", "sliding_window", "vocab_size",
    "vocab_size_per_layer_input", "draft_vocab_size",
})  # fmt: skip
"""Fields of positions and tokens, up to `MAX_LENGTH`: they take no memory by themselves."""
SMALLEST, LARGEST = 1e-18, 1e18
"""Of numbers above 0: no model has others, and products and quotients of two are numbers in fp32."""
MAX_LAYERS = 1000
"""A config with more is corrupted; building 10,000 layers takes up to 9 s and 100 MiB."""


class HFConfigReader:
    """The fields of a config, and a note of those that have been read.

    All methods raise ModelFileError where a value is missing, of the wrong type or out of range.
    """

    def __init__(self, fields: Mapping[str, Any], defaults: Mapping[str, Any] | None = None) -> None:
        """`defaults`: of fields that are absent."""
        self._fields, self._defaults = fields, defaults or {}
        self._read: set[str] = set()
        self.model_type = str(fields.get("model_type", "model"))
        for name in ("is_encoder_decoder", "add_cross_attention", "tie_encoder_decoder"):
            self.require(name, False)
        self.require("pruned_heads", {})

    def has(self, name: str) -> bool:
        """True if the field is there, also if it is null."""
        return name in self._fields

    def raw(self, name: str) -> Any:
        """The value, or if it is absent the default, or None."""
        self._read.add(name)
        value = self._fields.get(name)
        return self._defaults.get(name) if value is None else value

    def optional_integer(self, name: str, *, minimum: int = 1, maximum: int | None = None) -> int | None:
        """An integer from `minimum` to `maximum`, or None if absent. `maximum` None: `MAX_SIZE` or `MAX_LENGTH`."""
        value = self.raw(name)
        if maximum is None:
            maximum = MAX_LENGTH if name in LENGTHS else MAX_SIZE
        if value is None:
            return None
        if not isinstance(value, int) or isinstance(value, bool) or not minimum <= value <= maximum:
            raise wrong(name, repr(value), f"an integer from {minimum} to {maximum}")
        return value

    def integer(self, name: str, default: int | None = None, *, minimum: int = 1, maximum: int | None = None) -> int:
        """An integer as of `optional_integer`; required unless there is a default."""
        value = self.optional_integer(name, minimum=minimum, maximum=maximum)
        value = default if value is None else value
        if value is None:
            raise ModelFileError(f"the model's config lacks {name}, which a {self.model_type} model needs")
        return value

    def number(self, name: str, default: float) -> float:
        """A finite number above 0."""
        value = self.raw(name)
        return default if value is None else check_positive(name, value)

    def flag(self, name: str, default: bool) -> bool:
        """true or false."""
        value = self.raw(name)
        if value is not None and not isinstance(value, bool):
            raise wrong(name, repr(value), "true or false")
        return default if value is None else value

    def choice(self, name: str, default: str, supported: Sequence[str]) -> str:
        """Read a choice between the supported values. Raises: UnsupportedModelError for another."""
        value = self.raw(name)
        if value is not None and value not in supported:
            raise UnsupportedModelError(
                f"the model's config has {name}={value!r}; Quire's {self.model_type} computes only "
                f"{', '.join(map(repr, supported))}; {ADVICE}"
            )
        return default if value is None else str(value)

    def require(self, name: str, value: Any) -> None:
        """Check a field that Quire computes with one value only. Raises: UnsupportedModelError for another."""
        found = self.raw(name)
        if found is not None and found != value:
            raise UnsupportedModelError(
                f"the model's config has {name}={found!r}; Quire's {self.model_type} computes only {value!r}; {ADVICE}"
            )

    def strings(self, name: str, length: int) -> list[str] | None:
        """A list of `length` strings, or None if absent."""
        value = self.raw(name)
        if value is None:
            return None
        if not isinstance(value, list) or len(value) != length or not all(isinstance(item, str) for item in value):
            raise wrong(name, value, f"{length} strings")
        return value

    def finish(self) -> None:
        """Check that every field was read, is null or is known as harmless. Raises: UnsupportedModelError naming it."""
        for name, value in self._fields.items():
            if name not in self._read and not is_harmless(name, value):
                raise UnsupportedModelError(
                    f"the model's config has {name}={str(value)[:60]}, which Quire's {self.model_type} does not know"
                    f"{nearest(name, self._read)}; if it does not change what the model computes, "
                    f"set hf_overrides={{'{name}': None}}; {ADVICE}"
                )


def wrong(name: str, value: Any, expected: str) -> ModelFileError:
    """Return the error for a value that is not what was expected."""
    return ModelFileError(f"the model's config has {name}={str(value)[:60]}, which is not {expected}")


def is_harmless(name: str, value: Any) -> bool:
    """Return whether a field cannot change a decoder's hidden states or logits.

    The texts and flags of `_name_or_path`, `_attn_implementation_autoset` and the like are Transformers' own state.
    """
    return value is None or name in IGNORED_FIELDS or (name.startswith("_") and isinstance(value, (str, bool)))


def check_divides(divisor_name: str, divisor: int, name: str, value: int) -> None:
    """Raises: ModelFileError unless `value` is a multiple of `divisor`."""
    if value % divisor:
        raise wrong(name, value, f"a multiple of {divisor_name}={divisor}")


def check_positive(name: str, value: Any) -> float:
    """The value as a number. Raises: ModelFileError unless it is above 0, and its square is a number, too."""
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not SMALLEST <= value <= LARGEST:
        raise wrong(name, repr(value), f"a number above 0, from {SMALLEST:g} to {LARGEST:g}")
    return float(value)
