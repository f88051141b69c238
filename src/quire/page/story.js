/**
 * A recording as a story of 20 seconds: a prompt becomes tokens, blocks, a prefill, an answer, and the answer forks.
 * Everything that it shows is read from the recording. Next to read: recording.js; quire_lessons/story.py records one.
 */
import { html, plural } from "./drawing.js";
import { isPrefill, numShared } from "./recording.js";

const TICK_MS = 100;
const SECONDS = { tokens: 3.5, blocks: 3, prefill: 3.5, decode: 5, fork: 5 };
const visible = (text) => (text === "" ? "⟨special⟩" : text.replaceAll("\n", "⏎").replaceAll(" ", "␣"));

/** Plays a request of a recording. `options`: changed() asks for a new drawing; leave() shows the panes, if there are any; title. */
export class Story {
  constructor(recording, options) {
    Object.assign(this, { recording, options, second: 0, timer: null });
    this.id = recording.story?.id ?? recording.steps[0]?.requests[0].id;
    this.other = recording.known.get(recording.story?.fork)?.firstStep !== undefined ? recording.story.fork : null;
    this.scenes = this.id === undefined ? [] : this.findScenes();
    this.length = this.scenes.reduce((sum, scene) => sum + SECONDS[scene.name], 0);
    const isStill = matchMedia("(prefers-reduced-motion: reduce)").matches;
    if (isStill) this.second = this.endOf(0);
    else if (this.scenes.length) this.play();
  }

  play() {
    if (this.second >= this.length - 0.01) this.second = 0;
    this.pause();
    this.timer = setInterval(() => {
      if (document.hidden) return;
      this.second = Math.min(this.length, this.second + TICK_MS / 1000);
      if (this.second >= this.length) this.pause();
      this.options.changed();
    }, TICK_MS);
    this.options.changed();
  }

  pause() {
    clearInterval(this.timer);
    this.timer = null;
  }

  goTo(second) {
    this.pause();
    this.second = Math.max(0, Math.min(this.length, second));
    this.options.changed();
  }

  beginOf(index) {
    return this.scenes.slice(0, index).reduce((sum, scene) => sum + SECONDS[scene.name], 0);
  }

  /** Return the second at which a scene shows all that it has. */
  endOf(index) {
    return Math.max(0, this.beginOf(index + 1) - 0.01);
  }

  findScenes() {
    const { recording, id } = this;
    const steps = recording.steps.filter((step) => step.requests.some((share) => share.id === id));
    const decodes = steps.filter((step) => !isPrefill(step.requests.find((share) => share.id === id)));
    const prefills = steps.filter((step) => !decodes.includes(step));
    if (!prefills.length) return [];
    const { other } = this;
    const forked = other && recording.steps.filter((step) => step.requests.some((share) => share.id === other));
    const scenes = [{ name: "tokens", steps: prefills.slice(0, 1) }, { name: "blocks", steps: prefills.slice(0, 1) }, { name: "prefill", steps: prefills }];
    const alone = forked ? decodes.filter((step) => step.step_id < forked[0].step_id) : decodes;
    if (alone.length) scenes.push({ name: "decode", steps: alone });
    if (forked) scenes.push({ name: "fork", steps: forked, other });
    return scenes;
  }

  /** Return what is shown at this second: the scene, its place, the share of it that has passed, and the step. */
  now() {
    let index = 0;
    while (index < this.scenes.length - 1 && this.second >= this.beginOf(index + 1)) index++;
    const scene = this.scenes[index];
    const share = Math.min(1, (this.second - this.beginOf(index)) / (SECONDS[scene.name] * 0.85)); // then it rests
    const { steps } = scene;
    return { index, scene, share, step: steps[Math.min(steps.length - 1, Math.floor(share * steps.length))] };
  }

  /** Return the texts of a request's new tokens up to a step; ids or dots where only numbers were recorded. */
  written(id, step) {
    const shares = this.recording.steps.filter((item) => item.step_id <= step.step_id).flatMap((item) => item.requests.filter((share) => share.id === id && share.new.length));
    return shares.flatMap((share) => share.new.map((token, i) => share.text?.[i] ?? ` ${token ?? "·"}`));
  }

  caption({ scene, step }) {
    const { recording, id } = this;
    const { num_prompt_tokens } = recording.stateAt(this.scenes[0].steps[0].at).requests.get(id) ?? { num_prompt_tokens: 0 };
    const { block_size } = recording.live.header.engine;
    const blocks = Math.ceil(num_prompt_tokens / block_size);
    const seconds = (list) => list.reduce((sum, item) => sum + item.duration_s, 0);
    if (scene.name === "tokens") return `The prompt becomes ${plural(num_prompt_tokens, "token")}: pieces of text, each with a number.`;
    if (scene.name === "blocks") return `The scheduler gives it ${plural(blocks, "block")} of the KV cache, ${block_size} tokens each: its block table.`;
    if (scene.name === "prefill") return `Prefill: ${plural(scene.steps.length, "step")} computed all its tokens together, and kept their keys and values, in ${(1e3 * seconds(scene.steps)).toFixed(0)} ms.`;
    if (scene.name === "decode") return `Decode: each step computes one position and writes the next token, ${((1e3 * seconds(scene.steps)) / scene.steps.length).toFixed(0)} ms a step here.`;
    const shared = numShared(recording, [id, scene.other], step);
    return `Fork: another token begins a second future. Both share ${plural(shared, "block")} (×2): ${shared * block_size} tokens were not computed again.`;
  }

