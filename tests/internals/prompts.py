"""Names of `kvboost_hf.bench.prompts`."""

from kvboost_hf.bench.prompts import CHAT_SHAPE, AskedPrompt, linked_documents, shuffled_documents, workloads_for
