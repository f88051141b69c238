"""Drive the engine yourself: one `step()` at a time, reading the event log."""

from quire import LLMEngine, SamplingParams
from quire.events import EventKind


def main() -> None:
    """Run two requests of different length and print what each step computed."""
    engine = LLMEngine.from_options("smollm2", max_model_len=512, max_num_seqs=8, max_num_batched_tokens=16)
    params = SamplingParams(temperature=0, max_tokens=6)
    engine.add_request(
        "long", "Continuous batching lets requests join and leave the batch at every step, so that", params
    )
    engine.add_request("short", "Hello", params)
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                print(f"{output.request_id}: {output.outputs[0].text!r}")
    for event in engine.events.of(EventKind.STEP):
        print(
            f"step {event.data['step_id']}: {event.data['num_tokens']} tokens of {event.data['num_requests']} requests"
        )


if __name__ == "__main__":
    main()
