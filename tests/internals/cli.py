"""Names of `kvboost_hf.cli`."""

from kvboost_hf.cli import command_line, main
from kvboost_hf.cli.arguments import load_model, next_steps
from kvboost_hf.cli.server_flags import add_options
from kvboost_hf.cli.server_settings import (
    add_secrets,
    apply_config,
    draft_trees,
    engine_settings,
    server_settings,
    streaming_config,
)
from kvboost_hf.cli.serving import load_draft, model_name
from kvboost_hf.cli.warm import _chats
