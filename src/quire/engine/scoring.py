"""`Scoring`: scores of pairs of texts, by a cross-encoder, by a model that answers yes or no, or by embeddings.

Pure: it makes prompts and parameters, and scores of the vectors that the engine returns for them. `LLM.score` and the
server's routes use it. It must not know requests. Next to read: `llm.py`.
"""

import math
import operator
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from quire.config import ModelConfig
from quire.errors import RequestError
from quire.outputs import PoolingRequestOutput
from quire.sampling_params import PoolingParams
from quire.text.tokenizer import Tokenizer

JUDGE_PREFIX = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct"
    ' provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
JUDGE_SUFFIX = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
"""Text around the pair, from the model card of Qwen3-Reranker."""
INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
TURN = "<|im_start|>"


class Scoring:
    """Pairs of texts to score.

    Attributes:
        prompts: token ids or texts to compute, in order.
        params: pooling of all of them.
    """

    def __init__(
        self,
        model: ModelConfig,
        tokenizer: Tokenizer,
        pairs: Sequence[tuple[str, str]],
        *,
        max_prompt_len: int | None = None,
        max_document_len: int | None = None,
    ) -> None:
        """`max_prompt_len`, `max_document_len`: tokens; the ends of documents are cut off for them.

        Raises: RequestError if the model has a head with several labels, or a query alone is too long.
        """
        if max_document_len is not None:
            pairs = [(query, _start(tokenizer, document, max_document_len)) for query, document in pairs]
        self._pairs = pairs
        self._is_pooled = False
        self.prompts: list[Any]
        if model.label_tokens:
            self.prompts = [_fitting(partial(_judged, tokenizer), tokenizer, pair, max_prompt_len) for pair in pairs]
            ids = [_single(tokenizer, word) for word in model.label_tokens]
            self.params = PoolingParams(task="token_logits", token_ids=ids)
        elif model.labels:
            if len(model.labels) != 1:
                raise RequestError(
                    f"scores need a classification head of one label, this model has {len(model.labels)}: use classify"
                )
            self.prompts = [_fitting(tokenizer.encode_pair, tokenizer, pair, max_prompt_len) for pair in pairs]
            self.params = PoolingParams(task="classify")
        else:
            self._is_pooled = True
            self._texts = list(dict.fromkeys(text for pair in pairs for text in pair))
            self.prompts = [
                text if max_prompt_len is None else tokenizer.encode(text)[:max_prompt_len] for text in self._texts
            ]
            self.params = PoolingParams(**{**model.embedding_defaults, "normalize": True})

    def scores(self, vectors: Sequence[Sequence[float]]) -> list[float]:
        """Return the score of each pair: a probability, or of embeddings the cosine. `vectors`: of `prompts`."""
        if not self._is_pooled:
            return [_sigmoid(vector[-1] - (vector[0] if len(vector) > 1 else 0.0)) for vector in vectors]
        of_text = dict(zip(self._texts, vectors, strict=True))
        return [sum(map(operator.mul, of_text[first], of_text[second])) for first, second in self._pairs]


def make_pairs(queries: str | Sequence[str], documents: str | Sequence[str]) -> list[tuple[str, str]]:
    """Pair one query with all documents, or each query with its own. Raises: RequestError for other numbers."""
    first = [queries] if isinstance(queries, str) else list(queries)
    second = [documents] if isinstance(documents, str) else list(documents)
    for text in (*first, *second):
        if not isinstance(text, str):
            raise RequestError(f"a text to score must be a string, got {type(text).__name__}")
    if len(first) == 1:
        first *= len(second)
    if not first or len(first) != len(second):
        raise RequestError(f"{len(first)} queries and {len(second)} documents: give one query, or one per document")
    return list(zip(first, second, strict=True))


def probabilities(logits: Sequence[float]) -> list[float]:
    """Return the probability of each label: softmax, and of a single label the sigmoid."""
    if len(logits) == 1:
        return [_sigmoid(logits[0])]
    powers = [math.exp(value - max(logits)) for value in logits]
    return [power / sum(powers) for power in powers]


def vector_of(output: PoolingRequestOutput) -> list[float]:
    """Return what was pooled. Raises: RequestError if the request failed."""
    if output.error is not None:
        raise RequestError(output.error)
    return output.outputs.embedding


def _start(tokenizer: Tokenizer, text: str, max_len: int) -> str:
    """Return the text of the first `max_len` tokens."""
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    return text if len(token_ids) <= max_len else tokenizer.decode(token_ids[:max_len])


def _fitting(
    encode: Callable[[str, str], list[int]], tokenizer: Tokenizer, pair: tuple[str, str], max_len: int | None
) -> list[int]:
    """Return the prompt of a pair, the document's end cut off until it has at most `max_len` tokens."""
    query, document = pair
    token_ids, num_kept = encode(query, document), None
    while max_len is not None and len(token_ids) > max_len:
        if not document or num_kept == 0:
            raise RequestError(
                f"the query alone makes {len(token_ids)} tokens, more than the {max_len} of truncate_prompt_tokens: "
                "shorten the query or raise the limit"
            )
        # Joining may change the tokens at the cut, so that a second round may follow.
        num_kept = len(tokenizer.encode(document, add_special_tokens=False)) if num_kept is None else num_kept
        num_kept = max(0, num_kept - (len(token_ids) - max_len))
        token_ids = encode(query, _start(tokenizer, document, num_kept))
    return token_ids


def _judged(tokenizer: Tokenizer, query: str, document: str) -> list[int]:
    """Return the prompt of a pair. A query that begins a turn has the template already, as for vLLM."""
    if query.startswith(TURN):
        return tokenizer.encode(query + document, add_special_tokens=False)
    body = f"<Instruct>: {INSTRUCTION}\n<Query>: {query}\n<Document>: {document}"
    return tokenizer.encode(JUDGE_PREFIX + body + JUDGE_SUFFIX, add_special_tokens=False)


def _single(tokenizer: Tokenizer, word: str) -> int:
    ids = tokenizer.encode(word, add_special_tokens=False)
    if len(ids) != 1:
        raise RequestError(f"classifier_from_token: {word!r} is {len(ids)} tokens, and must be one")
    return ids[0]


def _sigmoid(value: float) -> float:
    power = math.exp(-abs(value))
    return 1 / (1 + power) if value >= 0 else power / (1 + power)
