function make(tag, options = {}, ...children) {
  const { className, text, click, ...attributes } = options;
  const element = document.createElement(tag);
  if (className) element.className = className;
  if (text !== undefined) element.textContent = text;
  if (click) { element.type = "button"; element.addEventListener("click", click); }
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

// Markdown as nodes: text goes in as text, whatever it says.

const INLINE = new RegExp([
  /(?<ticks>`+)(?<code>[^]+?)\k<ticks>(?!`)/,
  /\*\*(?=\S)(?<strong>[^]+?)\*\*/,
  /(?<![\w*])\*(?=\S)(?<em>[^*\n]+?)\*(?!\w)/,
  /\[(?<label>[^\]\n]+)\]\((?<link>https?:\/\/[^\s)]+)\)/,
  /(?<![\w$\\])\$\$(?!\$)(?<display>[^$\n]+)\$\$(?!\$)|\\\[(?!\s*\\\])(?<bracketed>[^]+?)\\\]|\\\((?<round>[^]+?)\\\)/,
  // no prices, no variables of shells
  /(?<![\w$\\])\$(?=[^\s$])(?!\d[\d.,]*\s+[A-Za-z])(?<dollars>[^$\n]*[^\s$\\])\$(?![\w${(])/,
].map(({ source }) => source).join("|"), "g");

function inline(text) {
  const nodes = [];
  let end = 0;
  for (const match of text.matchAll(INLINE)) {
    nodes.push(text.slice(end, match.index), inlineNode(match.groups));
    end = match.index + match[0].length;
  }
  return [...nodes, text.slice(end)];
}

function inlineNode({ code, strong, em, label, link, display, bracketed, round, dollars }) {
  if (code !== undefined) return make("code", { text: code });
  if (strong !== undefined) return make("strong", {}, ...inline(strong));
  if (em !== undefined) return make("em", {}, ...inline(em));
  if (link !== undefined) return make("a", { text: label, href: link, target: "_blank", rel: "noopener noreferrer" });
  return formula(display ?? bracketed ?? round ?? dollars, (display ?? bracketed) !== undefined);
}

// Over http from another machine there is no `navigator.clipboard`.
async function copy(text, button) {
  let copied = true;
  try { await navigator.clipboard.writeText(text); } catch {
    const area = make("textarea", { text });
    document.body.append(area);
    area.select();
    copied = document.execCommand("copy");
    area.remove();
  }
  button.textContent = copied ? "Copied" : "The browser forbids it; select the text";
}

function copyButton(text) { return make("button", { className: "bare", text: "Copy", click: ({ target }) => copy(text, target) }); }

function codeBlock(lines, language) {
  const text = lines.join("\n");
  const bar = make("div", { className: "bar" }, make("span", { text: language }), copyButton(text));
  return make("div", { className: "block" }, bar, make("pre", {}, make("code", {}, ...coloured(text, language))));
}

// A row's cells; a bar behind a backslash is no border.
const cells = (line) => line.trim().replace(/^\||(?<!\\)\|$/g, "").split(/(?<!\\)\|/).map((cell) => cell.trim().replaceAll("\\|", "|"));
const isRow = (line) => line !== undefined && line.includes("|");
const RULE = /^\s*\|?(\s*:?-+:?\s*\|)*\s*:?-+:?\s*\|?\s*$/;

function table(lines, at) {
  const head = cells(lines[at]), sides = cells(lines[at + 1]).map((rule) => rule.endsWith(":") ? (rule.startsWith(":") ? "center" : "end") : "");
  const row = (tag, texts) => make("tr", {}, ...head.map((_, i) => make(tag, { className: sides[i] }, ...inline(texts[i] ?? ""))));
  const body = make("tbody");
  let end = at + 2;
  for (; isRow(lines[end]); end++) body.append(row("td", cells(lines[end])));
  return [make("div", { className: "table" }, make("table", {}, make("thead", {}, row("th", head)), body)), end];
}

const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])\s+(.*)$/;

