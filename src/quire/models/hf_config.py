"""`HFConfigReader`: a model's `config.json` read field by field, so that no field is overlooked; the sizes and layers
that every decoder has; the language model of a model that also sees images or hears.

A model reads the fields it honours and requires the value of fields it cannot vary; `finish` refuses every other
field, because it might change the mathematics. Understands the spellings of transformers 4 and 5. null means absent.
Next to read: `hf_llama.py`.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Self, TypeVar

from quire.errors import ModelFileError, UnsupportedModelError, nearest
from quire.weight_map import Layout

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


# --- Sizes, windows and types of layers -----------------------------------------------------------

FULL, SLIDING = "full_attention", "sliding_attention"
"""Hugging Face's names of layers without and with a window."""
RECURRENT = ("linear_attention", "mamba", "conv")
"""Names of layers with recurrent state."""


def read_sizes(
    reader: HFConfigReader,
    *,
    hidden: str = "hidden_size",
    layers: str = "num_hidden_layers",
    heads: str = "num_attention_heads",
    context: str = "max_position_embeddings",
    head_size: int | None = None,
    ties: bool = False,
) -> dict[str, Any]:
    """Read all sizes but the MLP's, for one KV head per query head and attention to all earlier tokens.

    `hidden`, `layers`, `heads`, `context`: the config's names. `head_size` None: heads share the hidden size.
    `ties`: the default of `tie_word_embeddings`.
    """
    hidden_size, num_heads = reader.integer(hidden), reader.integer(heads)
    num_layers = reader.integer(layers, maximum=MAX_LAYERS)
    if head_size is None:
        check_divides(heads, num_heads, hidden, hidden_size)
        head_size = hidden_size // num_heads
    return {
        "vocab_size": reader.integer("vocab_size"),
        "hidden_size": hidden_size,
        "num_layers": num_layers,
        "num_heads": num_heads,
        "num_kv_heads": num_heads,
        "head_size": head_size,
        "context_len": reader.integer(context),
        "tie_word_embeddings": reader.flag("tie_word_embeddings", ties),
        "windows": (None,) * num_layers,
    }


def read_window(reader: HFConfigReader, default: int | None = None) -> int | None:
    """Read `sliding_window`, null for none. `default`: of a config without the field."""
    return reader.optional_integer("sliding_window") if reader.has("sliding_window") else default


def read_layers(
    reader: HFConfigReader,
    num_layers: int,
    chosen: Sequence[str],
    others: Sequence[str],
    is_chosen: Callable[[int], bool],
    *names: str,
) -> list[bool]:
    """Read of each layer whether `layer_types`, or a field of another of the `names`, has one of the `chosen` types.

    Without such a field `is_chosen` tells, by index. Raises: UnsupportedModelError for types that are not `others`.
    """
    lists = [reader.strings(name, num_layers) for name in ("layer_types", *names)]
    found = next((types for types in lists if types is not None), None)
    if found is None:
        return [is_chosen(index) for index in range(num_layers)]
    for layer_type in found:
        if layer_type not in (*chosen, *others):
            raise UnsupportedModelError(
                f"layer type {layer_type!r} is not supported; supported are {', '.join((*others, *chosen))}"
            )
    return [layer_type in chosen for layer_type in found]


def read_windows(
    reader: HFConfigReader, num_layers: int, window: int | None, is_sliding: Callable[[int], bool]
) -> tuple[int | None, ...]:
    """The window of each layer: `window` in those that `layer_types`, or else `is_sliding`, makes sliding."""
    slides = read_layers(reader, num_layers, (SLIDING,), (FULL,), is_sliding)
    return tuple(window if slide else None for slide in slides)


def read_recurrent_layers(
    reader: HFConfigReader, num_layers: int, is_recurrent: Callable[[int], bool], *names: str
) -> tuple[bool, ...]:
    """Read which layers have recurrent state instead of attention. `names`: see `read_layers`."""
    return tuple(read_layers(reader, num_layers, RECURRENT, (FULL, "attention"), is_recurrent, *names))


# --- Models that are run without images and sound -------------------------------------------------

