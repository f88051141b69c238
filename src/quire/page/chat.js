/**
 * The chat: a tree of messages, of which one path is shown. Another answer, an edited message and a fork at a token are
 * branches; an answer that begins with tokens of another one is asked for with these tokens, whose blocks are cached.
 * Next to read: markdown.js, app.js.
 */
import { Markdown, copy } from "./markdown.js";
import { html } from "./xray.js";

const FIELDS = [
  ["temperature", "0", "2", "0.1"], ["top_p", "0", "1", "0.05"], ["top_k", "0", "", "1"], ["max_tokens", "1", "", "1"], ["seed", "0", "", "1"],
];
const NUM_TOP = 8;
const percent = (logprob) => `${(100 * Math.exp(logprob)).toFixed(1)} %`;
const visible = (text) => (text === "" ? "∅" : text.replaceAll("\n", "⏎").replaceAll(" ", "␣"));
const decode = (bytes) => new TextDecoder().decode(new Uint8Array(bytes ?? []));

/** `host` has ask, events, changed, key, model, recording and xray of the page, the first three as functions. */
export class Chat {
  constructor(host) {
    Object.assign(this, { host, params: { max_tokens: "256" }, system: "", form: localStorage.getItem("quire-answers") ?? "text" });
    this.clear();
  }

  clear() {
    Object.assign(this, { nodes: [], chosen: new Map(), draft: "", token: null, editing: null, failed: null, split: null, abort: null, prompt: null });
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
    const node = { content: "", reasoning: "", shown: "", tokens: [], numBegun: 0, stats: null, error: "", reason: null, id: "", ...fields };
    this.nodes.push(node);
    this.chosen.set(node.parent, node);
    return node;
  }

  remove(node) {
    this.nodes = this.nodes.filter((other) => other !== node);
    this.chosen.delete(node.parent);
  }

  // --- Requests -------------------------------------------------------------------------------

  body(path) {
    const messages = path.filter((turn) => turn.content || turn.role === "user").map(({ role, content, reasoning }) => ({ role, content, ...(reasoning && { reasoning }) }));
    if (this.system.trim()) messages.unshift({ role: "system", content: this.system });
    const chosen = Object.fromEntries(Object.entries(this.params).filter(([, value]) => value !== "").map(([name, value]) => [name, Number(value)]));
    return { model: this.host.model()?.id, messages, ...chosen, stream: true, stream_options: { include_usage: true }, logprobs: true, top_logprobs: NUM_TOP, return_token_ids: true, return_tokens_as_token_ids: true };
  }

  async send(text, parent = this.path().at(-1) ?? null) {
    if (!text.trim() || this.abort) return;
    const question = this.add({ role: "user", content: text, parent });
    Object.assign(this, { draft: "", token: null, editing: null, failed: null, split: null });
    const answer = this.add({ role: "assistant", parent: question });
    await this.write([answer]);
    if (!answer.error || answer.tokens.length) return;
    // A message that failed must not be part of the next request.
    this.remove(answer);
    this.remove(question);
    this.set({ draft: text, failed: answer.error });
  }

  regenerate(node) {
    this.split = null;
    return this.write([this.add({ role: "assistant", parent: node.parent })]);
  }

  /** Let an answer go on with other tokens at a place: each one is the beginning of a sibling. */
  fork(node, place, others) {
    const kept = node.tokens.slice(0, place);
    const [reasoning, content] = kept.at(-1)?.ends ?? [0, 0];
    const siblings = others.map(({ id, text, name, logprob }) => {
      const isReasoning = !node.content || (reasoning < node.reasoning.length && !content);
      const parts = { reasoning: node.reasoning.slice(0, reasoning), content: node.content.slice(0, content) };
      parts[isReasoning && node.reasoning ? "reasoning" : "content"] += text;
      const token = { id, text, name, logprob, top: node.tokens[place].top, ends: [parts.reasoning.length, parts.content.length] };
      return this.add({ role: "assistant", parent: node.parent, ...parts, shown: parts.reasoning + parts.content, tokens: [...kept, token], numBegun: place + 1 });
    });
    this.set({ split: node.parent, token: null });
    return this.write(siblings);
  }

