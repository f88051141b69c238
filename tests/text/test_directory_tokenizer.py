import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from tokenizers import pre_tokenizers

from quire.errors import ModelFileError, UnsupportedModelError
from quire.text.tokenizer import Tokenizer, load_tokenizer_directory
from tests.text.builders import TEXTS, byte_level_backend, byte_level_metadata


def write(path: Path, **files: Any) -> Path:
    """Write files into `path`: `a__json={…}` becomes a.json, text stays text."""
    for name, content in files.items():
        text = content if isinstance(content, str | bytes) else json.dumps(content)
        (path / name.replace("__", ".")).write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def write_tokenizer(path: Path, **files: Any) -> Path:
    return write(path, tokenizer__json=byte_level_backend().to_str(), **files)


def write_vocabulary(path: Path, **files: Any) -> Path:
    metadata = byte_level_metadata()
    vocab = {token: index for index, token in enumerate(metadata["tokenizer.ggml.tokens"])}
    merges = "\n".join(["#version: 0.2", *metadata["tokenizer.ggml.merges"], ""])
    return write(path, vocab__json=vocab, merges__txt=merges, **files)


def transformers_tokenizer(path: Path) -> Any:
    transformers = pytest.importorskip("transformers")
    return transformers.AutoTokenizer.from_pretrained(path)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer_directory(write_tokenizer(tmp_path_factory.mktemp("plain")))


@given(text=TEXTS)
def test_tokenizer_json_is_used_as_it_is(plain: Tokenizer, text: str) -> None:
    ids = plain.encode(text)
    assert ids == byte_level_backend().encode(text).ids
    assert plain.decode(ids, skip_special_tokens=False) == text


@pytest.fixture(scope="module", params=["GPT2Tokenizer", "Qwen2TokenizerFast"])
def from_vocabulary(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Tokenizer, Any]:
    """Our tokenizer and Transformers' of the same vocab.json and merges.txt."""
    roles = dict.fromkeys(("bos_token", "eos_token", "unk_token", "pad_token"), "<|end|>")
    config = {"tokenizer_class": request.param, "additional_special_tokens": ["<|user|>"], **roles}
    path = write_vocabulary(tmp_path_factory.mktemp("vocabulary"), tokenizer_config__json=config)
    return load_tokenizer_directory(path), transformers_tokenizer(path)


@given(text=TEXTS)
def test_vocabulary_and_merges_equal_transformers(from_vocabulary: tuple[Tokenizer, Any], text: str) -> None:
    ours, theirs = from_vocabulary
    assert ours.encode(text) == theirs(text)["input_ids"]


TURNS = ["<|im_start|>", "<|im_end|>"]
TURN_TEXTS = [
    "<|im_start|>user\nhi<|im_end|>",
    " a <|im_start|>  b",
    "hi there",
    "it's 12 345",
    "a<|im_end|> b <|user|>",
]


@pytest.mark.parametrize("adds_space", [None, False, True])
@pytest.mark.parametrize("named_in", [None, "tokenizer_config__json", "special_tokens_map__json"])
@pytest.mark.parametrize("tokenizer_class", ["GPT2Tokenizer", "Qwen2Tokenizer"])
def test_added_tokens_json_and_added_spaces_equal_transformers(
    tmp_path: Path, tokenizer_class: str, named_in: str | None, adds_space: bool | None
) -> None:
    size = byte_level_backend().get_vocab_size()
    files: dict[str, Any] = {"tokenizer_config__json": {"tokenizer_class": tokenizer_class}}
    if adds_space is not None:
        files["tokenizer_config__json"]["add_prefix_space"] = adds_space
    files["special_tokens_map__json"] = dict.fromkeys(("bos_token", "eos_token", "unk_token", "pad_token"), "<|end|>")
    if named_in is not None:
        files[named_in]["additional_special_tokens"] = TURNS
    write_vocabulary(tmp_path, added_tokens__json={token: size + index for index, token in enumerate(TURNS)}, **files)
    ours, theirs = load_tokenizer_directory(tmp_path), transformers_tokenizer(tmp_path)
    for text in TURN_TEXTS:
        assert ours.encode(text) == theirs(text)["input_ids"]
    assert ours.encode("<|im_start|>") == [size]
    assert ours.special_tokens.issuperset(theirs.all_special_tokens)
    assert set(TURNS).issubset(ours.special_tokens) == (named_in is not None)


