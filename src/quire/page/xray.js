/**
 * The X-ray: keeps a trace's lines, replays the engine's state at any step, and draws it.
 * It needs no server: the page feeds it from `/xray/events`, a saved trace from its own text.
 * `State` equals `State` of ../insight/trace.py. Next to read: app.js.
 */
import { h, render } from "./vendor/preact.js";
import htm from "./vendor/htm.js";

export const html = htm.bind(h);
export { render };
const NULL_BLOCK = 0;
const MAX_TIMED = 100; // Timed steps that keep their instructions: one has hundreds.

// --- State and recording ----------------------------------------------------------------------

/**
 * The engine after a line. `findable`: blocks that hold a prefix, whether a request uses them or not.
 * `held`: blocks that wait for a request to start, with its id. `waiting`: when each request in the queue arrived or was preempted.
 */
export class State {
  constructor(header) {
    this.header = header;
    this.requests = new Map(header.requests.map((r) => [r.id, { ...r, tables: r.tables.map((t) => [...t]) }]));
    this.findable = new Set(header.cached);
    this.waiting = new Map(Object.entries(header.waiting ?? {}));
    this.held = (header.held ?? []).map((block) => [block, ""]);
  }

  /** Return a header line that restates this state. */
  describe() {
    const requests = [...this.requests.values()].map((r) => ({ ...r, tables: r.tables.map((t) => [...t]) }));
    return { ...this.header, requests, cached: [...this.findable], held: this.held.map(([block]) => block), waiting: Object.fromEntries(this.waiting) };
  }

  /** Return the requests that hold each block in use: block → ids. */
  owners() {
    const found = new Map();
    for (const request of this.requests.values())
      for (const table of request.tables)
        for (const block of table)
          if (block !== NULL_BLOCK) found.set(block, [...(found.get(block) ?? []), request.id]);
    for (const [block, id] of this.held) found.set(block, [...(found.get(block) ?? []), id]);
    return found;
  }

  /** Return the free blocks that hold a prefix. */
  cached(owners = this.owners()) {
    return new Set([...this.findable].filter((block) => !owners.has(block)));
  }

  apply(line) {
    if (line.kind === "finish" || line.kind === "preempt") this.requests.delete(line.id);
    if (line.kind === "step") this.#step(line);
    else if (line.kind === "arrive" || line.kind === "preempt") this.waiting.set(line.id, line.t);
    else if (line.kind === "finish" || line.kind === "admit") this.waiting.delete(line.id);
    else if (line.kind === "cache") for (const block of line.block_ids) this.findable.add(block);
    else if (line.kind === "evict") for (const block of line.block_ids) this.findable.delete(block);
    else if (line.kind === "fetch") for (const block of line.block_ids) this.held.push([block, line.id]);
    else if (line.kind === "release")
      for (const block of line.block_ids) this.held.splice(this.held.findIndex(([at]) => at === block), 1);
  }

  #step(line) {
    for (const { id, num_prompt_tokens, num_tokens } of line.new_requests ?? []) {
      const tables = this.header.engine.windows.map(() => []);
      this.requests.set(id, { id, num_prompt_tokens, num_tokens, num_computed: 0, tables });
    }
    for (const share of line.requests ?? []) {
      const request = this.requests.get(share.id);
      if (!request) continue; // it ended before the step's result came
      share.tables.forEach(([start, blocks], group) => {
        request.tables[group].splice(start, Infinity, ...blocks);
      });
      const numNew = share.new.length;
      request.num_computed = share.start + share.count - share.drafts + Math.max(0, numNew - 1);
      request.num_tokens = Math.max(request.num_tokens, request.num_computed + (numNew ? 1 : 0));
    }
  }
}

/** The newest lines of a trace. Lines have absolute numbers; those before `numDropped` are gone, their effect is in `base`. */
export class Recording {
  constructor(maxSteps = 2000) {
    Object.assign(this, { maxSteps, lines: [], steps: [], timed: [], known: new Map(), numDropped: 0 });
    Object.assign(this, { base: null, live: null, cursor: null, numSeen: 0, numWaiting: 0, numPrompt: 0, numHit: 0 });
  }

  add(line) {
    const at = this.numDropped + this.lines.push(line) - 1;
    if ("quire_trace" in line) {
      this.base ??= line;
      this.live = new State(line);
      this.numWaiting = line.num_waiting;
      for (const request of line.requests) this.request(request.id);
      return;
    }
    this.live.apply(line);
    if (line.kind === "served") {
      const known = this.known.get(line.id);
      if (known) known.served = line.phases;
      return;
    }
    const request = line.id ? this.request(line.id) : null;
    if (line.kind === "admit") {
      request.admit ??= line;
      this.numPrompt += line.num_prompt_tokens;
      this.numHit += line.num_cached_tokens;
    } else if (line.kind === "finish") request.finish = line;
    else if (line.kind === "schedule") this.numWaiting = line.num_waiting;
    else if (line.kind === "ops") {
      this.timed.push(line);
      if (this.timed.length > MAX_TIMED) this.timed.shift().ops = [];
    } else if (line.kind === "step" && line.requests) {
      this.steps.push({ ...line, at, begin: line.t - line.duration_s, waiting: this.numWaiting });
      for (const share of line.requests) {
        const owner = this.request(share.id);
        owner.lastStep = line.step_id;
        for (const _ of share.new) owner.stepOfToken.push(line.step_id);
      }
      if (this.steps.length > this.maxSteps * 1.1) this.#drop();
    }
  }

