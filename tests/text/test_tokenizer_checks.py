"""Files of tokenizers that make the library panic, end the program, or make gigabytes of a text."""

import base64
import json
import tempfile
from pathlib import Path
from typing import Any

import pytest

from quire.errors import ModelFileError
from quire.text.directory_tokenizer import fault_of
from quire.text.tokenizer import Tokenizer, byte_level_alphabet, load_tokenizer_directory
from tests.processes import limit, outcomes_of

ALPHABET = {character: byte for byte, character in enumerate(byte_level_alphabet())}
TEXT = {"Sequence": {"id": "A", "type_id": 0}}
BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
BPE = {"type": "BPE", "vocab": ALPHABET, "merges": []}
ADDED = {"content": "zz", "single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}


def document(**parts: Any) -> dict[str, Any]:
    """A byte-level tokenizer with some other parts."""
    plain = {"version": "1.0", "added_tokens": [], "pre_tokenizer": BYTE_LEVEL, "decoder": BYTE_LEVEL, "model": BPE}
    return {**plain, **parts}


def split(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def replace(old: str, new: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": {"String": old}, "content": new}


def template(*pieces: Any) -> dict[str, Any]:
    return {"type": "TemplateProcessing", "single": [*pieces], "pair": [], "special_tokens": {}}


def sequence(name: str, steps: list[Any]) -> dict[str, Any]:
    return {"type": "Sequence", name: steps}


REFUSED = {
    "replaced by a megabyte": document(normalizer=replace("a", "b" * 1_000_000)),
    "doubled 40 times": document(normalizer=sequence("normalizers", [replace("a", "aa")] * 40)),
    "long beginning": document(normalizer={"type": "Prepend", "prepend": "x" * 10_000_000}),
    "text many times": document(post_processor=template(*[TEXT] * 1000)),
    "text doubled 40 times": document(post_processor=sequence("processors", [template(TEXT, TEXT)] * 40)),
    "many ids of a token": document(
        post_processor=template(TEXT) | {"special_tokens": {"q": {"id": "q", "ids": [1] * 10**6, "tokens": ["q"]}}}
    ),
    "decoded to a megabyte": document(decoder=sequence("decoders", [replace("a", "b" * 1_000_000)])),
    "many steps": document(pre_tokenizer=sequence("pretokenizers", [split("a")] * 1000)),
    "prefix within a character": document(
        model=BPE | {"vocab": ALPHABET | {"éb": 300, "aéb": 301}, "merges": [["a", "éb"]]}
        | {"continuing_subword_prefix": "x"}
    ),
    "cut character map": document(
        normalizer={"type": "Precompiled", "precompiled_charsmap": base64.b64encode(b"\xff" * 7).decode()}
    ),
    "words without a limit": document(
        model={"type": "WordPiece", "unk_token": "a", "continuing_subword_prefix": "##", "vocab": {"a": 0},
               "max_input_chars_per_word": 1 << 40}
    ),
    "special tokens of all lengths": document(
        added_tokens=[ADDED | {"id": 256 + length, "content": "a" * length} for length in range(1, 200)]
    ),
    "huge id": document(model=BPE | {"vocab": ALPHABET | {"zz": 2**32 - 1}}, added_tokens=[{"id": 2**32 - 1, **ADDED}]),
}  # fmt: skip
"""Refused when they are loaded."""
FAILING = {
    "nested repetition": document(pre_tokenizer=split("(a+)+$")),
    "special token that is not there": document(post_processor=template({"SpecialToken": {"id": "q", "type_id": 0}})),
    "second text": document(post_processor=template({"Sequence": {"id": "B", "type_id": 0}})),
    "pieces of no character": document(pre_tokenizer={"type": "FixedLength", "length": 0}),
    "no token for unknown words": document(model={"type": "WordLevel", "unk_token": "[UNK]", "vocab": {"q": 0}}),
    "random character map": document(
        normalizer={
            "type": "Precompiled",
            "precompiled_charsmap": base64.b64encode((1024).to_bytes(4, "little") + b"\xa7" * 1024 + b"ab\0").decode(),
        }
    ),
}
"""Found to be wrong when they encode `a…ac`."""
HOSTILE = REFUSED | FAILING


def load(found: dict[str, Any]) -> Tokenizer:
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "tokenizer.json").write_text(json.dumps(found))
        return load_tokenizer_directory(directory)


def try_tokenizers(*names: str) -> None:
    """Load hostile tokenizers and encode a text."""
    for name in names:
        limit()
        step = "load"
        try:
            tokenizer, step = load(HOSTILE[name]), "encode"
            outcome = f"{len(tokenizer.encode('a' * 30 + 'c'))} tokens of {len(tokenizer.identity)}"
        except ModelFileError as error:
            outcome = f"{step}: {error}"
        print(json.dumps([name, outcome]), flush=True)


@pytest.fixture(scope="module")
def outcomes() -> dict[str, str]:
    return outcomes_of("tests.text.test_tokenizer_checks:try_tokenizers", HOSTILE)


@pytest.mark.parametrize("name", REFUSED)
def test_harmful_tokenizer_is_refused(name: str, outcomes: dict[str, str]) -> None:
    assert outcomes[name].startswith("load: ")


@pytest.mark.parametrize("name", FAILING)
def test_failure_of_the_library_is_a_typed_error(name: str, outcomes: dict[str, str]) -> None:
    assert outcomes[name].startswith("encode: the model's tokenizer cannot encode this text: ")


def test_panic_while_decoding_is_a_typed_error(monkeypatch: pytest.MonkeyPatch) -> None:
    class PanicException(BaseException):
        """Named as the library's, which cannot be imported."""

    class Backend:
        def decode(self, ids: list[int], *, skip_special_tokens: bool) -> str:
            raise PanicException("index out of bounds\nat line 3")

    tokenizer = load(document(decoder={"type": "WordPiece", "prefix": "##", "cleanup": True}))
    monkeypatch.setattr(tokenizer, "_backend", Backend())
    with pytest.raises(ModelFileError, match="cannot decode these tokens: index out of bounds; fetch"):
        tokenizer.decode([1])


@pytest.mark.parametrize(
    "parts",
    [
        {},
        {"normalizer": sequence("normalizers", [{"type": "Prepend", "prepend": "▁"}, replace(" ", "▁")])},
        {"normalizer": sequence("normalizers", [{"type": "NFKC"}, replace("``", '"'), replace("\n", "<newline>")])},
        {"post_processor": sequence("processors", [BYTE_LEVEL, template(TEXT)])},
        {"decoder": sequence("decoders", [replace("▁", " "), {"type": "ByteFallback"}, {"type": "Fuse"}])},
        {"model": {"type": "WordPiece", "continuing_subword_prefix": "##", "max_input_chars_per_word": 100}},
        {"model": BPE | {"continuing_subword_prefix": ""}},
    ],
)
def test_usual_parts_are_accepted(parts: dict[str, Any]) -> None:
    assert fault_of(json.dumps(document(**parts))) is None


def test_interrupt_while_encoding_is_not_an_error_of_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    tokenizer = load(document())
    backend: Any = type("Backend", (), {"encode_batch_fast": staticmethod(interrupted)})
    monkeypatch.setattr(tokenizer, "_backend", backend)
    with pytest.raises(KeyboardInterrupt):
        tokenizer.encode("a")
