/**
 * The panes Requests and Log: the way of each request through the server, and the events themselves.
 */
import { about, html, ms } from "./drawing.js";

const WAY = { receive: 4, validate: 6, tokenise: 7, prefill: 1, decode: 0, send: 2 }; // Colours; all else is grey.
const NAMES = 96; // Width of the column of names.
const TIMES = 70;

/** Draw the way of each request. */
export function drawRequests(xray) {
  const { recording, width } = xray;
  const below = about("The way of each request: the server receives, validates and tokenises it, it waits, steps prefill and decode it, and its text is sent. A bar begins when the request came and ends with its last byte; all bars have one scale. The server's part is known when the request has ended.",
    "whole = server before + waiting + steps (with the detokenising in them) + server behind", "src/quire/server/request_record.py, src/quire/engine/recorder.py");
  const ways = [...recording.known.keys()].filter((id) => xray.statusOf(id) !== "later").slice(-16).map((id) => recording.way(id, xray.step)).filter((way) => way.length);
  if (!ways.length) return html`<p class="hint">No request yet: send a message.</p>${below}`;
  const longest = Math.max(...ways.map((way) => way.at(-1).to - way[0].from));
  const size = (width - NAMES) / longest;
  const chosen = ways.reverse().find(({ id }) => id === xray.request) ?? ways[0];
  return html`<div class="scroll" tabindex="0"><table id="ways"><thead><tr><th>Request</th><th>Way: the width is ${ms(longest)}</th></tr></thead><tbody>
    ${ways.map((way) => html`<tr><td>${xray.badge(way.id)}</td><td>${bar(way, way, size, `Way of request ${recording.request(way.id).letter}`)}
      ${[...partsOf(way)].map(([name, { time, count }]) => html`<span class="part"><span class=${`key ${WAY[name] ? `o${WAY[name]}` : "free"}`}> </span> ${name}${count ? ` ×${count}` : ""} ${ms(time)}</span> `)}
      ${way.detokenise > 0 && html`<span class="part">detokenise, within the steps, ${ms(way.detokenise)}</span>`}</td></tr>`)}</tbody></table></div>
    <h3>${xray.badge(chosen.id)} part by part</h3>${drawParts(chosen, width - NAMES - TIMES)}${below}`;
}

/** Draw a row for each part of one way, at its place in time. */
function drawParts(way, width) {
  const size = width / (way.at(-1).to - way[0].from);
  return html`<table class="parts"><tbody>${[...partsOf(way)].map(([name, { time, items }]) => html`<tr><td>${name}</td><td>${bar(way, items, size, `${name}: ${ms(time)}`)}</td><td>${ms(time)}</td></tr>`)}</tbody></table>`;
}

/** Return the parts of a way by name: their time, the number of steps, and the stretches themselves. */
function partsOf(way) {
  const parts = new Map();
  for (const item of way) {
    const part = parts.get(item.name) ?? { time: 0, count: 0, items: [] };
    parts.set(item.name, { time: part.time + item.to - item.from, count: part.count + (item.count ?? 0), items: [...part.items, item] });
  }
  return parts;
}

/** Draw stretches of a way with so many pixels a second. */
function bar(way, items, size, label) {
  return html`<svg role="img" aria-label=${label} width=${(way.at(-1).to - way[0].from) * size + 1} height="18">${items.map(({ name, from, to }) => html`
    <rect class=${WAY[name] ? `fill${WAY[name]}` : "free"} x=${(from - way[0].from) * size} y="2" width=${Math.max(1, (to - from) * size)} height="14"><title>${name} ${ms(to - from)}</title></rect>`)}</svg>`;
}

/** Draw the event log. */
export function drawLog(xray) {
  const { recording } = xray;
  const end = xray.chosen ? xray.chosen.at + 1 - recording.numDropped : recording.lines.length;
  const start = recording.lines[0]?.t ?? 0;
  const shown = [];
  for (let i = end - 1; i >= 0 && shown.length < 200; i--) {
    const line = recording.lines[i];
    const letter = line.id ? recording.request(line.id).letter : "";
    const kind = line.kind ?? "header";
    const { t, kind: _, id, requests, ops, new_requests, model, engine, cached, ...rest } = line;
    if (ops) rest.instructions = ops.length;
    const text = Object.entries(rest).filter(([, value]) => !(Array.isArray(value) && !value.length)).map(([name, value]) => `${name}=${typeof value === "number" ? +value.toPrecision(4) : JSON.stringify(value)}`).join(" ");
    if (!xray.filter || kind.includes(xray.filter) || letter === xray.filter.toUpperCase()) shown.push({ at: i, t: t - start, kind, letter, id, text });
  }
  return html`<div class="tools"><label>Kind or letter: <input value=${xray.filter} onInput=${(e) => xray.set({ filter: e.target.value.trim() })} size="10" /></label></div>
    <div class="scroll" tabindex="0"><table class="log"><thead><tr><th>Seconds</th><th>Event</th><th>Request</th><th>Data</th></tr></thead><tbody>
    ${shown.map((line) => html`<tr key=${line.at}><td>${line.t.toFixed(3)}</td><td>${line.kind}</td><td>${line.id ? xray.badge(line.id) : ""}</td><td><code>${line.text}</code></td></tr>`)}</tbody></table></div>
    ${about("The engine's own event log, newest first. Metrics, traces and every pane here are read from these lines.", "t: seconds since the first line that is kept", "src/quire/events.py, src/quire/engine/recorder.py")}`;
}
