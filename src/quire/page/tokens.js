/**
 * An answer token by token, and the card of one token: its probability, its alternatives, the step that made it.
 * Next to read: chat.js.
 */
import { isTouch, isNarrow } from "./screen.js";
import { html } from "./xray.js";

const OPEN_MS = 80; // Over tokens that the pointer only crosses, or that move below it, nothing opens.
const CLOSE_MS = 300; // The pointer has this long to reach the card.
const MARGIN = 8;
const SPECIAL = "special token without text";
const percent = (logprob) => `${(100 * Math.exp(logprob)).toFixed(1)} %`;
const visible = (text) => (text === "" ? "∅" : text.replaceAll("\n", "⏎").replaceAll(" ", "␣"));
/** Return a name that a screen reader can say, also for white space. */
const named = (text) => (text === "" ? SPECIAL : text.trim() ? text : `white space ${visible(text)}`);

export class Tokens {
  constructor(chat) {
    Object.assign(this, { chat, node: null, place: 0, isPinned: false, timer: 0, isReturning: false, pointer: [] });
    addEventListener("keydown", (event) => event.key === "Escape" && this.node && this.leave());
    addEventListener("scroll", (event) => event.target.id === "log" && this.put(), true);
    addEventListener("mousemove", ({ clientX, clientY }) => { this.pointer = [clientX, clientY]; }); // comes behind mouseenter
    const outside = ({ target }) => this.node && !target.closest?.(".token, .token-panel") && this.close();
    addEventListener("pointerdown", outside);
    addEventListener("focusin", outside);
  }

  get token() {
    return this.node?.tokens[this.place];
  }

  open(node, place, isPinned) {
    clearTimeout(this.timer);
    Object.assign(this, { node, place, isPinned });
    this.chat.set({});
  }

  close() {
    clearTimeout(this.timer);
    this.node = null;
    this.chat.set({});
  }

  /** Close the card; the focus goes back to its token. */
  leave() {
    const isInside = document.activeElement?.closest(".token-panel");
    this.isReturning = true;
    if (isInside) document.querySelector(".token.on")?.focus();
    this.isReturning = false;
    this.close();
  }

  later(duration, act) {
    clearTimeout(this.timer);
    this.timer = setTimeout(act, duration);
  }

  /** Handlers that close the card when the pointer has left token and card, unless a click holds it. */
  hold() {
    return { onMouseEnter: () => clearTimeout(this.timer), onMouseLeave: () => !this.isPinned && this.later(CLOSE_MS, () => this.close()) };
  }

  step() {
    return this.chat.host.recording().known.get(this.node.id)?.stepOfToken[this.place - this.node.numBegun];
  }

  showStep() {
    const { xray } = this.chat.host;
    xray.set({ request: this.node.id });
    xray.choose(this.step());
  }

  /** Put the card below its token, or above it where there is more room. */
  put(card = document.querySelector(".token-panel")) {
    const token = card?.parentElement.querySelector(".token.on");
    if (!token?.checkVisibility()) return;
    const [at] = token.getClientRects();
    const { width, height } = card.getBoundingClientRect();
    if (isNarrow()) { // the card is at the bottom of the screen
      const hidden = at.bottom + MARGIN - card.getBoundingClientRect().top;
      if (hidden > 0) document.getElementById("log").scrollTop += hidden;
      return;
    }
    const below = at.bottom + height + MARGIN <= innerHeight;
    card.style.left = `${Math.max(MARGIN, Math.min(at.left, innerWidth - width - MARGIN))}px`;
    card.style.top = `${below ? at.bottom : Math.max(MARGIN, at.top - height)}px`;
  }

  /** Draw an answer, tinted by surprise: the less likely a token was, the stronger. */
  draw(node) {
    const choose = (place) => {
      this.open(node, place, true);
      if (!isNarrow()) this.showStep(); // else it would cut the answer for a picture that is out of sight
    };
    const onKey = (event) => {
      const offset = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      const place = Number(event.target.dataset.token);
      if (!offset || Number.isNaN(place)) return;
      event.preventDefault();
      event.currentTarget.querySelector(`[data-token="${Math.max(0, Math.min(node.tokens.length - 1, place + offset))}"]`)?.focus();
    };
    const isHere = this.node === node;
    const count = this.chat.numWritten(node);
    let length = 0;
    const drawn = node.tokens.slice(0, count).map((token, i) => {
      const isText = length < node.shown.length;
      length += token.text.length;
      if (!isText && !this.chat.showsSpecial) return null;
      const isOn = isHere && this.place === i;
      return html`<span role="button" data-token=${i} tabindex=${isOn || (!isHere && !i) ? 0 : -1} aria-label=${named(token.text)} aria-expanded=${isOn} style=${`--surprise: ${Math.min(60, -10 * token.logprob).toFixed(0)}%`}
        class=${`token ${isText ? "" : "special"} ${isOn ? "on" : ""} ${i === node.numBegun - 1 && node.numBegun ? "forked" : ""}`}
        onMouseEnter=${(event) => (event.clientX !== this.pointer[0] || event.clientY !== this.pointer[1]) && (!this.isPinned || !this.node) && this.later(OPEN_MS, () => this.open(node, i, false))} onFocus=${() => !this.isReturning && !(isHere && this.place === i) && this.open(node, i, false)}
        onClick=${() => choose(i)} onKeyDown=${(event) => event.key === "Enter" && choose(i)}>${isText ? token.text : ` ${token.text}`}</span>`;
    });
    return html`<div class="text" role="group" aria-label="Answer, token by token: arrow keys move between tokens" onKeyDown=${onKey} ...${this.hold()}>${drawn}</div>
      ${isHere && this.place < count && this.drawCard()}`;
  }

  drawCard() {
    const { chat, node, place, token } = this;
    const step = this.step();
    const others = token.top.filter((item) => item.id !== token.id);
    const items = [...others, token].sort((a, b) => b.logprob - a.logprob);
    const why = chat.whyForeign(node) || (chat.abort ? "Stop the answer first" : "");
    const fork = (chosen) => chat.fork(node, place, chosen);
    const show = () => { this.showStep(); chat.host.show("xray"); };
    return html`<div class="token-panel" role="dialog" aria-label=${`Token: ${named(token.text)}`} ref=${(card) => card && this.put(card)} ...${this.hold()}>
      <p><code class="piece">${visible(token.text)}</code> id ${token.id}, probability ${percent(token.logprob)}</p>
      ${others.length > 0 && html`<p class="hint">${why || `${isTouch ? "Tap" : "Click"} another token: the answer forks here.`}</p>`}
      <ul class="alternatives">${items.map((item) => html`<li class=${item === token ? "on" : ""}>${item === token ? html`<code>${visible(item.text)}</code>` : html`<button disabled=${why} title=${why || "Let the answer go on with this"} aria-label=${named(item.text)} onClick=${() => fork([item])}><code>${visible(item.text)}</code></button>`}
        <meter min="0" max="1" value=${Math.exp(item.logprob)} aria-hidden="true"></meter> <span class="number">${percent(item.logprob)}</span>${item === token ? html`<small>chosen</small>` : ""}</li>`)}</ul>
      <p class="actions">${others.length > 0 && html`<button disabled=${why} title=${why} onClick=${() => fork(others)}>Fork into all ${others.length}</button>`}
        ${step !== undefined && html`<button onClick=${show}>made by step ${step}</button>`}</p></div>`;
  }
}
