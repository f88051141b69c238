/**
 * The list of conversations, and the one that is open: it is saved while it changes and found again after a reload.
 * Next to read: store.js, stored.js, chat.js.
 */
import { Store, session } from "./store.js";
import { absorb, fileOf, nameOf, newKey, readFile, recordOf } from "./stored.js";
import { html } from "./xray.js";

const SAVE_AFTER_MS = 500;
const OPEN = "quire-conversation"; // of this tab: another tab begins with a new one
const CONTEXT = 40; // characters before a place that was searched for

const unsaved = () => ({ id: newKey(), name: "", isNamed: false, created: Date.now(), revision: 0 });

export class Conversations {
  /** `chat` has restore(record), clear() and set(values). */
  constructor(chat) {
    Object.assign(this, { chat, current: unsaved(), items: [], isOpen: false, query: "", renaming: null, deleting: null, problem: "", timer: 0, queue: Promise.resolve() });
    this.store = new Store((id) => this.told(id));
    addEventListener("visibilitychange", () => document.hidden && this.flush());
    addEventListener("pagehide", () => this.flush());
  }

  set(values) {
    Object.assign(this, values);
    this.chat.set({});
  }

  async start() {
    const id = session.get(OPEN);
    const record = id && (await this.store.get(id));
    // Who has begun to write meanwhile keeps that.
    if (record && !this.chat.nodes.length && !this.chat.draft) this.show(record);
    await this.refresh();
  }

  async refresh() {
    this.set({ items: await this.store.list() });
  }

  // --- Saving ---------------------------------------------------------------------------------

  /** Save soon: the conversation has changed. */
  touch() {
    this.timer ||= setTimeout(() => this.flush(), SAVE_AFTER_MS);
  }

  /** Save now what has changed. */
  flush() {
    if (this.timer) {
      clearTimeout(this.timer);
      this.timer = 0;
      this.queue = this.queue.then(() => this.save());
    }
    return this.queue;
  }

  async save() {
    const { chat, current } = this;
    if (!chat.nodes.length && !chat.draft.trim()) return current.revision ? this.forget(current) : undefined;
    const content = recordOf(chat);
    const name = current.isNamed ? current.name : nameOf(content.nodes, content.draft);
    session.set(OPEN, current.id);
    const written = await this.store.put({ ...current, name, changed: Date.now(), ...content });
    const isMerged = written.revision > current.revision + 1;
    if (current === this.current) {
      Object.assign(current, { name: written.name, isNamed: written.isNamed, revision: written.revision });
      if (isMerged) this.take(written, "Another tab has changed this conversation too: both versions are kept, as branches.");
    }
    await this.refresh();
  }

  /** Delete a conversation that has become empty. */
  async forget(current) {
    current.revision = 0;
    current.name = "";
    await this.store.remove(current.id);
    await this.refresh();
  }

  /** Take note of what another tab has written. */
  async told(id) {
    await this.refresh();
    if (id !== this.current.id || this.timer || this.chat.abort) return; // what is written here is merged when it is saved
    const record = await this.store.get(id);
    if (!record) {
      this.current.revision = 0;
      this.chat.set({ note: "Deleted in another tab. It is saved again as soon as it goes on." });
    } else if (record.revision !== this.current.revision) this.take(record, "Changed in another tab: this is how it is now.");
  }

  take(record, note) {
    const { name, isNamed, revision } = record;
    Object.assign(this.current, { name, isNamed, revision });
    absorb(this.chat, record);
    this.chat.set({ note });
  }

  // --- Choosing -------------------------------------------------------------------------------

  show(record) {
    const { id, name, isNamed, created, revision } = record;
    this.current = { id, name, isNamed, created, revision };
    session.set(OPEN, id);
    this.chat.restore(record);
  }

  async open(id) {
    await this.flush();
    const record = await this.store.get(id);
    if (record) this.show(record);
    await this.refresh();
  }

  async begin() {
    await this.flush();
    this.current = unsaved();
    session.remove(OPEN);
    this.chat.clear();
    this.set({});
    document.querySelector(".chat textarea[aria-label]")?.focus();
  }

  async rename(id, name) {
    this.renaming = null;
    if (!name.trim()) return this.set({});
    await this.flush();
    const changed = { name: name.trim().slice(0, 200), isNamed: true };
    const record = await this.store.get(id);
    const written = record && (await this.store.put({ ...record, ...changed }));
    if (id === this.current.id) Object.assign(this.current, changed, { revision: written?.revision ?? 0 });
    await this.refresh();
  }

