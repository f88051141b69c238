"""Weights to parameters: stacking, renames, ties, and every way in which files and model can disagree."""

import weakref
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from quire.config import EngineOptions
from quire.errors import ModelFileError
from quire.models.registry import ModelRegistry
from quire.runtime import loader
from quire.runtime.eager import load_model
from quire.weight_map import Layout
from quire.weights.checkpoint import open_checkpoint
from quire.weights.sources import resolve_source
from tests.cli.tiny_directory import make_tiny_directory
from tests.runtime.builders import make_config
from tests.runtime.tiny_model import ONE_GROUP

PARTS = ("q_proj", "k_proj", "v_proj")


class Norm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.register_buffer("table", torch.arange(3.0), persistent=False)


class Stored(nn.Module):
    """A model with a stacked, a plain, a tied and a vector parameter, and a buffer made in fp32."""

    unused: tuple[str, ...] = (r"rotary\.inv_freq$",)

    def __init__(self, config: Any = None) -> None:
        super().__init__()
        self.model = nn.Module()
        self.model.embed_tokens = nn.Embedding(10, 4)
        self.model.qkv_proj = nn.Linear(4, 8, bias=True)
        self.model.qkv_proj.stored_parts = {kind: [f"{part}.{kind}" for part in PARTS] for kind in ("weight", "bias")}
        self.model.norm = Norm(4)
        self.lm_head = nn.Linear(4, 10, bias=False)
        self.lm_head.weight = self.model.embed_tokens.weight

    def layout(self) -> Layout:
        return Layout(renames={"transformer": "model"}, unused=self.unused)


@dataclass
class Tensor:
    """A `WeightTensor` in memory that counts how often it was decoded."""

    name: str
    values: torch.Tensor
    format: str = "F32"
    decoded: list[torch.dtype] = field(default_factory=list)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.values.shape)

    @property
    def num_bytes(self) -> int:
        return self.values.numel() * 4

    @property
    def raw(self) -> np.ndarray[Any, Any]:
        raise NotImplementedError

    def to_torch(self, dtype: torch.dtype) -> torch.Tensor:
        self.decoded.append(dtype)
        return self.values.to(dtype)


@dataclass
class Files:
    tensors: dict[str, Tensor]


