/**
 * The recording: keeps a trace's lines and replays the engine's state at any step. It needs no page and no server.
 * `State` equals `State` of ../insight/trace.py. Next to read: xray.js.
 */
const NULL_BLOCK = 0;
const MAX_TIMED = 100; // Timed steps that keep their instructions: one has hundreds.
const LINES_PER_CHECKPOINT = 1000; // A step back replays at most so many lines.

/**
 * The engine after a line. `findable`: blocks that hold a prefix, whether a request uses them or not.
 * `held`: blocks that wait for a request to start, with its id. `waiting`: when each request in the queue arrived or was preempted.
 */
export class State {
  constructor(header) {
    this.header = header;
    this.requests = new Map(header.requests.map((r) => [r.id, { ...r, tables: r.tables.map((t) => [...t]) }]));
    this.findable = new Set(header.cached);
    this.waiting = new Map(Object.entries(header.waiting ?? {}));
    this.held = (header.held ?? []).map((block) => [block, ""]);
  }

  /** Return a header line that restates this state. */
  describe() {
    const requests = [...this.requests.values()].map((r) => ({ ...r, tables: r.tables.map((t) => [...t]) }));
    return { ...this.header, requests, cached: [...this.findable], held: this.held.map(([block]) => block), waiting: Object.fromEntries(this.waiting) };
  }

  /** Return the requests that hold each block in use: block → ids. */
  owners() {
    const found = new Map();
    for (const request of this.requests.values())
      for (const table of request.tables)
        for (const block of table)
          if (block !== NULL_BLOCK) found.set(block, [...(found.get(block) ?? []), request.id]);
    for (const [block, id] of this.held) found.set(block, [...(found.get(block) ?? []), id]);
    return found;
  }

  /** Return the free blocks that hold a prefix. */
  cached(owners = this.owners()) {
    return new Set([...this.findable].filter((block) => !owners.has(block)));
  }

  apply(line) {
    if (line.kind === "finish" || line.kind === "preempt") this.requests.delete(line.id);
    if (line.kind === "step") this.#step(line);
    else if (line.kind === "arrive" || line.kind === "preempt") this.waiting.set(line.id, line.t);
    else if (line.kind === "finish" || line.kind === "admit") this.waiting.delete(line.id);
    else if (line.kind === "cache") for (const block of line.block_ids) this.findable.add(block);
    else if (line.kind === "evict") for (const block of line.block_ids) this.findable.delete(block);
    else if (line.kind === "fetch") for (const block of line.block_ids) this.held.push([block, line.id]);
    else if (line.kind === "release")
      for (const block of line.block_ids) this.held.splice(this.held.findIndex(([at]) => at === block), 1);
  }

  #step(line) {
    for (const { id, num_prompt_tokens, num_tokens } of line.new_requests ?? []) {
      const tables = this.header.engine.windows.map(() => []);
      this.requests.set(id, { id, num_prompt_tokens, num_tokens, num_computed: 0, tables });
    }
    for (const share of line.requests ?? []) {
      const request = this.requests.get(share.id);
      if (!request) continue; // it ended before the step's result came
      share.tables.forEach(([start, blocks], group) => {
        request.tables[group].splice(start, Infinity, ...blocks);
      });
      const numNew = share.new.length;
      request.num_computed = share.start + share.count - share.drafts + Math.max(0, numNew - 1);
      request.num_tokens = Math.max(request.num_tokens, request.num_computed + (numNew ? 1 : 0));
    }
  }
}

/** The newest lines of a trace. Lines have absolute numbers; those before `numDropped` are gone, their effect is in `base`. */
export class Recording {
  constructor(maxSteps = 2000) {
    Object.assign(this, { maxSteps, lines: [], steps: [], timed: [], known: new Map(), checkpoints: new Map(), numDropped: 0 });
    Object.assign(this, { base: null, live: null, cursor: null, numSeen: 0, numWaiting: 0, numPrompt: 0, numHit: 0 });
  }

