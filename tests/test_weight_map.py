"""Maps of weights: every way in which a checkpoint may name and stack the tensors of a parameter, and their views."""

from typing import Any

import numpy as np
import pytest

from quire import nn
from quire.errors import ModelFileError, UnsupportedModelError
from quire.layers.experts import Experts
from quire.layers.group import SINGLE, Share
from quire.layers.linear import ColumnParallelLinear
from quire.weight_map import Layout, Offset, Rows, Source, Taps, Transpose, Unstack, View, weight_map
from quire.weights.weight_tensor import WeightTensor

LAYOUT = Layout(
    prefixes=("model.",),
    renames={"router": "gate"},
    views={r"norm\.weight$": (Offset(1.0),)},
    unused=(r"inv_freq$",),
    tied={"lm_head.weight": "embed.weight"},
)
PARTS = ("layer.up.weight", "layer.down.weight")
NAMES = ("embed.weight", *PARTS, "gate.weight", "norm.weight")


class Named(nn.Module):
    def __init__(self, size: int) -> None:
        self.weight = nn.Parameter(nn.empty(size))


class Model(nn.Module):
    """A table, a merged projection, a gate and a norm. `views`: added to the layout's."""

    def __init__(self, **views: tuple[View, ...]) -> None:
        self.embed, self.layer = Named(4), nn.Module()
        halves = (Share(0, 2, 2), Share(0, 3, 3))
        self.layer.merged = ColumnParallelLinear(4, halves, stored=("up", "down"))  # type: ignore[attr-defined]
        self.gate, self.norm = Named(3), Named(4)
        self.views = views

    def layout(self) -> Layout:
        return LAYOUT | Layout(views=self.views)


def sources(model: Any, *names: str) -> dict[str, list[Source]]:
    return dict(weight_map(model, names).sources)


@pytest.mark.parametrize("prefix", ["", "model."])
def test_names_have_a_prefix_or_none(prefix: str) -> None:
    stored = [prefix + name.replace("gate.", "router.") for name in NAMES]
    assert sources(Model(), *stored) == {
        "embed.weight": [Source(stored[0])],
        "layer.merged.weight": [Source(stored[1]), Source(stored[2])],
        "gate.weight": [Source(stored[3])],
        "norm.weight": [Source(stored[4], (Offset(1.0),))],
    }


def test_merged_projection_is_stored_whole_or_in_parts() -> None:
    assert sources(Model(), "layer.merged.weight")["layer.merged.weight"] == [Source("layer.merged.weight")]
    assert sources(Model(), *PARTS)["layer.merged.weight"] == list(map(Source, PARTS))


def test_whole_projection_is_not_taken_where_parts_have_views() -> None:
    model = Model(**{r"\.down\.": (Transpose(),)})
    found = weight_map(model, ("layer.merged.weight",))
    assert found.sources["layer.merged.weight"] == [Source(PARTS[0]), Source(PARTS[1], (Transpose(),))]
    assert not found.unused


def test_experts_are_stored_apart_or_as_stacks() -> None:
    class Sparse(nn.Module):
        def __init__(self) -> None:
            self.experts = Experts(4, 2, 3, "silu", SINGLE, bias=False)

        def layout(self) -> Layout:
            return Layout(views={r"experts\.gate_up_proj$": (Transpose(),)})

    whole = sources(Sparse(), "experts.gate_up_proj", "experts.down_proj")
    assert whole["experts.down_proj"] == [Source("experts.down_proj", (Unstack(at, 3),)) for at in range(3)]
    assert whole["experts.gate_up_proj"][2] == Source("experts.gate_up_proj", (Unstack(2, 3), Transpose()))
    apart = sources(Sparse())["experts.gate_up_proj"]
    assert [source.name for source in apart[2:4]] == ["experts.1.gate_proj.weight", "experts.1.up_proj.weight"]


@pytest.mark.parametrize(
    ("stored", "used", "unused"),
    [
        (("lm_head.weight",), "lm_head.weight", set()),
        (("lm_head.weight", "embed.weight"), "embed.weight", {"lm_head.weight"}),
        (("embed.weight", "rotary.inv_freq"), "embed.weight", {"rotary.inv_freq"}),
        (("embed.weight", "surprise.weight"), "embed.weight", set()),
    ],
)
def test_tied_table_is_stored_under_either_name_or_both(stored: tuple[str, ...], used: str, unused: set[str]) -> None:
    found = weight_map(Model(), stored)
    assert found.sources["embed.weight"] == [Source(used)]
    assert found.unused == unused


