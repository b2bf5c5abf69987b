"""Names of `kvboost_hf.engine`."""

from kvboost_hf.engine import group_by_prefix, kvboost
from kvboost_hf.engine.encode import PromptEncoder
from kvboost_hf.engine.settings import EngineSettings
from kvboost_hf.engine.watch import Watch
