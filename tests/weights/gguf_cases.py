"""GGUF headers byte by byte, and those that must be refused. Shared by `files.py` and the tests of the reader."""

import struct

STRING, ARRAY, UINT32, BOOL = 8, 9, 4, 7


def string(text: str | bytes) -> bytes:
    data = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(data)) + data


def key_value(key: str | bytes, type_id: int, payload: bytes) -> bytes:
    return string(key) + struct.pack("<I", type_id) + payload


def tensor_info(
    name: str | bytes = "w", dimensions: tuple[int, ...] = (32, 2), type_id: int = 0, offset: int = 0,
    num_dimensions: int | None = None,
) -> bytes:  # fmt: skip
    """`dimensions` in GGUF's order: the contiguous one first."""
    count = len(dimensions) if num_dimensions is None else num_dimensions
    return string(name) + struct.pack(f"<I{len(dimensions)}QIQ", count, *dimensions, type_id, offset)


def gguf_bytes(
    keys: tuple[bytes, ...] = (), tensors: tuple[bytes, ...] = (), data: bytes = b"", *, magic: bytes = b"GGUF",
    version: int = 3, num_tensors: int | None = None, num_keys: int | None = None, alignment: int = 32,
) -> bytes:  # fmt: skip
    """A file from its pieces; counts are right unless given."""
    header = magic + struct.pack(
        "<IQQ",
        version,
        len(tensors) if num_tensors is None else num_tensors,
        len(keys) if num_keys is None else num_keys,
    )
    header += b"".join(keys) + b"".join(tensors)
    return header + b"\0" * (-len(header) % alignment) + data


HUGE = 2**63
U32_7 = struct.pack("<I", 7)
DATA = bytes(256)


def array(type_id: int, count: int, payload: bytes) -> bytes:
    return struct.pack("<IQ", type_id, count) + payload