  /** Return what is known of a request: its letter, its events, and the step of each of its tokens. */
  request(id) {
    let found = this.known.get(id);
    if (!found) {
      const number = this.numSeen++;
      const letter = String.fromCharCode(65 + (number % 26)) + (number < 26 ? "" : Math.floor(number / 26) + 1);
      found = { id, letter, colour: number % 8, stepOfToken: [] };
      this.known.set(id, found);
    }
    return found;
  }

  /** Return the state after a line. */
  stateAt(at) {
    if (!this.cursor || this.cursor.at > at) this.cursor = { at: this.numDropped - 1, state: new State(this.base) };
    while (this.cursor.at < at) {
      const line = this.lines[++this.cursor.at - this.numDropped];
      if ("quire_trace" in line) this.cursor.state = new State(line);
      else this.cursor.state.apply(line);
    }
    return this.cursor.state;
  }

  #drop() {
    this.steps = this.steps.slice(-this.maxSteps);
    const at = this.steps[0].at;
    this.base = this.stateAt(at - 1).describe();
    this.base.t = this.lines[at - 1 - this.numDropped].t;
    this.lines.splice(0, at - this.numDropped);
    this.numDropped = at;
    for (const [id, request] of this.known)
      if (request.finish && !(request.lastStep >= this.steps[0].step_id)) this.known.delete(id);
  }

  /** Return what is known of the keys of each request of a step: how many came from the prefix cache, and the chunks of its prompt. */
  history(step) {
    const found = new Map(step.requests.map(({ id }) => [id, { cached: 0, chunks: [] }]));
    for (const line of this.lines.slice(0, step.at - this.numDropped)) {
      if (line.kind === "admit" && found.has(line.id)) found.set(line.id, { cached: line.num_cached_tokens, chunks: [] });
      else if (line.kind === "step" && line.requests)
        for (const share of line.requests)
          if (isPrefill(share)) found.get(share.id)?.chunks.push([share.start, share.start + share.count]);
    }
    return found;
  }

  /** Return the parts of a request's way in order: name, begin and end in seconds of the trace's clock, and the number of steps. */
  way(id) {
    const { admit, served = [] } = this.known.get(id);
    const steps = this.steps.filter((step) => step.requests.some((share) => share.id === id));
    const way = [];
    const isSampled = (share) => share.id === id && share.new.length > 0;
    const detokenise = steps.filter((step) => step.requests.some(isSampled)).reduce((sum, step) => sum + step.output_s, 0);
    Object.assign(way, { id, detokenise });
    const [begin, end] = [steps[0]?.begin ?? Infinity, steps.at(-1)?.t ?? 0];
    for (const [name, from, to] of served) if (from < begin) way.push({ name, from, to: Math.min(to, begin) });
    if (admit && admit.arrival_s < begin && steps.length) way.push({ name: "wait", from: Math.max(admit.arrival_s, way.at(-1)?.to ?? 0), to: begin });
    for (const step of steps) {
      const name = isPrefill(step.requests.find((share) => share.id === id)) ? "prefill" : "decode";
      const last = way.at(-1);
      if (last && last.to < step.begin - 1e-4 && last.count) way.push({ name: "between steps", from: last.to, to: step.begin });
      way.push({ name, from: step.begin, to: step.t, count: 1 });
    }
    for (const [name, from, to] of served) if (from >= begin && to > end) way.push({ name, from: Math.max(from, end), to });
    return way;
  }

  /** Return the timed instructions of the newest step up to `step`. */
  opsUpTo(step) {
    return this.timed.findLast((line) => line.ops.length && (!step || line.step_id <= step.step_id));
  }

  /** Return the kept lines as the text of a trace. */
  text() {
    const lines = this.numDropped ? [this.base, ...this.lines] : this.lines;
    return lines.map((line) => JSON.stringify(line) + "\n").join("");
  }
}

// --- Helpers ----------------------------------------------------------------------------------

const UNITS = [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]];
/** Return a number with three significant digits and a unit prefix. */
export function short(value, unit = "") {
  const [size, prefix] = UNITS.find(([limit]) => Math.abs(value) >= limit) ?? [1, ""];
  return `${+(value / size).toPrecision(3)}${prefix || unit ? " " : ""}${prefix}${unit}`;
}
const ms = (seconds) => `${(seconds * 1e3).toFixed(seconds < 0.01 ? 2 : 1)} ms`;
const plural = (count, word) => `${count.toLocaleString("en")} ${word}${count === 1 ? "" : "s"}`;
export const isPrefill = (share) => share.count - share.drafts > 1 || !share.new.length;
const LABELS = 84; // Width of the column of names.
const PANES = ["Steps", "KV", "Mask", "Requests", "Roofline", "Ops", "Log"];
const WAY = { receive: 4, validate: 6, tokenise: 7, prefill: 1, decode: 0, send: 2 }; // Colours; all else is grey.

// --- The view ---------------------------------------------------------------------------------

