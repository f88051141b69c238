"""`LLM`: prompts in, all results out, in the caller's process and thread.

A thin driver of `LLMEngine`: checks every prompt before any runs, feeds the queue, shows progress, keeps the order.
Next to read: `llm_engine.py`.
"""

import itertools
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self, TypeVar

from quire.engine.beam_search import BeamSearch
from quire.engine.input_processor import PreparedRequest
from quire.engine.interrupts import interrupts_between_steps
from quire.engine.llm_engine import LLMEngine
from quire.engine.output_processor import Output
from quire.engine.progress_bar import ProgressBar, UseTqdm, open_progress_bar
from quire.engine.prompts import split_prompts
from quire.errors import PromptError, QueueFullError, RequestError
from quire.outputs import BeamSearchOutput, PoolingRequestOutput, RequestOutput
from quire.sampling_params import BeamSearchParams, PoolingParams, SamplingParams
from quire.text.tokenizer import Tokenizer

RESERVED_TEMPLATE_NAMES = frozenset(
    {"messages", "add_generation_prompt", "continue_final_message", "tools", "chat_template"}
)
"""Template variables that `chat` sets itself, so `chat_template_kwargs` must not."""

_Params = TypeVar("_Params", SamplingParams, PoolingParams)


class LLM:
    """A model that answers prompts.

    Example: `LLM("smollm2").generate("The capital of France is")[0].outputs[0].text`

    Keyword arguments are the fields of `EngineOptions`. Results have the order of the prompts. A bad prompt or
    parameter raises before anything runs; an interrupt ends everything in flight and leaves the model usable.
    Calls from several threads at once are an error: use `AsyncLLM`.
    """

    def __init__(self, model: str = "smollm2", **kwargs: Any) -> None:
        """Loads the model. Raises: ConfigError, ModelError, CapacityError."""
        self._attach(LLMEngine.from_options(model, **kwargs))

    @classmethod
    def from_engine(cls, engine: LLMEngine) -> Self:
        """Wrap an existing engine."""
        llm = cls.__new__(cls)
        llm._attach(engine)
        return llm

    def _attach(self, engine: LLMEngine) -> None:
        self.llm_engine = engine
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
    ) -> list[RequestOutput]:
        """Complete one prompt or a list of prompts, each as text, token ids or a dict (`quire.outputs.Prompt`).

        `sampling_params`: one for all, or one per prompt; None: the model's recommended ones.
        `priority`: one for all or one per prompt; lower runs first, with scheduling_policy="priority".

        Raises: RequestError, CapacityError, EngineDeadError.
        """
        items = split_prompts(prompts)
        params = _per_prompt("sampling_params", sampling_params, SamplingParams, len(items))
        priorities = [0] * len(items) if priority is None else _priorities(priority, len(items))
        prepare = self.llm_engine.input_processor.prepare
        prepared = [
            prepare(str(next(self._ids)), item, params[i], priority=priorities[i], streams=False)
            for i, item in enumerate(items)
        ]
        outputs = self._run(prepared, use_tqdm)
        return [output for output in outputs if isinstance(output, RequestOutput)]

    def chat(
        self,
        messages: Sequence[Any],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: UseTqdm = True,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation (a list of messages) or a list of conversations.

        A message is `{"role": "user", "content": "…"}`. `continue_final_message` goes on with the last message
        instead of answering it; it needs `add_generation_prompt=False`.

        Raises: ChatTemplateError and what `generate` raises.
        """
        if continue_final_message and add_generation_prompt:
            raise RequestError("continue_final_message=True needs add_generation_prompt=False: one or the other")
        if not isinstance(messages, Sequence) or isinstance(messages, (str, bytes)) or not messages:
            raise PromptError("messages must be a list of messages or a list of conversations, and not empty")
        if not isinstance(chat_template, str | None):
            raise RequestError(f"chat_template must be text, got {type(chat_template).__name__}")
        variables = {} if chat_template_kwargs is None else chat_template_kwargs
        if not isinstance(variables, Mapping) or not all(isinstance(name, str) for name in variables):
            raise RequestError("chat_template_kwargs must be a mapping from names to values")
        for name in sorted(RESERVED_TEMPLATE_NAMES & set(variables)):
            raise RequestError(f"chat_template_kwargs must not hold '{name}': it is an argument of its own")
        conversations = [messages] if isinstance(messages[0], Mapping) else messages
        tokenizer = self.get_tokenizer()
        prompts = []
        for conversation in conversations:
            chat = tokenizer.render_chat(
                conversation,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tools=tools,
                chat_template=chat_template or self.llm_engine.chat_template,
                **variables,
            )
            prompts.append({"prompt": chat.text, "prompt_token_ids": tokenizer.encode_chat(chat)})
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm)

    def beam_search(
        self, prompts: Any, params: BeamSearchParams, *, use_tqdm: UseTqdm = False
    ) -> list[BeamSearchOutput]:
        """Return the likeliest completions of each prompt, best first.

        Raises: RequestError, CapacityError, EngineDeadError.
        """
        if not isinstance(params, BeamSearchParams):
            raise RequestError(f"params must be BeamSearchParams, got {type(params).__name__}")
        engine = self.llm_engine
        searches = [BeamSearch(engine, f"beams-{next(self._ids)}", item, params) for item in split_prompts(prompts)]
        # More beams than max_num_seqs would preempt each other.
        num_at_once = max(1, engine.config.scheduler.max_num_seqs // params.beam_width)
        waiting, running = deque(searches), list[BeamSearch]()
        with self._alone():
            try:
                with interrupts_between_steps() as check, open_progress_bar(use_tqdm, len(searches)) as bar:
                    while waiting or running:
                        while (
                            waiting and len(running) < num_at_once and self._start(waiting[0], has_others=bool(running))
                        ):
                            running.append(waiting.popleft())
                        engine.step()
                        engine.check_health()
                        for search in running:
                            search.advance()
                        bar.advance(sum(search.output is not None for search in running))
                        running = [search for search in running if search.output is None]
                        check()
            finally:
                for search in running:
                    search.cancel()
        return [search.output for search in searches if search.output is not None]

    # --- Embeddings -----------------------------------------------------------------------

    def encode(
        self,
        prompts: Any,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        *,
        use_tqdm: UseTqdm = True,
    ) -> list[PoolingRequestOutput]:
        """Return one vector per prompt from its final hidden states. Parameters None: the last token's, normalised.

        Raises: RequestError, CapacityError, EngineDeadError.
        """
        items = split_prompts(prompts)
        given = _per_prompt("pooling_params", pooling_params, PoolingParams, len(items))
        prepare = self.llm_engine.input_processor.prepare
        prepared = [
            prepare(str(next(self._ids)), item, params or PoolingParams(), streams=False)
            for item, params in zip(items, given, strict=True)
        ]
        outputs = self._run(prepared, use_tqdm)
        return [output for output in outputs if isinstance(output, PoolingRequestOutput)]

    def embed(
        self,
        prompts: Any,
        *,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        use_tqdm: UseTqdm = True,
    ) -> list[PoolingRequestOutput]:
        """`encode` under vLLM's name for embeddings; see `outputs.embedding` of each result."""
        return self.encode(prompts, pooling_params, use_tqdm=use_tqdm)

    # --- The model ------------------------------------------------------------------------

    def get_tokenizer(self) -> Tokenizer:
        """Return the tokenizer."""
        return self.llm_engine.get_tokenizer()

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the sampling parameters of the model's generation_config.json."""
        return self.llm_engine.input_processor.default_sampling_params

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes. Returns False, and does nothing, while requests hold blocks."""
        return self.llm_engine.reset_prefix_cache()

    def shutdown(self) -> None:
        """Free the model's memory. Also done at the end of a `with` block."""
        self.llm_engine.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()

    def __repr__(self) -> str:
        config = self.llm_engine.config
        return (
            f"LLM({config.options.model!r}: {config.model.architecture}, "
            f"{config.model.num_parameters / 1e6:.0f} M parameters, {config.dtype} on {config.device}, "
            f"context {config.scheduler.max_model_len}, {config.scheduler.num_blocks} blocks "
            f"of {config.scheduler.block_size} tokens)"
        )

    # --- Driving the engine ---------------------------------------------------------------

    def _run(self, prepared: list[PreparedRequest], use_tqdm: UseTqdm) -> list[Output]:
        engine = self.llm_engine
        waiting = deque(prepared)
        ids = [item.request.request_id for item in prepared]
        unfinished = set(ids)
        finished: dict[str, Output] = {}
        with self._alone():
            try:
                with interrupts_between_steps() as check, open_progress_bar(use_tqdm, len(prepared)) as bar:
                    while unfinished:
                        self._submit(waiting)
                        for output in engine.step():
                            if output.finished and output.request_id in unfinished:
                                unfinished.remove(output.request_id)
                                finished[output.request_id] = output
                                _show(bar, output)
                        engine.check_health()
                        check()
            except BaseException:
                if not engine.errored:
                    engine.abort_request(ids)
                raise
        return [finished[request_id] for request_id in ids]

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Hold the engine for one call. Raises: RequestError while another call of this LLM runs."""
        if not self._is_driven.acquire(blocking=False):
            raise RequestError(
                "this LLM is busy with another call: let it return first, or use AsyncLLM, which answers many callers"
            )
        try:
            yield
        finally:
            self._is_driven.release()

    def _submit(self, waiting: deque[PreparedRequest]) -> None:
        while waiting:
            try:
                self.llm_engine.submit(waiting[0])
            except QueueFullError:
                if not self.llm_engine.has_unfinished_requests():
                    raise
                return  # the rest is submitted as the queue empties
            waiting.popleft()

    @staticmethod
    def _start(search: BeamSearch, *, has_others: bool) -> bool:
        try:
            search.start()
        except QueueFullError:
            if not has_others:
                raise
            return False
        return True


def _per_prompt(name: str, params: Any, kind: type[_Params], num_prompts: int) -> list[_Params | None]:
    if params is None or isinstance(params, kind):
        return [params] * num_prompts
    if not isinstance(params, Sequence) or isinstance(params, (str, bytes)):
        raise RequestError(f"{name} must be {kind.__name__} or a list of them, got {type(params).__name__}")
    if len(params) != num_prompts:
        raise RequestError(f"{name} has {len(params)} entries for {num_prompts} prompts: give one, or one per prompt")
    for item in params:
        if not isinstance(item, kind):
            raise RequestError(f"{name} must hold {kind.__name__}, got {type(item).__name__}")
    return list(params)


def _priorities(priority: int | Sequence[int], num_prompts: int) -> list[int]:
    if not isinstance(priority, Sequence) or isinstance(priority, str):
        return [priority] * num_prompts  # checked with each request
    if len(priority) != num_prompts:
        raise RequestError(f"priority has {len(priority)} entries for {num_prompts} prompts: give one per prompt")
    return list(priority)


def _show(bar: ProgressBar, output: Output) -> None:
    num_output_tokens = 0
    if isinstance(output, RequestOutput):
        num_output_tokens = sum(len(completion.token_ids) for completion in output.outputs)
    bar.advance(1, len(output.prompt_token_ids), num_output_tokens)
