"""llama.cpp as a side, through the low-level API of llama-cpp-python: `llama_decode` on a batch of all streams.

As `llama-batched-bench` does it: a context of exactly the streams and cells a case needs, prompts in batches of
`n_batch`, then one token per stream and step, greedy. Logits are asked for only where a token is chosen.
Options, tried per case where not given (`alternatives`): kv (f16, q8_0), flash_attention, ubatch, unified (one KV
buffer for all streams). Also: type (bf16, f16, q8_0, q4_0: the model is requantised to it first), lookup (the most
tokens of a draft by llama-cpp-python's prompt lookup, for one stream). Next to read: `protocol.py`, `ik_llama_cpp.py`.
"""

import ctypes
import importlib
from importlib import metadata
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from benchmarks.sides.protocol import Timing, serve

KV_TYPES = {"f16": 1, "q8_0": 8}
"""Numbers of ggml.h."""
FILE_TYPES = {"bf16": 32, "f16": 1, "q8_0": 7, "q4_0": 2}
"""Numbers of llama.h."""
CELL_PADDING = 256
N_BATCH = 2048
SMALL_UBATCH, LARGE_UBATCH = 512, 2048


class LlamaCppSide:
    """A model, and the context of the case measured last."""

    package, distribution = "llama_cpp", "llama-cpp-python"
    defaults: ClassVar[dict[str, Any]] = {
        "kv": "f16",
        "flash_attention": True,
        "ubatch": SMALL_UBATCH,
        "unified": True,
    }
    # Keys and values of 8 bits need flash attention.
    attention: ClassVar[list[dict[str, Any]]] = [{"kv": "q8_0"}, {"kv": "f16", "flash_attention": False}]

    def __init__(self, request: dict[str, Any]) -> None:
        self._lib = importlib.import_module(self.package)
        self._given = {**request["options"]}
        self._num_threads = request["num_threads"]
        self._lib.llama_backend_init()
        file_type, lookup = self._given.pop("type", ""), self._given.pop("lookup", 0)
        self._propose: Any = None
        if lookup:
            proposers = importlib.import_module(f"{self.package}.llama_speculative")
            self._propose = proposers.LlamaPromptLookupDecoding(num_pred_tokens=lookup)
        if unknown := self._given.keys() - self.defaults.keys():
            raise ValueError(f"there is no option {', '.join(sorted(unknown))}; there are {', '.join(self.defaults)}")
        self._path = self._requantised(request["model"], file_type) if file_type else request["model"]
        self._model: Any = None
        self._load({**self.defaults, **self._given})
        vocabulary = self._lib.llama_model_get_vocab(self._model)
        self._vocab_size = self._lib.llama_vocab_n_tokens(vocabulary)
        self._shape: Any = None
        self._context: Any = None
        self._batch = self._lib.llama_batch_init(N_BATCH, 0, 1)
        self.version = metadata.version(self.distribution)
        self.settings = {
            "weights": file_type or "as in the file",
            "lookup": lookup,
            **self.defaults,
            **self._given,
            "num_threads": self._num_threads,
            "features": [item.split("=")[0].strip() for item in self._system().split("|") if "= 1" in item],
        }

    def _system(self) -> str:
        text: bytes = self._lib.llama_print_system_info()
        return text.decode().replace("CPU :", "")

    def _load(self, settings: dict[str, Any]) -> None:
        """Load the model as the settings ask for it. Mutates: `_model`."""
        if self._model is None:
            self._model = self._open_model(self._lib.llama_model_default_params())

    def _open_model(self, params: Any) -> Any:
        model = self._lib.llama_model_load_from_file(self._path.encode(), params)
        if not model:
            raise RuntimeError(f"{self.distribution} cannot load {self._path}")
        return model

    def alternatives(self, num_streams: int, num_prompt: int, num_generated: int) -> dict[str, Any]:
        """Return settings worth a try in a case, each alone, in this order."""
        tries = [*self.attention]
        if num_generated == 0 and num_prompt * num_streams > SMALL_UBATCH:
            tries.append({"ubatch": LARGE_UBATCH})
        if num_streams > 1 and "unified" in self.defaults:
            tries.append({"unified": False})
        return {"alternatives": [settings for settings in tries if not settings.keys() & self._given.keys()]}

    def _open_context(self, num_streams: int, stream_len: int, num_outputs: int, chosen: dict[str, Any]) -> None:
        """A context for streams of this length; the last one is kept if it fits."""
        settings = {**self.defaults, **chosen, **self._given}
        shape = (num_streams, stream_len, num_outputs, settings)
        if shape == self._shape:
            self._forget()
            return
        if self._context is not None:
            self._lib.llama_free(self._context)
            self._context = None
        self._load(settings)
        params = self._lib.llama_context_default_params()
        cells = -(-stream_len // CELL_PADDING) * CELL_PADDING
        together = -(-num_streams * stream_len // CELL_PADDING) * CELL_PADDING
        params.n_ctx = together if settings.get("unified", True) else num_streams * cells
        params.n_seq_max = num_streams
        params.n_batch, params.n_ubatch = N_BATCH, settings["ubatch"]
        params.n_threads = params.n_threads_batch = self._num_threads
        params.type_k = params.type_v = KV_TYPES[settings["kv"]]
        self._set_own_params(params, settings)
        self._context = self._lib.llama_init_from_model(self._model, params)
        if not self._context:
            raise RuntimeError(f"{self.distribution} makes no context of {params.n_ctx} cells with {settings}")
        self._shape = shape

    def _set_own_params(self, params: Any, settings: dict[str, Any]) -> None:
        """Set what llama.cpp's forks call otherwise. Mutates: `params`."""
        params.kv_unified = bool(settings["unified"])
        params.flash_attn_type = int(settings["flash_attention"])

    def _forget(self) -> None:
        self._lib.llama_memory_clear(self._lib.llama_get_memory(self._context), True)

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
        status = self._lib.llama_decode(self._context, batch)
        if status:
            raise RuntimeError(f"llama_decode failed with {status} on {len(rows)} tokens")

    def _row(self, index: int) -> Any:
        """Logits of a row of the last batch. Shapes: [V]."""
        pointer = self._lib.llama_get_logits_ith(self._context, index)
        return np.ctypeslib.as_array(ctypes.cast(pointer, ctypes.POINTER(ctypes.c_float)), (self._vocab_size,))

    def measure(self, prompts: list[list[int]], num_generated: int, settings: dict[str, Any] | None = None) -> Timing:
        """Measure one repetition."""
        longest = max(map(len, prompts))
        self._open_context(len(prompts), longest + max(num_generated, 1), len(prompts), settings or {})
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
            if self._propose is not None and len(texts) == 1:
                self._decode_draft(prompts[0], texts[0], timing.num_to_generate)
                timing.note([len(texts[0])])
                continue
            step = [(text[-1], len(prompts[s]) + len(text) - 1, s, True) for s, text in enumerate(texts)]
            self._decode(step)
            for stream, text in enumerate(texts):
                text.append(int(self._row(stream).argmax()))
            timing.note([len(text) for text in texts])
        timing.token_ids = texts
        return timing

    def _decode_draft(self, prompt: list[int], text: list[int], num_to_generate: int) -> None:
        """Decode the last token and a draft of what follows, and keep what is right. Mutates: `text`."""
        draft = self._propose(np.array([*prompt, *text], np.intc)).tolist()[: num_to_generate - len(text) - 1]
        start = len(prompt) + len(text) - 1
        self._decode([(token_id, start + index, 0, True) for index, token_id in enumerate([text[-1], *draft])])
        for index, guess in enumerate([*draft, None]):
            text.append(int(self._row(index).argmax()))
            if text[-1] != guess:
                break
        memory = self._lib.llama_get_memory(self._context)
        self._lib.llama_memory_seq_rm(memory, 0, len(prompt) + len(text) - 1, -1)

    def logits(self, token_ids: list[int]) -> Any:
        """Logits at every position. Shapes: numpy float32 [T, V]."""
        self._open_context(1, len(token_ids), len(token_ids), {})
        found = []
        for first in range(0, len(token_ids), N_BATCH):
            part = token_ids[first : first + N_BATCH]
            self._decode([(token_id, first + index, 0, True) for index, token_id in enumerate(part)])
            found += [self._row(index).copy() for index in range(len(part))]
        return np.stack(found)

    def _requantised(self, path: str, file_type: str) -> str:
        """The model in another format, made once and kept beside this run's other files."""
        import tempfile

        target = Path(tempfile.gettempdir()) / f"{Path(path).stem}.{file_type}.gguf"
        if not target.exists():
            params = self._lib.llama_model_quantize_default_params()
            params.ftype = FILE_TYPES[file_type]
            params.allow_requantize = True
            unfinished = target.with_suffix(".part")
            if self._lib.llama_model_quantize(path.encode(), str(unfinished).encode(), ctypes.byref(params)):
                raise RuntimeError(f"llama.cpp cannot make {file_type} of {path}")
            unfinished.rename(target)
        return str(target)


if __name__ == "__main__":
    serve(LlamaCppSide)
