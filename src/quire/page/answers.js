/**
 * The parts of an answer: from the server's chunks to a message, its figures, calls of tools and JSON.
 * Next to read: chat.js.
 */
import { copy } from "./markdown.js";
import { html } from "./drawing.js";

const MAX_DEPTH = 100;
const idOf = (name) => Number(name.replace("token_id:", ""));
const decode = (bytes) => new TextDecoder().decode(new Uint8Array(bytes ?? []));

/** Append a chunk's part of a choice to its message. */
export function take(node, { text, delta = { content: text }, logprobs, token_ids, finish_reason }) {
  const [content, reasoning] = [delta.content ?? "", delta.reasoning_content ?? ""];
  const before = node.content.length;
  node.content += content;
  node.reasoning += reasoning;
  node.shown += reasoning + content;
  node.reason = finish_reason ?? node.reason;
  for (const call of delta.tool_calls ?? []) {
    const known = (node.calls[call.index] ??= { id: "", name: "", arguments: "" });
    known.id ||= call.id ?? "";
    known.name += call.function?.name ?? "";
    known.arguments += call.function?.arguments ?? "";
  }
  const entries = text === undefined ? entriesOf(node, logprobs?.content, token_ids) : completionEntries(node, logprobs, token_ids);
  // Where the tokens are the text, each one's end is known; else all end with their chunk.
  const isPlain = !reasoning && entries.map((entry) => entry.text).join("") === content;
  let length = before;
  for (const entry of entries) {
    node.firstToken ||= performance.now();
    length += entry.text.length;
    node.tokens.push({ ...entry, ends: [node.reasoning.length, isPlain ? length : node.content.length] });
  }
}

function entriesOf(node, content, ids) {
  return (content ?? []).map(({ bytes, logprob, top_logprobs }, i) => ({
    id: ids[i], text: node.decoder.decode(new Uint8Array(bytes ?? []), { stream: true }), logprob,
    top: top_logprobs.map((item) => ({ id: idOf(item.token), text: decode(item.bytes), logprob: item.logprob })),
  }));
}

/** Return the tokens of a chunk of `/v1/completions`. */
function completionEntries(node, logprobs, ids) {
  const bytes = (name) => logprobs.token_bytes[name];
  return (logprobs?.tokens ?? []).map((name, i) => ({
    id: ids[i], text: node.decoder.decode(new Uint8Array(bytes(name)), { stream: true }), logprob: logprobs.token_logprobs[i],
    top: Object.entries(logprobs.top_logprobs[i] ?? {}).map(([other, logprob]) => ({ id: idOf(other), text: decode(bytes(other)), logprob })),
  }));
}

export function statistics({ stats: { usage, timings }, tokens, numBegun, numTogether, firstToken, started, reason, model: name }, model) {
  const parts = reason ? [`[${reason}]`] : [];
  if (usage) parts.push(`${numTogether > 1 ? `${numTogether} prompts` : "prompt"} ${usage.prompt_tokens} tokens (${usage.prompt_tokens_details?.cached_tokens ?? 0} cached)`);
  parts.push(`${tokens.length - numBegun} new`);
  if (firstToken) parts.push(`first token after ${(firstToken - started).toFixed(0)} ms`);
  if (timings?.predicted_per_second) parts.push(`${timings.predicted_per_second.toFixed(1)} tokens/s`);
  if (usage && numTogether === 1 && name === model?.id) parts.push(`context ${usage.total_tokens} of ${model.max_model_len}`);
  return parts.join(" · ");
}

/** Return JSON on several lines; null for what is no object or list in JSON, and for what is nested too deep: each line is
 *  indented by its depth, and 200 kB of brackets would become 400 MB. */
export function asJson(text) {
  if (!/^\s*[[{]/.test(text)) return null;
  let depth = 0;
  for (const [sign] of text.matchAll(/[[\]{}]/g)) if ((depth += "[{".includes(sign) ? 1 : -1) > MAX_DEPTH) return null;
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return null;
  }
}

/** Draws code with its language and a button that copies it. */
export function Code({ language, text }) {
  return html`<div class="fence"><div class="fence-bar"><span>${language}</span><button type="button" onClick=${(e) => copy(text, e.target)}>Copy code</button></div><pre tabindex="0">${text}</pre></div>`;
}

export function Calls({ calls }) {
  return calls.map(({ name, arguments: text }) => html`<div class="call"><p>Calls the tool <code>${name}</code></p><${Code} language="arguments" text=${asJson(text) ?? text} /></div>`);
}
