"""Anthropic's SDK: its tool runner calls a tool and reads the result."""

import anthropic


@anthropic.beta_tool
def write_note(text: str) -> str:
    """Write a note into made.txt."""
    with open("made.txt", "w") as file:
        file.write(text)
    return "It is written."


client = anthropic.Anthropic(base_url="http://127.0.0.1:8000", api_key="none")
runner = client.beta.messages.tool_runner(
    model="armature",
    max_tokens=1000,
    tools=[write_note],
    messages=[{"role": "user", "content": "Write fox into made.txt."}],
)
print(runner.until_done().content[-1].text)
