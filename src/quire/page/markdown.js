/**
 * Markdown of answers as safe HTML: markup in an answer is shown as text, links lead to http, https and mail only, and
 * formulas between dollars or TeX's brackets become MathML. Next to read: math.js, chat.js.
 */
import { html } from "./drawing.js";
import { mathml } from "./math.js";
import MarkdownIt from "./vendor/markdown-it.js";

const reader = new MarkdownIt({ html: false, linkify: false, breaks: true });
const { escapeHtml } = reader.utils;
// A picture would ask its address from somewhere: the page loads nothing from elsewhere.
reader.disable("image");
reader.renderer.rules.fence = (tokens, index) => {
  const { info, content } = tokens[index];
  return `<div class="fence"><div class="fence-bar"><span>${escapeHtml(info.trim().split(/\s/)[0])}</span><button type="button" data-copy>Copy code</button></div><pre tabindex="0"><code>${escapeHtml(content)}</code></pre></div>`;
};
const table = reader.renderer.rules.table_open ?? ((tokens, index, options, env, self) => self.renderToken(tokens, index, options));
reader.renderer.rules.table_open = (...parts) => `<div class="scroll" tabindex="0">${table(...parts)}`;
reader.renderer.rules.table_close = () => "</table></div>";
reader.renderer.rules.link_open = (tokens, index, options, env, self) => {
  tokens[index].attrSet("target", "_blank");
  tokens[index].attrSet("rel", "noopener noreferrer");
  return self.renderToken(tokens, index, options);
};
reader.validateLink = (address) => /^(https?:|mailto:)/i.test(address.trim());

// --- Formulas ---------------------------------------------------------------------------------

// Where a formula begins → its end, and whether it stands in a block of its own.
const MARKS = [["$$", /(?<!\\)\$(?=\$)/g, true], ["\\[", /\\\]/g, true], ["\\(", /\\\)/g, false], ["$", /(?<!\\)\$/g, false]];
const EMPTY_LINE = /\n(?=[^\S\n]*\n)/g;
const LAST_ON_LINE = /(?<=\$\$|\\\])(?=[^\S\n]*(?:\n|$))/g;

/** Return where a pattern is first found in a state's text from a place on; the text's length if nowhere.
 *  The text is searched once: many beginnings without an end would else each search all of it. */
function find(state, pattern, start) {
  const found = (state.places ??= new Map());
  if (!found.has(pattern)) found.set(pattern, Array.from(state.src.matchAll(pattern), ({ index }) => index));
  const places = found.get(pattern);
  let [low, high] = [0, places.length];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (places[middle] < start) low = middle + 1;
    else high = middle;
  }
  return places[low] ?? state.src.length;
}

/** Return [its TeX, the place behind it, whether it is a block] of a formula that begins at a place; null without one. */
function formulaAt(state, place) {
  const text = state.src;
  const [open, close, isBlock] = MARKS.find(([mark]) => text.startsWith(mark, place)) ?? [];
  if (!open) return null;
  const start = place + open.length;
  const end = find(state, close, start);
  if (end === text.length || find(state, EMPTY_LINE, start) < end) return null;
  // Two prices are no formula.
  if (open === "$" && (/\s/.test(text[start] + text[end - 1]) || /\d/.test(text[end + 1] ?? ""))) return null;
  const tex = text.slice(start, end);
  return tex.trim() ? [tex, end + open.length, isBlock] : null;
}

reader.inline.ruler.before("escape", "formula", (state, isSilent) => {
  const found = formulaAt(state, state.pos);
  if (!found || found[1] > state.posMax) return false;
  const [tex, end, isBlock] = found;
  if (!isSilent) Object.assign(state.push("formula", "", 0), { content: tex, meta: isBlock });
  state.pos = end;
  return true;
});
// Lines of a formula would else be read as lists, headings or rules.
reader.block.ruler.before("fence", "formulas", (state, line, lastLine, isSilent) => {
  const start = state.bMarks[line] + state.tShift[line];
  if (!/^(\$\$|\\\[)/.test(state.src.slice(start, start + 2))) return false;
  const found = formulaAt(state, start);
  if (!found || found[1] > state.eMarks[lastLine - 1]) return false;
  if (find(state, LAST_ON_LINE, found[1]) > found[1]) return false;
  let last = line;
  while (state.eMarks[last] < found[1]) last++;
  if (!isSilent) Object.assign(state.push("formula", "", 0), { content: found[0], meta: true, block: true });
  state.line = last + 1;
  return true;
}, { alt: ["paragraph", "list", "blockquote"] });
reader.renderer.rules.formula = (tokens, index) => (tokens[index].meta ? `<div class="formula scroll" tabindex="0">${mathml(tokens[index].content, true)}</div>` : mathml(tokens[index].content, false));

// --- Drawing ----------------------------------------------------------------------------------

/** Draws Markdown. A click on "Copy code" copies its block. */
export function Markdown({ text }) {
  return html`<div class="markdown" onClick=${copyCode} dangerouslySetInnerHTML=${{ __html: reader.render(text) }}></div>`;
}

function copyCode(event) {
  const button = event.target.closest("[data-copy]");
  if (button) copy(button.closest(".fence").querySelector("pre").innerText, button);
}

/** Copy a text; the button says for a moment what became of it. */
export async function copy(text, button) {
  const label = button.textContent;
  // Browsers have a clipboard for pages of https and of this machine only.
  const done = await (navigator.clipboard?.writeText(text) ?? Promise.reject()).then(() => "Copied", () => "The browser forbids it");
  button.textContent = done;
  setTimeout(() => { button.textContent = label; }, 1500);
}
