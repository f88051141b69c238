"""Distil an EAGLE-3 head for a model of Llama's kind from its own answers, and say how many of its guesses are right.

    python -m benchmarks.distil_head DIRECTORY [--model smollm2] [--collect 10] [--train 50] [--tokens 4096]
    python -m benchmarks.drafts --draft-model DIRECTORY/head --workloads story,prose --streams 1

For `--collect` minutes the model answers random prompts, 32 at a time, and the directory gets what a head reads of each
token (4.6 kB for SmolLM2). A head that knows the `--tokens` most frequent tokens is then trained for `--train` minutes.
It starts as the model's last layer, learns the model's probabilities, and from 0.4 of the time on reads its own hidden
states too, as a second guess does. Printed is the share of right guesses behind right ones, by position, on answers
that it was not trained on. Needs PyTorch. Results: `README.md`.
"""

import json
import random
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from numpy.typing import NDArray
from torch.nn import functional

from benchmarks.command_line import make_parser
from quire.engine.llm_engine import LLMEngine
from quire.models.hf_llama import LlamaConfig
from quire.models.hf_predictor import ARCHITECTURE, NUM_KEPT
from quire.sampling_params import SamplingParams
from quire.weights.checkpoint import open_checkpoint
from quire.weights.sources import resolve_source
from quire.weights.weight_tensor import to_bf16

NUM_STREAMS, ANSWER_TOKENS, BATCH, RATE, NUM_HELD_OUT = 32, 320, 2, 8e-4, 16
TASKS = """Write a story about {}.|Explain {} to a child.|Write a letter to a friend about {}.|Describe {} in detail.
Give five pieces of advice about {}.|Write a poem about {}.|What is the history of {}?|Tell a tale of {} and {}.
Write a dialogue about {}.|Why do people care about {}?|Write a news article about {}.|Compare {} and {}.
Write the first chapter of a novel about {}.|What should a beginner know about {}?|Write a humorous tale about {}."""
TOPICS = """the moon|a fox|rain|a violin|bees|a baker|winter|a train station|an astronaut|coffee|a river|the desert
a king|a sailor|robots|mountains|cats|football|painting|a doctor|volcanoes|the stars|a lost letter|a bridge|money
a wizard|music|honesty|a village|photography|a teacher|wolves|the forest|time|a storm|cooking|the internet|whales
electric cars|a castle|a market|birds|a clockmaker|friendship|a giant|horses|a detective|snow|the theatre|tea
a pirate|the brain|dinosaurs|a farmer|a ghost|an old house|a secret door|dreams|a bicycle|a queen|glass|a spider"""
"""Others than those of `benchmarks.drafts`."""


@dataclass
class Answer:
    """A prompt with the model's answer, and the hidden states that a head reads at each token but the last, and the
    model's last ones."""

    token_ids: list[int]
    num_prompt: int
    states: NDArray[np.int16]


class Recorder:
    """Keeps hidden states, in a drafter's place."""

    def __init__(self, kept: Any) -> None:
        self._kept, self.states = kept, dict[str, list[NDArray[np.uint16]]]()

    def begin_step(self, output: Any) -> None:
        """See `Drafter`."""

    def follow(self, layout: Any, forward: Any) -> None:
        """See `Drafter`."""
        count = int(layout.counts.sum())
        states = to_bf16(np.concatenate([*(each[:count] for each in self._kept), forward.hidden(0, count)], axis=1))
        for (item, _), first, num_rows in zip(layout.computed, layout.first_rows, layout.counts.tolist(), strict=True):
            self.states.setdefault(item.request_id, []).append(states[first : first + num_rows])