  add(line) {
    const at = this.numDropped + this.lines.push(line) - 1;
    if ("quire_trace" in line) {
      this.base ??= line;
      this.live = new State(line);
      this.numWaiting = line.num_waiting;
      for (const request of line.requests) this.#leavePlaces(request);
      return;
    }
    if (line.kind === "story") {
      this.story = line;
      return;
    }
    this.live.apply(line);
    if (line.kind === "served") {
      const known = this.known.get(line.id);
      if (known) known.served = line.phases;
      return;
    }
    const request = line.id ? this.request(line.id) : null;
    if (line.kind === "admit") {
      request.admit ??= line;
      this.numPrompt += line.num_prompt_tokens;
      this.numHit += line.num_cached_tokens;
    } else if (line.kind === "finish") Object.assign(request, { finish: line, finishAt: at });
    else if (line.kind === "schedule") this.numWaiting = line.num_waiting;
    else if (line.kind === "ops") {
      this.timed.push(line);
      if (this.timed.length > MAX_TIMED) this.timed.shift().ops = [];
    } else if (line.kind === "step" && line.requests) {
      this.steps.push({ ...line, at, begin: line.t - line.duration_s, waiting: this.numWaiting, numPrompt: this.numPrompt, numHit: this.numHit });
      for (const request of line.new_requests ?? []) {
        this.#leavePlaces(request);
        this.request(request.id).prompt ??= request.text;
      }
      for (const share of line.requests) {
        const owner = this.request(share.id);
        owner.firstStep ??= line.step_id;
        owner.lastStep = line.step_id;
        for (const _ of share.new) owner.stepOfToken.push(line.step_id);
      }
      if (this.steps.length > this.maxSteps * 1.1) this.#drop();
    }
  }

  /** Return what is known of a request: its letter, its events, and the step of each of its tokens. */
  request(id) {
    let found = this.known.get(id);
    if (!found) {
      const number = this.numSeen++;
      const letter = String.fromCharCode(65 + (number % 26)) + (number < 26 ? "" : Math.floor(number / 26) + 1);
      found = { id, letter, colour: number % 8, stepOfToken: [] };
      this.known.set(id, found);
    }
    return found;
  }

