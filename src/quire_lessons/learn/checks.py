"""Checks of learners' programs. Each runs the program in the engine or beside it and raises `Wrong` with the case that
differs.

Next to read: `grading.py`, which has the tasks; `../compare/rig.py`.
"""

import itertools
import random
from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import Any

import numpy as np

from quire.config import EngineConfig, SchedulerConfig
from quire.drafts.suffix import SuffixProposer
from quire.engine.llm_engine import LLMEngine
from quire.events import EventLog
from quire.outputs import RequestOutput
from quire.sampling.native import NativeRowSampler
from quire.sampling.state import SamplingState
from quire.sampling_params import SamplingParams
from quire.scheduler.block_pool import BlockPool
from quire.scheduler.blocks import BlockManager
from quire.scheduler.prefix_cache import PrefixChain
from quire.scheduler.request import Request
from quire.scheduler.request_table import RequestTable
from quire.scheduler.scheduler import Scheduler
from quire.types import NULL_BLOCK_ID, NewRequest, RequestResult, StepResult
from quire_lessons.compare.kv import workload
from quire_lessons.compare.results import FAKE_MODEL, RunSettings, TimedRequest
from quire_lessons.compare.rig import Clock, Rig, SharedExecutor
from quire_lessons.learn.exercise import LearnerProgram, Wrong, require_number, require_numbers, shown
from quire_lessons.learn.numbers import FakeEngine, make_config, make_request

# --- Programs that decide in integers: the queue's order, a pool of blocks, prefix hashes, drafts ---

SLOTS = 4
MOST_WAIT = 200
WANTED_SHARE = 0.75
"""Mean wait of a learner's order, at most, relative to the order of arrival."""
HASH_BLOCK = 4
FIRST_PROMPT = (11, 12, 13, 14, 21, 22, 23, 24, 31, 32, 33, 34, 41, 42)
HASH_CASES: dict[str, tuple[tuple[int, ...], str, str, str]] = {
    "same": (FIRST_PROMPT, "", "the same tokens", "同样的 token"),
    "last": ((*FIRST_PROMPT[:8], 35, 36, 37, 38, 41), "", "the same 8 tokens, then others", "前 8 个相同，之后不同"),
    "moved": (
        (*FIRST_PROMPT[4:8], *FIRST_PROMPT[4:8], 9),
        "",
        "it begins with the first prompt's second block",
        "以第一个提示词的第二块开头",
    ),
    "first": ((1, *FIRST_PROMPT[1:]), "", "another first token", "第一个 token 不同"),
    "exchanged": ((12, 11, *FIRST_PROMPT[2:]), "", "the first two tokens exchanged", "前两个 token 互换"),
    "salt": (FIRST_PROMPT, "tenant", "the same tokens with another salt", "同样的 token，盐不同"),
}
"""Prompts that come after `FIRST_PROMPT`, their salts, and words for them."""
MAX_DRAFT = 4
MOST_STEPS = 1.15
"""Decode steps that a learner's drafts may need, relative to the drafts of the engine's proposer."""


def _rig(**options: Any) -> Rig:
    return Rig(RunSettings(), FAKE_MODEL, lambda *_: None, block_size=16, **options)


class OrderedTable(RequestTable):
    """The scheduler's table of requests with a learner's order of the queue."""

    def __init__(self, config: SchedulerConfig, key: Callable[[Request], float]) -> None:
        super().__init__(config)
        self.sort_key = lambda request, _: (key(request), *request.serial)


def order_jobs() -> list[TimedRequest]:
    """Return a queue that is never short: long requests first, then short ones as fast as they can be answered."""
    draw = random.Random(5)
    jobs = [TimedRequest(tuple(range(8)), 8, 0.0)] * SLOTS + [TimedRequest(tuple(range(300)), 40, 1.0)] * 6
    for index in range(108):
        prompt, num_tokens = tuple(range(8 + draw.randrange(24))), 6 + draw.randrange(6)
        jobs.append(TimedRequest(prompt, num_tokens, float(int(2 + index / 0.45))))
    return jobs


