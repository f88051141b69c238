/**
 * The chat: a tree of messages, of which one path is shown. Another answer, an edited message and a fork at a token are
 * branches; an answer that begins with tokens of another one is asked for with these tokens, whose blocks are cached.
 * Next to read: answers.js, parameters.js, conversations.js, app.js.
 */
import { Calls, Code, asJson, statistics, take } from "./answers.js";
import { Conversations } from "./conversations.js";
import { Markdown, copy } from "./markdown.js";
import { Parameters, Prompt, RequestShown, promptOf, requestOf } from "./parameters.js";
import { local } from "./store.js";
import { absorb, newKey } from "./stored.js";
import { isTouch } from "./screen.js";
import { Tokens } from "./tokens.js";
import { html } from "./xray.js";

const RETRY_MS = 1000;

/** `host` has ask, events, changed, key, model, status, recording and xray of the page, all but the last as functions. */
export class Chat {
  constructor(host) {
    Object.assign(this, { host, params: {}, system: "", extra: "", form: local.get("quire-answers") ?? "text", showsSpecial: false, abort: null, writing: [] });
    this.tokens = new Tokens(this);
    this.clear();
    this.conversations = new Conversations(this);
  }

  clear() {
    Object.assign(this, { nodes: [], chosen: new Map(), removed: [], draft: "", editing: null, failed: null, split: null, prompt: null, note: "" });
    this.tokens.node = null;
  }

  /** Save soon. */
  keep() {
    this.conversations.touch();
  }

  /** Show a stored conversation. */
  restore(record) {
    const { params, system, extra, draft } = record;
    this.clear();
    Object.assign(this, { params: { ...params }, system, extra, draft });
    absorb(this, record);
  }

  set(values) {
    Object.assign(this, values);
    this.host.changed();
  }

  children(parent) {
    return this.nodes.filter((node) => node.parent === parent);
  }

  /** Return the messages from the first one to a node's, or of the path that is shown. */
  path(last) {
    const path = [];
    if (last) {
      for (let node = last; node; node = node.parent) path.unshift(node);
      return path;
    }
    for (let parent = null; ; parent = path.at(-1)) {
      const children = this.children(parent);
      if (!children.length) return path;
      path.push(children.includes(this.chosen.get(parent)) ? this.chosen.get(parent) : children.at(-1));
    }
  }

  add(fields) {
    const model = fields.role === "assistant" ? this.host.model()?.id ?? null : null;
    const node = { key: newKey(), content: "", reasoning: "", shown: "", tokens: [], calls: [], callId: null, results: [], numBegun: 0, numTogether: 1, stats: null, error: "", reason: null, id: "", model, vocabulary: null, started: 0, firstToken: 0, ...fields };
    this.nodes.push(node);
    this.choose(node);
    return node;
  }

  choose(node) {
    this.chosen.set(node.parent, node);
    this.keep();
  }

  remove(node) {
    this.nodes = this.nodes.filter((other) => other !== node);
    this.removed.push(node.key);
    this.chosen.delete(node.parent);
    this.keep();
  }

  /** Return whether the model has no chat template: then texts are continued as they are. */
  isPlain() {
    return this.host.model()?.has_chat_template === false;
  }

  /** Return why the model cannot go on behind the tokens of an answer; "" if it can. */
  whyForeign(node) {
    const { id, vocabulary } = this.host.model() ?? {};
    const isSame = node.vocabulary && vocabulary ? node.vocabulary === vocabulary : node.model === id;
    return isSame || !node.tokens.length ? "" : `${node.model ?? "Another model"} wrote this with another vocabulary: ${id} cannot go on behind its tokens. Regenerate asks ${id} anew.`;
  }

  // --- Requests -------------------------------------------------------------------------------

  async send(text, parent = this.path().at(-1) ?? null) {
    if (!text.trim() || this.abort) return;
    this.draft = "";
    await this.deliver([{ role: "user", content: text }], parent, () => {
      this.draft = [text, this.draft].filter(Boolean).join("\n\n");
      return () => this.send(this.draft);
    });
  }

  /** Send the results of an answer's calls of tools, which the reader has typed. */
  async sendResults(node) {
    if (this.abort) return;
    const results = node.calls.map(({ id }, i) => ({ role: "tool", content: node.results[i] ?? "", callId: id }));
    await this.deliver(results, node, () => () => this.sendResults(node));
  }