  /** Ask for answers to one message; each goes on behind the tokens that it has. */
  async write(nodes) {
    if (this.abort) return;
    const { ask, events, changed } = this.host;
    const body = this.body(this.path(nodes[0].parent));
    if (nodes.some((node) => node.tokens.length)) body.answer_token_ids = nodes.map((node) => node.tokens.map(({ id }) => id));
    for (const node of nodes) Object.assign(node, { body, numTogether: nodes.length, error: "", reason: null, stats: null, numBegun: node.tokens.length, started: performance.now(), firstToken: 0, decoder: new TextDecoder() });
    this.abort = new AbortController();
    changed();
    try {
      for await (const data of events(await ask("/v1/chat/completions", body, this.abort.signal))) {
        if (data === "[DONE]") break;
        const chunk = JSON.parse(data);
        if (chunk.error) throw new Error(chunk.error.message);
        const requestId = chunk.id.replace("chatcmpl-", "req-");
        nodes.forEach((node, i) => {
          node.id = nodes.length > 1 ? `${requestId}-${i}` : requestId;
          node.stats = { usage: chunk.usage ?? node.stats?.usage, timings: chunk.timings ?? node.stats?.timings };
        });
        for (const choice of chunk.choices) take(nodes[choice.index], choice);
        changed();
      }
    } catch (error) {
      for (const node of nodes) {
        if (error.name === "AbortError") node.reason ??= "stopped";
        else node.error = error.message;
      }
    }
    this.abort = null;
    changed();
  }

  async showPrompt() {
    const { ask, model } = this.host;
    try {
      const draft = this.draft ? [{ role: "user", content: this.draft }] : [];
      const { messages } = this.body([...this.path().filter((turn) => turn.content), ...draft]);
      const { tokens } = await (await ask("/tokenize", { model: model()?.id, messages })).json();
      const { prompt } = await (await ask("/detokenize", { model: model()?.id, tokens })).json();
      this.set({ prompt: { count: tokens.length, text: prompt, tokens } });
    } catch (error) {
      this.set({ prompt: { error: error.message } });
    }
  }

  // --- Drawing --------------------------------------------------------------------------------

  stepOfToken() {
    const { node, place } = this.token;
    return this.host.recording().known.get(node.id)?.stepOfToken[place - node.numBegun];
  }

  showStep() {
    this.host.xray.set({ request: this.token.node.id });
    this.host.xray.choose(this.stepOfToken());
  }

  draw() {
    const submit = (event) => { event.preventDefault(); this.send(this.draft); };
    const onKey = (event) => { if (event.key === "Enter" && !event.shiftKey && !event.isComposing) submit(event); };
    const path = this.path();
    const show = (form) => { localStorage.setItem("quire-answers", form); this.set({ form }); };
    return html`<section class="chat" aria-label="Chat">
      <div class="bar"><h2>Chat</h2><span role="group" aria-label="Answers as">${["text", "tokens"].map((form) => html`<button aria-pressed=${this.form === form} onClick=${() => show(form)}>${form === "text" ? "Text" : "Tokens"}</button>`)}</span></div>
      <div id="log" tabindex="0" role="log" aria-label="Conversation">
        ${!path.length && this.host.welcome()}
        ${path.map((node) => this.split === node.parent && node.role === "assistant" ? this.drawSplit(node.parent) : this.drawMessage(node))}
      </div>
      ${this.form === "tokens" && html`<div class="token-panel">${this.drawToken()}</div>`}
      ${this.failed && html`<p class="error" role="alert">Not sent: ${this.failed} <button onClick=${() => this.send(this.draft)}>Retry</button></p>`}
      <form onSubmit=${submit}>
        <textarea aria-label="Message" rows="2" placeholder="Message…" value=${this.draft} onInput=${(e) => { this.draft = e.target.value; }} onKeyDown=${onKey}></textarea>
        ${this.abort ? html`<button type="button" class="main" onClick=${() => this.abort.abort()}>Stop</button>` : html`<button class="main">Send</button>`}
      </form>
      ${this.drawDetails()}
    </section>`;
  }

