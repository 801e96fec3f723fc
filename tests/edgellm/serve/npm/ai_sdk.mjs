// Vercel's AI SDK: `node ai_sdk.mjs BASE_URL` prints what it got, a JSON object a line.
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { embedMany, generateText, Output, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const baseURL = `${process.argv[2]}/v1`;
const provider = createOpenAICompatible({
  name: "edgellm",
  baseURL,
  includeUsage: true,
  supportsStructuredOutputs: true,
});
const print = (name, value) => console.log(JSON.stringify({ name, value }));
const model = provider("tiny");
const prompt = "hello there";
const asked = { model, prompt, maxOutputTokens: 20, temperature: 0.8, seed: 7, maxRetries: 0 };

const { text, finishReason, usage } = await generateText(asked);
print("chat", { text, finishReason, usage });

const stream = streamText(asked);
let streamed = "";
for await (const part of stream.textStream) streamed += part;
print("stream", { text: streamed, usage: await stream.usage, reason: await stream.finishReason });

const calls = [];
const turn = tool({
  description: "Turn the light",
  inputSchema: z.object({ on: z.boolean() }),
  execute: async (input) => {
    calls.push(input);
    return "it is on";
  },
});
const calling = {
  ...asked,
  tools: { turn },
  maxOutputTokens: 200,
  stopWhen: stepCountIs(2),
  prepareStep: ({ stepNumber }) => ({ toolChoice: stepNumber ? "none" : "required" }),
  providerOptions: { edgellm: { parallel_tool_calls: false } },
};
const steps = (all) =>
  all.map(({ finishReason, toolCalls, toolResults, response }) => ({
    finishReason,
    inputs: toolCalls.map((call) => call.input),
    outputs: toolResults.map((result) => result.output),
    roles: response.messages.map((message) => message.role),
  }));
print("tools", { steps: steps((await generateText(calling)).steps), calls });
const streaming = streamText(calling);
await streaming.consumeStream();
print("tools in a stream", { steps: steps(await streaming.steps), calls });

const Size = z.object({ unit: z.enum(["cm", "m"]), tall: z.boolean() });
const held = { ...asked, maxOutputTokens: 200, output: Output.object({ schema: Size }) };
print("schema", (await generateText(held)).output);

const values = ["a", "b"];
const { embeddings } = await embedMany({ model: provider.embeddingModel("tiny"), values });
print("embeddings", embeddings);

const gap = { prompt: "once upon", maxOutputTokens: 9, seed: 3, maxRetries: 0 };
print("completion", (await generateText({ model: provider.completionModel("tiny"), ...gap })).text);

const openai = createOpenAI({ baseURL, apiKey: "none" }); // it speaks of responses
const items = streamText({ ...asked, seed: undefined, temperature: 0, model: openai("tiny") });
let told = "";
for await (const part of items.textStream) told += part;
print("responses", { text: told, usage: await items.usage, reason: await items.finishReason });

for (const [name, wrong] of [
  ["unknown model", { model: provider("gpt-5") }],
  ["wrong field", { temperature: -1 }],
]) {
  const error = await generateText({ ...asked, ...wrong }).catch((error) => error);
  const { statusCode, isRetryable, message } = error;
  print(name, { class: error.name, statusCode, isRetryable, message });
}
const failed = [];
const broken = streamText({ ...asked, model: provider("gpt-5"), onError: ({ error }) => failed.push(error) });
await broken.consumeStream();
print("error of a stream", failed.map((error) => error.statusCode));
