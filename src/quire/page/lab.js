/**
 * The Lab: comparisons that run beside the server in a process of their own. Next to read: app.js.
 */
import { html, short } from "./drawing.js";

const COMPARISONS = {
  cache: "Without a KV cache, each new token computes all earlier ones again; with it, only itself.",
  batching: "Static batches wait for their slowest request, dynamic ones for a timer; continuous batching lets requests join and leave at every step.",
  kv: "The same memory given out as contiguous ranges, by a buddy allocator, and in blocks.",
  speculation: "Drafts of the next tokens, verified in one step, and none: on an edit, a summary, prose and JSON. The answers are the same.",
  adapters: "The base model, one LoRA adapter for all requests, and an adapter for each of them, in the same steps. Each answer is the one of the request alone.",
  attention: "Bytes of KV cache with as many KV heads as query heads, fewer, one, or a compressed latent.",
};
const SETTINGS = { seed: 1, requests: 1, slots: 1, context: 1, rank: 1, rate: 1, "pool MiB": 1 << 20 }; // each with the factor to the server's unit

export class Lab {
  /** `host` has ask, changed, and models of the page; models() returns those of the server. */
  constructor(host) {
    Object.assign(this, { host, runs: {}, settings: {} });
  }

  async compare(name) {
    const { ask, changed } = this.host;
    const given = Object.entries(this.settings).filter(([, value]) => value !== "");
    const settings = Object.fromEntries(given.map(([key, value]) => [key.split(" ")[0], key in SETTINGS ? Number(value) * SETTINGS[key] : value]));
    const run = (this.runs[name] = { abort: new AbortController(), isRunning: true });
    changed();
    try {
      run.result = await (await ask("/lab/compare", { name, settings }, run.abort.signal)).json();
    } catch (error) {
      run.error = error.name === "AbortError" ? "stopped" : error.message;
    }
    run.isRunning = false;
    changed();
  }

  draw() {
    const { runs, settings } = this;
    const isBusy = Object.values(runs).some((run) => run.isRunning);
    const [model] = this.host.models();
    const put = (name) => (event) => { settings[name] = event.target.value; };
    return html`<section class="lab" aria-label="Lab" tabindex="0"><h2>Lab</h2>
      <p class="hint">Each comparison runs the same requests with one thing switched, in a second process with lower priority: the engine that serves is not touched.</p>
      <div class="fields"><label>model<select value=${settings.model ?? ""} onChange=${put("model")}><option value="">default</option><option value="served">${model?.id ?? "served"}</option></select></label>
        ${Object.keys(SETTINGS).map((name) => html`<label>${name}<input type="number" min="0" step="any" placeholder="default" value=${settings[name] ?? ""} onInput=${put(name)} /></label>`)}</div>
      <div class="cards">${Object.entries(COMPARISONS).map(([name, text]) => {
        const run = runs[name];
        return html`<article class=${run?.result ? "wide" : ""}><h3>${name}</h3><p>${text}</p>
          ${run?.isRunning ? html`<button onClick=${() => run.abort.abort()}>Stop</button> <span role="status">running…</span>` : html`<button onClick=${() => this.compare(name)} disabled=${isBusy || !model}>Compare ${name}</button>`}
          ${run?.error && html`<p class="error" role="alert">${run.error}</p>`}${run?.result && html`<${Comparison} result=${run.result} />`}</article>`;
      })}</div></section>`;
  }
}

/** Return a cell of a comparison's table as text. */
function shown(value, unit) {
  if (value === null) return "–";
  if (unit === "share") return `${(100 * value).toFixed(1)} %`;
  if (unit === "bytes") return short(value, "B");
  if (unit === "times") return `${value.toFixed(1)} ×`;
  return typeof value === "number" ? (Number.isInteger(value) ? value.toLocaleString("en") : String(+value.toPrecision(3))) : value;
}

function Comparison({ result }) {
  const { title, settings, columns, rows, explanation, charts, outputs_equal } = result;
  return html`<div class="result" role="region" aria-label=${`Result of ${result.name}`}><h3>${title}</h3>
    <p class="hint">${Object.entries(settings).filter(([, value]) => value !== null).map(([name, value]) => `${name} ${typeof value === "number" ? +value.toPrecision(4) : value}`).join(" · ")}${outputs_equal ? ` · outputs of ${outputs_equal} requests equal in all modes ✓` : ""}</p>
    <div class="scroll" tabindex="0"><table class="numbers"><thead><tr>${columns.map(([name, unit]) => html`<th>${name}${["steps", "seconds"].includes(unit) ? html` <small>${unit}</small>` : ""}</th>`)}</tr></thead>
      <tbody>${rows.map((row) => html`<tr>${row.map((cell, i) => html`<td>${shown(cell, columns[i][1])}</td>`)}</tr>`)}</tbody></table></div>
    <ul>${explanation.map((sentence) => html`<li>${sentence}</li>`)}</ul>
    <div class="charts">${charts.map((chart) => html`<${Chart} ...${chart} />`)}</div></div>`;
}

/** Draw lines (x, y), or spans (start, end, row), with dashes and numbers beside the colours. */
function Chart({ title, x_label, y_label, kind, series, x_most }) {
  const [width, height] = [420, 210];
  const points = series.flatMap((item) => item.points);
  const isLine = kind === "line";
  const largest = (at) => points.reduce((most, point) => Math.max(most, point[at]), 1e-9); // too many for arguments
  const right = x_most ?? largest(isLine ? 0 : 1);
  const most = isLine ? largest(1) : largest(2) + 1;
  const x = (value) => 44 + ((width - 54) * value) / right;
  const y = (value) => 8 + (height - 44) * (isLine ? 1 - value / most : value / most);
  const size = (height - 44) / most;
  const names = [...new Set(series.map((item) => item.name))];
  const draw = (item) => {
    const colour = names.indexOf(item.name) % 8;
    if (isLine) return html`<polyline class=${`line stroke${colour}`} stroke-dasharray=${["", "6 3", "2 3"][colour % 3]} points=${item.points.map((p) => `${x(p[0])},${y(p[1])}`).join(" ")} />`;
    return item.points.map(([from, to, row]) => html`<rect class=${`fill${colour}`} opacity=${0.25 + 0.75 * item.shade} x=${x(from)} y=${y(row)} width=${Math.max(0.5, x(to) - x(from))} height=${Math.max(0.7, size - (size > 8 ? 4 : 0.5))} />
      ${kind === "bars" && html`<text class="small end" x="40" y=${y(row) + size / 2}>${colour + 1}</text>`}`);
  };
  const labels = [x_label && `${x_label} →`, y_label && `${y_label} ${isLine ? "↑" : "↓"}`].filter(Boolean).join(", ");
  return html`<figure><figcaption>${title}</figcaption><svg role="img" aria-label=${`${title}: ${names.join(", ")}`} viewBox=${`0 0 ${width} ${height}`}>
    ${series.map(draw)}<path class="grid" d=${`M44 8V${height - 36}H${width - 8}`} />
    ${isLine && html`<text class="small end" x="40" y="16">${short(most)}</text><text class="small end" x="40" y=${height - 36}>0</text>`}
    <text class="small" x="44" y=${height - 22}>0</text><text class="small end" x=${width - 8} y=${height - 22}>${short(right)}</text>
    <text class="small" x="44" y=${height - 6}>${labels}</text></svg>
    <p class="legend">${names.map((name, i) => html`<span><span class=${`key o${i % 8}`}>${i + 1}</span> ${name}${isLine ? [" —", " – –", " ···"][i % 3] : ""}</span>`)}</p></figure>`;
}