/** Draws a recording. `options`: changed() asks for a new drawing; explain() returns predictions or null, ranks() what `quire view ranks` draws; save(form);
 * opened(pane) is told of a pane that is shown. */
export class Xray {
  constructor(recording, options) {
    Object.assign(this, { recording, options, pane: "Steps", chosen: null, request: null, axis: "steps", by: "kind", filter: "" });
  }

  get step() {
    return this.chosen ?? this.recording.steps.at(-1) ?? null;
  }

  get state() {
    return this.chosen ? this.recording.stateAt(this.chosen.at) : this.recording.live;
  }

  set(values) {
    Object.assign(this, values);
    this.options.changed();
  }

  choose(stepId) {
    const step = this.recording.steps.find((item) => item.step_id === stepId);
    if (step) this.set({ chosen: step });
    return Boolean(step);
  }

  move(offset) {
    const { steps } = this.recording;
    const index = steps.indexOf(this.step) + offset;
    if (steps.length) this.set({ chosen: steps[Math.max(0, Math.min(steps.length - 1, index))] });
  }

  open(pane) {
    this.set({ pane });
    this.options.opened?.(pane);
  }

  draw() {
    const { recording } = this;
    if (this.chosen && this.chosen.step_id < recording.steps[0]?.step_id) this.chosen = recording.steps[0];
    const { chosen, step } = this;
    const last = recording.steps.at(-1);
    const onKey = (event) => {
      const offset = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (!offset) return;
      event.preventDefault();
      const next = PANES[(PANES.indexOf(this.pane) + offset + PANES.length) % PANES.length];
      this.open(next);
      document.getElementById(`tab-${next}`).focus();
    };
    return html`
      <div class="bar">
        <div role="tablist" aria-label="Panes of the X-ray" onKeyDown=${onKey}>
          ${PANES.map((name) => html`<button role="tab" id=${`tab-${name}`} aria-selected=${String(name === this.pane)}
            aria-controls="pane" tabindex=${name === this.pane ? 0 : -1} onClick=${() => this.open(name)}>${name}</button>`)}
        </div>
        <div class="steps" role="group" aria-label="Time">
          ${this.options.isLive && html`<button onClick=${() => this.set({ chosen: chosen ? null : step })} aria-pressed=${String(!!chosen)}
            disabled=${!step} title="Stop the drawing here; recording goes on">${chosen ? "Back to live" : "Pause"}</button>`}
          <button onClick=${() => this.move(-1)} disabled=${!step || step === recording.steps[0]} aria-label="One step back">◀</button>
          <output>${step ? `step ${step.step_id} / ${last.step_id}` : "no step yet"}</output>
          <button onClick=${() => this.move(1)} disabled=${!step || step === last} aria-label="One step forward">▶</button>
          ${this.options.save && html`<button onClick=${() => this.options.save("jsonl")} disabled=${!recording.live}>Save .jsonl</button>
          <button onClick=${() => this.options.save("html")} disabled=${!recording.live}>Save .html</button>`}
        </div>
      </div>
      <div id="pane" role="tabpanel" tabindex="0" aria-labelledby=${`tab-${this.pane}`}>
        ${!recording.live ? html`<p class="hint">Waiting for the engine…</p>` : this[this.pane.toLowerCase()]()}
      </div>`;
  }

  get width() {
    return Math.max(300, (document.getElementById("pane")?.clientWidth ?? 720) - 26);
  }

  get untimed() {
    return this.options.isLive ? "No step was timed yet: keep this pane open and send a message. While it is open, one step in four is timed." : "No step of this trace was timed.";
  }

  /** Return the lines below every picture: what it shows, its formula, its source. */
  about(what, formula, source) {
    return html`<div class="about"><p>${what}</p><p><span>Formula</span> <code>${formula}</code></p>
      <p><span>Source</span> <code>${source}</code></p></div>`;
  }

  badge(id) {
    const { letter, colour } = this.recording.request(id);
    return html`<b class=${`badge o${colour}`}>${letter}</b>`;
  }

  // --- Steps ----------------------------------------------------------------------------------

