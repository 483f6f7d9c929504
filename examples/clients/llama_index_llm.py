"""LlamaIndex's OpenAILike."""

from llama_index.llms.openai_like import OpenAILike

model = OpenAILike(
    model="armature",
    api_base="http://127.0.0.1:8000/v1",
    api_key="none",
    is_chat_model=True,
    is_function_calling_model=True,
    context_window=32768,
)
print(model.complete("Write fox into made.txt.").text)
