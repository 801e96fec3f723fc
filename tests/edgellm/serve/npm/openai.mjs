// OpenAI's client of npm: `node openai.mjs BASE_URL` prints what it got, a JSON object a line.
import OpenAI from "openai";
import { zodResponseFormat } from "openai/helpers/zod";
import { z } from "zod";

const client = new OpenAI({ baseURL: `${process.argv[2]}/v1`, apiKey: "none", maxRetries: 0 });
const print = (name, value) => console.log(JSON.stringify({ name, value }));
const messages = [{ role: "user", content: "hello there" }];
const asked = { model: "tiny", messages, max_tokens: 20, temperature: 0.8, seed: 7 };

print("chat", await client.chat.completions.create(asked));

let text = "";
let usage = null;
const options = { stream: true, stream_options: { include_usage: true } };
for await (const chunk of await client.chat.completions.create({ ...asked, ...options })) {
  text += chunk.choices[0]?.delta.content ?? "";
  usage = chunk.usage ?? usage;
}
print("stream", { text, usage });

const turn = {
  type: "function",
  function: {
    name: "turn",
    description: "Turn the light",
    strict: true,
    parameters: {
      type: "object",
      properties: { on: { type: "boolean" } },
      required: ["on"],
      additionalProperties: false,
    },
  },
};
const calling = { ...asked, max_tokens: 200, tools: [turn], parallel_tool_calls: false };
const streamed = client.chat.completions.stream({ ...calling, tool_choice: "required" });
let fragments = "";
streamed.on("tool_calls.function.arguments.delta", (event) => (fragments += event.arguments_delta));
const { message, finish_reason } = (await streamed.finalChatCompletion()).choices[0];
print("call", { message, finish_reason, fragments });
const result = { role: "tool", tool_call_id: message.tool_calls[0].id, content: "it is on" };
const history = [...messages, message, result];
const after = { ...calling, messages: history, tool_choice: "none", max_tokens: 5 };
print("after the call", await client.chat.completions.create(after));

const Size = z.object({ unit: z.enum(["cm", "m"]), tall: z.boolean() });
const parsed = await client.chat.completions.parse({
  ...asked,
  max_tokens: 200,
  response_format: zodResponseFormat(Size, "size"),
});
print("schema", parsed.choices[0].message.parsed);

const embeddings = await client.embeddings.create({ model: "tiny", input: ["a", "b"] });
print("embeddings", embeddings.data.map((each) => each.embedding));

const gap = { model: "fim", prompt: "def f(", suffix: "):\n", max_tokens: 9 };
print("suffix", (await client.completions.create(gap)).choices[0].text);

const item = { model: "tiny", input: "hello there", max_output_tokens: 9, temperature: 0 };
const response = client.responses.stream(item);
const events = [];
for await (const event of response) events.push(event.type);
print("responses", { events, final: await response.finalResponse() });

print("models", (await client.models.list()).data.map((model) => model.id));

const errorOf = (error) => ({
  class: error.constructor.name,
  status: error.status,
  code: error.code,
  message: error.message,
});
for (const [name, wrong] of [
  ["unknown model", { model: "gpt-5" }],
  ["wrong field", { temperature: -1 }],
  ["too long", { messages: [{ role: "user", content: "many words ".repeat(2000) }] }],
]) {
  const error = await client.chat.completions.create({ ...asked, ...wrong }).catch(errorOf);
  print(name, error);
}

const left = await client.chat.completions.create({ ...asked, max_tokens: 900, stream: true });
for await (const _ of left) break; // it closes the connection
print("left", true);
