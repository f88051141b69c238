"""Mamba 2: layers with state spaces only, without attention, positions and MLPs.

Next to read: `layers/recurrent.py`.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from quire.cache_spec import CacheSpec, RecurrentState
from quire.errors import ModelFileError, UnsupportedModelError
from quire.kernels.activations import silu
from quire.kernels.recurrence import MAX_TAPS
from quire.kernels.rms_norm import rms_norm
from quire.layers.embedding import VocabParallelEmbedding, VocabParallelHead
from quire.layers.forward_batch import ForwardBatch
from quire.layers.group import SINGLE, Group, Partition, Share, share
from quire.layers.linear import ColumnParallelLinear, RowParallelLinear
from quire.layers.norms import RMSNorm, SharedRMSNorm
from quire.layers.recurrent import CausalConv, recur, state_bytes
from quire.models.hf_config import MAX_LAYERS, HFConfigReader, check_divides
from quire.models.hf_decoder import DecoderConfig

INFINITY = (math.inf, {"__float__": "Infinity"})
"""As Python's JSON and Transformers 5 write it."""
CONTEXT_LEN = 2**20
"""Tokens of a context: a state has no limit."""
FIELDS_WITHOUT_USE = (
    "residual_in_fp32", "rescale_prenorm_residual", "time_step_rank", "time_step_min", "time_step_max",
    "time_step_floor", "chunk_size", "norm_before_gate",
)  # fmt: skip
"""Of initialisation, of computing in chunks, and those that Transformers does not read either."""


@dataclass(frozen=True, kw_only=True)
class StateSpaceSizes:
    """Sizes of a state space: H heads of `head_size` channels, and keys and queries of `state_size` per group."""

    hidden_size: int
    num_heads: int
    head_size: int
    num_groups: int
    state_size: int
    num_taps: int
    conv_bias: bool
    bias: bool
    epsilon: float

    def spec(self) -> RecurrentState:
        """The state of one layer. Where all heads share a key, every rank has it."""
        inner, keys = self.num_heads * self.head_size, 2 * self.num_groups * self.state_size
        num_bytes = state_bytes(inner + keys, self.num_taps, self.num_heads, self.state_size, self.head_size)
        whole_bytes = 4 * (self.num_taps - 1) * keys if self.num_groups == 1 else 0
        return RecurrentState(num_bytes, whole_bytes=whole_bytes)


def check_time_steps(reader: HFConfigReader) -> None:
    """Raises: UnsupportedModelError if time steps are limited."""
    limit = reader.raw("time_step_limit")
    if limit is not None and (len(limit) != 2 or limit[0] != 0 or limit[1] not in INFINITY):
        raise UnsupportedModelError(
            f"the model's config has time_step_limit={limit}; Quire computes only [0, Infinity]"
        )


