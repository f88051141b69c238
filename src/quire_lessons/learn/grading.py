"""All exercises in the order of the lessons, and `check`: a number at once, a program in a process with a time limit.

`python -m quire_lessons.learn.grading NAME FILE` is that process: on stdout it names each case before it runs it, then
says what it found. Next to read: `checks.py`.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from quire.errors import ConfigError, nearest
from quire_lessons.learn.exercise import Exercise, NumberExercise, ProgramExercise, Text, Wrong, check_number
from quire_lessons.learn.numbers import NUMBERS

if TYPE_CHECKING:
    from quire_lessons.learn.exercise import LearnerProgram

# --- Exercises that are programs: the task, where to begin, and a program that passes -------------

PROGRAMS: tuple[ProgramExercise, ...] = (
    ProgramExercise(
        "mask", 2, Text("The mask of a chunk", "一个块的掩码"),
        Text(
            "A request has num_cached tokens in the KV cache, and a step computes its next num_new. Return the"
            " attention mask: a"
            " row per new token, a column per position from 0 on, 1 where the token attends to it and 0 where not."
            " It is compared"
            " with the positions that the engine's attention reads.",
            "一个请求有 num_cached 个 token 在 KV 缓存里，这一步计算接下来的 num_new 个。请返回注意力掩码：每个新"
            " token 一行，从位置 0 起每个位置一列，"
            "关注为 1，不关注为 0。结果与引擎的注意力实际读取的位置比较。",
        ),
        "mask",
        "def mask(num_cached: int, num_new: int) -> list[list[int]]:\n    return [[0] * (num_cached + num_new)] *"
        " num_new\n",
        "def mask(num_cached, num_new):\n"
        "    length = num_cached + num_new\n"
        "    return [[int(position <= num_cached + row) for position in range(length)] for row in range(num_new)]\n",
    ),
    ProgramExercise(
        "pool", 5, Text("A pool of blocks", "块池"),
        Text(
            "Write the pool of KV blocks with numbers 1 … num_blocks - 1; block 0 has no owner. take gives free"
            " blocks one owner"
            " each, share adds an owner, release takes one away: a block without owners is free. take is only asked"
            " for blocks"
            " that are free. The workload of `quire compare kv` runs on it, with the engine's own block tables.",
            "写一个 KV 块池，块号为 1 … num_blocks - 1；块 0 没有所有者。take 取出空闲块并各给一个所有者，share 增"
            "加一个所有者，release 减去一个："
            "没有所有者的块就是空闲的。take 要的块数不会超过空闲块数。`quire compare kv` 的负载将在它上面运行，块表"
            "用引擎自己的。",
        ),
        "Pool",
        "class Pool:\n"
        "    def __init__(self, num_blocks: int) -> None: ...\n"
        "    def take(self, count: int) -> list[int]: ...\n"
        "    def share(self, block_id: int) -> None: ...\n"
        "    def release(self, block_id: int) -> None: ...\n"
        "    def num_free(self) -> int: ...\n",
        "class Pool:\n"
        "    def __init__(self, num_blocks):\n"
        "        self.owners = [0] * num_blocks\n"
        "        self.free = list(range(1, num_blocks))\n\n"
        "    def take(self, count):\n"
        "        taken = [self.free.pop() for _ in range(count)]\n"
        "        for block_id in taken:\n"
        "            self.owners[block_id] = 1\n"
        "        return taken\n\n"
        "    def share(self, block_id):\n"
        "        self.owners[block_id] += 1\n\n"
        "    def release(self, block_id):\n"
        "        self.owners[block_id] -= 1\n"
        "        if self.owners[block_id] == 0:\n"
        "            self.free.append(block_id)\n\n"
        "    def num_free(self):\n"
        "        return len(self.free)\n",
    ),
    ProgramExercise(
        "order", 7, Text("The order of the queue", "等待队列的顺序"),
        Text(
            "Return a number for a waiting request: the smallest is admitted first. It may not change while the"
            " request waits;"
            " arrival is in steps. In a queue of long and short requests on 4 slots the mean wait must fall to three"
            " quarters of"
            " that in order of arrival, and no request may wait more than 200 steps.",
            "为等待中的请求返回一个数：最小的先被接纳。请求等待期间这个数不能变；arrival 以步为单位。4 个槽位、长短"
            "请求混排的队列里，"
            "平均等待要降到按到达顺序的四分之三以下，且没有请求等待超过 200 步。",
        ),
        "order",
        "def order(prompt_len: int, max_tokens: int, arrival: float) -> float:\n    return arrival\n",
        "def order(prompt_len, max_tokens, arrival):\n    return prompt_len + 2.5 * arrival\n",
    ),
    ProgramExercise(
        "hash", 8, Text("Hashes of prefixes", "前缀的哈希"),
        Text(
            "Return a hash for each full block of a prompt, in order. The prefix cache uses them as its keys: a"
            " block is taken from"
            " the cache if its hash is known. Prompts with other salts must share nothing.",
            "按顺序为提示词的每个满块返回一个哈希。前缀缓存用它们作键：哈希已知的块就从缓存里取。盐不同的提示词不能"
            "共享任何块。",
        ),
        "block_hashes",
        "def block_hashes(tokens: list[int], block_size: int, salt: str) -> list:\n    return []\n",
        "import hashlib\n\n\n"
        "def block_hashes(tokens, block_size, salt):\n"
        "    hashes, parent = [], salt\n"
        "    for start in range(0, len(tokens) - block_size + 1, block_size):\n"
        "        content = repr((parent, tokens[start : start + block_size]))\n"
        "        parent = hashlib.sha256(content.encode()).hexdigest()\n"
        "        hashes.append(parent)\n"
        "    return hashes\n",
    ),
    ProgramExercise(
        "keep", 12, Text("Top-p and min-p", "top-p 与 min-p"),
        Text(
            "Return the probabilities that sampling draws from: 0 for a token that min_p or top_p drops, and the"
            " rest scaled to a"
            " sum of 1. The engine's sampler draws from the same probabilities; what it never draws must be 0.",
            "返回采样实际使用的概率：被 min_p 或 top_p 丢弃的 token 为 0，其余缩放到和为 1。引擎的采样器从同样的概"
            "率中抽取；它从不抽到的必须是 0。",
        ),
        "keep",
        "def keep(probabilities: list[float], top_p: float, min_p: float) -> list[float]:\n    return probabilities\n",
        "def keep(probabilities, top_p, min_p):\n"
        "    most = max(probabilities)\n"
        "    left = [p if p >= min_p * most else 0.0 for p in probabilities]\n"
        "    total, reached = sum(left), 0.0\n"
        "    kept = [0.0] * len(left)\n"
        "    for token_id in sorted(range(len(left)), key=lambda at: -left[at]):\n"
        "        if reached >= top_p - 1e-6:\n"
        "            break\n"
        "        kept[token_id] = left[token_id]\n"
        "        reached += left[token_id] / total\n"
        "    return [p / sum(kept) for p in kept]\n",
    ),
    ProgramExercise(
        "propose", 17, Text("A proposer of drafts", "草稿的提议者"),
        Text(
            "Return at most max_tokens guesses of the tokens that follow: what followed the same last tokens before."
            " The scheduler"
            " verifies them; four texts must take about as few steps as with the engine's own proposer.",
            "返回至多 max_tokens 个对后续 token 的猜测：同样的末尾 token 上一次出现之后跟的是什么。调度器会验证它们；"
            "四段文本所用的步数要与引擎自己的提议者相当。",
        ),
        "propose",
        "def propose(tokens: list[int], max_tokens: int) -> list[int]:\n    return []\n",
        "def propose(tokens, max_tokens):\n"
        "    for length in (3, 2, 1):\n"
        "        for at in range(len(tokens) - length - 1, -1, -1):\n"
        "            if tokens[at : at + length] == tokens[-length:]:\n"
        "                return tokens[at + length : at + length + max_tokens]\n"
        "    return []\n",
    ),
)  # fmt: skip


# --- Grading --------------------------------------------------------------------------------------

TIME_LIMIT_S = 10.0
MEMORY_LIMIT_BYTES = 4 << 30
EXERCISES: tuple[Exercise, ...] = tuple(sorted((*NUMBERS, *PROGRAMS), key=lambda item: item.lesson))
LESSONS: dict[int, Text] = {
    2: Text("Attention and masks", "注意力与掩码"),
    3: Text("The KV cache", "KV 缓存"),
    4: Text("Memory and fragmentation", "内存与碎片"),
    5: Text("Paging", "分页"),
    6: Text("Chunked prefill", "分块预填充"),
    7: Text("Continuous batching", "连续批处理"),
    8: Text("Prefix sharing", "前缀共享"),
    9: Text("Tensor parallelism", "张量并行"),
    10: Text("Quantisation", "量化"),
    12: Text("Sampling", "采样"),
    16: Text("Measure and explain a kernel's speed", "测量并解释内核的速度"),
    17: Text("Drafts", "草稿"),
    22: Text("What a request costs", "一个请求的成本"),
    24: Text("Adapters", "适配器"),
}
"""Titles of the lessons that have exercises here."""


def find(number_or_name: str) -> Exercise:
    """Return an exercise by its number, from 1 on, or its name. Raises: ConfigError."""
    names = {item.name: item for item in EXERCISES}
    if number_or_name.isdecimal() and 1 <= int(number_or_name) <= len(EXERCISES):
        return EXERCISES[int(number_or_name) - 1]
    if number_or_name not in names:
        raise ConfigError(
            f"there is no exercise '{number_or_name}'{nearest(number_or_name, names)}: 1 to {len(EXERCISES)} are there,"
            " `quire learn` lists them"
        )
    return names[number_or_name]


def check(exercise: Exercise, answer: str) -> None:
    """Check a number or the file of a program. Raises: Wrong; ConfigError for an answer that is neither."""
    if isinstance(exercise, NumberExercise):
        check_number(exercise, answer)
        return
    assert isinstance(exercise, ProgramExercise)
    path = Path(answer)
    if not path.is_file():
        raise ConfigError(
            f"'{answer}' is no file: exercise '{exercise.name}' wants a Python file that defines {exercise.defines}"
        )
    try:
        path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{answer} cannot be read as a program: {error}") from None
    run_program(exercise.name, path)


def run_program(name: str, path: Path, time_limit_s: float = TIME_LIMIT_S) -> None:
    """Check a program in a process of its own; what it prints goes to stderr. Raises: Wrong."""
    command = [sys.executable, "-P", "-m", "quire_lessons.learn.grading", name, str(path.resolve())]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True) as process:
        try:
            said, _ = process.communicate(timeout=time_limit_s)
        except subprocess.TimeoutExpired:
            process.kill()
            said, _ = process.communicate()
            case = _last_case(said)
            raise Wrong(
                f"Stopped after {time_limit_s:g} s, in {case}: does a loop never end there?",
                f"运行 {time_limit_s:g} 秒后被停止，当时在 {case}：那里是否有不会结束的循环？",
            ) from None
        except BaseException:
            process.kill()
            raise
    found = json.loads(said.splitlines()[-1]) if said else {}
    if "wrong" in found:
        raise Wrong(*found["wrong"])
    if "passed" not in found:
        case = _last_case(said)
        raise Wrong(
            f"The program ended its process (exit code {process.returncode}), in {case}.",
            f"程序结束了自己的进程（退出码 {process.returncode}），当时在 {case}。",
        )


def _last_case(said: str) -> str:
    cases = [json.loads(line)["case"] for line in said.splitlines() if line.startswith('{"case"')]
    return cases[-1] if cases else "-"


def checks() -> dict[str, "Callable[[LearnerProgram], None]"]:
    """Return the check of each program; importing them loads the engine."""
    from quire_lessons.learn.checks import check_hash, check_keep, check_mask, check_order, check_pool, check_propose

    return {
        "mask": check_mask,
        "pool": check_pool,
        "order": check_order,
        "hash": check_hash,
        "keep": check_keep,
        "propose": check_propose,
    }


def grade(name: str, path: str, say: Callable[[dict[str, object]], None]) -> None:
    """Run the check of a program in this process. `say`: gets each case, then the finding."""
    from quire_lessons.learn.exercise import LearnerProgram

    cases = [""]

    def note(case: str) -> None:
        cases[0] = case
        say({"case": case})

    try:
        source = Path(path).read_text(encoding="utf-8")
        checks()[name](LearnerProgram(path, source, note))
        say({"passed": True})
    except Wrong as wrong:
        say({"wrong": wrong.text})
    except Exception as error:
        what = f"{type(error).__name__}: {error}"
        text = Text(
            f"The engine fails with {what} (the last call was {cases[0]}).",
            f"引擎出错：{what}（最后一次调用是 {cases[0]}）。",
        )
        say({"wrong": text})


def main(name: str, path: str) -> None:
    """Grade a program as the process that `run_program` starts: findings on stdout, the program's output on stderr."""
    import resource

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the process that waits, which kills this one
    with contextlib.suppress(ValueError, OSError):  # a lower limit is in force
        resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_LIMIT_BYTES, MEMORY_LIMIT_BYTES))
    findings = os.fdopen(os.dup(1), "w", encoding="utf-8", buffering=1)
    os.dup2(2, 1)
    grade(name, path, lambda found: print(json.dumps(found, ensure_ascii=False), file=findings))
    findings.flush()
    os._exit(0)  # threads that the program started must not keep the process


if __name__ == "__main__":
    main(*sys.argv[1:])