  async remove(id) {
    this.deleting = null;
    await this.flush();
    await this.store.remove(id);
    if (id === this.current.id) await this.begin();
    await this.refresh();
  }

  // --- Files ----------------------------------------------------------------------------------

  async saveAs(name, id) {
    await this.flush();
    const records = id ? [await this.store.get(id)] : await this.store.all();
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([fileOf(records)], { type: "application/json" }));
    link.download = `${name.replace(/[^\p{L}\p{N}]+/gu, "-").slice(0, 40)}.json`;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 10000);
  }

  async read(file) {
    try {
      const records = readFile(await file.text());
      for (const record of records) await this.store.put(record);
      this.problem = "";
      if (records.length) await this.open(records[0].id);
    } catch (error) {
      this.problem = `${file.name} was not imported: ${error.message}.`;
    }
    await this.refresh();
  }

  // --- Drawing --------------------------------------------------------------------------------

  /** Draw the buttons above the chat, with those that are given, and the list if it is open. */
  drawBar(given) {
    const isBusy = Boolean(this.chat.abort);
    const onKey = (event) => {
      if (event.key !== "Escape" || !this.isOpen) return;
      if (this.renaming || this.deleting) return this.set({ renaming: null, deleting: null });
      this.set({ isOpen: false });
      document.querySelector(".conversation [aria-expanded]").focus();
    };
    return html`<div class="bar conversation" onKeyDown=${onKey}><button aria-expanded=${this.isOpen} onClick=${() => this.set({ isOpen: !this.isOpen })}>Conversations</button>
      <b class="name">${this.current.name}</b>${given}<button aria-label="New conversation" onClick=${() => this.begin()} disabled=${isBusy}>New</button></div>
      ${this.store.problem && html`<p class="error" role="alert">${this.store.problem}</p>`}
      ${this.isOpen && this.drawList(onKey)}`;
  }

  drawList(onKey) {
    const words = this.query.trim().toLowerCase();
    const found = this.items.filter(({ text }) => text.toLowerCase().includes(words));
    const read = (event) => { if (event.target.files[0]) this.read(event.target.files[0]); event.target.value = ""; };
    return html`<div class="conversations" role="region" aria-label="Conversations" onKeyDown=${onKey}>
      <div class="tools"><input type="search" aria-label="Search conversations" placeholder="Search…" value=${this.query} onInput=${(e) => this.set({ query: e.target.value })} />
        <label class="file">Import <input type="file" accept=".json,application/json" aria-label="Import conversations" onChange=${read} disabled=${this.chat.abort} /></label>
        <button onClick=${() => this.saveAs("quire-conversations")} disabled=${!this.items.length}>Export all</button></div>
      ${this.problem && html`<p class="error" role="alert">${this.problem}</p>`}
      ${!found.length && html`<p class="hint">${words ? "No conversation has these words." : "Conversations are kept in this browser, and nowhere else."}</p>`}
      <ul>${found.map((item) => html`<li key=${item.id}>${this.drawItem(item, words)}</li>`)}</ul></div>`;
  }

  drawItem({ id, name, changed, text }, words) {
    const { chat } = this;
    if (this.renaming === id) {
      const submit = (event) => { event.preventDefault(); this.rename(id, event.target.elements.name.value); };
      return html`<form onSubmit=${submit}><input name="name" aria-label="Name" value=${name} maxlength="200" /><button class="main">Rename</button><button type="button" onClick=${() => this.set({ renaming: null })}>Cancel</button></form>`;
    }
    if (this.deleting === id) return html`<p role="alert">Delete “${name}”? <button onClick=${() => this.remove(id)}>Delete for good</button> <button onClick=${() => this.set({ deleting: null })}>Keep</button></p>`;
    const at = words ? text.toLowerCase().indexOf(words, name.length) : -1;
    return html`<button class="open" aria-current=${id === this.current.id ? "true" : undefined} disabled=${chat.abort} onClick=${() => this.open(id)}>${name}<small>${new Date(changed).toLocaleString()}${at >= 0 ? ` · …${text.slice(Math.max(0, at - CONTEXT), at + CONTEXT)}…` : ""}</small></button>
      <span class="actions"><button aria-label=${`Rename ${name}`} onClick=${() => this.set({ renaming: id, deleting: null })}>Rename</button><button aria-label=${`Export ${name}`} onClick=${() => this.saveAs(name, id)}>Export</button><button aria-label=${`Delete ${name}`} disabled=${chat.abort} onClick=${() => this.set({ deleting: id, renaming: null })}>Delete</button></span>`;
  }
}
