"""Types of the C++ extension (`native/module.cpp`). Addresses are `tensor.data_ptr()` of contiguous tensors."""

requested_isa_missing: bool

def isa() -> str: ...
def isa_supported(isa: str) -> bool: ...
def set_isa(isa: str) -> None: ...
def rms_norm_float32(x: int, weight: int, out: int, num_rows: int, width: int, epsilon: float, /) -> None: ...
def rms_norm_bfloat16(x: int, weight: int, out: int, num_rows: int, width: int, epsilon: float, /) -> None: ...

class ThreadPool:
    """The engine's threads; see `native/threads/pool.h`."""

    def __init__(self, num_threads: int) -> None: ...
    @property
    def num_threads(self) -> int: ...

class RowOptions:
    """What one row of logits wants; see `native/sampling/row.h`. The caller keeps lists alive."""

    temperature: float
    min_p: float
    top_p: float
    top_k: int
    seed: int
    position: int
    repetition_penalty: float
    frequency_penalty: float
    presence_penalty: float
    wants_logprobs: bool
    num_top: int
    def allow(self, ids: int, count: int) -> None: ...
    def ban(self, ids: int, count: int) -> None: ...
    def bias(self, ids: int, values: int, count: int) -> None: ...
    def penalise(self, ids: int, times: int, count: int) -> None: ...

class Sampler:
    """Rows of logits to tokens; see `native/sampling/sampler.h`."""

    def __init__(self, vocab_size: int, pool: ThreadPool | None) -> None: ...
    def sample(
        self,
        logits: int,
        stride: int,
        rows: list[RowOptions],
        token_ids: int,
        logprobs: int = 0,
        ranks: int = 0,
        top_ids: int = 0,
        top_logprobs: int = 0,
        top_stride: int = 0,
    ) -> None: ...
    def logprobs(
        self,
        logits: int,
        stride: int,
        count: int,
        token_ids: int,
        logprobs: int,
        ranks: int,
        top_ids: int,
        top_logprobs: int,
        num_top: int,
    ) -> None: ...
