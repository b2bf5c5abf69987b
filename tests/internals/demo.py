"""Names of `kvboost_hf.demo`."""

from kvboost_hf.demo.real_text import workloads_for
from kvboost_hf.demo.series import Prompt
from kvboost_hf.demo.workloads import CHAT_SHAPE, linked_documents, shuffled_documents
