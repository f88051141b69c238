/**
 * The page: chat, live X-ray and Lab of one server. `app` is the whole state; `changed()` draws it anew.
 * Next to read: chat.js, xray.js.
 */
import { Chat } from "./chat.js";
import { local, session } from "./store.js";
import { Recording, Xray, html, render, short } from "./xray.js";

const MIN_PAUSE = 250;
const MAX_PAUSE = 2000; // Milliseconds between two attempts to reach the server.
const OP_PERIOD = 4; // While Roofline or Ops is open, one step in so many is timed: timing costs some of the speed.
const LAB = {
  cache: "Without a KV cache, each new token computes all earlier ones again; with it, only itself.",
  batching: "Static batches wait for their slowest request, dynamic ones for a timer; continuous batching lets requests join and leave at every step.",
  kv: "The same memory given out as contiguous ranges, by a buddy allocator, and in blocks.",
  speculation: "Drafts of the next tokens, verified in one step, and none: on an edit, a summary, prose and JSON. The answers are the same.",
  adapters: "The base model, one LoRA adapter for all requests, and an adapter for each of them, in the same steps. Each answer is the one of the request alone.",
  attention: "Bytes of KV cache with as many KV heads as query heads, fewer, one, or a compressed latent.",
};
const SETTINGS = { seed: 1, requests: 1, slots: 1, context: 1, rank: 1, rate: 1, "pool MiB": 1 << 20 }; // each with the factor to the server's unit
const app = {
  key: session.get("quire-key") ?? "", asksKey: false, models: [], model: null, status: "connecting", error: "",
  explained: null, ranks: null, lab: {}, settings: {}, load: 4, loading: 0,
};
let recording = new Recording();
const xray = new Xray(recording, { isLive: true, changed, save, opened, explain: () => app.explained, ranks: () => app.ranks });
const chat = new Chat({ ask, events, changed, key: () => app.key, model: () => app.model, status: () => app.status, recording: () => recording, xray });

let isDue = false;
function changed() {
  if (isDue) return;
  isDue = true;
  requestAnimationFrame(() => {
    isDue = false;
    const log = document.getElementById("log");
    const follows = log && log.scrollHeight - log.scrollTop - log.clientHeight < 60;
    render(html`<${App} />`, document.getElementById("app"));
    if (follows) log.scrollTop = log.scrollHeight;
  });
}

// --- Server -----------------------------------------------------------------------------------

/** Ask the server. Throws an Error with its message, status and code; asks the user for a key after a 401. */
async function ask(path, body, signal) {
  const headers = { ...(app.key && { Authorization: `Bearer ${app.key}` }), ...(body && { "Content-Type": "application/json" }) };
  const response = await fetch(path, { method: body ? "POST" : "GET", headers, body: body && JSON.stringify(body), signal }).catch((error) => {
    throw error.name === "AbortError" ? error : new Error("the server does not answer");
  });
  if (response.ok) return response;
  const answer = await response.json().catch(() => ({}));
  if (response.status === 401) {
    app.asksKey = true;
    changed();
  }
  const { message = `the server answered ${response.status}`, code } = answer.error ?? {};
  throw Object.assign(new Error(message), { status: response.status, code });
}

/** Yield the data of server-sent events, line by line. */
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) if (line.startsWith("data: ")) yield line.slice(6);
  }
}

