"""Retrieved documents in ever other orders: what is known of them is moved to where they now stand.

Answers may differ from those of plain generate(), so this prints both.
"""

from transformers import AutoModelForCausalLM, AutoTokenizer

from kvboost_hf import ChunkReuseCache, ChunkStore, ContentChunker, ReusePolicy
from kvboost_hf.assets import EMBEDDED_MODEL_DIR

MODEL = EMBEDDED_MODEL_DIR  # in its place: "Qwen/Qwen2.5-3B-Instruct"
SYSTEM = "You read documents and answer questions about them."
DOCUMENTS = {
    "people": (
        "Max works as a hunter. He lives in Denver. Max plays the tuba. Paula likes pears. She knows Lisa. Paula "
        "works as a gardener. Ben likes grapes. Ben wears a gold dress. He knows Jane. Ben plays the violin."
    ),
    "things": (
        "The pen comes from Lima. It is made of rubber. The pen is black. It costs sixty coins. The chair is green. "
        "It comes from Warsaw. The chair weighs sixty pounds. The lamp belongs to Ralph. It stands in the hall."
    ),
    "pets": (
        "Jane works as a guard. Fay wears a pink cap. Fay has twelve horses. Diana knows Nick. She wears a silver "
        "jacket. Diana plays the trumpet. Jane likes pizza. She has six goats. Fay lives in Rome."
    ),
}
QUESTIONS = [
    (("people", "things", "pets"), "Where does Max live?"),
    (("pets", "people", "things"), "What colour is the chair?"),
    (("things", "pets", "people"), "How many pets does Jane have?"),
]

model = AutoModelForCausalLM.from_pretrained(MODEL)
tokenizer = AutoTokenizer.from_pretrained(MODEL)
store = ChunkStore(model, chunker=ContentChunker.for_tokenizer(tokenizer, chunk_size=32))  # documents are short here
store.warm(documents=DOCUMENTS.values(), tokenizer=tokenizer)  # each computed once, alone
cache = ChunkReuseCache(model, store, ReusePolicy(mode="blend", min_prefill_saving=0))


def answer(inputs, **options):
    """The new text of a generate() call."""
    out = model.generate(**inputs, max_new_tokens=24, **options)
    return tokenizer.decode(out[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


for names, question in QUESTIONS:
    text = "\n\n".join([*(DOCUMENTS[name] for name in names), question])
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": text}]
    inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True, return_tensors="pt")
    blended, plain = answer(inputs, cache=cache), answer(inputs)
    print(f"{question} {blended} (plain: {plain})\n  {cache.report}")
