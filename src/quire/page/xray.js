/**
 * The X-ray: one chosen step, the slider that chooses it, and the panes that show it.
 * It needs no server: the page feeds its recording from `/xray/events`, a saved trace from its own text.
 * Next to read: recording.js, timeline.js, app.js.
 */
import { drawKv } from "./blocks.js";
import { html, render, short } from "./drawing.js";
import { drawMask } from "./mask.js";
import { Recording } from "./recording.js";
import { Story } from "./story.js";
import { Scrubber, drawSteps } from "./timeline.js";
import { drawLog, drawRequests } from "./ways.js";
import { drawOps, drawRoofline } from "./work.js";

const FORMAT_VERSION = 1;
export { Recording, html, render, short };
const PANES = { Steps: drawSteps, KV: drawKv, Mask: drawMask, Requests: drawRequests, Roofline: drawRoofline, Ops: drawOps, Log: drawLog };
const NAMES = Object.keys(PANES);

/** Draws a recording. `options`: changed() asks for a new drawing; explain() returns predictions or null, ranks() what `quire view ranks` draws; save(form);
 * opened(pane) is told of a pane that is shown; textOf(id, place) returns the text of a request's new token if the page knows it. */
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
    return Math.min(numTokens, numBegun + known.stepOfToken.filter((step) => !(step > step_id)).length);
  }

  /** Return the text of a new token in a share of a step as JSON; its id, or a dot, where no text is known. */
  pieceOf(step, share, i) {
    const text = share.text?.[i] ?? this.options.textOf?.(share.id, this.recording.placeOf(share.id, step) + i);
    return text === undefined ? share.new[i] ?? "·" : JSON.stringify(text);
  }

  textsOf(id) {
    const texts = this.recording.request(id).stepOfToken.map((_, place) => this.options.textOf?.(id, place) ?? "");
    for (const step of this.recording.steps) {
      const share = step.requests.find((item) => item.id === id);
      share?.text?.forEach((text, i) => { texts[this.recording.placeOf(id, step) + i] = text; });
    }
    return texts;
  }

  /** Choose the next step, behind the chosen one, that fits what is searched for. */
  search() {
    const found = this.wanted ? this.recording.find(this.wanted, (id) => this.textsOf(id)) : [];
    const next = found.find((step) => step > (this.chosen?.step_id ?? -1)) ?? found[0];
    this.found = next === undefined ? "not found" : `${found.indexOf(next) + 1} of ${found.length}`;
    if (next === undefined || !this.choose(next)) this.options.changed();
  }

  /** `beside` is drawn behind the search. */
  draw(beside = null) {
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
    const close = (event) => {
      const menu = event.currentTarget.closest("details");
      menu.open = false;
      menu.firstElementChild.focus();
    };
    const { save, share, tell } = this.options;
    const act = (name, run, isReady) => html`<button type="button" onClick=${run} disabled=${!isReady}>${name}</button>`;
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
          ${tell && act("Play as a story", tell, step)}
        </div>
      </div>
      ${this.scrubber.draw(html`${beside}
        ${save && html`<details class="menu" onKeyDown=${(e) => e.key === "Escape" && close(e)} onFocusOut=${(e) => e.currentTarget.contains(e.relatedTarget) || (e.currentTarget.open = false)}><summary>Save</summary>
          <div onClick=${close}>${act("Save .jsonl", () => save("jsonl"), recording.live)}${act("Save .html", () => save("html"), recording.live)}${act("Share…", share, step)}</div></details>`}`)}
      <div id="pane" role="tabpanel" tabindex="0" aria-labelledby=${`tab-${this.pane}`}>
        ${!recording.live ? html`<p class="hint">Waiting for the engine…</p>` : PANES[this.pane](this)}
      </div>`;
  }

  get width() {
    return Math.max(300, (document.getElementById("pane")?.clientWidth ?? 720) - 26);
  }

  /** Return the height of the pane, which on the page of a server is what the screen has left. */
  get height() {
    return document.querySelector(".page #pane")?.clientHeight ?? 560;
  }

  get untimed() {
    return this.options.isLive ? "No step was timed yet: send a message." : "No step of this trace was timed.";
  }

  badge(id) {
    const { letter, colour } = this.recording.request(id);
    return html`<b class=${`badge o${colour}`}>${letter}</b>`;
  }
}

/** Return the recording that a text holds. Throws an Error that says why it is none. */
export function readRecording(text) {
  const recording = new Recording(Infinity);
  text.split("\n").forEach((row, i) => {
    if (!row.trim()) return;
    let line = null;
    try {
      line = JSON.parse(row);
    } catch {
      line = null;
    }
    const version = line?.quire_trace;
    if (version > FORMAT_VERSION) throw new Error(`It has trace format ${version}, this page reads up to ${FORMAT_VERSION}: open it with a newer Quire.`);
    if (!recording.live && version === undefined) throw new Error("It is no recording of Quire: record one with `quire trace PROMPT -o FILE.jsonl`.");
    if (!line || typeof line !== "object") throw new Error(`Line ${i + 1} is no event: the file is damaged, record it again.`);
    recording.add(line);
  });
  if (!recording.live) throw new Error("It is empty: record a prompt with `quire trace PROMPT -o FILE.jsonl`.");
  return recording;
}

/** Draw a whole trace from its text: what a saved page does. A recording with a story begins with it; another file can be opened. */
export function showTrace(text, root) {
  let [xray, story, error] = [null, null, ""];
  const open = (given) => {
    story?.pause();
    [xray, story, error] = [null, null, ""];
    try {
      const recording = readRecording(given);
      xray = new Xray(recording, { changed: draw, tell: () => { story = new Story(recording, { changed: draw, leave }); draw(); } });
      if (recording.story !== undefined) story = new Story(recording, { changed: draw, leave });
    } catch (problem) {
      error = problem.message;
    }
    globalThis.xray = xray;
    draw();
    draw(); // with the width that the first drawing made known
  };
  const leave = () => { story = null; draw(); draw(); };
  const read = async (event) => event.target.files[0] && open(await event.target.files[0].text());
  const draw = () => render(html`<main class="xray">${error && html`<p class="error" role="alert">This file cannot be shown. ${error}</p>`}
    ${story ? story.draw() : xray?.draw()}<p class="hint"><label>Open another recording (.jsonl) <input type="file" accept=".jsonl" onChange=${read} /></label></p></main>`, root);
  open(text);
  addEventListener("resize", draw);
}