  /** Leave places for the tokens that a request had before the first line that tells of it. */
  #leavePlaces({ id, num_tokens, num_prompt_tokens }) {
    const { stepOfToken } = this.request(id);
    while (stepOfToken.length < num_tokens - num_prompt_tokens) stepOfToken.push(undefined);
  }

  /** Return the place of a step's first new token among all of a request's. */
  placeOf(id, step) {
    return this.request(id).stepOfToken.indexOf(step.step_id);
  }

  /** Return the state after a line. */
  stateAt(at) {
    const known = Math.floor(at / LINES_PER_CHECKPOINT) * LINES_PER_CHECKPOINT;
    if (!this.cursor || this.cursor.at > at || this.cursor.at < known) {
      const kept = this.checkpoints.get(known);
      if (kept) this.cursor = { at: known, state: new State(kept) };
      else if (!this.cursor || this.cursor.at > at) this.cursor = { at: this.numDropped - 1, state: new State(this.base) };
    }
    while (this.cursor.at < at) {
      const line = this.lines[++this.cursor.at - this.numDropped];
      if ("quire_trace" in line) this.cursor.state = new State(line);
      else this.cursor.state.apply(line);
      if (this.cursor.at % LINES_PER_CHECKPOINT === 0) this.checkpoints.set(this.cursor.at, this.cursor.state.describe());
    }
    return this.cursor.state;
  }

  #drop() {
    this.steps = this.steps.slice(-this.maxSteps);
    const at = this.steps[0].at;
    this.base = this.stateAt(at - 1).describe();
    this.base.t = this.lines[at - 1 - this.numDropped].t;
    this.lines.splice(0, at - this.numDropped);
    this.numDropped = at;
    for (const kept of this.checkpoints.keys()) if (kept < at) this.checkpoints.delete(kept);
    for (const [id, request] of this.known)
      if (request.finish && !(request.lastStep >= this.steps[0].step_id)) this.known.delete(id);
  }

  /** Return what is known of the keys of each request of a step: how many came from the prefix cache, and the chunks of its prompt. */
  history(step) {
    const found = new Map(step.requests.map(({ id }) => [id, { cached: 0, chunks: [] }]));
    for (const line of this.lines.slice(0, step.at - this.numDropped)) {
      if (line.kind === "admit" && found.has(line.id)) found.set(line.id, { cached: line.num_cached_tokens, chunks: [] });
      else if (line.kind === "step" && line.requests)
        for (const share of line.requests)
          if (isPrefill(share)) found.get(share.id)?.chunks.push([share.start, share.start + share.count]);
    }
    return found;
  }

  /** Return the place of the newest step up to an id, at least 0. */
  indexOf(stepId) {
    let [low, high] = [0, this.steps.length];
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.steps[middle].step_id <= stepId) low = middle + 1;
      else high = middle;
    }
    return Math.max(0, low - 1);
  }

  /** Return the ids of the steps that begin a request named so, or write this text, in order. `textOf(id)`: texts of its tokens. */
  find(wanted, textOf) {
    const found = new Set();
    const low = wanted.toLowerCase();
    for (const [id, { letter, prompt, firstStep, stepOfToken }] of this.known) {
      if (firstStep === undefined) continue;
      if (letter.toLowerCase() === low || id.toLowerCase().includes(low) || prompt?.join("").toLowerCase().includes(low)) found.add(firstStep);
      const texts = textOf(id);
      const whole = texts.join("").toLowerCase();
      let [place, end] = [0, texts[0]?.length ?? 0];
      for (let at = whole.indexOf(low); low && at >= 0; at = whole.indexOf(low, at + 1)) {
        while (end <= at) end += texts[++place].length;
        if (stepOfToken[place] !== undefined) found.add(stepOfToken[place]);
      }
    }
    return [...found].sort((a, b) => a - b);
  }

  /** Return the parts of a request's way up to a step, in order: name, begin and end in seconds of the trace's clock, and the number of steps. */
  way(id, until = this.steps.at(-1)) {
    const { admit, lastStep, served = [] } = this.known.get(id);
    const steps = this.steps.filter((step) => step.step_id <= until?.step_id && step.requests.some((share) => share.id === id));
    const way = [];
    const isSampled = (share) => share.id === id && share.new.length > 0;
    const detokenise = steps.filter((step) => step.requests.some(isSampled)).reduce((sum, step) => sum + step.output_s, 0);
    Object.assign(way, { id, detokenise });
    const [begin, end] = [steps[0]?.begin ?? Infinity, steps.at(-1)?.t ?? 0];
    for (const [name, from, to] of served) if (from < begin) way.push({ name, from, to: Math.min(to, begin) });
    if (admit && admit.arrival_s < begin && steps.length) way.push({ name: "wait", from: Math.max(admit.arrival_s, way.at(-1)?.to ?? 0), to: begin });
    for (const step of steps) {
      const name = isPrefill(step.requests.find((share) => share.id === id)) ? "prefill" : "decode";
      const last = way.at(-1);
      if (last && last.to < step.begin - 1e-4 && last.count) way.push({ name: "between steps", from: last.to, to: step.begin });
      way.push({ name, from: step.begin, to: step.t, count: 1 });
    }
    const isWhole = !until || lastStep <= until.step_id;
    for (const [name, from, to] of served) if (isWhole && from >= begin && to > end) way.push({ name, from: Math.max(from, end), to });
    return way;
  }

  /** Return the block tables of a request at a step, or at its last step if that was before. */
  tablesOf(id, step) {
    const { lastStep } = this.request(id);
    const shown = lastStep < step.step_id ? this.steps[this.indexOf(lastStep)] : step;
    return this.stateAt(shown.at).requests.get(id)?.tables ?? [];
  }

  /** Return the kept lines as the text of a trace. */
  text() {
    const lines = this.numDropped ? [this.base, ...this.lines] : this.lines;
    return lines.map((line) => JSON.stringify(line) + "\n").join("");
  }
}

/** Return whether a share of a step computes prompt tokens. */
export const isPrefill = (share) => share.count - share.drafts > 1 || !share.new.length;

/** Return how many blocks requests share at a step: those of their first tables before the first that differs.
 *  All but the oldest request found them in the prefix cache: a block that was freed and given out again has the same number, but is not shared. */
export function numShared(recording, ids, step) {
  const { block_size } = recording.live.header.engine;
  const hits = ids.map((id) => recording.request(id)).sort((a, b) => a.firstStep - b.firstStep).slice(1).map(({ admit }) => Math.floor((admit?.num_cached_tokens ?? Infinity) / block_size));
  const [own, ...others] = ids.map((id) => recording.tablesOf(id, step)[0] ?? []);
  const end = own.findIndex((block, i) => others.some((table) => table[i] !== block));
  return Math.min(end < 0 ? own.length : end, ...hits);
}
