"""Exercises with a number as the answer, which the engine's own parts compute: scheduler, cache specs, `explain`.

Next to read: `grading.py`, which has the exercises that are programs too.
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

from quire.config import EngineConfig, EngineOptions, Hardware
from quire.resolve import resolve
from quire.sampling_params import SamplingParams
from quire.scheduler.request import Request
from quire.scheduler.scheduler import Scheduler
from quire.types import RequestSpec
from quire_lessons.compare.batching import num_pads
from quire_lessons.compare.results import FAKE_MODEL
from quire_lessons.compare.rig import FakeExecutor, fake_model
from quire_lessons.learn.exercise import NumberAnswer, NumberExercise, Text

if TYPE_CHECKING:
    from quire.insight.explain.explanation import Explained

# --- The real scheduler with an executor that has no model: requests run in milliseconds ----------

MEMORY_BYTES = 1 << 36


def make_config(**options: Any) -> EngineConfig:
    """Return a configuration of an engine without a model. `options`: of `EngineOptions`."""
    chosen = EngineOptions(model=FAKE_MODEL, **{"multi_step_decode": 1, "speculative": "off", **options})
    return resolve(chosen, Hardware("cpu", MEMORY_BYTES, MEMORY_BYTES, True, 1), fake_model())


def make_request(name: str, prompt: Sequence[int], num_tokens: int, *, n: int = 1, salt: str = "") -> Request:
    """Return a request that generates exactly `num_tokens` tokens, `n` times."""
    sampling = SamplingParams(n=n, temperature=0, max_tokens=num_tokens, ignore_eos=True)
    extras = (salt,) if salt else ()
    names = [name, *(f"{name}.{at}" for at in range(1, n))]
    first, *others = [
        Request(RequestSpec(it, list(prompt), sampling, max_tokens=num_tokens, hash_extras=extras)) for it in names
    ]
    first.siblings = others
    return first


class FakeEngine:
    """A scheduler and its executor. `num_rows`: tokens computed in each step; `most_blocks`: most in use at once."""

    def __init__(self, config: EngineConfig, scheduler: Scheduler | None = None) -> None:
        self.scheduler = Scheduler(config.scheduler) if scheduler is None else scheduler
        self.num_rows: list[int] = []
        self.most_blocks = 0
        self._executor = FakeExecutor(config)

    def step(self) -> bool:
        """Run one step. Returns: False if nothing was scheduled."""
        output = self.scheduler.schedule()
        if not output.scheduled:
            return False
        pool = self.scheduler.blocks.pool
        self.most_blocks = max(self.most_blocks, pool.num_usable - pool.num_free)
        self.num_rows.append(output.num_tokens)
        self._executor.submit(output)
        self.scheduler.update(output, self._executor.collect())
        return True

    def serve(self, *requests: Request, between: Callable[[], None] = lambda: None) -> None:
        """Add the requests and run steps until all have ended. `between`: called before each step."""
        for request in requests:
            self.scheduler.add_request(request)
        between()
        while self.step():
            between()


# --- The exercises --------------------------------------------------------------------------------

PRICE_PER_HOUR = 3.0


@cache
def _explained(model: str, **settings: object) -> "Explained":
    from quire.insight.explain.explanation import explain
    from quire.insight.explain.subject import Settings, open_subject

    return explain(open_subject(model), Settings(**settings))  # type: ignore[arg-type]


def _engine(**options: object) -> FakeEngine:
    return FakeEngine(make_config(**{"block_size": 16, "num_blocks_override": 640, "max_model_len": 2048, **options}))


def _pairs() -> NumberAnswer:
    start, count = 96, 32
    return NumberAnswer(
        sum(position + 1 for position in range(start, start + count)),
        {
            count * (count + 1) // 2: Text(
                "That is the triangle among the new tokens; each of them also attends to the 96 cached positions.",
                "这只是新 token 之间的三角形；每个新 token 还要看 96 个已缓存的位置。",
            ),
            count * (start + count): Text(
                "That is the whole rectangle: a new token does not attend to the new tokens behind it.",
                "这是整个矩形：新 token 看不到排在它后面的新 token。",
            ),
            sum(range(start, start + count)): Text(
                "A token attends to itself too: position p has p + 1 pairs.", "token 也看自己：位置 p 有 p + 1 对。"
            ),
        },
    )


def _rows() -> NumberAnswer:
    engine = _engine()
    engine.serve(make_request("a", range(16), 8))
    return NumberAnswer(
        sum(engine.num_rows),
        {
            24: Text(
                "The eighth token is never computed: nothing follows it that would attend to it.",
                "第 8 个 token 从不计算：它后面没有 token，用不到它的键和值。",
            ),
            sum(range(16, 24)): Text(
                "That is the number without a KV cache, where each step computes all tokens again.",
                "这是没有 KV 缓存时的数：每一步都把所有 token 重算一遍。",
            ),
            8: Text("The prompt's 16 tokens are computed too.", "提示词的 16 个 token 也要计算。"),
        },
    )


def _kv_bytes() -> NumberAnswer:
    report = _explained("llama-2-13b", device="A100-40GB", max_model_len=(2000,), batches=(8,)).report
    per_token = report.quantity("KV cache", "per token").value
    return NumberAnswer(
        per_token,
        {
            per_token / 2: Text("Keys and values are both stored: times 2.", "键和值都要存：乘以 2。"),
            per_token / 40: Text("That is one layer: there are 40.", "这是一层：一共 40 层。"),
            per_token * 2: Text("A bfloat16 value has 2 bytes, not 4.", "一个 bfloat16 数是 2 字节，不是 4 字节。"),
        },
    )


def _num_requests() -> NumberAnswer:
    report = _explained("llama-2-13b", device="A100-40GB", max_model_len=(2000,), batches=(8,)).report
    plan = "Memory plan (A100-40GB)"
    usable, weights, left = (report.quantity(plan, it).value for it in ("usable", "weights", "left for KV"))
    request = report.quantity("KV cache", "per token").value * 2000
    return NumberAnswer(
        report.quantity(plan, "requests of 2000 tokens that fit").value,
        {
            usable // request: Text("The weights take 26 GB of it first.", "权重先占去其中 26 GB。"),
            (usable / 0.9 - weights) // request: Text(
                "The engine uses 0.9 of the memory, and a step's activations need some of that.",
                "引擎只用显存的 0.9，一步的激活值也要占一部分。",
            ),
            left // request + 1: Text("A request that fits in part does not fit.", "只放得下一部分的请求就是放不下。"),
        },
    )


def _blocks() -> NumberAnswer:
    engine = _engine()
    engine.serve(make_request("a", range(70), 40, n=3))
    return NumberAnswer(
        engine.most_blocks,
        {
            21: Text(
                "That is without sharing: the prompt's full blocks are in all three tables.",
                "这是不共享时的数：提示词的满块在三张块表里是同一批。",
            ),
            11: Text(
                "The prompt's fifth block is only partly filled: each answer that writes into it gets a copy.",
                "提示词的第 5 块没有填满：往里写的每个回答都会得到一份拷贝。",
            ),
            7: Text(
                "That is one answer; the other two have blocks of their own behind the prompt.",
                "这只是一个回答；另外两个在提示词之后有自己的块。",
            ),
        },
    )


def _steps() -> NumberAnswer:
    engine = _engine(max_num_batched_tokens=256)
    for index in range(8):
        engine.scheduler.add_request(make_request(f"decode-{index}", range(4), 60))
    engine.step()
    request, before = make_request("long", range(1000), 4), len(engine.num_rows)
    engine.scheduler.add_request(request)
    while not request.output_token_ids:
        engine.step()
    return NumberAnswer(
        len(engine.num_rows) - before,
        {
            4: Text(
                "The 8 decodes take 8 tokens of each step's 256: 248 are left for the chunk.",
                "8 个解码请求每步占去 256 中的 8 个 token：留给块的是 248。",
            ),
            1: Text(
                "1000 tokens do not fit into one step: the budget is 256.", "1000 个 token 放不进一步：预算是 256。"
            ),
        },
    )


def _padding() -> NumberAnswer:
    lengths = (100, 200, 300)
    pads = num_pads(lengths)
    total = sum(lengths) + pads
    return NumberAnswer(
        100 * sum(lengths) / total,
        {
            100 * pads / total: Text(
                "That is the share of the padding; asked is the rest.", "这是填充所占的份额；问的是其余部分。"
            ),
            50.0: Text(
                "The rectangle has 3 rows of 300 tokens: 900, of which 600 are real.",
                "矩形是 3 行、每行 300 个 token：共 900，其中 600 个是真的。",
            ),
        },
    )


def _hit() -> NumberAnswer:
    engine = _engine()
    engine.serve(make_request("a", range(96), 4))
    again = make_request("b", range(96), 4)
    engine.serve(again)
    return NumberAnswer(
        again.num_cached_tokens,
        {
            96: Text(
                "At least one token must be computed, else there are no logits to sample from; and hits end"
                " with a full block.",
                "至少要算一个 token，否则没有 logits 可供采样；而且命中只能止于满块。",
            ),
            95: Text(
                "Only full blocks of 16 are shared: 95 is not a multiple.",
                "只共享 16 个 token 的满块：95 不是 16 的倍数。",
            ),
        },
    )


def _rank_bytes() -> NumberAnswer:
    report = _explained("llama-2-70b", device="H100-SXM", tp=16).report
    per_token = report.quantity("KV cache", "per token").value
    return NumberAnswer(
        per_token,
        {
            per_token / 2: Text(
                "8 KV heads cannot be divided by 16: each rank holds a whole one, twice in all.",
                "8 个 KV 头除不尽 16：每个 rank 持有完整的一个，每个头存两份。",
            ),
            per_token * 8: Text(
                "That is the whole model; a rank holds one of the 8 KV heads.",
                "这是整个模型；一个 rank 只持有 8 个 KV 头之一。",
            ),
        },
    )


def _bits() -> NumberAnswer:
    rows = _explained("llama-2-7b", device="cpu", quantization="int4").report.sections[1].rows
    num_bytes = next(row[5] for row in rows if row[0] == "self_attn.o_proj")
    return NumberAnswer(
        num_bytes * 8 / 4096**2,
        {
            4: Text(
                "Each group of 32 weights also stores a scale and a minimum, 16 bits each.",
                "每 32 个权重一组还要存一个缩放和一个最小值，各 16 位。",
            ),
            4.5: Text("The minimum is stored too: 16 more bits per group.", "最小值也要存：每组再加 16 位。"),
        },
    )


def _balance() -> NumberAnswer:
    limits = _explained("llama-2-7b", device="H100-SXM").phases[0].device.limits
    rows = limits.flops_per_s["bf16"] / limits.read_bytes_per_s
    return NumberAnswer(
        rows,
        {
            rows / 2: Text(
                "A weight of 2 bytes needs 2 FLOPs per row: the twos cancel.",
                "一个权重 2 字节，每行 2 次浮点运算：两个 2 抵消。",
            ),
            rows * 2: Text(
                "A weight of 2 bytes needs 2 FLOPs per row: the twos cancel.",
                "一个权重 2 字节，每行 2 次浮点运算：两个 2 抵消。",
            ),
        },
    )


def _draft_tokens() -> NumberAnswer:
    right, count = 0.6, 3
    tokens = sum(right**index for index in range(count + 1))
    return NumberAnswer(
        tokens,
        {
            tokens - 1: Text(
                "The step also yields the token behind the last right draft: plus 1.",
                "这一步还会给出最后一个正确草稿之后的那个 token：加 1。",
            ),
            1 + right * count: Text(
                "A draft counts only if all drafts before it are right: 0.6, 0.6², 0.6³.",
                "只有前面的草稿全对，后一个才算数：0.6、0.6²、0.6³。",
            ),
        },
    )


def _price() -> NumberAnswer:
    phase = _explained("llama-2-7b", device="H100-SXM").phases[-1]
    per_token = PRICE_PER_HOUR / 3600 * phase.floor_s / 32
    return NumberAnswer(
        per_token * 1e6,
        {
            per_token * 32e6: Text(
                "A step yields 32 tokens, one per stream: divide by 32.", "一步得到 32 个 token，每路一个：除以 32。"
            ),
            per_token * 1e6 * 60: Text("An hour has 3600 seconds.", "一小时有 3600 秒。"),
        },
    )


def _adapter_bytes() -> NumberAnswer:
    from quire.insight.explain.subject import open_subject

    config = open_subject("llama-2-7b").hf_config
    width, num_layers = config["hidden_size"], config["num_hidden_layers"]
    num_bytes = num_layers * 2 * 16 * (width + width) * 2  # two projections of [E, E], 2 bytes per value
    return NumberAnswer(
        num_bytes,
        {
            num_bytes / 2: Text(
                "A of rank × inputs and B of outputs × rank both count, with 2 bytes per value.",
                "A（秩 × 输入）和 B（输出 × 秩）都要算，每个值 2 字节。",
            ),
            num_bytes / 32: Text("That is one layer of 32.", "这只是 32 层中的一层。"),
            num_layers * 2 * width * width * 2: Text(
                "That is the layers' own weights; the adapter has rank × (inputs + outputs) values for each.",
                "这是这些层自己的权重；适配器对每个只有秩 ×（输入 + 输出）个值。",
            ),
        },
    )


NUMBERS: tuple[NumberExercise, ...] = (
    NumberExercise(
        "pairs", 2, Text("Pairs of a chunk", "一个块的注意力对数"),
        Text("A chunk of 32 tokens starts at position 96; the 96 tokens before it are cached. How many pairs of a"
             " query and a key does causal attention compute for one head?",
             "一个 32 个 token 的块从位置 96 开始，之前的 96 个 token 已缓存。因果注意力在一个头里要计算多少对查询"
             "和键？"),
        "", _pairs,
    ),
    NumberExercise(
        "rows", 3, Text("Rows with a KV cache", "有 KV 缓存时的行数"),
        Text("A prompt of 16 tokens gets 8 output tokens. With a KV cache, how many tokens does the engine compute"
             " in all its steps together?",
             "16 个 token 的提示词得到 8 个输出 token。有 KV 缓存时，引擎所有步合起来一共计算多少个 token？"),
        "", _rows,
    ),
    NumberExercise(
        "kv-bytes", 4, Text("KV cache of a token", "一个 token 的 KV 缓存"),
        Text("Llama-2-13B has 40 layers and 40 KV heads of 128. How many bytes of KV cache has one token in bfloat16?",
             "Llama-2-13B 有 40 层，40 个 KV 头，每头 128 维。用 bfloat16 时，一个 token 的 KV 缓存占多少字节？"),
        "B", _kv_bytes,
    ),
    NumberExercise(
        "fit", 4, Text("Requests that fit", "放得下的请求数"),
        Text("How many requests of 2,000 tokens does Llama-2-13B in bfloat16 hold at once on an A100-40GB, of whose"
             " memory 0.9 is used? "
             "`quire explain llama-2-13b --device A100-40GB --batch 8` has usable memory, weights, activations and"
             " bytes per token.",
             "在 A100-40GB 上（使用 0.9 的显存），bfloat16 的 Llama-2-13B 能同时容纳多少个 2,000 token 的请求？"
             "可用显存、权重、激活值和每 token 字节数见 `quire explain llama-2-13b --device A100-40GB --batch 8`。"),
        "", _num_requests,
    ),
    NumberExercise(
        "blocks", 5, Text("Blocks of a fork", "分叉后的块数"),
        Text("A prompt of 70 tokens gets 3 answers of 40 tokens (n=3) with blocks of 16. How many blocks are in use"
             " at the end?",
             "70 个 token 的提示词得到 3 个 40 token 的回答（n=3），块大小 16。结束时占用多少个块？"),
        "", _blocks,
    ),
    NumberExercise(
        "steps", 6, Text("Steps to a first token", "到首个 token 的步数"),
        Text("8 requests decode, and a prompt of 1,000 tokens arrives. The budget is 256 tokens per step. After how"
             " many steps does the new request have its first token?",
             "8 个请求正在解码，这时来了一个 1,000 token 的提示词。每步的预算是 256 个 token。新请求在多少步之后得"
             "到第一个 token？"),
        "", _steps,
    ),
    NumberExercise(
        "padding", 7, Text("Use of a padded batch", "填充批次的利用率"),
        Text("Prompts of 100, 200 and 300 tokens are computed as one padded rectangle. How many per cent of its"
             " tokens are real?",
             "100、200 和 300 个 token 的提示词补齐成一个矩形来计算。其中真实的 token 占百分之几？"),
        "%", _padding,
    ),
    NumberExercise(
        "hit", 8, Text("Tokens from the prefix cache", "来自前缀缓存的 token"),
        Text("A prompt of exactly 96 tokens was answered; blocks have 16 tokens. The same prompt comes again. How"
             " many of its tokens come from the prefix cache?",
             "一个正好 96 个 token 的提示词已得到回答，块大小 16。同样的提示词再来一次，有多少个 token 来自前缀缓存？"),
        "", _hit,
    ),
    NumberExercise(
        "rank-bytes", 9, Text("KV cache of a rank", "一个 rank 的 KV 缓存"),
        Text("Llama-2-70B has 80 layers and 8 KV heads of 128. On 16 tensor-parallel ranks in bfloat16: how many"
             " bytes of KV cache does a rank hold per token?",
             "Llama-2-70B 有 80 层，8 个 KV 头，每头 128 维。用 bfloat16 在 16 个张量并行 rank 上：每个 rank 每个"
             " token 存多少字节的 KV 缓存？"),
        "B", _rank_bytes,
    ),
    NumberExercise(
        "bits", 10, Text("Bits of a 4-bit weight", "4 比特权重的比特数"),
        Text("`--quantization int4` stores 4 bits per weight and, for each 32 weights, a scale and a minimum in"
             " fp16. How many bits is that per weight?",
             "`--quantization int4` 每个权重存 4 位，每 32 个权重另存一个 fp16 的缩放和一个 fp16 的最小值。平均每个"
             "权重多少位？"),
        "bits", _bits,
    ),
    NumberExercise(
        "balance", 16, Text("Rows until arithmetic binds", "多少行时算力成为瓶颈"),
        Text("An H100 reads 3.35 TB/s and computes 989 TFLOP/s in bf16. From about how many rows on does a product"
             " with bf16 weights take longer to compute than its weights take to read?",
             "H100 的读带宽是 3.35 TB/s，bf16 算力是 989 TFLOP/s。大约从多少行起，与 bf16 权重的矩阵乘的计算时间超"
             "过读权重的时间？"),
        "rows", _balance,
    ),
    NumberExercise(
        "draft-tokens", 17, Text("Tokens of a step with drafts", "有草稿的一步得到的 token"),
        Text("Each of 3 drafts is right with probability 0.6, independently. How many tokens does a verifying step"
             " yield on average?",
             "3 个草稿各以 0.6 的概率猜对，互相独立。一个验证步平均得到多少个 token？"),
        "tokens", _draft_tokens,
    ),
    NumberExercise(
        "price", 22, Text("Price of a million tokens", "一百万 token 的价格"),
        Text("An H100 costs 3 dollars an hour and decodes 32 streams of Llama-2-7B at a context of 512, each step as"
             " fast as the floor of "
             "`quire explain llama-2-7b --device H100-SXM`. What do a million output tokens cost, in dollars?",
             "一块 H100 每小时 3 美元，以 512 的上下文解码 32 路 Llama-2-7B，每一步都达到 `quire explain llama-2-7b"
             " --device H100-SXM` 给出的下限。"
             "一百万个输出 token 要多少美元？"),
        "dollars", _price,
    ),
    NumberExercise(
        "adapter-bytes", 24, Text("Bytes of an adapter", "一个适配器的字节数"),
        Text("An adapter of rank 16 changes q_proj and v_proj of Llama-2-7B: 32 layers, 4096 inputs and outputs. How"
             " many bytes are its matrices in bfloat16?",
             "一个秩为 16 的适配器改变 Llama-2-7B 的 q_proj 和 v_proj：32 层，输入和输出都是 4096。它的矩阵用 bfloat16"
             " 占多少字节？"),
        "B", _adapter_bytes,
    ),
)  # fmt: skip
