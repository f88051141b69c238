"""Speed with drafts beside none, by workload and number of streams, on one engine that takes turns.

    python -m benchmarks.drafts [--model smollm2] [--streams 1,8,32] [--workloads edit,summary,prose,json]
        [--repetitions 5]
    python -m benchmarks.drafts --dtype float32 --draft-model smollm2 --workloads story,prose --streams 1
    python -m benchmarks.drafts --beside [--sides quire:speculative=suffix,llama.cpp:lookup=10]

edit: a source file was given twice, and is written a third time; summary: of 1,500 tokens, greedy; prose: stories at
temperature 0.8; story: the same, greedy; json: 20 records with long keys by their schemas, greedy, as many at a time as
there are streams. Each stream has a text of its own. Counted are the tokens behind the first one of each stream. The
answers of both turns are compared: they must be the same. Each turn with drafts starts with a proposer that has seen
nothing; measured step times stay, as in a server that has run for a while. --beside: the edit workload beside the
prompt lookup of other engines, see `draft_peers.py`. Results: `README.md`.
"""

import dataclasses
import os
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.command_line import Table, make_parser
from benchmarks.draft_peers import NUM_NEW, SIDES, edit_prompt, run_beside
from quire.drafts.suffix import SuffixProposer
from quire.engine.llm_engine import LLMEngine
from quire.events import EventKind
from quire.sampling_params import SamplingParams
from quire.structured_outputs import StructuredOutputsParams
from quire_lessons.compare.speculation import TOPICS, json_tasks

PAGES = sorted((Path(__file__).parents[1] / "docs").glob("*.md"))
TEXT_TOKENS = 1500
NUM_RECORDS = 20
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_NEW, ignore_eos=True)
TITLES = {
    "workload": "", "streams": "d", "off, tok/s": ".0f", "drafts, tok/s": ".0f", "ratio": ".2f", "right": "d",
    "verified": "d",
}  # fmt: skip
Job = tuple[list[int], SamplingParams]


def edit(engine: LLMEngine, number: int) -> Job:
    """The file, the same with another name for `self`, and the first tokens of the file."""
    return edit_prompt(engine.get_tokenizer(), number), GREEDY


def summary(engine: LLMEngine, number: int) -> Job:
    """A page of the documentation, to be summarised."""
    tokenizer = engine.get_tokenizer()
    text = tokenizer.decode(tokenizer.encode(PAGES[number % len(PAGES)].read_text())[:TEXT_TOKENS])
    return chat(engine, f"{text}\n\nSummarise this text, and quote its most important sentences."), GREEDY


def prose(engine: LLMEngine, number: int) -> Job:
    """A story."""
    asked = f"Write a long story about {TOPICS[number % len(TOPICS)]}, in a style of your own. Number {number}."
    return chat(engine, asked), dataclasses.replace(GREEDY, temperature=0.8, seed=number)


def story(engine: LLMEngine, number: int) -> Job:
    """The same story, greedy."""
    return prose(engine, number)[0], GREEDY


def record(engine: LLMEngine, number: int) -> Job:
    """A record as JSON."""
    asked, schema = json_tasks()[number % NUM_RECORDS]
    constraint = StructuredOutputsParams(json=schema)
    return chat(engine, asked), dataclasses.replace(GREEDY, ignore_eos=False, structured_outputs=constraint)