def collect(directory: Path, model: str, minutes: float) -> None:
    """Let the model answer prompts, and append the answers to the directory's files."""
    head = Head(model, np.arange(64)).write(directory / "start")
    engine = LLMEngine.from_options(
        model,
        device="cpu",
        max_num_seqs=NUM_STREAMS,
        max_model_len=1024,
        enable_prefix_caching=False,
        draft_model=str(head),
    )
    runner = engine._executor._worker.runner  # type: ignore[attr-defined]
    engine._drafting.proposer, runner._gives_drafts = None, False
    runner.drafter = recorder = Recorder(runner.drafter._kept)
    tasks, topics = (text.replace("\n", "|").split("|") for text in (TASKS, TOPICS))
    prompts, number, ends = dict[str, list[int]](), 0, time.monotonic() + 60 * minutes
    with (directory / "states.bin").open("ab") as states, (directory / "answers.jsonl").open("a") as answers:
        while prompts or time.monotonic() < ends:
            while len(prompts) < NUM_STREAMS and time.monotonic() < ends:
                task, number = random.choice(tasks), number + 1
                text = task.format(*random.sample(topics, task.count("{}")))
                prompt = engine.get_tokenizer().encode(f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n")
                params = SamplingParams(temperature=random.choice((0, 0.7, 0.8, 1)), max_tokens=ANSWER_TOKENS)
                prompts[str(number)] = prompt
                engine.add_request(str(number), {"prompt_token_ids": prompt}, params)
            for output in engine.step():
                if output.finished:
                    prompt = prompts.pop(output.request_id)
                    token_ids = [*prompt, *output.outputs[0].token_ids]  # type: ignore[union-attr]
                    np.concatenate(recorder.states.pop(output.request_id))[: len(token_ids) - 1].tofile(states)
                    answers.write(json.dumps({"token_ids": token_ids, "num_prompt": len(prompt)}) + "\n")


def read_answers(directory: Path, width: int) -> list[Answer]:
    """Return the answers of a directory in random order; their hidden states stay on the disk."""
    states, start = np.memmap(directory / "states.bin", np.int16, "r").reshape(-1, (NUM_KEPT + 1) * width), 0
    found = []
    for line in (directory / "answers.jsonl").read_text().splitlines():
        token_ids, num_prompt = json.loads(line).values()
        found.append(Answer(token_ids, num_prompt, states[start : start + len(token_ids) - 1]))
        start += len(token_ids) - 1
    return random.sample(found, len(found))


def frequent_tokens(answers: list[Answer], count: int) -> NDArray[np.int64]:
    """Return the most frequent tokens of answers, in order, and print their share."""
    found = np.bincount([token_id for each in answers for token_id in each.token_ids[each.num_prompt :]])
    best = np.argsort(-found, kind="stable")[:count]
    share = 100 * found[best].sum() / found.sum()
    print(f"{len(answers)} answers, {found.sum()} tokens; the head knows {share:.1f} %", flush=True)
    return np.sort(best)


class Head:
    """The head in PyTorch, with tokens in order. It starts as the model's last layer."""

    def __init__(self, model: str, token_ids: NDArray[np.int64]) -> None:
        checkpoint = open_checkpoint(resolve_source(model))
        self.config = config = LlamaConfig.from_hf(checkpoint.hf_config)
        self.token_ids, width = torch.from_numpy(token_ids), config.hidden_size

        def stored(name: str) -> torch.Tensor:
            return checkpoint.tensors[f"{name}.weight"].to_torch(torch.float32)

        layer, found = f"model.layers.{config.num_layers - 1}", dict[str, torch.Tensor]()
        for name in ("o_proj", "q_proj", "k_proj", "v_proj"):
            of_layer = stored(f"{layer}.self_attn.{name}")
            of_embedding = [0.005 * torch.randn_like(of_layer)] * (name != "o_proj")
            found[f"midlayer.self_attn.{name}"] = torch.cat((*of_embedding, of_layer), 1)
        for name in ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", "post_attention_layernorm"):
            found[f"midlayer.{name}"] = stored(f"{layer}.{name}")
        found["midlayer.hidden_norm"], found["norm"] = stored(f"{layer}.input_layernorm"), stored("model.norm")
        found["midlayer.input_layernorm"] = torch.ones(width)
        found["fc"] = torch.cat((0.001 * torch.randn(width, 2 * width), torch.eye(width)), 1)
        self.embeddings = stored("model.embed_tokens")
        self.model_head = (self.embeddings if config.tie_word_embeddings else stored("lm_head"))[self.token_ids]
        found["lm_head"] = self.model_head.clone()
        self.weights = {name: torch.nn.Parameter(values) for name, values in found.items()}
        self.frequencies = config.rope.theta ** -(torch.arange(0, config.head_size, 2) / config.head_size)

    def linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, self.weights[name])

    def norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(x, x.shape[-1:], self.weights[name], self.config.rms_norm_epsilon)

    def rotate(self, x: torch.Tensor, start: int) -> torch.Tensor:
        """Rotate heads of positions start …. Shapes: [H, T, D] -> [H, T, D]."""
        angles = torch.arange(start, start + x.shape[1])[:, None] * self.frequencies  # [T, D / 2]
        low, high = x.chunk(2, -1)
        return torch.cat((low * angles.cos() - high * angles.sin(), high * angles.cos() + low * angles.sin()), -1)

    def layer(self, embedded: torch.Tensor, x: torch.Tensor, past: list[tuple[torch.Tensor, torch.Tensor]]) -> Any:
        """Compute guess len(past) of all rows; a row sees the first guess up to its own row, and its own of later ones.

        Shapes: embedded, x [T, E] -> [T, E]. Mutates: past, keys and values of each guess.
        """
        ahead, length = len(past), len(x)
        joined = torch.cat((self.norm("midlayer.input_layernorm", embedded), self.norm("midlayer.hidden_norm", x)), -1)
        projected = (self.linear(f"midlayer.self_attn.{name}_proj", joined) for name in "qkv")
        q, k, v = (
            values.unflatten(1, (-1, self.config.head_size)).transpose(0, 1) for values in projected
        )  # [H, T, D]
        past.append((self.rotate(k, ahead), v))
        keys, values = (torch.cat([each[:, :length] for each in of_all], 1) for of_all in zip(*past, strict=True))
        own = torch.eye(length, dtype=torch.bool)
        mask = torch.cat((torch.ones_like(own).tril(), *[own] * ahead), 1)
        found = functional.scaled_dot_product_attention(self.rotate(q, ahead), keys, values, mask, enable_gqa=True)
        x = x + self.linear("midlayer.self_attn.o_proj", found.transpose(0, 1).flatten(1))
        of_mlp = self.norm("midlayer.post_attention_layernorm", x)
        gate = functional.silu(self.linear("midlayer.mlp.gate_proj", of_mlp))
        return x + self.linear("midlayer.mlp.down_proj", gate * self.linear("midlayer.mlp.up_proj", of_mlp))

    def losses(self, answer: Answer, num_guesses: int) -> tuple[torch.Tensor, NDArray[np.int64]]:
        """Return the cross-entropy to the model's probabilities, and the right guesses, and all, behind right ones.

        Guess k at row j reads the hidden states of j, or guess k - 1, and token j + k + 1, and predicts the next one.
        """
        states, tokens = torch.from_numpy(answer.states.copy()), torch.tensor(answer.token_ids)
        kept, hidden = states.view(torch.bfloat16).float().split((NUM_KEPT * (width := states.shape[1] // 4), width), 1)
        first, x, past, loss = max(0, answer.num_prompt - 2), self.linear("fc", kept), list[Any](), torch.zeros(())
        are_right, counts = torch.ones(len(states) - 1 - first, dtype=torch.bool), np.zeros((num_guesses, 2), np.int64)
        for ahead in range(num_guesses):
            count = len(states) - 1 - ahead
            x = self.layer(self.embeddings[tokens[ahead + 1 :][:count]], x[:count], past)
            wanted = (hidden[ahead + 1 :][first:] @ self.model_head.T).softmax(-1)
            logits = self.linear("lm_head", self.norm("norm", x[first:]))
            loss = loss + 0.8**ahead * functional.cross_entropy(logits, wanted)
            before = are_right[: count - first]
            are_right = before & (self.token_ids[logits.argmax(-1)] == tokens[ahead + 2 :][first:])
            counts[ahead] = int(are_right.sum()), int(before.sum())
        return loss, counts

    def write(self, path: Path) -> Path:
        """Write an EAGLE-3 directory."""
        path.mkdir(parents=True, exist_ok=True)
        config, count = self.config, len(self.token_ids)
        fields = {
            "architectures": [ARCHITECTURE], "model_type": "llama", "num_hidden_layers": 1, "draft_vocab_size": count,
            "vocab_size": config.vocab_size, "hidden_size": config.hidden_size, "head_dim": config.head_size,
            "intermediate_size": config.intermediate_size, "num_attention_heads": config.num_heads,
            "num_key_value_heads": config.num_kv_heads, "max_position_embeddings": config.context_len,
            "rms_norm_eps": config.rms_norm_epsilon, "rope_theta": config.rope.theta, "tie_word_embeddings": False,
        }  # fmt: skip
        (path / "config.json").write_text(json.dumps(fields))
        tensors = {f"{name}.weight": value.detach().bfloat16().contiguous() for name, value in self.weights.items()}
        tensors["d2t"] = self.token_ids - torch.arange(count)
        safetensors.torch.save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
        return path


def train(head: Head, answers: list[Answer], minutes: float) -> None:
    """Train the head, and print its acceptance."""
    optimiser = torch.optim.AdamW(head.weights.values(), betas=(0.9, 0.95), weight_decay=0.01, fused=True)
    training, began, num_read, done = answers[NUM_HELD_OUT:], time.monotonic(), 0, 0.0
    while (done := (time.monotonic() - began) / (60 * minutes)) < 1:
        for answer in random.choices(training, k=BATCH):
            (head.losses(answer, 1 if done < 0.4 else 2)[0] / BATCH).backward()
        num_read += BATCH
        optimiser.param_groups[0]["lr"] = RATE * min(1, num_read / BATCH / 50) * (1 - 0.95 * done)
        torch.nn.utils.clip_grad_norm_(head.weights.values(), 1.0)
        optimiser.step()
        optimiser.zero_grad()
    with torch.no_grad():
        right, behind_right = sum(head.losses(answer, 3)[1] for answer in answers[:NUM_HELD_OUT]).T  # type: ignore[union-attr]
    shares = ", ".join(map("{:.2f}".format, right / np.maximum(1, behind_right)))
    print(f"{num_read / len(training):.1f} passes, {time.process_time():.0f} s of processor time: acceptance {shares}")


def main() -> None:
    """Collect, train and write the head."""
    parser = make_parser(__doc__, "model", "threads")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--collect", type=float, default=10, help="minutes; 0 uses the answers in DIRECTORY  [10]")
    parser.add_argument("--train", type=float, default=50, help="minutes  [%(default)s]")
    parser.add_argument("--tokens", type=int, default=4096, help="of the head's vocabulary  [%(default)s]")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    if arguments.collect:
        collect(arguments.directory, arguments.model, arguments.collect)
    answers = read_answers(arguments.directory, Head(arguments.model, np.arange(1)).config.hidden_size)
    head = Head(arguments.model, frequent_tokens(answers, arguments.tokens))
    train(head, answers, arguments.train)
    head.write(arguments.directory / "head")


if __name__ == "__main__":
    main()