  /** Add messages behind `parent` and ask for the answer to them. A message that failed is taken out again, for it must
   *  not be part of the next request; `putBack` then gives it back to the reader, and returns what sends it again. */
  async deliver(messages, parent, putBack) {
    Object.assign(this, { editing: null, failed: null, split: null, note: "" });
    this.tokens.node = null;
    const added = [];
    for (const fields of messages) added.push(this.add({ ...fields, parent: added.at(-1) ?? parent }));
    const answer = this.add({ role: "assistant", parent: added.at(-1) });
    await this.write([answer]);
    if (!answer.error || answer.tokens.length) return;
    for (const node of [answer, ...added]) this.remove(node);
    this.set({ failed: { reason: answer.error, retry: putBack() } });
  }

  regenerate(node) {
    this.split = null;
    return this.write([this.add({ role: "assistant", parent: node.parent })]);
  }

  /** Let an answer go on with other tokens at a place: each one is the beginning of a sibling. */
  fork(node, place, others) {
    const kept = node.tokens.slice(0, place);
    const [reasoning, content] = kept.at(-1)?.ends ?? [0, 0];
    const siblings = others.map(({ id, text, logprob }) => {
      const isReasoning = !node.content || (reasoning < node.reasoning.length && !content);
      const parts = { reasoning: node.reasoning.slice(0, reasoning), content: node.content.slice(0, content) };
      parts[isReasoning && node.reasoning ? "reasoning" : "content"] += text;
      const token = { id, text, logprob, top: node.tokens[place].top, ends: [parts.reasoning.length, parts.content.length] };
      return this.add({ role: "assistant", parent: node.parent, ...parts, shown: parts.reasoning + parts.content, tokens: [...kept, token], numBegun: place + 1 });
    });
    this.tokens.node = null;
    this.set({ split: node.parent });
    this.host.forked();
    return this.write(siblings);
  }

  /** Ask for answers to one message; each goes on behind the tokens that it has. */
  async write(nodes) {
    if (this.abort) return;
    this.abort = new AbortController();
    this.writing = nodes;
    for (const node of nodes) Object.assign(node, { numTogether: nodes.length, error: "", reason: null, stats: null, numBegun: node.tokens.length, started: performance.now(), firstToken: 0, decoder: new TextDecoder() });
    this.host.xray.set({ chosen: null }); // an answer that begins after the chosen step would not be drawn
    try {
      const request = await requestOf(this, this.path(nodes[0].parent), nodes);
      for (const node of nodes) node.request = request;
      while (!(await this.read(nodes, request))) await pause(RETRY_MS, this.abort.signal);
    } catch (error) {
      for (const node of nodes) {
        if (error.name === "AbortError") node.reason ??= "stopped";
        else if (!node.reason) node.error = error.message;
      }
    }
    Object.assign(this, { abort: null, writing: [] });
    this.keep();
    this.host.changed();
  }

  /** Read the answers of one request; return false if the model is not there yet, and may be asked again. */
  async read(nodes, { route, body }) {
    const { ask, events, changed, model } = this.host;
    let response;
    try {
      response = await ask(route, body, this.abort.signal);
    } catch (error) {
      if (error.code === "engine_not_ready") return false;
      throw error;
    }
    for await (const data of events(response)) {
      if (data === "[DONE]") return true;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Error(chunk.error.message);
      const requestId = chunk.id.replace(/^(chat)?cmpl-/, "req-");
      nodes.forEach((node, i) => {
        node.id = nodes.length > 1 ? `${requestId}-${i}` : requestId;
        node.stats = { usage: chunk.usage ?? node.stats?.usage, timings: chunk.timings ?? node.stats?.timings };
        Object.assign(node, { model: chunk.model, vocabulary: model()?.vocabulary ?? null });
      });
      for (const choice of chunk.choices) take(nodes[choice.index], choice);
      this.keep();
      changed();
    }
    throw new Error("the connection ended before the answer");
  }

  async showPrompt() {
    const { ask, model } = this.host;
    try {
      const draft = this.draft ? [{ role: "user", content: this.draft, calls: [] }] : [];
      const { tokens } = await (await ask("/tokenize", { model: model()?.id, ...promptOf(this, [...this.path(), ...draft]) })).json();
      const { prompt } = await (await ask("/detokenize", { model: model()?.id, tokens })).json();
      this.set({ prompt: { count: tokens.length, text: prompt, tokens } });
    } catch (error) {
      this.set({ prompt: { error: error.message } });
    }
  }

  // --- Drawing --------------------------------------------------------------------------------

