"""`Job`, its events, and the `Engine` protocol: the interface between the HTTP routes and the model's thread."""

from kvboost_hf.server.jobs.engine import DrainingError, Engine, QueueFullError, Ticket, TooLongError
from kvboost_hf.server.jobs.events import Event, Finished, FinishReason, Listener, Progress, TokenLogprob
from kvboost_hf.server.jobs.job import Constraint, ConstraintError, Job, Keep, Reuse, SamplingDefaults, SamplingOptions
from kvboost_hf.server.jobs.session import Session, SessionChange

__all__ = [
    "Constraint",
    "ConstraintError",
    "DrainingError",
    "Engine",
    "Event",
    "FinishReason",
    "Finished",
    "Job",
    "Keep",
    "Listener",
    "Progress",
    "QueueFullError",
    "Reuse",
    "SamplingDefaults",
    "SamplingOptions",
    "Session",
    "SessionChange",
    "Ticket",
    "TokenLogprob",
    "TooLongError",
]
