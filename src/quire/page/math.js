/**
 * Formulas: from the TeX that models write to MathML, which browsers draw without fonts or styles of ours. (Libraries for
 * it are larger than the rest of the page, and set styles on elements, which the page's security policy forbids.)
 * What it does not know is shown as TeX. Next to read: markdown.js.
 */
const MAX_LENGTH = 10_000;
const MAX_DEPTH = 60;

const table = (text) => new Map(text.trim().split(/\s+/).map((pair) => pair.split(":")));
const LETTERS = table(`
  alpha:α beta:β gamma:γ delta:δ epsilon:ϵ varepsilon:ε zeta:ζ eta:η theta:θ vartheta:ϑ iota:ι kappa:κ lambda:λ mu:μ nu:ν xi:ξ omicron:ο pi:π varpi:ϖ
  rho:ρ varrho:ϱ sigma:σ varsigma:ς tau:τ upsilon:υ phi:ϕ varphi:φ chi:χ psi:ψ omega:ω Gamma:Γ Delta:Δ Theta:Θ Lambda:Λ Xi:Ξ Pi:Π Sigma:Σ Upsilon:Υ Phi:Φ
  Psi:Ψ Omega:Ω infty:∞ partial:∂ nabla:∇ hbar:ℏ ell:ℓ Re:ℜ Im:ℑ aleph:ℵ emptyset:∅ varnothing:∅ imath:ı jmath:ȷ angle:∠ triangle:△ top:⊤ bot:⊥ degree:° square:□ checkmark:✓`);
const OPERATORS = table(`
  times:× div:÷ cdot:⋅ pm:± mp:∓ ast:∗ star:⋆ circ:∘ bullet:∙ oplus:⊕ ominus:⊖ otimes:⊗ odot:⊙ cup:∪ cap:∩ setminus:∖ wedge:∧ land:∧ vee:∨ lor:∨ neg:¬ lnot:¬
  le:≤ leq:≤ ge:≥ geq:≥ ne:≠ neq:≠ ll:≪ gg:≫ approx:≈ equiv:≡ sim:∼ simeq:≃ cong:≅ propto:∝ prec:≺ succ:≻ mid:∣ nmid:∤ parallel:∥ perp:⊥ models:⊨ vdash:⊢
  in:∈ notin:∉ ni:∋ subset:⊂ subseteq:⊆ subsetneq:⊊ supset:⊃ supseteq:⊇ forall:∀ exists:∃ nexists:∄ therefore:∴ because:∵
  to:→ rightarrow:→ longrightarrow:⟶ leftarrow:← gets:← leftrightarrow:↔ Rightarrow:⇒ implies:⟹ Longrightarrow:⟹ Leftarrow:⇐ Leftrightarrow:⇔ iff:⟺ mapsto:↦ uparrow:↑ downarrow:↓ hookrightarrow:↪ rightleftharpoons:⇌
  ldots:… dots:… dotsc:… cdots:⋯ dotsb:⋯ vdots:⋮ ddots:⋱ colon:: prime:′ backslash:\\ lt:< gt:> vert:| Vert:‖ lVert:‖ rVert:‖ lvert:| rvert:| langle:⟨ rangle:⟩ lfloor:⌊ rfloor:⌋ lceil:⌈ rceil:⌉ lbrace:{ rbrace:} lbrack:[ rbrack:]`);
