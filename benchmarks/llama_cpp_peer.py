"""Run llama.cpp's server on a GGUF file, for a benchmark that measures kvboost_hf beside it.

The file is run by the interpreter of a virtual environment of its own, with `pip install xllamacpp`, which has the
server of llama.cpp in a wheel. It imports nothing else, and kvboost_hf never imports it:

    PEER_PYTHON benchmarks/llama_cpp_peer.py --gguf FILE --port PORT

The server has one thread unless more are named, eight slots of 4,096 tokens, and its own defaults else: it reuses the
prefix that a slot holds.
"""

import argparse
import signal

import xllamacpp  # type: ignore[import-not-found, unused-ignore]

_SLOTS, _CONTEXT = 8, 4096

parser = argparse.ArgumentParser()
parser.add_argument("--gguf", required=True)
parser.add_argument("--port", type=int, required=True)
parser.add_argument("--threads", type=int, default=1)
options = parser.parse_args()
settings = xllamacpp.CommonParams()
settings.model.path, settings.hostnames, settings.port = options.gguf, ["127.0.0.1"], options.port
settings.n_parallel, settings.n_ctx = _SLOTS, _SLOTS * _CONTEXT
settings.cpuparams.n_threads = settings.cpuparams_batch.n_threads = options.threads
server = xllamacpp.Server(settings)
signal.sigwait({signal.SIGTERM, signal.SIGINT})
