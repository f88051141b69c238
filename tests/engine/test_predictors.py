"""Layers of models that predict further tokens: their guesses are those of a reference, and outputs stay the same."""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quire.drafts import drafting
from quire.drafts.executor_drafts import ExecutorDrafts
from quire.engine.llm_engine import LLMEngine
from quire.errors import ConfigError, ModelFileError
from quire.runtime import drafter, head_drafter
from quire.sampling_params import SamplingParams
from quire.types import Draft
from quire.weights.sources import ModelFiles
from quire_workshop.cli.quantize import open_source
from quire_workshop.gguf.quantize import quantize_gguf
from tests.engine.test_draft_model import drafts_of
from tests.engine.test_drafts import GREEDY, PARAMS, outputs_of
from tests.tiny_engine import VOCAB_SIZE, build, byte_tokenizer, prompt, torch, transformers, write_tiny_llama

safetensors = pytest.importorskip("safetensors.torch")
NUM_GUESSES = 3
PROMPTS = [prompt(3, 37), prompt(4, 9)]
SIZES = {
    "vocab_size": VOCAB_SIZE, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "max_position_embeddings": 512, "initializer_range": 0.3, "bos_token_id": 1,
    "eos_token_id": 2, "moe_intermediate_size": 32, "num_experts_per_tok": 2, "tie_word_embeddings": False,
}  # fmt: skip
DEEPSEEK = {
    **SIZES, "num_key_value_heads": 4, "q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16, "v_head_dim": 16, "n_routed_experts": 8, "n_shared_experts": 1, "n_group": 2,
    "topk_group": 1, "first_k_dense_replace": 1,
}  # fmt: skip
QWEN = {
    **SIZES, "num_key_value_heads": 2, "head_dim": 16, "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "num_experts": 4, "shared_expert_intermediate_size": 32,
}  # fmt: skip


GLM = {
    **SIZES, "num_key_value_heads": 2, "head_dim": 32, "use_qk_norm": True, "n_routed_experts": 8,
    "n_shared_experts": 1, "first_k_dense_replace": 1,
}  # fmt: skip


class Layer:
    """A predicting layer beside a model of Transformers, over whole sequences."""

    def __init__(self, model: Any, *, keeps_norm: bool, one: float) -> None:
        """`keeps_norm`: a position reads the other's values behind the norm. `one`: summand of norms' weights."""
        config, self.model, self.keeps_norm, self.one = model.config, model, keeps_norm, one
        self.layer = type(model.model.layers[-1])(config, config.num_hidden_layers - 1).eval()
        for parameter in self.layer.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
        width = config.hidden_size
        self.norms = {name: torch.rand(width) + 0.5 - one for name in ("embedding", "hidden", "last")}
        self.fc = torch.randn(width, 2 * width) * 0.2

    def norm(self, name: str, x: Any) -> Any:
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.model.config.rms_norm_eps)
        return x * scale * (self.norms[name] + self.one)

    def run(self, tokens: list[int], hidden: Any) -> tuple[Any, int]:
        """Return what the next layer reads, and the guess behind the last position. `tokens`: one ahead of `hidden`."""
        following = self.model.model.embed_tokens(torch.tensor([tokens]))
        joined = torch.cat((self.norm("embedding", following), self.norm("hidden", hidden)), -1)
        found = self.run_layer(joined @ self.fc.T)
        normed = self.norm("last", found)
        return normed if self.keeps_norm else found, int(self.model.lm_head(normed[0, -1]).argmax())

    def run_layer(self, x: Any) -> Any:
        length = x.shape[1]
        positions = torch.arange(length)[None]
        mask = torch.full((length, length), float("-inf")).triu(1)[None, None]
        angles = self.model.model.rotary_emb(x, positions)
        found = self.layer(x, attention_mask=mask, position_ids=positions, position_embeddings=angles)
        return found[0] if isinstance(found, tuple) else found