  steps() {
    const { recording, step, width } = this;
    const about = this.about(
      "A column is an engine step, a row a request: dots while it waits, stripes for chunks of its prompt, solid for decodes; a number counts " +
        "tokens if there are several. Click a step, or use ← and →: all panes show that step.",
      `tokens of a step = Σ tokens of its requests ≤ ${recording.live.header.engine.max_num_batched_tokens} (max_num_batched_tokens)`,
      "src/quire/scheduler/step_plan.py");
    if (!step) return html`<p class="hint">No step yet: send a message, and watch its prompt and its tokens being computed.</p>${about}`;
    const numColumns = Math.max(12, Math.floor((width - LABELS) / 16));
    const index = recording.steps.indexOf(step);
    const end = Math.min(recording.steps.length, this.chosen ? Math.max(numColumns, index + numColumns / 2) : recording.steps.length);
    const shown = recording.steps.slice(Math.max(0, Math.floor(end - numColumns)), Math.floor(end));
    const { waiting } = this.state;
    const ids = [...new Set([...shown.flatMap((item) => item.requests.map((share) => share.id)), ...waiting.keys()])];
    const rows = new Map(ids.slice(-24).map((id, row) => [id, row * 24 + 18]));
    const [begin, finish] = [shown[0].begin, shown.at(-1).t];
    const column = (width - LABELS) / (this.axis === "time" ? 1 : numColumns);
    const x = (i, time) => LABELS + column * (this.axis === "time" ? (time - begin) / (finish - begin) : i);
    const xOfTime = (time) => {
      const i = shown.findIndex((item) => item.begin >= time - 1e-4);
      return Math.max(LABELS, i < 0 ? x(shown.length, finish) : x(i, Math.max(begin, time)));
    };
    const top = rows.size * 24 + 24;
    const most = { tokens: Math.max(...shown.map((s) => s.num_tokens), 1), time: Math.max(...shown.map((s) => s.duration_s)) };
    const bars = (y, label, value, limit, text, scale = (v) => v) => html`
      <text x="0" y=${y + 34} class="small">${label}</text><text x="0" y=${y + 47} class="small">≤ ${text(limit)}</text>
      ${shown.map((item, i) => {
        const height = Math.max(1, (44 * scale(value(item))) / scale(limit));
        return html`<rect class="tokens" x=${x(i, item.begin) + 1} y=${y + 48 - height} width=${Math.max(1, x(i + 1, item.t) - x(i, item.begin) - 2)} height=${height} />`;
      })}`;
    const onKey = (event) => {
      const offset = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (offset) { event.preventDefault(); this.move(offset); }
    };
    const cells = shown.map((item, i) => {
      const [left, size] = [x(i, item.begin), Math.max(1, x(i + 1, item.t) - x(i, item.begin) - 1)];
      return html`<g onClick=${() => this.set({ chosen: item })} class="column">
        <rect x=${left} y="0" width=${size} height=${top + 112} class=${item === step ? "chosen" : "hit"}><title>step ${item.step_id}, ${plural(item.num_tokens, "token")}, ${ms(item.duration_s)}</title></rect>
        ${item.requests.filter((share) => rows.has(share.id)).map((share) => {
          const y = rows.get(share.id) - 14;
          const count = isPrefill(share) ? share.count : share.new.length;
          return html`<rect x=${left} y=${y} width=${size} height="18" class=${`fill${recording.request(share.id).colour}`} />
            ${isPrefill(share) && html`<rect x=${left} y=${y} width=${size} height="18" fill="url(#stripes)" />`}
            ${count > 1 && size > 7 * String(count).length && html`<text x=${left + size / 2} y=${y + 13} class="count">${count}</text>`}`;
        })}</g>`;
    });
    const queues = [...rows].map(([id, y]) => {
      const { admit } = recording.request(id);
      const [arrived, admitted] = waiting.has(id) ? [waiting.get(id), finish] : [admit?.arrival_s, admit?.t];
      if (!arrived || admitted < begin) return null;
      const [from, to] = [xOfTime(arrived), xOfTime(admitted)];
      return to - from > 2 && html`<line class="queue" x1=${from} x2=${to - 1} y1=${y - 5} y2=${y - 5} />`;
    });
    return html`
      <div class="tools"><label>Width of a step: <select value=${this.axis} onChange=${(e) => this.set({ axis: e.target.value })}>
        <option value="steps">equal</option><option value="time">its time</option></select></label></div>
      <svg id="gantt" role="img" tabindex="0" aria-label=${`Timeline of ${plural(shown.length, "step")} and ${plural(rows.size, "request")}; step ${step.step_id} is chosen`}
        width=${width} height=${top + 112} onKeyDown=${onKey}>
        ${PATTERNS}${cells}${queues}
        ${[...rows].map(([id, y]) => html`<text x="0" y=${y} class="letter">${recording.request(id).letter}${recording.request(id).served &&
          html`<title>${recording.request(id).served.map(([name, from, to]) => `${name} ${ms(to - from)}`).join(", ")}</title>`}</text>
          <text x="22" y=${y} class="small">${recording.request(id).finish ? "done" : waiting.has(id) ? "waits" : ""}</text>`)}
        <g class="over">${bars(top, "tokens", (s) => s.num_tokens, most.tokens, String, (v) => Math.log2(1 + v))}
        ${bars(top + 60, "time", (s) => s.duration_s, most.time, ms)}</g>
      </svg>
      ${ids.length > rows.size && html`<p class="hint">${ids.length - rows.size} older requests are not drawn.</p>`}
      ${this.stepTable(step, shown)}${about}`;
  }

  stepTable(step, shown) {
    const times = shown.map((item) => item.duration_s).sort((a, b) => a - b);
    const ratio = step.duration_s / times[times.length >> 1];
    const numPrompt = step.requests.filter(isPrefill).reduce((sum, share) => sum + share.count, 0);
    const why = ratio < 1.3 ? "" : `${ratio.toFixed(1)} times the median of the steps shown` +
      (numPrompt ? `: it computed ${plural(numPrompt, "prompt token")}` : step.num_iterations > 1 ? `: it decoded ${step.num_iterations} times` : "") + ". ";
    return html`<h3>Step ${step.step_id}</h3>
      <p>${plural(step.num_requests, "request")}, ${plural(step.num_tokens, "token")}${step.num_iterations > 1 ? ` in ${step.num_iterations} passes` : ""}, ${step.waiting} waiting. ${ms(step.duration_s)} = schedule ${ms(step.schedule_s)} + execute ${ms(step.execute_s)} + output ${ms(step.output_s)} + rest. ${why}</p>
      <div class="scroll" tabindex="0"><table><thead><tr><th>Request</th><th>Phase</th><th>Positions</th><th>New tokens</th></tr></thead>
      <tbody>${step.requests.slice(0, 40).map((share) => html`<tr><td>${this.badge(share.id)}</td><td>${isPrefill(share) ? "prefill" : share.drafts ? "verify drafts" : "decode"}</td>
        <td>${share.start}${share.count > 1 ? `–${share.start + share.count - 1}` : ""}</td>
        <td>${share.new.length ? share.new.map((id, i) => html`<code>${share.text ? JSON.stringify(share.text[i]) : id}</code> `) : "none: the prompt goes on"}</td></tr>`)}</tbody></table></div>`;
  }