_T = TypeVar("_T")
PREFIXES = ("model.language_model.", "language_model.model.", "language_model.", "model.")
"""Prefixes of the language model's tensors, in checkpoints of transformers 4 and 5."""
VISION_TENSORS = (
    r"^(model\.)?(vision_tower|vision_model|visual|multi_modal_projector|audio_tower|embed_vision|embed_audio)\.",
)
"""Patterns of the tensors that only images and sound need."""
VISION_FIELDS = (
    "text_config", "vision_config", "image_token_index", "image_token_id", "boi_token_index", "boi_token_id",
    "eoi_token_index", "eoi_token_id", "mm_tokens_per_image", "projector_hidden_act", "vision_feature_layer",
    "multimodal_projector_bias", "spatial_merge_size", "video_token_id", "vision_start_token_id", "vision_end_token_id",
    "vision_soft_tokens_per_image", "audio_config", "audio_token_id", "boa_token_id", "eoa_token_id", "eoa_token_index",
)  # fmt: skip
"""Fields of the whole model that the language model does not depend on."""


def language_model(
    hf_config: Mapping[str, Any], model: Any, tensors: Mapping[str, _T]
) -> tuple[Mapping[str, Any], dict[str, _T]]:
    """Return the config.json and the tensors, by name, of the language model of a whole model of class `model`.

    Of another class they are those given.
    """
    if not hasattr(model, "language_class"):
        return hf_config, dict(tensors)
    named = sys.modules[model.language_class.__module__].ARCHITECTURES
    of_language = Layout(prefixes=PREFIXES, unused=VISION_TENSORS).used_names(tensors)
    bare = {name: tensors[stored] for name, stored in of_language.items()}
    return {**model.Config.language_fields(hf_config), "architectures": list(named)}, bare


def language_config(hf_config: Mapping[str, Any], model_types: tuple[str, ...], **defaults: Any) -> dict[str, Any]:
    """Return the fields of the language model. `defaults`: of fields that `text_config` may leave out.

    `tie_word_embeddings` of the whole model takes precedence, as in Transformers 5.
    Raises: ModelFileError; UnsupportedModelError for another model type or an unknown field.
    """
    text_config = hf_config.get("text_config")
    if not isinstance(text_config, Mapping):
        raise wrong("text_config", text_config, "a config")
    reader = HFConfigReader(hf_config)
    for name in VISION_FIELDS:
        reader.raw(name)
    ties = reader.raw("tie_word_embeddings")
    reader.finish()
    fields = {"model_type": model_types[0], **defaults, **text_config}
    if fields["model_type"] not in model_types:
        raise UnsupportedModelError(
            f"the model's config has text_config.model_type={str(fields['model_type'])[:60]!r}; supported are "
            f"{', '.join(model_types)}"
        )
    return fields if ties is None else fields | {"tie_word_embeddings": ties}


def without_images(model_class: Any, *model_types: str, refuses_head: bool = False, **defaults: Any) -> Any:
    """Return the class of the whole model that runs its language model alone, of class `model_class`.

    `model_types`: of the language model; `refuses_head`: a stored head is an error where embeddings are tied, instead
    of being ignored; `defaults`: of fields that `text_config` may leave out.
    """

    class LanguageConfig(model_class.Config):  # type: ignore[misc]
        """The fields in `text_config`."""

        @classmethod
        def from_hf(cls, hf_config: Mapping[str, Any]) -> Self:
            return super().from_hf(cls.language_fields(hf_config))

        @staticmethod
        def language_fields(hf_config: Mapping[str, Any]) -> dict[str, Any]:
            return language_config(hf_config, model_types, **defaults)

    class LanguageModel(model_class):  # type: ignore[misc]
        """The language model, under the names of the whole."""

        Config = LanguageConfig
        language_class = model_class

        def layout(self) -> Layout:
            """Return that of the language model, with other prefixes."""
            own = super().layout() | Layout(unused=VISION_TENSORS, ties_once=refuses_head)
            return replace(own, prefixes=PREFIXES)

    return LanguageModel
