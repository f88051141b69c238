"""`quire tokenize`: text, or a chat message rendered with the model's template, as token ids and pieces.

Loads the tokenizer only, neither weights nor torch. Next to read: `show.py`.
"""

import json
from typing import TYPE_CHECKING

import click

from quire.cli.arguments import read_text, split_arguments
from quire.cli.command import option, output_of, verb
from quire.cli.options import environment_name, revision_option
from quire.cli.show import open_model

if TYPE_CHECKING:
    from quire.text.tokenizer import Tokenizer

EXAMPLES = ('quire tokenize "Hello world"', 'quire tokenize smollm2 --template --ids "Hi" ')


@verb("tokenize", EXAMPLES)
@click.argument("words", nargs=-1, metavar="[MODEL] [TEXT]")
@option("--template", is_flag=True, help="render TEXT as a user's message first")
@option("--system", metavar="TEXT", help="system message, with --template")
@option("--ids", is_flag=True, help="print the ids only, on one line")
@option("--special/--no-special", default=True, help="add the model's BOS and EOS  [on]")
@option(
    "--model",
    "engine_model",
    envvar=environment_name("model"),
    metavar="TEXT",
    help="the model  [smollm2; QUIRE_MODEL]",
)
@revision_option
@option(
    "--tokenizer",
    envvar=environment_name("tokenizer"),
    metavar="PATH",
    help="tokenizer file or directory, if not the model's",
)
def tokenize_command(
    words: tuple[str, ...],
    template: bool,
    system: str | None,
    ids: bool,
    special: bool,
    engine_model: str | None,
    revision: str | None,
    tokenizer: str | None,
) -> None:
    """Show how text becomes tokens.

    Prints one line per token: its position, id, and text. Without TEXT, or with "-", standard input is read.
    A single argument is a MODEL if it is an alias, a path or a hub id, and otherwise the TEXT.
    """
    from quire.engine.tokenizer_source import load_tokenizer
    from quire.text.dialogue import Dialogue

    output = output_of()
    arguments = split_arguments(words, {"model": engine_model}, what="text", plain_word_is_model=False)
    if system and not template:
        raise click.UsageError("--system needs --template")
    text = read_text(arguments.text, missing=arguments.missing_text)
    if text is None:
        raise click.UsageError("no text: give one, or pipe it in")
    encoder = load_tokenizer(open_model(arguments.model, revision, output), tokenizer)
    if template:
        messages = [{"role": "system", "content": system}] if system else []
        dialogue = Dialogue(encoder.chat_templates, encoder)
        prepared = dialogue.prepare([*messages, {"role": "user", "content": text}])
        text, token_ids = prepared.text, prepared.token_ids
    else:
        token_ids = encoder.encode(text, add_special_tokens=special)
    pieces = [token_text(encoder, token_id) for token_id in token_ids]
    if output.json:
        tokens = [
            {"id": token_id, "text": piece, "piece": encoder.id_to_token(token_id)}
            for token_id, piece in zip(token_ids, pieces, strict=True)
        ]
        output.result_json(
            "quire.tokenize/1",
            {"model": arguments.model, "text": text, "num_tokens": len(token_ids), "ids": token_ids, "tokens": tokens},
        )
    elif ids:
        output.result(" ".join(map(str, token_ids)))
    else:
        rows = [
            [str(position), str(token_id), json.dumps(piece, ensure_ascii=False)]
            for position, (token_id, piece) in enumerate(zip(token_ids, pieces, strict=True))
        ]
        output.table(["position", "id", "text"], rows, right=frozenset({0, 1}))
    tokens_word = "token" if len(token_ids) == 1 else "tokens"
    output.note(f"{len(token_ids)} {tokens_word} · {len(text)} characters")


def token_text(tokenizer: "Tokenizer", token_id: int) -> str:
    """Return the text of one token; part of a character shows its bytes, as `<F0><9F>`."""
    if tokenizer.byte_decoding is None:
        return tokenizer.decode([token_id], skip_special_tokens=False)
    # A byte that is not part of a whole character becomes the surrogate U+DC00 + byte.
    text = tokenizer.token_bytes(token_id).decode("utf-8", "surrogateescape")
    return "".join(f"<{ord(char) - 0xDC00:02X}>" if 0xDC80 <= ord(char) <= 0xDCFF else char for char in text)
