"""Pictures of a layer and of its ranks, against the models' own shapes."""

import json
from collections.abc import Callable
from xml.etree import ElementTree

import pytest

from quire.errors import ConfigError
from quire.insight.explain.subject import Settings, open_subject
from quire.insight.picture import Picture
from quire.insight.view_model import view_layer, view_ranks
from tests.cli.command_line import call

DEVICE = "A100-80GB"


def layer_of(name: str, *, layer: int = 0, tp: int = 1) -> Picture:
    return view_layer(open_subject(name), Settings(tp=tp, batches=(1,), ctx=128, device=DEVICE), layer=layer, start=0)


def ranks_of(name: str, tp: int) -> Picture:
    return view_ranks(open_subject(name), Settings(tp=tp, batches=(1,), ctx=128, device=DEVICE), layer=0)


def lane(picture: Picture, index: int) -> str:
    return "".join(picture.kinds[row.cells[2 * index]].character for row in picture.rows)


def test_layer_shows_its_instructions_in_order_with_their_shapes() -> None:
    rows = layer_of("qwen3-4b", tp=2).rows
    assert [row.label for row in rows] == [
        "Norm input_layernorm", "self_attn.qkv_proj", "WriteKv", "QKᵀ", "PV", "self_attn.o_proj",
        "AllReduce of self_attn.o_proj", "Norm post_attention_layernorm", "mlp.gate_up_proj", "mlp.down_proj",
        "AllReduce of mlp.down_proj",
    ]  # fmt: skip
    qkv = rows[1].remark
    assert all(text in qkv for text in ("128×2560×3072", "2.01 GFLOP", "→ [128, 3072]", "weight [3072, 2560]"))


def test_residual_is_one_lane_through_the_layer_with_a_sum_behind_each_half() -> None:
    assert lane(layer_of("qwen3-4b"), 0) == "○││││⊕○│⊕"
    assert lane(layer_of("gemma-3-4b"), 0) == "○│││││⊕○││⊕"  # its norms before the sums have rows of their own


def test_layers_of_other_work_are_not_counted_as_alike() -> None:
    assert "3 of 61 layers have the same work" in layer_of("deepseek-v3").caption
    experts = layer_of("deepseek-v3", layer=3)
    assert "58 of 61" in experts.caption
    assert any("experts" in row.label for row in experts.rows)


def test_layer_that_does_not_exist_is_refused_with_the_layers_there_are() -> None:
    with pytest.raises(ConfigError, match="--layer 36: the model has layers 0 to 35"):
        layer_of("qwen3-4b", layer=36)


def test_each_rank_has_its_share_of_each_cut_matrix() -> None:
    picture = ranks_of("qwen3-4b", 4)
    rows = {row.label: row for row in picture.rows}
    bar = rows["self_attn.o_proj columns"].cells
    assert {kind: bar.count(kind) for kind in "0123"} == dict.fromkeys("0123", 12)
    assert "[2560, 4096] → [2560, 1024]: 0-1023, 1024-2047, 2048-3071, 3072-4095" in rows[
        "self_attn.o_proj columns"].remark  # fmt: skip
    assert set(rows["input_layernorm"].cells) == {"all"}
    assert [row.label for row in picture.rows if set(row.cells) == {"sum"}] == [
        "AllReduce of the embedding", "AllReduce of self_attn.o_proj", "AllReduce of mlp.down_proj",
        "AllGather of head embed_tokens",
    ]  # fmt: skip


def test_kv_heads_that_several_ranks_hold_are_told_apart() -> None:
    rows = {row.label: row for row in ranks_of("qwen3-4b", 16).rows}
    assert set(rows["KV heads"].cells) == {"several"}
    assert "several" not in rows["query heads"].cells


def test_number_of_ranks_without_a_picture_is_refused() -> None:
    with pytest.raises(ConfigError, match="--tp 1: a picture shows 2 to 36 ranks"):
        ranks_of("qwen3-4b", 1)


def test_command_draws_a_preset_and_names_options_of_other_pictures() -> None:
    shown = call("view", "ranks", "qwen3-4b", "--tp", "2", "--device", DEVICE, "--json")
    assert json.loads(shown.stdout)["model"] == "qwen3-4b"
    assert "`quire view mask`" in call("view", "layer", "qwen3-4b", "--step", "1").stderr


@pytest.mark.parametrize(
    "draw", [lambda: layer_of("qwen3-4b"), lambda: ranks_of("qwen3-4b", 2)], ids=["layer", "ranks"]
)
def test_picture_of_a_model_is_svg(draw: Callable[[], Picture]) -> None:
    picture = draw()
    assert ElementTree.fromstring(picture.to_svg()).tag.endswith("svg")
