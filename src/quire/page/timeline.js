/**
 * Time: the slider over all recorded steps, the window that zooms, and the Steps pane, which draws the steps of the window.
 * Next to read: recording.js.
 */
import { PATTERNS, about, html, ms, plural } from "./drawing.js";
import { isPrefill } from "./recording.js";
import { isTouch, tap } from "./screen.js";

const LABELS = 84; // Width of the column of names.
const EDGE = 8; // Half of the slider's thumb: its middle is over the step.
const STRIP = 34;
const MIN_SPAN = 8;
const FEW = [12, 24]; // Columns for few steps, which fill the width.
const MAX_ROWS = 24;
const TEXT = 250; // Height of what the Steps pane has below its picture.
const BELOW = 72; // Height of labels and gaps of the picture.
const right = (share) => Math.min(share.drafts, Math.max(0, share.new.length - 1));

/** The slider, and the window of steps that the Steps pane draws: `span` steps from the one with id `left`; null: the newest ones. */
export class Scrubber {
  constructor(xray) {
    Object.assign(this, { xray, span: null, left: null, shown: null, pointers: new Map(), isDragged: false });
  }

  /** Return the window as places of steps, moved so that it holds the chosen one. */
  window() {
    const { recording, chosen, width } = this.xray;
    const count = recording.steps.length;
    const columns = Math.max(FEW[0], Math.floor((width - LABELS) / 16));
    const span = this.span === null ? [...FEW.filter((few) => few < columns), columns].find((few) => few >= count) ?? columns : Math.min(this.span, Math.max(count, MIN_SPAN));
    let from = this.left === null ? count - span : recording.indexOf(this.left);
    const index = chosen ? recording.indexOf(chosen.step_id) : null;
    if (index !== null && (index < from || index >= from + span)) from = index - Math.floor(span / 2);
    from = Math.max(0, Math.min(from, count - span));
    if (chosen) this.left = recording.steps[from]?.step_id ?? null;
    return { from, span, to: Math.min(count, from + span), count };
  }

  /** Draw so many times as many steps, with the step at a share of the width in its place. */
  zoom(factor, share = 0.5) {
    const { from, span, count } = this.window();
    const next = Math.round(Math.max(MIN_SPAN, Math.min(span * factor + (factor > 1), Math.max(count, MIN_SPAN))));
    const isAtEnd = this.left === null && share > 0.9;
    this.span = next;
    this.goTo(isAtEnd ? null : from + (span - next) * share);
  }

  /** Let the window begin at the place of a step; null: let it follow the newest. */
  goTo(from) {
    const { recording } = this.xray;
    const { span, count } = this.window();
    const isNewest = from === null || (!this.xray.chosen && from + span >= count);
    this.left = isNewest ? null : recording.steps[Math.max(0, Math.min(count - 1, Math.round(from)))].step_id;
    this.xray.options.changed();
  }

  all() {
    this.span = Infinity;
    this.goTo(0);
  }