def test_head_of_its_own_is_not_taken_for_the_table() -> None:
    model = Model()
    model.lm_head = Named(4)  # type: ignore[attr-defined]
    found = sources(model, "lm_head.weight")
    assert (found["embed.weight"], found["lm_head.weight"]) == ([Source("embed.weight")], [Source("lm_head.weight")])


def test_second_name_of_a_table_is_an_error_where_ties_are_stored_once() -> None:
    model = Model()
    model.layout = lambda: LAYOUT | Layout(ties_once=True)  # type: ignore[method-assign]
    assert not weight_map(model, ("lm_head.weight", "embed.weight")).unused


# --- Views of tensors ---------------------------------------------------------------------------


def tensor(*shape: int, stored_format: str = "F32") -> WeightTensor:
    values = np.arange(np.prod(shape), dtype=np.float32).reshape(*shape[:-1], -1)
    rows = values.view(np.uint8).reshape(-1, 4 * shape[-1])
    return WeightTensor("w", shape, stored_format, rows)


STACK = tensor(2, 3, 4)
ORDER = np.array([2, 0, 3, 1])


@pytest.mark.parametrize(
    ("views", "expected"),
    [
        ((Unstack(1, 2),), STACK.to_numpy()[1]),
        ((Unstack(1, 2), Transpose()), STACK.to_numpy()[1].T),
        ((Unstack(1, 2), Transpose(), Rows(ORDER)), STACK.to_numpy()[1].T[ORDER]),
        ((Unstack(0, 2), Transpose(), Rows(ORDER), Transpose()), STACK.to_numpy()[0][:, ORDER]),
        ((Unstack(0, 2), Rows(ORDER[[1, 0, 3]]), Transpose(), Rows(ORDER), Offset(0.5)),
         STACK.to_numpy()[0][ORDER[[1, 0, 3]]].T[ORDER] + 0.5),
        ((Unstack(1, 2), Taps()), STACK.to_numpy()[1].T.reshape(-1)),
    ],
)  # fmt: skip
def test_views_compose_and_so_do_their_parts(views: tuple[View, ...], expected: np.ndarray) -> None:
    found = STACK.viewed(views)
    assert found.shape == expected.shape
    np.testing.assert_array_equal(found.to_numpy(), expected)
    assert found.num_bytes == 4 * expected.size
    columns = slice(1, 3) if expected.ndim == 2 else slice(None)
    part = found.part(slice(1, 3), columns)
    np.testing.assert_array_equal(part.to_numpy(), expected[1:3, columns] if expected.ndim == 2 else expected[1:3])
    assert np.shares_memory(part.stored, STACK.stored)


def test_mxfp4_stored_apart_is_cut_before_it_is_joined() -> None:
    random = np.random.default_rng(0)
    nibbles, scales = (random.integers(100, 140, (6, 4 * width), dtype=np.uint8) for width in (16, 1))
    whole = WeightTensor("w", (2, 3, 128), "MXFP4", nibbles, scales=scales)
    matrix = whole.viewed([Unstack(1, 2), Transpose(floats_only=True), Rows(np.array([2, 0, 1]))])
    expected = WeightTensor("w", (6, 128), "MXFP4", nibbles, scales=scales).to_numpy()[[5, 3, 4]]
    np.testing.assert_array_equal(matrix.to_numpy(), expected)
    part = matrix.part(slice(1, 3), slice(32, 96))
    np.testing.assert_array_equal(part.to_numpy(), expected[1:, 32:96])
    assert np.shares_memory(part.stored, nibbles)


def test_quantised_matrix_is_transposed_only_back() -> None:
    matrix = WeightTensor("w", (3, 32), "Q8_0", np.zeros((3, 34), np.uint8))
    assert np.array_equal(matrix.viewed([Transpose(), Transpose()]).raw, matrix.raw)
    with pytest.raises(UnsupportedModelError, match="'w' is stored as Q8_0, which cannot be transposed"):
        matrix.viewed([Transpose()]).to_numpy()


@pytest.mark.parametrize(
    ("view", "words"),
    [(Rows(np.arange(3)), r"w \[2, 3, 4\], .* makes 3 rows"), (Unstack(0, 3), r"w \[2, 3, 4\], .* makes 3 matrices")],
)
def test_view_of_another_shape_names_the_tensor(view: View, words: str) -> None:
    with pytest.raises(ModelFileError, match=words):
        STACK.viewed([view])
