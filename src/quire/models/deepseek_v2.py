"""DeepSeek-V2 and V2-Lite: latent attention (MLA), and in all but the first layers experts beside shared ones.

Rotated values of a head are neighbouring pairs behind the others in a checkpoint. The order in which rows are loaded
brings them to the front, and pairs (2j, 2j + 1) to (j, j + C/2). Next to read: `kernels/latent_attention.py`.
"""

from dataclasses import replace

import numpy as np

from quire import nn
from quire.kernels.latent_attention import latent_attention, write_latent
from quire.kernels.rope import rope
from quire.layers.forward_batch import ForwardBatch
from quire.layers.group import SINGLE, Group, Partition, PartOfSum, Share, share
from quire.layers.linear import ColumnParallelLinear, Linear, RowParallelLinear
from quire.layers.norms import RMSNorm
from quire.layers.rotary import RotaryEmbedding, Rotation
from quire.lazy_torch import Tensor
from quire.models.hf_deepseek import DeepseekV2Config
from quire.models.hf_llama import LlamaConfig
from quire.models.hf_moe import MoE
from quire.models.llama import LlamaForCausalLM, LlamaMLP
from quire.weight_map import Layout, Rows

LATENT_EPSILON = 1e-6
"""Of the norms of latents, whatever `rms_norm_eps` is."""


class UpProjection(nn.Module):
    """Rows that make a head's keys and values of a latent: read by attention itself. Shapes: [H · (U + O), R]."""

    def __init__(self, config: DeepseekV2Config, num_heads: Share) -> None:
        super().__init__()
        rows = num_heads * (config.nope_size + config.value_size)
        self.weight = nn.Parameter(nn.empty(rows.size, config.kv_rank))
        self.partitions = {"weight": Partition(rows=(rows,))}


class LatentAttention(nn.Module):
    """Queries, a latent and a rotary key of each token; attention to cached latents. H is the heads of this rank."""

    def __init__(self, config: DeepseekV2Config, layer_index: int, group: Group = SINGLE) -> None:
        super().__init__()
        heads = share("attention heads", config.num_heads, group)
        self.config, self.layer_index, self.num_heads = config, layer_index, heads.size
        queries, hidden = heads * (config.rotary_size + config.nope_size), config.hidden_size
        if config.query_rank is None:
            self.q_proj = ColumnParallelLinear(hidden, (queries,))
        else:
            self.q_a_proj = Linear(hidden, config.query_rank, bias=config.qkv_bias)
            self.q_a_layernorm = RMSNorm(config.query_rank, LATENT_EPSILON)
            self.q_b_proj = ColumnParallelLinear(config.query_rank, (queries,))
        self.kv_a_proj_with_mqa = Linear(hidden, config.kv_rank + config.rotary_size, bias=config.qkv_bias)
        self.kv_a_layernorm = RMSNorm(config.kv_rank, LATENT_EPSILON)
        self.kv_b_proj = UpProjection(config, heads)
        self.o_proj = RowParallelLinear(heads * config.value_size, hidden, group, bias=config.output_bias)

    def forward(self, x: Tensor, rotation: Rotation, batch: ForwardBatch) -> Tensor:
        """Shapes: x [T, E]; rotation: cos, sin [T, C] -> [T, E]."""
        config, cache = self.config, batch.kv_caches[self.layer_index]  # [N, B, R + C]
        group_index = batch.layer_groups[self.layer_index]
        whole = config.query_rank is None
        q = self.q_proj(x) if whole else self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))  # [T, H · (C + U)]
        latent, rotary = self.kv_a_proj_with_mqa(x).split((config.kv_rank, config.rotary_size), dim=1)
        q = rope(q.view(-1, self.num_heads, config.rotary_size + config.nope_size), *rotation)
        rotary = rope(rotary.view(-1, 1, config.rotary_size), *rotation)
        write_latent(self.kv_a_layernorm(latent), rotary, cache, batch.slot_mapping[group_index])
        scale = config.score_scale or 1.0
        out = latent_attention(q, self.kv_b_proj.weight, cache, batch, group_index, config.rotary_size, scale)
        return self.o_proj(out.flatten(1))  # [T, H, O] -> [T, E]


class SharedMoE(MoE):
    """Experts, and shared ones that all tokens use, which are one MLP. Shapes: x [T, E] -> [T, E]."""

    def __init__(self, config: LlamaConfig, group: Group) -> None:
        part = PartOfSum(group.rank, group.size)
        super().__init__(config, part)
        self.shared_experts = LlamaMLP(replace(config, intermediate_size=config.shared_size), part)
        self.group = group

    def forward(self, x: Tensor) -> Tensor:
        return self.group.all_reduce(super().forward(x) + self.shared_experts(x))


class DeepseekV2ForCausalLM(LlamaForCausalLM):
    """Llama with latent attention and experts."""

    Config = DeepseekV2Config
    attention_class = LatentAttention
    moe_class = SharedMoE
    config: DeepseekV2Config

    def layout(self) -> Layout:
        """Return Llama's, with rotated values behind the others."""
        config = self.config
        sizes = config.rotary_size, config.is_interleaved
        queries = rotated_first(config.num_heads, config.nope_size, *sizes)
        key = rotated_first(1, config.kv_rank, *sizes)[: config.rotary_size]
        views = {
            r"\.q(_b)?_proj\.": (Rows(queries),),
            r"\.kv_a_proj_with_mqa\.": (Rows(np.concatenate((np.arange(config.kv_rank), key))),),
        }
        return super().layout() | Layout(views=views)

    def build_rotary(self, config: DeepseekV2Config) -> nn.Module:  # type: ignore[override]
        """Positions [T] to the angles of a rotary key."""
        return RotaryEmbedding.of(config.rope, config.rotary_size)


def rotated_first(num_heads: int, num_others: int, rotary_size: int, is_interleaved: bool) -> np.ndarray:
    """The stored position of each row of heads: rotated ones first. Shapes: int64 `[heads * (rotary + others)]`."""
    rows = np.arange(num_heads * (num_others + rotary_size)).reshape(num_heads, -1)
    rotated = rows[:, num_others:]
    if is_interleaved:
        rotated = rotated.reshape(num_heads, -1, 2).swapaxes(1, 2).reshape(num_heads, -1)
    return np.concatenate((rotated, rows[:, :num_others]), 1).reshape(-1)


ARCHITECTURES = {"DeepseekV2ForCausalLM": DeepseekV2ForCausalLM}