  // --- KV -------------------------------------------------------------------------------------

  kv() {
    const { state, recording } = this;
    const { num_blocks, block_size, kv_bytes_per_token } = state.header.engine;
    const owners = state.owners();
    const numUsed = owners.size;
    const cached = state.cached(owners);
    const numFree = num_blocks - 1 - numUsed - cached.size;
    const numShared = [...owners.values()].filter((ids) => ids.length > 1).length;
    const requests = [...state.requests.values()];
    const chosen = state.requests.get(this.request) ?? null;
    const size = Math.max(3, Math.min(14, Math.floor(Math.sqrt((this.width * 110) / num_blocks))));
    const perRow = Math.floor(this.width / size);
    const kind = (block) => {
      const ids = owners.get(block);
      return ids ? (ids.length > 1 ? "shared" : `fill${recording.request(ids[0]).colour}`) : cached.has(block) ? "cached" : "free";
    };
    const runs = [];
    for (let block = 1; block < num_blocks; block++) {
      const [row, place, name] = [Math.floor((block - 1) / perRow), (block - 1) % perRow, kind(block)];
      const last = runs.at(-1);
      if (last && last.name === name && last.row === row) last.count++;
      else runs.push({ row, place, name, count: 1 });
    }
    const cell = (block, request, i) => {
      const ids = owners.get(block) ?? [];
      const filled = Math.min(block_size, request.num_computed - i * block_size);
      const text = block === NULL_BLOCK ? "out of the window" : `block ${block}: positions ${i * block_size}–${(i + 1) * block_size - 1}, ${Math.max(0, filled)} of ${block_size} filled, ` + plural(ids.length, "reference");
      return html`<li class=${`block ${block === NULL_BLOCK ? "gone" : ""} ${ids.length > 1 ? "many" : ""}`} title=${text}>
        <i style=${{ width: `${(100 * Math.max(0, filled)) / block_size}%` }} class=${`o${recording.request(request.id).colour}`}></i><span>${block || "–"}</span>
        ${ids.length > 1 && html`<em>×${ids.length}</em>`}</li>`;
    };
    return html`
      <p id="kv-summary">${plural(num_blocks - 1, "block")} of ${block_size} tokens: <b>${numUsed}</b> in use (${numShared} shared), <b>${cached.size}</b> cached, <b>${numFree}</b> free.
        In use: ${short(numUsed * block_size * kv_bytes_per_token, "B")} of ${short((num_blocks - 1) * block_size * kv_bytes_per_token, "B")}.</p>
      <svg role="img" aria-label=${`Map of the block pool: ${numUsed} in use, ${cached.size} cached, ${numFree} free`} width=${this.width} height=${(runs.at(-1).row + 1) * size}>
        ${PATTERNS}${runs.map((run) => html`<rect class=${run.name} x=${run.place * size} y=${run.row * size} width=${run.count * size} height=${size} />`)}
        <pattern id="cells" width=${size} height=${size} patternUnits="userSpaceOnUse"><path class="gap" d=${`M0 ${size - 0.5}H${size - 0.5}V0`} /></pattern>
        <rect width=${perRow * size} height="100%" fill="url(#cells)" /></svg>
      <p class="legend"><span class="key o0">A</span> used by a request <span class="key shared">×2</span> shared <span class="key cached"> </span> cached: free, but its prefix can be found <span class="key free"> </span> free</p>
      <h3>Block tables</h3>
      ${!requests.length && html`<p class="hint">No request holds blocks${cached.size ? "; what finished requests left can be found again by their prefixes" : ""}.</p>`}
      ${requests.slice(0, 24).map((request) => html`<div class="row">
        <button class="owner" aria-pressed=${String(request.id === this.request)} onClick=${() => this.set({ request: request.id === this.request ? null : request.id })}>
          ${this.badge(request.id)} ${request.num_computed} of ${request.num_tokens}</button>
        ${request.tables.map((table) => html`<ol class="blocks">${table.slice(0, 64).map((block, i) => cell(block, request, i))}
          ${table.length > 64 && html`<li>+${table.length - 64}</li>`}</ol>`)}</div>`)}
      ${chosen && html`<h3>Block table of ${this.badge(chosen.id)} <small>${chosen.id}</small></h3><div class="scroll" tabindex="0"><table><thead><tr><th>Index</th><th>Block</th><th>Positions</th><th>Held by</th></tr></thead>
        <tbody>${chosen.tables.map((table) => table.map((block, i) => html`<tr><td>${i}</td><td>${block}</td><td>${i * block_size}–${Math.min((i + 1) * block_size, chosen.num_computed) - 1}</td>
          <td>${(owners.get(block) ?? []).map((id) => this.badge(id))}</td></tr>`))}</tbody></table></div>`}
      ${this.about("The KV cache is a pool of blocks. A request's block table names its blocks in order, so its memory need not be contiguous, and requests with the same beginning share full blocks (×2). Choose a request for its whole table.",
        `blocks = ⌈tokens / ${block_size}⌉; bytes of a block = ${block_size} × ${kv_bytes_per_token.toLocaleString("en")} B`, "src/quire/scheduler/blocks.py")}`;
  }

