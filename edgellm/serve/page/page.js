const $ = (id) => document.getElementById(id);
// name, label, step, lowest, highest
const FIELDS = [["temperature", "Temperature", .05, 0, 2], ["top_p", "Top p", .01, 0, 1], ["top_k", "Top k", 1, 0, 1000],
  ["min_p", "Min p", .01, 0, 1], ["repeat_penalty", "Repeat penalty", .01, .5, 2], ["max_tokens", "Most tokens", 1, 1, 1e6], ["seed", "Seed", 1, 0, 2 ** 32 - 2]];

// What is kept between visits; a browser that keeps nothing is no error.
const store = {
  get(name, otherwise) { try { return JSON.parse(localStorage.getItem("edgellm." + name)) ?? otherwise; } catch { return otherwise; } },
  set(name, value) {
    try { localStorage.setItem("edgellm." + name, JSON.stringify(value)); return true; }
    catch (error) { console.warn("not kept:", error.message); return false; }
  },
};
const MOST = 100; // conversations
let settings = store.get("settings", {});
let conversations = store.get("conversations", []);
let current = conversations[0] ?? fresh();
let edited = -1; // the place of the message that the input is to replace
let models = []; // as the server lists them
const running = new Map(); // what ends the answers that are on their way, by their conversations

function fresh() { return { id: crypto.randomUUID?.() ?? String(Math.random()), title: "", messages: [] }; }

function save() { return store.set("conversations", conversations); }

function keep(conversation) {
  conversation.at = Date.now();
  conversations = [conversation, ...conversations.filter((each) => each.id !== conversation.id)].slice(0, MOST);
  save();
  showList();
}

function keepDraft() { if (edited < 0) current.draft = $("text").value; }

// What is to be seen.

function messageNode(message, i) {
  const button = (text, click) => make("button", { className: "bare", text, click: () => click(i) });
  if (message.role === "user") {
    const tools = make("div", { className: "tools" }, button(i === edited ? "Leave as it is" : "Edit", edit), button("Delete", forget));
    return make("div", { className: i === edited ? "user edited" : "user" }, make("div", { className: "said", text: message.content }), tools);
  }
  const node = make("div", { className: "answer" });
  fill(node, message, i);
  return node;
}

function fill(node, message, i) {
  const open = node.querySelector("details.thought")?.open;
  node.replaceChildren();
  if (message.reasoning) {
    const thought = make("details", { className: "thought" }, make("summary", { text: message.content ? "Thoughts" : "Thinking" }), make("div", { text: message.reasoning }));
    thought.open = open ?? !message.content;
    node.append(thought);
  }
  node.append(...markdown(message.content));
  const busy = i === current.messages.length - 1 && running.has(current);
  if (busy && !message.content && !message.reasoning) node.append(waiting(message.progress));
  if (message.error) node.append(make("p", { className: "bad", text: message.error }));
  if (!busy) node.append(meta(message, i));
}

function waiting(progress) {
  const bar = make("progress");
  if (progress) { bar.max = progress.total; bar.value = progress.done; }
  return make("div", { className: "wait" }, bar, progress ? `Reading, ${progress.done} of ${progress.total} tokens` : "Waiting");
}

function meta(message, i) {
  const last = i === current.messages.length - 1;
  const parts = [...(message.facts ?? [])], node = make("div", { className: "meta" });
  if (message.stopped) parts.unshift("stopped");
  if (message.cut) parts.unshift("cut off by the limit of tokens");
  for (const part of parts) node.append(make("span", { text: part }));
  if (message.content) node.append(copyButton(message.content));
  node.append(make("button", { className: "bare", text: "Branch", click: () => branch(i) }));
  const unfinished = message.stopped || message.cut || message.error;
  if (last && unfinished && message.content) node.append(make("button", { className: "bare", text: "Continue", id: "more", click: more }));
  if (last) node.append(make("button", { className: "bare", text: "Regenerate", id: "again", click: again }));
  return node;
}

function facts({ model, timings, placement }) {
  const ran = placement ? [...new Set([...Object.keys(placement.prefill), placement.decode.split(" ")[0]])].join(" and ") : "";
  return [
    timings && `${timings.predicted_n} tokens`,
    timings?.predicted_per_second && `${timings.predicted_per_second.toFixed(1)} tokens/s`,
    placement && `first after ${(placement.ttft_ms / 1000).toFixed(2)} s`,
    timings && `${timings.cache_n} of ${timings.cache_n + timings.prompt_n} prompt tokens cached`,
    ran && `on ${ran}`,
    models.length > 1 && `by ${model}`,
  ].filter(Boolean);
}