const LARGE = table("sum:∑ prod:∏ coprod:∐ bigcup:⋃ bigcap:⋂ bigoplus:⨁ bigotimes:⨂ bigvee:⋁ bigwedge:⋀");
const INTEGRALS = table("int:∫ iint:∬ iiint:∭ oint:∮");
const ACCENTS = table("hat:^ widehat:^ bar:¯ overline:¯ vec:→ overrightarrow:→ dot:˙ ddot:¨ tilde:~ widetilde:~ check:ˇ overbrace:⏞");
const UNDER = table("underline:_ underbrace:⏟");
const SPACES = new Map([[",", 0.17], [":", 0.22], [">", 0.22], [";", 0.28], [" ", 0.25], ["!", 0], ["quad", 1], ["qquad", 2], ["thinspace", 0.17], ["enspace", 0.5]]);
const FUNCTIONS = new Set("sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh log ln lg exp arg deg dim ker hom".split(" "));
const LIMITS = new Set("lim max min sup inf limsup liminf gcd det Pr argmax argmin".split(" "));
const FONTS = table("mathbf:b boldsymbol:b bm:b mathbb:B mathcal:C mathscr:C mathfrak:F mathit:i mathrm:n mathsf:n mathtt:n mathnormal:i operatorname:n");
const TEXTS = new Set(["text", "textrm", "textbf", "textit", "textsf", "texttt", "mbox", "hbox"]);
const SIZES = new Set(["big", "Big", "bigg", "Bigg", "bigl", "bigr", "Bigl", "Bigr", "biggl", "biggr", "Biggl", "Biggr", "bigm", "Bigm"]);
const IGNORED = new Set(["displaystyle", "textstyle", "scriptstyle", "limits", "nolimits", "nonumber", "notag", "hline", "allowbreak"]);
const FENCES = { matrix: ["", ""], smallmatrix: ["", ""], pmatrix: ["(", ")"], bmatrix: ["[", "]"], Bmatrix: ["{", "}"], vmatrix: ["|", "|"], Vmatrix: ["‖", "‖"], cases: ["{", ""], array: ["", ""] };
const ALIGNED = new Set(["aligned", "align", "split", "eqnarray", "alignat", "equation", "gathered", "gather", "multline"]);
const FIRST = { b: ["𝐀", "𝐚", "𝟎"], B: ["𝔸", "𝕒", "𝟘"], C: ["𝒜", "𝒶", null], F: ["𝔄", "𝔞", null] };
const ODD = { BC: "ℂ", BH: "ℍ", BN: "ℕ", BP: "ℙ", BQ: "ℚ", BR: "ℝ", BZ: "ℤ", CB: "ℬ", CE: "ℰ", CF: "ℱ", CH: "ℋ", CI: "ℐ", CL: "ℒ", CM: "ℳ", CR: "ℛ", Ce: "ℯ", Cg: "ℊ", Co: "ℴ", FC: "ℭ", FH: "ℌ", FI: "ℑ", FR: "ℜ", FZ: "ℨ" };