BROKEN = {
    "empty": b"",
    "only magic": b"GGUF",
    "magic": gguf_bytes(magic=b"GGUX"),
    "zip": b"PK\x03\x04" + bytes(100),
    "page": b"<!DOCTYPE html><html>",
    "version cut": b"GGUF\x03\0",
    "counts cut": b"GGUF" + struct.pack("<IQ", 3, 0),
    "tensor count": gguf_bytes(num_tensors=HUGE),
    "tensor count by one": gguf_bytes(tensors=(tensor_info(),), data=DATA, num_tensors=2),
    "key count": gguf_bytes(num_keys=HUGE),
    "key count by one": gguf_bytes(keys=(key_value("a", UINT32, U32_7),), num_keys=2),
    "key length": gguf_bytes(keys=(struct.pack("<Q", HUGE) + b"a" + bytes(20),)),
    "key empty": gguf_bytes(keys=(key_value("", UINT32, U32_7),)),
    "key too long": gguf_bytes(keys=(key_value("k" * 65536, UINT32, U32_7),)),
    "key not UTF-8": gguf_bytes(keys=(key_value(b"\xff\xfe", UINT32, U32_7),)),
    "key twice": gguf_bytes(keys=(key_value("a", UINT32, U32_7),) * 2),
    "value type": gguf_bytes(keys=(key_value("a", 13, U32_7),)),
    "value type huge": gguf_bytes(keys=(key_value("a", 2**32 - 1, U32_7),)),
    "value cut": gguf_bytes(keys=(key_value("a", 10, b"\1"),), alignment=1),
    "bool": gguf_bytes(keys=(key_value("a", BOOL, b"\2"),)),
    "bool in array": gguf_bytes(keys=(key_value("a", ARRAY, array(BOOL, 2, b"\1\2")),)),
    "string length": gguf_bytes(keys=(key_value("a", STRING, struct.pack("<Q", HUGE)),)),
    "string length by one": gguf_bytes(keys=(key_value("a", STRING, struct.pack("<Q", 2) + b"x"),), alignment=1),
    "string not UTF-8": gguf_bytes(keys=(key_value("a", STRING, string(b"\x80")),)),
    "array type": gguf_bytes(keys=(key_value("a", ARRAY, array(77, 1, U32_7)),)),
    "array length": gguf_bytes(keys=(key_value("a", ARRAY, array(UINT32, HUGE, U32_7)),)),
    "array length overflow": gguf_bytes(keys=(key_value("a", ARRAY, array(UINT32, 2**62, U32_7)),)),
    "strings": gguf_bytes(keys=(key_value("a", ARRAY, array(STRING, HUGE, string("x"))),)),
    "strings by one": gguf_bytes(keys=(key_value("a", ARRAY, array(STRING, 2, string("x"))),), alignment=1),
    "strings length": gguf_bytes(keys=(key_value("a", ARRAY, array(STRING, 1, struct.pack("<Q", HUGE))),)),
    "strings not UTF-8": gguf_bytes(keys=(key_value("a", ARRAY, array(STRING, 1, string(b"\xc3"))),)),
    "alignment zero": gguf_bytes(keys=(key_value("general.alignment", UINT32, struct.pack("<I", 0)),)),
    "alignment odd": gguf_bytes(keys=(key_value("general.alignment", UINT32, struct.pack("<I", 24)),)),
    "alignment type": gguf_bytes(keys=(key_value("general.alignment", STRING, string("32")),)),
    "alignment bool": gguf_bytes(keys=(key_value("general.alignment", BOOL, b"\1"),)),
    "alignment huge": gguf_bytes(
        keys=(key_value("general.alignment", UINT32, struct.pack("<I", 2**31)),), tensors=(tensor_info(),), data=DATA
    ),
    "name empty": gguf_bytes(tensors=(tensor_info(name=""),), data=DATA),
    "name length": gguf_bytes(tensors=(struct.pack("<Q", HUGE) + bytes(60),), data=DATA),
    "name not UTF-8": gguf_bytes(tensors=(tensor_info(name=b"\xff"),), data=DATA),
    "name twice": gguf_bytes(tensors=(tensor_info(), tensor_info(offset=256)), data=DATA * 2),
    "no dimensions": gguf_bytes(tensors=(tensor_info(dimensions=()),), data=DATA),
    "five dimensions": gguf_bytes(tensors=(tensor_info(dimensions=(32, 1, 1, 1, 1)),), data=DATA),
    "dimension count": gguf_bytes(tensors=(tensor_info(num_dimensions=2**32 - 1),), data=DATA),
    "dimension zero": gguf_bytes(tensors=(tensor_info(dimensions=(32, 0)),), data=DATA),
    "dimension huge": gguf_bytes(tensors=(tensor_info(dimensions=(32, HUGE)),), data=DATA),
    "dimension product": gguf_bytes(tensors=(tensor_info(dimensions=(2**32, 2**32, 2**32, 2**32)),), data=DATA),
    "tensor type": gguf_bytes(tensors=(tensor_info(type_id=4),), data=DATA),
    "tensor type huge": gguf_bytes(tensors=(tensor_info(type_id=2**32 - 1),), data=DATA),
    "block not whole": gguf_bytes(tensors=(tensor_info(dimensions=(33, 2), type_id=3),), data=DATA),
    "offset unaligned": gguf_bytes(tensors=(tensor_info(offset=8),), data=DATA * 2),
    "offset outside": gguf_bytes(tensors=(tensor_info(offset=1 << 20),), data=DATA),
    "offset huge": gguf_bytes(tensors=(tensor_info(offset=2**64 - 32),), data=DATA),
    "overlap": gguf_bytes(tensors=(tensor_info("a"), tensor_info("b", offset=224)), data=DATA * 2),
    "data cut": gguf_bytes(tensors=(tensor_info(),), data=DATA[:-1]),
    "data absent": gguf_bytes(tensors=(tensor_info(),)),
}


UNSUPPORTED = {
    "version 1": (gguf_bytes(version=1), "version 1"),
    "version 4": (gguf_bytes(version=4), "version 4"),
    "big endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
    "nested array": (gguf_bytes(keys=(key_value("a", ARRAY, array(ARRAY, 1, bytes(12))),)), "array of arrays"),
    "Q1_0": (gguf_bytes(tensors=(tensor_info(type_id=41),), data=DATA), "Q1_0.*Q4_K"),
}
