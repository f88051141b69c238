/**
 * The KV pane: the pool of blocks and the block tables of a step. Next to read: recording.js.
 */
import { PATTERNS, about, html, plural, short } from "./drawing.js";
import { numShared } from "./recording.js";

const NULL_BLOCK = 0;
const NUMBERS = 44; // Width of the numbers beside the map.
const SIZES = [40, 24, 18, 14, 10, 7, 5, 3]; // Of a block in the map: the largest with which the rows in use fit.
const GAP = 16; // Height of the line that stands for free rows.
const MAP_SHARE = 0.35; // of the pane's height

/** Draw the block pool and the block tables. */
export function drawKv(xray) {
  const { state, recording } = xray;
  const { num_blocks, block_size, kv_bytes_per_token } = state.header.engine;
  const owners = state.owners();
  const numUsed = owners.size;
  const cached = state.cached(owners);
  const numFree = num_blocks - 1 - numUsed - cached.size;
  const numShared = [...owners.values()].filter((ids) => ids.length > 1).length;
  const requests = [...state.requests.values()];
  const chosen = state.requests.get(xray.request) ?? (requests.length === 1 ? requests[0] : null);
  const kind = (block) => {
    const ids = owners.get(block);
    return ids ? (ids.length > 1 ? "shared" : `fill${recording.request(ids[0]).colour}`) : cached.has(block) ? "cached" : "free";
  };
  const cell = (block, request, i) => {
    const ids = owners.get(block) ?? [];
    const filled = Math.min(block_size, request.num_computed - i * block_size);
    const text = block === NULL_BLOCK ? "out of the window" : `block ${block}: positions ${i * block_size}–${(i + 1) * block_size - 1}, ${Math.max(0, filled)} of ${block_size} filled, ` + plural(ids.length, "reference");
    return html`<li class=${`block ${block === NULL_BLOCK ? "gone" : ""} ${ids.length > 1 ? "many" : ""}`} title=${text}>
      <i style=${{ width: `${(100 * Math.max(0, filled)) / block_size}%` }} class=${`o${recording.request(request.id).colour}`}></i><span>${block || "–"}</span>
      ${ids.length > 1 && html`<em>×${ids.length}</em>`}</li>`;
  };
  return html`
    <p id="kv-summary">${plural(num_blocks - 1, "block")} of ${block_size} tokens: <b>${numUsed}</b> in use (${numShared} shared), <b>${cached.size}</b> cached, <b>${numFree.toLocaleString("en")}</b> free.
      In use: ${short(numUsed * block_size * kv_bytes_per_token, "B")} of ${short((num_blocks - 1) * block_size * kv_bytes_per_token, "B")}.</p>
    ${drawMap(xray, num_blocks, [...owners.keys(), ...cached], kind, `${numUsed} in use, ${cached.size} cached, ${numFree} free`)}
    <p class="legend"><span class="key o0">A</span> used by a request <span class="key shared">×2</span> shared <span class="key cached"> </span> cached: free, but its prefix can be found <span class="key free"> </span> free</p>
    ${drawFutures(xray)}
    <h3>Block tables</h3>
    ${!requests.length && html`<p class="hint">No request holds blocks${cached.size ? "; what finished requests left can be found again by their prefixes" : ""}.</p>`}
    ${requests.slice(0, 24).map((request) => html`<div class="row">
      <button class="owner" aria-pressed=${String(request.id === xray.request)} onClick=${() => xray.set({ request: request.id === xray.request ? null : request.id })}>
        ${xray.badge(request.id)} ${request.num_computed} of ${request.num_tokens}</button>
      ${request.tables.map((table) => html`<ol class="blocks">${table.slice(0, 64).map((block, i) => cell(block, request, i))}
        ${table.length > 64 && html`<li>+${table.length - 64}</li>`}</ol>`)}</div>`)}
    ${chosen && html`<h3>Block table of ${xray.badge(chosen.id)} <small>${chosen.id}</small></h3><div class="scroll" tabindex="0"><table><thead><tr><th>Index</th><th>Block</th><th>Positions</th><th>Held by</th></tr></thead>
      <tbody>${chosen.tables.map((table) => table.map((block, i) => html`<tr><td>${i}</td><td>${block}</td><td>${i * block_size < chosen.num_computed ? `${i * block_size}–${Math.min((i + 1) * block_size, chosen.num_computed) - 1}` : "none yet"}</td>
        <td>${(owners.get(block) ?? []).map((id) => xray.badge(id))}</td></tr>`))}</tbody></table></div>`}
    ${about("The KV cache is a pool of blocks. A request's block table names its blocks in order, so its memory need not be contiguous, and requests with the same beginning share full blocks (×2). Choose a request for its whole table.",
      `blocks = ⌈tokens / ${block_size}⌉; bytes of a block = ${block_size} × ${kv_bytes_per_token.toLocaleString("en")} B`, "src/quire/scheduler/blocks.py")}`;
}