function showLog(atEnd = true) {
  const log = $("log"), top = log.scrollTop;
  log.replaceChildren(...current.messages.map(messageNode));
  if (!current.messages.length) log.append(make("div", { id: "empty" }, make("strong", { text: "What can I do for you?" }), "Everything stays on the machine that runs this server.",
    ...(isBase() ? [make("p", { text: "This is a base model: it answers no questions, but continues your text." })] : [])));
  if (current.error) log.append(make("p", { className: "bad", text: current.error }));
  log.scrollTop = atEnd ? log.scrollHeight : top;
}

function showList() {
  $("list").replaceChildren(...conversations.map((each) => make("li", { className: each.id === current.id ? "now" : "" },
    make("button", { text: (each.title || "Untitled") + (running.has(each) ? " \u2026" : ""), click: () => go(each) }),
    make("button", { className: "bare", text: "\u270e", "aria-label": "Rename", click: () => rename(each) }),
    make("button", { className: "bare", text: "\u00d7", "aria-label": "Delete", click: () => remove(each) }))));
}

const chosen = () => models.find(({ id }) => id === $("model").value);

// Whether the model has no chat template; it continues what the conversation's texts are together.
const isBase = () => chosen()?.capabilities?.completion_chat === false;

function showContext() {
  const size = chosen()?.max_context_length, used = current.messages.findLast(({ tokens }) => tokens)?.tokens ?? 0;
  const [meter, text] = $("context").children;
  $("context").hidden = !size;
  Object.assign(meter, { max: size ?? 0, high: .9 * (size ?? 0), value: used });
  text.textContent = `${used} of ${size} tokens`;
}

function showBusy() {
  const busy = running.has(current);
  showContext();
  $("send").hidden = busy;
  $("stop").hidden = !busy;
  document.body.classList.toggle("busy", busy);
}

// Answers go on when another conversation is shown.
function go(conversation) {
  keepDraft();
  edited = -1;
  current = conversation;
  $("text").value = current.draft ?? "";
  $("side").classList.remove("open");
  showLog();
  showList();
  showBusy();
  $("text").focus();
}

// Put a message into the input; when that is sent, it replaces the message and all behind it.
function edit(i) {
  keepDraft();
  edited = i === edited ? -1 : i;
  $("text").value = edited < 0 ? current.draft ?? "" : current.messages[i].content;
  showLog(false);
  $("text").focus();
}

function forget(i) {
  if (edited >= 0) edit(edited);
  const next = current.messages.findIndex(({ role }, at) => at > i && role === "user");
  current.messages.splice(i, next < 0 ? Infinity : next - i);
  save();
  showLog(false);
}

// Go on from a message in a conversation of its own.
function branch(i) {
  const { title, named, messages } = current;
  const made = { ...fresh(), title, named, messages: structuredClone(messages.slice(0, i + 1)) };
  keep(made);
  go(made);
}

function rename(conversation) {
  const title = prompt("Name of the conversation", conversation.title)?.trim();
  if (!title) return;
  Object.assign(conversation, { title, named: true });
  save();
  showList();
}

function exportAll() {
  const url = URL.createObjectURL(new Blob([JSON.stringify(conversations, null, 1)], { type: "application/json" }));
  make("a", { href: url, download: `edgellm-${new Date().toISOString().slice(0, 10)}.json` }).click();
  setTimeout(() => URL.revokeObjectURL(url), 60_000);
}

const texts = (value) => Array.isArray(value) ? value.filter((each) => typeof each === "string") : undefined;

// A message of a file: what this page writes of one, and nothing else; undefined if it is none.
function readMessage({ role, content, reasoning, stopped, cut, error, facts, tokens } = {}) {
  if (!["user", "assistant"].includes(role) || typeof content !== "string") return undefined;
  if (role === "user") return { role, content };
  const text = (value) => typeof value === "string" ? value : undefined;
  return { role, content, reasoning: text(reasoning) ?? "", stopped: stopped === true, cut: cut === true, error: text(error), facts: texts(facts), tokens: Number.isFinite(tokens) ? tokens : undefined };
}

function readConversation({ id, title, named, messages } = {}) {
  const read = Array.isArray(messages) ? messages.map((each) => readMessage(each ?? undefined)) : [undefined];
  return typeof id === "string" && typeof title === "string" && !read.includes(undefined) ? { id, title, named: named === true, messages: read } : undefined;
}