  drawDetails() {
    const { prompt } = this;
    const body = this.path().findLast((node) => node.body)?.body;
    return html`<details><summary>Parameters</summary><div class="fields">
        ${FIELDS.map(([name, min, max, step]) => html`<label>${name}<input type="number" min=${min} max=${max || undefined} step=${step} placeholder="model's" value=${this.params[name] ?? ""}
          onInput=${(e) => { this.params[name] = e.target.value; }} /></label>`)}
        <label class="wide">system message<textarea rows="2" value=${this.system} onInput=${(e) => { this.system = e.target.value; }} placeholder="the template's"></textarea></label></div>
        <button onClick=${() => { this.clear(); this.host.changed(); }} disabled=${this.abort}>New conversation</button></details>
      <details onToggle=${(e) => e.target.open && this.showPrompt()}><summary>Rendered prompt</summary>
        ${prompt && (prompt.error ? html`<p class="error">${prompt.error}</p>` : html`<p>${prompt.count} tokens. <button onClick=${() => this.showPrompt()}>Render again</button></p><pre tabindex="0">${prompt.text}</pre><pre tabindex="0">${JSON.stringify(prompt.tokens)}</pre>`)}</details>
      <details><summary>Request as JSON and curl</summary>${body ? html`<pre tabindex="0">${JSON.stringify(body, null, 2)}</pre><pre tabindex="0">${curl(body, this.host.key())}</pre>` : html`<p class="hint">No request yet.</p>`}</details>`;
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
    const move = (offset) => { this.chosen.set(node.parent, siblings[at + offset]); this.set({ split: null }); };
    const isUser = node.role === "user";
    const isSplit = this.split === node.parent && !isUser;
    const { recording, xray, model } = this.host;
    return html`<article class=${node.role}><h3>${isUser ? "You" : html`${recording().known.has(node.id) && xray.badge(node.id)} ${model()?.id ?? "Model"}`}
        ${siblings.length > 1 && !isSplit && html`<span class="branches"><button aria-label="Branch before" disabled=${!at} onClick=${() => move(-1)}>‹</button> ${at + 1} of ${siblings.length} <button aria-label="Branch behind" disabled=${at === siblings.length - 1} onClick=${() => move(1)}>›</button></span>`}</h3>
      ${isUser ? this.drawQuestion(node) : this.form === "tokens" ? this.drawTokens(node) : this.drawText(node)}
      ${node.error && html`<p class="error" role="alert">${node.error}</p>`}
      ${!isUser && node.stats && html`<p class="stats">${statistics(node, model())}</p>`}
      ${this.drawActions(node, siblings, isSplit)}</article>`;
  }

  drawActions(node, siblings, isSplit) {
    const isBusy = Boolean(this.abort);
    if (this.editing?.node === node) return null;
    const isUser = node.role === "user";
    const keep = () => { this.chosen.set(node.parent, node); this.set({ split: null }); };
    return html`<div class="actions"><button onClick=${(e) => copy(node.content, e.target)}>Copy</button>
      ${isUser && html`<button disabled=${isBusy} onClick=${() => this.set({ editing: { node, text: node.content } })}>Edit</button>`}
      ${!isUser && html`<button disabled=${isBusy} onClick=${() => this.regenerate(node)}>Regenerate</button>`}
      ${!isUser && node.tokens.length > 0 && (["length", "stopped"].includes(node.reason) || node.error) && html`<button disabled=${isBusy} onClick=${() => this.write([node])}>Continue</button>`}
      ${!isUser && siblings.length > 1 && (isSplit ? html`<button onClick=${keep}>Go on with this</button>` : html`<button onClick=${() => this.set({ split: node.parent })}>Side by side</button>`)}</div>`;
  }

  drawQuestion(node) {
    const { editing } = this;
    if (editing?.node !== node) return html`<div class="text">${node.content}</div>`;
    const submit = (event) => { event.preventDefault(); this.send(editing.text, node.parent); };
    return html`<form onSubmit=${submit}><textarea aria-label="Edited message" rows="3" value=${editing.text} onInput=${(e) => { editing.text = e.target.value; }}></textarea>
      <button class="main">Send</button><button type="button" onClick=${() => this.set({ editing: null })}>Cancel</button></form>`;
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
    return html`${node.reasoning && html`<details class="reasoning" open=${!node.content}><summary>Reasoning</summary><${Markdown} text=${node.reasoning} /></details>`}
      <${Markdown} text=${node.content} />`;
  }

  /** Draw an answer token by token, tinted by surprise: the less likely a token was, the stronger. */
  drawTokens(node) {
    const select = (place, jumps) => {
      this.token = { node, place };
      if (jumps) this.showStep();
      this.host.changed();
    };
    const onKey = (event) => {
      const offset = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      const place = Number(event.target.dataset.token);
      if (!offset || Number.isNaN(place)) return;
      event.preventDefault();
      event.currentTarget.querySelector(`[data-token="${Math.max(0, Math.min(node.tokens.length - 1, place + offset))}"]`)?.focus();
    };
    let length = 0;
    return html`<div class="text" role="group" aria-label="Answer, token by token: arrow keys move between tokens" onKeyDown=${onKey}>${node.tokens.slice(0, this.numWritten(node)).map((token, i) => {
      const isText = length < node.shown.length;
      length += token.text.length;
      const isOn = this.token?.node === node && this.token.place === i;
      return html`<span role="button" data-token=${i} tabindex=${i ? -1 : 0} aria-label=${visible(token.text)} style=${`--surprise: ${Math.min(60, -10 * token.logprob).toFixed(0)}%`}
        class=${`token ${isText ? "" : "special"} ${isOn ? "on" : ""} ${i === node.numBegun - 1 && node.numBegun ? "forked" : ""}`}
        onMouseEnter=${() => select(i)} onFocus=${() => select(i)} onClick=${() => select(i, true)}
        onKeyPress=${(event) => event.key === "Enter" && select(i, true)}>${isText ? token.text : node.reason ? ` ${token.text}` : ""}</span>`;
    })}</div>`;
  }

