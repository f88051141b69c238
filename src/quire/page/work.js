/**
 * The panes Roofline and Ops: work and times of the model's instructions, beside the limits of the machine.
 */
import { about, html, ms, plural, short } from "./drawing.js";
import { isPrefill } from "./recording.js";

const NUM_TIMED = 15; // Medians are of so many timed steps.
const NUM_LABELS = 8;

/** Return the medians of the newest timed steps of a phase up to the chosen step, or of later ones if there is none. */
function measured(xray, phase, byLayer = false) {
  const { recording, chosen } = xray;
  const isOf = (line) => line.ops.length && phaseOf(recording, line) === phase;
  const all = recording.timed.filter(isOf);
  const before = chosen ? all.filter((line) => line.step_id <= chosen.step_id) : all;
  const lines = before.length ? before.slice(-NUM_TIMED) : all.slice(0, NUM_TIMED);
  const found = new Map();
  for (const line of lines)
    for (const group of groupOps(line.ops, byLayer)) found.set(group.name, [...(found.get(group.name) ?? []), group]);
  const median = (groups, field) => groups.map((group) => group[field]).sort((a, b) => a - b)[groups.length >> 1];
  const groups = [...found.values()].map((items) => ({ ...items[0], ...Object.fromEntries(["count", "time", "flops", "bytes"].map((field) => [field, median(items, field)])) }));
  const order = (name) => (name === "outside" ? Infinity : name);
  groups.sort((a, b) => (byLayer ? order(a.name) - order(b.name) : b.time - a.time));
  const [first, last] = [lines[0]?.step_id, lines.at(-1)?.step_id];
  const where = first === last ? `step ${first}` : `steps ${first} … ${last}`;
  const isLater = lines.length > 0 && !before.length;
  return { phase, groups, lines, said: `${lines.length === 1 ? "measured once, in" : `medians of ${lines.length} timed ${phase} steps,`} ${where}${isLater ? ": none up to the chosen step was timed" : ""}` };
}

/** Return "prefill" if the step of timed instructions computed prompt tokens, else "decode". */
function phaseOf(recording, line) {
  line.phase ??= recording.steps[recording.indexOf(line.step_id)]?.requests.some(isPrefill) ? "prefill" : "decode";
  return line.phase;
}

/** Return the phases that were timed, and the one to show: the chosen step's, if it was. */
function phases(xray) {
  const { recording, step } = xray;
  const known = ["decode", "prefill"].filter((phase) => recording.timed.some((line) => line.ops.length && phaseOf(recording, line) === phase));
  const wanted = xray.phase ?? (xray.chosen && step.requests.some(isPrefill) ? "prefill" : "decode");
  return { known, shown: known.includes(wanted) ? wanted : known[0] };
}