@pytest.mark.parametrize("adds_space", [False, True])
def test_added_space_of_the_configuration_replaces_that_of_tokenizer_json(tmp_path: Path, adds_space: bool) -> None:
    for name, steps in (("one", None), ("several", [pre_tokenizers.Digits(individual_digits=True)])):
        backend = tokenizers.Tokenizer.from_str(byte_level_backend().to_str())
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=not adds_space)
        backend.pre_tokenizer = byte_level if steps is None else pre_tokenizers.Sequence([*steps, byte_level])
        (tmp_path / name).mkdir()
        config = {"tokenizer_class": "GPT2Tokenizer", "add_prefix_space": adds_space, **ROLES}
        write(tmp_path / name, tokenizer__json=backend.to_str(), tokenizer_config__json=config)
        ours = load_tokenizer_directory(tmp_path / name)
        assert (ours.encode("the") == ours.encode(" the")) == adds_space
        if steps is None:
            assert ours.encode("the fox") == transformers_tokenizer(tmp_path / name)("the fox")["input_ids"]


@pytest.mark.parametrize("model_type", ["qwen2", "qwen3", "gpt2"])
def test_vocabulary_without_a_class_has_that_of_the_model_type(tmp_path: Path, model_type: str) -> None:
    write_vocabulary(
        tmp_path, config__json={"model_type": model_type}, special_tokens_map__json=dict.fromkeys(
            ("bos_token", "eos_token", "unk_token", "pad_token"), "<|end|>"
        ),
    )  # fmt: skip
    ours, theirs = load_tokenizer_directory(tmp_path), transformers_tokenizer(tmp_path)
    for text in ("e\u0301 it'LL 12 345", *TURN_TEXTS):
        assert ours.encode(text) == theirs(text)["input_ids"]


def test_added_tokens_json_that_does_not_belong_to_the_vocabulary_is_refused(tmp_path: Path) -> None:
    write_vocabulary(tmp_path, added_tokens__json={"<|im_start|>": 9999})
    with pytest.raises(ModelFileError, match=r"'<\|im_start\|>' the id 9999, but in the vocabulary it has"):
        load_tokenizer_directory(tmp_path)


@pytest.mark.parametrize(
    ("config", "added", "expected"),
    [
        ({"eos_token": "<|user|>"}, {}, {0, 1}),  # <|end|> is one by its text
        ({"eos_token": "<|user|>", "eot_token": "<turn>"}, {"<turn>": True}, {0, 1, 538}),
        ({}, {"<|im_end|>": False, "</s>": False, "<eos>": True}, {0, 538, 540}),
        ({}, {"<|return|>": True, "<|call|>": True}, {538, 539}),
    ],
)
def test_ends_are_named_or_known_by_their_texts(
    tmp_path: Path, config: dict[str, str], added: dict[str, bool], expected: set[int]
) -> None:
    entries = {
        538 + index: {"content": text, "special": special} for index, (text, special) in enumerate(added.items())
    }
    write_tokenizer(tmp_path, tokenizer_config__json={**config, "added_tokens_decoder": entries})
    assert load_tokenizer_directory(tmp_path).end_token_ids == expected


FLAGS = [({}, False, False), ({"add_bos_token": True}, True, False), ({"add_eos_token": True}, False, True)]
ROLES = {"bos_token": {"__type": "AddedToken", "content": "<|end|>", "lstrip": False}, "eos_token": "<|user|>"}


@pytest.mark.parametrize(("flags", "adds_bos", "adds_eos"), FLAGS)
@pytest.mark.parametrize("tokenizer_class", ["LlamaTokenizerFast", "GPT2Tokenizer"])
def test_bos_and_eos_follow_the_flags(
    tmp_path: Path, tokenizer_class: str, flags: dict[str, bool], adds_bos: bool, adds_eos: bool
) -> None:
    config = {"tokenizer_class": tokenizer_class, **ROLES, **flags}
    is_llama = tokenizer_class.startswith("Llama")
    (write_tokenizer if is_llama else write_vocabulary)(tmp_path, tokenizer_config__json=config)
    tokenizer = load_tokenizer_directory(tmp_path)
    letter = byte_level_backend().encode("h").ids
    adds_bos |= is_llama and bool(flags)  # the class's default once the flags decide
    assert tokenizer.encode("h") == [0] * adds_bos + letter + [1] * adds_eos
    assert tokenizer.encode("h", add_special_tokens=False) == letter
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 1)
    if not is_llama:
        assert tokenizer.encode("h") == transformers_tokenizer(tmp_path)("h")["input_ids"]


