"""`LlamaConfig`: the fields of Llama and of the models that vary it, read from a `config.json`.

Next to read: `llama.py`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

from quire.cache_spec import CacheSpec, PagedKV
from quire.kernels.experts import SOFTMAX, ExpertScoring
from quire.layers.rotary import RopeConfig
from quire.models.hf_config import HFConfigReader, check_divides, read_sizes, read_window
from quire.models.hf_rope import check_pairs, read_rope
from quire.weight_map import Layout


@dataclass(frozen=True, kw_only=True)
class LlamaConfig:
    """Llama's variants. A variant of Llama overrides `read`, `read_rope` or `check_activation`.

    It declares `defaults` of fields that a `config.json` may leave out, the value of fields that must have this one
    (`required`), and fields that do not matter (`unused`).

    Fields:
        windows: tokens that each layer attends to, the query's own included; None: all.
        score_scale: of attention scores, None for 1 / sqrt(head_size); score_cap: None for none.
        local_rope: angles of layers with a window, if they have others; `rope` is then that of the other layers.
        sparse_layers: of each layer whether its MLP is a mixture of experts; empty for none.
        num_experts, top_k, expert_size, renormalise, scoring: see `hf_moe.MoE`.
        shared_size: MLP columns of what all tokens use beside the experts.
        recurrent_layers: of each layer whether it has recurrent state instead of attention; empty for none.
        num_predictors: layers behind the others that predict further tokens (`hf_predictor.py`).
    """

    defaults: ClassVar[Mapping[str, Any]] = {}
    required: ClassVar[Mapping[str, Any]] = {}
    unused: ClassVar[tuple[str, ...]] = ()

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    context_len: int
    tie_word_embeddings: bool
    windows: tuple[int | None, ...]
    rms_norm_epsilon: float
    rope: RopeConfig
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    score_scale: float | None = None
    score_cap: float | None = None
    local_rope: RopeConfig | None = None
    sparse_layers: tuple[bool, ...] = ()
    num_experts: int = 0
    top_k: int = 1
    expert_size: int = 0
    renormalise: bool = True
    scoring: ExpertScoring = SOFTMAX
    shared_size: int = 0
    recurrent_layers: tuple[bool, ...] = ()
    num_predictors: int = 0
    rope_options: ClassVar[Mapping[str, Any]] = {}
    """Of `hf_rope.read_rope`."""
    has_window: ClassVar[bool] = False
    """All layers have the window `sliding_window`, or `default_window` if the config does not say."""
    default_window: ClassVar[int | None] = None

    @classmethod
    def from_hf(cls, hf_config: Mapping[str, Any]) -> Self:
        """Read a `config.json`. Raises: ModelFileError, UnsupportedModelError."""
        reader = HFConfigReader(hf_config, cls.defaults)
        for name in cls.unused:
            reader.raw(name)
        for name, value in cls.required.items():
            reader.require(name, value)
        config = cls(**cls.read(reader))
        reader.finish()
        return config

    @classmethod
    def read(cls, reader: HFConfigReader) -> dict[str, Any]:
        """Read the fields; a variant of a model changes or adds some."""
        fields = read_sizes(reader, head_size=reader.optional_integer("head_dim"))
        num_kv_heads = reader.integer("num_key_value_heads", fields["num_heads"])
        check_divides("num_key_value_heads", num_kv_heads, "num_attention_heads", fields["num_heads"])
        check_divides("2, the size of a rotated pair", 2, "head_dim", fields["head_size"])
        rope_config = cls.read_rope(reader)
        check_pairs(rope_config, fields["head_size"])
        cls.check_activation(reader)
        return fields | {
            "context_len": rope_config.stretched(fields["context_len"]),
            "intermediate_size": reader.integer("intermediate_size"),
            "num_kv_heads": num_kv_heads,
            "rms_norm_epsilon": reader.number("rms_norm_eps", 1e-6),
            "rope": rope_config,
            "qkv_bias": reader.flag("attention_bias", False),
            "output_bias": reader.flag("attention_bias", False),
            "mlp_bias": reader.flag("mlp_bias", False),
            "windows": (read_window(reader, cls.default_window) if cls.has_window else None,) * fields["num_layers"],
        }

    @classmethod
    def read_rope(cls, reader: HFConfigReader) -> RopeConfig:
        """Read the angles of queries and keys."""
        return read_rope(reader, **cls.rope_options)

    @classmethod
    def check_activation(cls, reader: HFConfigReader) -> None:
        """Raises: UnsupportedModelError for another activation than that of `mlp_class`."""
        reader.choice("hidden_act", "silu", ["silu", "swish"])

    @property
    def names_behind(self) -> str:
        """A pattern of the names of stored layers behind the model's: those that predict further tokens."""
        indices = range(self.num_layers, self.num_layers + self.num_predictors)
        return rf"^model\.layers\.({'|'.join(map(str, indices))})\."

    def unused_behind(self) -> Layout:
        """Return the layout of these layers where they are not loaded."""
        return Layout(unused=(self.names_behind, r"^mtp\."))

    def kv_specs(self) -> list[CacheSpec]:
        """The cache of each layer. `dtype_bytes` of keys is 1: `resolve` fills in the real one."""
        return [
            self.state_spec() if self.is_recurrent(index) else PagedKV(self.num_kv_heads, self.head_size, 1, window)
            for index, window in enumerate(self.windows)
        ]

    def is_recurrent(self, layer_index: int) -> bool:
        """Return whether a layer has recurrent state instead of attention."""
        return bool(self.recurrent_layers) and self.recurrent_layers[layer_index]

    def state_spec(self) -> CacheSpec:
        """The state of a recurrent layer."""
        raise NotImplementedError

    def with_layers(self, count: int) -> Self:
        """Return the config with more layers, with attention, and with experts if the last one has them."""
        sparse, recurrent = self.sparse_layers, self.recurrent_layers
        return replace(
            self,
            num_layers=self.num_layers + count,
            windows=self.windows + (None,) * count,
            sparse_layers=sparse + sparse[-1:] * count,
            recurrent_layers=recurrent + (False,) * count if recurrent else (),
        )

    def for_length(self, max_len: int) -> Self:
        """Return the config for sequences of at most `max_len` tokens; some models choose rotary frequencies by it."""
        return replace(self, rope=self.rope.for_length(max_len))