def check_order(program: LearnerProgram) -> None:
    """Run a queue in the learner's order: waits must be shorter than in order of arrival, and bounded."""
    program.defined("order")
    jobs, rig = order_jobs(), _rig(max_num_seqs=SLOTS, max_model_len=512)

    def key(request: Request) -> float:
        args = (request.num_prompt_tokens, request.max_tokens, request.arrival_time_s)
        case = f"order({', '.join(map(shown, args))})"
        first, second = (require_number(program.call("order", *args), case) for _ in range(2))
        if first != second:
            raise Wrong(
                f"{case} is {first:.4g} at first and then {second:.4g}: the place of a request may not change.",
                f"{case} 先是 {first:.4g}，再是 {second:.4g}：请求的位置不能变。",
            )
        return first

    def make(config: EngineConfig, events: EventLog, clock: Clock) -> Scheduler:
        return Scheduler(config.scheduler, events, clock, requests=OrderedTable(config.scheduler, key))

    runs = {"arrival": rig.drive("arrival", jobs), "own": rig.drive("own", jobs, make)}
    waits = {
        name: [start - job.arrival for start, job in zip(run.started, jobs, strict=True)] for name, run in runs.items()
    }
    mean, usual = (sum(waits[name]) / len(jobs) for name in ("own", "arrival"))
    if mean > WANTED_SHARE * usual:
        raise Wrong(
            f"Requests wait {mean:.1f} steps on average; in order of arrival {usual:.1f}, and at most"
            f" {WANTED_SHARE * usual:.1f} are wanted. A short request behind long ones waits as long as they run.",
            f"请求平均等待 {mean:.1f} 步；按到达顺序是 {usual:.1f} 步，要求至多 {WANTED_SHARE * usual:.1f} 步。"
            "排在长请求后面的短请求要等它们跑完。",
        )
    longest = max(range(len(jobs)), key=lambda index: waits["own"][index])
    wait, job = waits["own"][longest], jobs[longest]
    if wait > MOST_WAIT:
        later = [at for at, other in enumerate(jobs) if other.arrival > job.arrival]
        num_first = sum(runs["own"].started[at] < job.arrival + wait for at in later)
        raise Wrong(
            f"Request {longest} ({len(job.prompt)} prompt tokens) waits {wait:.0f} steps, at most {MOST_WAIT} are"
            " allowed:"
            f" {num_first} requests that came later went first. The time of arrival must count more.",
            f"请求 {longest}（提示词 {len(job.prompt)} 个 token）等了 {wait:.0f} 步，至多允许 {MOST_WAIT} 步："
            f"{num_first} 个后到的请求先走了。到达时间要占更大的分量。",
        )