  drawToken() {
    if (!this.token) return html`<p class="hint">Point at a token of an answer for its probability, its alternatives, and the step that made it. A click on an alternative lets the answer go on with it.</p>`;
    const { node, place } = this.token;
    const token = node.tokens[place];
    const step = this.stepOfToken();
    const others = token.top.filter((item) => item.id !== token.id);
    const items = [...others, token].sort((a, b) => b.logprob - a.logprob);
    const isBusy = Boolean(this.abort);
    return html`<p><code class="piece">${visible(token.text)}</code> id ${token.id}, probability ${percent(token.logprob)}
        ${step !== undefined && html` <button onClick=${() => this.showStep()}>made by step ${step}</button>`}
        ${others.length > 0 && html` <button disabled=${isBusy} onClick=${() => this.fork(node, place, others)}>Fork into all ${others.length}</button>`}</p>
      <ul class="alternatives">${items.map((item) => html`<li class=${item === token ? "on" : ""}>${item === token ? html`<code>${visible(item.text)}</code>` : html`<button disabled=${isBusy} title="Let the answer go on with this" onClick=${() => this.fork(node, place, [item])}><code>${visible(item.text)}</code></button>`}
        <meter min="0" max="1" value=${Math.exp(item.logprob)} aria-hidden="true"></meter> ${percent(item.logprob)}${item === token ? " ← chosen" : ""}</li>`)}</ul>`;
  }
}

/** Append a chunk's part of a choice to its message. */
function take(node, { delta, logprobs, token_ids, finish_reason }) {
  const [content, reasoning] = [delta.content ?? "", delta.reasoning_content ?? ""];
  const before = node.content.length;
  node.content += content;
  node.reasoning += reasoning;
  node.shown += reasoning + content;
  node.reason = finish_reason ?? node.reason;
  const entries = (logprobs?.content ?? []).map((entry, i) => ({ entry, id: token_ids[i], text: node.decoder.decode(new Uint8Array(entry.bytes ?? []), { stream: true }) }));
  // Where the tokens are the text, each one's end is known; else all end with their chunk.
  const isPlain = !reasoning && entries.map(({ text }) => text).join("") === content;
  let length = before;
  for (const { entry, id, text } of entries) {
    node.firstToken ||= performance.now();
    length += text.length;
    const top = entry.top_logprobs.map((item) => ({ id: Number(item.token.replace("token_id:", "")), text: decode(item.bytes), logprob: item.logprob }));
    node.tokens.push({ id, text, logprob: entry.logprob, top, ends: [node.reasoning.length, isPlain ? length : node.content.length] });
  }
}

function statistics({ stats: { usage, timings }, tokens, numBegun, numTogether, firstToken, started, reason }, model) {
  const parts = reason ? [`[${reason}]`] : [];
  if (usage) parts.push(`${numTogether > 1 ? `${numTogether} prompts` : "prompt"} ${usage.prompt_tokens} tokens (${usage.prompt_tokens_details?.cached_tokens ?? 0} cached)`);
  parts.push(`${tokens.length - numBegun} new`);
  if (firstToken) parts.push(`first token after ${(firstToken - started).toFixed(0)} ms`);
  if (timings?.predicted_per_second) parts.push(`${timings.predicted_per_second.toFixed(1)} tokens/s`);
  if (usage && numTogether === 1) parts.push(`context ${usage.total_tokens} of ${model?.max_model_len}`);
  return parts.join(" · ");
}

function curl(body, key) {
  const data = JSON.stringify(body).replaceAll("'", "'\\''");
  return `curl -N ${location.origin}/v1/chat/completions -H 'Content-Type: application/json'${key ? " -H \"Authorization: Bearer $QUIRE_API_KEY\"" : ""} -d '${data}'`;
}