/** Draw measured and predicted work below the limits of the machine. */
export function drawRoofline(xray) {
  const explained = xray.options.explain?.() ?? null;
  const sets = phases(xray).known.map((phase) => measured(xray, phase));
  const points = sets.flatMap(({ phase, groups }) => groups.filter((op) => op.flops && op.bytes && op.time).map((op) => ({ ...op, phase })));
  const peaks = explained?.peaks ?? [];
  const predicted = explained?.points ?? [];
  const below = about("A point is work: to the right, more arithmetic per byte; up, more speed; both scales are logarithmic. ○ is predicted from the model and the machine, ● was measured in decodes of this engine, ◆ in prefills. Under a slope reading is the limit, from memory or, dashed, from the cache; under a flat line arithmetic.",
    "attainable FLOP/s = min(peak FLOP/s, FLOP per byte × bytes per second)", "src/quire/insight/explain/phases.py; measured: src/quire/runtime/forward.py");
  const note = explained?.error ?? (xray.options.explain && !explained ? "The machine is being measured…" : "");
  if (!points.length && !predicted.length) return html`<p class="hint">${note} ${xray.untimed}</p>${below}`;
  const roof = explained?.peaks && html`<p id="roof">The roof: ${explained.source}${explained.at ? ` at ${explained.at.toLocaleTimeString("en-GB")}` : ""}, beside whatever ran then; a busy machine lowers it.
    ${xray.options.measureAgain && html` <button onClick=${() => xray.options.measureAgain()}>Measure again</button>`}</p>`;
  return html`${drawRoof(xray, points, predicted, peaks)}${roof}
    ${note && html`<p class="hint">${note}</p>`}
    ${!points.length && html`<h3>● Measured</h3><p class="hint">${xray.untimed}</p>`}
    ${sets.map(({ phase, groups, said }) => html`<h3>${MARKS[phase]} Measured in ${phase} <small>${said}</small></h3><div class="scroll" tabindex="0"><table><thead><tr><th>Instruction</th><th>FLOP/B</th><th>FLOP/s</th></tr></thead>
      <tbody>${groups.filter((op) => op.flops && op.bytes).slice(0, 12).map((op) => html`<tr><td>${op.name}</td><td>${short(op.flops / op.bytes)}</td><td>${short(op.flops / op.time)}</td></tr>`)}</tbody></table></div>`)}
    ${predicted.length > 0 && html`<h3>○ Predicted</h3><div class="scroll" tabindex="0"><table><thead><tr><th>Point</th><th>Phase</th><th>FLOP/B</th><th>FLOP/s</th></tr></thead>
      <tbody>${predicted.map((p, i) => html`<tr><td>${i + 1}</td><td>${p.name}</td><td>${short(p.intensity)}</td><td>${short(p.flops_per_s)}</td></tr>`)}</tbody></table></div>`}${below}`;
}

const MARKS = { decode: "●", prefill: "◆" };

function drawRoof(xray, points, predicted, peaks) {
  const all = [...points.map((op) => [op.flops / op.bytes, op.flops / op.time]), ...predicted.map((p) => [p.intensity, p.flops_per_s]), ...peaks.map((p) => [p.flops_per_s / p.bytes_per_s, p.flops_per_s])].filter(([a, b]) => a > 0 && b > 0);
  const range = (values) => [Math.floor(Math.log10(Math.min(...values)) - 0.2), Math.ceil(Math.log10(Math.max(...values)) + 0.2)];
  const [[x0, x1], [y0, y1]] = [range(all.map((p) => p[0])), range(all.map((p) => p[1]))];
  const [width, height] = [xray.width, 360];
  const x = (value) => 64 + ((width - 84) * (Math.log10(value) - x0)) / (x1 - x0 || 1);
  const y = (value) => 10 + (height - 50) * (1 - (Math.log10(value) - y0) / (y1 - y0 || 1));
  const powers = (from, to) => Array.from({ length: to - from + 1 }, (_, i) => 10 ** (from + i));
  const slope = (rate, peak, name) => {
    const low = Math.max(10 ** x0, 10 ** y0 / rate);
    return html`<path class=${`roof ${name}`} d=${`M${x(low)} ${y(low * rate)}L${x(peak / rate)} ${y(peak)}${name ? "" : `H${width - 20}`}`} />`;
  };
  const top = Math.max(...peaks.map((peak) => peak.flops_per_s));
  const taken = [];
  const label = (op) => {
    const [left, wanted] = [x(op.flops / op.bytes) + 8, y(op.flops / op.time) + 4];
    const isFree = (at) => taken.every(([otherX, otherY]) => Math.abs(otherX - left) > 90 || Math.abs(otherY - at) > 11);
    const place = [0, -12, 12, -24, 24, -36, 36].map((offset) => wanted + offset).find(isFree) ?? wanted;
    taken.push([left, place]);
    const isRight = left > width - 150;
    return html`<text class=${`small ${isRight ? "end" : ""}`} x=${isRight ? left - 16 : left} y=${place}>${op.name.split(":")[0]}</text>`;
  };
  const mark = ({ phase, name, flops, bytes, time }) => {
    const [left, at] = [x(flops / bytes), y(flops / time)];
    const title = html`<title>measured in ${phase}: ${name}</title>`;
    return phase === "decode" ? html`<circle class="measured" cx=${left} cy=${at} r="5">${title}</circle>` : html`<path class="measured" d=${`M${left - 6} ${at}l6 -6l6 6l-6 6z`}>${title}</path>`;
  };
  return html`<svg id="roofline" role="img" aria-label=${`Roofline with ${predicted.length} predicted and ${points.length} measured points; the tables below have the numbers`} width=${width} height=${height}>
    ${powers(x0, x1).map((v) => html`<line class="grid" x1=${x(v)} x2=${x(v)} y1="10" y2=${height - 40} /><text class="small mid" x=${x(v)} y=${height - 26}>${short(v)}</text>`)}
    ${powers(y0, y1).map((v) => html`<line class="grid" x1="64" x2=${width - 20} y1=${y(v)} y2=${y(v)} /><text class="small end" x="60" y=${y(v) + 4}>${short(v)}</text>`)}
    <text class="small end" x=${width - 20} y=${height - 8}>FLOP per byte</text><text class="small" x="68" y="22">FLOP/s</text>
    ${peaks.map((peak, i) => html`${slope(peak.bytes_per_s, peak.flops_per_s, "")}<text class="small end" x=${width - 24 - 40 * i} y=${y(peak.flops_per_s) - 5}>${peak.name}</text>`)}
    ${peaks[0]?.cache_bytes_per_s && slope(peaks[0].cache_bytes_per_s, top, "cached-slope")}
    ${predicted.map((p, i) => html`<circle class="predicted" cx=${x(p.intensity)} cy=${y(p.flops_per_s)} r="8"><title>predicted: ${p.name}</title></circle><text class="small mid" x=${x(p.intensity)} y=${y(p.flops_per_s) + 4}>${i + 1}</text>`)}
    ${points.map(mark)}${[...points].sort((a, b) => b.time - a.time).slice(0, width < 500 ? NUM_LABELS / 2 : NUM_LABELS).map(label)}</svg>`;
}

