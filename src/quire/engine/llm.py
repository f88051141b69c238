"""`LLM`: prompts in, all results out, in the caller's process and thread.

A thin driver of `LLMEngine`: checks every prompt before any runs, feeds the queue, shows progress, keeps the order.
Next to read: `llm_engine.py`.
"""

import gc
import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from functools import partial
from typing import Any

from quire.engine.adapters import LoRARequest
from quire.engine.beam_search import BeamSearch
from quire.engine.chat import Conversation, chat_options, dialogue_of
from quire.engine.handle import EngineHandle
from quire.engine.input_processor import PreparedRequest
from quire.engine.interrupts import interrupts_between_steps
from quire.engine.llm_engine import LLMEngine
from quire.engine.output_processor import Output
from quire.engine.prompts import split_prompts
from quire.engine.scoring import Scoring, make_pairs, probabilities, vector_of
from quire.errors import PromptError, QueueFullError, RequestError
from quire.outputs import (
    BeamSearchOutput,
    ClassificationOutput,
    ClassificationRequestOutput,
    PoolingRequestOutput,
    RequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
)
from quire.sampling_params import BeamSearchParams, PoolingParams, SamplingParams

UseTqdm = bool | Callable[..., Any]
"""True or False, or a function with tqdm's arguments that makes a progress bar."""
LoRARequests = LoRARequest | Sequence[LoRARequest | None] | None
"""An adapter for all prompts, or one per prompt; None stands for the base model."""
TokenCounts = tuple[int, int]
"""Prompt tokens and generated tokens of a finished request."""