  // --- Mask -----------------------------------------------------------------------------------

  mask() {
    const { step, width, state, recording } = this;
    const window = state.header.engine.windows.find((value) => value !== null) ?? null;
    const about = this.about("The step's one matrix: rows are the tokens that it computes, columns the keys of all requests, a block for each request on the diagonal. Full: keys of this step; paler: keys that earlier steps left in the KV cache, " +
      "chunks of a prompt by turns; palest: a prefix found in the cache. The thick line is the edge of the chunk. Nothing off the diagonal is computed: no row sees another request, and the batch needs no padding.",
      `row i sees column j if j ≤ i${window ? ` and i − j < ${window}` : ""}; pairs = Σ (start + k), k = 1 … tokens`, "src/quire/kernels/paged_attention.py");
    if (!step) return html`<p class="hint">No step yet.</p>${about}`;
    const shares = step.requests.filter((share) => share.count).slice(0, 24);
    const numKeys = shares.reduce((sum, share) => sum + share.start + share.count, 0);
    const numRows = shares.reduce((sum, share) => sum + share.count, 0);
    const [left, before] = [24, recording.history(step)];
    const cell = Math.min((width - left - 4) / numKeys, 16);
    const sizeY = Math.min(cell, 14, 400 / numRows);
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
    const longest = Math.max(...shares.map((share) => share.count));
    const padded = longest * shares.length - numRows;
    return html`<p>Step ${step.step_id}: ${plural(numRows, "row")} by ${plural(numKeys, "key")}, ${pairs.toLocaleString("en")} of ${(numRows * numKeys).toLocaleString("en")} pairs of query and key are computed, per head and layer.
      ${padded ? ` A padded batch would compute ${padded.toLocaleString("en")} more rows: (longest − own) summed over ${plural(shares.length, "request")}.` : ""}</p>
      <svg id="mask" role="img" aria-label=${`Mask of the step: ${plural(numRows, "row")}, ${plural(numKeys, "column")}, ${plural(shares.length, "block")} on the diagonal`} width=${width} height=${y0 + 4}>${blocks}</svg>
      ${step.requests.length > shares.length && html`<p class="hint">${step.requests.length - shares.length} more requests are not drawn.</p>`}${about}`;
  }

  // --- Requests -------------------------------------------------------------------------------

  requests() {
    const { recording, width } = this;
    const about = this.about("The way of each request: the server receives, validates and tokenises it, it waits, steps prefill and decode it, and its text is sent. A bar begins when the request came and ends with its last byte; all bars have one scale. The server's part is known when the request has ended.",
      "whole = server before + waiting + steps (with the detokenising in them) + server behind", "src/quire/server/request_record.py, src/quire/engine/recorder.py");
    const ways = [...recording.known.keys()].slice(-16).map((id) => recording.way(id)).filter((way) => way.length);
    if (!ways.length) return html`<p class="hint">No request yet: send a message.</p>${about}`;
    const longest = Math.max(...ways.map((way) => way.at(-1).to - way[0].from));
    return html`<div class="scroll" tabindex="0"><table id="ways"><thead><tr><th>Request</th><th>Way, ${ms(longest)} wide</th><th>Parts</th></tr></thead><tbody>
      ${ways.reverse().map((way) => {
        const [begin, size] = [way[0].from, (width * 0.5) / longest];
        const parts = new Map();
        for (const { name, from, to, count } of way) parts.set(name, { time: (parts.get(name)?.time ?? 0) + to - from, count: (parts.get(name)?.count ?? 0) + (count ?? 0) });
        return html`<tr><td>${this.badge(way.id)}</td><td><svg role="img" aria-label=${`Way of request ${recording.request(way.id).letter}`} width=${width * 0.5} height="18">${way.map(({ name, from, to }) => html`
          <rect class=${WAY[name] ? `fill${WAY[name]}` : "free"} x=${(from - begin) * size} y="2" width=${Math.max(1, (to - from) * size)} height="14"><title>${name} ${ms(to - from)}</title></rect>`)}</svg></td>
          <td>${[...parts].map(([name, { time, count }]) => html`<span class="part"><span class=${`key ${WAY[name] ? `o${WAY[name]}` : "free"}`}> </span> ${name}${count ? ` ×${count}` : ""} ${ms(time)}</span> `)}
            ${way.detokenise > 0 && html`<span class="part">detokenise, within the steps, ${ms(way.detokenise)}</span>`}</td></tr>`;
      })}</tbody></table></div>${about}`;
  }

  // --- Roofline and Ops -----------------------------------------------------------------------