/** Draw the times of the instructions. */
export function drawOps(xray) {
  const numRanks = xray.recording.live.header.engine.tensor_parallel_size ?? 1;
  const { known, shown } = phases(xray);
  const below = about("Time of the instructions in one step of the model's program: of each kind, longest first, with layers of equal shape added up; or of each layer. Outside of the layers are the embedding, the last norm and the head." +
    (numRanks > 1 ? ` Times are those of rank 0 of ${numRanks}.` : ""), "FLOP/s = FLOP / time; B/s = bytes / time; FLOP per byte = FLOP / bytes", "src/quire/kernels/instruction.py, src/quire/runtime/forward.py");
  if (!shown) return html`<p class="hint">${xray.untimed}</p>${below}${ranks(xray)}`;
  const byLayer = xray.by === "layer";
  const { groups, lines, said } = measured(xray, shown, byLayer);
  const timed = lines.at(-1);
  const total = groups.reduce((sum, op) => sum + op.time, 0);
  const sums = timed.ops.filter((op) => /^All(Reduce|Gather)/.test(op.name)).reduce((sum, op) => sum + op.microseconds / 1e6, 0);
  const whole = timed.ops.reduce((sum, op) => sum + op.microseconds / 1e6, 0);
  return html`<div class="tools"><label>Steps: <select value=${shown} onChange=${(e) => xray.set({ phase: e.target.value })}>${known.map((phase) => html`<option>${phase}</option>`)}</select></label>
      <label>Add up by: <select value=${xray.by} onChange=${(e) => xray.set({ by: e.target.value })}><option value="kind">kind</option><option value="layer">layer</option></select></label></div>
    <p id="timed">${said[0].toUpperCase()}${said.slice(1)}. A step of ${timed.ops.length} instructions takes ${ms(total)}.${sums ? ` Sums over ${numRanks} ranks, waiting for the slowest included, in step ${timed.step_id}: ${ms(sums)}, ${((100 * sums) / whole).toFixed(1)} %.` : ""}</p>
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
    ${about("A row is a layer, a column an expert: the darker, the more tokens chose it. Without --xray-text the experts of each row are numbered by load.", "Σ of a row = tokens · experts of a token", "src/quire/kernels/experts.py")}`;
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
  return [...groups.values()];
}