class LLM(EngineHandle):
    """A model that answers prompts.

    Example: `LLM("smollm2").generate("The capital of France is")[0].outputs[0].text`

    Keyword arguments are the fields of `EngineOptions`. Results have the order of the prompts. A bad prompt or
    parameter raises before anything runs; an interrupt ends everything in flight and leaves the model usable.
    Calls from several threads at once are an error: use `AsyncLLM`.
    """

    def _attach(self, engine: LLMEngine) -> None:
        super()._attach(engine)
        self._ids = itertools.count()
        self._is_driven = threading.Lock()

    # --- Generation -----------------------------------------------------------------------

    def generate(
        self,
        prompts: Any,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: UseTqdm = True,
        priority: int | Sequence[int] | None = None,
        lora_request: LoRARequests = None,
        deadline_s: float | Sequence[float | None] | None = None,
    ) -> list[RequestOutput]:
        """Complete one prompt or a list of prompts, each as text, token ids or a dict (`quire.outputs.Prompt`).

        `sampling_params`: one for all, or one per prompt; None: the model's recommended ones.
        `priority`: one for all or one per prompt; lower runs first, with scheduling_policy="priority".
        `lora_request`: an adapter for all, or one per prompt, None for the base; it needs enable_lora=True.
        `deadline_s`: seconds, one for all or one per prompt, None for no deadline. An output that is not complete when
        they have passed ends as it is, with `finish_reason` "abort"; if KV blocks run out, the latest is preempted.

        Raises: RequestError, CapacityError, EngineDeadError, ModelFileError.
        """
        items = split_prompts(prompts)
        params = _per_prompt("sampling_params", sampling_params, SamplingParams, len(items))
        priorities = _per_prompt("priority", 0 if priority is None else priority, object, len(items))
        adapters = _adapters(lora_request, len(items))
        deadlines_s = _per_prompt("deadline_s", deadline_s, object, len(items))
        prepare = self.llm_engine.input_processor.prepare
        prepared = [
            prepare(
                str(next(self._ids)),
                item,
                params[i],
                streams=False,
                priority=priorities[i],
                lora_request=adapters[i],
                deadline_s=deadlines_s[i],
            )
            for i, item in enumerate(items)
        ]
        return self._run(prepared, use_tqdm)

    def chat(
        self,
        messages: Sequence[Any],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: UseTqdm = True,
        lora_request: LoRARequests = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: str | Mapping[str, Any] = "auto",
        parallel_tool_calls: bool = True,
        reasoning_effort: str | None = None,
        reasoning_budget: int | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation (a list of messages) or a list of conversations.

        A message is `{"role": "user", "content": "…"}`, with `tool_calls`, `reasoning` and so on as in the chat API;
        the `message` of each completion is one, too. `continue_final_message` goes on with the last message instead of
        answering it; it needs `add_generation_prompt=False`. `tool_choice`: "auto", "none", "required" or one tool.
        `reasoning_budget`: most tokens of reasoning before its end is forced.

        Raises: ChatTemplateError and what `generate` raises.
        """
        options = chat_options(
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            chat_template=chat_template,
            chat_template_kwargs=chat_template_kwargs,
            tool_choice=tool_choice,
            parallel_tool_calls=parallel_tool_calls,
            reasoning_effort=reasoning_effort,
            reasoning_budget=reasoning_budget,
        )
        if not isinstance(messages, Sequence) or isinstance(messages, (str, bytes)) or not messages:
            raise PromptError("messages must be a list of messages or a list of conversations, and not empty")
        conversations = [messages] if isinstance(messages[0], Mapping) else messages
        given = _per_prompt("sampling_params", sampling_params, SamplingParams, len(conversations))
        dialogue, default = dialogue_of(self.llm_engine), self.get_default_sampling_params()
        chats = [
            Conversation.prepare(dialogue, conversation, tools, options, params or default)
            for conversation, params in zip(conversations, given, strict=True)
        ]
        given_prompts, given_params = [chat.prompt for chat in chats], [chat.params for chat in chats]
        outputs = self.generate(given_prompts, given_params, use_tqdm=use_tqdm, lora_request=lora_request)
        return [chat.read(output) for chat, output in zip(chats, outputs, strict=True)]

    def beam_search(
        self,
        prompts: Any,
        params: BeamSearchParams,
        *,
        use_tqdm: UseTqdm = False,
        lora_request: LoRARequests = None,
    ) -> list[BeamSearchOutput]:
        """Return the likeliest completions of each prompt, best first. `lora_request`: as of `generate`.

        Raises: RequestError, CapacityError, EngineDeadError.
        """
        if not isinstance(params, BeamSearchParams):
            raise RequestError(f"params must be BeamSearchParams, got {type(params).__name__}")
        engine, items = self.llm_engine, split_prompts(prompts)
        adapters = _adapters(lora_request, len(items))
        searches = [
            BeamSearch(engine, f"beams-{next(self._ids)}", item, params, adapter)
            for item, adapter in zip(items, adapters, strict=True)
        ]

        def take(outputs: list[Output]) -> list[TokenCounts]:
            return [(0, 0) for search in searches if search.advance()]

        def cancel() -> None:
            for search in searches:
                search.cancel()

        # More beams than max_num_seqs would preempt each other.
        num_at_once = max(1, engine.config.scheduler.max_num_seqs // params.beam_width)
        self._drive([search.start for search in searches], take, cancel, use_tqdm, num_at_once)
        return [search.output for search in searches if search.output is not None]

    # --- Embeddings -----------------------------------------------------------------------

    def encode(
        self,
        prompts: Any,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        *,
        use_tqdm: UseTqdm = True,
        lora_request: LoRARequests = None,
    ) -> list[PoolingRequestOutput]:
        """Return one vector per prompt from its final hidden states. `lora_request`: as of `generate`.

        Parameters None: as the model's files for sentence-transformers say, else the last token's, normalised.

        Raises: RequestError, CapacityError, EngineDeadError.
        """
        items = split_prompts(prompts)
        given = _per_prompt("pooling_params", pooling_params, PoolingParams, len(items))
        adapters = _adapters(lora_request, len(items))
        processor, default = self.llm_engine.input_processor, self.llm_engine.input_processor.default_pooling_params
        prepared = [
            processor.prepare(str(next(self._ids)), item, params or default, streams=False, lora_request=adapter)
            for item, params, adapter in zip(items, given, adapters, strict=True)
        ]
        return self._run(prepared, use_tqdm)

    def embed(
        self,
        prompts: Any,
        *,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        use_tqdm: UseTqdm = True,
        lora_request: LoRARequests = None,
    ) -> list[PoolingRequestOutput]:
        """`encode` under vLLM's name for embeddings; see `outputs.embedding` of each result."""
        return self.encode(prompts, pooling_params, use_tqdm=use_tqdm, lora_request=lora_request)

    # --- Scores ---------------------------------------------------------------------------

    def score(
        self,
        data_1: str | Sequence[str],
        data_2: str | Sequence[str],
        *,
        use_tqdm: UseTqdm = True,
        lora_request: LoRARequest | None = None,
    ) -> list[ScoringRequestOutput]:
        """Score a query with each of the documents, or each of `data_1` with its own of `data_2`.

        A score is the probability of a cross-encoder's one label, or of "yes" by Qwen3-Reranker, else the cosine of
        two embeddings. Raises: RequestError, CapacityError, EngineDeadError.
        """
        pairs = make_pairs(data_1, data_2)
        scoring = Scoring(self.llm_engine.config.model, self.get_tokenizer(), pairs)
        outputs = self.encode(scoring.prompts, scoring.params, use_tqdm=use_tqdm, lora_request=lora_request)
        scores = scoring.scores([vector_of(output) for output in outputs])
        return [ScoringRequestOutput(ScoringOutput(score)) for score in scores]

    def classify(self, prompts: Any, *, use_tqdm: UseTqdm = True) -> list[ClassificationRequestOutput]:
        """Return the probability of each label for each prompt. Raises: RequestError, also without such a head."""
        outputs = self.encode(prompts, PoolingParams(task="classify"), use_tqdm=use_tqdm)
        return [ClassificationRequestOutput(ClassificationOutput(probabilities(vector_of(item)))) for item in outputs]

    # --- The model ------------------------------------------------------------------------

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes. Returns False, and does nothing, while requests hold blocks."""
        return self.llm_engine.reset_prefix_cache()

    def sleep(self, level: int = 1) -> None:
        """Free weights and KV cache until `wake_up`. Both of vLLM's levels do so: weights come from their files again.

        A second call does nothing. Raises: RequestError for another level, or while another thread uses the model.
        """
        if level not in (1, 2):
            raise RequestError(f"level must be 1 or 2, got {level!r}")
        if self.is_sleeping():
            return
        if self.llm_engine.has_unfinished_requests():
            raise RequestError("requests are running: sleep when they have ended")
        from quire.runtime.huge_pages import trim  # imports numpy

        self.llm_engine.sleep()
        gc.collect()  # op by op, reference cycles hold weights and KV cache
        trim()

    def wake_up(self) -> None:
        """Load the model again, with the options it had; does nothing if it is awake. Raises: as the constructor."""
        if self.is_sleeping():
            self._attach(LLMEngine.build(self.llm_engine.config.options, tokenizer=self.llm_engine.tokenizer))

    def is_sleeping(self) -> bool:
        """Return True between `sleep` and `wake_up`."""
        return self.llm_engine.is_asleep

    def __repr__(self) -> str:
        config = self.llm_engine.config
        return (
            f"LLM({config.options.model!r}: {config.model.architecture}, "
            f"{config.model.num_parameters / 1e6:.0f} M parameters, {config.dtype} on {config.device}, "
            f"context {config.scheduler.max_model_len}, {config.scheduler.num_blocks} blocks "
            f"of {config.scheduler.block_size} tokens)"
        )

    # --- Driving the engine ---------------------------------------------------------------

    def _run(self, prepared: list[PreparedRequest], use_tqdm: UseTqdm) -> list[Any]:
        """Return the final outputs of these requests, in their order."""
        engine = self.llm_engine
        finished: dict[str, Output | None] = {item.request.request_id: None for item in prepared}

        def take(outputs: list[Output]) -> list[TokenCounts]:
            ended = [output for output in outputs if output.finished and output.request_id in finished]
            finished.update({output.request_id: output for output in ended})
            return [_count_tokens(output) for output in ended]

        starts = [partial(engine.submit, item) for item in prepared]
        self._drive(starts, take, lambda: engine.abort_request(finished), use_tqdm)
        return list(finished.values())

    def _drive(
        self,
        starts: Sequence[Callable[[], None]],
        take: Callable[[list[Output]], list[TokenCounts]],
        cancel: Callable[[], None],
        use_tqdm: UseTqdm,
        num_at_once: int | None = None,
    ) -> None:
        """Step until all have ended that `starts` queue, at most `num_at_once` at a time.

        `take` is given the outputs of each step and returns the token counts of those that ended; `cancel` is called
        after an error or an interrupt. Raises: RequestError while another call of this LLM runs.
        """
        engine = self.llm_engine
        waiting, num_running = deque(starts), 0
        if not self._is_driven.acquire(blocking=False):
            raise RequestError(
                "this LLM is busy with another call: let it return first, or use AsyncLLM, which answers many callers"
            )
        try:
            with interrupts_between_steps() as check, open_progress_bar(use_tqdm, len(starts)) as advance:
                while waiting or num_running:
                    while waiting and (num_at_once is None or num_running < num_at_once):
                        try:
                            waiting[0]()
                        except QueueFullError:
                            if not engine.has_unfinished_requests():
                                raise
                            break  # the rest is queued as the queue empties
                        waiting.popleft()
                        num_running += 1
                    outputs = engine.step()
                    engine.check_health()
                    for counts in take(outputs):
                        advance(*counts)
                        num_running -= 1
                    check()
        except BaseException:
            if not engine.errored:
                cancel()
            raise
        finally:
            self._is_driven.release()


def _adapters(given: LoRARequests, num_prompts: int) -> list[LoRARequest | None]:
    """Return the adapter of each prompt. Raises: RequestError."""
    return _per_prompt("lora_request", given, LoRARequest, num_prompts, takes_none=True)


def _per_prompt(name: str, given: Any, kind: type, num_prompts: int, *, takes_none: bool = False) -> list[Any]:
    """Return one value per prompt; None stays None, and any other single value is repeated. Raises: RequestError."""
    is_list = isinstance(given, Sequence) and not isinstance(given, (str, bytes))
    values = list(given) if is_list else [given] * num_prompts
    if len(values) != num_prompts:
        raise RequestError(f"{name} has {len(values)} entries for {num_prompts} prompts: give one, or one per prompt")
    for value in values if given is not None else ():
        if not (isinstance(value, kind) or (takes_none and value is None)):
            raise RequestError(f"{name} must be {kind.__name__} or a list of them, got {type(value).__name__}")
    return values


def _count_tokens(output: Output) -> TokenCounts:
    completions = output.outputs if isinstance(output, RequestOutput) else []
    return len(output.prompt_token_ids), sum(len(completion.token_ids) for completion in completions)


@contextmanager
def open_progress_bar(use_tqdm: UseTqdm, total: int) -> Iterator[Callable[[int, int], None]]:
    """Open a bar of `total` prompts, with tokens per second, on stderr; it displays nothing if `use_tqdm` is False.

    Yields: the function that counts one finished prompt, given its prompt tokens and generated tokens.
    """
    if not use_tqdm:
        yield lambda num_input_tokens, num_output_tokens: None
        return
    from tqdm.auto import tqdm

    make = use_tqdm if callable(use_tqdm) else tqdm
    started_s, num_tokens = time.monotonic(), [0, 0]
    with closing(make(total=total, desc="Prompts", dynamic_ncols=True)) as bar:

        def advance(*counts: int) -> None:
            elapsed_s = max(time.monotonic() - started_s, 1e-9)
            num_tokens[:] = [sum(pair) for pair in zip(num_tokens, counts, strict=True)]
            speeds = [count / elapsed_s for count in num_tokens]
            bar.set_postfix_str(f"input {speeds[0]:.0f} tok/s, output {speeds[1]:.0f} tok/s", refresh=False)
            bar.update(1)

        yield advance