def tensors(**changes: tuple[int, ...] | None) -> Files:
    shapes: dict[str, tuple[int, ...] | None] = {
        "transformer.embed_tokens.weight": (10, 4),
        "model.q_proj.weight": (4, 4), "model.k_proj.weight": (2, 4), "model.v_proj.weight": (2, 4),
        "model.q_proj.bias": (4,), "model.k_proj.bias": (2,), "model.v_proj.bias": (2,),
        "model.norm.weight": (4,),
        **{name.replace("__", "."): shape for name, shape in changes.items()},
    }  # fmt: skip
    generator = torch.Generator().manual_seed(1)
    return Files(
        {
            name: Tensor(name, torch.randn(shape, generator=generator))
            for name, shape in shapes.items()
            if shape is not None
        }
    )


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Load `Stored` from made-up files: (files, options…) → model."""

    def load(files: Any, dtype: str = "float32", progress: Any = None, **options: Any) -> Any:
        config = make_config(kv_cache_groups=ONE_GROUP, dtype=dtype, options=EngineOptions(**options))
        return load_model(config, files, progress)

    monkeypatch.setattr(loader, "make_model", lambda hf_config, group, max_model_len: Stored())
    return load


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_parameter_is_filled_in_the_compute_type(load: Any, dtype: torch.dtype) -> None:
    files = tensors()
    model = load(files, str(dtype).removeprefix("torch."))
    values = {name: tensor.values.to(dtype) for name, tensor in files.tensors.items()}
    assert torch.equal(model.model.embed_tokens.weight, values["transformer.embed_tokens.weight"])
    for kind in ("weight", "bias"):
        stacked = torch.cat([values[f"model.{part}.{kind}"] for part in PARTS])
        assert torch.equal(getattr(model.model.qkv_proj, kind), stacked)
    assert torch.equal(model.model.norm.weight, values["model.norm.weight"])
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.model.norm.table.dtype == torch.float32
    assert model.model.norm.table.tolist() == [0, 1, 2]
    assert not model.training
    assert not any(parameter.requires_grad for parameter in model.parameters())
    # Each tensor is decoded once, straight to the compute type.
    assert all(tensor.decoded == [dtype] for tensor in files.tensors.values())


def test_unused_tensors_and_stored_ties_are_passed_over(load: Any) -> None:
    files = tensors(lm_head__weight=(10, 4), model__rotary__inv_freq=(2,))
    model = load(files)
    assert torch.equal(model.lm_head.weight, files.tensors["transformer.embed_tokens.weight"].values)


def test_tensor_that_the_model_does_not_know_is_named(load: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Stored, "unused", ())
    load(tensors())
    with pytest.raises(ModelFileError, match=r"has unexpected tensor model\.rotary\.inv_freq"):
        load(tensors(model__rotary__inv_freq=(2,)))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model__norm__weight": None}, ["lacks tensor model.norm.weight"]),
        ({"model__k_proj__bias": None}, ["lacks tensor model.k_proj.bias"]),
        (
            {"model__k_proj__bias": None, "model__v_proj__bias": None, "model__norm__weight": None,
             "model__q_proj__weight": None},
            ["lacks tensors", "model.k_proj.bias", "and 1 more"],
        ),
        ({"model__surprise": (3,)}, ["unexpected tensor model.surprise"]),
        ({"model__norm__weight": (5,)}, ["model.norm.weight [5]", "model.norm.weight [4]"]),
        ({"model__norm__weight": (2, 2)}, ["[2, 2]", "[4]"]),
        ({"model__q_proj__weight": (4, 5)}, ["model.q_proj.weight [4, 5]", "model.qkv_proj.weight [8, 4]"]),
        ({"model__q_proj__weight": (6, 4)}, ["model.q_proj.weight [6, 4]", "[2, 4]", "[8, 4]"]),
        ({"model__q_proj__weight": ()}, ["model.q_proj.weight []"]),
    ],
)  # fmt: skip
def test_mismatch_of_files_and_model_names_tensors_and_shapes(load: Any, changes: Any, words: list[str]) -> None:
    files = tensors(**changes)
    with pytest.raises(ModelFileError) as raised:
        load(files)
    for word in words:
        assert word in str(raised.value)
    assert "\n" not in str(raised.value)
    assert not any(tensor.decoded for tensor in files.tensors.values()), "checked before anything is read"


def test_more_layers_than_tensors_are_refused_before_their_names_are_made(tmp_path: Path) -> None:
    path = make_tiny_directory(tmp_path / "model", num_hidden_layers=900)
    checkpoint = open_checkpoint(resolve_source(str(path)))
    model = ModelRegistry.make_model_config(checkpoint.hf_config)
    with pytest.raises(ModelFileError, match="has 900 layers, but the checkpoint has only 20 tensors"):
        loader.weigh(model, checkpoint.tensors)


def test_progress_counts_all_bytes(load: Any) -> None:
    calls: list[tuple[int, int]] = []
    files = tensors(lm_head__weight=(10, 4))
    load(files, progress=lambda stage, done, total: calls.append((done, total)))
    placed = sum(tensor.num_bytes for name, tensor in files.tensors.items() if name != "lm_head.weight")
    assert calls[-1] == (placed, placed)
    assert [done for done, _ in calls] == sorted(done for done, _ in calls)


def test_only_one_decoded_tensor_exists_beside_the_model(load: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    handed_out: list[weakref.ref[torch.Tensor]] = []

    def to_torch(self: Tensor, dtype: torch.dtype) -> torch.Tensor:
        assert not any(earlier() is not None for earlier in handed_out)
        decoded = self.values.to(dtype, copy=True)
        handed_out.append(weakref.ref(decoded))
        return decoded

    monkeypatch.setattr(Tensor, "to_torch", to_torch)
    load(tensors(), "bfloat16")
    assert len(handed_out) == len(tensors().tensors)


def test_dummy_weights_are_seeded_and_need_no_tensors(load: Any) -> None:
    first, again, other = (load(Files({}), load_format="dummy", seed=seed) for seed in (3, 3, 4))
    weight = first.model.qkv_proj.weight
    assert torch.equal(weight, again.model.qkv_proj.weight)
    assert not torch.equal(weight, other.model.qkv_proj.weight)
    assert weight.isfinite().all()
    assert weight.std() > 0
    assert first.model.norm.weight.tolist() == [1] * 4
    assert first.model.qkv_proj.bias.tolist() == [0] * 8
