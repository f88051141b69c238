"""B3: damaged GGUF headers, read in a process of its own whose memory is bounded.

    python -m benchmarks.soak.inputs.files MODEL.gguf COUNT SEED

is that process; it prints one JSON object. A case is read as far as a server reads it before it computes: header,
configuration, names of tensors, tokenizer. Next to read: `gguf_cases.py`.
"""

import asyncio
import json
import random
import resource
import struct
import sys
import tempfile
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil

from benchmarks.soak.inputs.gguf_cases import ARRAY, BOOL, BROKEN, STRING, gguf_bytes, key_value, string, tensor_info
from benchmarks.soak.row import Row
from quire.engine.tokenizer_source import load_tokenizer
from quire.errors import ModelError
from quire.weights.block_formats import BLOCK_FORMATS
from quire.weights.checkpoint import open_checkpoint
from quire.weights.gguf_file import GGUFFile, read_gguf
from quire.weights.sources import ModelFiles, resolve_source

LIMIT_S = 5.0
SLACK_BYTES = 256 << 20
"""Of addresses beyond two files: threads of the tokenizer's library."""
NUM_TOKENS = 300
REAL_SHARE = 20
"""One case of so many has the whole header of the real file; the others keep the first tokens of its vocabulary."""
NUMBERS = (0, 1, 2, 31, 255, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**62, 2**63 - 1, 2**63, 2**64 - 1)


async def damaged_headers(model: str, *, count: int = 10_000, seed: int = 0) -> Row:
    """B3."""
    files = resolve_source(model, revision=None, progress=None)
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "benchmarks.soak.inputs.files", str(files.path), str(count), str(seed),
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    output, errors = await process.communicate()
    row = Row("B3", f"{count} damaged GGUF headers, read up to the tokenizer")
    row.check("exit", process.returncode, passes=process.returncode == 0)
    if process.returncode:
        row.note("says", errors.decode(errors="replace")[-300:].replace("\n", " "))
        return row
    found = json.loads(output)
    row.note("refused", " ".join(f"{name}:{number}" for name, number in sorted(found["refused"].items())))
    row.note("harmless", found["harmless"])
    others = found["others"]
    row.check("other exceptions", "; ".join([str(len(others)), *others[:5]]), passes=not others)
    row.check(f"worst s of processor time (≤ {LIMIT_S:g})", found["worst_s"], passes=found["worst_s"] <= LIMIT_S)
    row.check("RSS + MiB (≤ 2 × file)", found["grown_mib"], passes=found["grown_mib"] <= 2 * found["file_mib"])
    return row


def try_headers(path: Path, count: int, seed: int) -> dict[str, Any]:
    """What comes of reading `count` damaged versions of the file's header."""
    choices = random.Random(seed)
    file = read_gguf(path)
    real = path.read_bytes()[: min((tensor.offset for tensor in file.tensors.values()), default=0)]
    small, num_bytes = small_header(file)
    broken = list(BROKEN.values())
    refused: Counter[str] = Counter()
    others: list[str] = []
    harmless, worst_s, before_bytes, most_bytes = 0, 0.0, psutil.Process().memory_info().rss, 0
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "model.gguf"
        files = replace(resolve_source(str(path), revision=None, progress=None), path=target)
        for number in range(count):
            is_real = number % REAL_SHARE == 0
            header = damaged(real if is_real else small, choices, broken)
            write(target, header, file.path.stat().st_size if is_real else num_bytes, choices)
            started_s = time.process_time()
            try:
                read(files)
                harmless += 1
            except ModelError as error:
                refused[type(error).__name__] += 1
            except BaseException as error:  # whatever a library of Rust throws
                others.append(f"case {number}: {type(error).__name__}: {str(error)[:100]}")
            worst_s = max(worst_s, time.process_time() - started_s)
            most_bytes = max(most_bytes, psutil.Process().memory_info().rss)
    return {
        "refused": refused, "others": others, "harmless": harmless, "worst_s": worst_s,
        "grown_mib": (most_bytes - before_bytes) / 2**20, "file_mib": num_bytes / 2**20,
    }  # fmt: skip


