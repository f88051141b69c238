"""`record_story`: a short recording that the page's story plays: a prompt, its answer, and a fork of the answer.

    python -m quire_lessons.story        # records the story of the page, `quire/page/story.jsonl`

The fork begins with the prompt, some of the answer's tokens and another token than the answer has, so that it finds
their full blocks in the prefix cache. Next to read: `quire/insight/trace.py`, `quire/page/story.js`.
"""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import quire
from quire.engine.chat import dialogue_of
from quire.engine.llm_engine import LLMEngine
from quire.engine.recorder import Recorder
from quire.errors import EngineError, PromptError
from quire.insight.trace import EngineTrace
from quire.outputs import RequestOutput
from quire.sampling_params import SamplingParams

SHIPPED = Path(quire.__file__).parent / "page" / "story.jsonl"
SHIPPED_PROMPT = "Why is the sky blue?"
NUM_TOKENS, LEAD = 40, 16
"""Tokens of each answer; those of the first one before the second begins, which then runs beside it."""
OPTIONS: dict[str, Any] = {
    "block_size": 16, "multi_step_decode": 1, "enable_prefix_caching": True, "max_num_seqs": 2,
}  # fmt: skip
"""Of an engine whose steps show: blocks are small, and each step decodes one token."""
PROMPT, FORK = "story-1", "story-2"
KEPT_KINDS = ("story", "arrive", "admit", "step", "finish", "cache", "evict")


def record_story(engine: LLMEngine, prompt_token_ids: Sequence[int]) -> EngineTrace:
    """Record the story of a prompt. Raises: PromptError if the answer ends too early to fork, EngineError."""
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=2)
    recorder = Recorder(engine, with_text=True)
    engine.add_request(PROMPT, {"prompt_token_ids": list(prompt_token_ids)}, params)
    answer = _step_until(engine, PROMPT, LEAD)
    token_ids, tables = answer.outputs[0].token_ids, answer.outputs[0].logprobs
    assert tables is not None
    others = [
        [(entry.logprob, token_id) for token_id, entry in table.items() if token_id != chosen]
        for table, chosen in zip(tables, token_ids, strict=True)
    ]
    # Behind half of the lead, where the second choice was likeliest: a future worth looking at, with blocks to share.
    place = max(range(LEAD // 2, LEAD), key=lambda at: max(others[at], default=(-1e9, 0)))
    if not others[place]:
        raise PromptError("the model had no second choice for any token: choose another prompt")
    fork = [*prompt_token_ids, *token_ids[:place], max(others[place])[1]]
    # Both end together: a block that the answer gave back would seem to be shared.
    engine.add_request(FORK, {"prompt_token_ids": fork}, replace(params, max_tokens=NUM_TOKENS - LEAD))
    while engine.has_unfinished_requests():
        engine.step()
    lines = [json.loads(line) for line in recorder.take().splitlines()]
    recorder.close()
    story = {"t": lines[0]["t"], "kind": "story", "id": PROMPT, "fork": FORK}
    return EngineTrace([lines[0], *(line for line in (story, *lines[1:]) if line["kind"] in KEPT_KINDS)])


def _step_until(engine: LLMEngine, request_id: str, num_tokens: int) -> RequestOutput:
    """Step until a request has `num_tokens` tokens. Raises: EngineError if it failed."""
    while engine.has_unfinished_requests():
        for output in engine.step():
            if isinstance(output, RequestOutput) and output.request_id == request_id:
                if (error := output.outputs[0].error) is not None:
                    raise EngineError(f"the prompt could not be answered: {error}")
                if len(output.outputs[0].token_ids) >= num_tokens:
                    return output
    raise EngineError("the prompt could not be answered")


def main() -> None:
    """Record the story that the page ships."""
    engine = LLMEngine.from_options(max_model_len=512, num_blocks_override=49, **OPTIONS)
    try:
        trace = record_story(engine, dialogue_of(engine).message_ids(SHIPPED_PROMPT))
    finally:
        engine.shutdown()
    SHIPPED.write_text("".join(json.dumps(line, separators=(",", ":")) + "\n" for line in trace.lines))


if __name__ == "__main__":
    main()
