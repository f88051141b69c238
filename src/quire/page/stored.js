/**
 * The stored form of conversations, in the browser's database and in files. What is read is checked first: a file may be
 * anyone's. Tokens are kept as columns of small integers, since each has several alternatives.
 * Next to read: store.js, conversations.js.
 */
const FORMAT = "quire-conversations";
const VERSION = 1;
const NAME_LENGTH = 60;
const THOUSANDTHS = 1000; // of log-probabilities: enough for a percentage with one digit

export const newKey = () => Array.from(crypto.getRandomValues(new Uint32Array(4)), (part) => part.toString(36)).join("");

/** Return what is stored of a chat. */
export function recordOf({ params, system, extra, draft, removed, chosen, nodes }) {
  const keys = [...chosen].map(([parent, node]) => [parent?.key ?? null, node.key]);
  return { params: { ...params }, system, extra, draft, removed: [...removed], chosen: keys, nodes: nodes.map(pack) };
}

/** Add the messages of a stored conversation to a chat. Of a message that it has the longer version stays. */
export function absorb(chat, { nodes, chosen, removed, draft }) {
  const known = new Map(chat.nodes.map((node) => [node.key, node]));
  for (const stored of nodes) {
    const node = known.get(stored.key);
    const isShorter = node && node.content.length + node.reasoning.length < stored.content.length + stored.reasoning.length;
    if (!node || isShorter) known.set(stored.key, Object.assign(node ?? {}, unpack(stored), { parent: known.get(stored.parent) ?? null }));
  }
  for (const key of removed) known.delete(key);
  chat.nodes = [...known.values()];
  chat.removed = [...new Set([...chat.removed, ...removed])];
  for (const [parent, key] of chosen) if (known.has(key)) chat.chosen.set(parent === null ? null : known.get(parent), known.get(key));
  chat.draft ||= draft;
}

function pack(node) {
  const { key, role, content, reasoning, reason, error, id, model, vocabulary, numBegun, numTogether, calls, callId, stats, tokens } = node;
  const words = {};
  const top = tokens.map((token) => token.top.flatMap((item) => {
    words[item.id] = item.text;
    return [item.id, rounded(item.logprob)];
  }));
  const { usage, timings } = stats ?? {};
  const wait = node.firstToken ? node.firstToken - node.started : 0;
  return {
    key, parent: node.parent?.key ?? null, role, content, reasoning, reason, error, id, model, vocabulary, numBegun, numTogether, calls, callId,
    tokens: { ids: tokens.map((token) => token.id), texts: tokens.map((token) => token.text), logprobs: tokens.map((token) => rounded(token.logprob)), ends: tokens.flatMap((token) => token.ends), top, words },
    figures: usage ? [usage.prompt_tokens, usage.prompt_tokens_details?.cached_tokens ?? 0, usage.total_tokens, timings?.predicted_per_second ?? 0, wait] : null,
  };
}

const rounded = (logprob) => Math.round(Math.max(logprob, -1e4) * THOUSANDTHS);

function unpack({ tokens, figures, ...node }) {
  const { ids, texts, logprobs, ends, top, words } = tokens;
  const [prompt, cached, total, speed, wait] = figures ?? [];
  return {
    ...node,
    shown: node.reasoning + node.content,
    results: [],
    tokens: ids.map((id, i) => ({
      id, text: texts[i], logprob: logprobs[i] / THOUSANDTHS, ends: [ends[2 * i], ends[2 * i + 1]],
      top: Array.from({ length: top[i].length / 2 }, (_, k) => ({ id: top[i][2 * k], text: words[top[i][2 * k]], logprob: top[i][2 * k + 1] / THOUSANDTHS })),
    })),
    stats: figures && { usage: { prompt_tokens: prompt, total_tokens: total, prompt_tokens_details: { cached_tokens: cached } }, timings: { predicted_per_second: speed } },
    started: 0, firstToken: wait,
  };
}

/** Return what is listed and searched of a conversation. */
export function summary({ id, name, changed, nodes, draft }) {
  const texts = nodes.map((node) => node.content);
  return { id, name, changed, numMessages: nodes.length, text: [name, ...texts, draft].join("\n") };
}

/** Return the first words that name a conversation. */
export function nameOf(nodes, draft) {
  const words = (nodes.find((node) => node.role === "user")?.content ?? draft).replace(/\s+/g, " ").trim();
  return words.length > NAME_LENGTH ? `${words.slice(0, NAME_LENGTH).replace(/ [^ ]*$/, "")}…` : words || "Conversation";
}

