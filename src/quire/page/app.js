/**
 * The page: chat, live X-ray and Lab of one server. `app` is the whole state; `changed()` draws it anew.
 * Next to read: chat.js, xray.js.
 */
import { Chat } from "./chat.js";
import { Lab } from "./lab.js";
import { isNarrow } from "./screen.js";
import { Sharing, share } from "./share.js";
import { local, session } from "./store.js";
import { Story } from "./story.js";
import { Recording, Xray, html, readRecording, render } from "./xray.js";

const MIN_PAUSE = 250;
const MAX_PAUSE = 2000; // Milliseconds between two attempts to reach the server.
const OP_INTERVAL_MS = 500; // A step is timed so often at most while the page is open: `python -m benchmarks.attach --page` has the cost.
const app = {
  key: session.get("quire-key") ?? "", asksKey: false, models: [], model: null, status: "connecting", error: "",
  explained: null, ranks: null, load: 4, loading: 0, story: null, isSharing: false, view: "chat",
};
let recording = new Recording();
const xray = new Xray(recording, { isLive: true, changed, save, opened, share: () => { app.isSharing = true; changed(); }, explain: () => app.explained, measureAgain: () => explain("&again=1"), ranks: () => app.ranks,
  futures: () => (chat.split ? chat.children(chat.split).map(({ id }) => id) : []),
  textOf: (id, place) => {
    const node = chat.nodes.find((item) => item.id === id);
    return node?.tokens[node.numBegun + place]?.text;
  } });
export const chat = new Chat({ ask, events, changed, key: () => app.key, model: () => app.model, status: () => app.status, recording: () => recording, xray, welcome, show, forked });
const lab = new Lab({ ask, changed, models: () => app.models });

let isDue = false;
function changed() {
  if (isDue) return;
  isDue = true;
  requestAnimationFrame(() => {
    isDue = false;
    const log = document.getElementById("log");
    // Room for the card of a token makes the log longer: it must not move the token out of sight.
    const follows = log && !chat.tokens.node && log.scrollHeight - log.scrollTop - log.clientHeight < 60;
    document.getElementById("first")?.remove(); // the header that is shown before the first script
    render(html`<${App} />`, document.getElementById("app"));
    if (follows) log.scrollTop = log.scrollHeight;
  });
}

/** Show a page: the chat, beside which a wide screen has the X-ray, the X-ray or the Lab. */
function show(view) {
  app.view = view;
  changed();
  requestAnimationFrame(changed); // with the sizes that the first drawing made known
}

