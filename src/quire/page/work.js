/**
 * The panes Roofline and Ops: work and times of the model's instructions, beside the limits of the machine.
 */
import { about, html, ms, plural, short } from "./drawing.js";

/** Draw measured and predicted work below the limits of the machine. */
export function drawRoofline(xray) {
  const explained = xray.options.explain?.() ?? null;
  const timed = xray.recording.opsUpTo(xray.chosen);
  const points = timed ? groupOps(timed.ops).filter((op) => op.flops && op.bytes && op.time) : [];
  const peaks = explained?.peaks ?? [];
  const predicted = explained?.points ?? [];
  const below = about("A point is work: to the right, more arithmetic per byte; up, more speed. ○ is predicted from the model and the machine, ● was measured in this engine. Under the slope memory is the limit, under the flat line arithmetic.",
    "attainable FLOP/s = min(peak FLOP/s, FLOP per byte × bytes per second)", "src/quire/insight/explain/phases.py; measured: src/quire/runtime/forward.py");
  const note = explained?.error ?? (xray.options.explain && !explained ? "The prediction is being computed…" : "");
  if (!points.length && !predicted.length) return html`<p class="hint">${note} ${xray.untimed}</p>${below}`;
  const all = [...points.map((op) => [op.flops / op.bytes, op.flops / op.time]), ...predicted.map((p) => [p.intensity, p.flops_per_s]), ...peaks.map((p) => [p.flops_per_s / p.bytes_per_s, p.flops_per_s])].filter(([a, b]) => a > 0 && b > 0);
  const range = (values) => [Math.floor(Math.log10(Math.min(...values)) - 0.2), Math.ceil(Math.log10(Math.max(...values)) + 0.2)];
  const [[x0, x1], [y0, y1]] = [range(all.map((p) => p[0])), range(all.map((p) => p[1]))];
  const [width, height] = [xray.width, 330];
  const x = (value) => 64 + ((width - 84) * (Math.log10(value) - x0)) / (x1 - x0 || 1);
  const y = (value) => 10 + (height - 50) * (1 - (Math.log10(value) - y0) / (y1 - y0 || 1));
  const powers = (from, to) => Array.from({ length: to - from + 1 }, (_, i) => 10 ** (from + i));
  return html`<svg role="img" aria-label=${`Roofline with ${predicted.length} predicted and ${points.length} measured points; the tables below have the numbers`} width=${width} height=${height}>
    ${powers(x0, x1).map((v) => html`<line class="grid" x1=${x(v)} x2=${x(v)} y1="10" y2=${height - 40} /><text class="small mid" x=${x(v)} y=${height - 26}>${short(v)}</text>`)}
    ${powers(y0, y1).map((v) => html`<line class="grid" x1="64" x2=${width - 20} y1=${y(v)} y2=${y(v)} /><text class="small end" x="60" y=${y(v) + 4}>${short(v)}</text>`)}
    <text class="small end" x=${width - 20} y=${height - 8}>FLOP per byte</text><text class="small" x="68" y="22">FLOP/s</text>
    ${peaks.map((peak, i) => { const ridge = peak.flops_per_s / peak.bytes_per_s; const low = Math.max(10 ** x0, 10 ** y0 / peak.bytes_per_s);
      return html`<path class="roof" d=${`M${x(low)} ${y(low * peak.bytes_per_s)}L${x(ridge)} ${y(peak.flops_per_s)}H${width - 20}`} /><text class="small end" x=${width - 24 - 40 * i} y=${y(peak.flops_per_s) - 5}>${peak.name}</text>`; })}
    ${predicted.map((p, i) => html`<circle class="predicted" cx=${x(p.intensity)} cy=${y(p.flops_per_s)} r="8"><title>predicted: ${p.name}</title></circle><text class="small mid" x=${x(p.intensity)} y=${y(p.flops_per_s) + 4}>${i + 1}</text>`)}
    ${points.map((op) => html`<circle class="measured" cx=${x(op.flops / op.bytes)} cy=${y(op.flops / op.time)} r="5"><title>measured: ${op.name}</title></circle>`)}
  </svg>
  ${note && html`<p class="hint">${note}</p>`}
  <h3>● Measured${timed ? ` in step ${timed.step_id}` : ""}</h3>${points.length ? html`<div class="scroll" tabindex="0"><table><thead><tr><th>Instruction</th><th>FLOP/B</th><th>FLOP/s</th></tr></thead>
    <tbody>${points.slice(0, 12).map((op) => html`<tr><td>${op.name}</td><td>${short(op.flops / op.bytes)}</td><td>${short(op.flops / op.time)}</td></tr>`)}</tbody></table></div>` : html`<p class="hint">${xray.untimed}</p>`}
  ${predicted.length > 0 && html`<h3>○ Predicted</h3><div class="scroll" tabindex="0"><table><thead><tr><th>Point</th><th>Phase</th><th>FLOP/B</th><th>FLOP/s</th></tr></thead>
    <tbody>${predicted.map((p, i) => html`<tr><td>${i + 1}</td><td>${p.name}</td><td>${short(p.intensity)}</td><td>${short(p.flops_per_s)}</td></tr>`)}</tbody></table></div>`}${below}`;
}

