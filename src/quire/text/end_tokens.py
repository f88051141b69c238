"""`find_end_tokens`: the tokens of a vocabulary that end a turn or a text, by their texts.

Configurations often name one end of several, or a wrong one; llama.cpp collects ends by their texts too. Only added
tokens count, which no ordinary text becomes. Must not know: files, models. Next to read: `tokenizer.py`.
"""

from collections.abc import Mapping

_MARKERS = frozenset({
    "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|eot|>", "<|eom|>", "<|end|>", "<end_of_turn>", "<turn|>",
    "<|tool_response>", "<|END_OF_TURN_TOKEN|>", "<|EOT|>", "[|endofturn|]", "<end_of_utterance>", "<|return|>",
    "<|call|>", "<|calls|>", "<|flush|>", "<|endoftext|>", "<|end_of_text|>", "<｜end▁of▁sentence｜>",
})  # fmt: skip
_NAMES = frozenset({"</s>", "<eos>", "<EOT>", "▁<EOT>", "[EOT]", "[EOS]", "[e~["})
"""Ends if they are special. Elsewhere they are text: Gemma has `</s>` as a tag of HTML."""
_PART_END = "<|end|>"
_PARTED = frozenset({"<|return|>", "<|flush|>"})
"""Ends of formats whose turns have several parts (gpt-oss, Solar Open); `_PART_END` then ends a part alone."""


def find_end_tokens(added: Mapping[str, int], special: frozenset[int]) -> frozenset[int]:
    """Return the ends among added tokens, given by text; `special`: those that mark structure."""
    found = {text: added[text] for text in _MARKERS if text in added}
    found |= {text: added[text] for text in _NAMES if added.get(text) in special}
    if not _PARTED.isdisjoint(found):
        found.pop(_PART_END, None)
    return frozenset(found.values())
