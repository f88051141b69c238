/**
 * Markdown of answers as safe HTML: markup in an answer is shown as text, and links lead to http, https and mail only.
 * Next to read: chat.js.
 */
import MarkdownIt from "./vendor/markdown-it.js";
import { html } from "./xray.js";

const reader = new MarkdownIt({ html: false, linkify: false, breaks: true });
// A picture would ask its address from somewhere: the page loads nothing from elsewhere.
reader.disable("image");
const fence = reader.renderer.rules.fence;
reader.renderer.rules.fence = (...parts) => `<div class="fence"><button type="button" data-copy>Copy code</button>${fence(...parts)}</div>`;
const table = reader.renderer.rules.table_open ?? ((tokens, index, options, env, self) => self.renderToken(tokens, index, options));
reader.renderer.rules.table_open = (...parts) => `<div class="scroll" tabindex="0">${table(...parts)}`;
reader.renderer.rules.table_close = () => "</table></div>";
reader.renderer.rules.link_open = (tokens, index, options, env, self) => {
  tokens[index].attrSet("target", "_blank");
  tokens[index].attrSet("rel", "noopener noreferrer");
  return self.renderToken(tokens, index, options);
};
reader.validateLink = (address) => /^(https?:|mailto:)/i.test(address.trim());

/** Draws Markdown. A click on "Copy code" copies its block. */
export function Markdown({ text }) {
  return html`<div class="markdown" onClick=${copyCode} dangerouslySetInnerHTML=${{ __html: reader.render(text) }}></div>`;
}

function copyCode(event) {
  const button = event.target.closest("[data-copy]");
  if (button) copy(button.nextElementSibling.innerText, button);
}

/** Copy a text; the button says for a moment what became of it. */
export async function copy(text, button) {
  const label = button.textContent;
  const done = await navigator.clipboard.writeText(text).then(() => "Copied", () => "The browser forbids it");
  button.textContent = done;
  setTimeout(() => { button.textContent = label; }, 1500);
}
