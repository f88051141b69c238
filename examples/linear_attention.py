"""Change the attention: a Llama with linear attention, whose cache does not grow with the text.

Each head adds k ⊗ v to a matrix of fixed size and reads it with its queries (Katharopoulos 2020); a norm of each head
takes the place of the softmax's denominator (Qin 2022). The weights are random, so the text means nothing.
"""

from dataclasses import dataclass

from quire import LLM, SamplingParams
from quire.cache_spec import RecurrentState
from quire.kernels.activations import silu
from quire.layers.forward_batch import ForwardBatch
from quire.layers.norms import RMSNorm
from quire.layers.recurrent import recur, state_bytes
from quire.layers.rotary import Rotation
from quire.models.hf_llama import LlamaConfig
from quire.models.llama import LlamaAttention, LlamaForCausalLM
from quire.models.registry import ModelRegistry
from quire.nn import Tensor


@dataclass(frozen=True, kw_only=True)
class LinearConfig(LlamaConfig):
    """Llama's fields; every layer keeps a matrix per head instead of keys and values."""

    def kv_specs(self) -> list[RecurrentState]:
        """The cache of each layer."""
        size = state_bytes(0, 1, self.num_heads, self.num_heads, self.head_size, self.head_size)
        return [RecurrentState(size)] * self.num_layers


class LinearAttention(LlamaAttention):
    """Llama's projections around linear attention, without positions. It needs a KV head for every query head."""

    def __init__(self, config: LlamaConfig, layer_index: int, *args: object) -> None:
        super().__init__(config, layer_index, *args)
        self.layer_index = layer_index
        self.norm = RMSNorm(config.head_size, config.rms_norm_epsilon)

    def forward(self, x: Tensor, rotation: Rotation, batch: ForwardBatch) -> Tensor:
        """Shapes: x [T, E]; rotation: cos, sin [T, D] -> [T, E]."""
        q, k, v = self.qkv_proj(x).chunk(3, dim=1)  # [T, H * D] each
        q, k, v = (part.view(-1, self.num_heads, self.head_size) for part in (silu(q), silu(k), v))
        found = recur(q, k, v, batch, self.layer_index)  # [T, H, D]
        return self.o_proj(self.norm(found).flatten(1))


class LinearLlama(LlamaForCausalLM):
    """Llama with linear attention in all layers."""

    Config = LinearConfig
    attention_class = LinearAttention


def main() -> None:
    """Run SmolLM2's shape with linear attention and random weights."""
    ModelRegistry.register_model("LinearLlama", LinearLlama)
    overrides = {"architectures": ["LinearLlama"], "num_key_value_heads": 9}
    llm = LLM("smollm2", load_format="dummy", hf_overrides=overrides, max_model_len=512, max_num_seqs=8)
    outputs = llm.generate("Once upon a time", SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))
    num_bytes = sum(spec.block_bytes(0) for spec in llm.llm_engine.config.model.cache_specs)
    print(f"{len(outputs[0].outputs[0].token_ids)} tokens; {num_bytes / 1e6:.2f} MB per request, whatever its length")


if __name__ == "__main__":
    main()
