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
  /\$\$(?<display>[^]+?)\$\$|\\\[(?<bracketed>[^]+?)\\\]|\\\((?<round>[^]+?)\\\)/,
  /(?<![\w$])\$(?=[^\s$])(?<dollars>[^$\n]*[^\s$\\])\$(?![\w$])/, // no prices, no names of variables
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
  while (at < lines.length) {
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
    } else if (/^\s+\S/.test(lines[at])) {
      node.lastChild.append(" ", ...inline(lines[at].trim()));
      at++;
    } else if (!lines[at].trim() && ITEM.test(lines[at + 1] ?? "")) at++;
    else break;
  }
  return [node, at];
}

// The formula that begins in a line of its own, and the line behind it; undefined if it has no end there.
function formulaBlock(lines, at) {
  const [mark] = lines[at].trim().match(/^(\$\$|\\\[)/) ?? [];
  if (mark === undefined) return undefined;
  const close = mark === "$$" ? "$$" : "\\]";
  for (let end = at, text = lines[at].trim().slice(2); end < lines.length; text += `\n${lines[++end]?.trim()}`) {
    if (text.endsWith(close)) return [make("div", { className: "formula" }, formula(text.slice(0, -2), true)), end + 1];
    if (end > at && !lines[end].trim()) return undefined;
  }
}

function markdown(text) {
  const nodes = [], lines = text.split("\n");
  let paragraph = [];
  const close = () => { if (paragraph.length) nodes.push(make("p", {}, ...inline(paragraph.join("\n")))); paragraph = []; };
  for (let at = 0; at < lines.length;) {
    const line = lines[at], block = formulaBlock(lines, at), fence = line.match(/^\s*(```+|~~~+)\s*([\w+#.-]*)/), heading = line.match(/^#{1,6}\s+(.*)$/);
    if (fence) {
      close();
      let end = at + 1;
      while (end < lines.length && !lines[end].trim().startsWith(fence[1])) end++;
      nodes.push(codeBlock(lines.slice(at + 1, end), fence[2]));
      at = end + 1;
    } else if (block) {
      close();
      nodes.push(block[0]);
      at = block[1];
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

