/**
 * The Mask pane: queries and keys of a step as one matrix.
 */
import { about, html, plural } from "./drawing.js";
import { isPrefill } from "./recording.js";

const MAX_CELL = 16;
const SHARE = 0.5; // of the pane's height, for the rows

/** Draw the mask of a step. */
export function drawMask(xray) {
  const { step, state, recording } = xray;
  const window = state.header.engine.windows.find((value) => value !== null) ?? null;
  const below = about("The step's one matrix: rows are the tokens that it computes, columns the keys of all requests, a block for each request on the diagonal. Full: keys of this step; paler: keys that earlier steps left in the KV cache, " +
    "chunks of a prompt by turns; palest: a prefix found in the cache. The thick line is the edge of the chunk. Nothing off the diagonal is computed: no row sees another request, and the batch needs no padding.",
    `row i sees column j if j ≤ i${window ? ` and i − j < ${window}` : ""}; pairs = Σ (start + k), k = 1 … tokens`, "src/quire/kernels/paged_attention.py");
  if (!step) return html`<p class="hint">No step yet.</p>${below}`;
  // The few rows of a decode say little by themselves: the whole triangle of a prompt stands below them.
  const isDecode = !step.requests.some(isPrefill);
  const prefill = isDecode && recording.steps.findLast((item) => item.step_id < step.step_id && item.requests.some(isPrefill));
  const now = picture(xray, step, "mask");
  const { shares, numRows, numKeys, pairs } = now;
  const longest = Math.max(...shares.map((share) => share.count));
  const padded = longest * shares.length - numRows;
  return html`<p>Step ${step.step_id}: ${plural(numRows, "row")} by ${plural(numKeys, "key")}, ${pairs.toLocaleString("en")} of ${(numRows * numKeys).toLocaleString("en")} pairs of query and key are computed, per head and layer.
    ${padded ? ` A padded batch would compute ${padded.toLocaleString("en")} more rows: (longest − own) summed over ${plural(shares.length, "request")}.` : ""}</p>
    ${now.drawn}
    ${step.requests.length > shares.length && html`<p class="hint">${step.requests.length - shares.length} more requests are not drawn.</p>`}
    ${prefill && html`<h3>Step ${prefill.step_id}, the prefill before it</h3>${picture(xray, prefill, "prefill-mask").drawn}`}${below}`;
}

/** Draw the mask of one step; return it with its counts. */
function picture(xray, step, name) {
  const { recording, width, height, state } = xray;
  const window = state.header.engine.windows.find((value) => value !== null) ?? null;
  const shares = step.requests.filter((share) => share.count).slice(0, 24);
  const numKeys = shares.reduce((sum, share) => sum + share.start + share.count, 0);
  const numRows = shares.reduce((sum, share) => sum + share.count, 0);
  const [left, before] = [24, recording.history(step)];
  const cell = Math.min((width - left - 4) / numKeys, MAX_CELL);
  const sizeY = Math.min(cell, (height * SHARE) / numRows);
  let [pairs, x0, y0] = [0, left, 14];
  const blocks = shares.map(({ id, start, count }) => {
    const { letter, colour } = recording.request(id);
    const { cached, chunks } = before.get(id) ?? { cached: 0, chunks: [] };
    const [rowHeight, x] = [Math.max(sizeY, 12 / count), (key) => x0 + key * cell];
    const parts = [["palest", 0, Math.min(cached, start)], ["light", Math.min(cached, start), start], ["", start, Infinity]];
    chunks.forEach(([from, to], i) => i % 2 && parts.push(["over", from, Math.min(to, start)]));
    const paths = parts.map(() => "");
    for (let row = 0; row < count; row++) {
      const [first, last, y] = [window === null ? 0 : Math.max(0, start + row - window + 1), start + row + 1, y0 + row * rowHeight];
      pairs += last - first;
      parts.forEach(([, from, to], i) => {
        const [begin, end] = [Math.max(first, from), Math.min(last, to)];
        if (begin < end) paths[i] += `M${x(begin)} ${y}H${x(end)}v${rowHeight}H${x(begin)}z`;
      });
    }
    const [right, bottom] = [x(start + count), y0 + count * rowHeight];
    const drawn = html`<rect class="frame" x=${x0} y=${y0} width=${right - x0} height=${bottom - y0}><title>${letter}: ${plural(count, "row")} from position ${start}, ${start + count} keys${cached ? `, ${Math.min(cached, start)} of them from the prefix cache` : ""}</title></rect>
      ${parts.map(([name], i) => html`<path class=${`fill${colour} ${name} untouched`} d=${paths[i]} />`)}
      <line class="edge" x1=${x(start)} x2=${x(start)} y1=${y0} y2=${bottom} />
      <text x="0" y=${y0 + Math.min(11, (bottom - y0) / 2 + 5)} class="letter">${letter}</text><text x=${(x0 + right) / 2} y="10" class="letter mid">${right - x0 > 9 ? letter : ""}</text>`;
    [x0, y0] = [right, bottom];
    return drawn;
  });
  const drawn = html`<svg id=${name} role="img" aria-label=${`Mask of step ${step.step_id}: ${plural(numRows, "row")}, ${plural(numKeys, "column")}, ${plural(shares.length, "block")} on the diagonal`} width=${width} height=${y0 + 4}>${blocks}</svg>`;
  return { drawn, shares, numRows, numKeys, pairs };
}
