"""Tokenizers with the fill-in-the-middle tokens of each family, a token per byte."""

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from quire.text.tokenizer import Tokenizer, byte_level_alphabet
from quire.text.tokenizer_parts import TokenizerParts, add_bos_and_eos, find_fim_tokens

QWEN = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|repo_name|>", "<|file_sep|>", "<|endoftext|>")
EOS = 256


def fim_tokenizer(*tokens: str, adds_bos: bool = False, is_special: bool = True) -> Tokenizer:
    """Return a tokenizer whose ids are the bytes of a text, but for `tokens`: these have the ids from 1 on.

    The ids fit into the vocabulary of a scripted engine. BOS is the token <bos>, 257.
    """
    kept = {piece: byte for piece, byte in byte_level_alphabet().items() if not 1 <= byte <= len(tokens)}
    vocab = kept | {token: index for index, token in enumerate(tokens, 1)} | {"<eos>": EOS, "<bos>": EOS + 1}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    added = [tokenizers.AddedToken(token, special=is_special, normalized=False) for token in tokens]
    backend.add_tokens([*added, *(tokenizers.AddedToken(token, special=True) for token in ("<eos>", "<bos>"))])
    if adds_bos:
        add_bos_and_eos(backend, bos="<bos>", eos="<eos>")
    return Tokenizer(TokenizerParts(backend, EOS + 1, EOS, fim=find_fim_tokens(backend.token_to_id)))