@pytest.mark.parametrize(("flags", "adds_bos", "adds_eos"), FLAGS)
def test_tokenizer_json_decides_for_other_classes(
    tmp_path: Path, flags: dict[str, bool], adds_bos: bool, adds_eos: bool
) -> None:
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **ROLES, **flags}
    tokenizer = load_tokenizer_directory(write_tokenizer(tmp_path, tokenizer_config__json=config))
    assert tokenizer.encode("h") == transformers_tokenizer(tmp_path)("h")["input_ids"]


def test_special_tokens_map_is_read_where_the_configuration_is_silent(tmp_path: Path) -> None:
    write_tokenizer(
        tmp_path,
        special_tokens_map__json={"bos_token": "<|user|>", "eos_token": {"content": "<|user|>"}},
        tokenizer_config__json={"eos_token": "<|end|>"},
    )
    tokenizer = load_tokenizer_directory(tmp_path)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 0)


def test_truncation_and_padding_of_the_file_are_ignored(tmp_path: Path) -> None:
    backend = json.loads(byte_level_backend().to_str())
    backend["truncation"] = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    backend["padding"] = {
        "strategy": {"Fixed": 9}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0, "pad_type_id": 0,
        "pad_token": "<|end|>",
    }  # fmt: skip
    tokenizer = load_tokenizer_directory(write(tmp_path, tokenizer__json=backend))
    assert tokenizer.encode("abcdef") == byte_level_backend().encode("abcdef").ids


def test_added_tokens_of_the_configuration(tmp_path: Path) -> None:
    size = byte_level_backend().get_vocab_size()
    entries = {
        str(size): {"content": "<tool>", "special": True},
        str(size + 1): {"content": "<code>", "special": False},
    }
    write_tokenizer(tmp_path, tokenizer_config__json={"added_tokens_decoder": entries})
    tokenizer = load_tokenizer_directory(tmp_path)
    assert tokenizer.encode("<tool><code>") == [size, size + 1]
    assert tokenizer.decode([size, size + 1]) == "<code>"
    assert tokenizer.vocab_size == size + 2


def test_role_outside_the_vocabulary_is_ignored(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, tokenizer_config__json={"pad_token": "[PAD]", "eos_token": "[EOS]", "bos_token": None})
    tokenizer = load_tokenizer_directory(tmp_path)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (None, None)
    assert tokenizer.vocab_size == byte_level_backend().get_vocab_size()


def test_chat_templates(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "D"}, {"name": "rag", "template": "R"}]
    write_tokenizer(tmp_path, chat_template__json={"chat_template": "json"})
    assert load_tokenizer_directory(tmp_path).chat_template == "json"
    tokenizer = load_tokenizer_directory(write(tmp_path, tokenizer_config__json={"chat_template": named}))
    assert tokenizer.chat_template == "D"
    assert tokenizer.chat_templates == {"default": "D", "rag": "R"}
    write(tmp_path, tokenizer_config__json={"chat_template": "text"})
    assert load_tokenizer_directory(tmp_path).chat_template == "text"
    write(tmp_path, chat_template__jinja="from a file")
    (tmp_path / "additional_chat_templates").mkdir()
    write(tmp_path / "additional_chat_templates", tool_use__jinja="tools")
    tokenizer = load_tokenizer_directory(tmp_path)
    assert tokenizer.chat_template == "from a file"
    assert tokenizer.chat_templates == {"default": "from a file", "tool_use": "tools"}
    (tmp_path / "chat_template.jinja").unlink()
    assert load_tokenizer_directory(tmp_path).chat_templates == {"default": "text", "tool_use": "tools"}


