// Conversations as files: Markdown to read, JSON for programs.

import { el } from "./dom.js";
import { messageContent, messageText } from "./files.js";
import { titleOf } from "./history.js";

const SPEAKERS = { user: "You", tool: "Result of a tool" };

/** Return a conversation as Markdown, each column after the other. */
export function asMarkdown(conversation) {
  const { model, lanes, at } = conversation;
  const parts = [`# ${titleOf(conversation)}`, `${model ? `${model}, ` : ""}${new Date(at).toLocaleString()}`];
  for (const [index, { turns }] of lanes.entries()) {
    if (lanes.length > 1) parts.push(`## Column ${index + 1}`);
    for (const turn of turns) {
      parts.push(`**${SPEAKERS[turn.role] ?? (model || "Answer")}**`);
      for (const { name, picture } of turn.files ?? []) if (picture) parts.push(`*Picture: ${name}*`);
      const text = messageText(turn);
      if (text) parts.push(text);
      for (const { name, input } of turn.calls ?? []) parts.push(`Calls \`${name}\`:`, `\`\`\`json\n${input}\n\`\`\``);
      if (turn.error) parts.push(`*${turn.error}*`);
    }
  }
  return `${parts.join("\n\n")}\n`;
}

/** Return conversations as JSON: messages as in OpenAI's API, with the settings of each column. */
export function asJson(conversations) {
  const plain = conversations.map((each) => ({
    title: titleOf(each),
    model: each.model ?? null,
    mode: each.mode,
    changed: new Date(each.at).toISOString(),
    columns: each.lanes.map(({ settings, turns }) => ({ settings, messages: turns.map(toMessage) })),
  }));
  return `${JSON.stringify(plain, null, 2)}\n`;
}

function toMessage(turn) {
  const calls = turn.calls?.map(({ id, name, input }) => ({ id, type: "function", function: { name, arguments: input } }));
  return {
    role: turn.role,
    content: messageContent(turn),
    ...(turn.call ? { tool_call_id: turn.call } : {}),
    ...(turn.reasoning ? { reasoning_content: turn.reasoning } : {}),
    ...(calls?.length ? { tool_calls: calls } : {}),
    ...(turn.error ? { error: turn.error } : {}),
  };
}

/** Let the browser save a text as a file. */
export function download(name, text, type) {
  const address = URL.createObjectURL(new Blob([text], { type }));
  const link = el("a", { href: address, download: name, hidden: true });
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(address), 10_000);
}

/** Return a file's name for a title. */
export const fileName = (title, ending) => `${title.replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-|-$/g, "").slice(0, 60) || "conversation"}.${ending}`;