/** Show which blocks the futures of a forked answer share. */
function forked() {
  xray.open("KV");
  if (app.view === "lab") show("chat");
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
      for await (const data of events(await ask(`/xray/events?op_interval_ms=${OP_INTERVAL_MS}&model=${encodeURIComponent(app.model.id)}`, null, watching.signal))) {
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

function opened(pane) {
  if (pane === "Roofline" && !app.explained) explain();
  if (pane === "Ops" && !app.ranks && recording.live?.header.engine.tensor_parallel_size > 1) askRanks();
}

async function explain(again = "") {
  const before = app.explained;
  app.explained = null;
  changed();
  try {
    const answer = await ask(`/xray/explain?model=${encodeURIComponent(app.model.id)}${again}`);
    app.explained = { ...predictions(await answer.json()), at: new Date(1000 * answer.headers.get("x-measured-at")) };
  } catch (error) {
    app.explained = { ...before, error: `No prediction: ${error.message}` };
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
  const [bytes_per_s, cache_bytes_per_s] = [valueOf(device, "memory read"), valueOf(device, "cache read")];
  const peaks = device.quantities.filter((item) => item.name.startsWith("products in ")).map((item) => ({ name: item.name.slice(12), flops_per_s: item.value, bytes_per_s, cache_bytes_per_s }));
  const phases = sections.filter((section) => valueOf(section, "intensity") !== undefined);
  const points = phases.map((phase) => ({
    name: phase.title, intensity: valueOf(phase, "intensity"), flops_per_s: valueOf(phase, "FLOPs") / (valueOf(phase, "predicted") ?? valueOf(phase, "floor")),
  }));
  const { formula } = device.quantities.find((item) => item.name === "memory read");
  return { peaks, points, source: formula.replace("measured now", "measured") };
}

/** Save the recorded lines, as they are or in a page that opens without a server. */
async function save(form) {
  const text = recording.text();
  download(form === "html" ? await page(text) : text, `quire-trace.${form}`);
}

async function page(text) {
  const template = await (await ask("/page/trace.html")).text();
  const lines = text.replaceAll("<", "\\u003c");
  return template.replace("/*trace*/", () => lines);
}

function download(text, name) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([text]));
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
}

/** Draw the story of a recorded prompt for a page without a conversation, which fetches it once. */
function welcome() {
  const hint = isNarrow() ? "Ask something; X-ray shows what the engine does for it." : "Ask something. Beside it you see what the engine does for it.";
  if (app.story === null) {
    app.story = "fetched";
    fetch("/page/story.jsonl").then((answer) => answer.text()).then((text) => {
      const told = readRecording(text);
      app.story = new Story(told, { changed: () => { if (chat.path().length) app.story.pause?.(); changed(); } });
      app.demo = Object.assign(new Xray(told, { changed, opened: (pane) => xray.open(pane) }), { told: null, second: null });
      changed();
    }, () => { app.story = null; }); // the server is gone: the next drawing asks again
  }
  if (!(app.story instanceof Story)) return html`<p class="hint">${hint}</p>`;
  return html`<p class="hint">Ask something. Until then: what an engine does for a prompt, as it was recorded.</p>${app.story.draw()}`;
}

/** Return what draws the X-ray: until the engine has done a step, the recorded prompt that the chat tells of. */
function drawnXray() {
  const { demo, story } = app;
  if (!demo || recording.steps.length || chat.path().length || ["Roofline", "Ops"].includes(xray.pane)) return xray;
  if (demo.chosen !== demo.told) {
    story.pause(); // the reader has chosen a step
    changed();
  } else if (story.second !== demo.second) demo.chosen = story.now().step;
  return Object.assign(demo, { pane: xray.pane, told: demo.chosen, second: story.second });
}

async function saveStory(withText) {
  app.isSharing = false;
  changed();
  if (withText === null) return;
  try {
    download(await page(await share({ recording, chat, ask, model: app.model, withText })), "quire-story.html");
  } catch (error) {
    app.error = `not shared: ${error.message}`;
    changed();
  }
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

// --- Frame ------------------------------------------------------------------------------------

/** Generated tokens per half second, of the 30 s of the engine's work before the chosen step. */
function Throughput() {
  const last = xray.step;
  const bins = new Array(60).fill(0);
  for (let i = last ? recording.indexOf(last.step_id) : -1; i >= 0; i--) {
    const bin = 59 - Math.floor((last.t - recording.steps[i].t) * 2);
    if (bin < 0) break;
    bins[bin] += recording.steps[i].requests.reduce((sum, share) => sum + share.new.length, 0);
  }
  const most = Math.max(...bins, 1);
  const points = bins.map((value, i) => `${i * 2},${22 - (20 * value) / most}`).join(" ");
  return html`<span><b class="rate">${((bins[57] + bins[58] + bins[59]) / 1.5).toFixed(0)}</b> tokens/s <svg width="120" height="24" role="img" aria-label=${`Tokens per second of 30 seconds, 0 to ${2 * most}`}><polyline class="spark" points=${points} /></svg></span>`;
}

/** Draw the numbers of the chosen step, or of now. Each has its place, so that nothing moves when it changes. */
function Numbers() {
  const { state, chosen } = xray;
  const used = state ? state.owners().size / (state.header.engine.num_blocks - 1) : 0;
  const { numPrompt, numHit } = chosen ?? recording;
  const policy = state?.header.engine.policy ?? "fcfs";
  return html`<div class="figures"><${Throughput} /><span class="counts">running <b>${chosen?.num_requests ?? state?.requests.size ?? 0}</b> · waiting <b>${chosen?.waiting ?? recording.numWaiting ?? 0}</b>${policy === "fcfs" ? "" : ` · ${policy}`}</span>
    <span><label>KV <meter min="0" max="1" value=${used}></meter></label> <b class="share">${(100 * used).toFixed(1)} %</b></span>
    <span class="hits" title="Prompt tokens found in the prefix cache, since this page was opened">prefix hits <b>${numPrompt ? `${((100 * numHit) / numPrompt).toFixed(0)} %` : "–"}</b></span>
    <span class="when">${chosen && html`<span class="past">at step ${chosen.step_id}</span>`}</span></div>`;
}

function Top() {
  const setTheme = (event) => {
    document.documentElement.dataset.theme = event.target.value;
    local.set("quire-theme", event.target.value);
  };
  const isShown = { chat: app.view === "chat" && isNarrow(), xray: app.view === "xray" || (app.view === "chat" && !isNarrow()), lab: app.view === "lab" };
  const page = (view, name) => html`<button class=${`${view}-page`} aria-pressed=${String(isShown[view])} onClick=${() => show(view)}>${name}</button>`;
  return html`<header><h1>Quire</h1>
    <span class=${`status ${app.status}`} role="status">${app.status === "ready" ? "●" : "○"} ${app.model?.id ?? ""} ${app.status}</span>
    ${app.models.length > 1 && html`<label>Model <select aria-label="Model" value=${app.model.id} disabled=${chat.abort} onChange=${(e) => chooseModel(e.target.value)}>${app.models.map(({ id }) => html`<option>${id}</option>`)}</select></label>`}
    <${Numbers} />
    <span class="right"><nav aria-label="Pages">${page("chat", "Chat")}${page("xray", "X-ray")}${page("lab", "Lab")}</nav>
      <select aria-label="Theme" value=${document.documentElement.dataset.theme ?? "auto"} onChange=${setTheme}><option>auto</option><option>light</option><option>dark</option></select></span>
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

/** Draw the X-ray with the load that makes a batch to look at. */
function drawXray() {
  const shown = drawnXray();
  const load = html`<span class="load" role="group" aria-label="Requests to look at"><label>Load <input type="number" min="1" max="32" value=${app.load} onInput=${(e) => { app.load = Math.min(32, Math.max(1, Number(e.target.value) || 1)); }} /></label>
    <button type="button" onClick=${addLoad} disabled=${app.loading > 0 || !app.model}>${app.loading ? `${app.loading} running` : "Send requests"}</button></span>`;
  return html`<section class="xray" aria-label="X-ray"><h2 class="unseen">X-ray</h2>${app.isSharing && html`<${Sharing} answer=${saveStory} />`}
    ${shown === app.demo && html`<p class="hint demo">A recorded prompt. Your own steps take its place as soon as you send a message.</p>`}${shown.draw(load)}</section>`;
}

function App() {
  if (app.asksKey) return html`<${KeyForm} />`;
  const isBeside = app.view === "chat" && !isNarrow();
  return html`<div class="page" data-view=${app.view}><${Top} /><main>${chat.draw()}${(isBeside || app.view === "xray") && drawXray()}${app.view === "lab" && lab.draw()}</main></div>`;
}

document.documentElement.dataset.theme = local.get("quire-theme") ?? "auto";
addEventListener("resize", () => show(app.view));
changed();
watch();
chat.conversations.start();
