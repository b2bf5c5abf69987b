"""A small model proposes tokens, and the large one checks several of them in one pass: the answer stays the same."""

from transformers import AutoModelForCausalLM, AutoTokenizer

from kvboost_hf import ChunkReuseCache, load_assistant, speculation_stats
from kvboost_hf.assets import EMBEDDED_DRAFT_DIR, EMBEDDED_MODEL_DIR

MODEL = EMBEDDED_MODEL_DIR  # in its place: "Qwen/Qwen2.5-32B-Instruct"
DRAFT = EMBEDDED_DRAFT_DIR  # in its place: "Qwen/Qwen2.5-1.5B-Instruct"
DOCUMENT = "Maria lives in Rome. She likes soup. She plays the piano. She has two cats. She works as a doctor."

model = AutoModelForCausalLM.from_pretrained(MODEL)
tokenizer = AutoTokenizer.from_pretrained(MODEL)
draft = load_assistant(AutoModelForCausalLM.from_pretrained(DRAFT), target=model)
cache = ChunkReuseCache(model)

for question in ("Where does Maria live?", "What does Maria play?"):
    messages = [
        {"role": "system", "content": "You read documents and answer questions about them."},
        {"role": "user", "content": f"{DOCUMENT}\n\n{question}"},
    ]
    inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True, return_tensors="pt")
    out = model.generate(**inputs, assistant_model=draft, cache=cache, max_new_tokens=24)
    print(tokenizer.decode(out[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
print(speculation_stats(draft))
