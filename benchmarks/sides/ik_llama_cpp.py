"""ik_llama.cpp as a side, through the low-level API of ik-llama-cpp-python, which is llama.cpp's of 2024.

Options as of `llama_cpp.py`, but one KV buffer always serves all streams; also repack (weights are rearranged at load).
Flash attention is only tried: compiled for AVX2, version 0.1.5 aborts in it when there are several streams.
Next to read: `llama_cpp.py`.
"""

import ctypes
from typing import Any, ClassVar

from benchmarks.sides.llama_cpp import SMALL_UBATCH, LlamaCppSide
from benchmarks.sides.protocol import serve


class IkLlamaCppSide(LlamaCppSide):
    """A model, and the context of the case measured last."""

    package, distribution = "ik_llama_cpp._ctypes_api", "ik-llama-cpp-python"
    defaults: ClassVar = {"kv": "f16", "flash_attention": False, "ubatch": SMALL_UBATCH, "repack": False}
    attention: ClassVar = [{"flash_attention": True}, {"flash_attention": True, "kv": "q8_0"}]
    _is_repacked = False

    def _system(self) -> str:
        describe = self._lib._lib.llama_print_system_info
        describe.restype = ctypes.c_char_p
        text: bytes = describe()
        return text.decode()

    def _load(self, settings: dict[str, Any]) -> None:
        if self._model is not None and self._is_repacked == settings["repack"]:
            return
        if self._model is not None:
            self._lib.llama_free_model(self._model)
        params = self._lib.llama_model_default_params()
        self._is_repacked = params.repack_tensors = settings["repack"]
        params.use_mmap = not settings["repack"]
        self._model = self._open_model(params)

    def alternatives(self, num_streams: int, num_prompt: int, num_generated: int) -> dict[str, Any]:
        answer = super().alternatives(num_streams, num_prompt, num_generated)
        return {"alternatives": answer["alternatives"] + [{"repack": True}] * ("repack" not in self._given)}

    def _set_own_params(self, params: Any, settings: dict[str, Any]) -> None:
        params.flash_attn = settings["flash_attention"]

    def _forget(self) -> None:
        self._lib.llama_kv_cache_clear(self._context)


if __name__ == "__main__":
    serve(IkLlamaCppSide)