class CheckedPool(BlockPool):
    """A learner's pool beside the engine's: each call goes to both, and the learner's blocks are those that count."""

    def __init__(self, program: LearnerProgram, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self._program = program
        self._pool = program.call("Pool", num_blocks)
        self._check_free(f"Pool({num_blocks})")

    def take(self, count: int) -> list[int]:
        """See `BlockPool`. Raises: Wrong if the learner's pool gives a block that is in use, or too few."""
        case = f"take({count})"
        block_ids = [int(item) for item in require_numbers(self._call("take", count), case, count)]
        for block_id in block_ids:
            if not NULL_BLOCK_ID < block_id < self.num_blocks:
                raise Wrong(
                    f"{case} gives block {block_id}: 1 to {self.num_blocks - 1} may be taken, block 0 has no owner.",
                    f"{case} 给出块 {block_id}：可取的是 1 到 {self.num_blocks - 1}，块 0 不属于任何请求。",
                )
            if self.reference_counts[block_id]:
                raise Wrong(
                    f"{case} gives block {block_id}, which is in use: the keys in it would be overwritten.",
                    f"{case} 给出块 {block_id}，它正被占用：其中的键会被覆盖。",
                )
            super().share(block_id)
        self._check_free(case)
        return block_ids

    def share(self, block_id: int) -> None:
        """See `BlockPool`."""
        super().share(block_id)
        self._call("share", block_id)
        self._check_free(f"share({block_id})")

    def release(self, block_id: int, *, holds_prefix: bool) -> None:
        """See `BlockPool`."""
        super().release(block_id, holds_prefix=holds_prefix)
        self._call("release", block_id)
        self._check_free(f"release({block_id})", self.reference_counts[block_id])

    def _call(self, name: str, *args: Any) -> Any:
        method = getattr(self._pool, name, None)
        if not callable(method):
            raise Wrong(f"Pool has no method {name}.", f"Pool 没有方法 {name}。")
        return self._program.invoke(name, method, *args)

    def _check_free(self, case: str, num_owners: int = 0) -> None:
        free = self._call("num_free")
        if free != self.num_free:
            why, why_zh = "", ""
            if num_owners:
                why = f": another owner of the block is left ({num_owners})"
                why_zh = f"：这个块还有别的所有者（{num_owners} 个）"
            raise Wrong(
                f"After {case} num_free() must be {self.num_free}; it is {shown(free)}{why}.",
                f"{case} 之后 num_free() 应为 {self.num_free}，却是 {shown(free)}{why_zh}。",
            )


def check_pool(program: LearnerProgram) -> None:
    """Share blocks by hand, then run the workload of `quire compare kv` on the learner's pool."""
    pool = CheckedPool(program, 8)
    first = pool.take(3)
    pool.share(first[1])
    for block_id in (*first, first[1]):
        pool.release(block_id, holds_prefix=False)
    pool.take(7)
    jobs, rig = workload(0, 32, None, 256, 1000), _rig(max_num_seqs=64, max_model_len=256, num_blocks_override=96)
    pools: list[CheckedPool] = []

    def make(config: EngineConfig, events: EventLog, clock: Clock) -> Scheduler:
        pools.append(CheckedPool(program, config.scheduler.num_blocks))
        blocks = BlockManager(config.scheduler, events, pools[0])
        return Scheduler(config.scheduler, events, clock, blocks=blocks)

    own, usual = rig.drive("own", jobs, make).outputs, rig.drive("engine", jobs).outputs
    pools[0].take(pools[0].num_usable)  # all came back, each of them once
    for index in [at for at in range(len(jobs)) if own[at] != usual[at]]:
        raise Wrong(
            f"Request {index} of the workload gets other tokens with this pool than with the engine's.",
            f"负载中的请求 {index} 用这个块池得到的 token 与引擎的不同。",
        )


class LearnersChain(PrefixChain):
    """A sequence's chain of blocks whose digests are a learner's hashes."""

    def __init__(self, program: LearnerProgram, hash_extras: tuple[str, ...]) -> None:
        super().__init__(hash_extras)
        self._program, self._token_ids = program, list[int]()

    def extend(self, token_ids: Sequence[int], block_size: int) -> None:
        """See `PrefixChain`."""
        num_done = len(self.digests)
        super().extend(token_ids, block_size)
        self._token_ids += token_ids
        hashes = own_hashes(self._program, self._token_ids, "".join(self.hash_extras))
        self.digests[num_done:] = [repr(item).encode() for item in hashes[num_done:]]


def own_hashes(program: LearnerProgram, tokens: Sequence[int], salt: str) -> list[Any]:
    """Return a learner's hashes of a prompt. Raises: Wrong if there is not one per full block."""
    found, wanted = program.call("block_hashes", list(tokens), HASH_BLOCK, salt), len(tokens) // HASH_BLOCK
    if not isinstance(found, (list, tuple)) or len(found) != wanted:
        raise Wrong(
            f"{len(tokens)} tokens in blocks of {HASH_BLOCK} have {wanted} full blocks, and only these are shared;"
            f" block_hashes returns {shown(found)}.",
            f"{len(tokens)} 个 token、块大小 {HASH_BLOCK}，有 {wanted} 个满块，只有满块才共享；"
            f"block_hashes 返回 {shown(found)}。",
        )
    return list(found)


def check_hash(program: LearnerProgram) -> None:
    """Serve pairs of prompts with the learner's hashes: from the cache must come what the engine takes from it."""
    own_hashes(program, FIRST_PROMPT[:3], "")
    config = make_config(block_size=HASH_BLOCK, num_blocks_override=64, max_model_len=64)
    first = own_hashes(program, FIRST_PROMPT, "")
    for name, (tokens, salt, label, label_zh) in HASH_CASES.items():
        num_cached = []
        for is_own in (False, True):
            first_request = make_request("first", FIRST_PROMPT, 1)
            engine, second = FakeEngine(config), make_request("second", tokens, 2, salt=salt)
            for request in (first_request, second) if is_own else ():
                request.chain = LearnersChain(program, request.spec.hash_extras)
            engine.serve(first_request)
            engine.serve(second)
            num_cached.append(second.num_cached_tokens)
        usual, own = num_cached
        if own < usual:
            raise Wrong(
                f"Case '{name}' ({label}): the engine takes {usual} tokens from the cache, with these hashes {own}."
                " Equal prefixes must have equal hashes.",
                f"情形 {name}（{label_zh}）：引擎从缓存取 {usual} 个 token，用这些哈希是 {own} 个。相同的前缀必须有"
                "相同的哈希。",
            )
        pairs = zip(tokens, FIRST_PROMPT, strict=False)
        num_equal = 0 if salt else sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        hashes = enumerate(zip(own_hashes(program, tokens, salt), first, strict=False))
        shared = [at for at, pair in hashes if pair[0] == pair[1] and (at + 1) * HASH_BLOCK > num_equal]
        if shared:
            raise Wrong(
                f"Case '{name}' ({label}): block {shared[0]} has the hash of block {shared[0]} of the first prompt, and"
                f" {own} tokens come from the cache, {usual} are right. A block's keys depend on all tokens up to its"
                " end, in order, and on the salt.",
                f"情形 {name}（{label_zh}）：第 {shared[0]} 块与第一个提示词的第 {shared[0]} 块哈希相同，"
                f"从缓存取了 {own} 个 token，应为 {usual} 个。一个块的键取决于直到它末尾的所有 token、它们的顺序，"
                "以及盐。",
            )
        if own > usual:
            raise Wrong(
                f"Case '{name}' ({label}): {own} tokens come from the cache, {usual} are right: a block has the hash of"
                " another one of the first prompt.",
                f"情形 {name}（{label_zh}）：从缓存取了 {own} 个 token，应为 {usual} 个：有一块与第一个提示词的另一"
                "块哈希相同。",
            )


def script(name: str) -> tuple[list[int], list[int]]:
    """Return a prompt and its answer: a loop, the prompt with one token edited, a table, or new text."""
    draw = random.Random(name)
    text = [draw.randrange(100, 999) for _ in range(30)]
    rows = [token for at in range(0, 24, 2) for token in (7, text[at], 8, text[at + 1], 9)]
    scripts = {"loop": ([1], [3, 4, 5, 6] * 8), "edit": (text, [*text[:12], 5, *text[13:]]), "table": ([1, 2], rows)}
    return scripts.get(name, (text[:10], text[10:]))


def num_decode_steps(prompt: list[int], answer: list[int], propose: Callable[[Request], Sequence[int]]) -> int:
    """Return the steps in which the scheduler generates an answer with drafts that are verified against it."""
    scheduler = Scheduler(make_config(block_size=16, num_blocks_override=64, max_model_len=256).scheduler)
    request, num_steps = make_request("a", prompt, len(answer)), -1
    scheduler.add_request(request)
    while not request.status.is_finished:
        if request.output_token_ids:
            request.draft_token_ids = tuple(propose(request))
        output, at, num_right = scheduler.schedule(), len(request.output_token_ids), 0
        drafts = output.scheduled[0].draft_token_ids
        while num_right < len(drafts) and drafts[num_right] == answer[at + num_right]:
            num_right += 1
        result = RequestResult("a", tuple(answer[at : at + num_right + 1]))
        scheduler.update(output, StepResult(output.step_id, (result,)))
        num_steps += 1
    return num_steps


def check_propose(program: LearnerProgram) -> None:
    """Count the steps that verify the learner's drafts, beside those with the drafts of the engine's proposer."""
    for name in ("loop", "edit", "table", "new"):
        prompt, answer = script(name)
        proposer, missed = SuffixProposer(), list[str]()

        def usual_drafts(request: Request, proposer: SuffixProposer = proposer) -> list[int]:
            return list(proposer.propose(request, MAX_DRAFT).token_ids)

        usual = num_decode_steps(prompt, answer, usual_drafts)
        proposer = SuffixProposer()

        def own_drafts(
            request: Request,
            proposer: SuffixProposer = proposer,
            answer: list[int] = answer,
            missed: list[str] = missed,
        ) -> list[int]:
            tokens = request.token_slice(0, request.num_tokens)
            case = f"propose({shown(tokens)}, {MAX_DRAFT})"
            drafts = [int(item) for item in require_numbers(program.call("propose", tokens, MAX_DRAFT), case)]
            if len(drafts) > MAX_DRAFT:
                raise Wrong(
                    f"{case} returns {len(drafts)} tokens: at most {MAX_DRAFT} were asked for.",
                    f"{case} 返回 {len(drafts)} 个 token：至多要 {MAX_DRAFT} 个。",
                )
            others, at = list(proposer.propose(request, MAX_DRAFT).token_ids), len(request.output_token_ids)
            if others[:1] == answer[at : at + 1] and drafts[: len(others)] != others:
                missed.append(f"{tokens[-6:]}: {others} / {drafts}")
            return drafts

        own = num_decode_steps(prompt, answer, own_drafts)
        if own > MOST_STEPS * usual + 1:
            at = missed[0] if missed else "-"
            raise Wrong(
                f"Text '{name}': {len(answer)} tokens take {own} steps with these drafts, {usual} with the engine's."
                f" After the tokens … {at} (the engine's draft / yours).",
                f"文本 {name}：{len(answer)} 个 token 用这些草稿要 {own} 步，用引擎的草稿要 {usual} 步。"
                f"在 token … {at}（引擎的草稿 / 你的草稿）。",
            )


# --- Programs about one row of a model: the mask of a chunk, the tokens that sampling keeps -------
# What is right is found by running the engine: its attention is read off a model, its sampler is drawn from.

MASK_CASES = ((0, 5), (6, 3), (9, 1), (4, 6))
"""Cached and new tokens of chunks."""
NUM_DRAWS = 4000
"""Draws after which a token of probability 0.05 is still missing once in 10^89 times."""
NUM_REPORTED = 5
MODEL = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "vocab_size": 64, "rms_norm_eps": 1e-5,
    "max_position_embeddings": 64, "hidden_act": "silu", "tie_word_embeddings": True, "rope_theta": 10000.0,
}  # fmt: skip
Row = list[tuple[int, int, float]]
"""Rank, id and log-probability of the likeliest next tokens."""


