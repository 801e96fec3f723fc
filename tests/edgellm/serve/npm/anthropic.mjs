// Anthropic's client of npm: `node anthropic.mjs BASE_URL` prints what it got, a JSON object a line.
import Anthropic from "@anthropic-ai/sdk";
import { zodOutputFormat } from "@anthropic-ai/sdk/helpers/zod";
import { z } from "zod";

const client = new Anthropic({ baseURL: process.argv[2], apiKey: "none", maxRetries: 0 });
const print = (name, value) => console.log(JSON.stringify({ name, value }));
const messages = [{ role: "user", content: "hello there" }];
const asked = { model: "tiny", messages, max_tokens: 20, temperature: 0.8, seed: 7 };

print("chat", await client.messages.create(asked));

const stream = client.messages.stream(asked);
let text = "";
stream.on("text", (delta) => (text += delta));
print("stream", { final: await stream.finalMessage(), text });

const turn = {
  name: "turn",
  description: "Turn the light",
  input_schema: { type: "object", properties: { on: { type: "boolean" } }, required: ["on"] },
};
const calling = { ...asked, max_tokens: 200, tools: [turn] };
const streamed = client.messages.stream({ ...calling, tool_choice: { type: "any" } });
let fragments = "";
streamed.on("inputJson", (delta) => (fragments += delta));
const called = await streamed.finalMessage();
print("call", { message: called, fragments });
const call = called.content.find((block) => block.type === "tool_use");
const result = { type: "tool_result", tool_use_id: call.id, content: "it is on" };
const history = [
  ...messages,
  { role: "assistant", content: called.content },
  { role: "user", content: [result] },
];
const after = { ...calling, messages: history, tool_choice: { type: "none" }, max_tokens: 5 };
print("after the call", await client.messages.create(after));

const Size = z.object({ unit: z.enum(["cm", "m"]), tall: z.boolean() });
const parsed = await client.messages.parse({
  ...asked,
  max_tokens: 200,
  output_config: { format: zodOutputFormat(Size) },
});
print("schema", parsed.parsed_output);

print("count", await client.messages.countTokens({ model: "tiny", messages }));

const errorOf = (error) => ({
  class: error.constructor.name,
  status: error.status,
  type: error.error?.error?.type,
  message: error.message,
});
for (const [name, wrong] of [
  ["unknown model", { model: "claude-9" }],
  ["wrong field", { temperature: -1 }],
  ["too long", { messages: [{ role: "user", content: "many words ".repeat(2000) }] }],
  ["error of a stream", { model: "claude-9", stream: true }],
]) {
  print(name, await client.messages.create({ ...asked, ...wrong }).catch(errorOf));
}

const left = client.messages.stream({ ...asked, max_tokens: 900 });
for await (const _ of left) break; // it closes the connection
print("left", true);