class GroupRMSNorm(RMSNorm):
    """RMS norm of each of `num_groups` equal parts of a row. Shapes: x [T, size] -> the same; weight [size]."""

    def __init__(self, part: Share, num_groups: int, epsilon: float) -> None:
        super().__init__(part.size, epsilon)
        self.num_groups = num_groups
        self.partitions = {"weight": Partition(rows=(part,))}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Shapes: x [T, size] -> [T, size]."""
        size = len(self.weight)
        return rms_norm(x.view(-1, self.num_groups, size // self.num_groups), self.weight, self.epsilon).flatten(1)


class StateSpaceMixer(nn.Module):
    """Project, convolve over time, apply the state space, gate and norm, project back. (Dao & Gu 2024)"""

    def __init__(self, sizes: StateSpaceSizes, layer_index: int, group: Group = SINGLE) -> None:
        super().__init__()
        heads, is_shared = share("heads of state spaces", sizes.num_heads, group), sizes.num_groups == 1
        groups = Share(0, 1, 1) if is_shared else share("groups of state spaces", sizes.num_groups, group)
        inner, keys = heads * sizes.head_size, groups * sizes.state_size
        self.layer_index, self.widths, self.state_size = (
            layer_index,
            (inner.size, keys.size, keys.size),
            sizes.state_size,
        )
        self.head_size, self.num_heads = sizes.head_size, heads.size
        self.in_proj = ColumnParallelLinear(sizes.hidden_size, (inner, inner, keys, keys, heads), bias=sizes.bias)
        self.conv1d = CausalConv(
            layer_index, (inner, keys, keys), sizes.num_taps, activation="silu", bias=sizes.conv_bias
        )
        vectors = [nn.Parameter(torch.empty(heads.size), requires_grad=False) for _ in range(3)]
        self.dt_bias, self.A_log, self.D = vectors
        # One group is the whole row, of which a rank has a part.
        self.norm: RMSNorm = (
            SharedRMSNorm(inner, sizes.epsilon, group) if is_shared else GroupRMSNorm(inner, groups.size, sizes.epsilon)
        )
        self.out_proj = RowParallelLinear(inner, sizes.hidden_size, group, bias=sizes.bias)
        self.partitions = dict.fromkeys(("dt_bias", "A_log", "D"), Partition(rows=(heads,)))

    def forward(self, x: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """Shapes: x [T, E] -> [T, E]."""
        inner = self.widths[0]
        z, xbc, steps = self.in_proj(x).split((inner, sum(self.widths), self.num_heads), dim=1)
        values, keys, queries = self.conv1d(xbc, batch).split(self.widths, dim=1)
        keys, queries = (part.view(-1, self.widths[1] // self.state_size, self.state_size) for part in (keys, queries))
        found = recur(
            queries, keys, values.view(-1, self.num_heads, self.head_size), batch, self.layer_index, gates=steps,
            log_rates=self.A_log, time_bias=self.dt_bias, skip=self.D, offset_bytes=self.conv1d.state_bytes,
        )  # [T, H, V]  # fmt: skip
        return self.out_proj(self.norm(found.flatten(1) * silu(z)))


@dataclass(frozen=True, kw_only=True)
class Mamba2Config(DecoderConfig):
    """Sizes of the decoder, of which those of attention have no use."""

    state_space: StateSpaceSizes

    @classmethod
    def read(cls, reader: HFConfigReader) -> dict[str, Any]:
        """See `DecoderConfig.read`."""
        for name in FIELDS_WITHOUT_USE:
            reader.raw(name)
        reader.require("rms_norm", True)
        reader.require("hidden_act", "silu")
        check_time_steps(reader)
        hidden_size, num_heads = reader.integer("hidden_size", 4096), reader.integer("num_heads", 128)
        head_size, expand = reader.integer("head_dim", 64), reader.integer("expand", 2)
        num_layers = reader.integer("num_hidden_layers", 64, maximum=MAX_LAYERS)
        if num_heads * head_size != expand * hidden_size:
            raise ModelFileError(
                f"the model's config has num_heads={num_heads} of head_dim={head_size}, which is not expand={expand} "
                f"times hidden_size={hidden_size}"
            )
        num_groups, num_taps = reader.integer("n_groups", 8), reader.integer("conv_kernel", 4, maximum=MAX_TAPS)
        check_divides("n_groups", num_groups, "num_heads", num_heads)
        return {
            "vocab_size": reader.integer("vocab_size", 32768), "hidden_size": hidden_size, "num_layers": num_layers,
            "intermediate_size": expand * hidden_size, "num_heads": num_heads, "num_kv_heads": num_heads,
            "head_size": head_size, "context_len": CONTEXT_LEN, "windows": (None,) * num_layers,
            "tie_word_embeddings": reader.flag("tie_word_embeddings", False),
            "state_space": StateSpaceSizes(
                hidden_size=hidden_size, num_heads=num_heads, head_size=head_size, num_groups=num_groups,
                state_size=reader.integer("state_size", 128), num_taps=num_taps, bias=reader.flag("use_bias", False),
                conv_bias=reader.flag("use_conv_bias", True), epsilon=reader.number("layer_norm_epsilon", 1e-5),
            ),
        }  # fmt: skip

    def kv_specs(self) -> list[CacheSpec]:
        """See `DecoderConfig.kv_specs`."""
        return [self.state_space.spec()] * self.num_layers


class Mamba2Layer(nn.Module):
    """A state space behind a norm and beside a residual."""

    def __init__(self, config: Mamba2Config, layer_index: int, group: Group) -> None:
        super().__init__()
        self.norm = RMSNorm(config.hidden_size, config.state_space.epsilon)
        self.mixer = StateSpaceMixer(config.state_space, layer_index, group)

    def forward(self, x: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """Shapes: x [T, E] -> [T, E]."""
        return x + self.mixer(self.norm(x), batch)


class Mamba2ForCausalLM(nn.Module):
    """The whole model, or one rank's share. Parameter names are the checkpoint's, without `backbone.`."""

    Config: ClassVar[type[Mamba2Config]] = Mamba2Config
    stacked_params: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    renames: ClassVar[Mapping[str, str]] = {"backbone.": ""}
    convolutions = ("conv1d",)

    def __init__(self, config: Mamba2Config, group: Group = SINGLE) -> None:
        super().__init__()
        self.config = config
        self.ignored_tensors = (r"^lm_head\.",) if config.tie_word_embeddings else ()
        table_size = config.vocab_size, config.hidden_size
        self.embeddings = VocabParallelEmbedding(*table_size, group)
        self.layers = nn.ModuleList(Mamba2Layer(config, index, group) for index in range(config.num_layers))
        self.norm_f = RMSNorm(config.hidden_size, config.state_space.epsilon)
        self.lm_head = None if config.tie_word_embeddings else VocabParallelHead(*table_size, group)

    def forward(self, token_ids: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """Hidden states after the last norm. Shapes: token_ids [T] -> [T, E]."""
        x = self.embeddings(token_ids)  # [T, E]
        for layer in self.layers:
            x = layer(x, batch)  # [T, E]
        return self.norm_f(x)  # [T, E]

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Shapes: hidden [S, E] -> [S, V]."""
        return self.embeddings.as_head(hidden) if self.lm_head is None else self.lm_head(hidden)


ARCHITECTURES = {"Mamba2ForCausalLM": Mamba2ForCausalLM}