/** Draw the pool; of one that is too large the rows with blocks in use or cached, and the number of free rows between them. */
function drawMap(xray, numBlocks, held, kind, label) {
  const width = xray.width - NUMBERS;
  const rowsOf = (size) => [...new Set(held.map((block) => Math.floor((block - 1) / Math.floor(width / size))))].sort((a, b) => a - b);
  const heightOf = (rows, size) => rows.length * size + GAP * rows.filter((row, i) => row > (rows[i - 1] ?? -1) + 1).length;
  const size = SIZES.find((item) => heightOf(rowsOf(item), item) <= xray.height * MAP_SHARE) ?? SIZES.at(-1);
  const perRow = Math.floor(width / size);
  const numRows = Math.ceil((numBlocks - 1) / perRow);
  const isWhole = numRows * size <= xray.height * MAP_SHARE;
  const [drawn, found] = [[], isWhole ? Array.from({ length: numRows }, (_, row) => row) : rowsOf(size)];
  let [y, before] = [0, -1];
  const skip = (next) => {
    if (next === before + 1) return;
    drawn.push(html`<text class="small" x=${NUMBERS} y=${y + 11}>… ${plural(next - before - 1, "row")} of free blocks</text>`);
    y += GAP;
  };
  for (const row of found.length ? found : [0]) {
    if (found.length) skip(row);
    const [first, end] = [row * perRow + 1, Math.min(numBlocks, (row + 1) * perRow + 1)];
    drawn.push(html`<text class="small end" x=${NUMBERS - 6} y=${y + size / 2 + 4}>${first}</text>`);
    for (let block = first, from = first; block < end; block++) {
      if (block + 1 < end && kind(block + 1) === kind(from)) continue;
      drawn.push(html`<rect class=${kind(from)} x=${NUMBERS + (from - first) * size} y=${y} width=${(block + 1 - from) * size} height=${size} />`);
      from = block + 1;
    }
    drawn.push(html`<rect transform=${`translate(${NUMBERS} ${y})`} width=${(end - first) * size} height=${size} fill="url(#cells)" />`);
    [y, before] = [y + size, row];
  }
  skip(numRows);
  return html`<svg id="map" role="img" aria-label=${`Map of the block pool: ${label}`} width=${xray.width} height=${y}>${PATTERNS}
    <pattern id="cells" width=${size} height=${size} patternUnits="userSpaceOnUse"><path class="gap" d=${`M0 ${size - 0.5}H${size - 0.5}V0`} /></pattern>${drawn}</svg>`;
}

/** Draw the block tables of answers that the chat forked: the blocks that all share, and where each goes its own way. */
function drawFutures(xray) {
  const { recording, step } = xray;
  const ids = (xray.options.futures?.() ?? []).filter((id) => recording.known.get(id)?.firstStep <= step?.step_id);
  if (ids.length < 2) return null;
  const { block_size } = recording.live.header.engine;
  const shared = numShared(recording, ids, step);
  return html`<h3>Futures of one answer</h3><p id="futures-summary">${plural(ids.length, "answer")} share ${plural(shared, "block")} (×${ids.length}): ${shared * block_size} tokens were computed once. Behind them each has blocks of its own.</p>
    ${ids.map((id) => html`<div class="row future">${xray.badge(id)}<ol class="blocks">${(recording.tablesOf(id, step)[0] ?? []).slice(0, 64).map((block, i) => html`
      <li class=${`block ${i < shared ? "many" : ""}`} title=${i < shared ? `block ${block}, shared by all` : `block ${block}`}><i style=${{ width: "100%" }} class=${i < shared ? "common" : `o${recording.request(id).colour}`}></i><span>${block || "–"}</span>${i < shared && html`<em>×${ids.length}</em>`}</li>`)}</ol></div>`)}`;
}
