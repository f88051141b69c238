/**
 * The conversations in the browser's IndexedDB. Where it is full or forbidden, they are kept in memory and `problem` says
 * why. A change is told to other tabs; of two tabs that change one conversation, the later one writes both versions merged.
 * Next to read: stored.js, conversations.js.
 */
import { merge, summary } from "./stored.js";

const DATABASE = "quire";
const VERSION = 1;
const STORES = ["summaries", "conversations"];

/** A storage of the browser; where it is forbidden or full, values last until the page is closed. */
function area(name) {
  const memory = new Map();
  const attempt = (act) => {
    try {
      return act(globalThis[name]);
    } catch {
      return null;
    }
  };
  return {
    get: (key) => memory.get(key) ?? attempt((storage) => storage.getItem(key)),
    set: (key, value) => { memory.set(key, value); attempt((storage) => storage.setItem(key, value)); },
    remove: (key) => { memory.delete(key); attempt((storage) => storage.removeItem(key)); },
  };
}

export const local = area("localStorage");
export const session = area("sessionStorage");

const settled = (request) => new Promise((done, failed) => {
  request.onsuccess = () => done(request.result);
  request.onerror = () => failed(request.error);
});

export class Store {
  /** `told` is called with the id of a conversation that another tab has changed or deleted. */
  constructor(told) {
    Object.assign(this, { memory: new Map(), problem: "", opening: null, channel: null });
    if (!globalThis.BroadcastChannel) return;
    this.channel = new BroadcastChannel("quire-conversations");
    this.channel.onmessage = ({ data }) => told(data);
  }

  async transact(mode, act) {
    this.opening ??= openDatabase();
    const transaction = (await this.opening).transaction(STORES, mode);
    const done = new Promise((complete, failed) => {
      transaction.oncomplete = complete;
      transaction.onabort = () => failed(transaction.error ?? new DOMException("", "QuotaExceededError"));
    });
    const [result] = await Promise.all([act(...STORES.map((name) => transaction.objectStore(name))), done]);
    return result;
  }

  /** Return the summaries of all conversations, the newest first. */
  async list() {
    const found = await this.attempt("readonly", (summaries) => settled(summaries.getAll()), []);
    const byId = new Map(found.map((item) => [item.id, item]));
    for (const record of this.memory.values()) byId.set(record.id, summary(record));
    return [...byId.values()].sort((a, b) => b.changed - a.changed);
  }

  /** Return a conversation; undefined if it was deleted. */
  async get(id) {
    return this.memory.get(id) ?? this.attempt("readonly", (_, conversations) => settled(conversations.get(id)));
  }

  /** Return all conversations. */
  async all() {
    const found = await this.attempt("readonly", (_, conversations) => settled(conversations.getAll()), []);
    return [...found.filter(({ id }) => !this.memory.has(id)), ...this.memory.values()];
  }

  /** Write a conversation, merged with what another tab has written since its revision; return what was written. */
  async put(record) {
    const write = async (summaries, conversations) => {
      const present = await settled(conversations.get(record.id));
      const merged = present && present.revision !== record.revision ? merge(present, record) : record;
      const next = { ...merged, revision: (present?.revision ?? record.revision) + 1 };
      conversations.put(next);
      summaries.put(summary(next));
      return next;
    };
    const written = await this.attempt("readwrite", write);
    if (!written) {
      this.memory.set(record.id, record);
      return record;
    }
    this.memory.delete(record.id);
    this.problem = "";
    this.channel?.postMessage(record.id);
    return written;
  }

  async remove(id) {
    this.memory.delete(id);
    await this.attempt("readwrite", (summaries, conversations) => Promise.all([settled(summaries.delete(id)), settled(conversations.delete(id))]));
    this.channel?.postMessage(id);
  }

  async attempt(mode, act, otherwise) {
    try {
      return await this.transact(mode, act);
    } catch (error) {
      this.problem = reasonOf(error);
      return otherwise;
    }
  }
}

async function openDatabase() {
  const request = indexedDB.open(DATABASE, VERSION);
  request.onupgradeneeded = () => {
    for (const name of STORES) request.result.createObjectStore(name, { keyPath: "id" });
  };
  const database = await settled(request);
  database.onversionchange = () => database.close();
  return database;
}

function reasonOf({ name, message }) {
  const fate = "Conversations now last until this page is closed; Export saves them as files.";
  if (name === "QuotaExceededError") return `The browser's storage is full: delete conversations to make room. ${fate}`;
  if (name === "VersionError") return `A newer version of this page has changed the browser's storage. ${fate}`;
  return `The browser allows this page no storage (${name}${message ? `: ${message}` : ""}). ${fate}`;
}
