"""EAGLE-3 heads from their own directories: guesses are those of a reference, and outputs stay the same."""

import json
from pathlib import Path
from typing import Any

import pytest

from quire.drafts import drafting
from quire.drafts.executor_drafts import ExecutorDrafts
from quire.errors import ConfigError, ModelFileError, UnsupportedModelError
from quire.runtime import drafter
from quire.types import Draft
from tests.engine.test_draft_model import drafts_of, write_llama
from tests.engine.test_drafts import GREEDY, PARAMS, outputs_of
from tests.engine.test_predictors import NUM_GUESSES, PROMPTS, build_with, safetensors
from tests.tiny_engine import VOCAB_SIZE, build, torch, transformers, write_tiny_hybrid

NUM_LAYERS, WIDTH, NUM_DRAFT_TOKENS = 8, 64, 200
HEAD = {
    "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "vocab_size": VOCAB_SIZE,
    "draft_vocab_size": NUM_DRAFT_TOKENS, "hidden_size": WIDTH, "intermediate_size": 96, "num_hidden_layers": 1,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": False,
}  # fmt: skip

UNFIT = {
    '{"fc_norm": true}': "EAGLE-3 head with a config that has fc_norm=True, which .*: --speculative auto",
    '{"use_sliding_window": true}': "use_sliding_window=True: --speculative auto",
    '{"eagle_config": 3}': "eagle_config=3, which is not an object",
    '{"eagle_config": {"use_last_layernorm": false}}': "has use_last_layernorm=False",
    '{"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 4, 2]}}': r"\[0, 4, 2\], which is not 3 ascending",
    '{"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 7]}}': r"\[1, 3, 7\], and the model has 8 layers",
}
"""Fields of heads that are refused, and the messages."""


