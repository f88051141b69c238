"""Three streams at once through `AsyncLLM`; one is cancelled on the way."""

import asyncio

from quire import AsyncLLM, SamplingParams


async def stream(llm: AsyncLLM, request_id: str, prompt: str, limit: int) -> str:
    """Read a stream until it ends or has `limit` tokens; leaving the loop aborts the request."""
    text = ""
    async for output in llm.generate(prompt, SamplingParams(temperature=0, max_tokens=48), request_id):
        text = output.outputs[0].text
        if len(output.outputs[0].token_ids) >= limit:
            break
    return text


async def main() -> None:
    """Run the streams concurrently and print their texts."""
    llm = AsyncLLM("smollm2", max_model_len=1024)
    try:
        texts = await asyncio.gather(
            stream(llm, "rain", "Rain forms when", 48),
            stream(llm, "moon", "The Moon is", 48),
            stream(llm, "cancelled", "A very long story:", 8),
        )
    finally:
        llm.shutdown()
    for text in texts:
        print(repr(text))


if __name__ == "__main__":
    asyncio.run(main())
