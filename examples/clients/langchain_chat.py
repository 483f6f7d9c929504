"""LangChain's ChatOpenAI."""

from langchain_openai import ChatOpenAI

model = ChatOpenAI(model="armature", base_url="http://127.0.0.1:8000/v1", api_key="none")
print(model.invoke("Write fox into made.txt.").text)
