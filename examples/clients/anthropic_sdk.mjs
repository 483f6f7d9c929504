// Anthropic's SDK: its tool runner calls a tool and reads the result.
import { writeFileSync } from "node:fs";
import Anthropic from "@anthropic-ai/sdk";
import { betaTool } from "@anthropic-ai/sdk/helpers/beta/json-schema";

const client = new Anthropic({ baseURL: "http://127.0.0.1:8000", apiKey: "none" });
const note = betaTool({
  name: "write_note",
  description: "Write a note into made.txt.",
  inputSchema: { type: "object", properties: { text: { type: "string" } }, required: ["text"] },
  run: ({ text }) => {
    writeFileSync("made.txt", text);
    return "It is written.";
  },
});
const message = await client.beta.messages.toolRunner({
  model: "armature",
  max_tokens: 1000,
  tools: [note],
  messages: [{ role: "user", content: "Write fox into made.txt." }],
}).runUntilDone();
console.log(message.content.at(-1).text);
