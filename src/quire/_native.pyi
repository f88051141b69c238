"""Types of the C++ extension (`native/module.cpp`). Addresses are `tensor.data_ptr()`; the caller keeps the memory."""

import enum
from collections.abc import Callable, Sequence

requested_isa_missing: bool
unbuilt_isa: str

def isa() -> str: ...
def isa_notes() -> list[str]: ...
def choose_isa(requested: str, distrusted: list[str]) -> tuple[str, bool, list[str]]: ...
def self_test(isa: str) -> str: ...
def result_digests(isa: str) -> list[tuple[str, int]]: ...
def isa_supported(isa: str) -> bool: ...
def set_isa(isa: str) -> None: ...

# --- native/plan/types.h: what plans are made of ------------------------------------------------

class RowType(enum.Enum):
    f32 = 0
    bf16 = 1
    q8 = 2

class WeightFormat(enum.Enum):
    f32 = 0
    f16 = 1
    bf16 = 2
    q4 = 3
    q4m = 4
    q5 = 5
    q5m = 6
    q8 = 7
    q4k = 8
    q5k = 9
    q6k = 10
    iq4nl = 11
    iq4xs = 12
    mxfp4 = 13
    nvfp4 = 14

class KvFormat(enum.Enum):
    f32 = 0
    f16 = 1
    bf16 = 2
    i8 = 3
    e4m3 = 4
    e5m2 = 5

class Activation(enum.Enum):
    none = 0
    relu = 1
    gelu = 2
    gelu_tanh = 3
    silu = 4
    relu2 = 5

class Rows:
    def __init__(self, address: int, stride_bytes: int, type: RowType) -> None: ...

class Weight:
    def __init__(
        self, address: int, num_outputs: int, num_inputs: int, format: WeightFormat, next: Weight | None = None
    ) -> None: ...

class KvLayer:
    format: KvFormat
    def __init__(
        self, base: int, block_stride_bytes: int, block_size: int, num_kv_heads: int, head_size: int, format: KvFormat,
        group: int,
    ) -> None: ...  # fmt: skip

class KvAhead:
    def __init__(self, kv: KvLayer, window: int, begin: float, end: float) -> None: ...

def has_tiles() -> bool: ...
def latent_cost(
    start: int, count: int, rank: int, rotary_size: int, nope_size: int, value_size: int
) -> tuple[bool, int]: ...  # fmt: skip
def tile_bytes(format: WeightFormat, num_inputs: int) -> int: ...
def kv_layer_bytes(format: KvFormat, block_size: int, num_kv_heads: int, head_size: int) -> int: ...
def wanted_rows(format: WeightFormat) -> RowType: ...

# --- native/text/pieces.h -----------------------------------------------------------------------

class Pieces:
    def __init__(
        self, tokens: list[str], scores: list[float], matched: Sequence[int], unknown: int, marks_start: bool
    ) -> None: ...
    def set_merges(self, lines: list[str]) -> int: ...
    def encode(self, text: str) -> list[int]: ...
    def find(self, text: str) -> int: ...

# --- native/weights/ ----------------------------------------------------------------------------

def explain_bus_errors() -> None: ...
def read_strings(data: int, num_bytes: int, count: int, most_bytes: int) -> tuple[list[str], int]: ...
def packed_bytes(format: WeightFormat, num_outputs: int, num_inputs: int) -> int: ...

class CodeLayout(enum.Enum):
    """See `native/weights/codes.h`."""

    across4 = 0
    across8 = 1
    down4 = 2
    down8 = 3
    awq = 4
    nvfp4 = 5
    nvfp4_scales = 6

def unpack_codes(
    layout: CodeLayout, data: int, stride_bytes: int, rows: int, num_rows: int, first: int, count: int, out: int
) -> None: ...