  /** Zoom by the wheel, move by a wheel to the side. Over a tall picture the wheel alone scrolls the page. */
  wheel(event, isTall) {
    if (isTall && !event.ctrlKey && Math.abs(event.deltaX) <= Math.abs(event.deltaY) && !event.shiftKey) return;
    if (!this.xray.recording.steps.length) return;
    event.preventDefault();
    const [begin, size] = this.extent(event.currentTarget);
    const isAside = event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY);
    const { from, span, count } = this.window();
    if (isAside) return this.goTo(from + Math.sign(event.deltaX || event.deltaY) * Math.max(1, span / 10));
    let share = Math.max(0, Math.min(1, (event.clientX - begin) / size));
    if (!isTall) share = Math.max(0, Math.min(1, (share * (count - 1) - from) / span)); // the strip has all steps
    this.zoom(Math.exp(Math.sign(event.deltaY) * 0.22), share);
  }

  extent(element) {
    const { left, width } = element.getBoundingClientRect();
    return element.id === "gantt" ? [left + LABELS, width - LABELS] : [left + EDGE, width - 2 * EDGE];
  }

  /** Handlers of an element on which two fingers zoom and one moves the window. */
  touch() {
    const end = (event) => this.pointers.delete(event.pointerId);
    return {
      onPointerDown: (event) => { this.pointers.set(event.pointerId, event.clientX); this.isDragged = false; },
      onPointerMove: (event) => this.drag(event),
      onPointerUp: end, onPointerCancel: end, onPointerLeave: end,
    };
  }

  drag(event) {
    const before = this.pointers.get(event.pointerId);
    if (before === undefined || Math.abs(event.clientX - before) < 4) return;
    const [begin, size] = this.extent(event.currentTarget);
    const other = [...this.pointers].find(([id]) => id !== event.pointerId)?.[1];
    if (other === undefined) {
      const { from, span } = this.window();
      const steps = Math.round(((before - event.clientX) * span) / size);
      if (!steps) return;
      this.goTo(from + steps);
    } else {
      const apart = Math.max(8, Math.abs(event.clientX - other));
      this.zoom(Math.abs(before - other) / apart, Math.max(0, Math.min(1, ((event.clientX + other) / 2 - begin) / size)));
    }
    this.isDragged = true;
    this.pointers.set(event.pointerId, event.clientX);
  }

  /** `beside` is drawn behind the search. */
  draw(beside) {
    const { xray } = this;
    const { steps } = xray.recording;
    if (!steps.length) return html`<div class="scrubber"><div class="strip none"></div><div class="search">${beside}</div></div>`;
    const { from, to, count } = this.window();
    const index = xray.recording.indexOf(xray.step.step_id);
    const width = xray.width + 26;
    const x = (at) => EDGE + ((width - 2 * EDGE) * at) / Math.max(1, count - 1);
    const most = Math.max(...steps.map((step) => step.num_requests), 1);
    let [area, ticks] = [`M${EDGE} ${STRIP}`, ""];
    steps.forEach((step, i) => {
      area += `L${x(i).toFixed(1)} ${(STRIP - ((STRIP - 12) * step.num_requests) / most).toFixed(1)}`;
      if (step.requests.some(isPrefill)) ticks += `M${x(i).toFixed(1)} 0v8`;
    });
    const search = (event) => { event.preventDefault(); xray.search(); };
    const label = `step ${xray.step.step_id}, ${index + 1} of ${count}`;
    return html`<div class="scrubber">
      <div class="strip" onWheel=${(event) => this.wheel(event, false)} title=${`${plural(count, "step")} recorded, at most ${plural(most, "request")} at once. Ticks: steps with prefill. The wheel zooms the window of the pane Steps.`}>
        <svg width=${width} height=${STRIP} aria-hidden="true"><rect class="window" x=${x(from) - 2} y="0" width=${Math.max(4, x(Math.min(to, count) - 1) - x(from) + 4)} height=${STRIP} />
          <path class="running" d=${`${area}L${x(count - 1)} ${STRIP}z`} /><path class="prefills" d=${ticks} /><line class="now" x1=${x(index)} x2=${x(index)} y1="0" y2=${STRIP} /></svg>
        <input type="range" aria-label="Step" aria-valuetext=${label} min="0" max=${count - 1} value=${index}
          onInput=${(event) => xray.chooseAt(Number(event.target.value))} /></div>
      <form class="search" role="search" onSubmit=${search}><span role="group" aria-label="Zoom"><button type="button" aria-label="Zoom in" onClick=${() => this.zoom(0.6)}>+</button>
        <button type="button" aria-label="Zoom out" onClick=${() => this.zoom(1.6)}>−</button> <button type="button" onClick=${() => this.all()}>All steps</button></span>
        <label><span class="word">Find</span> <input aria-label="Find" type="search" size="14" placeholder="request or text" value=${xray.wanted} onInput=${(event) => xray.set({ wanted: event.target.value, found: "" })} /></label> <button>Next</button>
        <output aria-label="Found">${xray.found}</output>${beside}</form></div>`;
  }
}