class Reference:
    """A model of Transformers and its predicting layers."""

    def __init__(self, model: Any, *, keeps_norm: bool, one: float, num_layers: int = 1) -> None:
        torch.manual_seed(7)
        model.config._attn_implementation = "eager"
        self.model = model.eval().float()
        self.layers = [Layer(self.model, keeps_norm=keeps_norm, one=one) for _ in range(num_layers)]

    def guess(self, token_ids: list[int], count: int) -> list[int]:
        """The tokens that the layers predict behind these: one each, and the last layer all further ones."""
        known = list(token_ids)
        with torch.no_grad():
            hidden = self.model.model(torch.tensor([token_ids])).last_hidden_state[:, :-1]
            for index in range(count):
                layer = self.layers[min(index, len(self.layers) - 1)]
                ahead = min(index, len(self.layers) - 1) + 1
                found, guess = layer.run(known[ahead:], hidden)
                known.append(guess)
                hidden = found if index + 1 < len(self.layers) else torch.cat((hidden, found[:, -1:]), 1)
        return known[len(token_ids) :]


def write(path: Path, reference: Reference, names: list[tuple[str, dict[str, str]]], change: Any) -> Path:
    """Write the model and its layers under a checkpoint's `names`: of each layer, and of what is beside it."""
    change(reference)
    reference.model.save_pretrained(path)
    byte_tokenizer().save(str(path / "tokenizer.json"))
    tensors: dict[str, Any] = {}
    for layer, (prefix, others) in zip(reference.layers, names, strict=True):
        tensors |= {f"{prefix}.{name}": value for name, value in layer.layer.state_dict().items()}
        tensors |= {others["fc"]: layer.fc} | {others[name]: value for name, value in layer.norms.items()}
    file = path / "model.safetensors"
    stored = safetensors.load_file(file) | {name: value.contiguous().clone() for name, value in tensors.items()}
    safetensors.save_file(stored, file, metadata={"format": "pt"})
    return path


def behind_the_model(path: Path, model: Any, change: Any, num_layers: int = 1) -> tuple[Path, Reference]:
    """Write a model whose predicting layers have the indices behind its own."""
    reference = Reference(model, keeps_norm=False, one=0.0, num_layers=num_layers)
    names = []
    for index in range(num_layers):
        at = f"model.layers.{model.config.num_hidden_layers + index}"
        names.append((at, {"fc": f"{at}.eh_proj.weight", "embedding": f"{at}.enorm.weight",
                           "hidden": f"{at}.hnorm.weight", "last": f"{at}.shared_head.norm.weight"}))  # fmt: skip
    return write(path, reference, names, change), reference


def unchanged(_: Any) -> None:
    """Leave the random weights as they are."""


def deepseek(path: Path, change: Callable[[Any], None] = unchanged) -> tuple[Path, Reference]:
    torch.manual_seed(0)
    config = transformers.DeepseekV3Config(**DEEPSEEK, num_nextn_predict_layers=1)
    return behind_the_model(path, transformers.DeepseekV3ForCausalLM(config), change)


def deepseek_of_three(path: Path, change: Callable[[Any], None] = unchanged) -> tuple[Path, Reference]:
    torch.manual_seed(0)
    config = transformers.DeepseekV3Config(**DEEPSEEK, num_nextn_predict_layers=3)
    return behind_the_model(path, transformers.DeepseekV3ForCausalLM(config), change, 3)


def glm(path: Path, change: Callable[[Any], None] = unchanged) -> tuple[Path, Reference]:
    torch.manual_seed(0)
    config = transformers.Glm4MoeConfig(**GLM)
    return behind_the_model(path, transformers.Glm4MoeForCausalLM(config), change)


def qwen(path: Path, change: Callable[[Any], None] = unchanged) -> tuple[Path, Reference]:
    torch.manual_seed(0)
    config = transformers.Qwen3NextConfig(**QWEN)
    reference = Reference(transformers.Qwen3NextForCausalLM(config), keeps_norm=True, one=1.0)
    names = {"fc": "mtp.fc.weight", "embedding": "mtp.pre_fc_norm_embedding.weight",
             "hidden": "mtp.pre_fc_norm_hidden.weight", "last": "mtp.norm.weight"}  # fmt: skip
    return write(path, reference, [("mtp.layers.0", names)], change), reference