class PackedRows:
    def __init__(
        self, stored: str, rows: int, num_rows: int, num_inputs: int, row_stride_bytes: int, packed: int,
        first_output: int, target: WeightFormat, row_order: int = 0, codebook: int = 0,
    ) -> None: ...  # fmt: skip
    def set_codes(
        self, layout: CodeLayout, data: int, stride_bytes: int, first_row: int, first_column: int, is_direct: bool,
        flipped: int = 0,
    ) -> None: ...  # fmt: skip
    def set_groups(self, table: int, scales: int, zeros: int, groups: int, num_groups: int) -> None: ...
    whole_inputs: int
    first_input: int
    def set_block_scales(self, layout: CodeLayout, data: int, stride_bytes: int, factor: float) -> None: ...

def pack_rows(jobs: Sequence[PackedRows], num_threads: int = 1) -> None: ...
def decode_blocks(format: str, blocks: int, num_values: int, codebook: int, out: int) -> None: ...
def quantize_rows(
    format: str, rows: int, num_rows: int, num_inputs: int, out: int, importance: int = 0, num_threads: int = 1
) -> None: ...

# --- native/plan/plan.h -------------------------------------------------------------------------

class Plan:
    """Each op of `native/ops/` is a method: its fields by position or by name, and `parts`; see `native/plan/op.h`."""

    def __init__(self, pool: ThreadPool | int, max_tokens: int, max_requests: int) -> None: ...
    def __getattr__(self, op: str) -> Callable[..., None]: ...
    def run(
        self, parts: int, num_requests: int, num_logit_rows: int, request_rows: int, starts: int, counts: int,
        logit_rows: int, tokens: int, tokens_stride: int, block_tables: int, table_stride: int, group_stride: int,
        nanoseconds: int = 0,
    ) -> None: ...  # fmt: skip
    def set_tile_rows(self, num_rows: int) -> None: ...
    def set_ahead_bytes(self, num_bytes: int) -> None: ...
    def fetch_experts(self) -> None: ...
    @property
    def num_threads(self) -> int: ...

def expert_bytes_wanted() -> int: ...

# --- native/threads/pool.h ----------------------------------------------------------------------

class ThreadPool:
    """The engine's threads; see `native/threads/pool.h`."""

    def __init__(self, num_threads: int) -> None: ...
    @property
    def num_threads(self) -> int: ...

# --- native/ranks/exchange.h: memory that ranks share --------------------------------------------

class Exchange:
    """One rank's view of the memory that ranks share, which the caller keeps mapped."""

    def __init__(self, memory: int, rank: int, num_ranks: int, num_threads: int, num_spins: int) -> None: ...
    @property
    def rank(self) -> int: ...
    @property
    def num_ranks(self) -> int: ...
    @property
    def num_threads(self) -> int: ...
    @property
    def address(self) -> int: ...
    @property
    def bytes_sent(self) -> int: ...
    @property
    def has_given_up(self) -> bool: ...
    def give_up(self) -> None: ...
    def broadcast(self, values: int, count: int) -> bool: ...

class Channel:
    """One side's view of memory through which a rank sends rows, which the caller keeps mapped."""

    def __init__(self, memory: int, num_spins: int) -> None: ...
    def give_up(self) -> None: ...
    def send(self, rows: int, num_rows: int, row_bytes: int, stride: int) -> bool: ...
    def receive(self, rows: int, num_rows: int, row_bytes: int, stride: int) -> bool: ...

def channel_bytes() -> int: ...
def exchange_bytes(num_ranks: int, num_threads: int) -> int: ...

# --- native/sampling: rows of logits to tokens --------------------------------------------------

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
    def merge_best(
        self,
        logits: int,
        stride: int,
        count: int,
        first_id: int,
        sizes: int,
        num_rows: int,
        exchange: Exchange,
        keys: int,
    ) -> bool: ...
    def sample_best(self, keys: int, num_keys: int, rows: list[RowOptions], token_ids: int) -> None: ...
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
