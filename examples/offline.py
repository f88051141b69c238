"""Many prompts at once: continuous batching, one call."""

from quire import LLM, SamplingParams


def main() -> None:
    """Answer four prompts greedily and print what each cost."""
    llm = LLM("smollm2", max_model_len=1024)
    prompts = ["The capital of France is", "Water boils at", "Once upon a time", "2 + 2 ="]
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=24))
    for output in outputs:
        completion = output.outputs[0]
        print(f"{output.prompt!r} -> {completion.text!r} ({len(completion.token_ids)} tokens)")


if __name__ == "__main__":
    main()