MODELS = {"deepseek": deepseek, "deepseek of three": deepseek_of_three, "glm": glm, "qwen": qwen}


@pytest.fixture(autouse=True)
def always_guesses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guess behind every step, however unlikely, and verify all of it."""
    monkeypatch.setattr(drafting.StepTimes, "seconds", lambda self, num_rows: 1.0)
    monkeypatch.setattr(drafting, "MIN_GAIN", 0.0)
    monkeypatch.setattr(ExecutorDrafts, "choose", lambda *_: NUM_GUESSES)
    monkeypatch.setattr("quire.drafts.suffix.SuffixProposer.propose", lambda *_: Draft())
    monkeypatch.setattr(drafter, "MIN_REACH", 0.0)


def build_with(model: Path, speculative: str = "mtp", **options: Any) -> LLMEngine:
    return build(model, batch_invariant=True, speculative=speculative, max_num_batched_tokens=32, **options)


def ask_at_every(monkeypatch: pytest.MonkeyPatch, num_steps: int) -> None:
    """Ask for guesses behind one step of `num_steps`."""
    calls = itertools.count(1)
    monkeypatch.setattr(ExecutorDrafts, "choose", lambda *_: 0 if next(calls) % num_steps else NUM_GUESSES)


@pytest.mark.parametrize(
    ("name", "num_steps"), [*((name, 1) for name in MODELS), ("deepseek of three", 7), ("qwen", 7)]
)
def test_guesses_are_those_of_the_reference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, num_steps: int
) -> None:
    ask_at_every(monkeypatch, num_steps)
    path, reference = MODELS[name](tmp_path / name)
    engine, known = build_with(path, multi_step_decode=1), {f"r{index}": list(ids) for index, ids in enumerate(PROMPTS)}
    steps: list[Any] = []
    engine.watch(lambda _, result: steps.append(result))
    for request_id, ids in known.items():
        engine.add_request(request_id, {"prompt_token_ids": ids}, GREEDY)
    while engine.has_unfinished_requests():
        engine.step()
    num_compared = num_right = 0
    guessed: dict[str, tuple[int, ...]] = {}
    for result in steps:
        for item in result.results:
            before = guessed.pop(item.request_id, ())
            num_right += min(len(item.token_ids) - 1, len(before)) if before else 0
            known[item.request_id] += item.token_ids
            if item.draft is not None:
                expected = reference.guess(known[item.request_id], NUM_GUESSES)
                assert list(item.draft.token_ids) == expected[: len(item.draft.token_ids)]
                guessed[item.request_id] = item.draft.token_ids
                num_compared += len(item.draft.token_ids)
    assert num_compared > 100 / num_steps
    assert drafts_of(engine)[1] == num_right


def test_layers_compute_nothing_while_no_guesses_are_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ExecutorDrafts, "choose", lambda *_: 0)
    path, _ = deepseek_of_three(tmp_path / "model")
    engine, passes = build(path, speculative="mtp", max_num_batched_tokens=64, max_num_seqs=64), list[int]()
    run_layer = head_drafter.HeadDrafter._run_layer

    def counted(self: Any, index: int) -> None:
        passes.append(int(self._pass[2].sum()))
        run_layer(self, index)

    monkeypatch.setattr(head_drafter.HeadDrafter, "_run_layer", counted)
    long = {"max_tokens": 100, "ignore_eos": True, "temperature": 0.0}
    outputs_of(engine, PROMPTS[:1], SamplingParams(**long))
    assert passes == [37] * 3, "the prompt's alone"


def test_request_that_was_left_gets_no_guesses_and_its_successor_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = itertools.chain([0] * 12, itertools.repeat(NUM_GUESSES))
    monkeypatch.setattr(ExecutorDrafts, "choose", lambda *_: next(asked))
    monkeypatch.setattr(head_drafter, "MAX_WAITING", 10)
    path, _ = deepseek_of_three(tmp_path / "model", make_right)
    engine, drafts = build_with(path, multi_step_decode=1), list[Any]()
    engine.watch(lambda _, result: drafts.extend(item.draft for item in result.results))
    outputs_of(engine, PROMPTS[:1], GREEDY)
    assert drafts
    assert not any(drafts)
    outputs_of(engine, PROMPTS[:1], GREEDY)
    num_verified, num_right = drafts_of(engine)
    assert num_verified == num_right > 10


@pytest.mark.parametrize("name", MODELS)
def test_file_guesses_as_the_directory(tmp_path: Path, name: str) -> None:
    path, _ = MODELS[name](tmp_path / name)
    file = tmp_path / "model.gguf"
    quantize_gguf(open_source(ModelFiles("tiny", path, "hf", "test")), file, "F32")
    guessed: list[list[Any]] = []
    for model in (path, file):
        engine, found = build_with(model), list[Any]()
        engine.watch(
            lambda _, result, found=found: found.extend(
                (item.token_ids, item.draft and item.draft.token_ids) for item in result.results
            )
        )
        outputs_of(engine, PROMPTS, GREEDY)
        guessed.append(found)
    assert guessed[0] == guessed[1]
    assert sum(len(draft or ()) for _, draft in guessed[0]) > 100


@pytest.mark.parametrize("params", [PARAMS[name] for name in ("greedy", "drawn", "grammar", "several")])
@pytest.mark.parametrize("name", MODELS)
def test_outputs_are_the_same_with_a_predictor(tmp_path: Path, name: str, params: Any) -> None:
    path, _ = MODELS[name](tmp_path / name)
    without, engine = build_with(path, "off"), build_with(path)
    for _ in range(2):
        assert outputs_of(engine, PROMPTS, params) == outputs_of(without, PROMPTS, params)
    assert drafts_of(engine)[0] > 0


def make_right(reference: Reference) -> None:
    """Let the next token depend on the newest alone, and the layer predict it from that one's embedding."""
    for layer in (*reference.model.model.layers, *(each.layer for each in reference.layers)):
        for name, parameter in layer.named_parameters():
            if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight", "down_proj")):
                torch.nn.init.zeros_(parameter)
    for each in reference.layers:
        width = each.fc.shape[0]
        each.fc = torch.cat((torch.eye(width), torch.zeros(width, width)), 1)
        each.norms = {name: torch.ones(width) - each.one for name in each.norms}
        each.norms["last"] = reference.model.model.norm.weight.detach().clone()