/** Join two versions of a conversation: all messages of both; of one message the longer, of choices `mine`. */
export function merge(theirs, mine) {
  const removed = [...new Set([...theirs.removed, ...mine.removed])];
  const length = (node) => (node ? node.content.length + node.reasoning.length : -1);
  const other = new Map(mine.nodes.map((node) => [node.key, node]));
  const nodes = theirs.nodes.map((node) => (length(other.get(node.key)) >= length(node) ? other.get(node.key) : node));
  const known = new Set(theirs.nodes.map((node) => node.key));
  nodes.push(...mine.nodes.filter((node) => !known.has(node.key)));
  const chosen = [...new Map([...theirs.chosen, ...mine.chosen])];
  const name = mine.isNamed || !theirs.isNamed ? {} : { name: theirs.name, isNamed: true };
  return { ...theirs, ...mine, ...name, draft: mine.draft || theirs.draft, removed, chosen, nodes: nodes.filter((node) => !removed.includes(node.key)) };
}

// --- Files ------------------------------------------------------------------------------------

/** Return the text of a file with conversations. */
export function fileOf(conversations) {
  return JSON.stringify({ format: FORMAT, version: VERSION, conversations });
}

/** Return the conversations of a file, under new identities. Throws an Error that says why it is none. */
export function readFile(text) {
  let file;
  try {
    file = JSON.parse(text);
  } catch {
    throw new Error("it is no JSON");
  }
  if (file?.format !== FORMAT) throw new Error("it is no file of conversations that this page has exported");
  if (file.version !== VERSION) throw new Error(`its version is ${file.version}, and this page reads ${VERSION}: ${file.version > VERSION ? "a newer Quire wrote it, so import it there" : "it is damaged"}`);
  must(Array.isArray(file.conversations), "conversations", "a list");
  return file.conversations.map((record, i) => ({ ...checked(record, `conversations[${i}]`), id: newKey(), revision: 0 }));
}

const kinds = {
  text: (value) => typeof value === "string",
  number: (value) => Number.isFinite(value),
  "true or false": (value) => typeof value === "boolean",
  "a list": Array.isArray,
  "a list of numbers": (value) => Array.isArray(value) && value.every(Number.isFinite),
  "a list of texts": (value) => Array.isArray(value) && value.every(kinds.text),
  "an object of texts": (value) => value !== null && typeof value === "object" && Object.values(value).every(kinds.text),
};

function must(isRight, place, kind) {
  if (!isRight) throw new Error(`it is damaged: ${place} is not ${kind}`);
}

/** Return the named fields of an object, checked. */
function fieldsOf(object, place, fields) {
  must(object !== null && typeof object === "object", place, "an object");
  return Object.fromEntries(Object.entries(fields).map(([name, kind]) => {
    const value = object[name] ?? null;
    const [wanted, isOptional] = kind.endsWith("?") ? [kind.slice(0, -1), true] : [kind, false];
    must((isOptional && value === null) || kinds[wanted](value), `${place}.${name}`, wanted);
    return [name, value];
  }));
}

function checked(record, place) {
  const fields = fieldsOf(record, place, {
    name: "text", isNamed: "true or false", created: "number", changed: "number", system: "text", extra: "text", draft: "text", params: "an object of texts", chosen: "a list", removed: "a list of texts", nodes: "a list",
  });
  const keys = new Set([null]);
  const nodes = fields.nodes.map((node, i) => checkedNode(node, `${place}.nodes[${i}]`, keys));
  const isPair = (pair) => Array.isArray(pair) && pair.length === 2 && pair.every((key) => keys.has(key));
  return { ...fields, nodes, chosen: fields.chosen.filter(isPair) };
}

/** Return a message, checked. Mutates: `keys` of the messages before it gets its key. */
function checkedNode(node, place, keys) {
  const fields = fieldsOf(node, place, {
    key: "text", parent: "text?", role: "text", content: "text", reasoning: "text", reason: "text?", error: "text", id: "text", model: "text?", vocabulary: "text?", numBegun: "number", numTogether: "number", calls: "a list", callId: "text?", figures: "a list of numbers?",
  });
  must(["user", "assistant", "tool"].includes(fields.role), `${place}.role`, "user, assistant or tool");
  must(keys.has(fields.parent), `${place}.parent`, "the key of an earlier message");
  must(!keys.has(fields.key), `${place}.key`, "a new one");
  keys.add(fields.key);
  const calls = fields.calls.map((call, i) => fieldsOf(call, `${place}.calls[${i}]`, { id: "text", name: "text", arguments: "text" }));
  const tokens = fieldsOf(node.tokens, `${place}.tokens`, { ids: "a list of numbers", texts: "a list of texts", logprobs: "a list of numbers", ends: "a list of numbers", top: "a list", words: "an object of texts" });
  const { length } = tokens.ids;
  const isWhole = tokens.texts.length === length && tokens.logprobs.length === length && tokens.ends.length === 2 * length && tokens.top.length === length;
  const isKnown = (top) => kinds["a list of numbers"](top) && top.length % 2 === 0 && top.every((id, i) => i % 2 === 1 || Object.hasOwn(tokens.words, id));
  must(isWhole && tokens.top.every(isKnown), `${place}.tokens`, "a table with all columns");
  return { ...fields, calls, tokens };
}
