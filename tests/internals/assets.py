"""Names of `kvboost_hf.assets`."""

from kvboost_hf.assets.texts import encode
from kvboost_hf.assets.world import MAX_SUBJECTS, ChatTurn, Document, chat_messages, make_chat, make_documents
