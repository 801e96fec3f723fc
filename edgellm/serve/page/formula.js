// TeX formulas as MathML, as far as models write them; what is not known is shown as it was written.

const named = (text) => new Map(text.trim().split(/\s+/).map((each) => each.split("=")));
const LETTERS = named(`alpha=α beta=β gamma=γ delta=δ epsilon=ϵ varepsilon=ε zeta=ζ eta=η theta=θ vartheta=ϑ iota=ι kappa=κ
  lambda=λ mu=μ nu=ν xi=ξ pi=π rho=ρ sigma=σ tau=τ upsilon=υ phi=ϕ varphi=φ chi=χ psi=ψ omega=ω Gamma=Γ Delta=Δ Theta=Θ
  Lambda=Λ Xi=Ξ Pi=Π Sigma=Σ Upsilon=Υ Phi=Φ Psi=Ψ Omega=Ω hbar=ℏ ell=ℓ Re=ℜ Im=ℑ infty=∞ partial=∂ nabla=∇ emptyset=∅
  varnothing=∅ ldots=… dots=… cdots=⋯ vdots=⋮ ddots=⋱ aleph=ℵ degree=° top=⊤ bot=⊥ prime=′`);
const SIGNS = named(`times=× cdot=⋅ div=÷ pm=± mp=∓ ast=∗ star=⋆ circ=∘ bullet=∙ oplus=⊕ otimes=⊗ odot=⊙ le=≤ leq=≤ ge=≥ geq=≥
  ne=≠ neq=≠ equiv=≡ approx=≈ sim=∼ simeq=≃ cong=≅ propto=∝ ll=≪ gg=≫ in=∈ notin=∉ ni=∋ subset=⊂ subseteq=⊆ supset=⊃
  supseteq=⊇ cup=∪ cap=∩ setminus=∖ land=∧ wedge=∧ lor=∨ vee=∨ neg=¬ lnot=¬ forall=∀ exists=∃ nexists=∄ to=→ rightarrow=→
  leftarrow=← gets=← leftrightarrow=↔ Rightarrow=⇒ implies=⟹ Leftarrow=⇐ Leftrightarrow=⇔ iff=⟺ mapsto=↦ longrightarrow=⟶
  uparrow=↑ downarrow=↓ sum=∑ prod=∏ coprod=∐ int=∫ iint=∬ iiint=∭ oint=∮ bigcup=⋃ bigcap=⋂ mid=∣ nmid=∤ parallel=∥
  perp=⊥ angle=∠ triangle=△ langle=⟨ rangle=⟩ lfloor=⌊ rfloor=⌋ lceil=⌈ rceil=⌉ lvert=| rvert=| lVert=‖ rVert=‖ vert=| Vert=‖
  colon=: therefore=∴ because=∵ leqslant=≤ geqslant=≥ rightleftharpoons=⇌ models=⊨ vdash=⊢ prec=≺ succ=≻ doteq=≐ lbrace={ rbrace=} lbrack=[ rbrack=] backslash=\\ |=‖`);
const ACCENTS = named("hat=^ widehat=^ bar=¯ overline=¯ vec=→ overrightarrow=→ tilde=~ widetilde=~ dot=˙ ddot=¨ overbrace=⏞ underline=_ underbrace=⏟");
const SPACES = named("quad=1em qquad=2em ,=.17em :=.22em ;=.28em !=-.17em");
const FENCES = named("pmatrix=() bmatrix=[] Bmatrix={} vmatrix=|| Vmatrix=‖‖ cases={");
const DOUBLE = named("C=ℂ H=ℍ N=ℕ P=ℙ Q=ℚ R=ℝ Z=ℤ");
const FUNCTIONS = new Set("sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh log ln lg exp lim limsup liminf max min sup inf det dim ker gcd deg arg argmax argmin Pr".split(" "));
const LIMITS = new Set([..."∑∏∐⋃⋂", "lim", "limsup", "liminf", "max", "min", "sup", "inf", "argmax", "argmin", "det", "gcd", "Pr"]);
const FONTS = new Set("mathbf boldsymbol bm mathbb mathcal mathscr mathfrak mathsf mathit".split(" "));
const IGNORED = /^\\(limits|nolimits|displaystyle|textstyle|scriptstyle|[bB]igg?[lrm]?|nonumber|notag|hline|substack|rm|bf|it)$/;
const TEXT = "text|textbf|textit|textrm|mathrm|operatorname\\*?|label|tag";
const TOKEN = new RegExp(String.raw`\\(?:begin|end|${TEXT})\s*\{[^{}]*\}|\\\\\[[\d.]+\w+\]|\\(?:[a-zA-Z]+|[^]|$)|\d+(?:\.\d+)?|\S`, "gu");