  roofline() {
    const explained = this.options.explain?.() ?? null;
    const timed = this.recording.opsUpTo(this.chosen);
    const points = timed ? groupOps(timed.ops).filter((op) => op.flops && op.bytes && op.time) : [];
    const peaks = explained?.peaks ?? [];
    const predicted = explained?.points ?? [];
    const about = this.about("A point is work: to the right, more arithmetic per byte; up, more speed. ○ is predicted from the model and the machine, ● was measured in this engine. Under the slope memory is the limit, under the flat line arithmetic.",
      "attainable FLOP/s = min(peak FLOP/s, FLOP per byte × bytes per second)", "src/quire/insight/explain/phases.py; measured: src/quire/runtime/forward.py");
    const note = explained?.error ?? (this.options.explain && !explained ? "The prediction is being computed…" : "");
    if (!points.length && !predicted.length) return html`<p class="hint">${note} ${this.untimed}</p>${about}`;
    const all = [...points.map((op) => [op.flops / op.bytes, op.flops / op.time]), ...predicted.map((p) => [p.intensity, p.flops_per_s]), ...peaks.map((p) => [p.flops_per_s / p.bytes_per_s, p.flops_per_s])].filter(([a, b]) => a > 0 && b > 0);
    const range = (values) => [Math.floor(Math.log10(Math.min(...values)) - 0.2), Math.ceil(Math.log10(Math.max(...values)) + 0.2)];
    const [[x0, x1], [y0, y1]] = [range(all.map((p) => p[0])), range(all.map((p) => p[1]))];
    const [width, height] = [this.width, 330];
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
      <tbody>${points.slice(0, 12).map((op) => html`<tr><td>${op.name}</td><td>${short(op.flops / op.bytes)}</td><td>${short(op.flops / op.time)}</td></tr>`)}</tbody></table></div>` : html`<p class="hint">${this.untimed}</p>`}
    ${predicted.length > 0 && html`<h3>○ Predicted</h3><div class="scroll" tabindex="0"><table><thead><tr><th>Point</th><th>Phase</th><th>FLOP/B</th><th>FLOP/s</th></tr></thead>
      <tbody>${predicted.map((p, i) => html`<tr><td>${i + 1}</td><td>${p.name}</td><td>${short(p.intensity)}</td><td>${short(p.flops_per_s)}</td></tr>`)}</tbody></table></div>`}${about}`;
  }

  ops() {
    const timed = this.recording.opsUpTo(this.chosen);
    const numRanks = this.recording.live.header.engine.tensor_parallel_size ?? 1;
    const about = this.about("Time of the instructions in one step of the model's program: of each kind, longest first, with layers of equal shape added up; or of each layer. Outside of the layers are the embedding, the last norm and the head." +
      (numRanks > 1 ? ` Times are those of rank 0 of ${numRanks}.` : ""), "FLOP/s = FLOP / time; B/s = bytes / time; FLOP per byte = FLOP / bytes", "src/quire/kernels/instruction.py, src/quire/runtime/forward.py");
    if (!timed) return html`<p class="hint">${this.untimed}</p>${about}${this.ranks()}`;
    const byLayer = this.by === "layer";
    const groups = groupOps(timed.ops, byLayer);
    const total = groups.reduce((sum, op) => sum + op.time, 0);
    const sums = timed.ops.filter((op) => /^All(Reduce|Gather)/.test(op.name)).reduce((sum, op) => sum + op.microseconds / 1e6, 0);
    return html`<div class="tools"><label>Add up by: <select value=${this.by} onChange=${(e) => this.set({ by: e.target.value })}><option value="kind">kind</option><option value="layer">layer</option></select></label></div>
      <p>Step ${timed.step_id}: ${timed.ops.length} instructions, ${ms(total)}.${sums ? ` Sums over ${numRanks} ranks, waiting for the slowest included: ${ms(sums)}, ${((100 * sums) / total).toFixed(1)} %.` : ""}</p>
      <div class="scroll" tabindex="0"><table class="numbers"><thead><tr><th>${byLayer ? "Layer" : "Instruction"}</th><th>Times</th><th>Time</th><th>Share</th><th>FLOP</th><th>Bytes</th><th>FLOP/s</th><th>B/s</th>${!byLayer && html`<th>Arithmetic</th>`}</tr></thead>
      <tbody>${groups.map((op) => html`<tr><td>${op.name}</td><td>${op.count}</td><td>${ms(op.time)}</td><td><meter min="0" max="1" value=${op.time / total} aria-label="Share of the step"></meter> ${((100 * op.time) / total).toFixed(1)} %</td>
        <td>${short(op.flops)}</td><td>${short(op.bytes)}</td><td>${short(op.flops / op.time)}</td><td>${short(op.bytes / op.time)}</td>${!byLayer && html`<td>${op.arithmetic}</td>`}</tr>`)}</tbody></table></div>${about}${this.experts(timed)}${this.ranks()}`;
  }

