"""Names of `kvboost_hf.cli`."""

from kvboost_hf.cli import command_line, main
from kvboost_hf.cli.arguments import next_steps
from kvboost_hf.cli.config_file import apply_config
from kvboost_hf.cli.loading import load_model
from kvboost_hf.cli.measure import read_prompts
from kvboost_hf.cli.server_flags import add_options
from kvboost_hf.cli.server_settings import (
    add_secrets,
    draft_trees,
    engine_settings,
    server_settings,
    streaming_config,
)
from kvboost_hf.cli.serving import load_draft, model_name
from kvboost_hf.cli.warm import _chats