class Reference:
    """A head over whole sequences."""

    def __init__(self, model: Any, layers: tuple[int, ...] = (2, NUM_LAYERS // 2, NUM_LAYERS - 3)) -> None:
        """`layers`: those whose inputs it reads."""
        torch.manual_seed(11)
        self.model, self.layers = model.eval().float(), layers
        config = transformers.LlamaConfig(**{key: value for key, value in HEAD.items() if key != "architectures"})
        config._attn_implementation = "eager"
        llama = transformers.models.llama.modeling_llama
        self.attention = llama.LlamaAttention(config, 0).eval()
        for name, rows in (("q_proj", 128), ("k_proj", 64), ("v_proj", 64)):
            setattr(self.attention, name, torch.nn.Linear(2 * WIDTH, rows, bias=False))
        self.mlp, self.rotary = llama.LlamaMLP(config), llama.LlamaRotaryEmbedding(config)
        for parameter in (*self.attention.parameters(), *self.mlp.parameters()):
            torch.nn.init.normal_(parameter, std=0.2)
        names = ("input_layernorm", "hidden_norm", "post_attention_layernorm", "norm")
        self.norms = {name: torch.rand(WIDTH) + 0.5 for name in names}
        self.fc, self.lm_head = torch.randn(WIDTH, 3 * WIDTH) * 0.1, torch.randn(NUM_DRAFT_TOKENS, WIDTH)
        ids = torch.randperm(VOCAB_SIZE)[:NUM_DRAFT_TOKENS].sort().values
        self.d2t = ids - torch.arange(NUM_DRAFT_TOKENS)

    def norm(self, name: str, x: Any) -> Any:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * self.norms[name]

    def guess(self, token_ids: list[int], count: int) -> list[int]:
        tokens, guesses = torch.tensor([token_ids]), []
        with torch.no_grad():
            states = self.model.model(tokens, output_hidden_states=True).hidden_states
            hidden = (torch.cat([states[at] for at in self.layers], -1) @ self.fc.T)[:, :-1]
            following = self.model.model.embed_tokens(tokens[:, 1:])
            for _ in range(count):
                found = self.run_layer(following, hidden)
                best = int((self.norm("norm", found[0, -1]) @ self.lm_head.T).argmax())
                guesses.append(best + int(self.d2t[best]))
                hidden = torch.cat((hidden, found[:, -1:]), 1)
                following = torch.cat((following, self.model.model.embed_tokens(torch.tensor([[guesses[-1]]]))), 1)
        return guesses

    def run_layer(self, embedding: Any, x: Any) -> Any:
        length = x.shape[1]
        mask = torch.full((length, length), float("-inf")).triu(1)[None, None]
        angles = self.rotary(x, torch.arange(length)[None])
        joined = torch.cat((self.norm("input_layernorm", embedding), self.norm("hidden_norm", x)), -1)
        x = x + self.attention(joined, position_embeddings=angles, attention_mask=mask)[0]
        return x + self.mlp(self.norm("post_attention_layernorm", x))

    def write(self, path: Path, **fields: Any) -> Path:
        path.mkdir()
        (path / "config.json").write_text(json.dumps(HEAD | fields))
        tensors = {f"midlayer.self_attn.{name}": value for name, value in self.attention.state_dict().items()}
        tensors |= {f"midlayer.mlp.{name}": value for name, value in self.mlp.state_dict().items()}
        tensors |= {f"midlayer.{name}.weight": value for name, value in self.norms.items()}
        tensors["norm.weight"] = tensors.pop("midlayer.norm.weight")
        targets = torch.zeros(VOCAB_SIZE, dtype=torch.bool)
        targets[self.d2t + torch.arange(NUM_DRAFT_TOKENS)] = True
        tensors |= {"fc.weight": self.fc, "lm_head.weight": self.lm_head, "d2t": self.d2t, "t2d": targets}
        contiguous = {name: value.detach().contiguous().clone() for name, value in tensors.items()}
        safetensors.save_file(contiguous, path / "model.safetensors", metadata={"format": "pt"})
        return path


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("eagle") / "model", num_hidden_layers=NUM_LAYERS, initializer_range=0.2)


@pytest.fixture(scope="module")
def reference(model: Path) -> Reference:
    return Reference(transformers.AutoModelForCausalLM.from_pretrained(model))


@pytest.fixture
def head(reference: Reference, tmp_path: Path) -> Path:
    return reference.write(tmp_path / "head")


@pytest.fixture(autouse=True)
def always_guesses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guess behind every step, however unlikely, and verify all of it."""
    monkeypatch.setattr(drafting.StepTimes, "seconds", lambda self, num_rows: 1.0)
    monkeypatch.setattr(drafting, "MIN_GAIN", 0.0)
    monkeypatch.setattr(ExecutorDrafts, "choose", lambda *_: NUM_GUESSES)
    monkeypatch.setattr("quire.drafts.suffix.SuffixProposer.propose", lambda *_: Draft())
    monkeypatch.setattr(drafter, "MIN_REACH", 0.0)


def test_guesses_are_those_of_the_reference(model: Path, head: Path, reference: Reference) -> None:
    check_guesses(model, head, reference)


def test_head_reads_the_layers_that_its_config_names(model: Path, tmp_path: Path) -> None:
    other = Reference(transformers.AutoModelForCausalLM.from_pretrained(model), (1, 3, 7))
    own = {"eagle_aux_hidden_state_layer_ids": [0, 2, 6], "use_aux_hidden_state": True, "use_last_layernorm": True}
    # Heads for Qwen have fields of windows that none has.
    fields = {"max_window_layers": 36, "use_sliding_window": False, "sliding_window": None}
    check_guesses(model, other.write(tmp_path / "other", eagle_config=own, **fields), other)


def check_guesses(model: Path, head: Path, reference: Reference) -> None:
    engine = build_with(model, "auto", draft_model=str(head))
    assert engine.config.speculative == "eagle"
    known, steps, num_compared = {f"r{index}": list(ids) for index, ids in enumerate(PROMPTS)}, list[Any](), 0
    engine.watch(lambda _, result: steps.append(result))
    for request_id, ids in known.items():
        engine.add_request(request_id, {"prompt_token_ids": ids}, GREEDY)
    while engine.has_unfinished_requests():
        engine.step()
    for result in steps:
        for item in result.results:
            known[item.request_id] += item.token_ids
            if item.draft is not None:
                expected = reference.guess(known[item.request_id], NUM_GUESSES)
                assert list(item.draft.token_ids) == expected[: len(item.draft.token_ids)]
                num_compared += len(item.draft.token_ids)
    assert num_compared > 100


@pytest.mark.parametrize("params", [PARAMS[name] for name in ("greedy", "drawn", "grammar", "several")])
def test_outputs_are_the_same_with_a_head(model: Path, head: Path, params: Any) -> None:
    without, engine = build_with(model, "off"), build_with(model, "eagle", draft_model=str(head))
    for _ in range(2):
        assert outputs_of(engine, PROMPTS, params) == outputs_of(without, PROMPTS, params)
    assert drafts_of(engine)[0] > 0


def test_outputs_are_the_same_on_two_ranks(model: Path, head: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drafter, "MIN_REACH", 0.15)  # that of the other rank's process
    without = outputs_of(build_with(model, "off", tensor_parallel_size=2), PROMPTS, GREEDY)
    engine = build_with(model, "eagle", draft_model=str(head), tensor_parallel_size=2)
    try:
        assert outputs_of(engine, PROMPTS, GREEDY) == without
        assert drafts_of(engine)[0] > 0
    finally:
        engine.shutdown()


def test_heads_that_do_not_fit_are_refused(model: Path, head: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="add --draft-model"):
        build_with(model, "eagle")
    with pytest.raises(ConfigError, match="contradicts speculative='draft': --speculative eagle fits"):
        build_with(model, "draft", draft_model=str(head))
    narrow = write_llama(tmp_path / "narrow", hidden_size=32, num_hidden_layers=NUM_LAYERS)
    with pytest.raises(ConfigError, match="hidden size 64, and the model has 300 and 32"):
        build_with(narrow, "eagle", draft_model=str(head))
    with pytest.raises(ConfigError, match="hidden states of Llama's layers, 4 at least"):
        build_with(write_llama(tmp_path / "shallow"), "eagle", draft_model=str(head))
    with pytest.raises(ConfigError, match="EAGLE-3 head"):
        build(write_tiny_hybrid(tmp_path / "hybrid"), speculative="eagle", draft_model=str(head))
    for fields, message in UNFIT.items():
        config = HEAD | json.loads(fields)
        (head / "config.json").write_text(json.dumps(config))
        with pytest.raises((ModelFileError, UnsupportedModelError), match=message):
            build_with(model, "eagle", draft_model=str(head))
    (head / "config.json").write_text(json.dumps(HEAD))
    tensors = safetensors.load_file(head / "model.safetensors")
    safetensors.save_file({name: value for name, value in tensors.items() if name != "d2t"}, head / "model.safetensors")
    with pytest.raises(ModelFileError, match=r"needs the tensor d2t, I64 \[200\]; the file lacks it"):
        build_with(model, "eagle", draft_model=str(head))