def chat(engine: LLMEngine, text: str) -> list[int]:
    """The tokens of a question, in ChatML."""
    return engine.get_tokenizer().encode(f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n")


WORKLOADS: dict[str, Callable[[LLMEngine, int], Job]] = {
    "edit": edit,
    "summary": summary,
    "prose": prose,
    "story": story,
    "json": record,
}


@dataclasses.dataclass
class Turn:
    """Result of one run of all streams."""

    tokens_per_s: float
    answers: list[list[int]]
    num_drafts: int
    num_accepted: int


def run(engine: LLMEngine, jobs: Sequence[Job], num_streams: int, drafter: Any, *, drafts: bool) -> Turn:
    """Run all jobs to their end, `num_streams` at a time. `drafter`: of a draft model or a head, None for none."""
    engine._drafting.proposer = SuffixProposer() if drafts else None
    runner = engine._executor._worker.runner  # type: ignore[attr-defined]
    runner._gives_drafts, runner.drafter = drafts, drafter if drafts else None
    seen = engine.events.num_recorded
    answers: list[list[int]] = []
    seconds, num_new = 0.0, 0
    for first in range(0, len(jobs), num_streams):
        some = run_streams(engine, jobs[first : first + num_streams])
        seconds, num_new, answers = seconds + some[0], num_new + some[1], answers + some[2]
    steps = [event.data for event in engine.events.since(seen) if event.kind is EventKind.STEP]
    counts = (sum(step[name] for step in steps) for name in ("num_drafts", "num_accepted"))
    return Turn(num_new / seconds, answers, *counts)


def run_streams(engine: LLMEngine, jobs: Sequence[Job]) -> tuple[float, int, list[list[int]]]:
    """Run jobs at once. Returns: the seconds and the tokens behind the first one of each, and the answers."""
    for index, (token_ids, params) in enumerate(jobs):
        engine.add_request(f"r{index}", {"prompt_token_ids": token_ids}, params)
    answers: dict[str, list[int]] = {}
    started, num_first = 0.0, 0
    while engine.has_unfinished_requests():
        for output in engine.step():
            answers[output.request_id] = list(output.outputs[0].token_ids)  # type: ignore[union-attr]
        if not started and len(answers) == len(jobs):
            started, num_first = time.perf_counter(), sum(map(len, answers.values()))
    num_new = sum(map(len, answers.values())) - num_first
    return time.perf_counter() - started, num_new, [answers[f"r{index}"] for index in range(len(jobs))]


def main() -> None:
    """Measure each workload with each number of streams."""
    parser = make_parser(__doc__, "model", "repetitions", "threads", "json")
    parser.add_argument("--streams", type=lambda text: [int(word) for word in text.split(",")], default=[1, 8, 32])
    parser.add_argument("--workloads", type=lambda text: text.split(","), default=["edit", "summary", "prose"])
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--draft-model")
    parser.add_argument("--beside", action="store_true", help="one stream of the edit workload beside other engines")
    parser.add_argument("--sides", default=",".join(SIDES), help="of --beside  [%(default)s]")
    parser.add_argument(
        "--llama-cpp-python", default=os.environ.get("QUIRE_BENCH_LLAMA_CPP"), help="as in benchmarks.peers"
    )
    arguments = parser.parse_args()
    if arguments.beside:
        return run_beside(arguments)
    engine = LLMEngine.from_options(
        arguments.model, max_num_seqs=max(arguments.streams), max_model_len=2048, enable_prefix_caching=False,
        speculative="auto" if arguments.draft_model else "suffix", draft_model=arguments.draft_model,
        dtype=arguments.dtype, device="cpu", batch_invariant=True,
    )  # fmt: skip
    drafter = engine._executor._worker.runner.drafter  # type: ignore[attr-defined]
    table = Table(TITLES, as_json=arguments.json)
    for name in arguments.workloads:
        for num_streams in arguments.streams:
            num_jobs = max(num_streams, NUM_RECORDS) if name == "json" else num_streams
            jobs = [WORKLOADS[name](engine, number) for number in range(num_jobs)]
            turns: dict[bool, list[Turn]] = {False: [], True: []}
            for repetition in range(arguments.repetitions):
                for drafts in (False, True) if repetition % 2 == 0 else (True, False):
                    turns[drafts].append(run(engine, jobs, num_streams, drafter, drafts=drafts))
            if any(turn.answers != turns[False][0].answers for turn in (*turns[False], *turns[True])):
                raise SystemExit(f"{name}, {num_streams} streams: the answers differ")
            off, on = (statistics.median(turn.tokens_per_s for turn in turns[drafts]) for drafts in (False, True))
            last = turns[True][-1]
            table.row(name, num_streams, off, on, on / off, last.num_accepted, last.num_drafts)


if __name__ == "__main__":
    main()
