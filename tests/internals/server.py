"""Names of `kvboost_hf.server`."""

from collections.abc import Sequence

from transformers import PreTrainedModel

from kvboost_hf.server import jobs
from kvboost_hf.server.apis.anthropic.schema import MessagesRequest
from kvboost_hf.server.apis.histories import Histories
from kvboost_hf.server.apis.ollama.schema import OllamaChatRequest, OllamaGenerateRequest
from kvboost_hf.server.apis.openai.responses_schema import ResponseRequest
from kvboost_hf.server.apis.openai.routes import _mean
from kvboost_hf.server.app import make_app
from kvboost_hf.server.chats import encoding, tool_formats
from kvboost_hf.server.chats.calls import ToolCall
from kvboost_hf.server.chats.encoding import UNSURE_CHARS, Encoder, Reach, _Chat, reach_of
from kvboost_hf.server.chats.merging import Abilities, abilities_of, adapted, without_changing_lines
from kvboost_hf.server.chats.reasoning import AfterReasoning, AnswerFrame, ReasoningMarks, ReasoningReader, marks_in
from kvboost_hf.server.chats.template import CutText, KnownTools, Markers, Rendering, TokenCache
from kvboost_hf.server.chats.tool_formats import HERMES, LLAMA, MISTRAL, MISTRAL_NAMED, ToolSupport, format_of
from kvboost_hf.server.chats.tools import Parsed, ToolCallStream, joined
from kvboost_hf.server.chats.values import ValueReader, arguments_of, json_of
from kvboost_hf.server.cluster import (
    Answer,
    ClusterArgs,
    ReplicaLostError,
    front_app,
    lacking,
    merged,
    merged_figures,
    needed,
)
from kvboost_hf.server.engine import model_runner as memory
from kvboost_hf.server.engine import task, worker
from kvboost_hf.server.engine.belongings import Beginnings
from kvboost_hf.server.engine.embedding import EmbeddingJob, EmbeddingTurns
from kvboost_hf.server.engine.holdings import Holdings
from kvboost_hf.server.engine.intake import EngineLimits, Intake, WaitingLine
from kvboost_hf.server.engine.model_runner import ModelRunner, tokens_that_fit
from kvboost_hf.server.engine.neighbours import MemoryPlans
from kvboost_hf.server.engine.phases import Prefill, _piece_end
from kvboost_hf.server.engine.task import Task
from kvboost_hf.server.engine.worker import ModelEngine
from kvboost_hf.server.fair_share import FairCache, FairShare, FairTurns, Turns, may_hold
from kvboost_hf.server.generation.answer import Sampler, TextStream, choose_rows
from kvboost_hf.server.generation.batch import BatchKV, _BatchLayer
from kvboost_hf.server.generation.prefix_tree import PrefixTree
from kvboost_hf.server.generation.sharing import choose_attention, sharing_reason
from kvboost_hf.server.generation.speculation import AnswerDrafts, RowDrafts
from kvboost_hf.server.grammars import program
from kvboost_hf.server.grammars.compiling import Grammars
from kvboost_hf.server.grammars.fitting import fit
from kvboost_hf.server.grammars.patterns import rust
from kvboost_hf.server.grammars.schemas import closed, require_ends
from kvboost_hf.server.grammars.structured import GrammarConstraint, json_schema, regex, tool_calls
from kvboost_hf.server.http.connections import ConnectionLimits, Connections, LimitedProtocol, connections_that_fit
from kvboost_hf.server.http.errors import ApiError
from kvboost_hf.server.http.guard import Hosts, JsonLines, Unpacked
from kvboost_hf.server.http.listen import FrontServer, require_free
from kvboost_hf.server.http.metrics import Meter
from kvboost_hf.server.http.traces import otlp_provider
from kvboost_hf.server.jobs import (
    Constraint,
    Finished,
    FinishReason,
    Job,
    JobEvent,
    Keep,
    Listener,
    Progress,
    ReasoningSpan,
    SamplingDefaults,
    SamplingOptions,
    Session,
    SessionChange,
    TokenLogprob,
    prompt_salt,
)
from kvboost_hf.server.protocol import (
    DrainingError,
    Engine,
    ModelCard,
    QueueFullError,
    TooLongError,
    UnreachableTierError,
)
from kvboost_hf.server.requests.chat import ChatRequest
from kvboost_hf.server.requests.fields import Body
from kvboost_hf.server.requests.messages import Message, images_left_out, text_of_media
from kvboost_hf.server.requests.texts import CompletionRequest, WarmRequest
from kvboost_hf.server.routing import BELOW, GONE, MEMORY, News, Place, PrefixRouter, prompt_keys
from kvboost_hf.server.serve import _kind_of_drafts, _live_tokens, _warm, serve, start_engine
from kvboost_hf.server.settings import ServerSettings, TlsFiles, read_keys
from kvboost_hf.server.startup import Chosen, Startup, TextLines, write_log
from kvboost_hf.server.tier_check import InTiers, unfound


def embed(model: PreTrainedModel, ids: Sequence[int], *, piece: int | None = None) -> list[float]:
    """The embedding of one text, computed in pieces of so many tokens at most."""
    job = EmbeddingJob([ids])
    while not job.advance(model, piece):
        pass
    return job.future.result()[0]