  draw() {
    const { model, key } = this.host;
    const path = this.path();
    const request = path.findLast((node) => node.request)?.request;
    return html`<section class="chat" aria-label="Chat"><h2 class="unseen">Chat</h2>
      ${this.conversations.drawBar(this.drawForms())}
      ${this.form === "tokens" && html`<div class="tools small">${isTouch ? "Tap a token for its alternatives." : "Point at a token; a click shows its step."}
        <label><input type="checkbox" checked=${this.showsSpecial} onChange=${(e) => this.set({ showsSpecial: e.target.checked })} /> special tokens</label></div>`}
      <div id="log" tabindex="0" role="log" aria-label="Conversation">
        ${!path.length && (this.isPlain() ? html`<p class="hint">${model().id} has no chat template: it continues texts. Begin one.</p>` : this.host.welcome())}
        ${path.map((node) => this.split === node.parent && node.role === "assistant" ? this.drawSplit(node.parent) : this.drawMessage(node))}
      </div>
      ${this.note && html`<p class="hint" role="status">${this.note}</p>`}
      ${this.failed && html`<p class="error" role="alert">Not sent: ${this.failed.reason} <button onClick=${this.failed.retry}>Retry</button></p>`}
      <div class="under"><${Parameters} chat=${this} model=${model()} /><${Prompt} chat=${this} /><${RequestShown} path=${request?.route} body=${request?.body} apiKey=${key()} /></div>
      ${this.drawBox()}
    </section>`;
  }

  drawForms() {
    const show = (form) => { local.set("quire-answers", form); this.set({ form }); };
    return html`<span role="group" aria-label="Answers as">${["text", "tokens"].map((form) => html`<button aria-pressed=${this.form === form} onClick=${() => show(form)}>${form === "text" ? "Text" : "Tokens"}</button>`)}</span>`;
  }

  drawBox() {
    const submit = (event) => { event.preventDefault(); this.send(this.draft); };
    const onKey = (event) => { if (event.key === "Enter" && !event.shiftKey && !event.isComposing && !this.isPlain()) submit(event); };
    const [name, hint] = this.isPlain() ? ["Text to continue", "Text to continue…"] : ["Message", "Message…"];
    return html`<form onSubmit=${submit}>
      <textarea aria-label=${name} rows="2" placeholder=${hint} value=${this.draft} onInput=${(e) => { this.draft = e.target.value; this.keep(); }} onKeyDown=${onKey}></textarea>
      ${this.abort ? html`<button type="button" class="main" onClick=${() => this.abort.abort()}>Stop</button>` : html`<button class="main">Send</button>`}
    </form>`;
  }

  drawSplit(parent) {
    const answers = this.children(parent);
    const begun = answers.filter((node) => node.numBegun);
    const cached = begun[0]?.stats?.usage?.prompt_tokens_details?.cached_tokens;
    return html`<div class="split" style=${`--columns: ${Math.min(answers.length, 4)}`}>${answers.map((node) => this.drawMessage(node))}</div>
      ${cached !== undefined && html`<p class="hint">${cached} tokens were in the prefix cache and not computed again: the futures share their blocks.</p>`}`;
  }

  drawMessage(node) {
    const siblings = this.children(node.parent);
    const at = siblings.indexOf(node);
    const move = (offset) => { this.choose(siblings[at + offset]); this.set({ split: null }); };
    const isUser = node.role === "user";
    const isSplit = this.split === node.parent && node.role === "assistant";
    const { recording, xray, model } = this.host;
    return html`<article class=${node.role}><h3>${isUser ? "You" : node.role === "tool" ? html`Result of <code>${this.toolOf(node)}</code>` : html`${recording().known.has(node.id) && xray.badge(node.id)} ${node.model ?? "Model"}`}
        ${siblings.length > 1 && !isSplit && html`<span class="branches"><button aria-label="Branch before" disabled=${!at} onClick=${() => move(-1)}>‹</button> ${at + 1} of ${siblings.length} <button aria-label="Branch behind" disabled=${at === siblings.length - 1} onClick=${() => move(1)}>›</button></span>`}</h3>
      ${isUser ? this.drawQuestion(node) : node.role === "tool" ? html`<${Code} language="result" text=${asJson(node.content) ?? node.content} />` : this.form === "tokens" ? this.tokens.draw(node) : this.drawText(node)}
      ${node.calls.length > 0 && html`<${Calls} calls=${node.calls} />`}
      ${this.writing.includes(node) && !node.firstToken && html`<p class="hint" role="status">${waiting(this.host.status())}</p>`}
      ${node.error && html`<p class="error" role="alert">${node.error}</p>`}
      ${node.stats && html`<p class="stats">${statistics(node, model())}</p>`}
      ${this.drawActions(node, siblings, isSplit)}
      ${node.calls.length > 0 && !this.abort && (!this.children(node).length || this.editing?.node === node) && this.drawResults(node)}</article>`;
  }

