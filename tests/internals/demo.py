"""Names of `kvboost_hf.demo`."""

from kvboost_hf.demo.workloads import CHAT_SHAPE, AskedPrompt, linked_documents, shuffled_documents, workloads_for