function math(tag, attributes, ...children) {
  const element = document.createElementNS("http://www.w3.org/1998/Math/MathML", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

const sign = (text) => math("mo", { stretchy: false }, text);
const fence = (text) => math("mo", { stretchy: true, fence: true }, text === "." ? "" : text);

class Formula {
  constructor(source, display) {
    this.tokens = (source.match(TOKEN) ?? []).filter((token) => !IGNORED.test(token)).map((token) => token.startsWith("\\\\") ? "\\\\" : token);
    this.at = this.depth = 0;
    this.display = display;
  }

  row(isEnd) {
    const nodes = [];
    while (this.at < this.tokens.length && !isEnd(this.tokens[this.at])) nodes.push(this.scripted());
    return nodes.length === 1 ? nodes[0] : math("mrow", {}, ...nodes);
  }

  // What stands up to a token, which is taken as well.
  until(token) {
    const inside = this.row((each) => each === token);
    this.at++;
    return inside;
  }

  argument() {
    const token = this.tokens[this.at] ?? "";
    if (/^\d./.test(token)) { // without braces it is one digit
      this.tokens[this.at] = token.slice(1);
      return math("mn", {}, token[0]);
    }
    if (token !== "{") return this.atom();
    this.at++;
    return this.until("}");
  }

  // An atom with what stands below and above it.
  scripted() {
    const base = this.atom(), limits = this.display && LIMITS.has(base.textContent);
    let below, above;
    for (let mark = this.tokens[this.at]; mark === "_" || mark === "^" || mark === "'"; mark = this.tokens[this.at]) {
      this.at++;
      if (mark === "_") below = this.argument();
      else {
        const more = mark === "'" ? sign("′") : this.argument();
        above = above ? math("mrow", {}, above, more) : more;
      }
    }
    const node = this.withScripts(base, below, above, limits);
    const next = this.tokens[this.at] ?? ")";
    return FUNCTIONS.has(base.textContent) && !/^(?:[([{)\]},.;:|]|\\left|\\right|\\[,;:! ]|&|\\\\)$/.test(next) ? math("mrow", {}, node, math("mspace", { width: ".17em" })) : node;
  }

  withScripts(base, below, above, limits) {
    if (below && above) return math(limits ? "munderover" : "msubsup", {}, base, below, above);
    if (below) return math(limits ? "munder" : "msub", {}, base, below);
    return above ? math(limits ? "mover" : "msup", {}, base, above) : base;
  }

  atom() {
    if (++this.depth > 100) throw new RangeError("nested too deep");
    const node = this.readAtom();
    this.depth--;
    return node;
  }

  readAtom() {
    const token = this.tokens[this.at++];
    if (token === undefined) return math("mrow", {});
    if (token === "{") return this.until("}");
    if (/^\d/.test(token)) return math("mn", {}, token);
    if (/^\p{L}$/u.test(token)) return math("mi", {}, token);
    if (token[0] !== "\\") return sign({ "-": "−", "*": "∗", "~": "\u00a0" }[token] ?? token);
    const [, name, text] = token.match(/^\\([a-zA-Z]+\*?|[^]|$)(?:\s*\{([^]*)\})?$/u);
    return text === undefined ? this.command(name, token) : this.named(name, text);
  }

  command(name, token) {
    if (/^[dtc]?frac$/.test(name)) return math("mfrac", {}, this.argument(), this.argument());
    if (name === "binom") return math("mrow", {}, fence("("), math("mfrac", { linethickness: 0 }, this.argument(), this.argument()), fence(")"));
    if (name === "sqrt") return this.root();
    if (name === "left") return this.fenced();
    if (name === "middle") return fence(this.delimiter());
    if (name === "boxed" || name === "cancel") return math("mrow", { class: name }, this.argument());
    if (name === "color") return math("mrow", {}, ...(this.argument(), []));
    if (name === "bmod" || name === "mod") return math("mo", { lspace: ".22em", rspace: ".22em" }, "mod");
    if (name === "pmod") return math("mrow", {}, sign("("), math("mo", { lspace: "0", rspace: ".22em" }, "mod"), this.argument(), sign(")"));
    if (name === "overset" || name === "stackrel" || name === "underset") return this.stacked(name === "underset" ? "munder" : "mover");
    if (name === "xrightarrow") return math("mover", {}, math("mo", { stretchy: true }, "→"), this.argument());
    if (name === "not") return sign(`${this.delimiter()}\u0338`);
    if (name === "mathbb" && this.tokens[this.at + 2] === "}" && DOUBLE.has(this.tokens[this.at + 1])) return math("mi", {}, DOUBLE.get(this.argument().textContent));
    if (FONTS.has(name)) return math("mrow", { class: name }, this.argument());
    if (ACCENTS.has(name)) return math(name.startsWith("under") ? "munder" : "mover", { accent: true }, this.argument(), math("mo", {}, ACCENTS.get(name)));
    if (name === "\\" || name === "newline") return math("mspace", { linebreak: "newline" });
    if (SPACES.has(name) || name === " ") return math("mspace", { width: SPACES.get(name) ?? ".33em" });
    if (LETTERS.has(name)) return math("mi", {}, LETTERS.get(name));
    if (SIGNS.has(name)) return sign(SIGNS.get(name));
    if (FUNCTIONS.has(name)) return math("mi", {}, name);
    return /^[{}%$#&_-]$/.test(name) ? sign(name) : math("mtext", {}, token);
  }

  stacked(tag) {
    const above = this.argument();
    return math(tag, {}, this.argument(), above);
  }

  root() {
    if (this.tokens[this.at] !== "[") return math("msqrt", {}, this.argument());
    this.at++;
    const degree = this.until("]");
    return math("mroot", {}, this.argument(), degree);
  }

  delimiter() {
    const token = this.tokens[this.at++] ?? ".", name = token.slice(1);
    return token[0] === "\\" ? SIGNS.get(name) ?? name : token;
  }

  fenced() {
    const left = fence(this.delimiter()), inside = this.until("\\right");
    return math("mrow", {}, left, inside, fence(this.delimiter()));
  }

  // A command whose argument is text, or the beginning of an environment.
  named(name, text) {
    if (name === "label" || name === "tag" || name === "end") return math("mrow", {});
    if (name === "mathrm" && /[_^\\]/.test(text)) return math("mrow", { class: name }, new Formula(text, false).row(() => false));
    if (name === "operatorname" || name === "operatorname*" || name === "mathrm") return math("mi", { mathvariant: "normal" }, text);
    if (name !== "begin") return math("mtext", { class: name }, text.replace(/^\s|\s$/g, "\u00a0").replace(/\\([_%$#&{}])/g, "$1"));
    if (text === "array" && this.tokens[this.at] === "{") this.argument(); // how its columns stand
    const rows = [], end = `\\end{${text}}`, ends = (token) => ["&", "\\\\", end].includes(token.replace(/\s+/g, ""));
    for (let last = "\\\\"; last !== undefined && last !== end; last = this.tokens[this.at++]?.replace(/\s+/g, "")) {
      if (last === "\\\\") rows.push([]);
      rows.at(-1).push(math("mtd", {}, this.row(ends)));
    }
    if (rows.at(-1).length === 1 && !rows.at(-1)[0].textContent) rows.pop(); // behind the last line's break
    const grid = math("mtable", { class: text.replace("*", "") }, ...rows.map((cells) => math("mtr", {}, ...cells)));
    const [left = "", right = ""] = FENCES.get(text.replace("*", "")) ?? "";
    return math("mrow", {}, ...(left ? [fence(left)] : []), grid, ...(right ? [fence(right)] : []));
  }
}

function formula(source, display = false) {
  try {
    return math("math", display ? { display: "block" } : {}, new Formula(source, display).row(() => false));
  } catch {
    return make("code", { text: source });
  }
}
