"""An answer that follows a JSON schema, and a forced call of a function. Both hold for every model, however small."""

from openai import OpenAI
from pydantic import BaseModel, Field


class Animal(BaseModel):
    name: str = Field(max_length=20)
    legs: int = Field(ge=0, le=8)


client = OpenAI(base_url="http://127.0.0.1:8000/v1", api_key="none")
model = client.models.list().data[0].id
messages = [{"role": "user", "content": "Tell me about a fox."}]
answer = client.chat.completions.parse(model=model, messages=messages, response_format=Animal, max_tokens=100)
print(answer.choices[0].message.parsed)

schema = {"type": "object", "properties": {"animal": {"enum": ["fox", "hen"]}}, "required": ["animal"]}
find = {"type": "function", "function": {"name": "find", "description": "Find an animal", "parameters": schema}}
answer = client.chat.completions.create(
    model=model, messages=messages, tools=[find], tool_choice="required", parallel_tool_calls=False, max_tokens=100
)
call = answer.choices[0].message.tool_calls[0]
print(call.function.name, call.function.arguments)
result = {"role": "tool", "tool_call_id": call.id, "content": "It sleeps."}
answer = client.chat.completions.create(
    model=model, messages=[*messages, answer.choices[0].message, result], tools=[find], max_tokens=40
)
print(answer.choices[0].message.content)
