// Colours in code: comments, texts, numbers and the words that most languages share.

const COMMENTS = [
  [/^(python|py|pycon|bash|sh|shell|zsh|console|ruby|rb|perl|r|yaml|yml|toml|ini|make|makefile|dockerfile|cmake|elixir|julia|nix)$/, "#.*"],
  [/^(sql|lua|haskell|hs|ada|vhdl)$/, "--.*"],
  [/^(c|h|cpp|c\+\+|cc|hpp|cs|csharp|c#|java|js|jsx|javascript|ts|tsx|typescript|json|jsonc|go|rust|rs|swift|kotlin|kt|scala|dart|php|cuda|zig|css|scss|objc|glsl|proto)$/, String.raw`//.*|/\*[^]*?(?:\*/|$)`],
];
const WORDS = `abstract and as assert async await begin break case catch class const constexpr continue def default defer del delete do
  elif else end enum except export extends extern false False final finally fn for foreach from func function global go if impl implements
  import in include instanceof interface is lambda let local loop match mod mut namespace new nil None nonlocal not null nullptr or package
  pass private protected pub public raise return self static struct super switch template then this throw trait true True try type typedef
  typename union unsafe use using var void where while with yield
  bool boolean byte char double float int long short signed string unsigned`.trim().split(/\s+/).join("|");
const SQL = "select|from|where|join|left|right|inner|outer|on|group|by|order|having|limit|insert|into|values|update|set|delete|create|table|index|primary|key|and|or|not|null|as|distinct|union|case|when|then|else|end";

function coloured(text, language) {
  const name = language.toLowerCase(), comment = COMMENTS.find(([names]) => names.test(name))?.[1];
  if (comment === undefined) return [text];
  const quotes = /^(rust|rs|haskell|hs)$/.test(name) ? '"' : `"'\``; // the others have ' in names
  const string = [...quotes].map((quote) => String.raw`${quote}(?:\\[^]|[^${quote}\\${quote === "`" ? "" : "\\n"}])*${quote}`);
  const parts = [`(?<remark>${comment})`, String.raw`(?<string>"""[^]*?(?:"""|$)|'''[^]*?(?:'''|$)|${string.join("|")})`,
    String.raw`(?<number>\b\d[\w.]*)`, String.raw`(?<word>\b(?:${name === "sql" ? SQL : WORDS})\b)`];
  const nodes = [], pattern = new RegExp(parts.join("|"), name === "sql" ? "gi" : "g");
  let end = 0;
  for (const match of text.matchAll(pattern)) {
    const [kind] = Object.entries(match.groups).find(([, value]) => value !== undefined);
    nodes.push(text.slice(end, match.index), make("span", { className: kind, text: match[0] }));
    end = match.index + match[0].length;
  }
  return [...nodes, text.slice(end)];
}