function list(lines, at) {
  const [, space, mark] = lines[at].match(ITEM);
  const node = make(/\d/.test(mark) ? "ol" : "ul");
  if (/\d/.test(mark)) node.setAttribute("start", parseInt(mark));
  for (let found; at < lines.length;) {
    const item = lines[at].match(ITEM);
    if (item && item[1].length < space.length) break;
    if (item && item[1].length > space.length && node.lastChild) {
      const [inner, next] = list(lines, at);
      node.lastChild.append(inner);
      at = next;
    } else if (item) {
      if (/\d/.test(item[2]) !== /\d/.test(mark)) break;
      node.append(make("li", {}, ...inline(item[3])));
      at++;
    } else if (/^\s+\S/.test(lines[at]) && (found = block(lines, at))) {
      node.lastChild.append(found[0]);
      at = found[1];
    } else if (/^\s+\S/.test(lines[at])) {
      node.lastChild.append(" ", ...inline(lines[at].trim()));
      at++;
    } else if (!lines[at].trim() && ITEM.test(lines[at + 1] ?? "")) at++;
    else break;
  }
  return [node, at];
}

const FENCE = /^\s*(```+|~~~+)\s*([\w+#.-]*)/;
const FORMULA = /^(?:\$\$|\\\[|\\begin\{(?:align|equation|gather|multline|eqnarray)\*?\})/;

// The block of code or the formula that begins in a line, and the number of the line behind it.
const block = (lines, at) => fencedBlock(lines, at) ?? formulaBlock(lines, at);

function fencedBlock(lines, at) {
  const fence = lines[at].match(FENCE), indent = lines[at].search(/\S/);
  if (!fence) return undefined;
  let end = at + 1;
  while (end < lines.length && !lines[end].trim().startsWith(fence[1])) end++;
  const inside = lines.slice(at + 1, end).map((line) => line.slice(Math.min(indent, line.search(/\S|$/))));
  return [codeBlock(inside, fence[2]), end + 1];
}

// No formula is one that does not end, or that has text behind it; that is one in a paragraph.
function formulaBlock(lines, at) {
  const [mark] = lines[at].trim().match(FORMULA) ?? [];
  if (mark === undefined) return undefined;
  const close = mark === "$$" ? "$$" : mark === "\\[" ? "\\]" : mark.replace("begin", "end"), parts = [];
  for (let end = at, line = lines[at].trim().slice(mark.length); ; line = lines[end].trim()) {
    const stop = line.indexOf(close);
    if (stop >= 0 && stop < line.length - close.length) return undefined;
    parts.push(stop < 0 ? line : line.slice(0, stop));
    end++;
    if (stop >= 0) {
      const source = close.startsWith("\\end") ? [mark, ...parts, close] : parts;
      return [make("div", { className: "formula" }, formula(source.join("\n"), true)), end];
    }
    if (!lines[end]?.trim() || FENCE.test(lines[end]) || (mark !== "$$" && FORMULA.test(lines[end].trim()))) return undefined;
  }
}

function markdown(text) {
  const nodes = [], lines = text.split("\n");
  let paragraph = [];
  const close = () => { if (paragraph.length) nodes.push(make("p", {}, ...inline(paragraph.join("\n")))); paragraph = []; };
  for (let at = 0; at < lines.length;) {
    const line = lines[at], found = block(lines, at), heading = line.match(/^#{1,6}\s+(.*)$/);
    if (found) {
      close();
      nodes.push(found[0]);
      at = found[1];
    } else if (isRow(line) && isRow(lines[at + 1]) && RULE.test(lines[at + 1]) && cells(line).length === cells(lines[at + 1]).length) {
      close();
      const [node, next] = table(lines, at);
      nodes.push(node);
      at = next;
    } else if (/^\s*([-*_])(\s*\1){2,}\s*$/.test(line)) {
      close();
      nodes.push(make("hr"));
      at++;
    } else if (ITEM.test(line)) {
      close();
      const [node, next] = list(lines, at);
      nodes.push(node);
      at = next;
    } else {
      if (heading) { close(); nodes.push(make("h3", {}, ...inline(heading[1]))); }
      else if (line.startsWith(">")) { close(); nodes.push(make("blockquote", {}, ...inline(line.replace(/^>\s?/, "")))); }
      else if (line.trim()) paragraph.push(line);
      else close();
      at++;
    }
  }
  close();
  return nodes;
}