// Add the conversations of an exported file; those that are here already stay as they are.
async function importFrom(file) {
  let read;
  try { read = JSON.parse(await file.text()).map((each) => readConversation(each ?? undefined)); } catch { read = [undefined]; }
  if (read.includes(undefined)) return alert(`${file.name} holds no exported conversations; nothing was imported.`);
  const before = conversations, known = new Set(before.map(({ id }) => id)), added = read.filter(({ id }) => !known.has(id));
  conversations = [...before, ...added];
  if (conversations.length > MOST || !save()) {
    conversations = before;
    save();
    return alert(`There is no room for ${added.length} more conversations; nothing was imported. Delete some, or import a smaller file.`);
  }
  showList();
}

function remove(conversation) {
  running.get(conversation)?.abort();
  conversations = conversations.filter((each) => each !== conversation);
  save();
  if (conversation === current) go(conversations[0] ?? fresh()); else showList();
}

// Questions and answers take turns, as templates want it: what got no answer is asked along with what follows.
function turns(messages) {
  const sent = [];
  for (const { role, content } of messages) {
    const last = sent.at(-1);
    if (role === "user" && last?.role === "user") last.content += `\n\n${content}`;
    else if (content) sent.push({ role, content });
  }
  return sent;
}

async function ask(messages, signal) {
  const given = FIELDS.map(([name]) => [name, settings[name]]).filter(([, value]) => Number.isFinite(value));
  const body = { model: $("model").value, stream: true, ...Object.fromEntries(given) };
  const completion = () => call("v1/completions", { ...body, prompt: messages.map(({ content }) => content).join("") }, signal);
  if (isBase()) return completion();
  const system = settings.system ? [{ role: "system", content: settings.system }] : [];
  try {
    return await call("v1/chat/completions", { ...body, messages: [...system, ...turns(messages)] }, signal);
  } catch (error) {
    if (signal.aborted || chosen()?.max_context_length) throw error;
    await loadModels(); // of a model that was not loaded, nothing was known
    if (!isBase()) throw error;
    return completion();
  }
}

function take(answer, event) {
  if (event.progress) answer.progress = event.progress;
  if (event.error) throw new Error(event.error.message);
  const choice = event.choices?.[0];
  answer.content += choice?.delta?.content ?? choice?.text ?? "";
  answer.reasoning += choice?.delta?.reasoning_content ?? "";
  if (choice?.finish_reason) answer.cut = choice.finish_reason === "length";
  if (event.timings) {
    answer.facts = facts(event);
    answer.tokens = event.timings.cache_n + event.timings.prompt_n + event.timings.predicted_n;
  }
}

// Answer the last message, or go on with it if it is an answer. If nothing comes of that, the
// conversation is as it was before, and the text that was sent is in the input again.
async function answer(conversation, messages, text = "") {
  if (edited >= 0) edit(edited);
  const before = conversation.messages, control = new AbortController(), log = $("log");
  const begun = messages.at(-1).role === "assistant" ? messages.at(-1) : { role: "assistant", content: "", reasoning: "" };
  // stopped, until it is whole: so it is kept, and found when the page was closed meanwhile
  const reply = { ...begun, stopped: true, cut: false, error: undefined };
  conversation.messages = [...messages.filter((each) => each !== begun), reply];
  if (!conversation.named) conversation.title = conversation.messages[0].content.slice(0, 60);
  conversation.error = undefined;
  running.set(conversation, control);
  keep(conversation);
  showBusy();
  showLog();
  let drawn = 0, kept = Date.now();
  const draw = () => {
    drawn = 0;
    if (conversation !== current) return;
    const below = log.scrollHeight - log.scrollTop - log.clientHeight < 60;
    fill(log.children[conversation.messages.length - 1], reply, conversation.messages.length - 1);
    if (below) log.scrollTop = log.scrollHeight;
  };
  try {
    const stream = await ask(messages, control.signal);
    for await (const event of events(stream)) {
      take(reply, event);
      drawn ||= requestAnimationFrame(draw);
      if (Date.now() - kept > 1000) { save(); kept = Date.now(); }
    }
    reply.stopped = false;
  } catch (error) {
    const reason = control.signal.aborted ? undefined : error.message;
    if (reply.content === begun.content && reply.reasoning === begun.reasoning) {
      conversation.messages = before;
      conversation.error = reason;
      giveBack(conversation, text);
    } else if (reason) Object.assign(reply, { stopped: false, error: reason });
  }
  cancelAnimationFrame(drawn);
  delete reply.progress;
  running.delete(conversation);
  if (!chosen()?.max_context_length) loadModels(); // it is loaded now, and its context known
  save();
  showList();
  showBusy();
  if (conversation.messages === before && conversation === current) showLog(); else draw();
}