/** Draw the steps of the window, a row for each request. */
export function drawSteps(xray) {
  const { recording, step, width, scrubber } = xray;
  const below = about(
    `A column is an engine step, a row a request: dots while it waits, stripes for chunks of its prompt, solid for decodes; a number counts tokens if there are several. ${tap} a step ${isTouch ? "or drag the slider: all panes and the chat show that step. Two fingers zoom." : "or use ← → Home End and the page keys, or drag the slider: all panes and the chat show that step. Ctrl and wheel, two fingers, + and − zoom."}`,
    `tokens of a step = Σ tokens of its requests ≤ ${recording.live.header.engine.max_num_batched_tokens} (max_num_batched_tokens)`,
    "src/quire/scheduler/step_plan.py");
  if (!step) return html`<p class="hint">No step yet: send a message, and watch its prompt and its tokens being computed.</p>${below}`;
  const { from, to, span } = scrubber.window();
  const shown = recording.steps.slice(from, to);
  const { waiting } = xray.state;
  const ids = [...new Set([...shown.flatMap((item) => item.requests.map((share) => share.id)), ...waiting.keys()])];
  const numRows = Math.min(ids.length, MAX_ROWS);
  const bar = Math.max(44, Math.min(120, (xray.height - TEXT - BELOW - 24 * numRows) / 2.5));
  const row = Math.max(24, Math.min(44, (xray.height - TEXT - BELOW - 2 * bar) / numRows));
  const rows = new Map(ids.slice(-MAX_ROWS).map((id, i) => [id, i * row + row / 2 + 6]));
  const [begin, finish] = [shown[0].begin, shown.at(-1).t];
  const isTime = xray.axis === "time";
  const column = (width - LABELS) / (isTime ? 1 : span);
  const x = (i) => LABELS + column * (!isTime ? i : i < shown.length ? (shown[i].begin - begin) / (finish - begin) : 1);
  const xOfTime = (time) => {
    const i = shown.findIndex((item) => item.begin >= time - 1e-4);
    if (isTime) return LABELS + column * Math.max(0, Math.min(1, (time - begin) / (finish - begin)));
    return x(i < 0 ? shown.length : i);
  };
  const gap = !isTime && column >= 6 ? 1 : 0;
  const top = numRows * row + 24;
  const tall = row - 6;
  const stepAt = (event) => {
    const at = event.clientX - event.currentTarget.getBoundingClientRect().left;
    return isTime ? Math.max(0, shown.findLastIndex((_, i) => x(i) <= at)) : Math.max(0, Math.min(shown.length - 1, Math.floor((at - LABELS) / column)));
  };
  const onKey = (event) => {
    const offset = { ArrowLeft: -1, ArrowRight: 1, PageUp: Math.round(span / 4), PageDown: -Math.round(span / 4), Home: -Infinity, End: Infinity }[event.key];
    const factor = { "+": 0.6, "=": 0.6, "-": 1.6 }[event.key];
    if (!offset && !factor) return;
    event.preventDefault();
    if (factor) scrubber.zoom(factor, (recording.indexOf(step.step_id) - from) / span);
    else xray.move(offset);
  };
  const chosenAt = recording.indexOf(step.step_id) - from;
  const tokens = Math.max(...shown.map((item) => item.num_tokens), 1);
  const longest = Math.max(...shown.map((item) => item.duration_s));
  return html`
    <div class="tools"><label>Width of a step: <select value=${xray.axis} onChange=${(e) => xray.set({ axis: e.target.value })}>
      <option value="steps">equal</option><option value="time">its time</option></select></label></div>
    <svg id="gantt" role="img" tabindex="0" aria-label=${`Timeline of ${plural(shown.length, "step")} and ${plural(rows.size, "request")}; step ${step.step_id} is chosen`}
      width=${width} height=${top + 2 * bar + 44} onKeyDown=${onKey} onWheel=${(event) => scrubber.wheel(event, true)} ...${scrubber.touch()}
      onClick=${(event) => { if (!scrubber.isDragged) xray.chooseAt(from + stepAt(event)); }}>
      ${PATTERNS}<rect class="chosen" x=${x(chosenAt)} y="0" width=${Math.max(2, x(chosenAt + 1) - x(chosenAt) - gap)} height=${top + 2 * bar + 30}><title>step ${step.step_id}, ${plural(step.num_tokens, "token")}, ${ms(step.duration_s)}</title></rect>
      ${[...rows].map(([id, y]) => html`<g class="cells">${runsOf(shown, id, gap).map(([first, end, isPrompt, count]) => {
        const [left, size] = [x(first), Math.max(1, x(end) - x(first) - gap)];
        return html`<rect x=${left} y=${y - 3 - row / 2} width=${size} height=${tall} class=${`fill${recording.request(id).colour}`} />
          ${isPrompt && html`<rect x=${left} y=${y - 3 - row / 2} width=${size} height=${tall} fill="url(#stripes)" />`}
          ${count > 1 && size > 7 * String(count).length && html`<text x=${left + size / 2} y=${y - 1} class="count">${count}</text>`}`;
      })}</g>`)}
      ${[...rows].map(([id, y]) => {
        const { admit } = recording.request(id);
        const [arrived, admitted] = waiting.has(id) ? [waiting.get(id), finish] : [admit?.arrival_s, admit?.t];
        if (!arrived || admitted < begin) return null;
        const [left, end] = [xOfTime(arrived), xOfTime(admitted)];
        return end - left > 2 && html`<line class="queue" x1=${left} x2=${end - 1} y1=${y - 5} y2=${y - 5} />`;
      })}
      ${[...rows].map(([id, y]) => html`<text x="0" y=${y} class="letter">${recording.request(id).letter}${recording.request(id).served &&
        html`<title>${recording.request(id).served.map(([name, left, end]) => `${name} ${ms(end - left)}`).join(", ")}</title>`}</text>
        <text x="22" y=${y} class="small state">${xray.statusOf(id)}</text>`)}
      <g class="over">${bars(shown, x, gap, width, top, bar, "tokens", (item) => item.num_tokens, tokens, String)}
      ${bars(shown, x, gap, width, top + bar + 20, bar, "time", (item) => item.duration_s, longest, ms)}</g>
    </svg>
    ${ids.length > rows.size && html`<p class="hint">${ids.length - rows.size} older requests are not drawn.</p>`}
    ${stepTable(xray, step, shown)}${below}`;
}

