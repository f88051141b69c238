/**
 * What is sent beside the messages: model, system prompt and parameters, in sight above the box; the rendered prompt and
 * the request itself. Next to read: chat.js.
 */
import { html } from "./xray.js";

const FIELDS = [
  ["temperature", "0", "2", "0.1"], ["top_p", "0", "1", "0.05"], ["top_k", "0", "", "1"], ["max_tokens", "1", "", "1"], ["seed", "0", "", "1"],
];
const NUM_TOP = 8;
const PLAIN_MAX_TOKENS = 256; // A model without a chat template ends no text by itself.

/** Return the messages of a path, or its text for a model without a chat template, as the server takes them. */
export function promptOf(chat, path) {
  if (chat.isPlain()) return { prompt: path.map(({ content }) => content).join("") };
  const messages = path.filter((turn) => turn.content || turn.calls.length || turn.role !== "assistant").map(({ role, content, reasoning, calls, callId }) => ({
    role, content, ...(callId && { tool_call_id: callId }), ...(reasoning && { reasoning }), ...(calls.length && { tool_calls: calls.map(({ id, ...call }) => ({ id, type: "function", function: call })) }),
  }));
  if (chat.system.trim()) messages.unshift({ role: "system", content: chat.system });
  return { messages };
}

/** Return the route and the body of a request for answers behind `path`; each of `nodes` goes on behind its tokens.
 *  Throws an Error if the further fields are no JSON object. */
export async function requestOf(chat, path, nodes) {
  const { messages, prompt } = promptOf(chat, path);
  const chosen = Object.fromEntries(Object.entries(chat.params).filter(([, value]) => value !== "").map(([name, value]) => [name, Number(value)]));
  const model = chat.host.model()?.id;
  const common = { model, stream: true, stream_options: { include_usage: true }, return_token_ids: true, return_tokens_as_token_ids: true };
  const begun = nodes.some((node) => node.tokens.length) && nodes.map((node) => node.tokens.map(({ id }) => id));
  const further = { ...chosen, ...furtherFields(chat.extra) };
  if (messages) return { route: "/v1/chat/completions", body: { ...common, messages, logprobs: true, top_logprobs: NUM_TOP, ...further, ...(begun && { answer_token_ids: begun }) } };
  // As text, the tokens of an answer might be cut into others.
  const { tokens } = begun ? await (await chat.host.ask("/tokenize", { model, prompt }, chat.abort.signal)).json() : {};
  return { route: "/v1/completions", body: { ...common, prompt: begun ? begun.map((ids) => [...tokens, ...ids]) : prompt, logprobs: NUM_TOP, max_tokens: PLAIN_MAX_TOKENS, ...further } };
}

function furtherFields(text) {
  if (!text.trim()) return {};
  let fields;
  try {
    fields = JSON.parse(text);
  } catch (error) {
    throw new Error(`the further fields are no JSON: ${error.message}`);
  }
  if (fields === null || typeof fields !== "object" || Array.isArray(fields)) throw new Error('the further fields are no JSON object, such as {"response_format": {"type": "json_object"}}');
  return fields;
}

function outline(chat, model) {
  const { params, system, extra } = chat;
  const chosen = Object.entries(params).filter(([, value]) => value !== "").map(([name, value]) => `${name} ${value}`);
  if (!params.max_tokens) chosen.push(chat.isPlain() ? `max_tokens ${PLAIN_MAX_TOKENS}` : "until the answer ends");
  const prompt = system.trim().replace(/\s+/g, " ");
  const parts = [model?.id, ...chosen, !chat.isPlain() && (prompt ? `system: ${prompt.length > 40 ? `${prompt.slice(0, 40)}…` : prompt}` : "no system message"), extra.trim() && "further fields"];
  return parts.filter(Boolean).join(" · ");
}

export function Parameters({ chat, model }) {
  const put = (act) => { act(); chat.keep(); chat.host.changed(); };
  return html`<details class="parameters"><summary>Parameters <span class="hint">${outline(chat, model)}</span></summary><div class="fields">
    ${FIELDS.map(([name, min, max, step]) => html`<label>${name}<input type="number" min=${min} max=${max || undefined} step=${step} placeholder=${name === "max_tokens" ? "all that fits" : "model's"} value=${chat.params[name] ?? ""}
      onInput=${(e) => put(() => { chat.params[name] = e.target.value; })} /></label>`)}
    ${!chat.isPlain() && html`<label class="wide">system message<textarea rows="2" value=${chat.system} onInput=${(e) => put(() => { chat.system = e.target.value; })} placeholder="the template's"></textarea></label>`}
    <label class="wide">further fields of the request, as JSON<textarea rows="2" spellcheck="false" value=${chat.extra} onInput=${(e) => put(() => { chat.extra = e.target.value; })} placeholder=${'{"response_format": {"type": "json_object"}} or {"tools": […]}'}></textarea></label></div></details>`;
}

export function Prompt({ chat }) {
  const { prompt } = chat;
  return html`<details onToggle=${(e) => e.target.open && chat.showPrompt()}><summary>Rendered prompt</summary>
    ${prompt && (prompt.error ? html`<p class="error">${prompt.error}</p>` : html`<p>${prompt.count} tokens. <button onClick=${() => chat.showPrompt()}>Render again</button></p><pre tabindex="0">${prompt.text}</pre><pre tabindex="0">${JSON.stringify(prompt.tokens)}</pre>`)}</details>`;
}

export function RequestShown({ path, body, apiKey }) {
  return html`<details><summary>Request as JSON and curl</summary>${body ? html`<pre tabindex="0">${JSON.stringify(body, null, 2)}</pre><pre tabindex="0">${curl(path, body, apiKey)}</pre>` : html`<p class="hint">No request since this page was loaded.</p>`}</details>`;
}

function curl(path, body, key) {
  const data = JSON.stringify(body).replaceAll("'", "'\\''");
  return `curl -N ${location.origin}${path} -H 'Content-Type: application/json'${key ? " -H \"Authorization: Bearer $QUIRE_API_KEY\"" : ""} -d '${data}'`;
}