let watching = null;
let isWatching = false;
/** Read the event log for as long as the page is open and has its key. */
async function watch() {
  if (isWatching) return;
  isWatching = true;
  for (let pause = MIN_PAUSE; !app.asksKey; pause = Math.min(pause * 2, MAX_PAUSE)) {
    watching = new AbortController();
    try {
      await readModels();
      const period = ["Roofline", "Ops"].includes(xray.pane) ? OP_PERIOD : 0;
      for await (const data of events(await ask(`/xray/events?op_period=${period}&model=${encodeURIComponent(app.model.id)}`, null, watching.signal))) {
        const line = JSON.parse(data);
        if (line.kind === "gap") throw new Error("events were lost: the view begins anew");
        recording.add(line);
        Object.assign(app, { status: "ready", error: "" });
        pause = MIN_PAUSE;
        changed();
      }
    } catch (error) {
      if (error.name === "AbortError") { pause = MIN_PAUSE; continue; }
      Object.assign(app, stateAfter(error));
      changed();
    }
    await new Promise((done) => setTimeout(done, pause));
  }
  isWatching = false;
}

/** Read which models there are. A server that was replaced may have others. */
async function readModels() {
  app.models = (await (await ask("/v1/models")).json()).data;
  const before = app.model?.id;
  app.model = app.models.find(({ id }) => id === before) ?? app.models[0];
  if (before === undefined || before === app.model.id) return;
  Object.assign(app, { explained: null, ranks: null });
  chat.set({ note: `This server now has ${app.model.id} instead of ${before}. Each answer says which model wrote it.`, prompt: null });
}

/** Return the status to show after an error of the event stream, and its explanation. */
function stateAfter({ status, code, message }) {
  const isThere = app.model?.status?.value === "restarting" ? "restarting" : "loading";
  if (code === "engine_not_ready") return { status: isThere, error: "" };
  if (code === "model_not_loaded") return { status: "not loaded: the next message loads it", error: "" };
  if (code === "model_asleep") return { status: "asleep", error: `${message}.` };
  if (status === undefined && app.status === "ready") return { status: "reconnecting", error: "" };
  if (status === undefined) return { status: "reconnecting", error: `${message}; trying again. Conversations are kept in this browser.` };
  return { status: "disconnected", error: `${message}; trying again` };
}

function chooseModel(id) {
  Object.assign(app, { model: app.models.find((model) => model.id === id), status: "connecting", error: "", explained: null, ranks: null });
  chat.prompt = null;
  if (xray.pane === "Roofline") explain();
  watching?.abort();
  changed();
}

let timesOps = false;
function opened(pane) {
  const wanted = ["Roofline", "Ops"].includes(pane);
  if (wanted !== timesOps) watching?.abort();
  timesOps = wanted;
  if (pane === "Roofline" && !app.explained) explain();
  if (pane === "Ops" && !app.ranks && recording.live?.header.engine.tensor_parallel_size > 1) askRanks();
}

async function explain() {
  try {
    app.explained = predictions(await (await ask(`/xray/explain?model=${encodeURIComponent(app.model.id)}`)).json());
  } catch (error) {
    app.explained = { error: `No prediction: ${error.message}` };
  }
  changed();
}

async function askRanks() {
  try {
    app.ranks = await (await ask(`/xray/ranks?model=${encodeURIComponent(app.model.id)}`)).json();
  } catch (error) {
    app.ranks = { error: `No picture of the ranks: ${error.message}` };
  }
  changed();
}

/** Return the ceilings and the predicted points of `quire explain --json`. */
function predictions({ sections }) {
  const valueOf = (section, name) => section.quantities.find((item) => item.name === name)?.value;
  const device = sections.find((section) => section.title.startsWith("Device"));
  const bytes_per_s = valueOf(device, "memory read");
  const peaks = device.quantities.filter((item) => item.name.startsWith("products in ")).map((item) => ({ name: item.name.slice(12), flops_per_s: item.value, bytes_per_s }));
  const phases = sections.filter((section) => valueOf(section, "intensity") !== undefined);
  const points = phases.map((phase) => ({
    name: phase.title, intensity: valueOf(phase, "intensity"), flops_per_s: valueOf(phase, "FLOPs") / (valueOf(phase, "predicted") ?? valueOf(phase, "floor")),
  }));
  return { peaks, points };
}