const escaped = (text) => text.replace(/[&<>"]/g, (sign) => `&#${sign.charCodeAt(0)};`);
const row = (parts) => (parts.length === 1 ? parts[0] : `<mrow>${parts.join("")}</mrow>`);
const operator = (sign, attributes = "") => `<mo${attributes}>${escaped(sign)}</mo>`;
const fence = (sign) => (sign ? operator(sign, ' stretchy="true" fence="true"') : "");
const spread = (cells) => `<mtable>${cells.map((line) => `<mtr>${line.map((cell) => `<mtd>${cell}</mtd>`).join("")}</mtr>`).join("")}</mtable>`;

/** Return TeX as MathML, in a block of its own if `isBlock`; as the TeX itself where there is something unknown. */
export function mathml(tex, isBlock) {
  try {
    if (tex.length > MAX_LENGTH) throw new Error("too long");
    const parser = new Parser(tex);
    const parts = parser.list(() => false);
    return `<math${isBlock ? ' display="block"' : ""}>${row(parser.lines(parts))}</math>`;
  } catch {
    return `<code class="tex">${escaped(tex)}</code>`;
  }
}

class Parser {
  constructor(tex) {
    const found = Array.from(tex.matchAll(/\\[a-zA-Z]+\*?|\\[\s\S]|\d+(?:[.,]\d+)*|[^\s]/gu));
    this.tokens = found.map(([token]) => token);
    this.places = found.map(({ index }) => index);
    Object.assign(this, { tex, at: 0, depth: 0, font: null });
  }

  next() {
    if (this.at === this.tokens.length) throw new Error("unexpected end");
    return this.tokens[this.at++];
  }

  peek() {
    return this.tokens[this.at];
  }

  skip(token) {
    if (this.peek() !== token) return false;
    this.at++;
    return true;
  }

  /** Return the parts up to a token for which `ends` holds, which is not read. Line breaks outside tables are kept. */
  list(ends) {
    if (++this.depth > MAX_DEPTH) throw new Error("too deep");
    const parts = [];
    while (this.at < this.tokens.length && !ends(this.peek())) {
      if (this.peek() === "\\\\" || this.peek() === "&") {
        if (this.next() === "\\\\") parts.push(null);
      } else parts.push(this.scripted());
    }
    this.depth--;
    return parts;
  }

  /** Return parts with line breaks (null) as the lines of a table. */
  lines(parts) {
    if (!parts.includes(null)) return parts;
    const lines = [[]];
    for (const part of parts) part === null ? lines.push([]) : lines.at(-1).push(part);
    return [spread(lines.map((line) => [row(line)]))];
  }

  /** Return an atom with its scripts. */
  scripted() {
    const first = this.peek();
    const name = first.startsWith("\\") ? first.slice(1) : "";
    const isAbove = LARGE.has(name) || LIMITS.has(name) || ["underbrace", "overbrace"].includes(name);
    const base = ["^", "_"].includes(first) ? "<mrow></mrow>" : this.atom();
    let [below, above] = ["", ""];
    for (;;) {
      if (this.skip("^")) above += this.argument();
      else if (this.skip("_")) below += this.argument();
      else if (this.skip("'")) above += operator("′");
      else if (!this.skip("\\limits") && !this.skip("\\nolimits")) break;
    }
    if (!below && !above) return base;
    const tag = `m${below ? (isAbove ? "under" : "sub") : ""}${above ? (isAbove ? "over" : "sup") : ""}`;
    return `<${tag}>${base}${below && `<mrow>${below}</mrow>`}${above && `<mrow>${above}</mrow>`}</${tag}>`;
  }

  /** Return what stands in braces, or one atom: of a number its first digit. */
  argument() {
    const token = this.peek();
    if (!/^\d./.test(token ?? "")) return this.atom();
    this.tokens[this.at] = token.slice(1);
    return `<mn>${this.styled(token[0])}</mn>`;
  }

  /** Return the raw text in braces. */
  raw() {
    if (!this.skip("{")) return this.next();
    let text = "";
    for (let depth = 1; ; ) {
      const token = this.next();
      depth += { "{": 1, "}": -1 }[token] ?? 0;
      if (!depth) return text;
      text += token;
    }
  }

  atom() {
    const token = this.next();
    if (token.startsWith("\\")) return this.command(token.slice(1));
    if (token === "{") {
      const parts = this.list((other) => other === "}");
      this.next();
      return row(this.lines(parts));
    }
    if (["}", "^", "_", "$", "#"].includes(token)) throw new Error(`unexpected ${token}`);
    if (/\d/.test(token)) return `<mn>${this.styled(token)}</mn>`;
    if (/\p{L}/u.test(token)) return this.letter(token);
    if (token === "~") return this.space(0.25);
    return operator({ "-": "−", "*": "∗" }[token] ?? token, "([{)]}|".includes(token) ? ' stretchy="false"' : "");
  }

  letter(text) {
    return `<mi${this.font === "n" ? ' mathvariant="normal"' : ""}>${escaped(this.styled(text))}</mi>`;
  }

  /** Return letters and digits in the chosen alphabet: browsers draw them by their code points. */
  styled(text) {
    if (!(this.font in FIRST)) return text;
    return [...text].map((sign) => {
      const kind = /[A-Z]/.test(sign) ? 0 : /[a-z]/.test(sign) ? 1 : /\d/.test(sign) ? 2 : null;
      const first = kind === null ? null : FIRST[this.font][kind];
      return ODD[this.font + sign] ?? (first ? String.fromCodePoint(first.codePointAt(0) + sign.charCodeAt(0) - "Aa0".charCodeAt(kind)) : sign);
    }).join("");
  }

  space(width) {
    return `<mspace width="${width}em"></mspace>`;
  }

  command(name) {
    if (LETTERS.has(name)) return this.letter(LETTERS.get(name));
    if (OPERATORS.has(name)) return operator(OPERATORS.get(name), /vert|angle|floor|ceil|brace|brack/i.test(name) ? ' stretchy="false"' : "");
    if (LARGE.has(name)) return operator(LARGE.get(name), ' largeop="true" movablelimits="true"');
    if (INTEGRALS.has(name)) return operator(INTEGRALS.get(name), ' largeop="true"');
    if (FUNCTIONS.has(name)) return `<mi>${name}</mi>${this.peek() === "(" ? "" : this.space(0.17)}`.replace(/^(.*)$/s, "<mrow>$1</mrow>");
    if (LIMITS.has(name)) return operator(name.replace(/^(arg|lim)(?=max|min|sup|inf)/, "$1 "), ' movablelimits="true"');
    if (SPACES.has(name)) return this.space(SPACES.get(name));
    if (IGNORED.has(name)) return "";
    if (/^[{}%$#&_|]$/.test(name)) return operator(name === "|" ? "‖" : name, ' stretchy="false"');
    if (ACCENTS.has(name)) return `<mover accent="true">${this.argument()}${operator(ACCENTS.get(name), /^(over|wide)/.test(name) ? "" : ' stretchy="false"')}</mover>`;
    if (UNDER.has(name)) return `<munder>${this.argument()}${operator(UNDER.get(name))}</munder>`;
    if (TEXTS.has(name)) return `<mtext>${escaped(this.text())}</mtext>`;
    if (FONTS.has(name.replace("*", ""))) return this.inFont(FONTS.get(name.replace("*", "")), name.startsWith("operatorname"));
    if (SIZES.has(name)) return operator(this.delimiter());
    return this.structure(name);
  }

  structure(name) {
    switch (name) {
      case "frac": case "dfrac": case "tfrac": case "cfrac": return `<mfrac>${this.argument()}${this.argument()}</mfrac>`;
      case "binom": case "dbinom": case "tbinom": return row([operator("("), `<mfrac linethickness="0">${this.argument()}${this.argument()}</mfrac>`, operator(")")]);
      case "sqrt": {
        if (!this.skip("[")) return `<msqrt>${this.argument()}</msqrt>`;
        const degree = row(this.list((token) => token === "]"));
        this.next();
        return `<mroot>${this.argument()}${degree}</mroot>`;
      }
      case "overset": case "stackrel": return this.swapped("mover");
      case "underset": return this.swapped("munder");
      case "xrightarrow": return `<mover>${operator("→")}${this.argument()}</mover>`;
      case "boxed": return `<mrow class="boxed">${this.argument()}</mrow>`;
      case "pmod": return row([this.space(0.5), operator("("), "<mi>mod</mi>", this.space(0.3), this.argument(), operator(")")]);
      case "bmod": case "mod": return row([this.space(0.3), "<mi>mod</mi>", this.space(0.3)]);
      case "not": return operator(`${{ "=": "=", "\\in": "∈" }[this.peek()] ? this.next().replace("\\in", "∈") : this.next()}\u0338`);
      case "tag": return row([this.space(2), `<mtext>(${escaped(this.text())})</mtext>`]);
      case "label": this.raw(); return "";
      case "left": return this.fenced();
      case "begin": return this.environment();
      default: throw new Error(`\\${name} is unknown`);
    }
  }

  swapped(tag) {
    const mark = this.argument();
    return `<${tag}>${this.argument()}${mark}</${tag}>`;
  }

  /** Return the text in braces, with its spaces, which the tokens do not have. */
  text() {
    const open = this.at;
    this.raw();
    const found = this.tex.slice(this.places[open] + 1, this.places[this.at - 1]);
    if (this.tokens[open] !== "{" || /[{}]/.test(found)) throw new Error("no plain text");
    return found.replace(/\\(.)/g, "$1").replaceAll("$", "").replace(/^ | $/g, "\u00a0");
  }

  inFont(font, isName) {
    const before = this.font;
    this.font = font;
    const isWord = this.peek() === "{" && /^[a-zA-Z]+$/.test(this.tokens.slice(this.at + 1, this.tokens.indexOf("}", this.at)).join(""));
    const made = font === "n" && isWord ? `<mi mathvariant="normal">${this.raw()}</mi>` : this.argument();
    this.font = before;
    return isName ? row([made, this.space(0.17)]) : made;
  }

  delimiter() {
    const token = this.next();
    if (token === ".") return "";
    if (!token.startsWith("\\")) return token;
    const name = token.slice(1);
    return OPERATORS.get(name) ?? (name === "|" ? "‖" : name);
  }

  fenced() {
    const parts = [fence(this.delimiter())];
    for (;;) {
      parts.push(...this.lines(this.list((token) => token === "\\right" || token === "\\middle")));
      const isEnd = this.next() === "\\right";
      parts.push(fence(this.delimiter()));
      if (isEnd) return row(parts);
    }
  }

  /** Skip the distance that may follow a line break: [2pt]. */
  skipDistance() {
    if (this.peek() !== "[") return;
    const near = this.tokens.slice(this.at, this.at + 8);
    const end = near.indexOf("]");
    if (/^\[[\d.]+[a-z]{2}$/.test(near.slice(0, Math.max(0, end)).join(""))) this.at += end + 1;
  }

  environment() {
    const name = this.raw();
    const plain = name.replace("*", "");
    if (plain === "array") this.raw();
    const cells = [[]];
    const ends = (token) => ["&", "\\\\", "\\end"].includes(token);
    if (++this.depth > MAX_DEPTH) throw new Error("too deep");
    for (;;) {
      cells.at(-1).push(row(this.list(ends)));
      const token = this.next();
      if (token === "\\\\") {
        this.skipDistance();
        cells.push([]);
      }
      if (token === "\\end") break;
    }
    this.depth--;
    if (this.raw() !== name) throw new Error("environments do not match");
    if (cells.at(-1).join("") === "<mrow></mrow>") cells.pop();
    const kind = ALIGNED.has(plain) ? 'class="aligned" displaystyle="true"' : `class="${plain === "cases" ? "cases" : "matrix"}"`;
    const body = spread(cells).replace("<mtable>", `<mtable ${kind}>`);
    const [left, right] = ALIGNED.has(plain) ? ["", ""] : FENCES[plain] ?? [];
    if (left === undefined) throw new Error(`the environment ${name} is unknown`);
    return row([fence(left), body, fence(right)].filter(Boolean));
  }
}