def engine_mask(num_tokens: int) -> list[list[bool]]:
    """Find which positions each token of a prompt attends to, by running a model of one layer with random weights.

    The token at position j is changed: rows whose likeliest next tokens change attend to it.
    """
    rig = Rig(
        RunSettings(),
        "random weights",
        lambda *_: None,
        MODEL,
        load_format="dummy",
        dtype="float32",
        max_num_seqs=1,
        max_model_len=64,
        block_size=16,
        num_blocks_override=8,
    )
    try:
        prompts = [[at + 32 * (at == changed) for at in range(num_tokens)] for changed in range(-1, num_tokens)]
        usual, *others = [_likeliest(rig, prompt) for prompt in prompts]
        return [[other[row] != usual[row] for other in others] for row in range(num_tokens)]
    finally:
        rig.executor.shutdown()


_serial = itertools.count()


def _likeliest(rig: Rig, prompt: list[int]) -> list[Row]:
    """Return the likeliest next tokens behind each token of a prompt."""
    engine = LLMEngine(rig.config, SharedExecutor(rig.executor))
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=NUM_REPORTED, ignore_eos=True)
    # A row's tokens are reported with the token behind it, so the last row needs one too.
    engine.add_request(f"mask-{next(_serial)}", {"prompt_token_ids": [*prompt, 0]}, params)
    outputs: list[Any] = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    output = outputs[-1]
    assert isinstance(output, RequestOutput)
    # The token behind it is reported too, whatever its rank.
    return [
        sorted(
            (item.rank, token_id, item.logprob)
            for token_id, item in row.items()
            if item.rank is not None and item.rank <= NUM_REPORTED
        )
        for row in (output.prompt_logprobs or [])
        if row is not None
    ]


