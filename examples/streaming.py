"""A model whose layers do not all stay on the device: one layer is kept, the others come when their turn comes.

Without a GPU there is nothing to copy to, so that here the layers are read from files.
"""

import tempfile

from transformers import AutoTokenizer

from kvboost_hf import ChunkReuseCache, StreamingConfig, load_streamed, streaming_plan, streaming_stats
from kvboost_hf.assets import EMBEDDED_MODEL_DIR

MODEL = EMBEDDED_MODEL_DIR  # in its place: "Qwen/Qwen2.5-32B-Instruct-AWQ"

with tempfile.TemporaryDirectory() as folder:  # better a place that stays: files are used again
    model = load_streamed(MODEL, StreamingConfig(keep_first_k=1, keep_last_k=0, disk_folder=folder))
    print(streaming_plan(model))
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    cache = ChunkReuseCache(model)
    for question in ("Where does Maria live?", "What does Maria like?"):
        messages = [
            {"role": "system", "content": "You read documents and answer questions about them."},
            {"role": "user", "content": f"Maria lives in Rome. She likes soup. She has two cats.\n\n{question}"},
        ]
        inputs = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=True, return_tensors="pt"
        ).to(model.device)
        out = model.generate(**inputs, cache=cache, max_new_tokens=24)
        print(tokenizer.decode(out[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
    print(streaming_stats(model))
