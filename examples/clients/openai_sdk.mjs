// OpenAI's SDK: chat and Responses.
import OpenAI from "openai";

const client = new OpenAI({ baseURL: "http://127.0.0.1:8000/v1", apiKey: "none" });
const messages = [{ role: "user", content: "Write fox into made.txt." }];
const answer = await client.chat.completions.create({ model: "armature", messages });
console.log(answer.choices[0].message.content);
