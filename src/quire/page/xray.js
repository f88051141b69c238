/**
 * The X-ray: one chosen step, the slider that chooses it, and the panes that show it.
 * It needs no server: the page feeds its recording from `/xray/events`, a saved trace from its own text.
 * Next to read: recording.js, timeline.js, app.js.
 */
import { drawKv } from "./blocks.js";
import { html, render, short } from "./drawing.js";
import { drawMask } from "./mask.js";
import { Recording } from "./recording.js";
import { Scrubber, drawSteps } from "./timeline.js";
import { drawLog, drawRequests } from "./ways.js";
import { drawOps, drawRoofline } from "./work.js";

export { Recording, html, render, short };
const PANES = { Steps: drawSteps, KV: drawKv, Mask: drawMask, Requests: drawRequests, Roofline: drawRoofline, Ops: drawOps, Log: drawLog };
const NAMES = Object.keys(PANES);

/** Draws a recording. `options`: changed() asks for a new drawing; explain() returns predictions or null, ranks() what `quire view ranks` draws; save(form);
 * opened(pane) is told of a pane that is shown; textOf(id, token) returns a token's text if the page knows it. */
export class Xray {
  constructor(recording, options) {
    Object.assign(this, { recording, options, pane: "Steps", chosen: null, request: null, axis: "steps", by: "kind", filter: "", wanted: "", found: "" });
    this.scrubber = new Scrubber(this);
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
    const step = this.recording.steps[this.recording.indexOf(stepId)];
    if (step?.step_id !== stepId) return false;
    this.set({ chosen: step });
    return true;
  }

  move(offset) {
    const { steps } = this.recording;
    if (steps.length) this.chooseAt(this.recording.indexOf(this.step.step_id) + offset);
  }

  chooseAt(index) {
    const { steps } = this.recording;
    this.set({ chosen: steps[Math.max(0, Math.min(steps.length - 1, index))] });
  }

  open(pane) {
    this.set({ pane });
    this.options.opened?.(pane);
  }

  /** Return "done", "waits", "later" or "" for a request at the chosen step. */
  statusOf(id) {
    const { finishAt, firstStep } = this.recording.request(id);
    if (finishAt !== undefined && (!this.chosen || finishAt <= this.chosen.at)) return "done";
    if (this.state.waiting.has(id)) return "waits";
    return this.chosen && !(firstStep <= this.chosen.step_id) ? "later" : "";
  }

  /** Return how many of an answer's tokens the chosen step knows; the first `numBegun` were given with its request. */
  numWritten(id, numBegun, numTokens) {
    const known = this.recording.known.get(id);
    if (!this.chosen || !known) return numTokens;
    const { step_id } = this.chosen;
    if (!(known.firstStep <= step_id)) return 0;
    return Math.min(numTokens, numBegun + known.stepOfToken.filter((step) => step <= step_id).length);
  }

  /** Return the text of a share's token as JSON, or its id where no text is known. */
  pieceOf(share, i) {
    const text = share.text?.[i] ?? this.options.textOf?.(share.id, share.new[i]);
    return text === undefined ? share.new[i] : JSON.stringify(text);
  }

  textsOf(id) {
    const shares = this.recording.steps.flatMap((step) => step.requests.filter((share) => share.id === id));
    return shares.flatMap((share) => share.new.map((token, i) => share.text?.[i] ?? this.options.textOf?.(id, token) ?? ""));
  }

  /** Choose the next step, behind the chosen one, that fits what is searched for. */
  search() {
    const found = this.wanted ? this.recording.find(this.wanted, (id) => this.textsOf(id)) : [];
    const next = found.find((step) => step > (this.chosen?.step_id ?? -1)) ?? found[0];
    this.found = next === undefined ? "not found" : `${found.indexOf(next) + 1} of ${found.length}`;
    if (next === undefined || !this.choose(next)) this.options.changed();
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
      const next = NAMES[(NAMES.indexOf(this.pane) + offset + NAMES.length) % NAMES.length];
      this.open(next);
      document.getElementById(`tab-${next}`).focus();
    };
    return html`
      <div class="bar">
        <div role="tablist" aria-label="Panes of the X-ray" onKeyDown=${onKey}>
          ${NAMES.map((name) => html`<button role="tab" id=${`tab-${name}`} aria-selected=${String(name === this.pane)}
            aria-controls="pane" tabindex=${name === this.pane ? 0 : -1} onClick=${() => this.open(name)}>${name}</button>`)}
        </div>
        <div class="steps" role="group" aria-label="Time">
          ${this.options.isLive && html`<button class="live" onClick=${() => this.set({ chosen: chosen ? null : step })} aria-pressed=${String(!!chosen)}
            disabled=${!step} title="Stop the drawing here; recording goes on">${chosen ? "Back to live" : "Pause"}</button>`}
          <button onClick=${() => this.move(-1)} disabled=${!step || step === recording.steps[0]} aria-label="One step back">◀</button>
          <output>${step ? `step ${step.step_id} / ${last.step_id}` : "no step yet"}</output>
          <button onClick=${() => this.move(1)} disabled=${!step || step === last} aria-label="One step forward">▶</button>
          ${this.options.save && html`<button onClick=${() => this.options.save("jsonl")} disabled=${!recording.live}>Save .jsonl</button>
          <button onClick=${() => this.options.save("html")} disabled=${!recording.live}>Save .html</button>`}
        </div>
      </div>
      ${this.scrubber.draw()}
      <div id="pane" role="tabpanel" tabindex="0" aria-labelledby=${`tab-${this.pane}`}>
        ${!recording.live ? html`<p class="hint">Waiting for the engine…</p>` : PANES[this.pane](this)}
      </div>`;
  }

  get width() {
    return Math.max(300, (document.getElementById("pane")?.clientWidth ?? 720) - 26);
  }

  get untimed() {
    return this.options.isLive ? "No step was timed yet: send a message." : "No step of this trace was timed.";
  }

  badge(id) {
    const { letter, colour } = this.recording.request(id);
    return html`<b class=${`badge o${colour}`}>${letter}</b>`;
  }
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