def check_mask(program: LearnerProgram) -> None:
    """Compare the mask of chunks with the positions that the engine's attention reads."""
    truth = engine_mask(max(sum(case) for case in MASK_CASES))
    for num_cached, num_new in MASK_CASES:
        rows, case = program.call("mask", num_cached, num_new), f"mask({num_cached}, {num_new})"
        if not hasattr(rows, "__len__") or len(rows) != num_new:
            raise Wrong(
                f"{case} must have {num_new} rows, one per new token; it returns {shown(rows)}.",
                f"{case} 应有 {num_new} 行，每个新 token 一行，却返回 {shown(rows)}。",
            )
        for at, row in enumerate(rows):
            values = require_numbers(row, f"{case} [{at}]", num_cached + num_new)
            for position, value in enumerate(values):
                if bool(value) != truth[num_cached + at][position]:
                    raise _wrong_cell(f"{case} [{at}]", num_cached + at, position, is_read=not value)


def _wrong_cell(case: str, own: int, position: int, *, is_read: bool) -> Wrong:
    if is_read:
        return Wrong(
            f"{case} is the token at position {own}. The engine reads position {position} for it, this mask hides it: a"
            " token attends to itself and to all earlier positions, cached or not.",
            f"{case} 是位置 {own} 的 token。引擎为它读位置 {position}，这个掩码却遮住了：token 关注自己和之前的所有"
            "位置，无论是否来自缓存。",
        )
    return Wrong(
        f"{case} is the token at position {own}. The engine does not read position {position} for it, this mask lets"
        " it:"
        " no token attends to a later one.",
        f"{case} 是位置 {own} 的 token。引擎不为它读位置 {position}，这个掩码却放行：token 看不到排在后面的 token。",
    )


