"""`Settings`: the question that `quire explain` answers, and `Variant`: one choice of the options that decide memory.

Next to read: `memory.py`, which makes a plan of each variant.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

from quire.config import EngineOptions
from quire.errors import ConfigError

DEFAULT_UTILIZATION = EngineOptions.gpu_memory_utilization
MAX_VARIANTS = 64
MAX_CHUNKS = 1024
"""Rows of the table of a prompt's chunks; each takes 8 ms."""


@dataclass(frozen=True, slots=True)
class Variant:
    """Values of the options that decide how many requests fit in memory."""

    gpu_memory_utilization: float
    kv_dtype: str
    max_num_seqs: int
    max_model_len: int


@dataclass(frozen=True, slots=True)
class Settings:
    """The question. Of an option with several values the first one is explained, and all of them are compared.

    Fields:
        tp: ranks that share each layer. batches: streams of a decode. ctx: tokens of a prompt and of a context.
        chunk: tokens of a prefill's chunks; None: prompts are computed whole.
        lora: adapters, each as a rank or NAME=PATH.
        max_num_seqs: () takes the largest batch. max_model_len: () takes `ctx`.
    """

    tp: int = 1
    batches: tuple[int, ...] = (1, 8, 32)
    ctx: int = 512
    chunk: int | None = None
    dtype: str = "auto"
    kv_dtype: tuple[str, ...] = ("auto",)
    quantization: str | None = None
    device: str = "auto"
    gpu_memory_utilization: tuple[float, ...] = (DEFAULT_UTILIZATION,)
    max_num_seqs: tuple[int, ...] = ()
    max_model_len: tuple[int, ...] = ()
    max_num_batched_tokens: int | None = None
    block_size: int | None = None
    lora: tuple[str, ...] = ()

    def variants(self) -> list[Variant]:
        """Return every combination of the values, the explained one first. Raises: ConfigError above MAX_VARIANTS."""
        axes = (
            self.gpu_memory_utilization,
            self.kv_dtype,
            self.max_num_seqs or (max(self.batches),),
            self.max_model_len or (self.ctx,),
        )
        found = [Variant(*values) for values in product(*axes)]
        if len(found) > MAX_VARIANTS:
            raise ConfigError(
                f"{len(found)} combinations of settings are too many for one table: at most {MAX_VARIANTS} fit"
            )
        return found

    @property
    def longest(self) -> int:
        """The longest context that is asked for."""
        return max(self.ctx, *self.max_model_len, 0)


def remedies(asked: Variant, *, is_cpu: bool) -> Iterator[Variant]:
    """Yield variants that need less memory for each request, or leave more of it to other programs."""
    is_narrow = asked.kv_dtype.startswith(("int8", "fp8"))
    if not is_cpu:
        less = replace(asked, gpu_memory_utilization=round(asked.gpu_memory_utilization / 3, 3))
        yield less
        yield from () if is_narrow else (replace(less, kv_dtype="int8"),)
    if not is_narrow:
        yield replace(asked, kv_dtype="int8")
    if asked.max_num_seqs >= 4:
        yield replace(asked, max_num_seqs=asked.max_num_seqs // 4)
    if asked.max_model_len >= 2:
        yield replace(asked, max_model_len=asked.max_model_len // 2)


def price(asked: Variant, variant: Variant) -> str:
    """Name what a variant costs beside the first one."""
    costs = (
        (variant.gpu_memory_utilization != asked.gpu_memory_utilization, "another share for other programs"),
        (
            variant.kv_dtype != asked.kv_dtype,
            "KV is rounded to 8 bit" if variant.kv_dtype.startswith(("int8", "fp8")) else "other KV type",
        ),
        (variant.max_num_seqs != asked.max_num_seqs, f"more than {variant.max_num_seqs} requests wait"),
        (variant.max_model_len != asked.max_model_len, f"above {variant.max_model_len} tokens: refused"),
    )
    return "; ".join(text for differs, text in costs if differs) or "as asked"
