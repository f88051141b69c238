"""A conversation: each turn reuses the KV blocks of the turns before it."""

from quire import LLM, SamplingParams


def main() -> None:
    """Two turns; the second finds the first one's blocks in the prefix cache."""
    llm = LLM("smollm2", max_model_len=2048)
    params = SamplingParams(temperature=0, max_tokens=64)
    messages = [{"role": "user", "content": "Name three colours of the rainbow."}]
    for question in (None, "And which of them is the warmest?"):
        if question is not None:
            messages.append({"role": "user", "content": question})
        output = llm.chat(messages, params, use_tqdm=False)[0]
        answer = output.outputs[0].text
        messages.append({"role": "assistant", "content": answer})
        print(f"[{output.num_cached_tokens} of {len(output.prompt_token_ids)} prompt tokens cached] {answer}")


if __name__ == "__main__":
    main()