USUAL = (0.40, 0.30, 0.15, 0.10, 0.05)
KEEP_CASES: tuple[tuple[tuple[float, ...], float, float, str, str], ...] = (
    (USUAL, 0.9, 0.0, "the token that crosses top_p stays", "跨过 top_p 的那个 token 保留"),
    ((0.05, 0.30, 0.10, 0.40, 0.15), 0.8, 0.0, "the likeliest tokens count, wherever they stand",
                                               "看概率大小，不看排列位置"),
    (USUAL, 1.0, 0.3, "min_p is relative to the likeliest token", "min_p 是相对于最可能的 token 的"),
    (USUAL, 0.01, 0.0, "the likeliest token always stays", "最可能的 token 总要保留"),
    (USUAL, 0.8, 0.3, "min_p comes first, and top_p refers to what it leaves", "先 min_p，top_p 作用于剩下的"),
    ((0.25, 0.25, 0.25, 0.25), 0.5, 0.0, "of equal tokens the lower ids come first", "概率相等时 id 小的在前"),
    (USUAL, 1.0, 0.0, "nothing is dropped", "什么都不丢"),
)  # fmt: skip
"""Probabilities, top_p, min_p, and the rule that decides."""


def drawn_tokens(probabilities: Sequence[float], top_p: float, min_p: float) -> list[int]:
    """Return every token that the engine's sampler draws in `NUM_DRAWS` draws from these probabilities."""
    params = SamplingParams(top_p=top_p, min_p=min_p, max_tokens=None)
    sampler, states = NativeRowSampler(len(probabilities)), []
    for seed in range(NUM_DRAWS):
        states.append(SamplingState(NewRequest(str(seed), (0,), 1, params, None, (), seed), params, len(probabilities)))
        sampler.add(states[-1])
    logits = np.tile(np.log(np.array(probabilities, np.float32)), (NUM_DRAWS, 1))
    return sorted({token_id for token_id, _ in sampler.sample(logits, states) if token_id is not None})


def check_keep(program: LearnerProgram) -> None:
    """Compare the tokens that the learner's function keeps with those that the engine's sampler can draw."""
    for probabilities, top_p, min_p, rule, rule_zh in KEEP_CASES:
        case = f"keep({list(probabilities)}, {top_p}, {min_p})"
        kept = require_numbers(program.call("keep", list(probabilities), top_p, min_p), case, len(probabilities))
        own = [token_id for token_id, value in enumerate(kept) if value > 0]
        usual = drawn_tokens(probabilities, top_p, min_p)
        if own != usual:
            raise Wrong(
                f"{case} keeps the tokens {own}; the engine draws from {usual}: {rule}.",
                f"{case} 保留 token {own}；引擎从 {usual} 中抽取：{rule_zh}。",
            )
        total = sum(probabilities[token_id] for token_id in usual)
        for token_id in usual:
            expected = probabilities[token_id] / total
            if abs(kept[token_id] - expected) > 1e-6:
                raise Wrong(
                    f"{case}: token {token_id} has {kept[token_id]:.4g}, right is {expected:.4g}. What is kept is"
                    " scaled"
                    f" to a sum of 1; this sum is {sum(kept):.4g}.",
                    f"{case}：token {token_id} 是 {kept[token_id]:.4g}，应为 {expected:.4g}。保留下来的要缩放到和为 1；"
                    f"这里的和是 {sum(kept):.4g}。",
                )