  draw() {
    if (!this.scenes.length) return html`<p class="hint">This recording has no prompt whose beginning it knows: the panes below show its steps.</p>`;
    const now = this.now();
    const { scene, share, step, index } = now;
    const isPast = (name) => this.scenes.findIndex((item) => item.name === name) < index;
    const prompt = this.recording.request(this.id).prompt;
    const { num_prompt_tokens } = this.recording.stateAt(this.scenes[0].steps[0].at).requests.get(this.id);
    const numShown = scene.name === "tokens" ? Math.ceil(share * num_prompt_tokens) : num_prompt_tokens;
    const ids = scene.other ? [this.id, scene.other] : [this.id];
    const from = index < 2 ? [] : this.written(this.id, step);
    return html`<section class="story" aria-label="How an answer comes about">
      <p class="caption" role="status">${index + 1}/${this.scenes.length} ${this.caption(now)}</p>
      <div class="controls"><button class="main" onClick=${() => (this.timer ? (this.pause(), this.options.changed()) : this.play())}>${this.timer ? "Pause" : this.second >= this.length - 0.01 ? "Replay" : "Play"}</button>
        <button aria-label="Scene before" disabled=${!index} onClick=${() => this.goTo(this.endOf(index - 1))}>◀</button>
        <button aria-label="Next scene" disabled=${index === this.scenes.length - 1 && share >= 1} onClick=${() => this.goTo(this.endOf(this.second < this.endOf(index) - 0.5 ? index : Math.min(index + 1, this.scenes.length - 1)))}>▶</button>
        <input type="range" aria-label="Second of the story" min="0" max=${this.length} step="0.1" value=${this.second} onInput=${(event) => this.goTo(Number(event.target.value))} />
        ${this.options.leave && html`<button onClick=${() => { this.pause(); this.options.leave(); }}>All steps and panes</button>`}</div>
      <div class="pieces" role="group" aria-label="Tokens of the prompt">${Array.from({ length: numShown }, (_, i) => html`<span class=${`piece ${prompt?.[i] === "" ? "special" : ""}`}>${prompt ? visible(prompt[i] ?? "…") : i + 1}</span>`)}</div>
      ${index > 0 && this.drawRows(ids, now, isPast)}
      ${scene.name === "prefill" && this.drawMask(num_prompt_tokens, share)}
      ${index >= 3 && html`<div class="futures">${ids.map((id) => html`<p>${this.badge(id)} ${id === this.id ? from.join("") : html`<span class="old">${this.begun(id)}</span><mark>${this.forkToken(id)}</mark>${this.written(id, step).join("")}`}</p>`)}</div>`}</section>`;
  }

  badge(id) {
    const { letter, colour } = this.recording.request(id);
    return html`<b class=${`badge o${colour}`}>${letter}</b>`;
  }

  /** Return the text that a fork was given of the answer, without its own first token. */
  begun(id) {
    const { num_prompt_tokens } = this.recording.stateAt(this.scenes[0].steps[0].at).requests.get(this.id);
    return this.recording.request(id).prompt?.slice(num_prompt_tokens, -1).join("") ?? "… ";
  }

  forkToken(id) {
    return this.recording.request(id).prompt?.at(-1) ?? "";
  }

  drawRows(ids, { scene, share, step }) {
    const { block_size } = this.recording.live.header.engine;
    const tables = ids.map((id) => this.recording.tablesOf(id, step).flat());
    const shared = ids.length > 1 ? numShared(this.recording, ids, step) : 0;
    return ids.map((id, row) => {
      const { colour } = this.recording.request(id);
      const { num_computed } = this.recording.stateAt(step.at).requests.get(id) ?? { num_computed: Infinity };
      const filledTo = scene.name === "blocks" ? 0 : scene.name === "prefill" ? num_computed * (scene.steps.length > 1 ? 1 : share) : num_computed;
      const numShown = scene.name === "blocks" ? Math.ceil(share * tables[row].length) : tables[row].length;
      return html`<div class="row">${this.badge(id)}<ol class="blocks" aria-label="Block table">${tables[row].slice(0, Math.min(numShown, 40)).map((block, i) => {
        const filled = Math.max(0, Math.min(block_size, filledTo - i * block_size));
        const isMany = i < shared;
        return html`<li class=${`block ${isMany ? "many" : ""}`}><i style=${{ width: `${(100 * filled) / block_size}%` }} class=${`o${colour}`}></i><span>${block || "–"}</span>${isMany && html`<em>×${ids.length}</em>`}</li>`;
      })}</ol></div>`;
    });
  }

  /** Draw which earlier tokens each token of the prompt sees. */
  drawMask(count, share) {
    const size = 84;
    const rows = Math.max(1, Math.round(share * count));
    const cell = size / count;
    const path = Array.from({ length: rows }, (_, i) => `M0 ${(i * cell).toFixed(2)}h${((i + 1) * cell).toFixed(2)}v${cell.toFixed(2)}H0z`).join("");
    return html`<div class="row"><svg role="img" aria-label="Each token sees itself and the tokens before it" width=${size} height=${size} viewBox=${`0 0 ${size} ${size}`}><rect class="frame" width=${size} height=${size} /><path class=${`fill${this.recording.request(this.id).colour}`} d=${path} /></svg>
      <small>Rows: the ${count} tokens. Columns: what each of them sees, itself and all before it.</small></div>`;
  }
}