/** Return what a request does in each step: first step, end, whether it is its prompt, tokens. Without a gap between columns equal steps are one. */
function runsOf(shown, id, gap) {
  const runs = [];
  shown.forEach((step, i) => {
    const share = step.requests.find((item) => item.id === id);
    if (!share) return;
    const isPrompt = isPrefill(share);
    const last = runs.at(-1);
    if (!gap && last && last[1] === i && last[2] === isPrompt) last[1] = i + 1;
    else runs.push([i, i + 1, isPrompt, gap ? (isPrompt ? share.count : share.new.length) : 0]);
  });
  return runs;
}

/** Draw a value of each step on a linear scale from 0 to the most, both written beside it. */
function bars(shown, x, gap, width, top, tall, label, value, most, text) {
  const bottom = top + tall + 4;
  const path = shown.map((item, i) => {
    const height = Math.max(0.5, (tall * value(item)) / most);
    return `M${x(i).toFixed(1)} ${(bottom - height).toFixed(1)}h${Math.max(0.7, x(i + 1) - x(i) - gap).toFixed(1)}v${height.toFixed(1)}h${(-Math.max(0.7, x(i + 1) - x(i) - gap)).toFixed(1)}z`;
  }).join("");
  return html`<path class="grid" d=${`M${LABELS} ${top + 4}H${width}M${LABELS} ${bottom + 0.5}H${width}`} /><path class="tokens" d=${path} />
    <text x="0" y=${(top + bottom) / 2 + 4} class="small">${label}</text><text x=${LABELS - 4} y=${top + 10} class="small end">${text(most)}</text><text x=${LABELS - 4} y=${bottom + 2} class="small end">0</text>`;
}

function stepTable(xray, step, shown) {
  const times = shown.map((item) => item.duration_s).sort((a, b) => a - b);
  const ratio = step.duration_s / times[times.length >> 1];
  const numPrompt = step.requests.filter(isPrefill).reduce((sum, share) => sum + share.count, 0);
  const why = ratio < 1.3 ? "" : `${ratio.toFixed(1)} times the median of the steps shown` +
    (numPrompt ? `: it computed ${plural(numPrompt, "prompt token")}` : step.num_iterations > 1 ? `: it decoded ${step.num_iterations} times` : "") + ". ";
  return html`<h3>Step ${step.step_id}</h3>
    <p>${plural(step.num_requests, "request")}, ${plural(step.num_tokens, "token")}${step.num_iterations > 1 ? ` in ${step.num_iterations} passes` : ""}, ${step.waiting} waiting${step.num_drafts ? `, ${step.num_accepted} of ${plural(step.num_drafts, "draft")} right` : ""}. ${ms(step.duration_s)} = schedule ${ms(step.schedule_s)} + execute ${ms(step.execute_s)} + output ${ms(step.output_s)} + rest; measured once. ${why}</p>
    <div class="scroll" tabindex="0"><table><thead><tr><th>Request</th><th>Phase</th><th>Positions</th><th>New tokens</th></tr></thead>
    <tbody>${step.requests.slice(0, 40).map((share) => html`<tr><td>${xray.badge(share.id)}</td><td>${isPrefill(share) ? "prefill" : share.drafts ? `verify ${plural(share.drafts, "draft")}: ${right(share)} right, ${share.drafts - right(share)} rejected` : "decode"}</td>
      <td>${share.start}${share.count > 1 ? `–${share.start + share.count - 1}` : ""}</td>
      <td>${share.new.length ? share.new.map((_, i) => html`<code>${xray.pieceOf(step, share, i)}</code> `) : "none: the prompt goes on"}</td></tr>`)}</tbody></table></div>
    ${step.requests.some((share) => share.new.some((_, i) => xray.pieceOf(step, share, i) === "·")) && html`<p class="hint">A dot is a token whose text stays in the engine unless the server has --xray-text.</p>`}`;
}
