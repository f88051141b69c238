"""`quire tokenize` with a real tokenizer."""

from quire.cli.models import open_model, token_text
from quire.cli.terminal import Output
from quire.engine.tokenizer_source import load_tokenizer
from tests.cli.command_line import call, parsed


def test_table_quotes_the_text_and_ids_are_one_line(tiny: str) -> None:
    lines = call("tokenize", tiny, 'a "').stdout.splitlines()
    assert [line.split(maxsplit=2)[0::2] for line in lines[1:]] == [["0", '"a"'], ["1", '" "'], ["2", '"\\""']]
    result = call("tokenize", tiny, 'a "', "--ids")
    assert result.stdout == " ".join(line.split()[1] for line in lines[1:]) + "\n"
    assert "3 tokens" in result.stderr


def test_text_is_the_argument_or_piped_input(tiny: str) -> None:
    assert parsed(call("tokenize", tiny, "Ho", "--json", stdin="Hi\n"))["text"] == "Ho"
    assert parsed(call("tokenize", tiny, "--json", stdin="Hi\n"))["text"] == "Hi"
    assert parsed(call("tokenize", "--model", tiny, "hello", "--json"))["text"] == "hello"


def test_template_renders_the_text_and_system_needs_it(tiny: str) -> None:
    value = parsed(call("tokenize", tiny, "Hi", "--template", "--system", "S", "--json"))
    assert value["text"] == "<system>S<user>Hi<a>"
    assert call("tokenize", tiny, "Hi", "--system", "S").exit_code == 2


def test_text_of_every_token_is_printable(tiny: str) -> None:
    tokenizer = load_tokenizer(open_model(tiny, None, Output()), None)
    texts = [token_text(tokenizer, token_id) for token_id in range(tokenizer.vocab_size)]
    assert len(set(texts)) == tokenizer.vocab_size
    assert "".join(texts).encode().decode() == "".join(texts)