  drawActions(node, siblings, isSplit) {
    const isBusy = Boolean(this.abort);
    if (this.editing?.node === node) return null;
    const [isUser, isAnswer] = [node.role === "user", node.role === "assistant"];
    const keep = () => { this.choose(node); this.set({ split: null }); };
    const why = this.whyForeign(node);
    const isCut = isAnswer && (["length", "stopped"].includes(node.reason) || node.error || (!node.reason && !this.writing.includes(node)));
    return html`<div class="actions"><button onClick=${(e) => copy(node.content, e.target)}>Copy</button>
      ${isUser && html`<button disabled=${isBusy} onClick=${() => this.set({ editing: { node, text: node.content } })}>Edit</button>`}
      ${isAnswer && html`<button disabled=${isBusy} onClick=${() => this.regenerate(node)}>Regenerate</button>`}
      ${node.calls.length > 0 && this.children(node).length > 0 && html`<button disabled=${isBusy} onClick=${() => this.set({ editing: { node } })}>Other results</button>`}
      ${isCut && node.tokens.length > 0 && html`<button disabled=${isBusy || why} title=${why} onClick=${() => this.write([node])}>Continue</button>`}
      ${isAnswer && siblings.length > 1 && (isSplit ? html`<button onClick=${keep}>Go on with this</button>` : html`<button onClick=${() => this.set({ split: node.parent })}>Side by side</button>`)}</div>
      ${isCut && why && html`<p class="hint">${why}</p>`}`;
  }

  drawQuestion(node) {
    const { editing } = this;
    if (editing?.node !== node) return html`<div class="text">${node.content}</div>`;
    const submit = (event) => { event.preventDefault(); this.send(editing.text, node.parent); };
    return html`<form onSubmit=${submit}><textarea aria-label="Edited message" rows="3" onKeyDown=${(e) => e.key === "Escape" && this.set({ editing: null })} value=${editing.text} onInput=${(e) => { editing.text = e.target.value; }}></textarea>
      <button class="main">Send</button><button type="button" onClick=${() => this.set({ editing: null })}>Cancel</button></form>`;
  }

  /** Return the name of the tool that gave a result. */
  toolOf({ callId, parent }) {
    const calls = this.path(parent).flatMap((node) => node.calls);
    return calls.findLast(({ id }) => id === callId)?.name ?? "a tool";
  }

  /** Draw a box for the result of each call, since the page runs no tools. */
  drawResults(node) {
    const submit = (event) => { event.preventDefault(); this.sendResults(node); };
    return html`<form class="results" onSubmit=${submit}>${node.calls.map(({ name }, i) => html`<label><span>Result of <code>${name}</code></span><textarea rows="2" placeholder="What the tool returned, as text or JSON" value=${node.results[i] ?? ""} onInput=${(e) => { node.results[i] = e.target.value; }}></textarea></label>`)}
      <button class="main">Send ${node.calls.length > 1 ? "results" : "result"}</button></form>`;
  }

  /** Return how many tokens the step that the X-ray shows knows; the others are not drawn. */
  numWritten(node) {
    return this.host.xray.numWritten(node.id, node.numBegun, node.tokens.length);
  }

  drawText(node) {
    const count = this.numWritten(node);
    const [reasoning, content] = count ? node.tokens[count - 1].ends : [0, 0];
    if (count < node.tokens.length) return this.drawWritten({ reasoning: node.reasoning.slice(0, reasoning), content: node.content.slice(0, content) });
    return this.drawWritten(node);
  }

  drawWritten(node) {
    const json = node.reason && !this.isPlain() && asJson(node.content);
    return html`${node.reasoning && html`<details class="reasoning" open=${!node.content}><summary>Reasoning</summary><${Markdown} text=${node.reasoning} /></details>`}
      ${json ? html`<${Code} language="JSON" text=${json} />` : html`<${Markdown} text=${node.content} />`}`;
  }
}

/** Return what an answer waits for, by the state of the server. */
function waiting(status) {
  return status === "ready" ? "reading the prompt…" : `the model is ${status}: the answer follows`;
}

/** Wait. Throws an AbortError when the signal aborts. */
function pause(duration, signal) {
  return new Promise((done, failed) => {
    const stop = () => { clearTimeout(timer); failed(signal.reason); };
    const timer = setTimeout(() => { signal.removeEventListener("abort", stop); done(); }, duration);
    signal.addEventListener("abort", stop, { once: true });
  });
}
