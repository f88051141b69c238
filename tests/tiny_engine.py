"""A real engine on a tiny random Llama, from options to outputs, and the same with other settings of its scheduler."""

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import pytest

from quire.config import EngineOptions
from quire.engine.llm_engine import LLMEngine

transformers = pytest.importorskip("transformers")
torch = pytest.importorskip("torch")
tokenizers = pytest.importorskip("tokenizers")

VOCAB_SIZE = 300


def prompt(number: int, length: int) -> list[int]:
    return [(31 * number + 17 * i + i * i) % VOCAB_SIZE for i in range(length)]


def write_tiny_llama(path: Path) -> Path:
    """A tiny Llama that Transformers wrote to disk, of whole blocks of 32 columns so that it can be quantised."""
    config = transformers.LlamaConfig(
        vocab_size=VOCAB_SIZE, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=8,
        num_key_value_heads=2, max_position_embeddings=512, initializer_range=0.3,
    )  # fmt: skip
    return write_tiny(path, config)


def write_tiny_hybrid(path: Path) -> Path:
    """A tiny Qwen3-Next: two layers with recurrent state and one with attention, one of them with experts."""
    config = transformers.Qwen3NextConfig(
        vocab_size=VOCAB_SIZE, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=512, initializer_range=0.3,
        layer_types=["linear_attention", "full_attention", "linear_attention"], linear_num_key_heads=2,
        linear_num_value_heads=4, linear_key_head_dim=16, linear_value_head_dim=16, mlp_only_layers=[0, 2],
        num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, shared_expert_intermediate_size=32,
        bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return write_tiny(path, config)


def write_tiny_state_space(path: Path) -> Path:
    """A tiny Mamba 2, which has recurrent states alone."""
    config = transformers.Mamba2Config(
        vocab_size=VOCAB_SIZE, hidden_size=64, num_hidden_layers=2, num_heads=8, head_dim=16, n_groups=2, state_size=16,
        initializer_range=0.3, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return write_tiny(path, config)


def write_tiny(path: Path, config: Any) -> Path:
    """A random causal language model of this config, with a tokenizer of bytes."""
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(path)
    byte_tokenizer().save(str(path / "tokenizer.json"))
    return path


def byte_tokenizer() -> Any:
    """All bytes, each of which is a token, and pairs of letters: texts can follow grammars, and cut characters."""
    specials = ["<unk>", "<s>", "</s>"]
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    merges = list(itertools.product("abcdefg", "hijklm"))[: VOCAB_SIZE - len(specials) - len(alphabet)]
    pieces = [*specials, *alphabet, *map("".join, merges)]
    assert len(pieces) == VOCAB_SIZE
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, merges))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens(specials)
    return tokenizer


def build(directory: Path, *, num_threads: int = 1, **options: Any) -> LLMEngine:
    settings = {"dtype": "float32", "device": "cpu", "num_blocks_override": 96, "max_num_seqs": 16, **options}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", str(num_threads))
        return LLMEngine.build(EngineOptions(model=str(directory), **settings))


def engine_with(base: LLMEngine, **settings: Any) -> LLMEngine:
    """A new engine with other scheduler settings on the same model and KV memory."""
    scheduler = dataclasses.replace(base.config.scheduler, **settings)
    config = dataclasses.replace(base.config, scheduler=scheduler)
    return LLMEngine(config, base._executor, base.tokenizer)
