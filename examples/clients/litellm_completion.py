"""LiteLLM."""

import litellm

answer = litellm.completion(
    model="hosted_vllm/armature",
    api_base="http://127.0.0.1:8000/v1",
    messages=[{"role": "user", "content": "Write fox into made.txt."}],
)
print(answer.choices[0].message.content)
