"""A chat that grows: each turn computes what is new in it, not what was said before."""

from transformers import AutoModelForCausalLM, AutoTokenizer

from kvboost_hf import ChunkReuseCache
from kvboost_hf.assets import EMBEDDED_MODEL_DIR

MODEL = EMBEDDED_MODEL_DIR  # in its place: "Qwen/Qwen2.5-3B-Instruct"
TURNS = [
    "Maria lives in Rome. She likes soup. She has two cats.\n\nWhere does Maria live?",
    "The lamp is red. It stands in the hall. It weighs ten pounds.\n\nWhat colour is the lamp?",
    "What does Maria like?",
    "Where is the lamp?",
]

model = AutoModelForCausalLM.from_pretrained(MODEL)
tokenizer = AutoTokenizer.from_pretrained(MODEL)
cache = ChunkReuseCache(model)

messages = [{"role": "system", "content": "You read documents and answer questions about them."}]
for turn in TURNS:
    messages.append({"role": "user", "content": turn})
    inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True, return_tensors="pt")
    out = model.generate(**inputs, cache=cache, max_new_tokens=24)
    answer = tokenizer.decode(out[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    messages.append({"role": "assistant", "content": answer})
    report = cache.report
    print(f"{answer}  [{report.prompt_tokens} tokens, {report.reused_tokens} of them reused]")