/** Draw the times of the instructions. */
export function drawOps(xray) {
  const timed = xray.recording.opsUpTo(xray.chosen);
  const numRanks = xray.recording.live.header.engine.tensor_parallel_size ?? 1;
  const below = about("Time of the instructions in one step of the model's program: of each kind, longest first, with layers of equal shape added up; or of each layer. Outside of the layers are the embedding, the last norm and the head." +
    (numRanks > 1 ? ` Times are those of rank 0 of ${numRanks}.` : ""), "FLOP/s = FLOP / time; B/s = bytes / time; FLOP per byte = FLOP / bytes", "src/quire/kernels/instruction.py, src/quire/runtime/forward.py");
  if (!timed) return html`<p class="hint">${xray.untimed}</p>${below}${ranks(xray)}`;
  const byLayer = xray.by === "layer";
  const groups = groupOps(timed.ops, byLayer);
  const total = groups.reduce((sum, op) => sum + op.time, 0);
  const sums = timed.ops.filter((op) => /^All(Reduce|Gather)/.test(op.name)).reduce((sum, op) => sum + op.microseconds / 1e6, 0);
  return html`<div class="tools"><label>Add up by: <select value=${xray.by} onChange=${(e) => xray.set({ by: e.target.value })}><option value="kind">kind</option><option value="layer">layer</option></select></label></div>
    <p>Step ${timed.step_id}: ${timed.ops.length} instructions, ${ms(total)}.${sums ? ` Sums over ${numRanks} ranks, waiting for the slowest included: ${ms(sums)}, ${((100 * sums) / total).toFixed(1)} %.` : ""}</p>
    <div class="scroll" tabindex="0"><table class="numbers"><thead><tr><th>${byLayer ? "Layer" : "Instruction"}</th><th>Times</th><th>Time</th><th>Share</th><th>FLOP</th><th>Bytes</th><th>FLOP/s</th><th>B/s</th>${!byLayer && html`<th>Arithmetic</th>`}</tr></thead>
    <tbody>${groups.map((op) => html`<tr><td>${op.name}</td><td>${op.count}</td><td>${ms(op.time)}</td><td><meter min="0" max="1" value=${op.time / total} aria-label="Share of the step"></meter> ${((100 * op.time) / total).toFixed(1)} %</td>
      <td>${short(op.flops)}</td><td>${short(op.bytes)}</td><td>${short(op.flops / op.time)}</td><td>${short(op.bytes / op.time)}</td>${!byLayer && html`<td>${op.arithmetic}</td>`}</tr>`)}</tbody></table></div>${below}${experts(xray, timed)}${ranks(xray)}`;
}

