// Ask a server with Vercel's AI SDK: `node vercel_client.mjs URL MODULES [PICTURE]`. Prints what it got as JSON. With a
// picture, in base64, it asks about that alone.
import { createRequire } from "node:module";
import path from "node:path";

const [url, modules, picture] = process.argv.slice(2);
const load = createRequire(path.join(path.resolve(modules), "index.js"));
const { generateText, streamText, generateObject, tool } = load("ai");
const { createOpenAICompatible } = load("@ai-sdk/openai-compatible");
const { createOpenAI } = load("@ai-sdk/openai");
const { z } = load("zod");

const provider = createOpenAICompatible({
  name: "armature", baseURL: `${url}/v1`, apiKey: "none", supportsStructuredOutputs: true, includeUsage: true,
});
const model = provider("demo");
const prompt = "Tell me a story.";
const trip = z.object({ city: z.enum(["Paris", "Rome"]), days: z.number().int().min(1).max(9) });
const short = { model, prompt, temperature: 0, maxOutputTokens: 24, maxRetries: 0 };

if (picture) {
  const content = [{ type: "text", text: "What is it?" }, { type: "file", mediaType: "image/png", data: picture }];
  const asked = { model, messages: [{ role: "user", content }], temperature: 0, maxOutputTokens: 24, maxRetries: 0 };
  const { text, usage } = await generateText(asked);
  let streamed = "";
  for await (const part of streamText(asked).textStream) streamed += part;
  console.log(JSON.stringify({ text, streamed, prompt: usage.inputTokens }));
  process.exit(0);
}
const whole = await generateText(short);
const stream = streamText(short);
let streamed = "";
for await (const part of stream.textStream) streamed += part;
const { object } = await generateObject({ ...short, maxOutputTokens: 100, schema: trip });
const called = await generateText({
  ...short, maxOutputTokens: 100, tools: { go: tool({ inputSchema: trip }) }, toolChoice: "required",
});
const official = createOpenAI({ baseURL: `${url}/v1`, apiKey: "none" });
const responses = await generateText({ ...short, model: official("demo") });
console.log(JSON.stringify({
  text: whole.text, streamed, object, call: called.toolCalls[0].input,
  usage: (await stream.usage).outputTokens, responses: responses.text,
}));
