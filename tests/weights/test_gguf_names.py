import numpy as np
import pytest

from quire.weights.gguf_names import huggingface_name, is_rotary_projection, rotary_row_order


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("token_embd.weight", "model.embed_tokens.weight"),
        ("output_norm.weight", "model.norm.weight"),
        ("output.weight", "lm_head.weight"),
        ("blk.0.attn_q.weight", "model.layers.0.self_attn.q_proj.weight"),
        ("blk.12.attn_k.bias", "model.layers.12.self_attn.k_proj.bias"),
        ("blk.3.attn_q_norm.weight", "model.layers.3.self_attn.q_norm.weight"),
        ("blk.3.ffn_norm.weight", "model.layers.3.post_attention_layernorm.weight"),
        ("blk.29.ffn_down.weight", "model.layers.29.mlp.down_proj.weight"),
        ("blk.3.attn_sinks.weight", None),
        ("blk.x.attn_q.weight", None),
        ("blk.03.attn_q.weight", None),
        ("blk.3.attn_q", None),
        ("position_embd.weight", None),
        ("", None),
    ],
)
def test_names(name: str, expected: str | None) -> None:
    assert huggingface_name(name) == expected


def test_only_queries_and_keys_are_rotated() -> None:
    assert is_rotary_projection("blk.0.attn_q.weight")
    assert is_rotary_projection("blk.7.attn_k.bias")
    assert not is_rotary_projection("blk.0.attn_v.weight")
    assert not is_rotary_projection("blk.0.attn_q_norm.weight")


def test_row_order_by_hand() -> None:
    # One head of size 4: halves (0, 1) and (2, 3) are stored as pairs (0, 2), (1, 3).
    assert rotary_row_order(4, 4).tolist() == [0, 2, 1, 3]
    assert rotary_row_order(8, 4).tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


@pytest.mark.parametrize(("num_heads", "head_size"), [(1, 2), (3, 6), (9, 64)])
def test_row_order_undoes_the_converter(num_heads: int, head_size: int) -> None:
    weight = np.random.default_rng(0).standard_normal((num_heads * head_size, 5))
    # What llama.cpp's converter does to q and k.
    stored = weight.reshape(num_heads, 2, head_size // 2, 5).swapaxes(1, 2).reshape(weight.shape)
    assert np.array_equal(stored[rotary_row_order(len(weight), head_size)], weight)