  /** Draw the number of tokens of each expert, a row for each layer, in a timed step. */
  experts(timed) {
    const rows = timed.ops.filter((op) => op.expert_loads?.length);
    if (!rows.length) return null;
    const most = Math.max(...rows.flatMap((op) => op.expert_loads), 1);
    const [sizeX, sizeY] = [Math.min(14, (this.width - 60) / rows[0].expert_loads.length), Math.min(14, Math.max(4, 400 / rows.length))];
    const idle = rows.reduce((sum, op) => sum + op.expert_loads.filter((load) => !load).length, 0) / rows.length;
    return html`<h3>Load of experts</h3><p>Step ${timed.step_id}: tokens of each of ${rows[0].expert_loads.length} experts in ${plural(rows.length, "layer")}, at most ${most} of one; ${idle.toFixed(1)} experts of a layer were chosen by none, and their weights were not read.</p>
      <svg id="experts" role="img" aria-label=${`Load of ${rows[0].expert_loads.length} experts in ${rows.length} layers`} width=${this.width} height=${rows.length * sizeY}>${rows.map((op, row) => html`
        <text class="small" x="0" y=${row * sizeY + sizeY - 2}>${sizeY >= 10 || row % 5 === 0 ? op.layer : ""}</text>${op.expert_loads.map((load, i) => html`
        <rect class="fill0" x=${40 + i * sizeX} y=${row * sizeY} width=${sizeX - 1} height=${sizeY - 1} opacity=${0.08 + (0.92 * load) / most}><title>layer ${op.layer}, expert ${i}: ${plural(load, "token")}</title></rect>`)}`)}</svg>
      ${this.about("A row is a layer, a column an expert: the darker, the more tokens chose it.", "Σ of a row = tokens · experts of a token", "src/quire/kernels/experts.py")}`;
  }

  /** Draw how a layer is cut over the ranks, where the model has several and a server can tell. */
  ranks() {
    const found = this.options.ranks?.() ?? null;
    if (!found) return null;
    if (found.error) return html`<p class="hint">${found.error}</p>`;
    const size = Math.min(8, (this.width - 260) / Math.max(...found.rows.map((row) => row.cells.length)));
    const name = (kind) => (/^\d+$/.test(kind) ? `fill${kind % 8}` : { sum: "tokens", all: "free", several: "shared" }[kind] ?? "none");
    return html`<h3>Ranks</h3><div class="scroll" tabindex="0"><table id="ranks"><tbody>${found.rows.map((row) => html`<tr><td>${row.label}</td><td><svg role="img" aria-label=${row.label || "empty"} width=${size * row.cells.length} height="12">
        ${row.cells.map((kind, i) => html`<rect class=${name(kind)} x=${i * size} y="0" width=${size} height="12"><title>${/^\d+$/.test(kind) ? `rank ${kind}` : kind}</title></rect>`)}</svg></td><td><small>${row.remark}</small></td></tr>`)}</tbody></table></div>
      ${this.about(`${found.caption} A colour is a rank; grey is held by all.`, found.formula, found.source)}`;
  }

  // --- Log ------------------------------------------------------------------------------------

  log() {
    const { recording } = this;
    const end = this.chosen ? this.chosen.at + 1 - recording.numDropped : recording.lines.length;
    const start = recording.lines[0]?.t ?? 0;
    const shown = [];
    for (let i = end - 1; i >= 0 && shown.length < 200; i--) {
      const line = recording.lines[i];
      const letter = line.id ? recording.request(line.id).letter : "";
      const kind = line.kind ?? "header";
      const { t, kind: _, id, requests, ops, new_requests, model, engine, cached, ...rest } = line;
      if (ops) rest.instructions = ops.length;
      const text = Object.entries(rest).filter(([, value]) => !(Array.isArray(value) && !value.length)).map(([name, value]) => `${name}=${typeof value === "number" ? +value.toPrecision(4) : JSON.stringify(value)}`).join(" ");
      if (!this.filter || kind.includes(this.filter) || letter === this.filter.toUpperCase()) shown.push({ at: i, t: t - start, kind, letter, id, text });
    }
    return html`<div class="tools"><label>Kind or letter: <input value=${this.filter} onInput=${(e) => this.set({ filter: e.target.value.trim() })} size="10" /></label></div>
      <div class="scroll" tabindex="0"><table class="log"><thead><tr><th>Seconds</th><th>Event</th><th>Request</th><th>Data</th></tr></thead><tbody>
      ${shown.map((line) => html`<tr key=${line.at}><td>${line.t.toFixed(3)}</td><td>${line.kind}</td><td>${line.id ? this.badge(line.id) : ""}</td><td><code>${line.text}</code></td></tr>`)}</tbody></table></div>
      ${this.about("The engine's own event log, newest first. Metrics, traces and every pane here are read from these lines.", "t: seconds since the first line that is kept", "src/quire/events.py, src/quire/engine/recorder.py")}`;
  }
}

const PATTERNS = html`<defs><pattern id="stripes" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)"><rect class="stripe" width="2" height="6" /></pattern></defs>`;

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

/** Draw a whole trace from its text: what a saved page does. */
export function showTrace(text, root) {
  const recording = new Recording(Infinity);
  for (const line of text.split("\n")) if (line.trim()) recording.add(JSON.parse(line));
  const draw = () => render(html`<main class="xray">${xray.draw()}</main>`, root);
  const xray = new Xray(recording, { changed: draw });
  draw();
  addEventListener("resize", draw);
  draw(); // with the width that the first drawing made known
  return xray;
}