function giveBack(conversation, text) {
  keepDraft();
  conversation.draft = [text, conversation.draft].filter(Boolean).join("\n\n");
  if (conversation === current) $("text").value = current.draft;
}

function again() { answer(current, current.messages.slice(0, current.messages.findLastIndex(({ role }) => role === "user") + 1)); }

function more() { answer(current, current.messages); }

function send(event) {
  event.preventDefault();
  const text = isBase() ? $("text").value : $("text").value.trim(); // continued with the space that it ends in
  if (!text.trim() || running.has(current)) return;
  const messages = edited < 0 ? current.messages : current.messages.slice(0, edited);
  $("text").value = edited < 0 ? "" : current.draft ?? "";
  edited = -1;
  keepDraft();
  answer(current, [...messages, { role: "user", content: text }], text);
}

async function loadModels() {
  try {
    models = (await (await call("v1/models")).json()).data;
    $("model").replaceChildren(...models.map(({ id }) => make("option", { text: id, value: id })));
    if (models.some(({ id }) => id === settings.model)) $("model").value = settings.model;
    showModel();
  } catch (error) {
    $("log").append(make("p", { className: "bad", text: `The models cannot be listed: ${error.message}` }));
  }
}

function showModel() {
  showContext();
  if (!current.messages.length && !current.error) showLog();
}

function change(values) { settings = { ...settings, ...values }; store.set("settings", settings); }

function showSettings() {
  $("system").value = settings.system ?? "";
  for (const [name] of FIELDS) $(name).value = settings[name] ?? "";
}

for (const [name, label, step, min, max] of FIELDS) {
  const input = make("input", { id: name, type: "number", step, min, max, placeholder: "default", inputmode: "decimal" });
  input.addEventListener("change", () => { input.reportValidity(); change({ [name]: input.value === "" || !input.checkValidity() ? null : +input.value }); });
  $("fields").append(make("label", { text: label }, input));
}
$("system").addEventListener("change", () => change({ system: $("system").value }));
$("reset").addEventListener("click", () => { settings = { model: settings.model }; change({}); showSettings(); });
$("settings-open").addEventListener("click", () => { showSettings(); $("settings").showModal(); });
$("model").addEventListener("change", () => { change({ model: $("model").value }); showModel(); });
$("menu").addEventListener("click", () => $("side").classList.add("open"));
document.addEventListener("click", (event) => { if (!event.target.closest("#side, #menu")) $("side").classList.remove("open"); });
$("new").addEventListener("click", () => go(fresh()));
$("clear").addEventListener("click", () => { if (confirm("Delete all conversations?")) { for (const control of running.values()) control.abort(); conversations = []; save(); go(fresh()); } });
$("export").addEventListener("click", exportAll);
$("import").addEventListener("click", () => $("file").click());
$("file").addEventListener("change", async ({ target }) => { await importFrom(target.files[0]); target.value = ""; });
$("stop").addEventListener("click", () => running.get(current)?.abort());
$("ask").addEventListener("submit", send);
$("text").addEventListener("keydown", (event) => {
  const enters = event.key === "Enter" && !event.shiftKey && !event.isComposing && matchMedia("(pointer: fine)").matches;
  if (enters) send(event);
});
addEventListener("pagehide", () => { if (running.size) save(); });
// Another tab has changed what is kept; conversations that are being answered here stay as they are.
addEventListener("storage", ({ key }) => {
  if (key !== "edgellm.conversations") return;
  const own = [current, ...running.keys()], shown = JSON.stringify(current.messages);
  conversations = store.get("conversations", []).map((each) => {
    const here = own.find(({ id }) => id === each.id);
    const { title, named, messages } = each;
    return here ? Object.assign(here, { title, named }, running.has(here) || JSON.stringify(messages) === JSON.stringify(here.messages) ? {} : { messages }) : each;
  });
  showList();
  if (JSON.stringify(current.messages) !== shown) { edited = -1; showLog(false); }
});
$("text").value = current.draft ?? "";
showList();
loadModels();
showLog();