@pytest.mark.parametrize("name", MODELS)
def test_right_guesses_are_all_accepted(tmp_path: Path, name: str) -> None:
    path, _ = MODELS[name](tmp_path / name, make_right)
    engine, without = build_with(path), build_with(path, "off")
    assert outputs_of(engine, PROMPTS, GREEDY) == outputs_of(without, PROMPTS, GREEDY)
    num_verified, num_right = drafts_of(engine)
    assert num_right == num_verified > 60


def test_predictor_works_on_two_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # the other rank is a process of its own, and must end drafts where this one does
    monkeypatch.setattr(ExecutorDrafts, "choose", lambda *_: NUM_GUESSES)
    monkeypatch.setattr(drafting, "MIN_GAIN", 0.0)
    path, _ = deepseek(tmp_path / "model", make_right)
    engine = build_with(path, tensor_parallel_size=2)
    try:
        outputs_of(engine, PROMPTS, GREEDY)
        num_verified, num_right = drafts_of(engine)
        assert num_right == num_verified > 10
    finally:
        engine.shutdown()


def test_models_without_the_layer_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="which LlamaForCausalLM does not have"):
        build_with(write_tiny_llama(tmp_path / "llama"))
    path, _ = qwen(tmp_path / "qwen")
    stored = safetensors.load_file(path / "model.safetensors")
    kept = {name: value for name, value in stored.items() if not name.startswith("mtp.")}
    safetensors.save_file(kept, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelFileError, match=r"lacks tensors.*mtp"):
        build_with(path)
