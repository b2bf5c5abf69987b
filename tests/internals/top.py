"""Names of the modules that are in no folder."""

from kvboost_hf import device_link, forks, handles, ngrams
from kvboost_hf.checksum import checksum, contents
from kvboost_hf.compatibility import known_architectures
from kvboost_hf.fields import add_flags, check_bounds, given, setting, shared
from kvboost_hf.handles import CodedKV, CodePlanes, KVHandle, PiecedKV, PieceTable, read_in_place
from kvboost_hf.kernels import kernel_calls
from kvboost_hf.ngrams import MAX_NGRAM, Continued, NgramIndex, common_prefix, most_frequent
from kvboost_hf.outputs import Progress, duration
from kvboost_hf.visibility import make_reach, make_tree, read_reach
