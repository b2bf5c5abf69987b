"""Names of `kvboost_hf.engine`."""

from kvboost_hf.engine import group_by_prefix, kvboost
from kvboost_hf.engine.prompts import PromptEncoder
from kvboost_hf.engine.runner import Watch
from kvboost_hf.engine.settings import EngineSettings