BAD_FILES = [
    ({"tokenizer_config__json": "{"}, "tokenizer_config.json: not valid JSON"),
    ({"tokenizer_config__json": "[1]"}, "tokenizer_config.json: not a JSON object but a list"),
    ({"tokenizer_config__json": b"{\xff}"}, "tokenizer_config.json: not valid JSON: 'utf-8' codec"),
    ({"tokenizer__json": "{}"}, "tokenizer.json: damaged"),
    ({"tokenizer__json": "not json"}, "tokenizer.json: damaged"),
    ({"tokenizer_config__json": {"chat_template": 3}}, "chat_template is neither"),
    ({"tokenizer_config__json": {"chat_template": [{"name": "x"}]}}, "chat_template is neither"),
    ({"tokenizer_config__json": {"added_tokens_decoder": [1]}}, "added_tokens_decoder is a list, not a dict"),
    ({"tokenizer_config__json": {"additional_special_tokens": 5}}, "additional_special_tokens is a int, not a list"),
    ({"tokenizer_config__json": {"added_tokens_decoder": {"x": {}}}}, "added_tokens_decoder has the entry 'x'"),
    (
        {"tokenizer_config__json": {"added_tokens_decoder": {"\u00b2": "x"}}},
        "added_tokens_decoder has the entry '\u00b2'",
    ),
    (
        {"tokenizer_config__json": {"added_tokens_decoder": {"9" * 5000: "x"}}},
        "added_tokens_decoder has the entry '9999",
    ),
    ({"tokenizer_config__json": {"added_tokens_decoder": {"7": "\ud800"}}}, "tokenizer_config.json: damaged"),
    ({"tokenizer_config__json": '{"eos_token": ' + "9" * 5000 + "}"}, "tokenizer_config.json: not valid JSON"),
    ({"special_tokens_map__json": "[" * 50_000}, "special_tokens_map.json: not valid JSON: nested too deeply"),
    ({"added_tokens__json": {"<new>": [1]}}, r"added_tokens.json gives '<new>' the id \[1\], not a token id"),
    ({"tokenizer_config__json": {"added_tokens_decoder": {"7": {"content": "<new>"}}}}, "do not belong together"),
]


@pytest.mark.parametrize(("files", "message"), BAD_FILES)
def test_malformed_files_are_typed_errors_in_one_line(tmp_path: Path, files: dict[str, Any], message: str) -> None:
    write(write_tokenizer(tmp_path), **files)
    with pytest.raises(ModelFileError, match=message) as caught:
        load_tokenizer_directory(tmp_path)
    assert "\n" not in str(caught.value)


def test_file_that_makes_the_library_panic_is_refused(tmp_path: Path) -> None:
    model = {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": [["a", "b"]]}
    write(tmp_path, tokenizer__json={"version": "1.0", "added_tokens": [], "model": model})
    with pytest.raises(ModelFileError, match=r"tokenizer\.json: damaged \(.+\)"):
        load_tokenizer_directory(tmp_path)


@pytest.mark.parametrize(
    ("vocab", "merges", "message"),
    [
        ({"a": -1}, "", "'a' the id -1"),
        ({"a": "0"}, "", "'a' the id '0'"),
        ({"a": 0}, "#version: 0.2\na\n", "line 2 is 'a'"),
        ({"a": 0}, "a b\n", "merge 0 of 1"),
    ],
)
def test_malformed_vocabulary_is_refused(tmp_path: Path, vocab: dict[str, Any], merges: str, message: str) -> None:
    with pytest.raises(ModelFileError, match=message):
        load_tokenizer_directory(write(tmp_path, vocab__json=vocab, merges__txt=merges))


def test_vocabulary_of_an_unknown_class_is_refused(tmp_path: Path) -> None:
    write_vocabulary(tmp_path, tokenizer_config__json={"tokenizer_class": "RobertaTokenizer"})
    with pytest.raises(UnsupportedModelError, match="RobertaTokenizer"):
        load_tokenizer_directory(tmp_path)


def test_directory_without_tokenizer_json_names_the_next_step(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"no tokenizer\.json"):
        load_tokenizer_directory(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"\n")
    with pytest.raises(UnsupportedModelError, match="save_pretrained"):
        load_tokenizer_directory(tmp_path)
