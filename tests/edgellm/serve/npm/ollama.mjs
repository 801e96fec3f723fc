// Ollama's client of npm: `node ollama.mjs BASE_URL` prints what it got, a JSON object a line.
import { Ollama } from "ollama";

const client = new Ollama({ host: process.argv[2] });
const print = (name, value) => console.log(JSON.stringify({ name, value }));
const messages = [{ role: "user", content: "hello there" }];
const options = { num_predict: 20, temperature: 0.8, seed: 7 };
const asked = { model: "tiny", messages, options };

print("chat", await client.chat(asked));

let text = "";
let last = null;
for await (const part of await client.chat({ ...asked, stream: true })) {
  text += part.message.content;
  last = part;
}
print("stream", { text, last });

const turn = {
  type: "function",
  function: {
    name: "turn",
    description: "Turn the light",
    parameters: { type: "object", properties: { on: { type: "boolean" } }, required: ["on"] },
  },
};
const calling = { ...asked, tools: [turn], options: { ...options, num_predict: 200 } };
const { message } = await client.chat({ ...calling, tool_choice: "required" });
print("call", message);
const result = { role: "tool", tool_name: "turn", content: "it is on" };
const after = { ...asked, tools: [turn], messages: [...messages, message, result] };
print("after the call", await client.chat({ ...after, tool_choice: "none" }));

const format = {
  type: "object",
  properties: { unit: { enum: ["cm", "m"] }, tall: { type: "boolean" } },
  required: ["unit", "tall"],
  additionalProperties: false,
};
const formatted = await client.chat({ ...calling, tools: [], format });
print("schema", JSON.parse(formatted.message.content));

print("embeddings", (await client.embed({ model: "tiny", input: ["a", "b"] })).embeddings);
const gap = { model: "fim", prompt: "def f(", suffix: "):\n", options: { num_predict: 9 } };
print("suffix", (await client.generate(gap)).response);
let told = "";
for await (const part of await client.generate({ ...gap, stream: true })) told += part.response;
print("suffix in a stream", told);

print("models", (await client.list()).models.map((model) => model.name));
print("loaded", (await client.ps()).models.map((model) => model.name));
print("can", (await client.show({ model: "fim" })).capabilities);

const errorOf = (error) => ({
  class: error.name,
  status: error.status_code,
  message: error.message,
});
for (const [name, wrong] of [
  ["unknown model", { model: "llama9" }],
  ["wrong option", { options: { temperature: -1 } }],
  ["too long", { messages: [{ role: "user", content: "many words ".repeat(2000) }] }],
  ["error of a stream", { model: "llama9", stream: true }],
]) {
  print(name, await client.chat({ ...asked, ...wrong }).catch(errorOf));
}

const left = await client.chat({ ...asked, options: { num_predict: 900 }, stream: true });
for await (const _ of left) {
  left.abort();
  break;
}
print("left", true);
