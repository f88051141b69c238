"""Exercises that are programs: the task, where to begin, and a program that passes. `CHECKS` has the check of each.

Next to read: `queue_checks.py`, `token_checks.py`.
"""

from quire_lessons.learn.exercise import ProgramExercise, Text

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
