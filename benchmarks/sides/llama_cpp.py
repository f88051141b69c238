"""llama.cpp as a side, through the low-level API of llama-cpp-python: `llama_decode` on a batch of all streams.

As `llama-batched-bench` does it: a context of exactly the streams and cells a case needs, prompts in batches of
`n_batch`, then one token per stream and step, greedy. Logits are asked for only where a token is chosen.
Options: kv (f16, q8_0), unified (one KV buffer for all streams), ubatch, type (bf16, f16, q8_0, q4_0: the model is
requantised to it first). Next to read: `protocol.py`.
"""

import ctypes
from importlib import metadata
from pathlib import Path
from typing import Any

import llama_cpp as lib
import numpy as np

from benchmarks.sides.protocol import Timing, serve

KV_TYPES = {"f16": lib.GGML_TYPE_F16, "q8_0": lib.GGML_TYPE_Q8_0}
FILE_TYPES = {
    "bf16": lib.LLAMA_FTYPE_MOSTLY_BF16,
    "f16": lib.LLAMA_FTYPE_MOSTLY_F16,
    "q8_0": lib.LLAMA_FTYPE_MOSTLY_Q8_0,
    "q4_0": lib.LLAMA_FTYPE_MOSTLY_Q4_0,
}
CELL_PADDING = 256
N_BATCH = 2048


class LlamaCppSide:
    """A model, and the context of the case measured last."""

    def __init__(self, request: dict[str, Any]) -> None:
        options = {"kv": "f16", "unified": True, "ubatch": 512, "type": "", **request["options"]}
        self._options = options
        self._num_threads = request["num_threads"]
        lib.llama_backend_init()
        path = _requantised(request["model"], options["type"]) if options["type"] else request["model"]
        self._model = lib.llama_model_load_from_file(path.encode(), lib.llama_model_default_params())
        if not self._model:
            raise RuntimeError(f"llama.cpp cannot load {path}")
        self._vocab_size = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(self._model))
        self._shape: tuple[int, int, int] | None = None
        self._context: Any = None
        self._batch = lib.llama_batch_init(N_BATCH, 0, 1)
        self.version = metadata.version("llama-cpp-python")
        features = lib.llama_print_system_info().decode()
        self.settings = {
            "weights": options["type"] or "as in the file",
            "kv": options["kv"],
            "unified": options["unified"],
            "ubatch": options["ubatch"],
            "flash_attention": "auto",
            "num_threads": self._num_threads,
            "features": [
                item.split("=")[0].strip() for item in features.replace("CPU :", "").split("|") if "1" in item
            ],
        }

    def _open_context(self, num_streams: int, stream_len: int, num_outputs: int) -> None:
        """A context for streams of this length; the last one is kept if it fits."""
        shape = (num_streams, stream_len, num_outputs)
        if shape == self._shape:
            lib.llama_memory_clear(lib.llama_get_memory(self._context), True)
            return
        if self._context is not None:
            lib.llama_free(self._context)
        params = lib.llama_context_default_params()
        cells = -(-stream_len // CELL_PADDING) * CELL_PADDING
        params.n_ctx = (
            num_streams * cells if not self._options["unified"] else -(-num_streams * stream_len // 256) * 256
        )
        params.n_seq_max = num_streams
        params.n_batch, params.n_ubatch = N_BATCH, self._options["ubatch"]
        params.n_threads = params.n_threads_batch = self._num_threads
        params.kv_unified = bool(self._options["unified"])
        params.type_k = params.type_v = KV_TYPES[self._options["kv"]]
        self._context = lib.llama_init_from_model(self._model, params)
        if not self._context:
            raise RuntimeError(f"llama.cpp makes no context of {params.n_ctx} cells")
        self._shape = shape

    def _decode(self, rows: list[tuple[int, int, int, bool]]) -> None:
        """Decode a batch. Rows: token id, position, stream, whether its logits are wanted."""
        batch = self._batch
        batch.n_tokens = len(rows)
        for index, (token_id, position, stream, wants_logits) in enumerate(rows):
            batch.token[index] = token_id
            batch.pos[index] = position
            batch.n_seq_id[index] = 1
            batch.seq_id[index][0] = stream
            batch.logits[index] = wants_logits
        status = lib.llama_decode(self._context, batch)
        if status:
            raise RuntimeError(f"llama_decode failed with {status} on {len(rows)} tokens")

    def _row(self, index: int) -> Any:
        """Logits of a row of the last batch. Shapes: [V]."""
        pointer = lib.llama_get_logits_ith(self._context, index)
        return np.ctypeslib.as_array(ctypes.cast(pointer, ctypes.POINTER(ctypes.c_float)), (self._vocab_size,))

    def measure(self, prompts: list[list[int]], num_generated: int) -> Timing:
        """Measure one repetition."""
        longest = max(map(len, prompts))
        self._open_context(len(prompts), longest + max(num_generated, 1), len(prompts))
        rows = [
            (token_id, position, stream, position == len(prompt) - 1)
            for stream, prompt in enumerate(prompts)
            for position, token_id in enumerate(prompt)
        ]
        timing = Timing(prompts, num_generated)
        texts: list[list[int]] = [[] for _ in prompts]
        for first in range(0, len(rows), N_BATCH):
            part = rows[first : first + N_BATCH]
            self._decode(part)
            for index, (_, _, stream, wants_logits) in enumerate(part):
                if wants_logits:
                    texts[stream].append(int(self._row(index).argmax()))
        timing.note([len(text) for text in texts])
        while len(texts[0]) < timing.num_to_generate:
            step = [(text[-1], len(prompts[s]) + len(text) - 1, s, True) for s, text in enumerate(texts)]
            self._decode(step)
            for stream, text in enumerate(texts):
                text.append(int(self._row(stream).argmax()))
            timing.note([len(text) for text in texts])
        timing.token_ids = texts
        return timing

    def logits(self, token_ids: list[int]) -> Any:
        """Logits at every position. Shapes: numpy float32 [T, V]."""
        self._open_context(1, len(token_ids), len(token_ids))
        found = []
        for first in range(0, len(token_ids), N_BATCH):
            part = token_ids[first : first + N_BATCH]
            self._decode([(token_id, first + index, 0, True) for index, token_id in enumerate(part)])
            found += [self._row(index).copy() for index in range(len(part))]
        return np.stack(found)


def _requantised(path: str, file_type: str) -> str:
    """The model in another format, made once and kept beside this run's other files."""
    import tempfile

    target = Path(tempfile.gettempdir()) / f"{Path(path).stem}.{file_type}.gguf"
    if not target.exists():
        params = lib.llama_model_quantize_default_params()
        params.ftype = FILE_TYPES[file_type]
        params.allow_requantize = True
        unfinished = target.with_suffix(".part")
        if lib.llama_model_quantize(path.encode(), str(unfinished).encode(), ctypes.byref(params)):
            raise RuntimeError(f"llama.cpp cannot make {file_type} of {path}")
        unfinished.rename(target)
    return str(target)


if __name__ == "__main__":
    serve(LlamaCppSide)
