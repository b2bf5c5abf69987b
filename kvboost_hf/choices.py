"""Names that flags of commands take, apart from what they name, so that a wrong one is refused without torch."""

BENCH_ARMS = (
    *("plain", "exact", "exact-store", "blend", "blend-query", "blend-cacheblend", "blend-first_k"),
    *("blend-selective", "blend-none", "int8", "int4", "int2", "turboquant", "kvboost_fa2", "streamed"),
    *("draft", "lookup", "all"),
)
CHOSEN_BENCH_ARMS = ("plain", "exact", "exact-store", "blend")  # what users choose among; all else is named

PEERS = (
    *("hf-kept", "hf-deepcopy", "hf-quantized", "hf-offloaded", "hf-batching"),
    *("kvboost-none", "kvboost-selective", "kvboost-cacheblend"),
)
CHOSEN_PEERS = ("hf-kept",)  # what a user would write by hand

WORKLOADS = ("chat", "rag", "facts", "few-shot", "agent", "restart")  # of the embedded model
REAL_WORKLOADS = ("chat", "shuffled", "agent", "restart")  # of a model that is named

CHOSEN_VERIFY_ARMS = ("default", "progressive", "none", "selective")  # what users choose among
