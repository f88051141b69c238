"""Batch invariance (L9): what a request gets must not depend on what else runs, on the prefix cache or on chunks.

Greedy answers through the served API, compared token by token. Next to read: `client.py`.
"""

import asyncio
from collections.abc import Sequence

from benchmarks.soak.client import Seen, ask, chat_body
from benchmarks.soak.loads import prompt_of
from benchmarks.soak.row import Row
from benchmarks.soak.server import Server, serving

SHOWN = 3
"""Most differences to list."""


def prompts_of(count: int, longest: int) -> list[str]:
    """Return texts of mixed lengths up to `longest` tokens; every fourth begins like the one before it."""
    lens = [32 + (index * 7919) % (longest - 32) for index in range(count)]
    return [prompt_of(length, index - (index % 4 == 3)) for index, length in enumerate(lens)]


async def answers(server: Server, prompts: Sequence[str], max_tokens: int, *, num_clients: int) -> list[Seen]:
    """Answer all prompts, several at once, in the order of the prompts."""
    waiting = iter(enumerate(prompts))
    found: dict[int, Seen] = {}

    async def client() -> None:
        for index, prompt in waiting:
            body = chat_body(prompt, max_tokens, stream=index % 2 == 0, return_token_ids=True)
            found[index] = await ask(server.url, body)

    await asyncio.gather(*(client() for _ in range(num_clients)))
    return [found[index] for index in range(len(prompts))]


async def batch_invariance(
    model: str,
    *,
    count: int = 200,
    num_clients: int = 8,
    max_tokens: int = 24,
    longest: int = 600,
    chunk_sizes: Sequence[int] = (16, 64, 256),
    options: Sequence[str] = (),
) -> Row:
    """L9: alone and among others, with and without prefix cache, prompts in chunks of several sizes.

    With the cache all is asked twice, so that the second time every prefix is found.
    """
    row = Row("L9", f"{count} prompts alone and among {num_clients - 1} others, cache on and off, chunks {chunk_sizes}")
    prompts = prompts_of(count, longest)
    expected: list[Seen] = []
    flips: list[str] = []
    num_compared = num_hits = 0
    for chunk_size in chunk_sizes:
        for has_cache in (False, True):
            cache = "--enable-prefix-caching" if has_cache else "--no-enable-prefix-caching"
            arguments = ("--max-num-seqs", str(num_clients), "--max-model-len", "2048")
            batched = ("--max-num-batched-tokens", str(chunk_size))
            with serving(model, *arguments, *batched, cache, *options) as server:
                for at_once in (1, num_clients, *([num_clients] if has_cache else [])):
                    seen = await answers(server, prompts, max_tokens, num_clients=at_once)
                    expected = expected or seen
                    num_compared += len(seen)
                    name = f"chunk {chunk_size}, cache {'on' if has_cache else 'off'}, {at_once} at once"
                    flips += _differences(expected, seen, name)
                num_hits += int((await server.metrics()).value("quire_prefix_cache_hits_total"))
    failed = sum(not item.is_good or len(item.token_ids) != max_tokens for item in expected)
    row.check("alone not answered well", failed, passes=not failed)
    row.note("answers compared", num_compared)
    row.note("different answers to different prompts", len({tuple(item.token_ids) for item in expected}))
    row.check("tokens found in the prefix cache", num_hits, passes=num_hits > 0)
    row.check("other tokens than alone", f"{len(flips)} {'; '.join(flips[:SHOWN])}".strip(), passes=not flips)
    return row


def _differences(expected: Sequence[Seen], seen: Sequence[Seen], name: str) -> list[str]:
    found = []
    for index, (first, second) in enumerate(zip(expected, seen, strict=True)):
        if first.token_ids == second.token_ids and first.text == second.text and second.is_good:
            continue
        pairs = enumerate(zip(first.token_ids, second.token_ids, strict=False))
        at = next((position for position, (left, right) in pairs if left != right), len(second.token_ids))
        found.append(f"{name}: prompt {index} from token {at}{f' ({second.error})' if second.error else ''}")
    return found