/** Save the recorded lines, as they are or in a page that opens without a server. */
async function save(form) {
  let text = recording.text();
  if (form === "html") {
    const page = await (await ask("/page/trace.html")).text();
    const lines = text.replaceAll("<", "\\u003c");
    text = page.replace("/*trace*/", () => lines);
  }
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([text]));
  link.download = `quire-trace.${form}`;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
}

/** Let several short texts be written at once, to watch a batch; over two connections, since browsers allow six. */
async function addLoad() {
  const topics = ["the sea", "a small robot", "winter", "an old clock", "bread", "the moon", "a lighthouse", "trains", "a garden", "chess", "rain", "a violin"];
  const prompts = Array.from({ length: app.load }, (_, i) => `This is a long story about ${topics[i % topics.length]}. Once upon a time`);
  app.loading = app.load;
  changed();
  await Promise.all([48, 96].map(async (max_tokens, half) => {
    const prompt = prompts.filter((_, i) => i % 2 === half);
    try {
      if (prompt.length) await (await ask("/v1/completions", { model: app.model.id, prompt, max_tokens })).json();
    } catch (error) {
      app.error = error.message;
    }
    app.loading -= prompt.length;
    changed();
  }));
}

// --- Lab --------------------------------------------------------------------------------------

async function compare(name) {
  const settings = Object.fromEntries(Object.entries(app.settings).filter(([, value]) => value !== "").map(([key, value]) => [key.split(" ")[0], key in SETTINGS ? Number(value) * SETTINGS[key] : value]));
  const run = (app.lab[name] = { abort: new AbortController(), isRunning: true });
  changed();
  try {
    run.result = await (await ask("/lab/compare", { name, settings }, run.abort.signal)).json();
  } catch (error) {
    run.error = error.name === "AbortError" ? "stopped" : error.message;
  }
  run.isRunning = false;
  changed();
}

