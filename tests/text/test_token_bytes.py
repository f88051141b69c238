import tokenizers
from tokenizers import decoders, models

from quire.text.tokenizer import byte_decoding


def test_sentencepiece_pieces() -> None:
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    decoding = byte_decoding(_with(decoders.Sequence(steps)))
    assert decoding is not None
    assert decoding.strips_leading_space
    cases = {"▁the": b" the", "<0x0A>": b"\n", "<0xfF>": b"\xff", "<0x0A>x": b"<0x0A>x", "é": "é".encode()}
    assert {piece: decoding.piece_to_bytes(piece) for piece in cases} == cases
    without_strip = byte_decoding(_with(decoders.Sequence(steps[:3])))
    assert without_strip is not None
    assert not without_strip.strips_leading_space


def test_other_decoders_are_not_recognised() -> None:
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    for decoder in (
        None,
        decoders.WordPiece(),
        decoders.Metaspace(),
        decoders.Sequence([decoders.Replace("_", " "), *steps[1:]]),
        decoders.Sequence([*steps, decoders.Strip(" ", 2, 0)]),
        decoders.Sequence([*steps, decoders.Strip("x", 1, 0)]),
        decoders.Sequence([*steps, decoders.Replace("a", "b")]),
    ):
        assert byte_decoding(_with(decoder)) is None


def _with(decoder: decoders.Decoder | None) -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE())
    if decoder is not None:
        backend.decoder = decoder
    return backend
