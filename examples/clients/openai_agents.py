"""OpenAI's Agents SDK: an agent calls a tool and reads the result."""

from agents import Agent, OpenAIResponsesModel, Runner, function_tool, set_tracing_disabled
from openai import AsyncOpenAI

set_tracing_disabled(True)  # traces would be sent to OpenAI
client = AsyncOpenAI(base_url="http://127.0.0.1:8000/v1", api_key="none")


@function_tool
def write_note(text: str) -> str:
    """Write a note into made.txt."""
    with open("made.txt", "w") as file:
        file.write(text)
    return "It is written."


agent = Agent(name="Writer", model=OpenAIResponsesModel("armature", client), tools=[write_note])
print(Runner.run_sync(agent, "Write fox into made.txt.").final_output)
