"""A cache that holds codes of 4 bits in place of keys and values: a long context in a fraction of the memory.

Answers may differ from those of plain generate().
"""

from transformers import AutoModelForCausalLM, AutoTokenizer

from kvboost_hf import ChunkReuseCache, KVQuantConfig
from kvboost_hf.assets import EMBEDDED_MODEL_DIR

MODEL = EMBEDDED_MODEL_DIR  # in its place: "Qwen/Qwen2.5-3B-Instruct"
DOCUMENT = "Maria lives in Rome. She likes soup. She plays the piano. She has two cats. The lamp is red. " * 40

model = AutoModelForCausalLM.from_pretrained(MODEL)
tokenizer = AutoTokenizer.from_pretrained(MODEL)
messages = [
    {"role": "system", "content": "You read documents and answer questions about them."},
    {"role": "user", "content": f"{DOCUMENT}\n\nWhere does Maria live?"},
]
inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True, return_tensors="pt")

exact = ChunkReuseCache(model)
codes = ChunkReuseCache(model, live_quant=KVQuantConfig(key_bits=4, value_bits=4, exact_layers=0))
for name, cache in (("exact", exact), ("codes", codes)):
    out = model.generate(**inputs, cache=cache, max_new_tokens=24)
    answer = tokenizer.decode(out[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    print(f"{name}: {cache.nbytes / 2**20:.2f} MiB for {cache.report.prompt_tokens} tokens. {answer}")
