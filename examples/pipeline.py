"""A pipeline that reuses what it has read: one line more."""

from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline

from kvboost_hf import attach, last_cache
from kvboost_hf.assets import EMBEDDED_MODEL_DIR

MODEL = EMBEDDED_MODEL_DIR  # in its place: "Qwen/Qwen2.5-3B-Instruct"
DOCUMENT = "Maria lives in Rome. She likes soup. She plays the piano. She has two cats. The lamp is red. " * 6

model = AutoModelForCausalLM.from_pretrained(MODEL)
pipe = pipeline("text-generation", model=attach(model), tokenizer=AutoTokenizer.from_pretrained(MODEL))
for question in ("Where does Maria live?", "What does Maria play?"):
    messages = [
        {"role": "system", "content": "You read documents and answer questions about them."},
        {"role": "user", "content": f"{DOCUMENT}\n\n{question}"},
    ]
    found = pipe(messages, max_new_tokens=24)
    print(found[0]["generated_text"][-1]["content"], f"[{last_cache(model).report}]")
