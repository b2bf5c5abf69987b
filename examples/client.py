"""A client of the server, which `kvboost-hf serve` starts: OpenAI's own package, and how much was reused."""

import os

from openai import OpenAI

DOCUMENT = "Maria lives in Rome. She likes soup. She plays the piano. She has two cats. The lamp is red. " * 4

client = OpenAI(base_url=os.environ.get("KVBOOST_URL", "http://127.0.0.1:8000/v1"), api_key="none")
model = client.models.list().data[0].id
for question in ("Where does Maria live?", "What does Maria play?"):
    messages = [
        {"role": "system", "content": "You read documents and answer questions about them."},
        {"role": "user", "content": f"{DOCUMENT}\n\n{question}"},
    ]
    found = client.chat.completions.create(model=model, messages=messages, temperature=0)
    usage = found.usage
    print(f"{found.choices[0].message.content}  [{usage.prompt_tokens} tokens, ", end="")
    print(f"{usage.prompt_tokens_details.cached_tokens} of them reused]")
