"""`reason_of`: the answer to "why?" at one line of the tour. Next to read: `tour.py`, which makes the lines."""

import re

# A pattern of a line's beginning, then the reason.
_REASONS = r"""
\d+ tokens, each
    The model's vocabulary is fixed. A frequent word is one token; a rare word is several.
\d+: \d+ '|…
    A leading space belongs to the token. Words like <|im_start|> are special tokens that only the chat template
    writes: text of a user cannot contain them.
blocks =
    Blocks are given whole. Rounding up wastes less than one block per sequence, and any free block fits.
block table
    The table is all that ties the sequence to its memory. Block 0 is kept for entries without tokens, so tables
    begin at 1.
slot of position
    The kernel that writes keys and values, and attention, compute addresses by this formula.
KV cache:
    Each layer keeps its own key and value of each token. Grouped-query attention has fewer KV heads than query
    heads, which divides this number.
step \d+: positions .* in one batch
    T is the number of rows in every matrix product of the step. All layers run in one native call.
mask:
    A token may not see later ones: in training they are what it must predict. The other half of the square is
    never computed.
layers with a sliding window
    Such layers forget: keys older than the window are not read, and their blocks become free.
no instruction was timed
    Only a plan's instructions have times. Op by op, use `quire trace --torch-profiler`.
\d+ instructions take
    Gemm is a matrix product. Its share is large in every step, since nearly all weights are in products.
pool:
    All requests take blocks from one pool. A request that finds none waits, or another gives its blocks back.
query_start_loc|in the last step query_start_loc
    The batch is one flat row of tokens without padding: request r has the rows from query_start_loc[r] on, and
    attends to seq_lens[r] positions.
block_tables|in the last step block_tables
    Kernels read keys and values through the block tables and write new ones to the slots of slot_mapping.
(in total: (\d+ steps, )?)?\d+ tokens in
    The time of whole steps as the engine's event log has it, with scheduling and sampling.
(in total: )?[\d.]+ .?FLOP.* moved
    FLOPs divided by bytes is the intensity. A low one means that the step waits for memory, a high one that it
    waits for arithmetic. Only weights and the KV cache count: other values stay in the processor's caches.
(in total: )?[\d.]+% of the limit
    The larger of bytes / bandwidth and FLOPs / rate, both measured on this machine: no kernel can be faster.
limits,
    Measured by the engine's own kernels on registers and on memory, with all threads.
chunked / whole
    The FLOPs are the same. Each chunk reads all weights again.
prefill : decode
    A decode does the arithmetic of one token and moves almost the bytes of a whole prefill.
instructions
    Equal instructions, as those of all layers, are one entry.
all-reduces took
    The time of rank 0, which waits in each sum for the slowest rank.
speed-up
    The time here over the time there.
memory of
    Allocated is what tensors hold, reserved what PyTorch keeps of the device for further ones.
only the last position
    The head's product is as wide as the vocabulary. The logits of earlier positions would predict tokens that
    are known.
token \d+
    Softmax turns logits into these probabilities. Greedy decoding takes the largest; a temperature would draw.
step \d+: positions .* samples nothing
    The prompt is not complete, so its next token is known. The chunk's keys and values are kept.
step \d+: positions .* samples the first
    This chunk has the prompt's last token, whose row predicts the first new one.
the prompt fits in one chunk
    A chunk is a limit on tokens per step, not a size: shorter prompts are not padded.
output:
    Chunks compute the same sums over the same keys and values, so that nothing depends on where a prompt is
    split.
step \d+: position \d+, T = 1
    The row of the newest token attends to all keys before it: pairs grow by one a step, the rest stays the
    same.
\d+× .*Norm
    RMS norm scales each row to a mean square of 1. It quantises its result where the next product takes 8-bit
    values.
\d+× WriteKv
    Rotates queries and keys by their positions and writes keys and values to their slots in the KV cache.
\d+× QK
    Reads the keys and values of each sequence through its block table: softmax(q · k / √d) · v. Scores of later
    positions are dropped by the mask, and never computed; uncausal counts them.
\d+× AllReduce
    Each rank has a part of the sum. Ranks write their parts to shared memory and add them in the order of the ranks.
\d+× Embed
    A table's row per token id: bytes are read, nothing is computed.
\d+× .*qkv_proj
    One product makes queries, keys and values: their three weights are stored as one, so that x is read once.
\d+× .*(o_proj|dense|c_proj)
    It mixes the heads' results and brings them back to the model's width.
\d+× .*gate_up_proj
    Gate and up projection are one product. silu(gate) · up is computed as it leaves, with half the columns.
\d+× .*down_proj
    It brings the wide inner values of the MLP back to the model's width, to be added to the residual.
\d+× .*(embed|lm_head)
    The head: one logit per token of the vocabulary. This model may use its embedding table for it.
(prefill|chunk|decode) +
    FLOPs of a product are 2 · rows · inputs · outputs. The bytes are the weight's, read once, so the quotient grows
    with the rows. The time is the mean of the instructions.
the first chunk samples
    Without a token to sample no logits are needed.
\d+×
    A weight [outputs, inputs] multiplies rows [T, inputs] to rows [T, outputs].
without:
    Each step computes the rows of the whole sequence so far: the sum of its lengths.
with:
    The prompt's rows once, then one row per token. The last token is sampled and never computed.
without / with
    Time falls by less than rows: one row alone reads every weight, many rows share that reading.
order in the first layer
    Columns, then rows: the first product of a pair leaves parts of its outputs, the second sums over them.
\d+ all-reduces
    Two a layer, after attention and after the MLP; one more sums the embedding, whose rows are split.
\d+ all-gather
    Each rank computes the logits of its part of the vocabulary.
.* (prefill|decode):
    Both devices computed the same prompt with the same weights.
this (machine|tour)
    With a CUDA GPU the tour runs the prompt on both and shows the times side by side.
"""
_PAIRS = re.findall(r"^(\S.*)\n((?:    .*\n)+)", _REASONS, re.MULTILINE)


def reason_of(line: str) -> str | None:
    """Return why a line of the tour says what it says; None if its stop's own reason says it."""
    return next((" ".join(reason.split()) for pattern, reason in _PAIRS if re.match(pattern, line.strip())), None)