function Lab() {
  const isBusy = Object.values(app.lab).some((run) => run.isRunning);
  return html`<section class="lab" aria-label="Lab"><h2>Lab</h2>
    <p class="hint">Each comparison runs the same requests with one thing switched, in a second process with lower priority: the engine that serves is not touched.</p>
    <div class="fields"><label>model<select value=${app.settings.model ?? ""} onChange=${(e) => { app.settings.model = e.target.value; }}>
        <option value="">default</option><option value="served">${app.models[0]?.id ?? "served"}</option></select></label>
      ${Object.keys(SETTINGS).map((name) => html`<label>${name}<input type="number" min="0" step="any" placeholder="default" value=${app.settings[name] ?? ""} onInput=${(e) => { app.settings[name] = e.target.value; }} /></label>`)}</div>
    <div class="cards">${Object.entries(LAB).map(([name, text]) => {
      const run = app.lab[name];
      return html`<article class=${run?.result ? "wide" : ""}><h3>${name}</h3><p>${text}</p>
        ${run?.isRunning ? html`<button onClick=${() => run.abort.abort()}>Stop</button> <span role="status">running…</span>` : html`<button onClick=${() => compare(name)} disabled=${isBusy || !app.model}>Compare ${name}</button>`}
        ${run?.error && html`<p class="error" role="alert">${run.error}</p>`}${run?.result && html`<${Comparison} result=${run.result} />`}</article>`;
    })}</div></section>`;
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
function Chart({ title, x_label, y_label, kind, series }) {
  const [width, height] = [420, 210];
  const points = series.flatMap((item) => item.points);
  const isLine = kind === "line";
  const right = Math.max(...points.map((point) => point[isLine ? 0 : 1]), 1e-9);
  const most = isLine ? Math.max(...points.map((point) => point[1]), 1e-9) : Math.max(...points.map((point) => point[2])) + 1;
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

// --- Frame ------------------------------------------------------------------------------------

/** Generated tokens per half second, of the last 30 s of the engine's work. */
function Throughput() {
  const last = recording.steps.at(-1);
  if (!last) return null;
  const bins = new Array(60).fill(0);
  for (let i = recording.steps.length - 1; i >= 0; i--) {
    const bin = 59 - Math.floor((last.t - recording.steps[i].t) * 2);
    if (bin < 0) break;
    bins[bin] += recording.steps[i].requests.reduce((sum, share) => sum + share.new.length, 0);
  }
  const most = Math.max(...bins, 1);
  const points = bins.map((value, i) => `${i * 2},${22 - (20 * value) / most}`).join(" ");
  return html`<span>${((bins[57] + bins[58] + bins[59]) / 1.5).toFixed(0)} tokens/s <svg width="120" height="24" role="img" aria-label="Tokens per second of the last 30 seconds"><polyline class="spark" points=${points} /></svg></span>`;
}

function Top() {
  const { live } = recording;
  const numBlocks = live ? live.header.engine.num_blocks - 1 : 1;
  const used = live ? live.owners().size / numBlocks : 0;
  const setTheme = (event) => {
    document.documentElement.dataset.theme = event.target.value;
    local.set("quire-theme", event.target.value);
  };
  return html`<header><h1>Quire</h1>
    <span class=${`status ${app.status}`} role="status">${app.status === "ready" ? "●" : "○"} ${app.model?.id ?? ""} ${app.status}</span>
    ${app.models.length > 1 && html`<label>Model <select aria-label="Model" value=${app.model.id} disabled=${chat.abort} onChange=${(e) => chooseModel(e.target.value)}>${app.models.map(({ id }) => html`<option>${id}</option>`)}</select></label>`}
    ${live && html`<${Throughput} /><span>running <b>${live.requests.size}</b> · waiting <b>${recording.numWaiting}</b>${(live.header.engine.policy ?? "fcfs") === "fcfs" ? "" : ` · ${live.header.engine.policy}`}</span>
      <span><label>KV <meter min="0" max="1" value=${used}></meter></label> ${(100 * used).toFixed(1)} %</span>
      <span title="Prompt tokens found in the prefix cache, since this page was opened">prefix hits ${recording.numPrompt ? `${((100 * recording.numHit) / recording.numPrompt).toFixed(0)} %` : "–"}</span>`}
    <span class="right"><label>Load <input type="number" min="1" max="32" value=${app.load} onInput=${(e) => { app.load = Math.min(32, Math.max(1, Number(e.target.value) || 1)); }} /></label>
      <button onClick=${addLoad} disabled=${app.loading > 0 || !app.model}>${app.loading ? `${app.loading} running` : "Send requests"}</button>
      <label>Theme <select value=${document.documentElement.dataset.theme ?? "auto"} onChange=${setTheme}><option>auto</option><option>light</option><option>dark</option></select></label></span>
  </header>${app.error && html`<p class="error banner" role="alert">${app.error}</p>`}`;
}

function KeyForm() {
  const submit = (event) => {
    event.preventDefault();
    app.key = event.target.elements.key.value.trim();
    session.set("quire-key", app.key);
    app.asksKey = false;
    app.error = "";
    changed();
    watch();
  };
  return html`<main class="key"><h1>Quire</h1><form onSubmit=${submit}><p>This server needs an API key. It is kept in this tab until you close it.</p>
    ${app.key && html`<p class="error" role="alert">The server does not know this key.</p>`}
    <label>API key <input name="key" type="password" autocomplete="off" required autofocus /></label> <button class="main">Use the key</button></form></main>`;
}

function App() {
  if (app.asksKey) return html`<${KeyForm} />`;
  return html`<${Top} /><main>${chat.draw()}<section class="xray" aria-label="X-ray"><h2>X-ray</h2>${xray.draw()}</section><${Lab} /></main>`;
}

document.documentElement.dataset.theme = local.get("quire-theme") ?? "auto";
addEventListener("resize", changed);
changed();
watch();
chat.conversations.start();
