import gguf
import pytest

from quire.weights.block_formats import BLOCK_FORMATS, UNSUPPORTED_GGUF_FORMATS, BlockFormat, row_bytes


@pytest.mark.parametrize("item", BLOCK_FORMATS.values(), ids=lambda item: item.name)
def test_sizes_and_ids_are_those_of_gguf(item: BlockFormat) -> None:
    kind = gguf.GGMLQuantizationType[item.name]
    assert kind.value == item.gguf_id
    assert gguf.GGML_QUANT_SIZES[kind] == (item.block_len, item.block_bytes)


def test_unsupported_names_are_those_of_gguf() -> None:
    for type_id, name in UNSUPPORTED_GGUF_FORMATS.items():
        assert gguf.GGMLQuantizationType(type_id).name == name


def test_every_type_of_gguf_until_q1_0_is_either_supported_or_named() -> None:
    known = {item.gguf_id for item in BLOCK_FORMATS.values()} | UNSUPPORTED_GGUF_FORMATS.keys()
    assert {kind.value for kind in gguf.GGMLQuantizationType if kind.value <= 41} <= known


def test_row_bytes_counts_whole_blocks() -> None:
    assert row_bytes(BLOCK_FORMATS["Q4_1"], 576) == 360
    assert row_bytes(BLOCK_FORMATS["BF16"], 7) == 14
