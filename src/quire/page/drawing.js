/**
 * Helpers of all drawings: templates, numbers as text, the lines below a picture.
 */
import { h, render } from "./vendor/preact.js";
import htm from "./vendor/htm.js";

export const html = htm.bind(h);
export { render };

const UNITS = [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]];
/** Return a number with three significant digits and a unit prefix. */
export function short(value, unit = "") {
  const [size, prefix] = UNITS.find(([limit]) => Math.abs(value) >= limit) ?? [1, ""];
  return `${+(value / size).toPrecision(3)}${prefix || unit ? " " : ""}${prefix}${unit}`;
}
export const ms = (seconds) => `${(seconds * 1e3).toFixed(seconds < 0.01 ? 2 : 1)} ms`;
export const plural = (count, word) => `${count.toLocaleString("en")} ${word}${count === 1 ? "" : "s"}`;

/** Return the lines below every picture: what it shows, its formula, its source. */
export function about(what, formula, source) {
  return html`<div class="about"><p>${what}</p><p><span>Formula</span> <code>${formula}</code></p>
    <p><span>Source</span> <code>${source}</code></p></div>`;
}

export const PATTERNS = html`<defs><pattern id="stripes" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)"><rect class="stripe" width="2" height="6" /></pattern></defs>`;
