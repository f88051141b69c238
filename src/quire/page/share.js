/**
 * What *Share* saves: the recorded lines with the story of one answer, with or without text.
 */
import { html } from "./drawing.js";

const MAX_PIECES = 256; // Tokens of a prompt whose text is asked for: each is a small request.

/** Return the text of a recording that begins with the newest answer of the chat. `withText`: with the texts of the chat, else with none. */
export async function share({ recording, chat, ask, model, withText }) {
  const isKept = (item) => item.role === "assistant" && recording.known.get(item.id)?.firstStep >= recording.steps[0]?.step_id;
  const newest = chat.path().findLast(isKept);
  const siblings = chat.nodes.filter((item) => isKept(item) && item.parent === newest.parent);
  const node = siblings.find((item) => !item.numBegun) ?? newest;
  const id = node?.id ?? recording.steps[0].requests[0].id;
  const fork = siblings.find((item) => item !== node && item.numBegun)?.id;
  const texts = withText ? await textsOf(chat, ask, model) : new Map();
  const [header, ...lines] = recording.text().split("\n").filter(Boolean).map((row) => JSON.parse(row));
  for (const line of lines.filter(({ kind }) => kind === "step")) {
    for (const item of line.new_requests ?? []) item.text = withText ? item.text ?? texts.get(item.id)?.prompt ?? null : null;
    for (const item of line.requests ?? []) {
      const [known, place] = [texts.get(item.id), recording.placeOf(item.id, line)];
      if (!withText) Object.assign(item, { text: null, new: item.new.map(() => null) });
      else if (known) item.text = item.new.map((_, i) => known.tokens[place + i] ?? "");
    }
  }
  const story = { t: header.t, kind: "story", id, fork };
  const nameOf = (request) => request && recording.request(request).letter; // its id may be known elsewhere
  const shown = (key, value) => {
    if (key === "id" || key === "fork") return nameOf(value);
    if (key === "waiting") return Object.fromEntries(Object.entries(value).map(([request, since]) => [nameOf(request), since]));
    return key === "expert_loads" && !withText ? [...value].sort((a, b) => b - a) : value; // which were chosen tells the token
  };
  return [header, story, ...lines].map((line) => JSON.stringify(line, shown) + "\n").join("");
}

/** Return the texts of each answer's request: of its prompt's tokens and of its new tokens, in order. */
async function textsOf(chat, ask, model) {
  const pieces = new Map();
  const pieceOf = async (token) => {
    if (!pieces.has(token)) pieces.set(token, ask("/detokenize", { model: model?.id, tokens: [token] }).then((answer) => answer.json()).then(({ prompt }) => prompt));
    return pieces.get(token);
  };
  const found = new Map();
  for (const node of chat.nodes.filter((item) => item.id && item.request)) {
    const { messages, prompt: text } = node.request.body;
    const isText = messages || typeof text === "string"; // else tokens, and those that the answer begins with behind them
    const { tokens } = isText ? await (await ask("/tokenize", { model: model?.id, ...(messages ? { messages } : { prompt: text }) })).json() : { tokens: text[0].slice(0, text[0].length - node.numBegun) };
    const begun = node.tokens.slice(0, node.numBegun).map(({ text }) => text);
    const prompt = await Promise.all(tokens.slice(0, MAX_PIECES).map(pieceOf));
    const rest = Array(Math.max(0, tokens.length - MAX_PIECES)).fill("…");
    found.set(node.id, { prompt: [...prompt, ...rest, ...begun], tokens: node.tokens.slice(node.numBegun).map(({ text }) => text) });
  }
  return found;
}

/** Draw the question that comes before a file is saved for others. `answer(withText)`: null for none. */
export function Sharing({ answer }) {
  return html`<div class="sharing" role="dialog" aria-modal="false" aria-label="Share" onKeyDown=${(event) => event.key === "Escape" && answer(null)}><p>This saves one file that plays the story of your newest answer, and has all recorded steps. It opens without a network and without a server.
    Include the text of prompts and answers? Without it the file has only numbers.</p>
    <button class="main" onClick=${() => answer(false)}>Without text</button> <button onClick=${() => answer(true)}>With text</button> <button onClick=${() => answer(null)}>Cancel</button></div>`;
}