/** Draw the number of tokens of each expert, a row for each layer, in a timed step. */
function experts(xray, timed) {
  const rows = timed.ops.filter((op) => op.expert_loads?.length);
  if (!rows.length) return null;
  const most = Math.max(...rows.flatMap((op) => op.expert_loads), 1);
  const [sizeX, sizeY] = [Math.min(14, (xray.width - 60) / rows[0].expert_loads.length), Math.min(14, Math.max(4, 400 / rows.length))];
  const idle = rows.reduce((sum, op) => sum + op.expert_loads.filter((load) => !load).length, 0) / rows.length;
  return html`<h3>Load of experts</h3><p>Step ${timed.step_id}: tokens of each of ${rows[0].expert_loads.length} experts in ${plural(rows.length, "layer")}, at most ${most} of one; ${idle.toFixed(1)} experts of a layer were chosen by none, and their weights were not read.</p>
    <svg id="experts" role="img" aria-label=${`Load of ${rows[0].expert_loads.length} experts in ${rows.length} layers`} width=${xray.width} height=${rows.length * sizeY}>${rows.map((op, row) => html`
      <text class="small" x="0" y=${row * sizeY + sizeY - 2}>${sizeY >= 10 || row % 5 === 0 ? op.layer : ""}</text>${op.expert_loads.map((load, i) => html`
      <rect class="fill0" x=${40 + i * sizeX} y=${row * sizeY} width=${sizeX - 1} height=${sizeY - 1} opacity=${0.08 + (0.92 * load) / most}><title>layer ${op.layer}, expert ${i}: ${plural(load, "token")}</title></rect>`)}`)}</svg>
    ${about("A row is a layer, a column an expert: the darker, the more tokens chose it.", "Σ of a row = tokens · experts of a token", "src/quire/kernels/experts.py")}`;
}

/** Draw how a layer is cut over the ranks, where the model has several and a server can tell. */
function ranks(xray) {
  const found = xray.options.ranks?.() ?? null;
  if (!found) return null;
  if (found.error) return html`<p class="hint">${found.error}</p>`;
  const size = Math.min(8, (xray.width - 260) / Math.max(...found.rows.map((row) => row.cells.length)));
  const name = (kind) => (/^\d+$/.test(kind) ? `fill${kind % 8}` : { sum: "tokens", all: "free", several: "shared" }[kind] ?? "none");
  return html`<h3>Ranks</h3><div class="scroll" tabindex="0"><table id="ranks"><tbody>${found.rows.map((row) => html`<tr><td>${row.label}</td><td><svg role="img" aria-label=${row.label || "empty"} width=${size * row.cells.length} height="12">
      ${row.cells.map((kind, i) => html`<rect class=${name(kind)} x=${i * size} y="0" width=${size} height="12"><title>${/^\d+$/.test(kind) ? `rank ${kind}` : kind}</title></rect>`)}</svg></td><td><small>${row.remark}</small></td></tr>`)}</tbody></table></div>
    ${about(`${found.caption} A colour is a rank; grey is held by all.`, found.formula, found.source)}`;
}

/** Add up instructions with the same name, or `byLayer` those of a layer. Times are in seconds. */
function groupOps(ops, byLayer = false) {
  const groups = new Map();
  for (const op of ops) {
    const key = byLayer ? op.layer ?? "outside" : op.name;
    const group = groups.get(key) ?? { name: key, arithmetic: op.arithmetic, count: 0, time: 0, flops: 0, bytes: 0 };
    group.count++;
    group.time += op.microseconds / 1e6;
    group.flops += op.flops;
    group.bytes += op.num_bytes;
    groups.set(key, group);
  }
  const order = (name) => (name === "outside" ? Infinity : name);
  return [...groups.values()].sort((a, b) => (byLayer ? order(a.name) - order(b.name) : b.time - a.time));
}