def read(files: ModelFiles) -> None:
    """As a server does. Raises: ModelError."""
    checkpoint = open_checkpoint(files)
    load_tokenizer(checkpoint, None, checkpoint.hf_config.get("vocab_size"))


def write(path: Path, header: bytes, num_bytes: int, choices: random.Random) -> None:
    """A file with this header: its data are zeros that take no room on the disk; sometimes it is cut."""
    with path.open("wb") as out:
        out.write(header)
        if choices.random() < 0.9:
            out.truncate(max(len(header), num_bytes))


def damaged(header: bytes, choices: random.Random, broken: list[bytes]) -> bytes:
    """A header with one to four wounds."""
    data = bytearray(header)
    for _ in range(choices.choice((1, 1, 2, 4))):
        # Most fields are short; texts and long lists would take most of the hits.
        at = choices.randrange(min(len(data), 4096) if choices.random() < 0.5 else len(data))
        kind = choices.randrange(7)
        if kind == 0:
            data[at] = choices.randrange(256)
        elif kind == 1:
            data[at] ^= 1 << choices.randrange(8)
        elif kind == 2:
            data[at : at + 8] = struct.pack("<Q", choices.choice(NUMBERS))
        elif kind == 3:
            data[at : at + 4] = struct.pack("<I", choices.choice(NUMBERS) & 0xFFFFFFFF)
        elif kind == 4:
            del data[at : at + choices.randrange(1, 64)]
        elif kind == 5:
            data[at:at] = data[at : at + choices.randrange(1, 64)]
        else:
            data[at : at + 32] = choices.choice(broken)[:200]
    return bytes(data)


def small_header(file: GGUFFile) -> tuple[bytes, int]:
    """The header with the first tokens of the vocabulary only, and the size of a file that it fits."""
    keys = [_key_value(name, _shortened(name, value)) for name, value in file.metadata.items()]
    tensors, offset = [], 0
    for tensor in file.tensors.values():
        shape = (
            (NUM_TOKENS, *tensor.shape[1:]) if tensor.name in ("token_embd.weight", "output.weight") else tensor.shape
        )
        tensors.append(tensor_info(tensor.name, shape[::-1], tensor.format.gguf_id, offset))
        item = BLOCK_FORMATS[tensor.format.name]
        num_values = 1
        for size in shape:
            num_values *= size
        offset += -(-(num_values // item.block_len * item.block_bytes) // 32) * 32
    header = gguf_bytes(tuple(keys), tuple(tensors))
    return header, len(header) + offset


def _shortened(name: str, value: Any) -> Any:
    if name.startswith("tokenizer.") and isinstance(value, list):
        known = {f"{piece}" for piece in value[:NUM_TOKENS]}
        return [item for item in value if _is_merge_of(item, known)] if name.endswith("merges") else value[:NUM_TOKENS]
    return value


def _is_merge_of(merge: str, known: set[str]) -> bool:
    return all(len(part) == 1 for part in merge.split(" ")) and merge.replace(" ", "") in known


def _key_value(name: str, value: Any) -> bytes:
    if isinstance(value, list):
        type_id = _type_id(value[0]) if value else 4
        payload = struct.pack("<IQ", type_id, len(value)) + b"".join(_payload(item) for item in value)
        return key_value(name, ARRAY, payload)
    return key_value(name, _type_id(value), _payload(value))


def _type_id(value: Any) -> int:
    return (
        BOOL if isinstance(value, bool) else STRING if isinstance(value, str) else 6 if isinstance(value, float) else 4
    )


def _payload(value: Any) -> bytes:
    if isinstance(value, str):
        return string(value)
    return struct.pack({BOOL: "<?", 6: "<f", 4: "<I"}[_type_id(value)], value)


def main() -> None:
    """Entry point of the process."""
    path, count, seed = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    limit = psutil.Process().memory_info().vms + 2 * path.stat().st_size + SLACK_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    print(json.dumps(try_headers(path, count, seed)))


if __name__ == "__main__":
    main()
