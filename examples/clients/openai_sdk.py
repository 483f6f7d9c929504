"""OpenAI's SDK: chat and Responses."""

from openai import OpenAI

client = OpenAI(base_url="http://127.0.0.1:8000/v1", api_key="none")
messages = [{"role": "user", "content": "Write fox into made.txt."}]
answer = client.chat.completions.create(model="armature", messages=messages)
print(answer.choices[0].message.content)
print(client.responses.create(model="armature", input=messages).output_text)
